"""Kept branches: conversations that wait for their next turn. They hold blocks, and no decoder works on them.

Invariants: a kept branch never writes; its blocks are the leading ones of its token record, shared like those of any
fork; another tenant's branch, one of another cache key, one that is over and one that never was are one and the same
NOT_FOUND. Where blocks lack, kept branches give way to work (`relief.py`). Called by `manager.py`, `reports.py`,
`admission.py` and `upkeep.py`; it draws no handle and knows no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cachemgr import groups
from cachemgr.ids import BlockRun, TenantId
from cachemgr.kept_book import NO_SESSION, KeptBranch
from cachemgr.layers import shorten
from cachemgr.leases import Lease, Session
from cachemgr.nodes import Tree
from cachemgr.radix import Match
from cachemgr.relief import cut_holds, drop_holds
from cachemgr.results import Keep, Kept, ScopeSpan
from cachemgr.state import CacheState
from cachemgr.windows import passed_by
from common.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted
from common.layout import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Start:
    """Where a new lease begins: whole shared `blocks`, of which the index lists `num_published`, and `num_tail_tokens`
    of `source` to copy (0: none). `store` false: what follows unpublished blocks may not be published either."""

    blocks: BlockRun
    source: int
    num_tail_tokens: int
    num_published: int
    store: bool


# ---- making and finding


def keep(state: CacheState, session: Session, lease: Lease, wanted: Keep, now_ns: int) -> Kept:
    """Makes a kept branch of a lease, which is over. What was cut off while it ran is let go instead: nobody could go
    on from it. Raises ResourceExhausted, with the lease's holds gone all the same: the sequence has ended."""
    if lease.cut_off:
        state.end_lease(session, lease)
        return Kept(lease.lease_id, b"", 0)
    try:
        refuse_more(state, lease.owner, 1)
        _check_name(state, wanted.name)
    except (ResourceExhausted, AlreadyExists):
        state.end_lease(session, lease)
        raise
    for run in session.take_deferred(lease_id=lease.lease_id):
        state.let_go(run)
    state.unpin(lease)
    num_blocks = -(-lease.sealed // state.block_tokens)
    state.pool.unhold(lease.table[num_blocks : lease.num_blocks].copy())
    state.waits.leave(lease)
    hold = replace(lease, session_id=NO_SESSION, table=lease.table[:num_blocks].copy(), num_blocks=num_blocks)
    groups.rest(state, hold)
    _note_kept(state, state.kept.add(wanted.name, hold, now_ns + wanted.ttl_ns))
    state.forget(lease)
    return Kept(lease.lease_id, wanted.name, hold.num_tokens)


def refuse_more(state: CacheState, owner: int, count: int) -> None:
    """Raises ResourceExhausted where an owner may not keep `count` branches more."""
    present = state.kept.count_of(owner)
    if present + count > state.kept.limit:
        raise ResourceExhausted(
            f"the tenant keeps {present} conversations; allowed are {state.kept.limit}",
            subject="kept_branches",
            needed=present + count,
            usable=state.kept.limit,
            reason="TOO_MANY_KEPT",
        )


def find(state: CacheState, tenant: TenantId, name: bytes, now_ns: int, root: bytes | None = None) -> KeptBranch:
    """The tenant's branch of that name, under the cache key root `root` if given. Raises NotFound."""
    branch = state.kept.branches.get(name)
    if (
        branch is None
        or branch.hold.tenant != tenant
        or branch.expires_ns <= now_ns
        or root not in (None, branch.hold.root)
    ):
        raise NotFound("there is no such kept conversation; it may have expired", reason="BRANCH_NOT_FOUND")
    return branch


# ---- what a tenant may do to it


def fork(state: CacheState, tenant: TenantId, name: bytes, names: Sequence[bytes], ttl_ns: int, now_ns: int) -> int:
    """See `CacheManager.fork_kept`."""
    hold = find(state, tenant, name, now_ns).hold
    if not names:
        raise InvalidArgument("count", "is 0; allowed is 1 and more")
    _check_ttl(ttl_ns)
    for new in names:
        _check_name(state, new)
    refuse_more(state, hold.owner, len(names))
    for new in names:
        state.pool.hold(hold.held)
        copied = replace(hold, table=hold.blocks.copy(), parent=hold.lease_id)  # the token record is shared
        copied.lease_id = state.book.next_lease_id()
        copied.behind = 0
        groups.rest(state, copied)
        _note_kept(state, state.kept.add(new, copied, now_ns + ttl_ns))
    state.revision += 1
    return hold.num_tokens


def rollback(state: CacheState, tenant: TenantId, name: bytes, num_tokens: int, now_ns: int) -> None:
    """See `CacheManager.rollback_kept`."""
    hold = find(state, tenant, name, now_ns).hold
    if not 1 <= num_tokens <= hold.num_tokens:
        raise InvalidArgument("num_tokens", f"is {num_tokens}; allowed is 1..{hold.num_tokens}")
    sealed = min(hold.sealed, num_tokens)
    if sealed < hold.prefix_blocks * state.block_tokens:
        sealed -= sealed % state.block_tokens  # of a wider scope's block, a part is nothing that a tenant holds
    if passed_by(state, sealed) < hold.passed:
        sealed = 0  # what would be read from there is gone
    cut_holds(state, hold, -(-sealed // state.block_tokens))
    hold.sealed = sealed
    hold.committed = 0
    hold.tokens = hold.tokens[: num_tokens * TOKEN_BYTES]  # others may share the longer record
    shorten(state, hold, num_tokens)
    state.revision += 1


def drop(state: CacheState, tenant: TenantId, name: bytes, now_ns: int) -> None:
    """See `CacheManager.drop_kept`."""
    _end(state, find(state, tenant, name, now_ns))
    state.revision += 1


def drop_numbered(state: CacheState, branch_id: int) -> TenantId:
    """See `CacheManager.drop_numbered_kept`."""
    branch = state.kept.numbered(branch_id)
    if branch is None:
        raise NotFound("there is no kept conversation of this number", reason="BRANCH_NOT_FOUND")
    _end(state, branch)
    state.revision += 1
    return branch.hold.tenant


def base_of(state: CacheState, branch: KeptBranch, num_tokens: int) -> bytes:
    """The packed tokens of a branch that a new sequence continues: its first `num_tokens`, 0 for all."""
    known = branch.hold.num_tokens
    if not 0 <= num_tokens <= known:
        raise InvalidArgument("base_tokens", f"is {num_tokens}; allowed is 1..{known}; unset means all")
    return bytes(branch.hold.tokens[: (num_tokens or known) * TOKEN_BYTES])


def span_of(state: CacheState, branch: KeptBranch, num_base: int) -> ScopeSpan | None:
    """Where the first `num_base` tokens of a branch lie in a wider scope: a conversation goes on in the scope that it
    was begun in. None where that is its tenant's own."""
    hold = branch.hold
    wider = hold.prefix_tree
    if wider is None:
        return None
    num_tokens = min(hold.prefix_blocks * state.block_tokens, num_base)
    return ScopeSpan(state.tenant_names[wider.owner], wider.root_key, num_tokens)


def longer(state: CacheState, branch: KeptBranch, match: Match, num_base: int, num_tokens: int) -> Start | None:
    """Where a sequence that goes on from the first `num_base` tokens of a branch begins, if the branch holds more of
    them than `match` found: at most `num_tokens` are worth anything. It changes nothing."""
    hold, size = branch.hold, state.block_tokens
    held = min(hold.sealed, num_base, num_tokens)
    if state.window_blocks is not None:
        held = groups.can_begin(state, hold.blocks, held)
    if held <= len(match.blocks) * size + match.num_tail_tokens or passed_by(state, held) < hold.passed:
        return None
    whole, rest = divmod(held, size)
    return Start(
        hold.table[:whole].copy(),
        int(hold.table[whole]) if rest else 0,
        rest,
        min(hold.num_published, whole),
        hold.store,
    )


def lies_in(branch: KeptBranch, key: bytes, prefix_blocks: int) -> bool:
    """Whether a branch's blocks are those of a request whose tree has this key, below a prefix of so many blocks."""
    return branch.hold.tree.root_key == key and branch.hold.prefix_blocks == prefix_blocks


# ---- ending


def expire(state: CacheState, now_ns: int) -> int:
    """Ends the branches whose time is over; returns how many."""
    over = [branch for branch in state.kept.branches.values() if branch.expires_ns <= now_ns]
    for branch in over:
        _end(state, branch)
    state.revision += bool(over)
    return len(over)


def end_all(state: CacheState, owner: int, trees: Sequence[Tree]) -> None:
    """Ends every branch of an owner, and every one whose blocks lay in one of `trees`, which are gone."""
    end_branches(state, lambda hold: hold.owner == owner or hold.tree in trees or hold.prefix_tree in trees)


def end_branches(state: CacheState, is_over: Callable[[Lease], bool]) -> None:
    """Ends every branch whose hold is over."""
    for branch in list(state.kept.branches.values()):
        if is_over(branch.hold):
            _end(state, branch)


def _end(state: CacheState, branch: KeptBranch) -> None:
    hold = branch.hold
    drop_holds(state, hold)
    state.kept.remove(branch)
    state.events.add("branch_ended", state.now_ns, owner=hold.owner, branch=branch.branch_id)
    state.index.forest.forget_if_empty(hold.tree)
    if hold.prefix_tree is not None:
        state.index.forest.forget_if_empty(hold.prefix_tree)


def _note_kept(state: CacheState, branch: KeptBranch) -> None:
    hold = branch.hold
    state.events.add("branch_kept", state.now_ns, owner=hold.owner, branch=branch.branch_id, num_tokens=hold.num_tokens)


def _check_name(state: CacheState, name: bytes) -> None:
    if not name or name in state.kept.branches:
        raise AlreadyExists("a kept branch has this name already", reason="BRANCH_NAME_IN_USE")


def _check_ttl(ttl_ns: int) -> None:
    if ttl_ns <= 0:
        raise InvalidArgument("ttl_ns", f"is {ttl_ns}; allowed is 1 and more")
