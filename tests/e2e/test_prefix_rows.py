"""Rows 2, 4, 5, 6, 8, 9, 10, 16 of the cases: the cache reuses exactly what is equal and never changes a reply."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tessera.admin.v1 import admin_pb2
from tests.e2e.client import make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import poll
from tests.e2e.prompts import Prompts
from tests.e2e.repeats import repeats
from tests.e2e.rig import Node

B = 16


def test_row_02_an_evicted_block_is_neither_matched_nor_lost(node: Node, solo: Solo, prompts: Prompts) -> None:
    """After an eviction of everything nothing hits, and what is sent then is cached anew."""
    for _ in range(3):
        node.fresh()
        first, second = make_request(prompts.tokens(8 * B)), make_request(prompts.tokens(8 * B))
        solo.check(first, node.generate(first))
        hit = node.generate(first)
        assert hit.cached_tokens == 8 * B - 1, "positive control: the prompt is cached before the eviction"
        node.quiet()
        node.admin.evict_all()
        assert node.admin.snapshot().indexed_blocks == 0
        assert not any(block.published for block in node.admin.blocks())
        assert node.admin.prefixes() == []
        solo.check(second, node.generate(second))
        again = node.generate(first)
        assert again.cached_tokens == 0
        solo.check(first, again)
        warm = node.generate(second)
        assert warm.cached_tokens == 8 * B - 1
        solo.check(second, warm)


@pytest.mark.parametrize("length", [B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1])
@repeats(50, few=1)
def test_row_04_a_shared_prefix_of_about_a_block_is_reused_to_the_token(
    node: Node, solo: Solo, tiny_model: Path, seed: int, length: int, rounds: int
) -> None:
    """Six concurrent requests share L tokens and equal solo; a second wave reuses exactly L, with one copy each."""
    for number in range(rounds):
        prompts = Prompts(tiny_model, seed + number)
        node.fresh()
        shared = prompts.tokens(length)
        waves = [[make_request([*shared, *prompts.tokens(5)], new=8) for _ in range(6)] for _ in range(2)]
        alone = [make_request(prompts.tokens(20), new=8) for _ in range(2)]
        for request, result in zip(waves[0] + alone, node.together(waves[0] + alone), strict=True):
            solo.check(request, result)
        before = node.quiet()
        results = node.together(waves[1])
        for request, result in zip(waves[1], results, strict=True):
            solo.check(request, result)
        assert [result.cached_tokens for result in results] == [length] * 6
        copies = 1 if length % B else 0
        assert [result.usage.cow_copies for result in results] == [copies] * 6
        after = node.quiet()
        assert after.cow_copies - before.cow_copies == 6 * copies
        assert (after.hits - before.hits, after.hit_tokens - before.hit_tokens) == (6, 6 * length)


@pytest.mark.parametrize("length", [k * B + d for k in (1, 2, 5) for d in (-1, 0, 1)])
def test_row_05_the_same_prompt_three_times_gives_one_reply(
    node: Node, solo: Solo, prompts: Prompts, length: int
) -> None:
    """A wholly cached prompt still computes its last token, and the reply does not change."""
    request = make_request(prompts.tokens(length))
    results = [node.generate(request) for _ in range(3)]
    for result in results:
        solo.check(request, result)
    assert [result.cached_tokens for result in results] == [0, length - 1, length - 1]


def test_row_05_the_same_prompt_at_once_gives_one_reply(node: Node, solo: Solo, prompts: Prompts) -> None:
    """Equal prompts that are computed at the same time agree, and nothing is held afterwards."""
    for length in (B, 3 * B + 1, 5 * B):
        request = make_request(prompts.tokens(length))
        for result in node.together([request] * 4):
            solo.check(request, result)
        node.quiet()


def test_row_06_a_partial_match_never_brings_the_other_tail(node: Node, solo: Solo, prompts: Prompts) -> None:
    """Two prompts that part inside their third block: each equals solo, reuse is to the token, with one copy."""
    shared = prompts.tokens(2 * B + 7)
    one, two = (make_request([*shared, *prompts.tokens(2 * B)]) for _ in range(2))
    solo.check(one, node.generate(one))
    before = node.quiet()
    result = node.generate(two)
    solo.check(two, result)
    after = node.quiet()
    assert result.cached_tokens == 2 * B + 7
    assert (result.usage.cow_copies, after.cow_copies - before.cow_copies) == (1, 1)
    again = node.generate(one)
    solo.check(one, again)
    assert again.cached_tokens == 4 * B + 6


def test_every_split_point_inside_a_block_is_reused_to_the_token(node: Node, solo: Solo, prompts: Prompts) -> None:
    """For each split of a block the second prompt reuses exactly the common part and equals its solo run."""
    base = prompts.tokens(3 * B)
    whole = make_request(base, new=4)
    solo.check(whole, node.generate(whole))
    for split in range(B, 2 * B + 1):
        other = make_request([*base[:split], prompts.first(), *prompts.tokens(6)], new=4)
        if other.token_ids.ids[split] == base[split]:
            other.token_ids.ids[split] = base[split] - 1 if base[split] > 3 else base[split] + 1
        result = node.generate(other)
        solo.check(other, result)
        assert result.cached_tokens == split


def test_row_08_equal_hashes_never_authorise_reuse(tiny_model: Path, solo: Solo, prompts: Prompts) -> None:
    """With hashes of four bits every reply still equals solo, collisions are counted, and no wrong token is reused."""
    requests = [make_request(prompts.tokens(2 * B), new=4) for _ in range(40)]
    with Node(tiny_model, pool_blocks=128, faults=["weak_hash=4"]) as weak:
        for request in requests:
            result = weak.generate(request)
            solo.check(request, result)
            assert result.cached_tokens == 0
        for request in requests:
            result = weak.generate(request)
            solo.check(request, result)
            assert result.cached_tokens == 2 * B - 1, "positive control: the right prompt does hit"
        assert weak.quiet().hash_collisions > 0


def check_parents(node: Node) -> None:
    """No node of the index is without its parent."""
    prefixes = node.admin.prefixes()
    names = {prefix.node for prefix in prefixes}
    assert all(prefix.parent in names or prefix.parent == 0 for prefix in prefixes)


def test_row_09_eviction_takes_the_tail_of_a_prompt_first(node: Node, solo: Solo, prompts: Prompts) -> None:
    """Where one block of a prompt must go, the rest stays usable; no node is ever without its parent."""
    for _ in range(3):
        node.fresh()
        old = make_request(prompts.tokens(8 * B), new=1)
        node.generate(old)
        target = node.quiet().total_blocks
        while node.quiet().free_blocks >= 2:
            node.generate(make_request(prompts.tokens(2 * B), new=1))
            check_parents(node)
        last = node.background(make_request(prompts.tokens((node.quiet().free_blocks + 1) * B), new=1))
        while last.is_alive():
            check_parents(node)
        last.result()
        check_parents(node)
        now = node.quiet()
        assert now.cached_blocks == target, "positive control: the pool is full"
        result = node.generate(old)
        solo.check(old, result)
        assert result.cached_tokens == 7 * B


def test_row_10_eviction_of_everything_is_refused_or_complete(slow_node: Node, solo: Solo, prompts: Prompts) -> None:
    """While a stream runs, EvictBlocks(all) says FAILED_PRECONDITION or leaves nothing; never OK with entries left."""
    request = make_request(prompts.tokens(3 * B), new=60)
    stream = slow_node.stream(request)
    stream.read(3)
    try:
        answer = slow_node.admin.evict_all()
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    else:
        assert answer.remaining_blocks == 0
        assert slow_node.admin.snapshot().indexed_blocks == 0
    solo.check(request, stream.finish())
    slow_node.quiet()
    assert slow_node.admin.evict_all().remaining_blocks == 0


@pytest.mark.parametrize("idle", [0, pytest.param(10, marks=pytest.mark.slow)], ids=["few", "full"])
def test_row_16_shared_pages_are_counted_once(node: Node, solo: Solo, prompts: Prompts, idle: int) -> None:
    """A trunk with branches and splits: cached blocks equal the distinct blocks of the index, and the node lives on."""
    trunk = prompts.tokens(4 * B)
    longer = [*trunk, *prompts.tokens(B)]
    longest = [*longer, *prompts.tokens(B)]
    for base in (trunk, trunk, trunk, longer, longest, longest):
        request = make_request([*base, *prompts.tokens(B // 2)], new=3)
        solo.check(request, node.generate(request))
        now = node.quiet()
        listed = [block for prefix in node.admin.prefixes() for block in prefix.blocks]
        assert len(listed) == len(set(listed)) == now.cached_blocks <= now.total_blocks
    session = node.admin.sessions()[0]
    until = session.age_seconds + idle  # idleness is the case, not a wait for a state
    poll(lambda: node.admin.sessions()[0].age_seconds >= until, within=idle + 5, what="so much idle time has passed")
    assert node.admin.sessions()[0].session == session.session, "the same decoder is attached"
    again = make_request([*trunk, *prompts.tokens(3)], new=3)
    result = node.generate(again)
    assert result.cached_tokens == 4 * B
    solo.check(again, result)


def test_no_read_computes_and_no_store_leaves_nothing(node: Node, solo: Solo, prompts: Prompts) -> None:
    """`no_store` publishes nothing and `no_read` reuses nothing; without them the same prompt hits."""
    tokens = prompts.tokens(3 * B)
    hidden = make_request(tokens, no_store=True)
    solo.check(hidden, node.generate(hidden))
    assert node.quiet().cached_blocks == 0
    plain = make_request(tokens)
    assert node.generate(plain).cached_tokens == 0
    unread = node.generate(make_request(tokens, no_read=True))
    solo.check(plain, unread)
    assert unread.cached_tokens == 0
    assert node.generate(plain).cached_tokens == 3 * B - 1
    assert node.admin.call("GetSnapshot", admin_pb2.GetSnapshotRequest()).cached_blocks > 0
