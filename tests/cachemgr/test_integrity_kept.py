"""The integrity check of kept branches is itself checked: each way to break one is found, the unbroken state passes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cachemgr.ids import SessionId, TenantId
from cachemgr.kept_book import KeptBranch
from cachemgr.leases import Lease
from cachemgr.results import CopyPlan
from cachemgr.state import CacheState
from tests.cachemgr.kept_rig import SECOND, KeptRig

B = 4
TEAM = "@group:team"


def busy_rig() -> KeptRig:
    """A private branch of two tenants each, and one in a wider scope; all published, with a tail, some of it shared."""
    rig = KeptRig(num_blocks=64)
    for tenant in ("a", "b"):
        rig.kept(range(10, 10 + 3 * B + 2), tenant.encode(), tenant=tenant)
    rig.manager.fork_kept(TenantId("a"), b"a", [b"fork"], ttl_ns=SECOND, now_ns=0)
    rig.keep(rig.acquire(range(50, 50 + 3 * B + 2), scope=TEAM, num_tokens=2 * B), b"team", ttl_ns=SECOND)
    rig.check()
    return rig


def branch(state: CacheState, name: bytes = b"a") -> KeptBranch:
    return state.kept.branches[name]


def hold(state: CacheState, name: bytes = b"a") -> Lease:
    return branch(state, name).hold


def another_name(state: CacheState) -> None:
    branch(state).name = b"other"


def miscount_holds(state: CacheState) -> None:
    state.kept.holds[hold(state).table[0]] += 1


def miscount_branches(state: CacheState) -> None:
    state.kept.counts[hold(state).owner] -= 1


def give_it_to_a_session(state: CacheState) -> None:
    hold(state).session_id = SessionId(1)


def let_it_wait_for_a_copy(state: CacheState) -> None:
    table = hold(state).table
    hold(state).copy = CopyPlan(int(table[0]), int(table[1]), 1)


def hold_a_block_twice(state: CacheState) -> None:
    hold(state).table[1] = hold(state).table[0]


def seal_too_much(state: CacheState) -> None:
    hold(state).sealed += B


def forget_tokens(state: CacheState) -> None:
    del hold(state).tokens[B * 4 :]


def lengthen_its_prefix(state: CacheState) -> None:
    hold(state, b"team").prefix_blocks = 9


def publish_too_much(state: CacheState) -> None:
    hold(state).num_published = hold(state).num_blocks + 1


def own_a_block_of_another(state: CacheState) -> None:
    state.pool.owner[hold(state).table[0]] = hold(state, b"b").owner


def change_its_tokens(state: CacheState) -> None:
    hold(state).tokens[0] ^= 1


def swap_its_blocks(state: CacheState) -> None:
    table = hold(state).table
    table[[0, 1]] = table[[1, 0]]


def take_another_tenants_tree(state: CacheState) -> None:
    hold(state).tree = hold(state, b"b").tree


def end_its_tree(state: CacheState) -> None:
    tree = hold(state).tree
    del state.index.forest.trees[tree.owner, tree.root_key]


def end_the_tree_of_its_scope(state: CacheState) -> None:
    tree = hold(state, b"team").prefix_tree
    assert tree is not None
    del state.index.forest.trees[tree.owner, tree.root_key]


CORRUPTIONS: list[tuple[Callable[[CacheState], None], str]] = [
    (another_name, "under another name"),
    (miscount_holds, "count of kept holds"),
    (miscount_branches, "number of branches of a tenant"),
    (give_it_to_a_session, "belongs to a session"),
    (let_it_wait_for_a_copy, "waits for a copy"),
    (hold_a_block_twice, "twice in its table"),
    (seal_too_much, "does not cover its sealed tokens"),
    (forget_tokens, "does not cover its sealed tokens"),
    (lengthen_its_prefix, "prefix in a wider scope is longer"),
    (publish_too_much, "more is published than it holds"),
    (own_a_block_of_another, "of another owner"),
    (change_its_tokens, "its tokens or blocks are not those of node"),
    (swap_its_blocks, "its tokens or blocks are not those of node"),
    (take_another_tenants_tree, "published blocks are no path of the index"),
    (end_its_tree, "the tree that it lies in has ended"),
    (end_the_tree_of_its_scope, "the tree that it lies in has ended"),
]


@pytest.mark.parametrize(("corrupt", "says"), CORRUPTIONS, ids=lambda item: getattr(item, "__name__", ""))
def test_corruption_of_a_kept_branch_is_found(corrupt: Callable[[CacheState], None], says: str) -> None:
    """The check names what is wrong, and neither tokens nor tenants nor handles; before it found nothing."""
    rig = busy_rig()
    assert rig.manager.check_integrity() == []
    corrupt(rig.manager._state)
    found = [line for line in rig.manager.check_integrity() if says in line]
    assert found, rig.manager.check_integrity()
    assert not any(word in line for line in found for word in ("team", "fork", str(np.int32(10))))
