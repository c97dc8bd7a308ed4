"""The step loop of a simulated decoder: copies, chunks, decodes, drafts, seals, credit, forks, preemption.

It keeps the protocol of `decoder/`: nothing is written but under a lease or credit, copies run before their targets are
touched, a step's news is told after the step alone, a release ends all use of a lease. It reads back what it attends to
and gives a token out only while its own clock says that its session cannot be over. Called by `decoder.py`.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from cachemgr.claim_plans import Claim
from cachemgr.ids import LeaseId
from cachemgr.results import Acquired, Branch, CopyPlan, Growth, Keep, Replacement, Reported, Waiting
from cachemgr.resuming import Resumed
from common.errors import FailedPrecondition, NotFound, ResourceExhausted, TesseraError, Unavailable
from common.tokens import pack_tokens
from tests.simulation import messages
from tests.simulation.kernel import Violation
from tests.simulation.sequences import ACQUIRING, FINISHED, HELD_UP, RUNNING, WAITING, Sequence
from tests.simulation.workload import Request, next_token

if TYPE_CHECKING:
    from tests.simulation.decoder import SimDecoder

HOLD_STEPS = 8
AHEAD_TOKENS = 3


class Engine:
    """All sequences of one decoder process."""

    def __init__(self, process: SimDecoder) -> None:
        self.process = process
        self.world = process.world
        self.kernel = process.world.kernel
        self.scenario = process.world.scenario
        self.size = self.scenario.block_tokens
        self.sequences: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.acquiring: deque[Sequence] = deque()
        self.forget_session()

    def forget_session(self) -> None:
        """Nothing that was held or asked for holds any more."""
        self.credit: list[int] = []
        self.strays: list[int] = []  # lent to a sequence that is over
        self.copies: list[Sequence] = []
        self.ending: set[LeaseId] = set()  # leases to be released when their rollback is answered
        self.presented: list[Sequence] = []
        self.presented_leases: list[LeaseId | None] = []
        self.released: list[Any] = []
        self.asked = False
        self.asked_in_need = False
        self.short = False  # the last ask brought less than asked
        self.refused = False  # so did one in need, and nobody was lent a block of its own
        self.is_full = False
        self.reclaim = 0
        self.hold = 0
        self.applied = 0
        self.acknowledge = False

    # ---- requests

    def submit(self, request: Request) -> None:
        """Queues what is missing of a request."""
        open_samples = [n for n in range(request.samples) if len(request.outputs.get(n, ())) < request.max_tokens]
        started = any(request.outputs.values()) or request.counted
        self.process.arrivals += 1
        for sample in open_samples if started else open_samples[:1]:
            tokens = [*request.prompt, *request.outputs.get(sample, ())]
            sequence = Sequence(request, sample, self.process.arrivals, tokens)
            sequence.to_fork = () if started else tuple(open_samples[1:])
            self.sequences.append(sequence)
            self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        sequence.state = WAITING
        insort(self.waiting, sequence, key=lambda item: item.rank)

    def leave(self, sequence: Sequence, keep: Keep | None = None) -> None:
        """A sequence is over, whatever its state."""
        if sequence.state == WAITING:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self._release(sequence, keep)
            self.hold = 0
        sequence.state = FINISHED
        self.sequences.remove(sequence)

    def end_request(self, request: Request, how: str) -> None:
        """Every sequence of a request is over."""
        for sequence in [item for item in self.sequences if item.request is request]:
            self.leave(sequence)
        self.world.request_ended(request, how)

    def requeue_all(self) -> None:
        """The session is gone: what was running starts again from its tokens."""
        self.acquiring.clear()
        self.running.clear()
        self.waiting.clear()
        self.forget_session()
        for sequence in self.sequences:
            sequence.wait_id = 0
            sequence.let_go()
            self._wait(sequence)

    def leave_stream(self) -> None:
        """The stream broke: what runs goes on with what is here; what was asked for is asked for again."""
        for sequence in [item for item in self.sequences if item.state == ACQUIRING]:
            self._wait(sequence)
        self.acquiring.clear()
        for sequence in self.waiting:
            sequence.wait_id = 0
        for sequence in [item for item in self.running if item.state == HELD_UP]:
            self.running.remove(sequence)
            sequence.let_go()
            self._wait(sequence)
        self.released = []
        self.ending.clear()
        self.asked = self.short = self.refused = self.is_full = self.acknowledge = False

    def holdings(self) -> tuple[tuple[Claim, ...], tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Everything that is held, for the daemon: sequences, credit, and the window blocks that go with them."""
        self.released = []
        self.presented = list(self.running)
        self.presented_leases = [item.lease for item in self.running]
        return tuple(item.held() for item in self.running), (*self.credit, *self.strays), self._window_blocks()

    def _window_blocks(self) -> tuple[tuple[int, int], ...]:
        """Of credit, copies, and what of tables the window has not passed: what was told of them."""
        window = self.scenario.group_window
        if not window:
            return ()
        named = {*self.credit, *self.strays}
        for item in self.running:
            named.update(item.table[max(0, item.computed + 1 - window) // self.size :])
            named.update(() if item.copy is None else (item.copy.source, item.copy.target))
        return tuple((block, self.process.windows_of[block]) for block in sorted(named))

    def resumed(self, answer: Resumed, epoch: int) -> None:
        """The session goes on, with a daemon of `epoch`; sequences whose lease was not kept start again."""
        anew = epoch != self.process.epoch
        for sequence, lease in zip(self.presented, answer.leases, strict=True):
            if sequence in self.running and lease:
                sequence.lease = lease
                if sequence.lie:  # not told yet
                    self.world.lies.add((epoch, lease))
            elif sequence in self.running:
                if not (
                    anew or self.scenario.quotas or self.world.lied(self.process, sequence.lease)
                ):  # it may have grown above a ceiling
                    raise Violation(f"{sequence.name}: what an honest decoder holds was not taken")
                self.running.remove(sequence)
                sequence.let_go()
                self._wait(sequence)
        self._replace(answer.replacements)
        # A lease that ended while it was presented: its news named the lease that it had.
        names = {old: new for old, new in zip(self.presented_leases, answer.leases, strict=True) if new}
        self.released = [
            item._replace(lease_id=names[item.lease_id]) for item in self.released if item.lease_id in names
        ]
        self.applied = answer.revision if anew else max(self.applied, answer.revision)
        self.acknowledge = True

    def _replace(self, replacements: list[Replacement]) -> None:
        for item in replacements:
            for sequence in self.running:
                if sequence.lease == item.lease_id:
                    sequence.table[item.first_index : item.first_index + len(item.blocks)] = item.blocks.tolist()

    def _release(self, sequence: Sequence, keep: Keep | None = None) -> None:
        self.running.remove(sequence)
        if sequence.lease is not None and sequence.state == HELD_UP:
            self.ending.add(sequence.lease)  # what the answer has scrubbed must still be ours then
        elif sequence.lease is not None:
            self.released.append(sequence.news(release=True, keep=keep))
        sequence.let_go()
        self.is_full = self.short = self.refused = False

    # ---- answers

    def acquired(self, answer: Acquired | TesseraError) -> None:
        """The oldest acquire was answered."""
        sequence = self.acquiring.popleft()
        if isinstance(answer, TesseraError):
            if sequence.state == FINISHED:
                return
            may_fit = isinstance(answer, ResourceExhausted) and answer.reason != "EXCEEDS_USABLE"
            if may_fit and self.world.may_fit(sequence.request, len(sequence.tokens)):
                self.is_full = True
                self._wait(sequence)
            elif isinstance(answer, Unavailable):  # a new daemon that waits for its decoders
                self.is_full = True
                sequence.request.counted = False
                self._wait(sequence)
            elif isinstance(answer, NotFound):  # the kept branch is over: the client sends the whole prompt again
                sequence.request.base = b""
                sequence.request.counted = False
                self._wait(sequence)
            else:
                self.end_request(sequence.request, f"refused: {answer.reason}")
            return
        if isinstance(answer, Waiting):
            self._wait_for_another(sequence, answer)
            return
        if answer.base_tokens and pack_tokens(np.array(sequence.tokens, np.int32)).find(answer.base_tokens) != 0:
            raise Violation(f"{sequence.name}: the kept branch is not what was kept")
        if answer.cached_tokens > len(sequence.tokens) - 1:
            raise Violation(f"{sequence.name}: {answer.cached_tokens} of {len(sequence.tokens)} tokens are cached")
        passed = int(np.count_nonzero(answer.blocks == 0))
        shared = answer.cached_tokens // self.size - passed
        whole = self.world.begins_with(len(sequence.tokens), shared, passed)
        least = shared + 1 if self.scenario.group_window else whole  # the rest comes as credit
        if not least <= len(answer.blocks) <= whole:
            raise Violation(f"{sequence.name}: {len(answer.blocks)} blocks for {len(sequence.tokens)} tokens")
        if sequence.state == FINISHED:
            self.released.append(messages.SequenceReport(answer.lease_id, release=True))
            return
        table = answer.blocks.tolist()
        sequence.lie_in(*self.world.prefixes[self.process.epoch, answer.lease_id])
        sequence.hold(answer.lease_id, table, answer.cached_tokens, len(sequence.tokens), answer.copy)
        self._run(sequence)

    def _wait_for_another(self, sequence: Sequence, answer: Waiting) -> None:
        if sequence.state == FINISHED:
            return
        most = len(sequence.tokens) - 1
        if not 0 <= answer.resident_tokens < answer.coming_tokens <= most:
            raise Violation(f"{sequence.name}: waits for {answer.coming_tokens} of {len(sequence.tokens)} tokens")
        sequence.request.counted = False
        self._wait(sequence)
        sequence.wait_id = answer.wait_id
        self.process.later(self.kernel.between(500, 4000), self._stop_waiting, sequence, answer.wait_id)

    def _stop_waiting(self, sequence: Sequence, wait_id: int) -> None:
        if sequence.wait_id == wait_id:
            sequence.wait_id, sequence.may_wait = 0, False
            self.process.wake()

    def prefix_ready(self, wait_id: int) -> None:
        """What a sequence waits for is there."""
        for sequence in self.waiting:
            if sequence.wait_id == wait_id:
                sequence.wait_id = 0

    def _run(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=lambda item: item.rank)
        sequence.know()
        if sequence.copy is not None:
            self.copies.append(sequence)

    def forked(self, lease: LeaseId, branches: list[Sequence], answer: list[Branch] | TesseraError) -> None:
        """A fork was answered: a lease for each branch, or none at all."""
        if isinstance(answer, NotFound) and (self.scenario.quotas or self.world.lied(self.process, lease)):
            return  # its request ended with the answer before
        if isinstance(answer, TesseraError):
            raise Violation(f"a fork was refused: {answer.message}")
        for place, branch in enumerate(branches):
            if not answer:
                if branch.state != FINISHED:
                    self._wait(branch)
                continue
            made = answer[place]
            if branch.state == FINISHED:
                self.released.append(messages.SequenceReport(made.lease_id, release=True))
                continue
            shared = len(branch.request.prompt)
            branch.hold(made.lease_id, made.blocks.tolist(), shared, shared, made.copy)
            self._run(branch)

    def rolled_back(
        self, cut: bool, sequence: Sequence, lease: LeaseId, kept: int, answer: CopyPlan | TesseraError | None
    ) -> None:
        """A rollback or a copy-on-write was answered."""
        if lease in self.ending:
            self.ending.discard(lease)
            self.released.append(messages.SequenceReport(lease, release=True))
            return
        if sequence.lease != lease or sequence.state != HELD_UP:
            return
        if isinstance(answer, NotFound) and self.world.lied(self.process, lease):
            return
        sequence.state = RUNNING
        passed = isinstance(answer, FailedPrecondition) and answer.reason == "WINDOW_PASSED"
        windowed = self.scenario.window_tokens or self.scenario.group_window
        if isinstance(answer, ResourceExhausted) or (passed and windowed):
            self._give_way(sequence)
            return
        if isinstance(answer, TesseraError):
            raise Violation(f"{sequence.name}: a rollback was refused: {answer.message}")
        if cut:
            sequence.table = sequence.table[: -(-kept // self.size)]
        if answer is not None:
            sequence.table[kept // self.size] = answer.target
            sequence.copy = answer
            self.copies.append(sequence)
        elif cut and self.kernel.chance(0.3):
            self.process.ask(messages.MakeWritable(lease), (False, sequence, lease, kept))
            sequence.state = HELD_UP

    def reported(self, wanted: int, answer: Reported | TesseraError) -> None:
        """A report was answered."""
        if isinstance(answer, TesseraError):
            raise Violation(f"a report was refused: {answer.message}")
        self._replace(answer.replacements)
        for refusal in answer.refusals:
            for sequence in [item for item in self.running if item.lease == refusal.lease_id]:
                self.strays += sequence.taken  # what came for it alone since it was reported on
                sequence.taken = []
                if refusal.error.reason == "QUOTA_EXCEEDED" and self.scenario.quotas:
                    sequence.lease = None
                    self.end_request(sequence.request, "refused: QUOTA_EXCEEDED")
                    continue
                if not self.world.lied(self.process, refusal.lease_id):
                    raise Violation(f"{sequence.name}: an honest report was refused: {refusal.error.message}")
                sequence.lease = None
                self.end_request(sequence.request, "failed: the decoder lied")
        for kept in answer.kept:
            self.world.kept(kept)
        self.credit += answer.credit.tolist()
        if wanted:
            self.asked = False
            self.short = len(answer.credit) < wanted
            # What stood there twice is free once this answer is acknowledged: with the next ask.
            self.refused = self.short and self.asked_in_need and not (answer.grown or answer.replacements)
        for growth in answer.grown:
            self._grow(growth)
        self.applied = max(self.applied, answer.revision)
        self.acknowledge |= bool(answer.replacements or answer.refusals)

    def _grow(self, growth: Growth) -> None:
        blocks = growth.blocks.tolist()
        holder = next((item for item in self.running if item.lease == growth.lease_id), None)
        if holder is None:
            self.strays += blocks
        else:
            holder.table += blocks
            holder.taken += blocks

    # ---- one step

    def run_copies(self) -> None:
        """Runs the copies of leases that have just come."""
        for sequence in self.copies:
            plan = sequence.copy
            if sequence not in self.running or plan is None:
                continue
            self.world.copy(self.process, sequence, plan)
            sequence.copy, sequence.copied = None, True
        self.copies = []

    def plan(self) -> list[tuple[Sequence, int]]:
        """Chooses what the next step computes, and tells the daemon."""
        self.hold = max(0, self.hold - 1)
        work: list[tuple[Sequence, int]] = []
        lacking: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.state != RUNNING or sequence.remaining != 1 or sequence.generated < 1:
                continue
            if sequence.request.drafts and self.kernel.chance(0.5):
                self._draft(sequence)
            if len(sequence.tokens) - sequence.drafts > self.world.longest:
                self.end_request(sequence.request, "refused: EXCEEDS_POOL")
                continue
            if self._cover(sequence):
                work.append((sequence, sequence.remaining))
                continue
            lacking.append(sequence)
            if self.refused and not self.asked:
                self._give_way(self.running[-1])
                work = [item for item in work if item[0] in self.running]
                break
        budget = self.scenario.chunk_tokens
        for sequence in self.running:
            if sequence.state == RUNNING and (sequence.remaining > 1 or sequence.generated < 1) and budget:
                if any(item[0] is sequence for item in work):
                    continue
                count = min(sequence.remaining, budget)
                if not self._reach(sequence, count):
                    lacking += [sequence] * (-(-(sequence.computed + count) // self.size) - len(sequence.table))
                    if self.refused and not self.asked:
                        self._give_way(self.running[-1])
                        work = [item for item in work if item[0] in self.running]
                        break
                    continue
                count = min(count, len(sequence.table) * self.size - sequence.computed)
                budget -= count
                work.append((sequence, count))
        self.report(lacking)
        self._admit()
        return work

    def _draft(self, sequence: Sequence) -> None:
        end = len(sequence.request.prompt) + sequence.request.max_tokens
        for _ in range(min(3, end - len(sequence.tokens))):
            right = next_token(sequence.cells[-1], sequence.sample)
            sequence.tokens.append(right if self.kernel.chance(0.6) else (right + 1) % 3)
            sequence.drafts += 1
            sequence.know()

    def _cover(self, sequence: Sequence) -> bool:
        """Makes the table reach the tokens to compute; drafts that have no room are dropped."""
        while len(sequence.table) * self.size < len(sequence.tokens):
            if self.credit:
                block = self.credit.pop()
                sequence.table.append(block)
                sequence.taken.append(block)
            elif sequence.drafts:
                sequence.cut(len(sequence.tokens) - 1)
                sequence.drafts -= 1
            else:
                return False
        return True

    def _reach(self, sequence: Sequence, count: int) -> bool:
        """Makes the table reach `count` tokens more, or a part of them, where the prompt is longer than the pool."""
        while len(sequence.table) * self.size < sequence.computed + count and self.credit:
            block = self.credit.pop()
            sequence.table.append(block)
            sequence.taken.append(block)
        return len(sequence.table) * self.size > sequence.computed

    def _give_way(self, sequence: Sequence) -> None:
        self.process.say(f"preempts {sequence.name}")
        self._release(sequence)
        self._wait(sequence)
        self.hold = HOLD_STEPS

    def report(self, lacking: list[Sequence] | None = None) -> None:
        """Tells the daemon what there is to tell, if there is anything. `lacking` stand still for want of a block."""
        if self.process.is_away:
            return
        need = 0
        for sequence in self.running:
            last = len(sequence.request.prompt) + sequence.request.max_tokens - 1
            ahead = min(len(sequence.tokens) + AHEAD_TOKENS, last)
            if len(sequence.tokens) > self.scenario.num_blocks * self.size or self.scenario.group_window:
                ahead = min(ahead, sequence.computed + self.scenario.chunk_tokens)
            need += max(0, -(-ahead // self.size) - len(sequence.table))
        count = len(self.credit) if not need else min(self.reclaim, len(self.credit))
        self.reclaim = 0
        returned = tuple(self.credit[len(self.credit) - count :])
        del self.credit[len(self.credit) - count :]
        returned += tuple(self.strays)
        self.strays = []
        is_vain = self.refused or (self.short and not lacking)
        wanted = 0 if self.asked or count or is_vain else max(0, need - len(self.credit))
        news = [item.news() for item in self.running if item.has_news(self.size)] + self.released
        if not (news or returned or wanted or self.acknowledge):
            return
        self.released = []
        self.acknowledge = False
        if wanted:
            self.asked, self.asked_in_need = True, bool(lacking)
        leases = tuple(item.lease for item in lacking or () if wanted and item.lease is not None)
        self.process.ask(messages.Report(tuple(news), returned, wanted, self.applied, leases), wanted)
        if returned:
            self.is_full = False

    def _admit(self) -> None:
        while self.waiting and not (self.hold or self.is_full or self.process.is_away) and len(self.acquiring) < 2:
            if len(self.running) + len(self.acquiring) >= self.scenario.max_batch:
                return
            if self.released:
                self.report()
            sequence = next((item for item in self.waiting if not item.wait_id), None)
            if sequence is None:
                return
            self.waiting.remove(sequence)
            sequence.state = ACQUIRING
            self.acquiring.append(sequence)
            resumed, sequence.request.counted = sequence.request.counted, True
            self.process.ask(
                messages.Acquire(
                    sequence.request, sequence.sample, tuple(sequence.tokens), resumed,
                    may_wait=self.scenario.waits and sequence.may_wait,
                    base=b"" if resumed or sequence.generated else sequence.request.base,
                ),
                sequence,
            )  # fmt: skip

    def finish(self, work: list[tuple[Sequence, int]]) -> None:
        """The step has run: everything is read and written; tokens are given out if that may still be."""
        good = self.process.is_good
        for sequence, count in work:
            if good:
                self.world.read(self.process, sequence)
            self.world.write(self.process, sequence, count)
            sequence.computed += count
        if not good:
            self.process.lose("its own clock says that the session may be over")
            return
        for sequence, _ in work:
            if sequence.state == RUNNING and not sequence.remaining:
                self._draw(sequence)

    def _draw(self, sequence: Sequence) -> None:
        drafts, sequence.drafts = sequence.drafts, 0
        place = len(sequence.tokens) - drafts
        for _ in range(drafts):
            if sequence.tokens[place] != next_token(sequence.cells[place - 1], sequence.sample):
                break
            if not self._give_out(sequence, sequence.tokens[place]):
                return
            place += 1
        token = next_token(sequence.cells[place - 1], sequence.sample)
        cut = place < len(sequence.tokens)
        if cut and not self.process.is_away and (sequence.reported_tokens > place or self.kernel.chance(0.5)):
            # What was told is taken back by the daemon, too; else the daemon never hears of it.
            self._tell_all(sequence)
            self.process.ask(messages.Rollback(sequence.lease, place), (True, sequence, sequence.lease, place))  # type: ignore[arg-type]
            sequence.state = HELD_UP
        sequence.cut(place)
        if sequence.to_fork:
            self._fork(sequence)
        if not self._give_out(sequence, token):
            return
        sequence.tokens.append(token)
        sequence.know()
        if self.scenario.commits and sequence.state == RUNNING and self.kernel.chance(0.15):
            self._commit(sequence)

    def _commit(self, sequence: Sequence) -> None:
        """Publishes what is computed now, and asks for a block of its own before it writes on."""
        if self.process.is_away or sequence.request.no_store or not sequence.computed % self.size:
            return
        self._tell_all(sequence)
        self.process.ask(messages.Commit(sequence.lease, sequence.computed), None)  # type: ignore[arg-type]
        about = (False, sequence, sequence.lease, sequence.computed)
        self.process.ask(messages.MakeWritable(sequence.lease), about)  # type: ignore[arg-type]
        sequence.state = HELD_UP

    def _tell_all(self, sequence: Sequence) -> None:
        self.report()
        if sequence.reported_sealed < sequence.computed:
            self.process.ask(messages.Report((sequence.news(),), (), 0, self.applied), 0)

    def _give_out(self, sequence: Sequence, token: int) -> bool:
        """A token goes to the client; False where it was the last one of the sequence."""
        if self.world.gave_out(sequence.request, sequence.sample, token):
            return True
        keep = None
        if sequence.request.keep and sequence.state == RUNNING and not self.process.is_away:
            keep = self.world.new_keep(sequence)
        self.leave(sequence, keep)
        self.world.sample_ended(sequence.request)
        return False

    def _fork(self, trunk: Sequence) -> None:
        branches = []
        samples, trunk.to_fork = trunk.to_fork, ()
        shared = len(trunk.request.prompt)
        for sample in samples:
            branch = Sequence(trunk.request, sample, trunk.arrival, [*trunk.request.prompt])
            branch.cells = trunk.cells[:shared]
            branch.lie_in(trunk.scope, min(trunk.prefix_tokens, shared - shared % self.size))
            token = next_token(branch.cells[-1], sample)
            self.sequences.append(branch)
            branch.state = ACQUIRING
            if self._give_out(branch, token):
                branch.tokens.append(token)
                branches.append(branch)
        if not branches:
            return
        if self.process.is_away:
            for branch in branches:
                self._wait(branch)
            return
        self._tell_all(trunk)
        asked = messages.Fork(trunk.lease, tuple(branch.sample for branch in branches), shared)  # type: ignore[arg-type]
        self.process.ask(asked, branches)
