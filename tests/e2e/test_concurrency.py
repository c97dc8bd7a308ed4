"""Rows 1, 7, 41 of the cases and "how it is shown" 3: whatever shares a batch, each reply equals its solo run."""

from __future__ import annotations

import random
from pathlib import Path

from tests.e2e.client import make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import poll
from tests.e2e.prompts import Prompts
from tests.e2e.repeats import repeats
from tests.e2e.rig import Node

B = 16


@repeats(50)
def test_row_01_what_is_cached_is_pinned_before_others_allocate(
    node: Node, solo: Solo, tiny_model: Path, seed: int, rounds: int
) -> None:
    """A hit beside a prompt that needs the whole rest of the pool: both equal solo, and the counts agree with Admin."""
    hits = 0
    for number in range(rounds):
        prompts = Prompts(tiny_model, seed + number)
        node.fresh()
        warm = prompts.tokens(10 * B)
        node.generate(make_request(warm, new=1))
        before = node.quiet()
        hit = make_request([*warm, *prompts.tokens(8)], new=8)
        big = make_request(prompts.tokens(24 * B - 8), new=8)
        order = [big, hit] if number % 2 else [hit, big]
        results = node.together(order)
        for request, result in zip(order, results, strict=True):
            solo.check(request, result)
        cached = results[order.index(hit)].cached_tokens
        assert 0 <= cached <= 10 * B
        after = node.quiet()
        assert after.hit_tokens - before.hit_tokens == sum(result.cached_tokens for result in results)
        hits += bool(cached)
    assert hits, "positive control: the warm prompt was hit"


@repeats(50, few=2)
def test_thirty_two_requests_at_once_equal_their_solo_runs(
    node: Node, solo: Solo, tiny_model: Path, seed: int, rounds: int
) -> None:
    """32 concurrent requests of mixed lengths, most with a shared prefix, on a pool too small for all at once."""
    for number in range(rounds):
        prompts = Prompts(tiny_model, seed + number)
        source = random.Random(seed + number)
        shared = prompts.tokens(source.randrange(B, 4 * B))
        requests = []
        for index in range(32):
            tail = prompts.tokens(source.randrange(1, 5 * B))
            tokens = tail if index % 4 == 0 else [*shared, *tail]
            requests.append(make_request(tokens, new=source.randrange(1, 40)))
        before = node.fresh()
        results = node.together(requests)
        for request, result in zip(requests, results, strict=True):
            solo.check(request, result)
        after = node.quiet()
        assert after.hits + after.misses - before.hits - before.misses == 32
        assert after.hits > before.hits, "positive control: some of them shared the prefix"
        generated = sum(result.usage.completion_tokens for result in results)
        assert after.generated_tokens - before.generated_tokens >= generated


@repeats(50)
def test_row_41_two_lengths_at_once_have_one_variant_each(
    node: Node, solo: Solo, tiny_model: Path, seed: int, rounds: int
) -> None:
    """128 and 256 tokens at once, computed whole and in chunks, cached or not: always the solo reply."""
    for number in range(rounds):
        prompts = Prompts(tiny_model, seed + number // 5)
        pair = [prompts.tokens(128), prompts.tokens(256)]
        for no_read in (True, False):
            requests = [make_request(tokens, new=32, no_read=no_read) for tokens in pair]
            for request, result in zip(requests, node.together(requests), strict=True):
                solo.check(request, result)
        three = [make_request(prompts.tokens(length), new=32) for length in (37, 100, 200)]
        for request, result in zip(three, node.together(three), strict=True):
            solo.check(request, result)


@repeats(50, few=2)
def test_row_07_samples_of_one_prompt_never_touch_one_another(
    node: Node, solo: Solo, tiny_model: Path, seed: int, rounds: int
) -> None:
    """n = 4 and four seeds from one prompt of 2B+3 tokens: each as the same seed alone; tails are copied on write."""
    for number in range(rounds):
        prompts = Prompts(tiny_model, seed + number)
        node.fresh()
        tokens = prompts.tokens(2 * B + 3)
        before = node.admin.snapshot()
        many = make_request(tokens, new=24, temperature=1.0, n=4, seed=seed)
        result = node.generate(many)
        solo.check(many, result)
        assert len({tuple(sample.token_ids) for sample in result.samples.values()}) > 1, "the samples differ"
        assert result.usage.cow_copies >= 3
        assert node.quiet().cow_copies - before.cow_copies >= 3
        one = make_request(tokens, new=24, temperature=1.0, seed=seed)
        alone = node.generate(one)
        solo.check(one, alone)
        assert alone.token_ids == result.token_ids, "sample 0 of n = 4 is the lone sample of that seed"
        seeds = [make_request(tokens, new=24, temperature=1.0, seed=value) for value in (1, 2, 3, 4)]
        for request, answer in zip(seeds, node.together(seeds), strict=True):
            solo.check(request, answer)
        node.quiet()


def test_row_07_admin_shows_shared_and_private_blocks(slow_node: Node, solo: Solo, prompts: Prompts) -> None:
    """While four samples run, each whole prompt block is held four times, and each sample has private blocks."""
    request = make_request(prompts.tokens(2 * B + 3), new=60, temperature=1.0, n=4, seed=5)
    running = slow_node.background(request)

    def tables() -> list[list[int]]:
        leases = slow_node.admin.leases()
        return [list(lease.blocks) for lease in leases] if len(leases) == 4 else []

    found = poll(tables, within=20, what="four leases")
    blocks = {block.block: block for block in slow_node.admin.blocks()}
    for table in found:
        assert table[:2] == found[0][:2], "whole prompt blocks are shared"
    for number in found[0][:2]:
        assert blocks[number].references - int(blocks[number].published) == 4
    private = [number for table in found for number in table[2:]]
    assert len(private) == len(set(private)) >= 4, "no block beyond the prompt's whole ones is in two tables"
    solo.check(request, running.result())


def test_row_34_penalties_do_not_depend_on_neighbours_or_hits(node: Node, solo: Solo, prompts: Prompts) -> None:
    """Greedy with a frequency penalty: alone, beside a longer request, and on a full prefix hit, one reply."""
    tokens = prompts.tokens(2 * B + 5)
    request = make_request(tokens, new=40, frequency_penalty=1.05, repetition_penalty=1.1)
    plain = make_request(tokens, new=40)
    assert solo(request).token_ids != solo(plain).token_ids, "positive control: the penalty changes the reply"
    first = node.generate(request)
    long = make_request(prompts.tokens(16 * B), new=20)
    beside, other = node.together([request, long])
    solo.check(long, other)
    for result in (first, beside, node.generate(request)):
        solo.check(request, result)
    assert beside.cached_tokens == 2 * B + 4, "positive control: it was a full hit"
