"""The machines find what they are there for: each seeded defect makes one of them fail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from pytest import MonkeyPatch

from cachemgr import groups, window_blocks
from cachemgr.blocks import BlockPool
from cachemgr.grouped_index import GroupedIndex
from cachemgr.leases import LeaseBook, Session
from cachemgr.quotas import Quotas
from cachemgr.radix import PrefixIndex
from tests.cachemgr.test_blocks import PoolMachine
from tests.cachemgr.test_groups_machine import GroupedMachine
from tests.cachemgr.test_leases_machine import LeaseMachine
from tests.cachemgr.test_quota_machine import QuotaMachine
from tests.cachemgr.test_radix import IndexMachine


def floors_are_not_shielded(patch: MonkeyPatch) -> None:
    patch.setattr(Quotas, "shielded", lambda quotas, owner: 0)
    patch.setattr(Quotas, "_spare", lambda quotas, other, floor: quotas._idle.get(other, 0))


def a_floor_is_one_block_short(patch: MonkeyPatch) -> None:
    spare = Quotas._spare
    patch.setattr(Quotas, "_spare", lambda quotas, other, floor: spare(quotas, other, max(0, floor - 1)))


def ceilings_are_not_checked(patch: MonkeyPatch) -> None:
    patch.setattr(Quotas, "left", lambda quotas, owner, reserved=0: 1 << 30)


def own_idle_blocks_are_not_counted_below_a_ceiling(patch: MonkeyPatch) -> None:
    left = Quotas.left
    patch.setattr(
        Quotas, "left", lambda quotas, owner, reserved=0: max(0, left(quotas, owner, reserved) - quotas._idle[owner])
    )


def a_break_ends_the_lease_sooner(patch: MonkeyPatch) -> None:
    def leave(book: LeaseBook, number: object, now: int) -> None:
        session = book.session(number)  # type: ignore[arg-type]
        session.away, session.deadline_ns = True, now + book.grace_ns

    patch.setattr(LeaseBook, "leave", leave)


def an_acknowledgement_takes_one_revision_too_many(patch: MonkeyPatch) -> None:
    take = Session.take_deferred
    patch.setattr(
        Session,
        "take_deferred",
        lambda session, *, applied_revision=-1, lease_id=None: take(
            session, applied_revision=applied_revision + 1, lease_id=lease_id
        ),
    )


def generations_stand_still(patch: MonkeyPatch) -> None:
    free = BlockPool._free

    def stay(pool: BlockPool, blocks: object) -> None:
        free(pool, blocks)  # type: ignore[arg-type]
        pool.generation[blocks] -= 1  # type: ignore[index]

    patch.setattr(BlockPool, "_free", stay)


def a_match_is_one_token_too_long(patch: MonkeyPatch) -> None:
    match = PrefixIndex.match
    patch.setattr(PrefixIndex, "match", lambda index, tree, tokens, count: match(index, tree, tokens, count - 1))


def a_window_of_a_group_is_a_token_too_short(patch: MonkeyPatch) -> None:
    behind = groups.behind
    patch.setattr(groups, "behind", lambda count, window, size: behind(count + 1, window, size))


def window_blocks_that_are_needed_are_taken(patch: MonkeyPatch) -> None:
    patch.setattr(window_blocks, "loose_of", lambda windows, *arguments: np.flatnonzero(windows.of))


def a_hit_does_not_look_for_window_blocks(patch: MonkeyPatch) -> None:
    patch.setattr(GroupedIndex, "usable", lambda index, found: found)


def a_listed_block_gets_no_window_block(patch: MonkeyPatch) -> None:
    patch.setattr(groups, "lend", lambda state, own, listed: None)


DEFECTS: list[tuple[Callable[[MonkeyPatch], None], type[RuleBasedStateMachine]]] = [
    (floors_are_not_shielded, QuotaMachine),
    (a_floor_is_one_block_short, QuotaMachine),
    (ceilings_are_not_checked, QuotaMachine),
    (own_idle_blocks_are_not_counted_below_a_ceiling, QuotaMachine),
    (a_break_ends_the_lease_sooner, LeaseMachine),
    (an_acknowledgement_takes_one_revision_too_many, LeaseMachine),
    (generations_stand_still, PoolMachine),
    (a_match_is_one_token_too_long, IndexMachine),
    (a_window_of_a_group_is_a_token_too_short, GroupedMachine),
    (window_blocks_that_are_needed_are_taken, GroupedMachine),
    (a_hit_does_not_look_for_window_blocks, GroupedMachine),
    (a_listed_block_gets_no_window_block, GroupedMachine),
]


@pytest.mark.parametrize(("defect", "machine"), DEFECTS, ids=lambda item: item.__name__)
def test_a_machine_finds_a_defect(
    defect: Callable[[MonkeyPatch], None], machine: type[RuleBasedStateMachine], monkeypatch: MonkeyPatch
) -> None:
    """Without shrinking, for it is enough that it fails."""
    defect(monkeypatch)
    quick = settings(
        max_examples=300,
        stateful_step_count=40,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=quick)
