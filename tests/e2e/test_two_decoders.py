"""Two decoders on one cache: one copy of a prefix serves both, and the death of one costs only what ran on it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.e2e.client import make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import poll
from tests.e2e.prompts import Prompts
from tests.e2e.rig import START_SECONDS, Node

B = 16
LEASE_SECONDS = 120.0


@pytest.fixture(scope="module")
def shared_pair(tiny_model: Path) -> Iterator[Node]:
    """Two slow decoders on a pool of 64 blocks."""
    options = ["--threads", "1", "--max-batch", "4"]
    with Node(tiny_model, pool_blocks=64, decoders=2, options=options, faults=["step_delay=0.02"]) as node:
        poll(lambda: len(node.admin.sessions()) == 2, within=START_SECONDS, what="both decoders are attached")
        connected = lambda: node.log_text().count("decoder_connected") >= 2  # noqa: E731
        poll(connected, within=START_SECONDS, what="the gateway is connected to both decoders")
        yield node


@pytest.fixture
def pair(shared_pair: Node) -> Iterator[Node]:
    """The two decoders, quiet and empty before the test and quiet after it."""
    shared_pair.fresh()
    yield shared_pair
    shared_pair.quiet()


def test_both_decoders_read_one_copy_of_a_prefix(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """More requests than one decoder takes, with one cached prefix: both work on the same blocks, all equal solo."""
    prefix = prompts.tokens(4 * B)
    warm = make_request(prefix, new=2)
    solo.check(warm, pair.generate(warm))
    pair.quiet()
    requests = [make_request([*prefix, *prompts.tokens(5)], new=60) for _ in range(8)]
    running = [pair.background(request) for request in requests]

    def sharing() -> set[int]:
        leases = pair.admin.leases()
        return {lease.session for lease in leases if list(lease.blocks[:4]) == list(leases[0].blocks[:4])}

    poll(lambda: len(sharing()) == 2, within=20, what="leases of both sessions hold the same blocks")
    for request, call in zip(requests, running, strict=True):
        result = call.result()
        solo.check(request, result)
        assert result.cached_tokens == 4 * B


def test_the_death_of_one_decoder_leaves_the_other_serving(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """kill -9 of one of two: its calls are UNAVAILABLE, those of the other equal solo, new calls are served at once."""
    requests = [make_request(prompts.tokens(2 * B), new=80) for _ in range(8)]
    running = [pair.background(request) for request in requests]

    def sessions() -> dict[int, int]:
        return {session.process_id: session.leases for session in pair.admin.sessions()}

    poll(lambda: all(sessions().values()), within=20, what="both decoders have work")
    victim = pair.processes["decoder-0"]
    victim.kill()
    served = lost = 0
    for request, call in zip(requests, running, strict=True):
        try:
            solo.check(request, call.result())
            served += 1
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            lost += 1
    assert served, "what ran on the other decoder went on"
    assert lost, "positive control: something ran on the dead one"
    request = make_request(prompts.tokens(B), new=8)
    solo.check(request, pair.generate(request))
    pair.quiet()
    victim.start()
    poll(lambda: victim.pid in sessions(), within=START_SECONDS, what="the new decoder is attached")


@pytest.mark.slow
def test_row_25_a_stopped_decoder_gives_its_blocks_back_and_is_fenced(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """SIGSTOP in a request that is then cancelled: within the lease limit its blocks are quarantined and the other
    decoder serves; after SIGCONT the old session is refused, nothing is corrupted and everything is free again."""
    stream = pair.stream(make_request(prompts.tokens(3 * B), new=300))
    stream.read(5)
    stopped = next(session.process_id for session in pair.admin.sessions() if session.leases)
    old_session = next(session.session for session in pair.admin.sessions() if session.process_id == stopped)
    os.kill(stopped, signal.SIGSTOP)
    try:
        stream.cancel()
        poll(lambda: not pair.admin.snapshot().leases, within=LEASE_SECONDS, what="the lease has ended")
        assert pair.admin.snapshot().quarantined_blocks > 0, "its writer may still be alive"
        assert pair.admin.violations() == []
        requests = [make_request(prompts.tokens(4 * B), new=12) for _ in range(4)]
        for request in requests:
            solo.check(request, pair.again(request))
    finally:
        os.kill(stopped, signal.SIGCONT)
    poll(lambda: not pair.admin.snapshot().quarantined_blocks, within=20, what="the quarantine is over")
    poll(lambda: len(pair.admin.sessions()) == 2, within=START_SECONDS, what="both decoders are attached")
    assert old_session not in {session.session for session in pair.admin.sessions()}, "the old session stays ended"
    for request in requests:
        solo.check(request, pair.again(request))
