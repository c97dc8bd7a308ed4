"""The policy: who waits, who is admitted, who computes how many tokens in a step, and who gives way.

Owns the running list and, through its parts, the queue and the unused credit. Invariants: at most `max_batch` sequences
hold a place; a step computes at most `chunk_tokens` tokens, one with decodes at most `mixed_chunk_tokens`, or, where
there are so many decodes, those and one; within a tenant the best ranked running sequence is never preempted for
another, and between tenants the one that holds most blocks for its weight gives way. Called by the engine. A pure
function of its state: it has no clock, thread, socket or randomness, and sends nothing.

Who is admitted next is decided by fair shares of the tenants, and within a tenant by rank, (priority, arrival, sample);
never by what is cached (`admission.py`, `fair_queue.py`). The prefill tokens of a step are shared in the same way: by
the tenants' weights, and within a tenant best ranked first. Tokens of answers are charged as they are computed.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Final

from decoder.admission import AdmissionQueue, rank_of
from decoder.chunk_shares import share_chunks
from decoder.credit import Credit
from decoder.prefix_waits import WAIT_SECONDS, PrefixWaits
from decoder.prompt_logprobs import limit_scored
from decoder.sequence import CopyPlan, IntArray, LeaseId, Request, Sequence, SequenceId, SequenceState
from decoder.windows import Windows

# After a preemption nobody is admitted for so many steps, unless somebody leaves: else the blocks that were just
# given up would go to the next in the queue and not to the sequence that needed them.
HOLD_STEPS: Final = 32


@dataclass(slots=True)
class Plan:
    """What one step does.

    decodes:   sequences with one token to compute
    chunks:    (sequence, tokens to compute) of prefills, each >= 1
    preempted: sequences that gave up their place; leases and sealed counts are still on them, to be released
    outgrown:  (sequence, blocks needed) that no pool of this size can hold any more
    drafts:    token ids, int32, guessed to come after the last one of a decode; filled in by the speculator
    lacking:   (sequence, blocks) of those that stand still for want of so many
    is_stuck:  somebody would have to give way, which was not allowed now
    """

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    outgrown: list[tuple[Sequence, int]] = field(default_factory=list)
    drafts: dict[SequenceId, IntArray] = field(default_factory=dict)
    lacking: list[tuple[Sequence, int]] = field(default_factory=list)
    is_stuck: bool = False

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.decodes or self.chunks)

    def drop_ended(self) -> None:
        """Leave out sequences that ended after they were chosen."""
        self.decodes = [sequence for sequence in self.decodes if sequence.state is SequenceState.RUNNING]
        self.chunks = [part for part in self.chunks if part[0].state is SequenceState.RUNNING]


def _prefills(sequence: Sequence) -> bool:
    return sequence.remaining > 1 or not (sequence.num_generated or sequence.promised)


class Scheduler:
    """Chooses; the engine does. `num_blocks` is the size of the pool and changes with the arena, as the
    `num_window_blocks` that it has where there are layer groups."""

    def __init__(
        self,
        *,
        block_tokens: int,
        num_blocks: int,
        max_batch: int,
        chunk_tokens: int,
        mixed_chunk_tokens: int = 0,
        wait_seconds: float = WAIT_SECONDS,
        windows: Windows | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        self.windows = windows or Windows(0, block_tokens)
        self.num_blocks = num_blocks
        self.num_window_blocks = 0
        self.max_batch = max_batch
        self.chunk_tokens = chunk_tokens
        self.mixed_chunk_tokens = mixed_chunk_tokens or chunk_tokens
        self.credit = Credit()
        self.queue = AdmissionQueue(PrefixWaits(wait_seconds))
        self.running: list[Sequence] = []  # by rank
        self.forking = 0  # places promised to branches whose leases are on their way
        self._hold = 0

    # ---- the queue and its admission

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def enqueue(self, sequence: Sequence) -> None:
        """Put a sequence into the queue at its rank."""
        self.queue.add(sequence)

    def next_admission(self) -> Sequence | None:
        """The sequence to acquire blocks for now, if any: while the next step has prefill tokens to spare."""
        if not self.queue.waiting or self._hold or self.free_places < 1 or not self._has_prefill_room():
            return None
        return self.queue.next(is_idle=not self.running and not self.forking, free_places=self.free_places)

    def admit(
        self, sequence: Sequence, lease: LeaseId, blocks: IntArray, cached_tokens: int, copy: CopyPlan | None
    ) -> None:
        """An acquire was granted in turn: `blocks` cover all known tokens, the first `cached_tokens` are computed."""
        sequence.hold(lease, blocks, cached_tokens, sequence.num_tokens, copy)
        self.queue.admitted(sequence, cached_tokens if sequence.request.scope is None else 0)
        insort(self.running, sequence, key=rank_of)

    def room_changed(self) -> None:
        """Blocks went back to the daemon."""
        self.queue.moved()
        self.credit.room_changed()

    @property
    def waits_worthwhile(self) -> bool:
        """Whether a short wait for the acquires on their way would fill the next step, and holds up no decode."""
        if not self.queue.in_flight or not self._has_prefill_room():
            return False
        return all(_prefills(sequence) for sequence in self.running if not sequence.paused)

    @property
    def free_places(self) -> int:
        """Sequences that may be added to the batch."""
        taken = sum(sequence.places for sequence in (*self.running, *self.queue.in_flight))
        return self.max_batch - taken - self.forking

    def _has_prefill_room(self) -> bool:
        # A prompt that is admitted before it can be computed holds blocks for nothing, and cannot read what the
        # prompts before it are about to publish. Long ones count for a part of the budget alone, so that they do not
        # keep short ones out.
        remaining = [sequence.remaining for sequence in self.running if not sequence.paused and _prefills(sequence)]
        if not remaining:
            return True
        part = max(1, self.chunk_tokens // 4)
        backlog = min(remaining[0], 2 * part) + sum(min(tokens, part) for tokens in remaining[1:])
        return backlog < self.chunk_tokens

    def charge_tokens(self, request: Request, count: int) -> None:
        """So many tokens of an answer were computed."""
        self.queue.shares.charge(request.tenant, count, request.tenant_weight)

    # ---- branches

    def promise_places(self, wanted: int) -> int:
        """Keep up to `wanted` places for branches of a fork; how many were kept."""
        kept = max(0, min(wanted, self.free_places))
        self.forking += kept
        return kept

    def add_branch(self, branch: Sequence, lease: LeaseId, blocks: IntArray, copy: CopyPlan | None) -> None:
        """A promised place is taken by a branch; what it shares with its trunk is all computed."""
        self.forking -= 1
        branch.hold(lease, blocks, branch.shared, branch.shared, copy)
        insort(self.running, branch, key=rank_of)

    def drop_promise(self, count: int) -> None:
        """Promised places that are not used after all."""
        self.forking -= count

    # ---- leaving

    def remove(self, sequence: Sequence) -> None:
        """A sequence ended or was cancelled, whatever its state. Repeating it is harmless."""
        if sequence.state is SequenceState.WAITING:
            self.queue.discard(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._hold = 0
            self.room_changed()
        elif sequence.state is SequenceState.ACQUIRING:
            self.queue.forget(sequence)
        sequence.state = SequenceState.FINISHED  # ACQUIRING and FORKING: the answer finds it finished

    def requeue(self, sequence: Sequence) -> None:
        """A running sequence has lost its lease: it waits again, and goes on where it was."""
        self.running.remove(sequence)
        sequence.drop_lease()
        self.enqueue(sequence)

    def clear(self) -> None:
        """Forget every sequence and the credit: the session is gone."""
        self.queue.clear()
        self.running.clear()
        self.forking = self._hold = 0
        self.credit.clear()

    # ---- one step

    def schedule(self, *, may_preempt: bool = True) -> Plan:
        """Choose the next step: decodes first, then prefill chunks, and whom to preempt where blocks lack.

        Without `may_preempt` nobody gives way and nobody ends; a plan that would need it is stuck, and may be asked for
        again. Tokens that launched steps compute and draw count as computed and drawn.
        """
        plan = Plan()
        prefills: list[Sequence] = []
        self._hold = max(0, self._hold - 1)
        for sequence in list(self.running):
            if sequence.state is not SequenceState.RUNNING or sequence.paused:
                continue
            if sequence.promised and sequence.is_last_promised:
                continue
            if not sequence.remaining or not self._cover(sequence, plan, may_preempt=may_preempt):
                continue  # without anything to compute it waits for the others of its beam group
            if _prefills(sequence):
                prefills.append(sequence)
            else:
                plan.decodes.append(sequence)
        prefills = [sequence for sequence in prefills if sequence.state is SequenceState.RUNNING]
        budget = self.mixed_chunk_tokens if plan.decodes else self.chunk_tokens
        chunks = share_chunks(prefills, max(1, budget - len(plan.decodes)))
        plan.chunks = limit_scored([(sequence, min(count, self._covered(sequence))) for sequence, count in chunks])
        if self.queue.is_blocked and not plan.preempted:
            self._evict_paused(plan, may_preempt=may_preempt)
        if not self.running:
            self._hold = 0
        return plan

    def need_soon(self) -> int:
        """Blocks that the running sequences will lack within the next steps, to be covered by credit."""
        ahead = self.credit.ahead_steps
        need = 0
        for sequence in self.running:
            if not sequence.paused:
                steps = ahead if sequence.pace is None else ahead * (1 + sequence.pace.length)
                tokens = min(sequence.num_tokens + sequence.promised - 1 + steps, sequence.last_kv_tokens)
                if self.windows.tokens:  # a prompt that is longer than the pool of either kind takes them as it goes
                    tokens = min(tokens, sequence.launched + max(steps, self.chunk_tokens))
                need += max(0, self.blocks_for(tokens) - sequence.num_blocks)
        return need

    # ---- guessed tokens

    def draft_room(self, sequence: Sequence) -> int:
        """Tokens after the next one of a sequence for which its table and the unused credit have room."""
        return (sequence.num_blocks + len(self.credit)) * self.block_tokens - sequence.num_tokens

    def cover_drafts(self, sequence: Sequence, count: int) -> int:
        """Makes the table reach `count` tokens after the next one, or as many as unused credit allows; how many."""
        while sequence.num_blocks * self.block_tokens < sequence.num_tokens + count:
            block = self.credit.take()
            if block is None:
                count = sequence.num_blocks * self.block_tokens - sequence.num_tokens
                break
            sequence.append_block(block)
        return count

    def _cover(self, sequence: Sequence, plan: Plan, *, may_preempt: bool) -> bool:
        # Makes the table reach what is to be computed; where not even a part of it, decides who gives way.
        launched = sequence.launched
        needed = self.blocks_for(min(sequence.num_tokens + sequence.promised, launched + self.chunk_tokens))
        if sequence.num_blocks >= needed:
            return True
        at_once = self.blocks_for(launched + 1) - self.windows.gone_by(launched)
        if at_once > self.num_blocks:
            if may_preempt:
                plan.outgrown.append((sequence, at_once))
            plan.is_stuck |= not may_preempt
            return False
        while sequence.num_blocks < needed:
            block = self.credit.take()
            if block is None and self._covered(sequence) > 0:
                return True
            if block is None:
                plan.lacking.append((sequence, needed - sequence.num_blocks))
                if self.credit.is_refused and not self.credit.is_asking and not plan.preempted:
                    if may_preempt:
                        self._preempt(self._victim(), plan)
                    plan.is_stuck |= not may_preempt
                return False
            sequence.append_block(block)
        return True

    def _covered(self, sequence: Sequence) -> int:
        return sequence.num_blocks * self.block_tokens - sequence.launched

    def _victim(self) -> Sequence:
        # Of the tenant that holds most for its weight: who came late by its fair turn does not go first.
        paused = [sequence for sequence in self.running if sequence.paused]
        if paused:
            return paused[-1]
        held: dict[str, float] = {}
        for sequence in self.running:
            request = sequence.request
            num_blocks = sequence.num_blocks - self.windows.gone_by(sequence.num_computed)
            held[request.tenant] = held.get(request.tenant, 0.0) + num_blocks / request.tenant_weight
        most = max(held.values())
        return next(sequence for sequence in reversed(self.running) if held[sequence.request.tenant] == most)

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        # The members of a beam group give way together.
        group = victim.group
        members = [victim] if group is None else [sequence for sequence in self.running if sequence.group is group]
        for member in members:
            self.running.remove(member)
            self.enqueue(member)
        self.room_changed()
        self._hold = HOLD_STEPS
        plan.preempted += members

    def _evict_paused(self, plan: Plan, *, may_preempt: bool) -> None:
        # A reader that stopped must not keep the head of the queue out.
        victim = self._victim() if self.running else None
        if victim is not None and victim.paused and not may_preempt:
            plan.is_stuck = True
        elif victim is not None and victim.paused:
            self._preempt(victim, plan)
            self._hold = 0
