"""Steps that are planned and launched while the one before still runs: the form of `steps.py` for a device.

Step n + 1 is launched before the ids of step n are read: the device feeds what n draws to n + 1 itself, and the host
learns it one step late. Invariants: what is committed, and so told and sealed, comes from a step that has finished; a
lease whose blocks a launched step may write, or read, is not given back, nor are copies and scrubs told, before that
step is fenced; while a step is under way nobody gives way; a token that was drawn after the end of its sample is thrown
away. A step in which a token depends on more than logits, temperature and a random number (penalties, masks, guesses,
beams, forks, log-probabilities, cuts of the distribution) is computed as `steps.py` does, with nothing under way.
Called by the step loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from decoder.batch import DrawColumns
from decoder.cache_api import Arena, Attached, Away, Event, Fork, Lost, Reported, Resumed
from decoder.drawing import Draws
from decoder.inbox import Message, Stop
from decoder.reporting import Reporter
from decoder.runner import AheadModel, Launched, Work
from decoder.sampler import Drawn
from decoder.scheduler import Plan
from decoder.sequence import IntArray, Sequence, SequenceId
from decoder.steps import NO_EXPANSIONS, Steps

_SEEDS: Final = 1 << 64


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step. `tenures` are those of the leases that its parts were launched with."""

    step: int
    work: Work
    tenures: tuple[int, ...]
    launched: Launched

    @classmethod
    def begin(cls, step: int, work: Work, launched: Launched) -> Flight:
        """The sequences of `work` count what it brings as launched from now on."""
        for sequence, count in work.parts:
            sequence.in_flight += count
            sequence.last_step = step
        for sequence, _ in work.sampled:
            sequence.promised += 1
        return cls(step, work, tuple(sequence.tenure for sequence, _ in work.parts), launched)

    def end(self) -> Work:
        """Its work for the sequences that still have the lease they were launched with; nothing of it counts as
        launched any more."""
        pairs = zip(self.work.parts, self.tenures, strict=True)
        parts = [part for part, tenure in pairs if part[0].tenure == tenure]
        alive = {sequence.sequence_id for sequence, _ in parts}
        sampled = [item for item in self.work.sampled if item[0].sequence_id in alive]
        for sequence, count in parts:
            sequence.in_flight -= count
        for sequence, _ in sampled:
            sequence.promised -= 1
        return replace(self.work, parts=parts, sampled=sampled)


