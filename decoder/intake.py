"""What comes in from outside the loop, and what it changes: messages of gateways and events of the cache session.

Invariant: every message is legal in every state (late, repeated, or for something that has ended), and after a message
the books are whole. Called by the engine's thread between steps; it computes nothing and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from common.errors import (
    Aborted,
    AlreadyExists,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    TesseraError,
    Unavailable,
)
from common.logs import get_logger
from decoder.absence import Absence, grow_tables, replace_blocks
from decoder.beams import blocks_of_group
from decoder.cache_api import (
    OVER_CEILING,
    POOL_FULL,
    AbortAsked,
    AbortDone,
    Acquired,
    AcquireRefused,
    AcquireWaiting,
    Arena,
    Attached,
    Away,
    CacheClient,
    CreditGranted,
    CreditReclaimed,
    Event,
    Forked,
    Lost,
    PrefixReady,
    Reported,
    Resumed,
    Scrub,
    WindowBlocksNamed,
)
from decoder.commit import Committer
from decoder.conversations import Conversations
from decoder.grouped_arena import GroupedArena, usable_window_blocks
from decoder.inbox import Cancel, Consumed, Disconnect, Drain, Message, Stop, Submit
from decoder.reporting import Reporter
from decoder.requests import ActiveRequest, RequestTable
from decoder.runner import StepModel
from decoder.scheduler import Scheduler
from decoder.sequence import IntArray, Request, Sequence, SequenceState
from decoder.service_rate import ServiceRate

_SESSION_EVENTS = (
    Away, Resumed, Acquired, AcquireWaiting, PrefixReady, AcquireRefused, Reported, Forked, CreditGranted,
    CreditReclaimed, Scrub, WindowBlocksNamed,
)  # fmt: skip


class Intake:
    """Handles one message after the other; owns the session and its arena."""

    def __init__(
        self,
        *,
        model: StepModel,
        client: CacheClient,
        scheduler: Scheduler,
        requests: RequestTable,
        reporter: Reporter,
        committer: Committer,
        max_queue: int,
        max_queue_total: int,
        clock_ns: Callable[[], int],
    ) -> None:
        self.session: int | None = None
        self.arena: Arena | None = None
        self._conversations = Conversations(requests, reporter, committer)
        self.absence = Absence(client, scheduler, reporter, committer)
        self.copies: list[Sequence] = []  # admitted sequences whose copy plans are to be run
        self.scrubs: list[Scrub] = []  # what is to be zeroed before anything else touches it
        self.is_draining = False
        self.is_stopped = False
        self._model = model
        self._client = client
        self._scheduler = scheduler
        self._requests = requests
        self._reporter = reporter
        self._committer = committer
        self._max_queue = max_queue
        self._max_queue_total = max_queue_total
        self._rate = ServiceRate()
        self._clock_ns = clock_ns
        self._arrivals = 0
        self._log = get_logger()

    def handle(self, message: Message | Event) -> None:
        """Apply one message."""
        if self.session is None and isinstance(message, _SESSION_EVENTS):
            return  # it was on its way when the session's books were given up
        match message:
            case Submit():
                self._submit(message)
            case Cancel():
                self._cancel(message)
            case Consumed(sink, number, tokens):
                active = self._requests.find(sink, number)
                if active is not None:
                    self._requests.read(active, tokens)
            case Disconnect(sink):
                for active in self._requests.all():
                    if active.sink is sink:
                        self._committer.end_request(active)
                        self._requests.forget(active)
                self._requests.silence([sink])
            case Drain():
                self.is_draining = True
            case Stop(error):
                self.is_draining = self.is_stopped = True
                self._fail_all(error)
            case Acquired():
                self._acquired(message)
            case AcquireWaiting():
                self._waiting(message)
            case PrefixReady(wait_id):
                self._scheduler.queue.waits.ready(wait_id)
            case AcquireRefused():
                self._refused(message)
            case Reported():
                self._reported(message)
            case Forked(sequence_id, branches):
                self.copies += self._committer.add_branches(sequence_id, branches)
            case WindowBlocksNamed(pairs):
                self._name_window_blocks(pairs)
            case Scrub():
                self.scrubs.append(message)
            case CreditGranted(blocks):
                self._scheduler.credit.grant(blocks.tolist())
            case CreditReclaimed(num_blocks):
                self._scheduler.credit.reclaim(num_blocks)
            case AbortAsked():
                self._abort(message)
            case Attached(session, num_blocks, arena):
                self.session, self.arena = session, arena
                self._scheduler.num_blocks = num_blocks
                self._scheduler.num_window_blocks = usable_window_blocks(arena)
                self._log.info("session_attached", session=session, blocks=num_blocks)
            case Away(session, number):
                self.absence.leave(session, number, self.arena)
            case Resumed():
                self.session = message.session
                self.absence.come_back(message)
            case Lost(_, error):
                self.lose_session(error)
                self._client.resume()

    @property
    def reachable_session(self) -> int | None:
        """The session, if commands can be sent to it now."""
        return None if self.absence.is_away else self.session

    def lose_session(self, error: TesseraError) -> None:
        """Every lease is gone: end all requests with `error` and forget what belonged to the session."""
        self.session = self.arena = None
        self.absence.end()
        self._fail_all(error)
        self._scheduler.clear()
        self._reporter.clear()
        self._committer.clear()
        self.copies, self.scrubs = [], []

    def _fail_all(self, error: TesseraError) -> None:
        for active in self._requests.all():
            self._committer.fail_request(active, error)

    # ---- gateways

    def _submit(self, message: Submit) -> None:
        try:
            active = self._open(message)
        except TesseraError as error:
            self._requests.refuse(message.sink, message.request.number, error)
            return
        self._arrivals += 1
        num_samples = message.request.sampling.num_samples
        beam = message.request.beam
        if beam is not None:
            self._scheduler.enqueue(self._committer.beams.open(active, beam, self._arrivals))
        elif message.request.keep_seconds:
            # Each sample that is kept holds a lease of its own to its end; they share by the index.
            for index in range(num_samples):
                self._scheduler.enqueue(self._committer.new_sequence(active, index, self._arrivals, is_trunk=False))
        else:
            trunk = self._committer.new_sequence(active, 0, self._arrivals, is_trunk=num_samples > 1)
            self._scheduler.enqueue(trunk)

    def _open(self, message: Submit) -> ActiveRequest:
        request, scheduler = message.request, self._scheduler
        if self._requests.find(message.sink, request.number) is not None:
            raise AlreadyExists("this stream has a request of that number already", reason="REQUEST_NUMBER_IN_USE")
        if self.is_draining:
            raise Unavailable("the decoder is shutting down", reason="DRAINING")
        if self.session is None:
            raise Unavailable("the decoder has no cache manager now", reason="NO_CACHE_MANAGER")
        first_growth = 1 if request.stopping.max_tokens > 1 else 0
        width = 1 if request.beam is None else request.beam.width
        if width > scheduler.max_batch:
            raise InvalidArgument("beam.width", f"is {width}; allowed are 1..{scheduler.max_batch} in this decoder")
        num_prompt = len(request.prompt)
        needed = blocks_of_group(
            scheduler.block_tokens, num_prompt, num_prompt + first_growth, width if first_growth else 1
        )
        if needed > scheduler.num_blocks and not (width == 1 and scheduler.windows.fit(scheduler.num_blocks)):
            raise ResourceExhausted(
                f"a prompt of {num_prompt} tokens needs {needed} blocks; the pool has {scheduler.num_blocks}",
                subject="blocks", needed=needed, usable=scheduler.num_blocks, reason="EXCEEDS_POOL",
            )  # fmt: skip
        self._check_queue(request)
        return self._requests.open(request, message.sink, message.arrived_ns)

    def _check_queue(self, request: Request) -> None:
        queue, spare = self._scheduler.queue, max(0, self._scheduler.free_places)
        own, total = queue.num_waiting_of(request.tenant), len(queue.waiting)
        for text, subject, waiting, bound in (
            ("the tenant's part of the decoder's queue", "queue", own, self._max_queue),
            ("the queue of the decoder", "total_queue", total, self._max_queue_total),
        ):
            if waiting >= bound + spare:
                raise ResourceExhausted(
                    f"{text} is full", subject=subject, needed=waiting + 1, usable=bound, reason="QUEUE_FULL",
                    retry_after_seconds=self._rate.retry_seconds(total, self._clock_ns()),
                )  # fmt: skip

    def _cancel(self, message: Cancel) -> None:
        active = self._requests.find(message.sink, message.number)
        if active is None:
            return
        samples = sorted(active.open_samples) if message.sample is None else [message.sample]
        for index in samples:
            if index not in active.open_samples:
                continue
            if message.finish and active.request.keep_seconds:
                self._conversations.finish_sample(active, index)
                continue
            for sequence in list(active.sequences):
                if not sequence.is_trunk and sequence.group is None and sequence.sample == index:
                    self._committer.leave(sequence)
            if len(active.open_samples) == 1:
                self._committer.end_request(active)  # the trunk too
            self._requests.leave_sample(active, index)

    # ---- the cache session

    def _abort(self, message: AbortAsked) -> None:
        found = [active for active in self._requests.all() if active.request.request_id == message.request_id]
        for active in found:
            self._committer.fail_request(active, Aborted("the operator ended this request"))
        if self.session is not None:
            self._client.send(self.session, AbortDone(message.abort_id, bool(found)))

    def _acquired(self, message: Acquired) -> None:
        sequence, in_turn = self._scheduler.queue.answered(message.sequence_id)
        if sequence.state is SequenceState.FINISHED:
            self._reporter.release_unused(message.lease)
            return
        if not self._conversations.begin(sequence, message):
            return
        active, now_ns = self._requests.of(sequence), self._clock_ns()
        if active.moments.admitted_ns is None:
            self._rate.admitted(now_ns)
        active.admit(message.cached_tokens, now_ns)
        if in_turn:
            self._scheduler.admit(sequence, message.lease, message.blocks, message.cached_tokens, message.copy)
            self.copies.append(sequence)
        else:
            self._reporter.release_unused(message.lease)
            self._scheduler.enqueue(sequence)

    def _waiting(self, message: AcquireWaiting) -> None:
        sequence, _ = self._scheduler.queue.answered(message.sequence_id)
        if sequence.state is not SequenceState.FINISHED:
            self._scheduler.queue.wait(sequence, message.wait_id, message.resident_tokens, self._clock_ns())

    def _refused(self, message: AcquireRefused) -> None:
        sequence, in_turn = self._scheduler.queue.answered(message.sequence_id)
        if sequence.state is SequenceState.FINISHED:
            return
        if isinstance(message.error, ResourceExhausted) and message.error.reason == POOL_FULL:
            self._scheduler.queue.full(sequence, in_turn=in_turn)
        else:
            self._hint(sequence, message.error)
            self._committer.fail_sequence(sequence, message.error)

    def _hint(self, sequence: Sequence, error: TesseraError) -> None:
        # Where others of the tenant run, their ends make room below its ceiling; when, the rate of admissions tells.
        tenant, scheduler = sequence.request.tenant, self._scheduler
        others = (other for other in scheduler.running if other.request is not sequence.request)
        if error.reason == OVER_CEILING and any(other.request.tenant == tenant for other in others):
            waiting = max(1, len(scheduler.queue.waiting))
            error.retry_after_seconds = self._rate.retry_seconds(waiting, self._clock_ns())

    def _name_window_blocks(self, pairs: IntArray) -> None:
        if not isinstance(self.arena, GroupedArena):
            raise Internal("the cache manager names window blocks, and the layout has none")
        self.arena.name(pairs)

    def _reported(self, message: Reported) -> None:
        credit = self._scheduler.credit
        credit.grant(message.granted.tolist())
        credit.answered(message.wanted, len(message.granted), may_follow=bool(message.grown or message.replacements))
        if message.grown:
            grow_tables(self._scheduler, message.grown)
        self._committer.keeping.answered(message.kept)
        if message.replacements:
            replace_blocks(self._scheduler, message.replacements)
        if message.refused:
            holders = {sequence.lease: sequence for sequence in self._scheduler.running}
            for lease, error in message.refused:
                if self._committer.keeping.refused(lease, error):
                    continue
                holder = holders.get(lease)
                over_quota = isinstance(error, ResourceExhausted)  # its growth passed the tenant's ceiling
                (self._log.info if over_quota else self._log.error)("lease_refused", reason=error.reason)
                if holder is not None:
                    credit.send_back(holder.taken)  # what came for it alone since it was reported on
                    holder.drop_lease()
                    if not over_quota:
                        error = Internal("the cache manager ended this request's lease")
                    self._hint(holder, error)
                    self._committer.fail_sequence(holder, error)
        self._reporter.applied(message.revision, changed=bool(message.replacements or message.refused))
