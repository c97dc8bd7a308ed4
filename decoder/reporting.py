"""What the daemon has to be told. Owns the difference between what sequences did and what was reported of them.

Invariant: each computed token, taken block, copy and release is reported exactly once, never before the step that wrote
it has finished; a release carries everything that was not reported yet. While the stream is broken nothing is sent: all
that is held is presented whole, as often as asked, and differences count from there. Called by the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from common.layout import TOKEN_BYTES
from common.tokens import pack_tokens
from decoder.cache_api import Report, SequenceReport
from decoder.holdings import Held, held_of
from decoder.sequence import IntArray, LeaseId, Sequence


class Reporter:
    """Gathers one report of some steps; a sequence is told of when it completed a block, took one, or copied."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._fenced_step = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything: the session is new or gone."""
        self._released: list[SequenceReport] = []
        self._unfenced: list[tuple[int, SequenceReport]] = []  # releases, each with the last step that writes there
        self.has_late_releases = False  # whether some of those that are to be told waited for a fence
        self._noted: list[Sequence] = []
        self._is_away = False
        self._ended: list[Held] = []  # released while away
        self._last_words: dict[LeaseId, SequenceReport] = {}  # of those: what presenting them whole does not say
        self._queued = 0
        self._applied_revision = 0
        self._acknowledge = False
        self._is_urgent = False
        self.generated_tokens = 0
        self.preemptions = 0

    def hurry(self) -> None:
        """Somebody may wait for what is to be told next: a prompt's blocks, or the source of a copy."""
        self._is_urgent = True

    def is_urgent(self, queued: int) -> bool:
        """Whether anything is to be told that should not wait for some steps; `queued` as in `build`."""
        has_word = self._is_urgent or self._acknowledge or bool(self._released or self._noted)
        return has_word or queued != self._queued

    @property
    def has_releases(self) -> bool:
        """Whether leases are waiting to be released."""
        return bool(self._released)

    def note(self, sequence: Sequence) -> None:
        """Tell all of a sequence with the next report, even where no block is complete."""
        self._noted.append(sequence)

    def release(self, sequence: Sequence, keep_seconds: float = 0.0) -> None:
        """The lease of a sequence ends with the next report, but not before the last step that was launched with it is
        fenced, and is off the sequence now. With `keep_seconds` it is kept, its newest token too."""
        lease = sequence.lease
        if lease is None:
            return
        if self._is_away:
            held = held_of(sequence, lease)
            rest = sequence.tokens[len(held.tokens) // TOKEN_BYTES :] if keep_seconds else sequence.tokens[:0]
            self._ended.append(held)
            self._last_words[lease] = SequenceReport(
                lease, tokens=pack_tokens(rest), release=True, keep_seconds=keep_seconds
            )
        report = self._difference(sequence, lease, release=True, keep_seconds=keep_seconds)
        if sequence.last_step > self._fenced_step:
            self._unfenced.append((sequence.last_step, report))
        else:
            self._released.append(report)
        sequence.drop_lease()

    def fence(self, step: int) -> bool:
        """Launched steps up to this number write nothing any more. Whether that lets leases go."""
        self._fenced_step = max(self._fenced_step, step)
        before = len(self._unfenced)
        self._released += [report for last, report in self._unfenced if last <= self._fenced_step]
        self._unfenced = [item for item in self._unfenced if item[0] > self._fenced_step]
        has_moved = len(self._unfenced) < before
        self.has_late_releases |= has_moved
        return has_moved

    def release_unused(self, lease: LeaseId, keep_seconds: float = 0.0) -> None:
        """A lease that came for a sequence that has ended meanwhile."""
        self._released.append(SequenceReport(lease, release=True, keep_seconds=keep_seconds))

    def leave(self) -> None:
        """The stream is broken; what was reported last may not have arrived. Every launched step is fenced."""
        self._is_away = True

    def present(self, running: Iterable[Sequence]) -> tuple[Held, ...]:
        """Everything that is held, those that ended since `leave` included. Releases of before are told by absence."""
        held = []
        for sequence in running:
            if sequence.lease is not None:
                held.append(held_of(sequence, sequence.lease))
                self._difference(sequence, sequence.lease)
        self._released = [self._last_words[ended.lease_id] for ended in self._ended]
        self._noted = []
        return (*held, *self._ended)

    def come_back(self, leases: dict[LeaseId, LeaseId], revision: int) -> None:
        """The session goes on with what was presented last: `leases` has the new ids of those that were kept."""
        self._is_away = False
        self._ended = []
        self._last_words = {}
        self._released = [
            replace(report, lease_id=leases[report.lease_id]) for report in self._released if report.lease_id in leases
        ]
        self._applied_revision = revision
        self._acknowledge = True

    def applied(self, revision: int, *, changed: bool) -> None:
        """All that the answer of `revision` changed is in the tables; where it changed any, say so soon."""
        self._applied_revision = max(self._applied_revision, revision)
        self._acknowledge |= changed

    def build(
        self,
        running: Iterable[Sequence],
        *,
        wanted: int,
        returned: IntArray,
        queued: int,
        lacking: Iterable[tuple[Sequence, int]] = (),
    ) -> Report | None:
        """What is to be told now, or None where there is nothing to say. `lacking` are (sequence, blocks) of those
        that stand still for want of so many."""
        sequences = [
            self._difference(sequence, sequence.lease)
            for sequence in running
            if sequence.lease is not None and (self._has_news(sequence) or sequence in self._noted)
        ]
        sequences += self._released
        if not (sequences or wanted or len(returned) or self._acknowledge or queued != self._queued):
            return None
        report = Report(
            sequences=tuple(sequences),
            returned=returned,
            wanted=wanted,
            generated_tokens=self.generated_tokens,
            preemptions=self.preemptions,
            queued=queued,
            applied_revision=self._applied_revision,
            lacking=tuple(item.lease for item, count in lacking for _ in range(count) if item.lease is not None),
        )
        self._released, self._noted = [], []
        self.has_late_releases = False
        self._queued = queued
        self._acknowledge = self._is_urgent = False
        self.generated_tokens = self.preemptions = 0
        return report

    def _has_news(self, sequence: Sequence) -> bool:
        if sequence.taken or sequence.copied:
            return True
        return sequence.num_computed // self._block_tokens > sequence.reported_sealed // self._block_tokens

    def _difference(
        self, sequence: Sequence, lease: LeaseId, *, release: bool = False, keep_seconds: float = 0.0
    ) -> SequenceReport:
        # Only computed tokens are told, as the newest one has no block yet; but what is kept has all of its tokens.
        sealed = sequence.num_computed
        known = sequence.num_tokens if keep_seconds else max(sealed, sequence.reported_tokens)
        report = SequenceReport(
            lease_id=lease,
            taken_blocks=np.array(sequence.taken, np.int32),
            tokens=pack_tokens(sequence.tokens[sequence.reported_tokens : known]),
            sealed_tokens=sealed,
            copied=sequence.copied,
            release=release,
            keep_seconds=keep_seconds,
        )
        sequence.reported_tokens = known
        sequence.reported_sealed = sealed
        sequence.taken = []
        sequence.copied = False
        return report
