"""Recent admissions and limits of the hit rate: bounded, named as they share, no limit below what was had."""

from __future__ import annotations

import numpy as np
import pytest

from cachemgr.hit_limits import hit_limits
from cachemgr.recent import Admission, RecentAdmissions, block_names
from common.tokens import pack_tokens

ROOT, OTHER, WIDER = (bytes([number]) * 32 for number in (1, 2, 3))
BLOCK_TOKENS = 4
BLOCK_BYTES = 16


def admission(tokens, cached=0, *, root=ROOT, wider=b"", prefix_blocks=0):
    return Admission(1, root, wider, prefix_blocks, pack_tokens(tokens), cached)


def names(*args, **fields):
    return block_names(admission(*args, **fields), BLOCK_BYTES)


def shared(left, right):
    return sum(one == other for one, other in zip(left, right, strict=False))


def test_ring_is_bounded_in_bytes_and_in_number():
    """The oldest go first, and what is left is within both bounds."""
    ring = RecentAdmissions(max_bytes=100, max_admissions=3)
    for number in range(6):
        ring.add(1, ROOT, b"", 0, bytes(20), number)
    assert [item.cached_tokens for item in ring.copy()] == [3, 4, 5]
    ring.add(1, ROOT, b"", 0, bytes(80), 6)
    assert [item.cached_tokens for item in ring.copy()] == [5, 6]
    ring.add(1, ROOT, b"", 0, bytes(101), 7)
    assert len(ring) == 0


def test_owner_that_is_purged_is_forgotten():
    """Its admissions are gone, with their bytes; the others stay in their order."""
    ring = RecentAdmissions(max_bytes=100)
    for number in range(4):
        ring.add(1 + number % 2, ROOT, b"", 0, bytes(20), number)
    ring.forget(1)
    assert [item.cached_tokens for item in ring.copy()] == [1, 3]
    for number in range(4, 7):  # there is room for three more
        ring.add(3, ROOT, b"", 0, bytes(20), number)
    assert [item.cached_tokens for item in ring.copy()] == [1, 3, 4, 5, 6]


def test_names_are_shared_exactly_where_blocks_could_be():
    """The same tokens under the same root share; one other token, or another root, ends it there."""
    base = names(range(12))
    assert len(base) == 3
    assert len(names(range(11))) == 2
    assert shared(base, names(range(14))) == 3
    assert shared(base, names([*range(7), 99, *range(8, 12)])) == 1
    assert shared(base, names(range(12), root=OTHER)) == 0


def test_names_of_a_wider_prefix_are_shared_across_tenants():
    """Two roots with one wider root share its blocks and not what lies below."""
    one = names(range(12), root=ROOT, wider=WIDER, prefix_blocks=2)
    other = names(range(12), root=OTHER, wider=WIDER, prefix_blocks=2)
    assert shared(one, other) == 2
    assert one[2] != other[2]


def test_limits_of_nothing_are_zero():
    """Without admissions there is no rate."""
    assert hit_limits([], 8, BLOCK_TOKENS).admissions == 0


def test_limits_by_hand():
    """A repeated prompt that missed could have been a hit; what was had is never above the limits."""
    prompt = range(8)
    twice = hit_limits([admission(prompt), admission(prompt)], 8, BLOCK_TOKENS)
    assert (twice.hit, twice.best, twice.infinite) == (0.0, 0.5, 0.5)
    had = hit_limits([admission(prompt), admission(prompt, 7)], 8, BLOCK_TOKENS)
    assert had.hit == pytest.approx(7 / 16)
    assert had.hit <= had.best <= had.infinite == pytest.approx(0.5)


def test_small_pool_is_between_what_was_had_and_no_limit():
    """Two prompts that take turns in a pool that is too small: some of one can be kept; without an end both hit."""
    turns = [admission(np.arange(8) + 100 * (number % 2)) for number in range(6)]
    limits = hit_limits(turns, 3, BLOCK_TOKENS)
    assert limits.hit == 0.0
    assert 0.0 < limits.best < limits.infinite
    assert limits.infinite == pytest.approx(4 / 6)
