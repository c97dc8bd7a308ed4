"""An arena with groups: the mirror of which window block each block has, and what is zeroed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cachemgr.session_fields import layout_of
from common.errors import Internal
from common.layout import KvDtype, KvLayout
from decoder.cache_api import Scrub
from decoder.cache_messages import layout_message
from decoder.grouped_arena import GroupedArena, private_arena, usable_blocks, whole_arena
from decoder.scrubbing import zero_blocks

LAYOUT = KvLayout(3, 1, 8, 4, KvDtype.FLOAT32, window_tokens=6, window_layers=(0, 2))


def ints(*values: int) -> np.ndarray:
    """An int32 array."""
    return np.array(values, np.int32)


def test_sizes_are_those_of_the_layout() -> None:
    """Blocks hold the layers that read all, window blocks the others, each with a null one; without groups an arena is
    a plain array."""
    arena = private_arena(LAYOUT, 30)
    assert arena.blocks.shape == (31, 1, 2, 1, 4, 8)
    assert arena.window_blocks.shape == (11, 2, 2, 1, 4, 8)
    assert not arena.of.any()
    assert arena.of.shape == (31,)
    assert len(private_arena(LAYOUT, 30, 5).window_blocks) == 6
    assert usable_blocks(arena) == 30
    whole = whole_arena(LAYOUT, 30)
    assert len(whole.window_blocks) == 31
    assert whole.of.tolist() == list(range(31))
    assert whole_arena(LAYOUT.full_group, 3).shape == (4, 1, 2, 1, 4, 8)
    assert usable_blocks(private_arena(LAYOUT.full_group, 7)) == 7


def test_the_mirror_says_what_the_last_message_said() -> None:
    """A later pair replaces an earlier one; the pairs of blocks are those that have a window block, each once."""
    arena = private_arena(LAYOUT, 30)
    arena.name(np.array([[3, 1], [7, 2]], np.int32))
    arena.name(np.zeros((0, 2), np.int32))
    arena.name(np.array([[3, 9]], np.int32))
    assert arena.pairs_of(ints(7, 5, 3, 7)).tolist() == [[3, 9], [7, 2]]
    assert arena.pairs_of(ints()).shape == (0, 2)


@pytest.mark.parametrize("layout", [LAYOUT, replace(LAYOUT, window_share=1), LAYOUT.full_group])
def test_both_sides_mean_the_same_layout(layout: KvLayout) -> None:
    """What a decoder attaches with is read as the very layout that it has."""
    assert layout_of(layout_message(layout)) == layout


@pytest.mark.parametrize("pair", [(0, 1), (31, 1), (-1, 1), (1, 0), (1, 11), (1, -2)])
def test_what_is_out_of_range_is_refused(pair: tuple[int, int]) -> None:
    """Null blocks have no window block, and none lies outside the memory; nothing is taken over then."""
    arena = private_arena(LAYOUT, 30)
    with pytest.raises(Internal, match="outside"):
        arena.name(np.array([[5, 5], pair], np.int32))
    assert not arena.of.any()


def test_both_kinds_of_blocks_are_zeroed() -> None:
    """Exactly those that a scrub names."""
    arena = GroupedArena.over(np.ones((5, 3)), np.ones((4, 2)))
    zero_blocks(arena, Scrub(ints(2), ints(1, 3)))
    assert arena.blocks.any(axis=1).tolist() == [True, True, False, True, True]
    assert arena.window_blocks.any(axis=1).tolist() == [True, False, True, False]
