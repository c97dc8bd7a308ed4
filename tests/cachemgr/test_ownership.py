"""Whose blocks they are, and whose content is in them: what crosses owners is named before anybody else writes it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cachemgr.ids import TenantId
from cachemgr.manager import CacheManager
from cachemgr.ownership import ANYONE, CLEAN, NO_OWNER, Ownership
from cachemgr.results import SequenceReport
from common.errors import ResourceExhausted
from tests.cachemgr.core_rig import Rig, pack, root_of

B = 4


def run_of(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.intp)


def test_a_block_is_named_where_it_crosses() -> None:
    """Fresh blocks and one's own are not named; another's are, once; credit is, if anybody wrote it."""
    ownership = Ownership(8)
    ownership.begin(run_of(1, 2), 1)
    assert ownership.take_scrub().tolist() == []
    ownership.uncharge(run_of(1, 2))
    ownership.begin(run_of(1, 3), 1)
    assert ownership.take_scrub().tolist() == []
    ownership.uncharge(run_of(1, 3))
    ownership.begin(run_of(1, 2, 4), 2)
    assert ownership.take_scrub().tolist() == [1, 2]
    assert ownership.take_scrub().tolist() == []
    ownership.uncharge(run_of(4))
    ownership.begin(run_of(4, 5), NO_OWNER)
    assert ownership.take_scrub().tolist() == [4]
    assert ownership.dirty_owner[[4, 5]].tolist() == [ANYONE, ANYONE]


def test_given_returned_and_tainted_blocks() -> None:
    """Credit that a tenant takes is its own; returned unused it is clean; what is not known is always named."""
    ownership = Ownership(8)
    ownership.begin(run_of(1, 2, 3), NO_OWNER)
    ownership.give(run_of(1), 7)
    ownership.untouched(run_of(2))
    assert ownership.dirty_owner[[1, 2, 3]].tolist() == [7, CLEAN, ANYONE]
    assert (ownership.charged[NO_OWNER], ownership.charged[7]) == (2, 1)
    ownership.uncharge(run_of(1, 2, 3))
    ownership.begin(run_of(1, 2, 3), 7)
    assert ownership.take_scrub().tolist() == [3]
    ownership.taint_owner(7)
    ownership.uncharge(run_of(1, 2, 3))
    ownership.begin(run_of(1, 2, 3), 7)
    assert ownership.take_scrub().tolist() == [1, 2, 3]


def test_a_path_of_two_owners_is_counted_for_each() -> None:
    """Blocks of a wider scope come first in a table; each owner is counted for its own."""
    ownership = Ownership(8)
    ownership.begin(run_of(1, 2), 3)
    ownership.begin(run_of(4, 5, 6), 9)
    for path, counts in (((1, 2, 4, 5, 6), (2, 3)), ((4, 5), (2, 5)), ((1,), (3, 5))):
        ownership.shift_path(run_of(*path), 1)
        assert (ownership.idle[3], ownership.idle[9]) == counts
    ownership.drop(run_of(4, 1))
    assert (ownership.idle[3], ownership.idle[9], ownership.charged[3], ownership.charged[9]) == (2, 4, 1, 2)


def test_a_lost_session_leaves_nothing_that_counts_as_zeroed() -> None:
    """A decoder that died may not have zeroed what it was told to: its blocks are named again, for their last owner
    too."""
    rig = Rig(num_blocks=8)
    rig.serve(range(8 * B), tenant="a")
    session = rig.attach()
    rig.acquire(range(100, 100 + 4 * B), tenant="b", session=session)
    assert len(rig.manager.take_scrub()) == 4
    rig.manager.detach(session, process_dead=True, now_ns=0)
    rig.sequences.clear()
    rig.acquire(range(100, 100 + 4 * B), tenant="b")
    assert len(rig.manager.take_scrub()) == 4
    assert rig.manager.snapshot().scrubbed_blocks == 8


def test_a_purged_tenant_s_blocks_are_named_for_its_namesake() -> None:
    """After a purge nobody gets the tenant's bytes, not even a tenant of the same name."""
    rig = Rig(num_blocks=8)
    rig.serve(range(4 * B), tenant="a")
    rig.manager.purge(TenantId("a"))
    rig.acquire(range(8 * B), tenant="a")
    assert len(rig.manager.take_scrub()) == 4


def test_credit_that_comes_back_unused_is_clean() -> None:
    """What was zeroed, lent and never written needs no zeroing again."""
    rig = Rig(num_blocks=4)
    rig.serve(range(4 * B), tenant="a")
    blocks = rig.manager.credit(rig.session, 3, 0).tolist()
    rig.credit[rig.session] = blocks
    assert sorted(rig.manager.take_scrub().tolist()) == sorted(blocks)
    rig.report(returned=blocks)
    rig.acquire(range(100, 100 + 3 * B), tenant="b")
    assert rig.manager.take_scrub().tolist() == []


