"""Who waits and who is being admitted. Owns the queue's order and the acquires that are on their way.

Order: tenants by their fair shares (`fair_queue.py`), and within a tenant by rank. A sequence costs the tokens that it
knows when it is asked for, cached or not; what a grant brings from the tenant's own cache is given back. One that has
been asked for keeps its turn until it is admitted; one that was admitted and has lost its blocks has paid, and comes
before those that have not.

Invariant: nobody overtakes the one whose turn it is, with three exceptions, and who is passed keeps its turn. A request
of the same tenant and a higher priority goes first. One that waits for a prefix that another sequence computes holds up
nobody. And where the head finds the pool full `PATIENCE` times in a row while the decoder runs nothing, so that none of
its own sequences will make room, up to `MAX_PASSES` behind it are tried, one after the other, tenants in turn; then the
head is asked for first again, and the count begins anew with whatever was admitted or left.

Acquires are answered in order; where one finds the pool full, what the ones behind it were granted meanwhile goes back,
and the queue stands until there may be room. Used by the scheduler; it holds no block and sends nothing.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from typing import Final

from decoder.fair_queue import FairShares, Head
from decoder.prefix_waits import PrefixWaits
from decoder.sequence import Sequence, SequenceId, SequenceState

MAX_ACQUIRES: Final = 4  # on their way at once, so that a burst is admitted in few steps
PATIENCE: Final = 16  # refusals of an idle decoder's head: at the loop's pace for retries some 0.8 s
MAX_PASSES: Final = 8
QUANTUM_TOKENS: Final = 64


def rank_of(sequence: Sequence) -> tuple[int, int, int]:
    """The order within a tenant, and who gives way last: smaller first."""
    return sequence.rank


class AdmissionQueue:
    """Waiting sequences by rank, and those in flight in the order that they were asked for."""

    def __init__(self, waits: PrefixWaits | None = None, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self.waits = PrefixWaits() if waits is None else waits
        self.shares = FairShares(quantum_tokens)
        self.waiting: list[Sequence] = []
        self._tenants: dict[str, list[Sequence]] = {}  # the same, by tenant
        self._paid: dict[SequenceId, int] = {}  # what those cost that were asked for and are not admitted
        self._owed: list[Sequence] = []  # those that wait and have paid, by rank
        self.in_flight: deque[Sequence] = deque()
        self._full_for: Sequence | None = None  # the head of the queue that the pool had no room for
        self._out_of_turn = 0  # acquires in flight behind one that found the pool full
        self._refusals = 0  # of the head, since anything was admitted or left
        self._passing: list[Sequence] = []  # may be tried before the head, still to be asked for
        self._passer: Sequence | None = None  # one of them that was asked for last; alone while it is in flight

    def add(self, sequence: Sequence) -> None:
        """A sequence waits at its rank: a preempted one comes before all that arrived later."""
        sequence.state = SequenceState.WAITING
        insort(self.waiting, sequence, key=rank_of)
        insort(self._tenants.setdefault(sequence.request.tenant, []), sequence, key=rank_of)
        if sequence.admitted or sequence.sequence_id in self._paid:
            insort(self._owed, sequence, key=rank_of)

    def _take(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self.waiting.remove(sequence)
        if sequence in self._owed:
            self._owed.remove(sequence)
        self._tenants[tenant].remove(sequence)
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def num_waiting_of(self, tenant: str) -> int:
        """Sequences of a tenant that wait."""
        return len(self._tenants.get(tenant, ()))

    def discard(self, sequence: Sequence) -> None:
        """A waiting sequence has ended."""
        self._take(sequence)
        self.waits.forget(sequence)
        self.forget(sequence)
        if sequence is self._full_for:
            self._full_for = None

    def forget(self, sequence: Sequence) -> None:
        """One that was asked for has ended before it was admitted: what was never computed costs nothing."""
        self.shares.refund(sequence.request.tenant, self._paid.pop(sequence.sequence_id, 0))

    def next(self, *, is_idle: bool = False, free_places: int = 1) -> Sequence | None:
        """The sequence to acquire blocks for now, if any; ACQUIRING until `answered`. Those that are paused or wait for
        a prefix are passed by; one that needs more than `free_places` places is waited for. `is_idle`: nothing runs in
        this decoder."""
        if self._out_of_turn or len(self.in_flight) >= MAX_ACQUIRES:
            return None
        if self._passer is not None and self._passer in self.in_flight:
            return None
        self._passer = None if self.in_flight else self._next_passing()
        chosen = self._passer or self._turn()
        if chosen is not None and chosen is self._full_for:
            if not is_idle or self._refusals < PATIENCE or self.in_flight:
                return None
            self._refusals = 0
            self._passing = self._behind(chosen)
            chosen = self._passer = self._next_passing()
        if chosen is None or chosen.places > free_places:
            return None
        self._ask(chosen)
        return chosen

    def _turn(self) -> Sequence | None:
        # Who has paid comes first, then by fair shares; in either case the best ranked of that tenant.
        owed = next(filter(self._is_ready, self._owed), None)
        if owed is not None:
            return self._first_of(owed.request.tenant)
        firsts = {tenant: first for tenant in self._tenants if (first := self._first_of(tenant)) is not None}
        heads = {tenant: Head(_cost_of(first), first.request.tenant_weight) for tenant, first in firsts.items()}
        tenant = self.shares.choose(heads)
        return None if tenant is None else firsts[tenant]

    def _first_of(self, tenant: str) -> Sequence | None:
        return next(filter(self._is_ready, self._tenants[tenant]), None)

    def _ask(self, sequence: Sequence) -> None:
        self._take(sequence)
        if not sequence.admitted and sequence.sequence_id not in self._paid:
            cost = self._paid[sequence.sequence_id] = _cost_of(sequence)
            self.shares.serve(sequence.request.tenant, cost)
        sequence.state = SequenceState.ACQUIRING
        self.in_flight.append(sequence)

    def _behind(self, head: Sequence) -> list[Sequence]:
        # The first of each tenant, then the second, and so on.
        places: Counter[str] = Counter()
        behind: list[tuple[int, Sequence]] = []
        for sequence in self.waiting:
            if sequence is not head and self._is_ready(sequence):
                places[sequence.request.tenant] += 1
                behind.append((places[sequence.request.tenant], sequence))
        behind.sort(key=lambda item: item[0])
        return [sequence for _, sequence in behind[:MAX_PASSES]]

    def _is_ready(self, sequence: Sequence) -> bool:
        return not sequence.paused and not self.waits.is_waiting(sequence)

    def _next_passing(self) -> Sequence | None:
        while self._passing:
            sequence = self._passing.pop(0)
            if sequence.state is SequenceState.WAITING and self._is_ready(sequence):
                return sequence
        return None

    def answered(self, sequence_id: SequenceId) -> tuple[Sequence, bool]:
        """The oldest acquire was answered: its sequence, and whether it is in turn (else a grant goes back).

        Raises ValueError where the answer belongs to another acquire.
        """
        if not self.in_flight or self.in_flight[0].sequence_id != sequence_id:
            raise ValueError("an acquire was answered that is not the oldest on its way")
        in_turn = self._out_of_turn == 0
        if not in_turn:
            self._out_of_turn -= 1
        return self.in_flight.popleft(), in_turn

    def wait(self, sequence: Sequence, wait_id: int, resident_tokens: int, now_ns: int) -> None:
        """Another sequence computes more of this one's prompt now: it keeps its place, and is passed meanwhile."""
        self.waits.begin(sequence, wait_id, resident_tokens, now_ns)
        self.add(sequence)

    def full(self, sequence: Sequence, *, in_turn: bool) -> None:
        """The pool had no room: the sequence keeps its place, and nobody passes it for now."""
        self.add(sequence)
        if in_turn and sequence is not self._passer:
            self._full_for = sequence
            self._refusals += 1
            self._out_of_turn = len(self.in_flight)

    def admitted(self, sequence: Sequence, own_cached_tokens: int) -> None:
        """A sequence has its blocks; so many of its tokens came from its tenant's own cache."""
        self.waits.forget(sequence)
        cost = self._paid.pop(sequence.sequence_id, 0)
        self.shares.refund(sequence.request.tenant, min(cost, own_cached_tokens))
        self.moved()

    def recall(self) -> None:
        """Nothing on its way will be answered: whoever has not ended waits again, at its rank."""
        for sequence in self.in_flight:
            if sequence.state is SequenceState.ACQUIRING:
                self.add(sequence)
        self.waits.clear()
        self.in_flight.clear()
        self._reset()

    def retry(self) -> None:
        """There may be room again."""
        self._full_for = None

    def moved(self) -> None:
        """As `retry`, since a sequence was admitted, or has left."""
        self._full_for = None
        self._refusals = 0

    @property
    def is_blocked(self) -> bool:
        """Whether the head of the queue waits because the pool had no room for it."""
        return self._full_for is not None

    def clear(self) -> None:
        """Forget everyone."""
        self.waits.clear()
        self.waiting.clear()
        self._tenants.clear()
        self._paid.clear()
        self._owed.clear()
        self.shares.clear()
        self.in_flight.clear()
        self._reset()

    def _reset(self) -> None:
        self._full_for = self._passer = None
        self._passing = []
        self._out_of_turn = self._refusals = 0


def _cost_of(sequence: Sequence) -> int:
    return max(1, sequence.num_tokens)
