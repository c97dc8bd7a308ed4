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
PREFIX = 4 * B
LEASE_SECONDS = 120.0


@pytest.fixture(scope="module")
def shared_pair(tiny_model: Path) -> Iterator[Node]:
    """Two slow decoders on a pool of 64 blocks."""
    options = ["--threads", "1", "--max-batch", "4"]
    with Node(tiny_model, pool_blocks=64, decoders=2, options=options, faults=["step_delay=0.02"]) as node:
        node.await_decoders()
        yield node


@pytest.fixture
def pair(shared_pair: Node) -> Iterator[Node]:
    """The two decoders, quiet and empty before the test and quiet after it."""
    shared_pair.fresh()
    yield shared_pair
    shared_pair.quiet()


def sessions(node: Node) -> dict[int, int]:
    """Session -> process id of each attached decoder."""
    return {session.session: session.process_id for session in node.admin.sessions()}


def resident(node: Node, num_tokens: int) -> list[int]:
    """Every block of the index that begins before this token, in order of its place."""
    parts = sorted(node.admin.prefixes(), key=lambda prefix: prefix.start_token)
    return [b for part in parts for i, b in enumerate(part.blocks) if part.start_token + i * B < num_tokens]


def warm_up(node: Node, solo: Solo, prompts: Prompts) -> tuple[list[int], list[int], int]:
    """A prefix of whole blocks, no tail of `prompts` cached behind it; its blocks; the process that computed it."""
    tokens = prompts.tokens(PREFIX)
    request = make_request(tokens, new=6, bias={0: 100.0})
    call = node.background(request)
    leases = poll(node.admin.leases, within=20, what="the prefix is being computed")
    solo.check(request, call.result())
    node.quiet()
    return tokens, resident(node, PREFIX), sessions(node)[leases[0].session]


def test_both_decoders_read_one_copy_of_a_prefix(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """More requests than one decoder takes, with one cached prefix: the very blocks that one of them computed are in
    the tables of both at once; none is copied, handed out again or resident a second time, and all equal solo."""
    prefix, warm, computed_by = warm_up(pair, solo, prompts)
    assert len(set(warm)) == 4
    before = pair.quiet()
    generations = {block.block: block.generation for block in pair.admin.blocks()}
    requests = [make_request([*prefix, *prompts.tokens(5)], new=60) for _ in range(8)]
    running = [pair.background(request) for request in requests]

    def readers() -> set[int]:
        leases = pair.admin.leases()
        return {lease.session for lease in leases if list(lease.blocks[:4]) == warm}

    found = poll(lambda: held if len(held := readers()) == 2 else None, within=20, what="both sessions hold its blocks")
    processes = {sessions(pair)[session] for session in found or ()}
    assert computed_by in processes and len(processes) == 2, "one reads what it computed, the other what it did not"
    leases = {lease.lease: list(lease.blocks) for lease in pair.admin.leases()}
    blocks = {block.block: block for block in pair.admin.blocks()}
    later = {lease.lease: list(lease.blocks) for lease in pair.admin.leases()}
    holding = sum(table[:4] == warm == later.get(lease, [])[:4] for lease, table in leases.items())
    assert holding >= 2
    for number in warm:
        assert blocks[number].references - int(blocks[number].published) >= holding, "one block, many references"
        assert blocks[number].generation == generations[number], "it is the block that was computed then"
    private = [number for table in leases.values() for number in table[4:]]
    assert len(private) == len(set(private)), "beyond the prefix nothing is shared"
    for request, call in zip(requests, running, strict=True):
        result = call.result()
        solo.check(request, result)
        assert (result.cached_tokens, result.usage.cow_copies) == (4 * B, 0)
    after = pair.quiet()
    assert after.cow_copies == before.cow_copies
    assert resident(pair, PREFIX) == warm, "it is resident once, where it was"
    assert after.indexed_blocks == before.indexed_blocks + 8 * 4, "the tails are, and nothing else"


@pytest.mark.parametrize(
    "computed", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["who computed it", "who read it"]
)
def test_the_death_of_one_decoder_leaves_the_other_serving(
    pair: Node, solo: Solo, prompts: Prompts, computed: bool
) -> None:
    """kill -9 of the one that computed a prefix, or of the other, while both read it: the calls of the dead one are
    UNAVAILABLE, those of the other equal solo, new calls are served at once, from the same blocks."""
    prefix, warm, computed_by = warm_up(pair, solo, prompts)
    requests = [make_request([*prefix, *prompts.tokens(2)], new=80) for _ in range(8)]
    running = [pair.background(request) for request in requests]
    busy = lambda: all(session.leases for session in pair.admin.sessions())  # noqa: E731
    poll(busy, within=20, what="both decoders have work")
    victim = next(
        process for name, process in pair.processes.items()
        if name.startswith("decoder") and (process.pid == computed_by) == computed
    )  # fmt: skip
    connections = pair.log_text().count("decoder_connected")
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
    request = make_request([*prefix, *prompts.tokens(B)], new=30)
    call = pair.background(request)
    tables = poll(lambda: [list(lease.blocks) for lease in pair.admin.leases()], within=20, what="it is admitted")
    assert tables[0][:4] == warm, "the other goes on with the same blocks"
    solo.check(request, call.result())
    pair.quiet()
    victim.start()
    poll(lambda: victim.pid in sessions(pair).values(), within=START_SECONDS, what="the new decoder is attached")
    # Until then the gateway gives all requests to the other one, which the next test would see.
    again = lambda: pair.log_text().count("decoder_connected") > connections  # noqa: E731
    poll(again, within=START_SECONDS, what="the gateway is connected to the new decoder")


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
