"""From logits to the state of sequences. Owns what a drawn token changes, and how a prompt fans out into samples.

Invariant: a token is drawn at a position once; a sample that ended leaves the scheduler, its lease goes to the reporter
and its request is told, in one go. Called by the engine's thread; it sends nothing and waits for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows

import numpy as np

from common.errors import Internal, TesseraError
from common.logs import get_logger, where
from decoder.beams import Beams, Expansions, groups_of
from decoder.cache_api import Arena, Branch, Fork
from decoder.drawing import is_stop
from decoder.keeping import Keeping
from decoder.outputs import EndReason
from decoder.reporting import Reporter
from decoder.requests import ActiveRequest, RequestTable
from decoder.runner import StepModel, Work
from decoder.sampler import Drawn
from decoder.scheduler import Scheduler
from decoder.sequence import LeaseId, Request, Sequence, SequenceId, SequenceState
from decoder.structure import dead_end


class Committer:
    """Applies what a step brought. Keeps the branches whose leases are on their way."""

    def __init__(self, model: StepModel, scheduler: Scheduler, requests: RequestTable, reporter: Reporter) -> None:
        self._model = model
        self._scheduler = scheduler
        self._requests = requests
        self._reporter = reporter
        self.keeping = Keeping(requests)
        self.beams = Beams(self, scheduler, requests)
        self._branches: dict[SequenceId, list[Sequence]] = {}
        self._last_id = 0

    def new_sequence(self, active: ActiveRequest, index: int, arrival: int, *, is_trunk: bool) -> Sequence:
        """A sequence for one sample (or the trunk of several) of a request."""
        self._last_id += 1
        sequence = Sequence(SequenceId(self._last_id), active.request, index, arrival, is_trunk=is_trunk)
        self._requests.add_sequence(active, sequence)
        return sequence

    # ---- ends

    def leave(self, sequence: Sequence) -> None:
        """A sequence is over, whatever its state: no further step computes it and its blocks go back."""
        if sequence.state is SequenceState.RUNNING:
            keep = sequence.lease in self.keeping
            self._reporter.release(sequence, sequence.request.keep_seconds if keep else 0.0)
        self._scheduler.remove(sequence)
        self._requests.drop_sequence(sequence)

    def end_request(self, active: ActiveRequest) -> None:
        """Every sequence of a request is over."""
        for sequence in list(active.sequences):
            self.leave(sequence)

    def fail_request(self, active: ActiveRequest, error: TesseraError) -> None:
        """A request ends with an error."""
        self.end_request(active)
        self._requests.fail(active, error)

    def fail_sequence(self, sequence: Sequence, error: TesseraError) -> None:
        """The request of a sequence ends with an error, unless it has ended already."""
        if sequence.state is not SequenceState.FINISHED:
            self.fail_request(self._requests.of(sequence), error)

    # ---- one step

    def run_copies(self, sequences: Rows[Sequence], arena: Arena) -> None:
        """Run the copy-on-write plans of sequences that were just admitted."""
        ready = [(sequence, sequence.copy) for sequence in sequences if sequence.state is SequenceState.RUNNING]
        plans = [(sequence, plan) for sequence, plan in ready if plan is not None]
        if plans:
            columns = np.array([(plan.source, plan.target, plan.num_tokens) for _, plan in plans], np.int32).T.copy()
            self._model.copy_blocks(arena, columns[0], columns[1], columns[2])
        for sequence, _ in plans:
            sequence.copy = None
            sequence.copied = True
            self._requests.of(sequence).cow_copies += 1
            self._reporter.hurry()

    def count_generated(self, request: Request, num_tokens: int = 1) -> None:
        """A request gained so many tokens."""
        self._reporter.generated_tokens += num_tokens
        self._scheduler.charge_tokens(request, num_tokens)

    def commit(self, work: Work, draws: Rows[tuple[Sequence, int, Drawn]], expansions: Expansions) -> list[Fork]:
        """The step has finished: count what is computed, give the tokens out; the forks that are to be asked for."""
        num_drawn = Counter(sequence.sequence_id for sequence, _, _ in draws) if work.drafts else Counter()
        for sequence, count in work.parts:
            drafts = work.drafts.get(sequence.sequence_id)
            if drafts is None:
                if count > 1 or sequence.num_computed < sequence.num_prompt:
                    self._reporter.hurry()  # a prompt's blocks, which others may wait for
                sequence.num_computed += count
            else:  # as many guesses were right as tokens were drawn after the first
                accepted = num_drawn[sequence.sequence_id] - 1
                sequence.num_computed += 1 + accepted
                self._count_drafts(sequence, len(drafts), accepted)
        forks = self.beams.commit(expansions)
        trunks: dict[SequenceId, list[tuple[int, Drawn]]] = {}
        for sequence, index, drawn in draws:
            if sequence.state is not SequenceState.RUNNING:
                continue
            if drawn.token is None:
                self.fail_sequence(sequence, _no_token(sequence, index, drawn.fault))
            elif sequence.is_trunk:
                trunks.setdefault(sequence.sequence_id, []).append((index, drawn))
            elif self._gain(self._requests.of(sequence), index, drawn, sequence.num_generated + 1, sequence):
                sequence.append_token(drawn.token)
            else:
                self.leave(sequence)
        for sequence, _ in work.sampled:
            firsts = trunks.get(sequence.sequence_id)
            if firsts is not None and sequence.state is SequenceState.RUNNING:
                forks += self._fan_out(sequence, firsts)
        return forks

    def _count_drafts(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        if sequence.pace is not None:
            sequence.pace.record(drafted, accepted)
        if sequence.state is SequenceState.RUNNING:
            active = self._requests.of(sequence)
            active.drafted += drafted
            active.accepted += accepted

    def _gain(
        self, active: ActiveRequest, index: int, drawn: Drawn, num_generated: int, sequence: Sequence | None = None
    ) -> bool:
        # Tells a token; False where it is the sample's last. A sample that is kept has a sequence of its own; its last
        # token and its end are told when its handle is there.
        token, stopping = drawn.token, active.request.stopping
        if token is None:
            return False
        self.count_generated(active.request)
        stops = is_stop(stopping, token, num_generated)
        if not stops and num_generated < stopping.max_tokens:
            self._requests.gain(active, index, token, drawn.logprobs)
            return True
        reason = EndReason.STOP if stops else EndReason.LENGTH
        if sequence is not None and sequence.lease is not None and active.request.keep_seconds:
            if not stops:
                sequence.append_token(token)  # what is kept is the whole answer, but for a token that only says its end
            self.keeping.wait(sequence.lease, active, index, reason, drawn)
            return False
        self._requests.gain(active, index, token, drawn.logprobs)
        self._requests.end_sample(active, index, reason, token if stops else None)
        return False

    def _fan_out(self, trunk: Sequence, firsts: Rows[tuple[int, Drawn]]) -> list[Fork]:
        # The first sample that goes on keeps the trunk and its lease, the others become branches of it.
        active = self._requests.of(trunk)
        alive = [(index, drawn.token) for index, drawn in firsts if self._gain(active, index, drawn, 1)]
        trunk.is_trunk = False
        trunk.penalties = None
        if not alive:
            self.leave(trunk)
            return []
        trunk.sample, first = alive[0][0], alive[0][1]
        if first is not None:
            trunk.append_token(first)
        branches = []
        for index, token in alive[1:]:
            branch = self.new_sequence(active, index, trunk.rank[1], is_trunk=False)
            branch.admitted = True
            if token is not None:
                branch.append_token(token)
            branches.append(branch)
        kept = self._scheduler.promise_places(len(branches))
        for branch in branches[kept:]:
            self._scheduler.enqueue(branch)
        if not kept or trunk.lease is None:
            return []
        for branch in branches[:kept]:
            branch.state = SequenceState.FORKING
        return [self.fork(trunk, trunk.lease, branches[:kept])]

    # ---- branches

    def fork(self, trunk: Sequence, lease: LeaseId, branches: list[Sequence]) -> Fork:
        """What is to be asked for to make `branches`, whose places are promised, of a trunk that holds `lease`."""
        self._branches[trunk.sequence_id] = branches
        self._reporter.note(trunk)
        return Fork(trunk.sequence_id, lease, tuple(branch.sample for branch in branches), branches[0].shared)

    def add_branches(self, trunk: SequenceId, answer: Rows[Branch]) -> list[Sequence]:
        """A fork was answered: the branches that run now. Without room they wait in the queue as they are, but those
        of a beam group wait together."""
        branches = self._branches.pop(trunk, [])
        if not answer:
            self._scheduler.drop_promise(len(branches))
            forking = [branch for branch in branches if branch.state is SequenceState.FORKING]
            for branch in forking:
                if branch.group is None:
                    self._scheduler.enqueue(branch)
            self.beams.restart(groups_of(forking))
            return []
        running = []
        for branch, lease in zip(branches, answer, strict=True):
            if branch.state is SequenceState.FORKING:
                self._scheduler.add_branch(branch, lease.lease, lease.blocks, lease.copy)
                running.append(branch)
            else:
                self._scheduler.drop_promise(1)
                self._reporter.release_unused(lease.lease)
        return running

    def recall_forks(self) -> None:
        """No fork on its way will be answered, or can be sent: their branches wait in the queue as they are."""
        for trunk in list(self._branches):
            self.add_branches(trunk, ())

    def clear(self) -> None:
        """Forget the forks and the handles that are on their way: the session is gone."""
        self._branches.clear()
        self.keeping.clear()


def _no_token(sequence: Sequence, index: int, fault: Exception | None) -> TesseraError:
    """The error of a request whose next token could not be drawn."""
    if isinstance(fault, TesseraError):
        return fault
    if fault is not None:
        get_logger().error(
            "draw_failed", request_id=sequence.request.request_id, sample=index, error=type(fault).__name__,
            frames=where(fault),
        )  # fmt: skip
        return Internal("the next token of this request could not be drawn")
    if sequence.request.constraint is not None:
        return dead_end()
    return Internal("the model gave numbers that are not finite")
