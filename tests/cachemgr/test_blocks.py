"""The block pool against a dictionary of holders."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cachemgr.blocks import BlockPool, BlockState
from cachemgr.ids import BlockRun

NUM_BLOCKS = 9


def run_of(blocks: list[int]) -> BlockRun:
    return np.array(sorted(blocks), np.intp)


class PoolMachine(RuleBasedStateMachine):
    """Any legal history leaves states, counts and references as a naive model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.pool = BlockPool(NUM_BLOCKS, lambda blocks: self.freed.extend(blocks.tolist()))
        self.holds: Counter[int] = Counter()
        self.published: set[int] = set()
        self.quarantined: set[int] = set()
        self.generation: Counter[int] = Counter()

    def _free(self) -> set[int]:
        used = {block for block, count in self.holds.items() if count} | self.published | self.quarantined
        return set(range(1, NUM_BLOCKS + 1)) - used

    def _expect_freed(self, blocks: set[int]) -> None:
        assert sorted(self.freed) == sorted(blocks)
        self.freed.clear()
        self.generation.update(blocks)

    @rule(count=st.integers(0, NUM_BLOCKS + 1), owner=st.integers(1, 2))
    def allocate(self, count: int, owner: int) -> None:
        free = self._free()
        if count > len(free):
            with pytest.raises(ValueError, match="free"):
                self.pool.allocate(count, owner)
            return
        blocks = self.pool.allocate(count, owner).tolist()
        assert len(set(blocks)) == count
        assert set(blocks) <= free
        assert all(self.pool.owner[block] == owner for block in blocks)
        self.holds.update(blocks)

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        present = sorted(self.published | {block for block, count in self.holds.items() if count})
        blocks = data.draw(st.lists(st.sampled_from(present), unique=True)) if present else []
        assert self.pool.count_idle(run_of(blocks)) >= 0
        self.pool.hold(run_of(blocks))
        self.holds.update(blocks)

    @rule(data=st.data())
    def hold_published(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.published)), unique=True)) if self.published else []
        if from_first := data.draw(st.booleans()):
            blocks.sort(key=lambda block: -self.holds[block])
        path = np.array(blocks, np.intp)  # in this order: holders become fewer along it
        num_idle = self.pool.count_idle(path, from_first=from_first)
        assert num_idle == sum(not self.holds[block] for block in blocks)
        self.pool.hold_published(path, num_idle)
        self.holds.update(blocks)

    @rule(data=st.data())
    def unhold_published(self, data: st.DataObject) -> None:
        fit = sorted(block for block in self.published if self.holds[block])
        blocks = data.draw(st.lists(st.sampled_from(fit), unique=True)) if fit else []
        if from_first := data.draw(st.booleans()):
            blocks.sort(key=lambda block: -self.holds[block])
        self.pool.unhold_published(np.array(blocks, np.intp), from_first=from_first)
        self.holds.subtract(blocks)
        self._expect_freed(set())

    @rule(data=st.data(), quarantine=st.booleans())
    def unhold(self, data: st.DataObject, quarantine: bool) -> None:
        held = sorted(block for block, count in self.holds.items() if count)
        blocks = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        loose = set(self.pool.unhold(run_of(blocks), quarantine=quarantine).tolist())
        self.holds.subtract(blocks)
        assert loose == {block for block in blocks if not self.holds[block] and block not in self.published}
        if quarantine:
            self.quarantined |= loose
        self._expect_freed(set() if quarantine else loose)

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        fit = sorted(block for block, count in self.holds.items() if count and block not in self.published)
        blocks = data.draw(st.lists(st.sampled_from(fit), unique=True)) if fit else []
        self.pool.publish(run_of(blocks))
        self.published |= set(blocks)

    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.published)), unique=True)) if self.published else []
        loose = {block for block in blocks if not self.holds[block]}
        assert set(self.pool.unpublish(run_of(blocks)).tolist()) == loose
        self.published -= set(blocks)
        self._expect_freed(loose)

    @rule()
    def evict(self) -> None:
        idle = {block for block in self.published if not self.holds[block]}
        assert self.pool.count_idle(run_of(list(self.published))) == len(idle)
        self.pool.unpublish_idle(run_of(list(idle)))
        self.published -= idle
        self._expect_freed(idle)

    @rule()
    def end_quarantine(self) -> None:
        self.pool.end_quarantine(run_of(list(self.quarantined)))
        self._expect_freed(self.quarantined)
        self.quarantined = set()

    @invariant()
    def agrees_with_the_model(self) -> None:
        pool = self.pool
        for block in range(1, NUM_BLOCKS + 1):
            if block in self.quarantined:
                state = BlockState.QUARANTINED
            elif self.holds[block]:
                state = BlockState.ACTIVE
            else:
                state = BlockState.CACHED if block in self.published else BlockState.FREE
            assert pool.state[block] == state
            assert pool.references[block] == self.holds[block] + (block in self.published)
            assert pool.generation[block] == self.generation[block]
        assert sorted(pool.free_stack.tolist()) == sorted(self._free())
        assert pool.num_free + pool.num_cached + pool.num_active + pool.num_quarantined == NUM_BLOCKS
        assert (pool.num_published, pool.num_quarantined) == (len(self.published), len(self.quarantined))
        assert (pool.state[0], pool.references[0]) == (0, 0)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_null_block_is_never_allocated() -> None:
    """A pool hands out 1..num_blocks, lowest first, and nothing more."""
    pool = BlockPool(5)
    assert pool.allocate(5, 1).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="0 free"):
        pool.allocate(1, 1)


def test_pool_without_blocks_is_refused() -> None:
    """A pool has at least one block."""
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0)
