"""Fencing with real processes: a decoder that was stopped and goes on too late harms nobody, one that goes on in time
loses nothing, and neither does anybody while the cache manager stands still."""

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
LEASE_SECONDS = 2.0
GRACE_SECONDS = 10.0


@pytest.fixture(scope="module")
def shared_fenced(tiny_model: Path) -> Iterator[Node]:
    """Two decoders whose steps are nearly all delay, with short leases, on a pool of 64 blocks."""
    options = ["--threads", "1", "--max-batch", "4"]
    options += ["--lease-seconds", str(LEASE_SECONDS), "--grace-seconds", str(GRACE_SECONDS)]
    with Node(tiny_model, pool_blocks=64, decoders=2, options=options, faults=["step_delay=0.05"]) as node:
        connected = lambda: node.log_text().count("decoder_connected") >= 2  # noqa: E731
        poll(connected, within=START_SECONDS, what="the gateway is connected to both decoders")
        poll(lambda: len(node.admin.sessions()) == 2, within=START_SECONDS, what="both decoders are attached")
        yield node


@pytest.fixture
def fenced(shared_fenced: Node) -> Iterator[Node]:
    """The two decoders, quiet and empty before the test and quiet after it."""
    poll(lambda: not shared_fenced.busy(), within=20, what="what the test before left has ended")
    shared_fenced.fresh()
    yield shared_fenced
    shared_fenced.quiet()


def generations(node: Node) -> dict[int, int]:
    """How often each block has been handed out."""
    return {block.block: block.generation for block in node.admin.blocks()}


def test_a_decoder_that_goes_on_too_late_lands_nothing(fenced: Node, solo: Solo, prompts: Prompts) -> None:
    """SIGSTOP in mid-step, its lease lapses, others' work takes over the cached blocks that it was reading, SIGCONT:
    its client gets UNAVAILABLE and no wrong token, its messages are refused, nothing in the cache has changed."""
    request = make_request(prompts.tokens(4 * B), new=300)
    warm = make_request(list(request.token_ids.ids), new=1)
    solo.check(warm, fenced.generate(warm))
    fenced.quiet()
    stream = fenced.stream(request)
    stream.read(5)
    assert stream.accepted is not None and stream.accepted.cached_tokens == 4 * B - 1
    lease = fenced.admin.leases()[0]
    session = next(item for item in fenced.admin.sessions() if item.session == lease.session)
    shared, before = list(lease.blocks[:3]), generations(fenced)
    refused = fenced.admin.snapshot().fenced_operations
    silent = fenced.log_text().count("decoder_silent")
    os.kill(session.process_id, signal.SIGSTOP)
    try:
        poll(lambda: not fenced.admin.leases(), within=20, what="the lease has lapsed")
        assert fenced.admin.snapshot().quarantined_blocks > 0, "its writer may still be alive"
        poll(
            lambda: fenced.log_text().count("decoder_silent") > silent, within=20,
            what="the gateway sends nothing new to the stopped decoder",
        )  # fmt: skip
        others = [make_request(prompts.tokens(12 * B), new=2) for _ in range(6)]
        for other, result in zip(others, fenced.together(others[:4]) + fenced.together(others[4:]), strict=True):
            solo.check(other, result)
        after = generations(fenced)
        assert all(after[block] != before[block] for block in shared), "positive control: others have its blocks now"
        assert fenced.admin.violations() == []
    finally:
        os.kill(session.process_id, signal.SIGCONT)
    with pytest.raises(grpc.RpcError) as caught:
        stream.finish()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, caught.value
    given = stream.samples[0].token_ids
    assert given == solo(request).samples[0].token_ids[: len(given)]
    poll(lambda: not fenced.admin.snapshot().quarantined_blocks, within=20, what="the quarantine is over")
    poll(lambda: len(fenced.admin.sessions()) == 2, within=START_SECONDS, what="both decoders are attached")
    assert session.session not in {item.session for item in fenced.admin.sessions()}, "the old session stays ended"
    assert fenced.admin.snapshot().fenced_operations > refused
    assert fenced.admin.violations() == []
    for other in others:
        solo.check(other, fenced.again(other))
    solo.check(warm, fenced.again(warm))


@pytest.mark.slow
def test_a_stopped_decoder_ends_its_streams_in_bounded_time(fenced: Node, solo: Solo, prompts: Prompts) -> None:
    """SIGSTOP and nothing else: its client is told UNAVAILABLE within the gateway's patience, while it is stopped."""
    stream = fenced.stream(make_request(prompts.tokens(B), new=300))
    stream.read(3)
    stopped = next(item.process_id for item in fenced.admin.sessions() if item.leases)
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(grpc.RpcError) as caught:
            stream.finish()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, caught.value
        request = make_request(prompts.tokens(2 * B), new=4)
        solo.check(request, fenced.again(request))
    finally:
        os.kill(stopped, signal.SIGCONT)
    poll(lambda: len(fenced.admin.sessions()) == 2, within=START_SECONDS, what="both decoders are attached")


def test_a_decoder_that_goes_on_in_time_loses_nothing(fenced: Node, solo: Solo, prompts: Prompts) -> None:
    """Stopped for less than a lease, several times: the stream comes to its end, equal solo, in the same session."""
    request = make_request(prompts.tokens(2 * B), new=60)
    sessions = {item.session for item in fenced.admin.sessions()}
    call = fenced.background(request)
    poll(fenced.admin.leases, within=20, what="the stream runs")
    process = next(item.process_id for item in fenced.admin.sessions() if item.leases)
    for _ in range(3):
        told = call.stream.num_tokens
        os.kill(process, signal.SIGSTOP)
        try:
            poll(lambda: _seconds_left(fenced, process) < LEASE_SECONDS / 2, within=10, what="half the lease is gone")
        finally:
            os.kill(process, signal.SIGCONT)
        poll(lambda: call.stream.num_tokens > told, within=10, what="it goes on")  # noqa: B023
    solo.check(request, call.result())
    assert {item.session for item in fenced.admin.sessions()} == sessions


def _seconds_left(node: Node, process: int) -> float:
    return next(item.lease_seconds_left for item in node.admin.sessions() if item.process_id == process)


def test_a_cache_manager_that_stands_still_costs_no_stream(fenced: Node, solo: Solo, prompts: Prompts) -> None:
    """SIGSTOP of the cache manager for longer than a lease: tokens stop then, for nobody knows; after SIGCONT the
    decoders come back to their sessions, and every stream ends equal to its solo run."""
    requests = [make_request(prompts.tokens(2 * B + number), new=90) for number in range(4)]
    calls = [fenced.background(request) for request in requests]
    poll(lambda: len(fenced.admin.leases()) == 4, within=20, what="all of them run")
    broken = fenced.log_text().count("session_broken")
    daemon = fenced.processes["cachemgr"]
    daemon.send(signal.SIGSTOP)
    try:
        poll(
            lambda: fenced.log_text().count("session_broken") > broken, within=20,
            what="a decoder has given its stream up",
        )  # fmt: skip
    finally:
        daemon.send(signal.SIGCONT)
    for request, call in zip(requests, calls, strict=True):
        solo.check(request, call.result())
    assert "session_resumed" in fenced.log_text()
