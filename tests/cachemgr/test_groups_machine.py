"""Any history of two decoders keeps every invariant where some layers have a window: what is read is always there.

As `test_manager_machine.py`, with window blocks, whose cells the decoders find by what they were told alone.
"""

from __future__ import annotations

from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import consumes, initialize, rule

from cachemgr import groups
from cachemgr.blocks import NO_OWNER
from cachemgr.ids import TenantId
from cachemgr.quotas import Quota
from cachemgr.results import Keep
from cachemgr.window_blocks import reach_of
from common.errors import FailedPrecondition, NotFound, ResourceExhausted
from tests.cachemgr.core_rig import Rig, Running, pack, root_of
from tests.cachemgr.test_manager_machine import BLOCK_TOKENS, NUM_BLOCKS, PROMPTS, TENANTS, ManagerMachine

LONG = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=8, max_size=24)


class GroupedMachine(ManagerMachine):
    """The naive oracle of a hit: the longest cached prefix of which each key that a window reads is in a window block
    that its block has."""

    @initialize(
        name_bits=st.sampled_from([128, 1]), window=st.integers(1, 7), more=st.integers(0, 4), floors=st.booleans()
    )
    def start(self, name_bits: int, window: int, more: int, floors: bool) -> None:
        count = min(NUM_BLOCKS, 2 * reach_of(window, BLOCK_TOKENS) + more)
        self.rig = Rig(
            num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, name_bits=name_bits, window_tokens=window,
            num_window_blocks=count,
        )  # fmt: skip
        self.sessions = [self.rig.session, self.rig.attach()]
        self.gone = []
        self.admitted = self.hits = self.hit_tokens = 0
        self.purged = set()
        self.names = 0
        if floors:
            self.rig.manager.set_quota(TenantId("a"), Quota(floor_blocks=NUM_BLOCKS // 2, pin_blocks=4))

    def _resident(self, tenant: str, tokens: list[int]) -> tuple[int, int]:
        whole, reach = super()._resident(tenant, tokens)
        ends = range(whole - whole % BLOCK_TOKENS, -1, -BLOCK_TOKENS)
        whole = next(end for end in ends if self._is_there(tenant, tokens, end))
        return whole, reach if self._is_there(tenant, tokens, reach) else whole

    def _is_there(self, tenant: str, tokens: list[int], count: int) -> bool:
        """Whether a published block has the window block for each key that the token after `count` reads."""
        windows = self.rig.manager._state.window_blocks
        assert windows is not None
        wanted = {self._cell(tenant, tokens, place + 1) for place in range(count) if place > count - self._window}
        for view in self.rig.manager.list_blocks(limit=NUM_BLOCKS).items:
            if view.published and windows.of[view.block]:
                wanted -= set(self.rig.window_cells[int(windows.of[view.block])][: view.num_tokens])
        return not wanted

    @property
    def _window(self) -> int:
        return self.rig.window_tokens

    @rule(target=ManagerMachine.running, tenant=TENANTS, tokens=LONG, which=st.integers(0, 1), no_store=st.booleans())
    def begin_long(self, tenant: str, tokens: list[int], which: int, no_store: bool) -> object:
        return self.acquire(tenant, tokens, which, False, no_store, False, 0)

    def acquire(
        self, tenant: str, tokens: list[int], which: int, no_read: bool, no_store: bool, resumed: bool, priority: int
    ) -> Running | None:
        whole, reach = (0, 0) if no_read else self._resident(tenant, tokens)
        before = self.rig.manager.snapshot()
        try:
            sequence = self.rig.acquire(
                tokens, tenant=tenant, session=self.sessions[which], no_read=no_read, no_store=no_store,
                resumed=resumed, priority=priority,
            )  # fmt: skip
        except ResourceExhausted as error:
            assert error.usable < error.needed
            assert before == self.rig.manager.snapshot() or self.names  # kept branches may have given way
            return None
        assert sequence.computed == reach or sequence.computed <= whole  # without the copy it may lack more
        assert (sequence.copy is not None) == (sequence.computed % BLOCK_TOKENS > 0)
        assert sequence.computed // BLOCK_TOKENS < len(sequence.table) <= -(-len(tokens) // BLOCK_TOKENS)
        if not resumed:
            self.admitted += 1
            self.hits += sequence.computed > 0
            self.hit_tokens += sequence.computed
        return sequence

    @rule(sequence=ManagerMachine.running, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def decode(self, sequence: Running | None, tokens: list[int]) -> None:
        if sequence is None or not self._alive(sequence):
            return
        if not self.rig.credit[sequence.session]:
            self.ask_credit(self.sessions.index(sequence.session), 2)
        self.rig.compute(sequence)
        if sequence.computed == len(sequence.tokens):
            for token in tokens:
                if not self.rig.grow(sequence, token):
                    break
            self.rig.compute(sequence)
        assert self.rig.report(self.rig.message(sequence), session=sequence.session).refusals == []

    @rule(target=ManagerMachine.running, sequence=ManagerMachine.running, share=st.integers(1, 24))
    def fork(self, sequence: Running | None, share: int) -> object:
        if sequence is None or not self._alive(sequence) or sequence.copy is not None:
            return None
        self.rig.report(self.rig.message(sequence), session=sequence.session)
        count = min(share, sequence.computed)
        made = self.rig.fork(sequence, [1, 2], count) if count else []
        assert all((branch.copy is not None) == (count % BLOCK_TOKENS > 0) for branch in made)
        return made[0] if made else None

    @rule(sequence=ManagerMachine.running, keep=st.integers(1, 24))
    def rollback(self, sequence: Running | None, keep: int) -> None:
        if sequence is None or not self._alive(sequence) or sequence.copy is not None:
            return
        self.rig.report(self.rig.message(sequence), session=sequence.session)
        keep = min(keep, len(sequence.tokens))
        try:
            plan = self.rig.manager.rollback(sequence.session, sequence.lease_id, keep, 0)
        except ResourceExhausted:
            return
        except FailedPrecondition as error:
            assert error.reason == "WINDOW_PASSED"
            return
        sequence.tokens = sequence.tokens[:keep]
        sequence.reported = keep
        sequence.computed = min(sequence.computed, keep)
        sequence.table = sequence.table[: -(-keep // BLOCK_TOKENS)]
        if plan is not None:
            sequence.table[sequence.computed // BLOCK_TOKENS] = plan.target
            sequence.copy = plan
        self.rig.tell(sequence.session, sequence.table, plan)

    @rule(which=st.integers(0, 1), wanted=st.integers(0, 4))
    def ask_credit(self, which: int, wanted: int) -> None:
        session = self.sessions[which]
        usable, kept = self.rig.manager._state.room_for(NO_OWNER), len(self.rig.manager._state.kept)
        most = groups.room(self.rig.manager._state, NO_OWNER, wanted)
        granted = self.rig.manager.credit(session, wanted, 0).tolist()
        assert len(granted) == min(wanted, usable, most) or (kept and len(granted) <= most)
        self.rig.credit[session] += granted
        self.rig.tell(session, granted)

    @rule(sequence=consumes(ManagerMachine.running))
    def keep(self, sequence: Running | None) -> None:
        """A conversation is kept, and goes away by itself where it is in the way."""
        if sequence is None or not self._alive(sequence):
            return
        self.rig.compute(sequence)
        self.names += 1
        message = self.rig.message(sequence, release=True)._replace(keep=Keep(b"%d" % self.names, 10**9))
        self.rig.report(message, session=sequence.session)

    @rule(tenant=TENANTS, tokens=PROMPTS, pin=st.booleans())
    def pin(self, tenant: str, tokens: list[int], pin: bool) -> None:
        manager = self.rig.manager
        if not pin:
            for number in list(manager._state.pins):
                manager.unpin(number)
            return
        with suppress(ResourceExhausted, NotFound):
            manager.pin(TenantId(tenant), root=root_of(tenant), tokens=pack(tokens), now_ns=0)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            for number in list(self.rig.manager._state.pins):
                self.rig.manager.unpin(number)
            self.rig.manager.tick(2 * 10**9)
        super().teardown()


GroupedMachine.TestCase.settings = settings(ManagerMachine.TestCase.settings, max_examples=60)
TestGroupedMachine = GroupedMachine.TestCase
