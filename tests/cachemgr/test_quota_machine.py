"""Floors, ceilings and weights against a naive count of whose the blocks are.

The model never asks the quotas: it counts blocks by tenant from the list of blocks before and after each operation.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cachemgr.blocks import BlockState
from cachemgr.ids import TenantId
from cachemgr.quotas import Quota
from common.errors import InvalidArgument, ResourceExhausted
from tests.cachemgr.core_rig import Rig, Running

BLOCK_TOKENS = 2
NUM_BLOCKS = 16
TENANTS = ("a", "b", "c")
TENANT = st.sampled_from(TENANTS)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class QuotaMachine(RuleBasedStateMachine):
    """Nobody passes its ceiling, and nobody is pushed below its floor by another, whatever they do."""

    @initialize()
    def start(self) -> None:
        self.rig = Rig(num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS)
        self.quotas = {tenant: Quota() for tenant in TENANTS}
        self.owed = dict.fromkeys(TENANTS, 0)

    def _count(self) -> dict[str, tuple[int, int]]:
        """(charged, idle) blocks by tenant."""
        counts = {tenant: [0, 0] for tenant in TENANTS}
        for view in self.rig.manager.list_blocks(limit=NUM_BLOCKS).items:
            if view.tenant in counts and view.state in (BlockState.ACTIVE, BlockState.CACHED):
                counts[view.tenant][0] += 1
                counts[view.tenant][1] += view.state == BlockState.CACHED
        return {tenant: (charged, idle) for tenant, (charged, idle) in counts.items()}

    def _duplicates(self) -> dict[str, int]:
        """Blocks by tenant that only wait for the decoder to say that it has switched: its next message frees them."""
        state, found = self.rig.manager._state, dict.fromkeys(TENANTS, 0)
        for session in state.book.sessions.values():
            for block in (int(block) for run in session.deferred for block in run.blocks):
                tenant = state.tenant_names[state.pool.owner[block]]
                if tenant in found and state.pool.references[block] == 1 and not state.pool.published[block]:
                    found[tenant] += 1
        return found

    def _judge(self, actor: str | None, before: dict[str, tuple[int, int]]) -> None:
        """What an operation of `actor` did to everybody."""
        after = self._count()
        for tenant, (charged, _) in after.items():
            had, quota = before[tenant][0], self.quotas[tenant]
            if quota.ceiling_blocks:
                assert charged <= max(quota.ceiling_blocks, had if tenant != actor else 0) or charged <= had
            if tenant != actor:
                assert charged >= min(had - self.owed[tenant], quota.floor_blocks), (tenant, actor, before, after)

    @rule(
        tenant=TENANT, floor=st.integers(0, 8), ceiling=st.sampled_from([0, 0, 3, 6, 10]),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
    )  # fmt: skip
    def set_quota(self, tenant: str, floor: int, ceiling: int, weight: float) -> None:
        quota = Quota(floor_blocks=floor, ceiling_blocks=ceiling, weight=weight)
        others = sum(self.quotas[other].floor_blocks for other in TENANTS if other != tenant)
        try:
            self.rig.manager.set_quota(TenantId(tenant), quota)
        except InvalidArgument:
            assert 0 < ceiling < floor
        except ResourceExhausted as error:
            assert error.reason == "FLOORS_EXCEED_POOL"
            assert floor + others > NUM_BLOCKS
        else:
            assert floor + others <= NUM_BLOCKS
            self.quotas[tenant] = quota

    def _acquire(self, tenant: str, tokens: list[int]) -> Running | None:
        before = self._count()
        needed = -(-len(tokens) // BLOCK_TOKENS)
        free = self.rig.manager.snapshot().free_blocks
        try:
            sequence = self.rig.acquire(tokens, tenant=tenant)
        except ResourceExhausted as error:
            assert self._count() == before
            if error.reason == "QUOTA_EXCEEDED":
                # With all its idle blocks dropped it would still be too much.
                charged, idle = before[tenant]
                ceiling = self.quotas[tenant].ceiling_blocks
                assert ceiling
                assert charged - idle + needed > ceiling
            else:
                # Waiting helps unless the others' floors keep too much, whoever ends.
                kept = sum(
                    min(idle, self.quotas[other].floor_blocks) for other, (_, idle) in before.items() if other != tenant
                )
                assert error.reason == ("POOL_FULL" if needed <= NUM_BLOCKS - kept else "EXCEEDS_USABLE")
                mine = sum(
                    idle if other == tenant else max(0, min(idle, charged - self.quotas[other].floor_blocks))
                    for other, (charged, idle) in before.items()
                )
                assert needed > free + mine
            return None
        self._judge(tenant, before)
        return sequence

    @rule(tenant=TENANT, tokens=TOKENS)
    def begin(self, tenant: str, tokens: list[int]) -> None:
        self._acquire(tenant, tokens)

    @rule(tenant=TENANT, tokens=TOKENS)
    def serve(self, tenant: str, tokens: list[int]) -> None:
        sequence = self._acquire(tenant, tokens)
        if sequence is not None:
            before, self.owed = self._count(), self._duplicates()
            self.rig.finish(sequence)
            self._judge(tenant, before)

    @precondition(lambda self: self.rig.sequences)
    @rule(data=st.data(), wanted=st.integers(0, 2))
    def step(self, data: st.DataObject, wanted: int) -> None:
        sequence = data.draw(st.sampled_from(self.rig.sequences))
        before = self._count()
        self.rig.compute(sequence)
        answer = self.rig.report(self.rig.message(sequence))
        assert answer.refusals == []
        # What it publishes may take the place of a shorter tail of its tenant's own.
        self._judge(sequence.tenant, {**before, sequence.tenant: (before[sequence.tenant][0], 0)})
        if wanted:
            before, self.owed = self._count(), self._duplicates()
            self.rig.report(wanted=wanted)
            self._judge(None, before)

    @precondition(lambda self: self.rig.sequences)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        """Growth above a ceiling ends the sequence with its numbers; it never takes another's floor."""
        sequence = data.draw(st.sampled_from(self.rig.sequences))
        before = self._count()
        if not self.rig.grow(sequence, 1):
            return
        self.rig.compute(sequence)
        answer = self.rig.report(self.rig.message(sequence))
        ceiling = self.quotas[sequence.tenant].ceiling_blocks
        assert answer.refusals == [] or (ceiling and answer.refusals[0].error.reason == "QUOTA_EXCEEDED")
        self._judge(sequence.tenant, before)

    @precondition(lambda self: len(self.rig.sequences) > 1)
    @rule()
    def grow_together(self) -> None:
        """Of those that grow in one step only tenants with a ceiling lose any, and the others lose nothing."""
        before = self._count()
        grown = [sequence for sequence in self.rig.sequences if self.rig.grow(sequence, 1)]
        for sequence in grown:
            self.rig.compute(sequence)
        answer = self.rig.report(*map(self.rig.message, grown))
        refused = {refusal.lease_id for refusal in answer.refusals}
        for sequence in grown:
            if sequence.lease_id in refused:
                assert self.quotas[sequence.tenant].ceiling_blocks
        after, actors = self._count(), {sequence.tenant for sequence in grown}
        self._judge(None, {tenant: (after if tenant in actors else before)[tenant] for tenant in before})

    @precondition(lambda self: self.rig.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.rig.sequences))
        before = self._count()
        self.rig.finish(sequence)
        self._judge(sequence.tenant, before)

    @rule()
    def return_credit(self) -> None:
        self.rig.report(returned=self.rig.credit[self.rig.session])

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.check()
        for tenant, (charged, idle) in self._count().items():
            usage = self.rig.manager.quota_usage(TenantId(tenant))
            assert (usage.used_blocks, usage.idle_blocks) == (charged, idle)
            assert usage.quota == self.quotas[tenant]
        self.owed = self._duplicates()


QuotaMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestQuotaMachine = QuotaMachine.TestCase
