"""Parallel samples: one prefill, n branches, each equal to the same seed and index alone."""

from __future__ import annotations

import pytest

from tests.decoder.rig import BLOCK_TOKENS, Node, prompt_of, request, solo


@pytest.mark.parametrize("length", [1, BLOCK_TOKENS, 2 * BLOCK_TOKENS + 3])
def test_each_sample_equals_its_solo_run(length: int) -> None:
    """n = 4 in one batch says what each (seed, index) says alone, and computes the prompt once."""
    item = request(1, prompt_of(length), max_tokens=17, num_samples=4, temperature=1.0, seed=11)
    node = Node()
    node.submit(item)
    node.finish(1)
    assert {sample: node.sink.tokens[1, sample] for sample in range(4)} == solo(item)
    assert len({tuple(tokens) for tokens in solo(item).values()}) == 4, "the samples differ"
    assert sum(tokens for _, tokens in node.model.batches) <= length + 4 * 16
    assert node.sink.ended[1] == (68, 3 if length % BLOCK_TOKENS else 0)
    node.assert_quiet()


def test_a_sample_of_more_is_the_same_sample_of_fewer() -> None:
    """Sample i does not depend on how many are drawn beside it."""
    few = solo(request(1, prompt_of(9), num_samples=2, temperature=1.0, seed=5))
    many = solo(request(1, prompt_of(9), num_samples=7, temperature=1.0, seed=5))
    assert {sample: many[sample] for sample in few} == few


def test_samples_share_the_prompt_blocks() -> None:
    """While four samples run, each whole prompt block is held by four leases and each tail by one."""
    node = Node()
    node.submit(request(1, prompt_of(2 * BLOCK_TOKENS + 3), max_tokens=40, num_samples=4, temperature=1.0, seed=1))
    node.until(lambda: len(node.manager.list_leases().items) == 4)
    leases = node.manager.list_leases().items
    assert len({lease.blocks[0] for lease in leases}) == len({lease.blocks[1] for lease in leases}) == 1
    assert len({lease.blocks[2] for lease in leases}) == 4
    node.finish(1)
    node.assert_quiet()


def test_more_samples_than_places_wait_in_the_queue() -> None:
    """With two places, eight samples take turns and still say what they say alone."""
    item = request(1, prompt_of(10), max_tokens=9, num_samples=8, temperature=1.0, seed=3)
    node = Node(max_batch=2)
    node.submit(item)
    node.finish(1)
    assert {sample: node.sink.tokens[1, sample] for sample in range(8)} == solo(item)
    node.assert_quiet()


def test_samples_without_room_for_all_end_all_the_same() -> None:
    """A pool too small for all branches at once makes them take turns; none is lost, none is stuck."""
    item = request(1, prompt_of(4 * BLOCK_TOKENS + 2), max_tokens=12, num_samples=6, temperature=1.0, seed=8)
    node = Node(num_blocks=9)
    node.submit(item)
    node.finish(1)
    assert {sample: node.sink.tokens[1, sample] for sample in range(6)} == solo(item)
    node.assert_quiet()


def test_samples_that_end_with_their_first_token_are_told() -> None:
    """A stop token drawn first ends that sample alone; with one token asked for nothing is forked."""
    node = Node()
    item = request(1, prompt_of(9), max_tokens=1, num_samples=5, temperature=1.0, seed=2)
    node.submit(item)
    node.finish(1)
    firsts = {sample: tokens[0] for sample, tokens in solo(item).items()}
    assert node.sink.ended[1] == (5, 0)
    node.submit(request(2, prompt_of(9), max_tokens=6, num_samples=5, temperature=1.0, seed=2, stop_ids=[firsts[0]]))
    node.finish(2)
    assert len(node.sink.tokens[2, 0]) == 1
    assert all(sample == 0 or node.sink.tokens[2, sample][0] == firsts[sample] for sample in range(5))
    node.assert_quiet()


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("gone", [0, 2])
def test_cancelling_one_sample_leaves_the_others(steps: int, gone: int) -> None:
    """A sample cancelled at any moment, the one that keeps the trunk too, gains no more; the others are as if alone."""
    item = request(1, prompt_of(40), max_tokens=9, num_samples=4, temperature=1.0, seed=4)
    node = Node(lateness=lambda: 1)
    node.submit(item)
    node.step(steps)
    node.engine.cancel(node.sink, item.number, gone)
    node.step()
    told = len(node.sink.tokens.get((1, gone), []))
    node.finish(1)
    assert len(node.sink.tokens.get((1, gone), [])) == told
    assert {s: node.sink.tokens[1, s] for s in range(4) if s != gone} == {
        s: tokens for s, tokens in solo(item).items() if s != gone
    }
    assert (1, gone) not in node.sink.finished or told == 9
    node.assert_quiet()


def test_cancelling_every_sample_ends_the_request() -> None:
    """When the last open sample is cancelled the request ends, and is told once."""
    node = Node()
    node.submit(request(1, prompt_of(9), max_tokens=50, num_samples=3, temperature=1.0, seed=4))
    node.step(5)
    for sample in (0, 1, 2, 1):
        node.engine.cancel(node.sink, 1, sample)
    node.finish(1)
    assert node.sink.ended[1][0] == sum(len(tokens) for tokens in node.sink.tokens.values())
    node.assert_quiet()


def most_blocks_held(prompts: list[list[int]], num_samples: int) -> int:
    """The most distinct blocks that leases hold while these prompts, with so many samples each, run together."""
    node = Node(num_blocks=1600, chunk_tokens=4096)
    for number, prompt in enumerate(prompts):
        node.submit(request(number, prompt, max_tokens=9, num_samples=num_samples, temperature=1.0, seed=3))
    node.until(lambda: len(node.sink.tokens) == len(prompts) * num_samples)
    highest = 0
    while len(node.sink.finished) < len(prompts) * num_samples:
        leases = node.manager.list_leases().items
        highest = max(highest, len({block for lease in leases for block in lease.blocks}))
        node.step()
    node.assert_quiet()
    return highest


def test_sixteen_samples_hold_little_more_than_one() -> None:
    """16 samples of a prompt of 512 blocks hold at most 1.15 times the blocks of one; three prompts that share nothing
    hold three times as many, which is the positive control."""
    prompts = [prompt_of(512 * BLOCK_TOKENS + 2, number) for number in range(3)]
    one = most_blocks_held(prompts[:1], 1)
    assert one < most_blocks_held(prompts[:1], 16) <= 1.15 * one
    assert most_blocks_held(prompts, 1) > 2.9 * one
