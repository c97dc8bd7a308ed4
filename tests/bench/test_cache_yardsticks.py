"""The two yardsticks are caches: what they say is cached is what was sent before, and no block is lost."""

from __future__ import annotations

import random

import pytest

from bench.cache_yardsticks import HashChainCache, RadixPageCache

PAGE = 4


def longest_shared(prompt: list[int], earlier: list[list[int]]) -> int:
    """Leading tokens, in whole pages and never the last one, that an earlier prompt of whole pages shares."""
    best = 0
    for other in earlier:
        end = len(other) // PAGE * PAGE
        shared = 0
        while shared < min(len(prompt), end) and prompt[shared] == other[shared]:
            shared += 1
        best = max(best, shared)
    return min(best, len(prompt) - 1) // PAGE * PAGE


@pytest.mark.parametrize("kind", [HashChainCache, RadixPageCache])
@pytest.mark.parametrize("seed", range(5))
def test_hits_are_the_longest_prefix_sent_before(kind: type[HashChainCache | RadixPageCache], seed: int) -> None:
    """In a pool that never evicts, each prompt hits exactly what the naive search finds."""
    draw = random.Random(seed)
    cache, sent, hits = kind(4000, PAGE), list[list[int]](), 0
    for _ in range(60):
        base = draw.choice(sent)[: draw.randrange(1, 40)] if sent and draw.random() < 0.7 else []
        prompt = base + [draw.randrange(3) for _ in range(draw.randrange(1, 30))]
        expected = longest_shared(prompt, sent)
        assert cache.cycle(prompt) == expected
        hits += expected > 0
        sent.append(prompt)
    assert hits > 10


@pytest.mark.parametrize("kind", [HashChainCache, RadixPageCache])
def test_a_small_pool_evicts_the_oldest_and_loses_no_block(kind: type[HashChainCache | RadixPageCache]) -> None:
    """Ten pages, prompts of four: the third prompt drops at least part of the first; it runs on for ever."""
    cache = kind(10, PAGE)
    prompts = [[number] * (4 * PAGE) for number in range(200)]
    assert [cache.cycle(prompt) for prompt in prompts[:3]] == [0, 0, 0]
    assert cache.cycle(prompts[2]) == 3 * PAGE
    assert cache.cycle(prompts[0]) < 3 * PAGE
    for prompt in prompts:
        cache.cycle(prompt)
    assert cache.cycle(prompts[-1]) == 3 * PAGE
