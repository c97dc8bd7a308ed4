"""Recent admissions and limits of the hit rate: bounded, named as they share, no limit below what was had."""

from __future__ import annotations

import numpy as np
import pytest

from cachemgr.hit_limits import hit_limits
from cachemgr.recent import Admission, RecentAdmissions, block_names
from common.tokens import pack_tokens

ROOT, OTHER, WIDER = (bytes([number]) * 32 for number in (1, 2, 3))
BLOCK_TOKENS = 4


def admission(tokens, cached=0):
    return Admission(1, len(tokens), cached, names(tokens))


def names(tokens, *, root=ROOT, wider=b"", prefix_blocks=0, block_tokens=BLOCK_TOKENS):
    return block_names(pack_tokens(tokens), block_tokens, root, wider, prefix_blocks)


def shared(left, right):
    return sum(one == other for one, other in zip(left, right, strict=False))


def ring_of(**bounds):
    return RecentAdmissions(BLOCK_TOKENS, **bounds)


def add(ring, number, num_blocks=1, owner=1):
    ring.add(owner, ROOT, b"", 0, pack_tokens([number] * (BLOCK_TOKENS * num_blocks)), number)


def kept(ring):
    return [item.cached_tokens for item in ring.copy()]


def test_ring_is_bounded_in_blocks_and_in_number():
    """The oldest go first, and what is left is within both bounds."""
    ring = ring_of(max_blocks=5, max_admissions=3)
    for number in range(6):
        add(ring, number)
    assert len(ring) == 3
    assert kept(ring) == [3, 4, 5]
    add(ring, 6, num_blocks=4)
    assert kept(ring) == [5, 6]
    add(ring, 7, num_blocks=6)
    assert kept(ring) == []
    add(ring, 8, num_blocks=5)
    assert kept(ring) == [8]


@pytest.mark.parametrize("unnamed", [0, 40, 1000])
def test_what_is_named_at_once_or_later_is_the_same(unnamed):
    """However many tokens may wait for their names, copies, bounds and what is forgotten are the same; what waits is
    bounded, and nothing does after a while."""
    ring = ring_of(max_admissions=4, max_unnamed_bytes=unnamed)
    for number in range(7):
        add(ring, number, owner=1 + number % 2)
        assert len(ring._unnamed) * BLOCK_TOKENS * 4 <= unnamed
    ring.forget(1)
    add(ring, 7)
    assert [(item.owner, item.num_tokens, item.cached_tokens) for item in ring.copy()] == [
        (2, 4, 3),
        (2, 4, 5),
        (1, 4, 7),
    ]
    assert [item.names.tolist() for item in ring.copy()] == [names([n] * 4).tolist() for n in (3, 5, 7)]
    assert not ring._unnamed
    assert ring._unnamed_bytes == 0


def test_time_that_passes_lets_tokens_go():
    """The core's clock names what was admitted since, so that no token of it is kept."""
    ring = ring_of()
    add(ring, 1, num_blocks=3)
    assert len(ring._unnamed) == 1
    ring.make_compact()
    assert not ring._unnamed
    assert [len(item.names) for item in ring.copy()] == [3]


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


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 16])
def test_every_token_and_every_place_is_in_the_names(block_tokens):
    """One token changed, or two blocks exchanged, ends the run of shared names in that very block; names of different
    blocks are different."""
    tokens = [1 + number % 5 for number in range(block_tokens * 6)]
    base = names(tokens, block_tokens=block_tokens)
    assert len(set(base.tolist())) == 6
    for place in range(len(tokens)):
        other = names([*tokens[:place], tokens[place] ^ 8, *tokens[place + 1 :]], block_tokens=block_tokens)
        assert [bool(it) for it in base == other] == [number < place // block_tokens for number in range(6)]
    first, second = [7] * block_tokens, [9] * block_tokens
    one, other = (names(pair, block_tokens=block_tokens) for pair in (first + second, second + first))
    assert not (one == other).any()


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