class AheadSteps(Steps):
    """Keeps one step under way between two of the loop's. The cores have time for a report of each."""

    report_steps = 1

    def __init__(self, model: AheadModel, *parts: Any, reporter: Reporter, **options: Any) -> None:
        super().__init__(model, *parts, **options)
        self._device = model
        self._reporter = reporter
        self._flights: list[Flight] = []  # oldest first; two for a moment
        self._last_step = 0

    @property
    def are_under_way(self) -> bool:
        return bool(self._flights)

    def plan(self) -> Plan:
        plan = self._scheduler.schedule(may_preempt=not self._flights)
        if plan.is_stuck:
            self.settle()
            plan = self._scheduler.schedule()
        return plan

    def settle(self) -> None:
        while self._flights:
            self._land()

    def settle_for(self, message: Message | Event) -> None:
        # The session goes, its leases change or are told whole, or an answer puts other blocks into tables, whose old
        # ones go when that is acknowledged.
        changes = isinstance(message, Reported) and (message.replacements or message.refused)
        if changes or isinstance(message, Stop | Attached | Away | Resumed | Lost):
            self.settle()

    def discard(self) -> None:
        if self._flights:
            self._quiesce()
            for flight in self._flights:
                flight.end()
            self._flights.clear()

    def run_copies(self, sequences: list[Sequence], scrubs: Any, arena: Arena) -> None:
        # The next report tells of copies, and may give scrubbed blocks back: both must be done by then.
        super().run_copies(sequences, scrubs, arena)
        self._quiesce()

    def compute(self, plan: Plan, arena: Arena) -> list[Fork]:
        if not is_plain(plan):
            self.settle()
            plan.drop_ended()
            return super().compute(plan, arena) if plan.has_work else []
        try:
            self._launch(plan, arena)
        except Exception as error:  # noqa: BLE001 - fails the requests of this step alone
            self.settle()
            plan.drop_ended()
            self._step_failed([*plan.decodes, *(sequence for sequence, _ in plan.chunks)], error)
            return []
        while len(self._flights) > 1:
            self._land()
        return []

    def _launch(self, plan: Plan, arena: Arena) -> None:
        work = self._runner.build(plan)
        self._requests.note("begun_ns", [sequence for sequence, _ in plan.chunks], self._clock_ns())
        drawn = self._flights[-1].work.sampled if self._flights else []
        launched = self._device.launch(work.batch, arena, draw_columns(work, drawn))
        self._last_step += 1
        self._flights.append(Flight.begin(self._last_step, work, launched))

    def _land(self) -> None:
        """Wait for the oldest step under way, and commit it."""
        flight = self._flights.pop(0)
        try:
            ids = flight.launched.wait()
        except Exception as error:  # noqa: BLE001 - fails the requests of this step alone
            work = flight.end()
            self.discard()  # what follows was fed with what this one drew
            self._step_failed([sequence for sequence, _ in work.parts], error)
            return
        self._fence(flight.step)
        work = flight.end()
        self.failed_in_a_row = 0
        if self._is_fenced():
            self.discard()  # nothing is committed; if the lease turns out to be alive, the same is computed again
            return
        firsts = [sequence for sequence, _ in work.sampled if not sequence.num_generated]
        self._requests.note("computed_ns", firsts, self._clock_ns())
        self._committer.commit(work, _draws(work, ids), NO_EXPANSIONS)

    def _step_failed(self, sequences: Any, error: Exception) -> None:
        self._quiesce()  # a part of it may have been queued
        super()._step_failed(sequences, error)

    def _quiesce(self) -> None:
        self._device.quiesce()
        self._fence(self._last_step)

    def _fence(self, step: int) -> None:
        if self._reporter.fence(step):
            self._scheduler.room_changed()


def is_plain(plan: Plan) -> bool:
    """Whether a device can draw all tokens of a step by itself."""
    chunks_are_plain = all(_is_plain_part(sequence, count) for sequence, count in plan.chunks)
    return chunks_are_plain and all(_is_plain_part(sequence, 1) for sequence in plan.decodes)


def _is_plain_part(sequence: Sequence, count: int) -> bool:
    request, sampling = sequence.request, sequence.request.sampling
    if sequence.scores is not None and sequence.scores.missing(sequence.launched, count, sequence.num_prompt):
        return False
    if count < sequence.remaining:
        return True  # nothing is drawn
    if sequence.is_trunk or sequence.group is not None or request.num_logprobs is not None:
        return False
    if request.constraint is not None or request.speculation is not None:
        return False
    if sampling.penalises or sampling.logit_bias or sampling.bad_ids:
        return False
    if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0 or not 0 <= sampling.seed < _SEEDS:
        return False
    stopping = request.stopping  # before `min_tokens` the ids that stop are masked
    return not stopping.stop_ids or sequence.length - sequence.num_prompt >= stopping.min_tokens


def draw_columns(work: Work, drawn: list[tuple[Sequence, int]]) -> DrawColumns:
    """How the tokens of plain `work` are drawn; `drawn` are the sequences and rows of the draw before, if its tokens
    are not known yet. Raises OverflowError on numbers that are none of their types."""
    sequences = [sequence for sequence, _ in work.sampled]
    sampling = [sequence.request.sampling for sequence in sequences]
    rows: dict[SequenceId, int] = {sequence.sequence_id: row for sequence, row in drawn}
    singles = work.parts[: work.batch.num_decodes]
    return DrawColumns(
        temperatures=np.array([it.temperature for it in sampling], np.float64),
        seeds=np.array([it.seed for it in sampling], np.uint64),
        samples=np.array([sequence.sample for sequence in sequences], np.int32),
        positions=np.array([sequence.length for sequence in sequences], np.int32),
        sources=np.array(
            [rows[it.sequence_id] if it.next_token is None else -1 for it, _ in singles], np.int32
        ),
    )  # fmt: skip


def _draws(work: Work, ids: IntArray) -> Draws:
    tokens = ids.tolist()
    return [
        (sequence, sequence.sample, Drawn(None if tokens[row] < 0 else tokens[row])) for sequence, row in work.sampled
    ]
