"""How a plan becomes committed tokens: copies, the batch, the model, the drawing, the commit. Owns their order.

Invariant: a step is finished and committed when `compute` returns, and nothing is under way between two of the loop's
steps; a fault fails the requests of its step alone; what was computed when the lease may have run out is not committed.
Called by the step loop; `ahead_steps.py` is the other form, for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Final

from common.errors import Internal
from common.logs import get_logger, where
from decoder.beams import Expansions
from decoder.cache_api import Arena, Event, Fork, Scrub
from decoder.commit import Committer
from decoder.drawing import draw_tokens
from decoder.inbox import Message
from decoder.prompt_logprobs import score_prompts
from decoder.requests import RequestTable
from decoder.runner import Runner, StepModel
from decoder.scheduler import Plan, Scheduler
from decoder.scrubbing import zero_blocks
from decoder.sequence import Sequence
from decoder.speculation import Speculator
from decoder.structure import Structures

NO_EXPANSIONS: Final[Expansions] = []


class Steps:
    """Computes each plan at once. `is_fenced` says whether the lease may have run out.

    `report_steps`: what decodes alone bring is reported once in so many steps, half of those that credit is asked
    ahead for, since the cores that a report takes compute here.
    """

    report_steps = 4

    def __init__(
        self,
        model: StepModel,
        runner: Runner,
        scheduler: Scheduler,
        speculator: Speculator,
        requests: RequestTable,
        committer: Committer,
        *,
        is_fenced: Callable[[], bool],
        clock_ns: Callable[[], int],
    ) -> None:
        self.failed_in_a_row = 0
        self._model = model
        self._runner = runner
        self._scheduler = scheduler
        self._speculator = speculator
        self._requests = requests
        self._committer = committer
        self._structures = Structures()
        self._is_fenced = is_fenced
        self._clock_ns = clock_ns
        self._log = get_logger()

    @property
    def are_under_way(self) -> bool:
        """Whether steps were launched whose tokens nobody has read."""
        return False

    def plan(self) -> Plan:
        """What the next step does."""
        return self._scheduler.schedule()

    def settle(self) -> None:
        """Finish and commit what is under way."""

    def settle_for(self, message: Message | Event) -> None:
        """Settle first, where a message would change what a step under way still needs."""

    def discard(self) -> None:
        """Wait for what is under way and commit none of it: it is computed again, if anybody still wants it."""

    def run_copies(self, sequences: list[Sequence], scrubs: Rows[Scrub], arena: Arena) -> None:
        """Zero `scrubs`, then run the copy plans of sequences that were just admitted."""
        for scrub in scrubs:
            zero_blocks(arena, scrub)
        try:
            self._committer.run_copies(sequences, arena)
            self._requests.note("copied_ns", sequences, self._clock_ns())
        except Exception as error:  # noqa: BLE001 - fails the requests that needed the copies alone
            self._step_failed(sequences, error)

    def compute(self, plan: Plan, arena: Arena) -> list[Fork]:
        """One step; the forks that are to be asked for."""
        prefilled = [sequence for sequence, _ in plan.chunks]
        sequences = [*plan.decodes, *prefilled]
        self._speculator.draft(plan)
        try:
            work = self._runner.build(plan)
            self._structures.begin(work.sampled)
            self._requests.note("begun_ns", prefilled, self._clock_ns())
            logits = self._model.forward(work.batch, arena)
            score_prompts(work.scored, logits)
            work = self._structures.ready(work)
            draws = draw_tokens(work, logits, self._requests)
            expansions = self._committer.beams.expand(work, logits)
            firsts = [sequence for sequence, _ in work.sampled if not sequence.num_generated]
            self._requests.note("computed_ns", firsts, self._clock_ns())
        except Exception as error:  # noqa: BLE001 - fails the requests of this step alone
            self._step_failed(sequences, error)
            return []
        self.failed_in_a_row = 0
        if self._is_fenced():
            return []  # nothing is committed; if the lease turns out to be alive, the same is computed again
        return self._committer.commit(work, draws, expansions)

    def _step_failed(self, sequences: Rows[Sequence], error: Exception) -> None:
        self.failed_in_a_row += 1
        self._log.error(
            "step_failed", error=type(error).__name__, frames=where(error), sequences=len(sequences),
            failed_steps=self.failed_in_a_row,
        )  # fmt: skip
        for sequence in sequences:
            self._committer.fail_sequence(sequence, Internal("the step that computed this request failed"))
