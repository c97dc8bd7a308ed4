"""The integrity check is itself checked: each way to break the structures is found, and the unbroken state passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from cachemgr.blocks import BlockState
from cachemgr.ids import LeaseId, NodeId, SessionId, TenantId
from cachemgr.leases import Lease
from cachemgr.nodes import Node
from cachemgr.policies import LeastRecentlyUsed
from cachemgr.quotas import Quota
from cachemgr.results import CopyPlan
from cachemgr.state import CacheState
from tests.cachemgr.core_rig import Rig, pack, root_of

B = 4


def busy_rig() -> Rig:
    """Two tenants, splits, tails, running leases, a pending copy, a fork, credit, duplicates and a quarantine."""
    rig = Rig(num_blocks=64)
    for tenant in ("a", "b"):
        for tail in (100, 200, 300):
            rig.serve([*range(3 * B), *range(tail, tail + B + 2)], tenant=tenant)
        rig.serve([*range(B), 7, 8], tenant=tenant)
        rig.serve(range(700, 700 + 3 * B), tenant=tenant)
    lost = rig.attach()
    gone = rig.acquire(range(500, 500 + 2 * B), session=lost)
    rig.manager.detach(lost, process_dead=False, now_ns=0)
    rig.sequences.remove(gone)
    first, second = (rig.acquire([*range(3 * B), *range(900, 900 + 2 * B + 2)]) for _ in range(2))
    rig.compute(first)
    rig.compute(second)
    rig.report(rig.message(first), wanted=4)
    rig.report(rig.message(second), applied_revision=0)
    rig.fork(first, [1, 2], 5 * B + 1)
    rig.acquire([*range(3 * B), *range(100, 100 + B + 1), 55])
    rig.manager.set_quota(TenantId("a"), Quota(pin_blocks=8))
    pinned = pack([*range(3 * B), *range(300, 300 + B)])
    rig.manager.pin(TenantId("a"), root=root_of("a"), tokens=pinned, now_ns=0)
    rig.check()
    return rig


def state_of(rig: Rig) -> CacheState:
    return rig.manager._state


def inner(state: CacheState) -> Node:
    """A node with children."""
    return next(node for node in state.index.forest.nodes.values() if len(node.children) > 1)


def idle_leaf(state: CacheState) -> Node:
    """A leaf of whole blocks that nobody holds."""
    return next(
        node
        for node in state.index.forest.nodes.values()
        if not node.children and not node.tail and state.pool.references[node.blocks].max() == 1
    )


def tail(state: CacheState) -> Node:
    return next(node for node in state.index.forest.nodes.values() if node.tail)


def lease_of(state: CacheState) -> Lease:
    """A lease with published and unpublished blocks."""
    return next(lease for lease in state.book.leases.values() if 0 < lease.num_published < lease.num_blocks)


def swap_within_a_node(state: CacheState) -> None:
    node = next(node for node in state.index.forest.nodes.values() if len(node.blocks) > 2)
    blocks = node.blocks.copy()
    blocks[[0, 1]] = blocks[[1, 0]]
    node.blocks = blocks


def swap_between_nodes(state: CacheState) -> None:
    left, right = idle_leaf(state), tail(state)
    left.blocks, right.blocks = (
        np.concatenate((right.blocks, left.blocks[1:])),
        np.concatenate((left.blocks[:1], right.blocks[1:])),
    )


def swap_in_a_table(state: CacheState) -> None:
    lease = lease_of(state)
    lease.table[[0, 1]] = lease.table[[1, 0]]


def drop_a_reference(state: CacheState) -> None:
    state.pool.references[lease_of(state).table[0]] -= 1


def add_a_reference(state: CacheState) -> None:
    state.pool.references[idle_leaf(state).blocks[0]] += 1


def keep_a_stale_entry(state: CacheState) -> None:
    blocks = idle_leaf(state).blocks
    state.pool.unpublish_idle(blocks)


def wrong_owner_of_a_block(state: CacheState) -> None:
    state.pool.owner[idle_leaf(state).blocks[0]] = 99


def wrong_owner_of_a_tree(state: CacheState) -> None:
    next(iter(state.index.forest.trees.values())).owner = 99


def move_a_subtree_to_the_other_tenant(state: CacheState) -> None:
    trees = list(state.index.forest.trees.values())
    node = next(iter(trees[0].root.children))
    trees[0].root.children.remove(node.edge[: state.index.block_bytes])
    node.edge = b"\x55" + node.edge[1:]  # a key that the other tree does not have
    trees[1].root.children.add(node.edge[: state.index.block_bytes], node)
    node.parent, node.tree = trees[1].root, trees[1]


def orphan_a_node(state: CacheState) -> None:
    inner(state).children._nodes.popitem()


def lose_a_node_from_the_register(state: CacheState) -> None:
    del state.index.forest.nodes[idle_leaf(state).node_id]


def wrong_parent(state: CacheState) -> None:
    idle_leaf(state).parent = tail(state)


def unsorted_children(state: CacheState) -> None:
    node = inner(state)
    node.children._keys[0].reverse()


def wrong_key(state: CacheState) -> None:
    node = inner(state)
    node.children._keys[0][0] = b"\0" * state.index.block_bytes


def forget_the_key_of_a_node(state: CacheState) -> None:
    idle_leaf(state).key = b"\1" * state.index.block_bytes


def take_an_inner_node_for_a_leaf(state: CacheState) -> None:
    inner(state).leaf_of = inner(state).parent


def take_a_leaf_for_another_parents(state: CacheState) -> None:
    idle_leaf(state).leaf_of = inner(state)


def change_tokens_of_a_held_node(state: CacheState) -> None:
    lease = lease_of(state)
    node = state.index.forest.nodes[NodeId(int(state.index.forest.node_of[lease.table[1]]))]
    node.edge = node.edge[:-4] + b"\x7f\0\0\0"


def shorten_an_edge(state: CacheState) -> None:
    node = idle_leaf(state)
    node.edge = node.edge[:-4]


def tail_that_is_whole(state: CacheState) -> None:
    node = tail(state)
    node.edge = node.edge.ljust(state.index.block_bytes, b"\1")


def miscount_tails(state: CacheState) -> None:
    inner(state).tails += 1


def block_outside_the_pool(state: CacheState) -> None:
    idle_leaf(state).blocks = idle_leaf(state).blocks + 10_000


def list_a_block_twice(state: CacheState) -> None:
    node = idle_leaf(state)
    node.blocks = np.concatenate((node.blocks[:-1], tail(state).blocks))


def free_block_twice_on_the_stack(state: CacheState) -> None:
    state.pool.free_stack[0] = state.pool.free_stack[1]


def held_block_on_the_stack(state: CacheState) -> None:
    state.pool.free_stack[0] = lease_of(state).table[0]


def wrong_state(state: CacheState) -> None:
    state.pool.state[idle_leaf(state).blocks[0]] = BlockState.ACTIVE


def forget_that_it_is_published(state: CacheState) -> None:
    state.pool.published[idle_leaf(state).blocks[0]] = False


def miscount_cached(state: CacheState) -> None:
    state.pool.num_cached += 1


def miscount_published(state: CacheState) -> None:
    state.pool.num_published += 1


def lose_the_quarantine(state: CacheState) -> None:
    state.book.quarantine.clear()


def quarantine_of_a_live_session(state: CacheState) -> None:
    (blocks,) = state.book.quarantine.values()
    state.book.quarantine = {SessionId(1): blocks}


def quarantine_a_held_block(state: CacheState) -> None:
    state.book.quarantine[SessionId(77)] = lease_of(state).table[:1].copy()


def lose_credit(state: CacheState) -> None:
    state.book.sessions[SessionId(1)].credit.pop()


def credit_of_a_table_block(state: CacheState) -> None:
    lease = lease_of(state)
    state.book.sessions[lease.session_id].credit.add(int(lease.table[-1]))


def lose_a_lease(state: CacheState) -> None:
    lease = lease_of(state)
    del state.book.sessions[lease.session_id].leases[lease.lease_id]


def lease_of_a_lost_session(state: CacheState) -> None:
    lease_of(state).session_id = SessionId(99)


def seal_too_much(state: CacheState) -> None:
    lease_of(state).sealed += 100


def publish_too_much(state: CacheState) -> None:
    lease = lease_of(state)
    lease.num_published = lease.num_blocks


def change_a_token_record(state: CacheState) -> None:
    lease_of(state).tokens[0] ^= 1


def share_a_writable_block(state: CacheState) -> None:
    first, second = [lease for lease in state.book.leases.values() if lease.num_published < lease.num_blocks][:2]
    state.pool.unhold(second.table[second.num_blocks - 1 : second.num_blocks].copy())
    second.table[second.num_blocks - 1] = first.table[first.num_blocks - 1]
    state.pool.hold(first.table[first.num_blocks - 1 : first.num_blocks].copy())


def lose_a_pin(state: CacheState) -> None:
    next(lease for lease in state.book.leases.values() if lease.copy is not None).copy = None


def copy_into_a_foreign_block(state: CacheState) -> None:
    lease = next(lease for lease in state.book.leases.values() if lease.copy is not None)
    assert lease.copy is not None
    lease.copy = CopyPlan(lease.copy.source, int(idle_leaf(state).blocks[0]), 1)


def lose_duplicates(state: CacheState) -> None:
    state.book.sessions[SessionId(1)].deferred.clear()


def miscount_users(state: CacheState) -> None:
    lease_of(state).tree.users += 1


def keep_an_empty_tree(state: CacheState) -> None:
    state.index.forest.tree(1, b"?" * 32)


def lose_a_queue_entry(state: CacheState) -> None:
    state.index.forest.queue.discard(idle_leaf(state))


def forget_the_order_of_a_node(state: CacheState) -> None:
    idle_leaf(state).order = None


def queue_at_another_priority(state: CacheState) -> None:
    idle_leaf(state).priority += 1


def queue_with_another_owner(state: CacheState) -> None:
    node = idle_leaf(state)
    state.index.forest.queue.discard(node)
    state.index.forest.queue.of(99).order_of(node).use(node)


def queue_twice(state: CacheState) -> None:
    node = idle_leaf(state)
    other = state.index.forest.queue.of(node.tree.owner)
    other.orders[99] = LeastRecentlyUsed()
    other.orders[99].use(node)


def queue_a_node_that_is_gone(state: CacheState) -> None:
    node = idle_leaf(state)
    order = node.order
    state.index.forest.remove(node)
    assert order is not None
    order.use(node)


def expire_unwatched(state: CacheState) -> None:
    idle_leaf(state).expires_ns = 5


def miscount_charges(state: CacheState) -> None:
    state.pool.ownership.charged[1] += 1


def miscount_idle(state: CacheState) -> None:
    state.pool.ownership.idle[1] -= 1


def lose_a_pinned_block(state: CacheState) -> None:
    (number,) = state.pins
    state.pins[number] = replace(state.pins[number], blocks=state.pins[number].blocks[:-1])


def lose_a_pins_hold(state: CacheState) -> None:
    state.pins.clear()


def pin_of_another_owner(state: CacheState) -> None:
    (number,) = state.pins
    state.pins[number] = replace(state.pins[number], owner=2)


def pin_blocks_of_several_paths(state: CacheState) -> None:
    (number,) = state.pins
    blocks = state.pins[number].blocks
    state.pins[number] = replace(state.pins[number], blocks=blocks[::-1].copy())


def pin_under_a_wrong_number(state: CacheState) -> None:
    (number,) = state.pins
    state.pins[number + 5] = state.pins.pop(number)


def own_a_block_as_nobody(state: CacheState) -> None:
    block = lease_of(state).table[-1:]
    state.pool.ownership.give(block, 99)


def say_that_credit_is_clean(state: CacheState) -> None:
    block = next(iter(state.book.sessions[SessionId(1)].credit))
    state.pool.ownership.dirty_owner[block] = 0


def forget_whose_content_it_is(state: CacheState) -> None:
    state.pool.ownership.dirty_owner[idle_leaf(state).blocks[0]] = 0


def misplace_a_block(state: CacheState) -> None:
    state.index.forest.position[idle_leaf(state).blocks[0]] += 1


def point_a_block_at_another_node(state: CacheState) -> None:
    state.index.forest.node_of[idle_leaf(state).blocks[0]] = tail(state).node_id


CORRUPTIONS: list[Callable[[CacheState], None]] = [
    swap_within_a_node,
    swap_between_nodes,
    swap_in_a_table,
    drop_a_reference,
    add_a_reference,
    keep_a_stale_entry,
    wrong_owner_of_a_block,
    wrong_owner_of_a_tree,
    move_a_subtree_to_the_other_tenant,
    orphan_a_node,
    lose_a_node_from_the_register,
    wrong_parent,
    unsorted_children,
    wrong_key,
    forget_the_key_of_a_node,
    take_an_inner_node_for_a_leaf,
    take_a_leaf_for_another_parents,
    change_tokens_of_a_held_node,
    shorten_an_edge,
    tail_that_is_whole,
    miscount_tails,
    block_outside_the_pool,
    list_a_block_twice,
    free_block_twice_on_the_stack,
    held_block_on_the_stack,
    wrong_state,
    forget_that_it_is_published,
    miscount_cached,
    miscount_published,
    lose_the_quarantine,
    quarantine_of_a_live_session,
    quarantine_a_held_block,
    lose_credit,
    credit_of_a_table_block,
    lose_a_lease,
    lease_of_a_lost_session,
    seal_too_much,
    publish_too_much,
    change_a_token_record,
    share_a_writable_block,
    lose_a_pin,
    copy_into_a_foreign_block,
    lose_duplicates,
    miscount_users,
    keep_an_empty_tree,
    lose_a_queue_entry,
    forget_the_order_of_a_node,
    queue_at_another_priority,
    queue_with_another_owner,
    queue_twice,
    queue_a_node_that_is_gone,
    expire_unwatched,
    miscount_charges,
    miscount_idle,
    forget_whose_content_it_is,
    lose_a_pinned_block,
    lose_a_pins_hold,
    pin_of_another_owner,
    pin_blocks_of_several_paths,
    pin_under_a_wrong_number,
    own_a_block_as_nobody,
    say_that_credit_is_clean,
    misplace_a_block,
    point_a_block_at_another_node,
]


def test_busy_state_passes() -> None:
    """The state that the corruptions start from has every kind of thing in it and is whole."""
    rig = busy_rig()
    state = state_of(rig)
    assert state.book.quarantine
    assert state.book.sessions[SessionId(1)].deferred
    assert state.book.sessions[SessionId(1)].credit
    assert any(lease.copy is not None for lease in state.book.leases.values())
    assert inner(state) and idle_leaf(state) and tail(state) and lease_of(state)
    assert rig.manager.check_integrity() == []


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
def test_corruption_is_found(corrupt: Callable[[CacheState], None]) -> None:
    """Each seeded corruption is reported; checking changes nothing, so it is reported again."""
    rig = busy_rig()
    corrupt(state_of(rig))
    found = rig.manager.check_integrity()
    assert found
    assert rig.manager.check_integrity() == found


def test_messages_name_no_tokens_and_no_tenants() -> None:
    """What the check says can be shown to any operator."""
    rig = Rig()
    rig.serve([123456] * (2 * B), tenant="secret-tenant")
    state = state_of(rig)
    state.pool.owner[1] = 99
    state.pool.references[2] += 1
    text = " ".join(rig.manager.check_integrity())
    assert "block 1" in text
    assert "123456" not in text
    assert "secret-tenant" not in text


def test_unknown_lease_in_the_register_is_found() -> None:
    """A lease that no session holds is drift."""
    rig = busy_rig()
    state = state_of(rig)
    state.book.leases[LeaseId(999)] = lease_of(state)
    assert rig.manager.check_integrity()
