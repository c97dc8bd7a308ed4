"""Seeded defects of the core: what a careless change could do. The simulation must find each of them.

Each function breaks one rule by a monkeypatch. They are positive controls: without them a simulation that finds nothing
says nothing. Called by `test_defects.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pytest import MonkeyPatch

from cachemgr import (
    admission,
    branches,
    claim_plans,
    claims,
    groups,
    kept,
    layers,
    radix,
    reports,
    resuming,
    sealing,
    state,
    upkeep,
    window_blocks,
    window_room,
    windows,
)
from cachemgr.adoption import LIMBO
from cachemgr.blocks import BlockPool
from cachemgr.gaps import GappedIndex
from cachemgr.grouped_index import GroupedIndex
from cachemgr.journal import IndexJournal
from cachemgr.leases import Lease, LeaseBook, Session
from cachemgr.manager import CacheManager
from cachemgr.nodes import NO_BLOCKS
from cachemgr.ownership import Ownership
from cachemgr.quotas import Quotas
from cachemgr.radix import PrefixIndex
from cachemgr.reclaim import Reclaimer
from cachemgr.state import CacheState
from cachemgr.window_blocks import WindowBlocks

Defect = Callable[[MonkeyPatch], None]


def _wrap(patch: MonkeyPatch, holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replaces `holder.name` by `wrapper(original, ...)`."""
    original = getattr(holder, name)
    patch.setattr(holder, name, lambda *arguments, **named: wrapper(original, *arguments, **named))


def the_last_token_is_matched(patch: MonkeyPatch) -> None:
    """A hit covers the whole prompt: nothing is left to compute."""
    _wrap(patch, PrefixIndex, "match", lambda match, index, tree, tokens, count: match(index, tree, tokens, count + 1))


