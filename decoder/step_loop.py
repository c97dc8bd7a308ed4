"""The step loop: take in what came, choose, copy, compute, commit, tell. Owns the order of these in a step.

How a plan is computed is `steps.py`'s, or on a device, where the next step is launched while one runs, that of
`ahead_steps.py`. Invariants: nothing waits for an RPC while a sequence decodes; copies run before anything reads or
writes their targets; what a step wrote is reported only after the step has finished, and before anything is acquired
or anybody could wait for it; nothing is given out that was computed while the lease may have run out; while the
session's stream is broken the loop goes on with what is held; a fault in a step fails the requests of that step, and
the loop goes on. Called by one thread, which `decoder/engine.py` runs. No socket, no protobuf: the cache manager is
behind `CacheClient`, gateways behind `Sink`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from common.errors import Internal, ResourceExhausted
from common.logs import get_logger, where
from common.tokens import pack_tokens
from decoder.ahead_steps import AheadSteps
from decoder.beams import groups_of
from decoder.cache_api import Acquire, CacheClient, Event
from decoder.commit import Committer
from decoder.inbox import Inbox, Message
from decoder.intake import Intake
from decoder.prefix_waits import WAIT_SECONDS
from decoder.reporting import Reporter
from decoder.requests import RequestTable
from decoder.runner import AheadModel, Runner, StepModel
from decoder.scheduler import Plan, Scheduler
from decoder.sequence import Sequence, SpeculationMode
from decoder.speculation import Drafter, Speculator
from decoder.steps import Steps
from decoder.windows import Windows

MAX_FAILED_STEPS: Final = 3  # so many in a row, and the decoder says that it is not serving
RETRY_SECONDS: Final = 0.05  # the pool may have room again without our doing
LAST_ANSWERS_NS: Final = 1_000_000_000
GATHER_NS: Final = 2_000_000  # a step without decodes waits so long for one more admission


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Bounds of the engine. `mixed_chunk_tokens` are those of a step with decodes, decodes included (0: as
    `chunk_tokens`). `window_tokens` is how far a sample may run ahead of its reader, `wait_seconds` how long a
    request waits, without progress, for a prefix that another one computes; 0 never."""

    max_batch: int = 32
    chunk_tokens: int = 512
    mixed_chunk_tokens: int = 0
    max_queue: int = 256
    max_queue_total: int = 1024
    window_tokens: int = 256
    step_delay_seconds: float = 0.0
    wait_seconds: float = WAIT_SECONDS


