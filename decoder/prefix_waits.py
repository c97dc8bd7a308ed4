"""Waiting for a prefix that another sequence computes: who waits, and for how long at most. Pure.

Invariant: a sequence waits no longer than the patience without more of its prompt becoming resident, and no longer than
some patiences altogether; then it is asked for without waiting, and computes. A wait ends by word of the daemon, by the
patience, or with the sequence. Used by the admission queue; it sends nothing, and the time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from decoder.sequence import Sequence, SequenceId

WAIT_SECONDS: Final = 5.0
MAX_PATIENCES: Final = 4  # a producer that crawls is overtaken
_NONE: Final = 0


@dataclass(slots=True)
class _Wait:
    """wait_id: of the wait under way, 0 none    resident: tokens that were cached when last asked
    since_ns: since when so many are    began_ns: when it was first asked for    is_over: that has lasted long enough"""

    wait_id: int
    resident: int
    since_ns: int
    began_ns: int
    is_over: bool = False


class PrefixWaits:
    """The waits of one decoder."""

    def __init__(self, patience_seconds: float = WAIT_SECONDS) -> None:
        self._patience_ns = int(patience_seconds * 1e9)
        self._waits: dict[SequenceId, _Wait] = {}
        self._sequences: dict[int, SequenceId] = {}  # by wait id

    def __len__(self) -> int:
        return len(self._sequences)

    def is_waiting(self, sequence: Sequence) -> bool:
        """Whether a sequence is not to be asked for now."""
        wait = self._waits.get(sequence.sequence_id)
        return wait is not None and wait.wait_id != _NONE

    def may_wait(self, sequence: Sequence) -> bool:
        """Whether a sequence has any patience left."""
        wait = self._waits.get(sequence.sequence_id)
        return self._patience_ns > 0 and not (wait is not None and wait.is_over)

    def begin(self, sequence: Sequence, wait_id: int, resident: int, now_ns: int) -> None:
        """The daemon said that another sequence computes more than the `resident` tokens of this one's."""
        wait = self._waits.get(sequence.sequence_id)
        if wait is None:
            wait = self._waits[sequence.sequence_id] = _Wait(_NONE, resident, now_ns, now_ns)
        elif resident > wait.resident:
            wait.resident, wait.since_ns = resident, now_ns
        if now_ns >= self._end_of(wait):
            wait.is_over = True
            return
        wait.wait_id = wait_id
        self._sequences[wait_id] = sequence.sequence_id

    def ready(self, wait_id: int) -> None:
        """What was waited for is there, or will not come. Ids that are over are ignored."""
        sequence_id = self._sequences.pop(wait_id, None)
        if sequence_id is not None:
            self._waits[sequence_id].wait_id = _NONE

    def expire(self, now_ns: int) -> None:
        """Ends the waits that have lasted for the patience: their sequences are asked for once more."""
        for wait_id, sequence_id in list(self._sequences.items()):
            if now_ns >= self._end_of(self._waits[sequence_id]):
                self.ready(wait_id)

    def seconds_left(self, now_ns: int) -> float | None:
        """Until the first of the waits under way has lasted for the patience; None without one."""
        if not self._sequences:
            return None
        first = min(self._end_of(self._waits[sequence_id]) for sequence_id in self._sequences.values())
        return max(0, first - now_ns) / 1e9

    def _end_of(self, wait: _Wait) -> int:
        return min(wait.since_ns + self._patience_ns, wait.began_ns + MAX_PATIENCES * self._patience_ns)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has its lease, or has ended."""
        wait = self._waits.pop(sequence.sequence_id, None)
        if wait is not None:
            self._sequences.pop(wait.wait_id, None)

    def clear(self) -> None:
        """No word will come any more."""
        self._waits.clear()
        self._sequences.clear()
