"""Belady's bound against every possible choice of what to drop, on traces small enough to try them all."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemgr.belady import best_hit_rate

Chain = tuple[tuple[int, ...], ...]

# A chain is a path of a small tree: each name is the whole path to it.
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(
    lambda steps: tuple(tuple(steps[: depth + 1]) for depth in range(len(steps)))
)


def best_by_trying(admissions: list[Chain], num_blocks: int) -> int:
    """The most leading blocks that any choice of victims finds, leaves or not."""

    @cache
    def most(number: int, resident: frozenset[tuple[int, ...]]) -> int:
        if number == len(admissions):
            return 0
        chain = admissions[number]
        found = next((place for place, block in enumerate(chain) if block not in resident), len(chain))
        together = resident | set(chain)
        others = sorted(resident - set(chain))
        keep = min(len(others), num_blocks - len(chain))
        best = max(most(number + 1, frozenset(chain) | frozenset(kept)) for kept in combinations(others, keep))
        assert len(together) >= len(chain)
        return found + best

    return most(0, frozenset())


@settings(max_examples=200, deadline=None)
@given(st.lists(PATHS, min_size=1, max_size=6), st.integers(3, 6))
def test_no_choice_of_victims_finds_more(admissions: list[Chain], num_blocks: int) -> None:
    """The bound is what the best of all choices finds, no more and no less; LRU is not above it."""
    total = sum(map(len, admissions))
    rates = best_hit_rate(admissions, num_blocks)
    assert rates.best == best_by_trying(admissions, num_blocks) / total
    assert rates.hit <= rates.best <= rates.infinite


def test_knowing_the_future_helps() -> None:
    """A scan over more than fits finds nothing by recency, something with foresight, the most without limit."""
    scan = [[("a", number)] for number in range(4)] * 3
    rates = best_hit_rate(scan, 3)
    assert rates.hit == 0
    assert rates.best == pytest.approx(6 / 12)
    assert rates.infinite == pytest.approx(8 / 12)


def test_a_break_in_the_chain_ends_the_hit() -> None:
    """Only leading blocks count: what is resident behind a missing one is no hit."""
    rates = best_hit_rate([["a", "b", "c"], ["a", "x"], ["a", "b", "c"]], 3)
    assert rates.infinite == pytest.approx((0 + 1 + 3) / 8)
    assert rates.best == pytest.approx((0 + 1 + 2) / 8)


def test_what_cannot_fit_is_left_out() -> None:
    """An admission larger than the pool is refused there, so it counts nowhere; nothing at all gives zeros."""
    assert best_hit_rate([["a", "b", "c"]], 2) == (0.0, 0.0, 0.0)
    assert best_hit_rate([], 2) == (0.0, 0.0, 0.0)
    assert best_hit_rate([["a", "b", "c"], ["a"], ["a"]], 2).infinite == pytest.approx(1 / 2)


def test_bad_arguments_are_refused() -> None:
    """A pool has a block, and a chain names each of its blocks once."""
    with pytest.raises(ValueError, match="num_blocks is 0"):
        best_hit_rate([], 0)
    with pytest.raises(ValueError, match="twice"):
        best_hit_rate([["a", "a"]], 4)
