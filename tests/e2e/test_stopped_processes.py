"""SIGSTOP and SIGCONT of a gateway and of a client: they miss nothing, and nobody else waits for them
(`test_fencing.py` stops decoders and the cache manager)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import make_request
from tests.e2e.client_process import client_process, outcomes
from tests.e2e.oracle import Solo
from tests.e2e.processes import poll
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node

B = 16
WINDOW = 16


@pytest.fixture(scope="module")
def windowed(tiny_model: Path) -> Iterator[Node]:
    """A slow node that lets a sample run a little ahead of its reader, with short leases."""
    options = ["--threads", "1", "--window-tokens", str(WINDOW), "--lease-seconds", "2", "--grace-seconds", "2"]
    with Node(tiny_model, faults=["step_delay=0.02"], options=options) as node:
        yield node
        node.quiet()


def test_a_stopped_gateway_pauses_its_streams_and_loses_nothing(windowed: Node, solo: Solo, prompts: Prompts) -> None:
    """While the gateway stands still for longer than a lease, its sample runs into its window and is paused, leases and
    sessions live on; after SIGCONT the client gets every token."""
    request = make_request(prompts.tokens(2 * B), new=120)
    before = windowed.quiet()
    running = windowed.background(request)
    poll(lambda: running.stream.num_tokens > 3, within=20, what="tokens come")
    session = windowed.admin.sessions()[0]
    gateway = windowed.processes["gateway"]
    gateway.send(signal.SIGSTOP)
    try:
        told = running.stream.num_tokens
        age = windowed.admin.leases()[0].age_seconds
        poll(lambda: windowed.admin.leases()[0].age_seconds > age + 2.2, within=20, what="more than a lease has passed")
        generated = windowed.admin.snapshot().generated_tokens - before.generated_tokens
        assert told <= generated <= told + 2 * WINDOW + 10, f"{generated} generated, {told} told: it is not paused"
        assert [item.session for item in windowed.admin.sessions()] == [session.session]
        assert windowed.admin.violations() == []
    finally:
        gateway.send(signal.SIGCONT)
    solo.check(request, running.result())
    windowed.quiet()


def test_a_stopped_client_holds_nobody_up(windowed: Node, solo: Solo, prompts: Prompts, tmp_path: Path) -> None:
    """While a client stands still, others are served; after SIGCONT it has every token."""
    requests = [make_request(prompts.tokens(2 * B), new=120) for _ in range(2)]
    before = windowed.quiet().generated_tokens
    client = client_process(windowed, requests, tmp_path)
    client.start()
    try:
        poll(lambda: windowed.admin.snapshot().generated_tokens > before + 5, within=60, what="the client is served")
        client.send(signal.SIGSTOP)
        others = [make_request(prompts.tokens(3 * B), new=60) for _ in range(2)]
        for other, result in zip(others, windowed.together(others), strict=True):
            solo.check(other, result)
        assert client.status() is None and "[[" not in client.text(), "positive control: it is not done"
        client.send(signal.SIGCONT)
        assert client.wait(60) == 0
    finally:
        client.kill()
    assert outcomes(client) == [[solo(request).token_ids] for request in requests]
    windowed.quiet()