def a_match_is_one_token_too_long(patch: MonkeyPatch) -> None:
    """The first token that differs counts as equal."""

    def one_more(common: Any, left: bytes, right: bytes) -> int:
        return int(min(common(left, right) + 1, len(left) // 4, len(right) // 4))

    _wrap(patch, radix, "common_tokens", one_more)


def tokens_are_not_compared(patch: MonkeyPatch) -> None:
    """What begins alike is taken for equal."""
    patch.setattr(radix, "common_tokens", lambda left, right: min(len(left), len(right)) // 4)


def tenants_share_a_tree(patch: MonkeyPatch) -> None:
    """The owner is not part of a tree's key."""
    _wrap(patch, CacheState, "owner_of", lambda owner_of, state, tenant: owner_of(state, "tenant-1"))
    _wrap(patch, CacheState, "known_owner", lambda known, state, tenant: known(state, "tenant-1"))


def blocks_are_published_before_they_are_computed(patch: MonkeyPatch) -> None:
    """The first seal publishes the whole prompt."""

    def eager(seal: Any, state: Any, session: Any, lease: Any, sealed: int) -> Any:
        return seal(state, session, lease, max(sealed, min(lease.num_tokens, lease.num_blocks * state.block_tokens)))

    _wrap(patch, reports, "seal", eager)


def a_tail_is_published_beyond_its_seal(patch: MonkeyPatch) -> None:
    """The partly filled tail counts one token that nobody computed."""

    def longer(publish_tail: Any, state: Any, lease: Any, *more: Any) -> None:
        if lease.sealed % state.block_tokens and lease.sealed < lease.num_tokens:
            lease.sealed += 1
        publish_tail(state, lease, *more)

    _wrap(patch, reports, "publish_tail", longer)


def matches_are_not_pinned_before_the_allocation(patch: MonkeyPatch) -> None:
    """What was matched is held after the rest was allocated, which may have evicted it."""
    late: list[Any] = []
    patch.setattr(BlockPool, "hold_published", lambda pool, blocks, idle, counts: late.append(blocks))

    def allocate(original: Any, state: Any, count: int, owner: int, **asking: int) -> Any:
        blocks = original(state, count, owner, **asking)
        while late:
            state.pool.hold(late.pop())
        return blocks

    _wrap(patch, CacheState, "allocate", allocate)


def held_blocks_are_evicted(patch: MonkeyPatch) -> None:
    """Eviction does not look at the references."""

    def blind(original: Any, reclaimer: Any, *arguments: Any) -> Any:
        holders, references = reclaimer._holders, reclaimer._references
        reclaimer._references = np.minimum(references, 1)
        reclaimer._holders = memoryview(reclaimer._references)
        try:
            return original(reclaimer, *arguments)
        finally:
            reclaimer._holders, reclaimer._references = holders, references

    _wrap(patch, Reclaimer, "_take_from", blind)


def nothing_is_quarantined(patch: MonkeyPatch) -> None:
    """A lost session's blocks are free at once, whoever may still write them."""
    _wrap(patch, upkeep, "detach", lambda detach, state, session, **_: detach(state, session, process_dead=True))


def a_quarantine_never_ends(patch: MonkeyPatch) -> None:
    """The death of a process frees nothing."""
    patch.setattr(upkeep, "process_gone", lambda state, session: 0)


def the_source_of_a_copy_stays_held(patch: MonkeyPatch) -> None:
    """A copy that has run does not let its source go."""

    def forget(unpin: Any, state: Any, lease: Any, **_: Any) -> Any:
        lease.copy = None
        return NO_BLOCKS

    _wrap(patch, CacheState, "unpin", forget)


def the_source_of_a_fork_is_not_held(patch: MonkeyPatch) -> None:
    """The parent may end and its tail be evicted before a branch has copied it."""
    patch.setattr(branches, "_pin", lambda state, source, target, count: branches.CopyPlan(source, target, count))


def a_fork_copies_a_token_too_few(patch: MonkeyPatch) -> None:
    """The branch lacks the last token of the shared tail."""
    _wrap(patch, branches, "_pin", lambda pin, *arguments: _shorter(pin(*arguments)))


def a_partial_hit_copies_a_token_too_few(patch: MonkeyPatch) -> None:
    """The lease claims a token that the copy does not bring."""
    _wrap(patch, admission, "CopyPlan", lambda plan, *arguments: _shorter(plan(*arguments)))


def _shorter(plan: Any) -> Any:
    return plan._replace(num_tokens=plan.num_tokens - 1)


def a_shared_tail_is_written(patch: MonkeyPatch) -> None:
    """Rollback into a published block gives no copy of it."""
    patch.setattr(branches, "_is_shared", lambda state, lease, sealed: False)


def generations_stand_still(patch: MonkeyPatch) -> None:
    """A block that was freed and given out again has the handle that it had."""

    def free(original: Any, pool: Any, blocks: Any) -> None:
        original(pool, blocks)
        pool.generation[blocks] -= 1

    _wrap(patch, BlockPool, "_free", free)


def duplicates_are_freed_before_the_table_is_switched(patch: MonkeyPatch) -> None:
    """The next report frees them, whatever it acknowledges."""

    def everything(take: Any, session: Any, *, applied_revision: int = -1, lease_id: Any = None) -> Any:
        return take(session, applied_revision=1 << 60, lease_id=lease_id)

    _wrap(patch, Session, "take_deferred", everything)


def duplicates_are_never_freed(patch: MonkeyPatch) -> None:
    """No acknowledgement is heard."""

    def nothing(take: Any, session: Any, *, applied_revision: int = -1, lease_id: Any = None) -> Any:
        return take(session, lease_id=lease_id) if lease_id is not None else []

    _wrap(patch, Session, "take_deferred", nothing)


def a_replacement_is_not_told(patch: MonkeyPatch) -> None:
    """The manager switches to the published blocks and the decoder does not hear of it."""
    _wrap(patch, reports, "report", lambda report, *a, **named: report(*a, **named)._replace(replacements=[]))


def a_replacement_is_told_at_the_wrong_place(patch: MonkeyPatch) -> None:
    """The table changes one block too late."""

    def shifted(make: Any, lease: Any, first_index: int, blocks: Any) -> Any:
        return make(lease, first_index + 1, blocks)

    _wrap(patch, sealing, "Replacement", shifted)


def a_refused_lease_is_freed_at_once(patch: MonkeyPatch) -> None:
    """The decoder that is told of the refusal still writes."""

    def at_once(original: Any, state: Any, session: Any, sequence: Any) -> None:
        lease = session.leases.get(sequence.lease_id)
        if lease is not None:
            state.end_lease(session, lease)

    _wrap(patch, reports, "end_refused", at_once)


def credit_is_not_booked(patch: MonkeyPatch) -> None:
    """Blocks are lent and nobody knows to whom."""

    def grant(original: Any, state: Any, session: Any, wanted: int) -> Any:
        blocks = original(state, session, wanted)
        session.credit.difference_update(blocks.tolist())
        return blocks

    _wrap(patch, reports, "_grant_credit", grant)


def more_room_is_promised_than_there_is(patch: MonkeyPatch) -> None:
    """Quarantined blocks are counted as usable."""
    room = property(lambda state: state.pool.num_free + state.pool.num_cached + state.pool.num_quarantined)
    patch.setattr(CacheState, "room", room)


def cached_blocks_are_not_counted_as_room(patch: MonkeyPatch) -> None:
    """Requests wait that would fit."""
    patch.setattr(CacheState, "room", property(lambda state: state.pool.num_free))


def a_session_that_is_over_is_served(patch: MonkeyPatch) -> None:
    """An unknown session is taken for the newest one."""

    def session(original: Any, book: Any, session_id: Any) -> Any:
        if session_id not in book.sessions and book.sessions:
            session_id = max(book.sessions)
        return original(book, session_id)

    _wrap(patch, LeaseBook, "session", session)


def no_store_is_ignored(patch: MonkeyPatch) -> None:
    """What must not be kept is published."""
    _wrap(patch, admission, "acquire", lambda acquire, *a: acquire(*a[:2], a[2]._replace(no_store=False)))


def no_read_is_ignored(patch: MonkeyPatch) -> None:
    """What must be computed anew is read."""
    _wrap(patch, admission, "acquire", lambda acquire, *a: acquire(*a[:2], a[2]._replace(no_read=False)))


def resumed_requests_are_counted_again(patch: MonkeyPatch) -> None:
    """A preemption makes another hit of the same request."""
    _wrap(patch, admission, "acquire", lambda acquire, *a: acquire(*a[:2], a[2]._replace(resumed=False)))


def a_purged_lease_publishes_on(patch: MonkeyPatch) -> None:
    """Purge forgets the leases."""

    def purge(original: Any, state: Any, tenant: Any) -> Any:
        before = [(lease, lease.store) for lease in state.book.leases.values()]
        dropped = original(state, tenant)
        for lease, store in before:
            lease.store = store
        return dropped

    _wrap(patch, upkeep, "purge", purge)


def what_was_purged_is_kept(patch: MonkeyPatch) -> None:
    """A sequence that was cut off while it ran becomes a kept branch all the same."""

    def cut(original: Any, lease: Any) -> None:
        original(lease)
        lease.cut_off = False

    _wrap(patch, Lease, "cut_from_index", cut)


def floors_are_not_shielded(patch: MonkeyPatch) -> None:
    """Need takes the blocks of a tenant below its floor."""
    patch.setattr(Quotas, "shielded", lambda quotas, owner: 0)
    patch.setattr(Quotas, "_spare", lambda quotas, other, floor: quotas._idle.get(other, 0))


def the_last_resort_takes_whatever_is_oldest(patch: MonkeyPatch) -> None:
    """Where tails stand before room, blocks of a tenant at its floor go that are no tails."""

    def take(found: CacheState, count: int, owner: int) -> None:
        missing = count - found.pool.num_free
        found.evict(missing, dict.fromkeys(range(1, len(found.tenant_names)), missing), owner=owner)

    patch.setattr(state, "clear_tails", take)


def ceilings_are_not_checked(patch: MonkeyPatch) -> None:
    """A tenant takes what it can get."""
    patch.setattr(Quotas, "left", lambda quotas, owner, reserved=0: 1 << 30)
    patch.setattr(Quotas, "excess", lambda quotas, owner, count: 0)


def nothing_is_scrubbed(patch: MonkeyPatch) -> None:
    """Blocks cross tenants with what is in them."""
    patch.setattr(CacheState, "take_scrub", lambda state: NO_BLOCKS)


def a_lost_answer_counts_as_scrubbed(patch: MonkeyPatch) -> None:
    """Blocks whose handing over was never heard of are taken for zeroed."""
    patch.setattr(Ownership, "taint", lambda ownership, blocks: None)


def a_break_ends_the_lease_sooner(patch: MonkeyPatch) -> None:
    """A session ends after its grace time, while its decoder may believe in its lease."""

    def leave(leave: Any, book: Any, session_id: Any, now_ns: int) -> None:
        leave(book, session_id, now_ns)
        book.sessions[session_id].deadline_ns = now_ns + book.grace_ns // 4

    _wrap(patch, LeaseBook, "leave", leave)


def sessions_never_lapse(patch: MonkeyPatch) -> None:
    """Whoever is gone keeps its blocks."""
    patch.setattr(LeaseBook, "lapsed", lambda book, now_ns: [])


def what_a_resume_does_not_list_is_kept(patch: MonkeyPatch) -> None:
    """An acquire whose answer was lost holds its blocks for ever."""

    def resume(original: Any, state: Any, session_id: Any, held: Any, credit: Any, now_ns: int) -> Any:
        session = state.book.session(session_id)
        listed = {item.lease_id for item in held}
        hidden = {number: lease for number, lease in session.leases.items() if number not in listed}
        for number in hidden:
            del session.leases[number]
        answer = original(state, session_id, held, credit, now_ns)
        session.leases.update(hidden)
        return answer

    _wrap(patch, resuming, "resume", resume)


def a_journal_forgets_nothing(patch: MonkeyPatch) -> None:
    """What was evicted is listed again by the next daemon."""
    patch.setattr(IndexJournal, "unpublish", lambda journal, blocks: None)


def blocks_are_free_before_the_journal_forgets_them(patch: MonkeyPatch) -> None:
    """A daemon that dies between the two leaves records of blocks that it had freed."""

    def drop_idle(state: CacheState, blocks: Any, cause: str) -> int:
        state.note_unlisted(blocks, cause)
        state.pool.unpublish_idle(blocks)
        state.forget_names(blocks)
        return len(blocks)

    patch.setattr(CacheState, "drop_idle", drop_idle)


def tails_do_not_depend_on_their_prefix(patch: MonkeyPatch) -> None:
    """What hangs below one prefix of a scope is found below any other of the same length."""
    _wrap(patch, layers, "layered_root", lambda root, base, wider, tokens: root(base, wider, b""))


def limbo_is_freed_at_once(patch: MonkeyPatch) -> None:
    """A new daemon gives away what decoders of the one before may still write."""

    def adopt(original: Any, manager: Any, found: Any, now_ns: int, **named: Any) -> Any:
        listed = original(manager, found, now_ns, **named)
        upkeep.process_gone(manager._state, LIMBO)
        return listed

    _wrap(patch, CacheManager, "adopt", adopt)


def kept_branches_are_anybodys(patch: MonkeyPatch) -> None:
    """A name alone opens a kept branch."""

    def find(original: Any, state: Any, tenant: Any, name: bytes, *more: Any, **named: Any) -> Any:
        branch = state.kept.branches.get(name)
        return original(state, tenant if branch is None else branch.hold.tenant, name, *more, **named)

    _wrap(patch, kept, "find", find)


def kept_branches_never_expire(patch: MonkeyPatch) -> None:
    """They hold their blocks for ever."""
    patch.setattr(kept, "expire", lambda state, now_ns: 0)


def leases_that_end_are_not_told_to_the_queue(patch: MonkeyPatch) -> None:
    """What they held can never be evicted again."""
    patch.setattr(CacheState, "rest", lambda state, lease, count: None)


def a_window_is_a_token_too_short(patch: MonkeyPatch) -> None:
    """A sequence lets go of what its next token still reads."""
    _wrap(patch, windows, "passed_blocks", lambda passed, count, window, size: passed(count + 1, window, size))


def a_gap_is_taken_for_a_block(patch: MonkeyPatch) -> None:
    """A hit may end wherever its tokens are known, whatever is gone before."""
    patch.setattr(GappedIndex, "usable", lambda index, found: found)


def what_a_window_needs_is_not_looked_at(patch: MonkeyPatch) -> None:
    """A hit needs its last block alone."""

    def usable(original: Any, index: Any, found: Any) -> Any:
        before, index._window_tokens = index._window_tokens, 1
        try:
            return original(index, found)
        finally:
            index._window_tokens = before

    _wrap(patch, GappedIndex, "usable", usable)


def what_was_passed_is_presented_as_it_was(patch: MonkeyPatch) -> None:
    """A decoder that comes back is believed to hold what went while it was away."""
    patch.setattr(resuming, "_as_known", lambda state, session, held: held)


def what_was_passed_is_claimed_as_it_was(patch: MonkeyPatch) -> None:
    """A new daemon believes that a sequence still holds what it has passed."""
    for module in (claim_plans, claims):
        patch.setattr(module, "table_of", lambda state, item: item.held.blocks.astype(np.intp))


def nobody_is_lent_what_is_its_own(patch: MonkeyPatch) -> None:
    """Who stands still where floors leave no credit stands still for ever."""
    patch.setattr(reports, "lend_own", lambda state, session, lacking: [])


def a_window_of_a_group_is_a_token_too_short(patch: MonkeyPatch) -> None:
    """A sequence gives up the window block of what its next token still reads."""
    _wrap(patch, groups, "behind", lambda behind, count, window, size: behind(count + 1, window, size))


def window_blocks_that_are_needed_are_taken(patch: MonkeyPatch) -> None:
    """Whatever is attached and oldest goes, whoever reads it."""

    patch.setattr(window_blocks, "loose_of", lambda windows, *more: np.flatnonzero(windows.of))
    patch.setattr(window_blocks, "count_loose", lambda windows, *more: np.count_nonzero(windows.of))


def a_hit_does_not_look_for_window_blocks(patch: MonkeyPatch) -> None:
    """It ends where the tokens end, whatever its window lacks."""
    patch.setattr(GroupedIndex, "usable", lambda index, found: found)


def a_hit_looks_at_its_last_window_block_alone(patch: MonkeyPatch) -> None:
    """A window of one token is all that is asked for."""

    def usable(original: Any, index: Any, found: Any) -> Any:
        before, index._window_tokens = index._window_tokens, 1
        try:
            return original(index, found)
        finally:
            index._window_tokens = before

    _wrap(patch, GroupedIndex, "usable", usable)


def a_listed_block_gets_no_window_block(patch: MonkeyPatch) -> None:
    """A sequence changes its own block for a listed one that lacks what its window reads."""
    patch.setattr(groups, "lend", lambda state, own, listed: None)


def what_a_branch_copies_from_loses_its_window_block(patch: MonkeyPatch) -> None:
    """It moves to a listed block, and goes from there, before the copy has run."""
    patch.setattr(groups, "alone", lambda state, lease, first, stop: stop)


def a_lease_that_ends_has_passed_its_blocks_for_ever(patch: MonkeyPatch) -> None:
    """Its part of the count of those who need no window block stays."""
    patch.setattr(state, "end", lambda state, lease: None)


def window_blocks_stay_with_freed_blocks(patch: MonkeyPatch) -> None:
    """Nobody frees them."""
    patch.setattr(WindowBlocks, "detach_before", lambda windows, on_free: on_free)


def window_blocks_of_the_quarantine_are_taken(patch: MonkeyPatch) -> None:
    """Nobody holds those blocks, and their last writer may live."""
    patch.setattr(window_room, "_QUARANTINED", np.uint8(255))


def window_blocks_are_not_scrubbed(patch: MonkeyPatch) -> None:
    """They cross tenants with what is in them."""
    patch.setattr(WindowBlocks, "take_scrub", lambda windows: NO_BLOCKS)


def a_lost_answer_counts_as_scrubbed_window_blocks(patch: MonkeyPatch) -> None:
    """Window blocks whose handing over was never heard of are taken for zeroed."""
    patch.setattr(WindowBlocks, "taint", lambda windows, blocks: None)


def more_window_blocks_are_promised_than_there_are(patch: MonkeyPatch) -> None:
    """Nobody counts them before blocks are handed out."""
    patch.setattr(groups, "room", lambda state, owner, wanted, besides=None: wanted)


def window_blocks_that_nobody_needs_are_no_room(patch: MonkeyPatch) -> None:
    """What was passed stays with its block: a sequence that is longer than the pool never ends."""
    patch.setattr(window_blocks, "count_loose", lambda *arguments: 0)


# Found within a few seeds.
COMMON: list[Defect] = [
    a_window_of_a_group_is_a_token_too_short,
    window_blocks_that_are_needed_are_taken,
    a_hit_does_not_look_for_window_blocks,
    a_lease_that_ends_has_passed_its_blocks_for_ever,
    window_blocks_stay_with_freed_blocks,
    window_blocks_are_not_scrubbed,
    more_window_blocks_are_promised_than_there_are,
    window_blocks_that_nobody_needs_are_no_room,
    a_window_is_a_token_too_short,
    tails_do_not_depend_on_their_prefix,
    floors_are_not_shielded,
    nothing_is_scrubbed,
    a_lost_answer_counts_as_scrubbed,
    what_a_resume_does_not_list_is_kept,
    kept_branches_are_anybodys,
    kept_branches_never_expire,
    a_quarantine_never_ends,
    sessions_never_lapse,
    the_last_token_is_matched,
    a_match_is_one_token_too_long,
    tokens_are_not_compared,
    tenants_share_a_tree,
    blocks_are_published_before_they_are_computed,
    held_blocks_are_evicted,
    nothing_is_quarantined,
    the_source_of_a_copy_stays_held,
    the_source_of_a_fork_is_not_held,
    a_fork_copies_a_token_too_few,
    a_partial_hit_copies_a_token_too_few,
    a_shared_tail_is_written,
    generations_stand_still,
    duplicates_are_freed_before_the_table_is_switched,
    a_replacement_is_not_told,
    a_replacement_is_told_at_the_wrong_place,
    credit_is_not_booked,
    cached_blocks_are_not_counted_as_room,
    a_session_that_is_over_is_served,
    no_store_is_ignored,
    no_read_is_ignored,
    resumed_requests_are_counted_again,
    leases_that_end_are_not_told_to_the_queue,
]

# Found within some dozens of seeds.
RARE: list[Defect] = [
    nobody_is_lent_what_is_its_own,
    a_listed_block_gets_no_window_block,
    a_hit_looks_at_its_last_window_block_alone,
    window_blocks_of_the_quarantine_are_taken,
    a_lost_answer_counts_as_scrubbed_window_blocks,
    a_gap_is_taken_for_a_block,
    what_a_window_needs_is_not_looked_at,
    what_was_passed_is_presented_as_it_was,
    what_was_passed_is_claimed_as_it_was,
    blocks_are_free_before_the_journal_forgets_them,
    ceilings_are_not_checked,
    a_break_ends_the_lease_sooner,
    a_journal_forgets_nothing,
    limbo_is_freed_at_once,
    a_tail_is_published_beyond_its_seal,
    matches_are_not_pinned_before_the_allocation,
    duplicates_are_never_freed,
    more_room_is_promised_than_there_is,
    a_refused_lease_is_freed_at_once,
    a_purged_lease_publishes_on,
    what_was_purged_is_kept,
]

# Those that give a reader wrong content: the shadow memory must see them with the manager's own check left out.
SEEN_BY_MEMORY: list[Defect] = [
    a_window_of_a_group_is_a_token_too_short,
    window_blocks_that_are_needed_are_taken,
    a_hit_does_not_look_for_window_blocks,
    a_listed_block_gets_no_window_block,
    a_lease_that_ends_has_passed_its_blocks_for_ever,
    window_blocks_are_not_scrubbed,
    a_window_is_a_token_too_short,
    nothing_is_scrubbed,
    a_lost_answer_counts_as_scrubbed,
    a_journal_forgets_nothing,
    limbo_is_freed_at_once,
    the_last_token_is_matched,
    tokens_are_not_compared,
    tenants_share_a_tree,
    blocks_are_published_before_they_are_computed,
    matches_are_not_pinned_before_the_allocation,
    held_blocks_are_evicted,
    nothing_is_quarantined,
    the_source_of_a_fork_is_not_held,
    a_fork_copies_a_token_too_few,
    a_partial_hit_copies_a_token_too_few,
    a_shared_tail_is_written,
    duplicates_are_freed_before_the_table_is_switched,
    a_replacement_is_not_told,
    a_refused_lease_is_freed_at_once,
]