class StepLoop:
    """Everything that one engine thread works on. `inbox` is the only way in from other threads."""

    def __init__(
        self,
        model: StepModel,
        client: CacheClient,
        options: EngineOptions,
        inbox: Inbox[Message | Event],
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        pause: Callable[[float], None] = time.sleep,
        drafters: Mapping[SpeculationMode, Drafter] | None = None,
    ) -> None:
        self.options = options
        self._clock_ns = clock_ns
        self._pause = pause
        self._model = model
        self._client = client
        self._log = get_logger()
        self._inbox = inbox
        self._scheduler = Scheduler(
            block_tokens=model.layout.block_tokens,
            num_blocks=0,
            max_batch=options.max_batch,
            chunk_tokens=options.chunk_tokens,
            mixed_chunk_tokens=options.mixed_chunk_tokens,
            wait_seconds=options.wait_seconds,
            windows=Windows(model.layout.window_tokens, model.layout.block_tokens, model.layout.grouped),
        )
        self.requests = RequestTable(options.window_tokens)
        self._speculator = Speculator(self._scheduler, drafters)
        self._reporter = Reporter(model.layout.block_tokens)
        self._committer = Committer(model, self._scheduler, self.requests, self._reporter)
        self.intake = Intake(
            model=model,
            client=client,
            scheduler=self._scheduler,
            requests=self.requests,
            reporter=self._reporter,
            committer=self._committer,
            max_queue=options.max_queue,
            max_queue_total=max(options.max_queue, options.max_queue_total),
            clock_ns=clock_ns,
        )
        self._steps = self._steps_of(model)
        self._next_retry_ns = 0
        self._steps_unreported = 0

    def _steps_of(self, model: StepModel) -> Steps:
        runner = Runner(self.options.max_batch, self.options.chunk_tokens)
        parts = (runner, self._scheduler, self._speculator, self.requests, self._committer)
        options: dict[str, Any] = {"is_fenced": lambda: self._is_fenced, "clock_ns": self._clock_ns}
        if isinstance(model, AheadModel):
            return AheadSteps(model, *parts, reporter=self._reporter, **options)
        return Steps(model, *parts, **options)

    @property
    def failed_steps(self) -> int:
        """Steps that failed one after the other."""
        return self._steps.failed_in_a_row

    @property
    def is_serving(self) -> bool:
        """Whether a request that comes now would be served."""
        healthy = self.failed_steps < MAX_FAILED_STEPS
        return healthy and self.intake.reachable_session is not None and not self.intake.is_draining

    @property
    def idle_seconds(self) -> float | None:
        """How long the loop may wait for word after a step in which nothing happened; None is for ever."""
        if self._scheduler.queue.is_blocked or self._is_fenced:
            return RETRY_SECONDS
        return self._scheduler.queue.waits.seconds_left(self._clock_ns())

    @property
    def _is_fenced(self) -> bool:
        session = self.intake.session
        return session is not None and self._client.is_fenced(session)

    def step(self) -> bool:
        """One step. False where nothing happened and only word from outside can change that."""
        try:
            return self._step()
        except Exception as error:  # noqa: BLE001 - a defect of ours must not end the process
            self._recover(error)
            return True
        finally:
            self.requests.deliver()

    def _step(self) -> bool:
        moved = self._drain_inbox()
        if self.intake.session is None or self._is_fenced:
            self._steps.discard()
            return moved
        self._gather()
        moved |= self._steps.are_under_way
        plan = self._steps.plan()
        self._give_way(plan)
        if self._is_report_due(plan):
            self._report(plan.lacking)
        self._admit()
        if plan.has_work:
            self._compute(plan, self.intake.session)
        else:
            self._steps.settle()
        return moved or plan.has_work or bool(plan.preempted or plan.outgrown)

    def hand_back(self) -> None:
        """After the stop: wait, for a second at most, for blocks and leases that were asked for, and return them: what
        comes after the session's end would stay in quarantine for as long as this process lives."""
        deadline_ns = self._clock_ns() + LAST_ANSWERS_NS
        while self.intake.reachable_session is not None:
            self._report()
            remaining_ns = deadline_ns - self._clock_ns()
            if not (self._scheduler.credit.is_asking or self._scheduler.queue.in_flight) or remaining_ns <= 0:
                return
            self._inbox.wait(remaining_ns / 1e9)
            self._drain_inbox()
            self.requests.deliver()

    def _drain_inbox(self) -> bool:
        moved = False
        while (message := self._inbox.take()) is not None:
            self._steps.settle_for(message)
            self.intake.handle(message)
            moved = True
        if self._scheduler.queue.is_blocked and self._clock_ns() >= self._next_retry_ns:
            self._scheduler.queue.retry()
        if self._scheduler.queue.waits:
            self._scheduler.queue.waits.expire(self._clock_ns())
        self._run_copies()
        return moved

    def _gather(self) -> None:
        # Before a step that no decode waits for, more prompts may join within a moment.
        deadline_ns = self._clock_ns() + GATHER_NS
        self._admit()
        while self.intake.session is not None and self._scheduler.waits_worthwhile:
            remaining_ns = deadline_ns - self._clock_ns()
            if remaining_ns <= 0 or not self._inbox.wait(remaining_ns / 1e9):
                return
            self._drain_inbox()
            self._admit()

    def _give_way(self, plan: Plan) -> None:
        for sequence in plan.preempted:
            self._reporter.release(sequence)
            self._reporter.preemptions += 1
            self._log.debug("sequence_preempted", request_id=sequence.request.request_id, sample=sequence.sample)
        self._committer.beams.restart(groups_of(plan.preempted))
        for sequence, needed in plan.outgrown:
            usable = self._scheduler.num_blocks
            error = ResourceExhausted(
                f"the sequence grew to {needed} blocks; the pool has {usable}",
                subject="blocks", needed=needed, usable=usable, reason="EXCEEDS_POOL",
            )  # fmt: skip
            self._committer.fail_sequence(sequence, error)
        plan.drop_ended()

    def _is_report_due(self, plan: Plan) -> bool:
        # A report takes about a millisecond of CPU time in all. Blocks that decodes complete are for prompts to come,
        # and credit is asked for well ahead; whatever anybody may wait for is told at once.
        self._steps_unreported += 1
        decodes_alone = bool(plan.decodes) and not (plan.chunks or plan.lacking)
        if not decodes_alone or self._steps_unreported >= self._steps.report_steps or self._scheduler.credit.is_lean:
            return True
        return self._reporter.is_urgent(len(self._scheduler.queue.waiting))

    def _report(self, lacking: Collection[tuple[Sequence, int]] = ()) -> None:
        session = self.intake.reachable_session
        if session is None:
            return
        self._steps_unreported = 0
        scheduler = self._scheduler
        wanted, returned = scheduler.credit.settle(scheduler.need_soon(), in_need=bool(lacking))
        gives_back = self._reporter.has_late_releases or len(returned) > 0
        report = self._reporter.build(
            scheduler.running,
            wanted=wanted,
            returned=returned,
            queued=len(scheduler.queue.waiting),
            lacking=lacking if wanted else (),
        )
        if report is not None:
            self._client.send(session, report)
        if gives_back:
            scheduler.queue.retry()  # it may have been asked back for the head of the queue, or be what that waits for

    def _admit(self) -> None:
        session = self.intake.reachable_session
        while session is not None and (sequence := self._scheduler.next_admission()) is not None:
            if self._reporter.has_releases or self._steps_unreported:
                self._report()  # it may read what was computed, and needs the room
            self._next_retry_ns = self._clock_ns() + int(RETRY_SECONDS * 1e9)
            request = sequence.request
            command = Acquire(
                sequence_id=sequence.sequence_id,
                grant=request.grant,
                tokens=pack_tokens(sequence.tokens),
                request_id=request.request_id,
                sample=sequence.sample,
                no_read=request.no_read,
                no_store=request.no_store,
                resumed=sequence.admitted,
                priority=request.cache_priority,
                ttl_seconds=request.cache_ttl_seconds,
                scope=request.scope,
                may_wait=not request.no_read and self._scheduler.queue.waits.may_wait(sequence),
                base_handle=request.session_handle,
                base_tokens=request.session_tokens,
                will_keep=request.keep_seconds > 0,
                adapter_digest=request.adapter_digest,
            )
            self.requests.note("asked_ns", [sequence], self._clock_ns())
            self._client.send(session, command)

    def _run_copies(self) -> None:
        arena, intake = self.intake.arena, self.intake
        if arena is not None and (intake.copies or intake.scrubs):
            sequences, scrubs = intake.copies, intake.scrubs
            intake.copies, intake.scrubs = [], []
            self._steps.run_copies(sequences, scrubs, arena)

    def _compute(self, plan: Plan, session: int) -> None:
        arena = self.intake.arena
        if arena is None:
            return
        if self.options.step_delay_seconds:
            self._pause(self.options.step_delay_seconds)
        forks = self._steps.compute(plan, arena)
        if forks and self.intake.absence.is_away:
            self._committer.recall_forks()
        elif forks:
            self._report()  # the daemon must know the prompt as computed before it is shared
            for fork in forks:
                self._client.send(session, fork)

    # ---- faults

    def _recover(self, error: Exception) -> None:
        # The books cannot be trusted any more: end everything, and let the daemon take back what the session holds.
        self._steps.failed_in_a_row += 1
        self._log.error("loop_failed", error=type(error).__name__, frames=where(error), failed_steps=self.failed_steps)
        self._steps.discard()
        session = self.intake.session
        self.intake.lose_session(Internal("an internal error ended this request; the operator's log has it"))
        if session is not None:
            self._client.abandon(session)