class ScrubMachine(RuleBasedStateMachine):
    """A decoder that zeroes what it is told to never finds another tenant's bytes in a block it was handed.

    The pretend arena remembers who wrote each block last; `told` is what the manager named with the last answer.
    """

    @initialize()
    def start(self) -> None:
        self.manager = CacheManager(num_blocks=10, block_tokens=2, epoch=1)
        self.session = self.manager.attach(decoder_name="d", process_id=1, now_ns=0)
        self.content: dict[int, set[str]] = {block: set() for block in range(1, 11)}
        self.leases: dict[int, tuple[str, list[int], int]] = {}
        self.credit: list[int] = []
        self.unsure: set[int] = set()  # what the manager cannot know, or must not rely on
        self.number = 0

    def _handed(self, blocks: Iterable[int], tenant: str) -> None:
        """Blocks came with an answer: zero what is named, then look."""
        told = self.manager.take_scrub().tolist()
        blocks = set(blocks)
        assert set(told) <= blocks
        for block in told:
            if tenant and block not in self.unsure:
                assert self.content[block] != {tenant}, "its own was named"
            self.content[block] = set()
        self.unsure -= blocks
        for block in blocks:
            assert self.content[block] <= {tenant}, "another tenant's bytes"

    @rule(tenant=st.sampled_from("ab"), blocks=st.integers(1, 5), again=st.booleans())
    def acquire(self, tenant: str, blocks: int, again: bool) -> None:
        self.number += not again
        tokens = [self.number, *range(2 * blocks - 1)]
        try:
            lease = self.manager.acquire(
                self.session, tenant=TenantId(tenant), root=root_of(tenant), tokens=pack(tokens), request_id="r",
                sample=0, now_ns=0,
            )  # fmt: skip
        except ResourceExhausted:
            return
        table = lease.blocks.tolist()
        fresh = table[lease.cached_tokens // 2 :]
        self._handed(fresh, tenant)
        for block in fresh:
            self.content[block].add(tenant)
        self.leases[lease.lease_id] = (tenant, table, len(tokens))

    @rule(wanted=st.integers(1, 4))
    def ask(self, wanted: int) -> None:
        blocks = self.manager.credit(self.session, wanted, 0).tolist()
        self._handed(blocks, "")
        self.credit += blocks

    def _report(self, *reports: SequenceReport, returned: list[int] | None = None) -> None:
        answer = self.manager.report(
            self.session, reports, returned=np.array(returned or [], np.int32), wanted=0,
            applied_revision=self.manager.revision, now_ns=0,
        )  # fmt: skip
        assert answer.refusals == []
        assert self.manager.take_scrub().tolist() == []

    @rule(count=st.integers(1, 3))
    def give_back(self, count: int) -> None:
        returned, self.credit = self.credit[:count], self.credit[count:]
        self._report(returned=returned)

    @rule(which=st.integers(0, 9), grow=st.booleans(), release=st.booleans())
    def step(self, which: int, grow: bool, release: bool) -> None:
        if not self.leases:
            return
        number = sorted(self.leases)[which % len(self.leases)]
        tenant, table, tokens = self.leases[number]
        taken: list[int] = []
        more: list[int] = []
        if grow and self.credit:
            taken, more = [self.credit.pop()], [5, 5]
            self.content[taken[0]].add(tenant)
        sealed = tokens + len(more)
        self._report(SequenceReport(number, np.array(taken, np.int32), pack(more), sealed, True, release))
        if release:
            del self.leases[number]
        else:
            self.leases[number] = (tenant, table + taken, tokens + len(more))

    @rule(dead=st.booleans(), zeroed=st.booleans())
    def lose_the_session(self, dead: bool, zeroed: bool) -> None:
        session = self.session
        self.manager.detach(session, process_dead=dead, now_ns=0)
        if not dead:
            self.manager.process_gone(session)
        self.unsure.update(self.credit, *(table for _, table, _ in self.leases.values()))
        for block in self.credit:
            self.content[block] = set() if zeroed else {"?"}
        self.leases.clear()
        self.credit = []
        self.session = self.manager.attach(decoder_name="d", process_id=1, now_ns=0)

    @rule(tenant=st.sampled_from("ab"))
    def purge(self, tenant: str) -> None:
        self.manager.purge(TenantId(tenant))
        self.unsure.update(block for block, writers in self.content.items() if tenant in writers)

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "manager"):
            assert self.manager.check_integrity() == []


ScrubMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestScrubMachine = ScrubMachine.TestCase
