"""Rows 3 and 10 of the cases: what is read now is never taken away, and what other weights computed is never read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tessera.admin.v1 import admin_pb2
from tests.e2e.client import Stream, make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import poll
from tests.e2e.prompts import Prompts
from tests.e2e.repeats import repeats
from tests.e2e.rig import START_SECONDS, Node
from tests.tiny_models import make_tiny_llama

B = 16
WARM_BLOCKS = 6


class Watch:
    """Samples of the Admin RPC while one request streams: the blocks that its lease holds all the while."""

    def __init__(self, node: Node, stream: Stream) -> None:
        assert stream.accepted is not None
        self._node, self._name = node, stream.accepted.request_id
        self.samples = 0
        self.idle_seen = 0  # samples in which blocks of others were evictable
        self.generations: dict[int, int] = {}

    def _held(self) -> tuple[int, list[int]]:
        found = [lease for lease in self._node.admin.leases() if lease.request_id == self._name]
        return (found[0].lease, list(found[0].blocks)) if found else (0, [])

    def sample(self) -> None:
        """What the lease holds before and after ListBlocks is held during it: never evictable, never given away."""
        lease, before = self._held()
        blocks = {block.block: block for block in self._node.admin.blocks()}
        same, after = self._held()
        if not lease or same != lease:
            return
        self.samples += 1
        self.idle_seen += any(block.evictable for block in blocks.values())
        for number in set(before) & set(after):
            block = blocks[number]
            assert not block.evictable and block.state == admin_pb2.BLOCK_STATE_ACTIVE, block
            assert self.generations.setdefault(number, block.generation) == block.generation, "it was handed out again"


@repeats(50, few=1)
def test_row_03_blocks_in_use_are_never_evicted(
    slow_node: Node, solo: Solo, tiny_model: Path, seed: int, rounds: int
) -> None:
    """A stream on a warm prefix beside 20 prompts that force evictions: equal solo, and Admin never lists one of its
    blocks as evictable, though it lists those of others."""
    for number in range(rounds):
        prompts = Prompts(tiny_model, seed + number)
        slow_node.fresh()
        warm = prompts.tokens(WARM_BLOCKS * B)
        slow_node.generate(make_request(warm, new=1))
        before = slow_node.quiet()
        resident = {block.block for block in slow_node.admin.blocks() if block.evictable}
        assert len(resident) == WARM_BLOCKS, "positive control: with no reader the prefix is evictable"
        request = make_request([*warm, *prompts.tokens(5)], new=200)
        fillers = [make_request(prompts.tokens(12 * B - 4), new=4) for _ in range(20)]
        stream = slow_node.stream(request)
        stream.read(1)
        watch = Watch(slow_node, stream)
        with ThreadPoolExecutor(max_workers=3) as pool:
            reply = pool.submit(stream.finish)
            sent = [pool.submit(slow_node.generate, filler) for filler in fillers]
            while not reply.done():
                watch.sample()
            during = slow_node.admin.snapshot().evictions - before.evictions
            for filler, result in zip(fillers, sent, strict=True):
                solo.check(filler, result.result())
        solo.check(request, reply.result())
        assert reply.result().cached_tokens == WARM_BLOCKS * B
        assert resident <= set(watch.generations), "positive control: it read the warm blocks"
        assert during > WARM_BLOCKS, "positive control: the prompts forced evictions while it streamed"
        assert watch.samples > 5 and watch.idle_seen, "positive control: blocks of others were evictable meanwhile"
        slow_node.quiet()
        print(f"round {number}: {watch.samples} samples, {during} blocks evicted meanwhile")


def restart(node: Node, model: Path, number: int) -> None:
    """Ends everything but the cache manager and starts it again on other weights."""
    for name in [name for name in node.processes if name != "cachemgr"]:
        node.processes.pop(name).stop()
    node.add(f"decoder-{number}", node.command("decoder", "--decoder-index", "0", "--model", str(model)))
    node.add(f"gateway-{number}", node.command("gateway", "--model", str(model)))
    poll(node.admin.sessions, within=START_SECONDS, what="the decoder has attached")


@pytest.mark.parametrize("back", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "full"])
def test_row_10_other_weights_never_read_what_these_computed(
    tiny_model: Path, solo: Solo, prompts: Prompts, tmp_path: Path, back: bool
) -> None:
    """The decoder comes back with other weights: nothing hits, though it is resident, and the reply is that of the new
    weights, after an eviction of everything too; back on the old ones, what they had computed is a hit."""
    other = make_tiny_llama(tmp_path / "other", seed=1)
    request = make_request(prompts.tokens(4 * B))
    with Node(other, options=["--threads", "1"]) as node:
        old = node.generate(request)
        assert old.token_ids != solo(request).token_ids, "positive control: the weights differ"
        computed = node.quiet().indexed_blocks
        restart(node, tiny_model, 1)
        swapped = node.again(request)
        assert swapped.cached_tokens == 0
        solo.check(request, swapped)
        assert node.quiet().indexed_blocks == 2 * computed, "positive control: both are resident"
        assert node.generate(request).cached_tokens == 4 * B - 1, "positive control: it does hit its own"
        if back:
            restart(node, other, 2)
            again = node.again(request)
            assert (again.cached_tokens, again.token_ids) == (4 * B - 1, old.token_ids)
            restart(node, tiny_model, 3)
        node.fresh()
        cold = node.again(request)
        assert cold.cached_tokens == 0
        solo.check(request, cold)
        node.quiet()
