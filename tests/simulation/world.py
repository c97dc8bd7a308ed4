"""One simulated node from its seed to its end: decoders, daemon, clients, faults, and the judgement.

`run(seed)` returns the trace's digest or raises `Violation`. The run has two parts: faults and new requests until
`faults_until`, then everything heals, and every accepted request must end and every block come back.
"""

from __future__ import annotations

from typing import Any

from cachemgr.ids import LeaseId
from cachemgr.journal import IndexJournal
from cachemgr.results import CopyPlan, Keep, Kept
from tests.cachemgr.journal_rig import make_memory
from tests.simulation import faults
from tests.simulation.daemon import SimDaemon
from tests.simulation.decoder import SimDecoder
from tests.simulation.invariants import Invariants
from tests.simulation.kernel import MILLISECOND, Kernel, Violation
from tests.simulation.memory import Memory
from tests.simulation.network import Link
from tests.simulation.scenario import DAEMON, DUPLICATE, scenario_of
from tests.simulation.sequences import Sequence
from tests.simulation.tearing import TearingJournal, Torn
from tests.simulation.workload import Conversation, Request, Workload

PATIENCE = 1500 * MILLISECOND


class World:
    """Everything of one seed."""

    def __init__(self, seed: int, *, only: frozenset[str] | None = None, echo: bool = False) -> None:
        self.kernel = Kernel(seed, echo=echo)
        self.scenario = scenario_of(self.kernel, seed, only)
        self.kernel.say(self.scenario.describe())
        self.memory = Memory(self.scenario.num_blocks, self.scenario.block_tokens)
        self.windows = Memory(self.scenario.num_window_blocks, self.scenario.block_tokens)  # its blocks: window blocks
        self.workload = Workload(self.kernel, self.scenario)
        self.open_requests: list[Request] = []
        self.lies: set[tuple[int, LeaseId]] = set()  # epochs and leases
        self.duplicates = 0.02 if DUPLICATE in self.scenario.faults else 0.0
        self._promised: dict[bytes, Conversation] = {}
        self._names = 0
        self._processes = 1000
        self._links = 0
        self.invariants = Invariants(self)
        self.dead: set[int] = set()
        self.prefixes: dict[tuple[int, LeaseId], tuple[int, int]] = {}  # (epoch, lease) -> scope, prefix tokens
        self.journal_memory = make_memory(
            self.scenario.num_blocks, self.scenario.block_tokens, self.scenario.num_window_blocks
        )
        self.journal = self._open_journal()
        self.daemon = SimDaemon(self, 1)
        self.decoders = [SimDecoder(self, number) for number in range(self.scenario.num_decoders)]
        self.kernel.after(0, self._arrive)
        self.kernel.after(self.scenario.fault_every, faults.strike, self)

    # ---- the run

    def run(self) -> str:
        """Runs to the end; returns the digest of the trace."""
        kernel = self.kernel
        while kernel.now < self.scenario.faults_until:
            try:
                kernel.run_one()
            except Torn:
                kernel.say("daemon is torn in a store")
                self.kill_daemon()
        kernel.say("faults stop")
        self.duplicates = 0.0
        faults.heal(self)
        deadline = kernel.now + PATIENCE
        while self.open_requests or len(self.workload.requests) < self.scenario.num_requests:
            if kernel.now > deadline:
                names = [f"r{request.number}" for request in self.open_requests]
                raise Violation(f"liveness: {names} are not over long after the last fault")
            kernel.run_one()
        while not self.invariants.is_drained():
            if kernel.now > deadline:
                self.invariants.say_what_is_left()
            kernel.run_one()
        self.invariants.at_end()
        return kernel.digest

    def new_process(self) -> int:
        """A process id that was never used."""
        self._processes += 1
        return self._processes

    def open_link(self, decoder: SimDecoder) -> Link:
        """A stream from a decoder to the daemon."""
        self._links += 1
        link = Link(self.kernel, self._links, self.scenario.latency, self._to_daemon, decoder.receive)
        link.held_until = decoder.apart_until
        return link

    def _to_daemon(self, link: Link, message: Any) -> None:
        self.daemon.receive(link, message)

    def process_ended(self, process_id: int) -> None:
        """A decoder's process is known to be dead, now and to any daemon to come."""
        self.dead.add(process_id)
        if not self.daemon.is_dead:
            self.daemon.process_ended(process_id)

    def kill_daemon(self) -> None:
        """The daemon dies, and another one takes over."""
        if not self.daemon.is_dead:
            self.daemon.die()
            self.kernel.after(self.kernel.between(100, 5000), self.start_daemon)

    def _open_journal(self) -> IndexJournal:
        torn = DAEMON in self.scenario.faults
        return TearingJournal(self.journal_memory) if torn else IndexJournal(self.journal_memory)

    def tear_daemon(self) -> None:
        """The daemon will die in the middle of an operation: in a store, or when all is done but the answer."""
        if self.kernel.chance(0.3):
            self.daemon.dies_unanswered = True
        elif isinstance(self.journal, TearingJournal):
            self.journal.tear_in(self.kernel.between(1, 8))

    def tear_no_more(self) -> None:
        """From now on it lives."""
        self.daemon.dies_unanswered = False
        if isinstance(self.journal, TearingJournal):
            self.journal.tear_in(0)

    def start_daemon(self) -> None:
        """A new daemon finds the journal and the arena of the one before it."""
        if not self.daemon.is_dead:
            return
        old = self.daemon
        self.journal = self._open_journal()
        self.workload.kept.clear()
        self._promised.clear()
        self.daemon = SimDaemon(self, old.epoch + 1)
        if isinstance(self.journal, TearingJournal) and self.kernel.now < self.scenario.faults_until:
            self.journal.tear_in(1 if self.kernel.chance(0.1) else 0)  # while it adopts
        self.daemon.adopt(old.survivors())
        self.tear_no_more()
        self.invariants.forget()
        self.check()

    def check(self) -> None:
        """After every step of the manager."""
        self.invariants.after_step()

    # ---- clients

    def _arrive(self) -> None:
        if len(self.workload.requests) >= self.scenario.num_requests:
            return
        request = self.workload.draw()
        self.open_requests.append(request)
        self.submit(request)
        mean = self.scenario.faults_until // self.scenario.num_requests
        soon = self.kernel.chance(0.3)
        self.kernel.after(self.kernel.between(0, 300 if soon else 2 * mean), self._arrive)

    def submit(self, request: Request) -> None:
        """A gateway gives a request to a decoder that lives, now or soon."""
        if request.ended:
            return
        alive = [decoder for decoder in self.decoders if decoder.alive]
        if not alive:
            self.kernel.after(MILLISECOND, self.submit, request)
            return
        request.decoder = self.kernel.random.choice(alive)
        self.kernel.say(
            f"gateway gives r{request.number} of {request.tenant} to {request.decoder.name}: {len(request.prompt)} "
            f"tokens, {request.samples} samples of {request.max_tokens}"
        )
        request.decoder.receive(None, ("submit", request))

    def may_fit(self, request: Request, num_tokens: int) -> bool:
        """Whether so many tokens of a request fit an empty node."""
        scenario = self.scenario
        most = scenario.num_blocks
        if scenario.quotas:
            others = sum(quota.floor_blocks for n, quota in enumerate(scenario.quotas, 1) if n != request.owner)
            most = min(scenario.quotas[request.owner - 1].ceiling_blocks or most, most - others)
        lengths = range(min(len(request.prompt), num_tokens), num_tokens + 1)  # it may begin anew at any of them
        shared = self.window_blocks - 2  # at most
        return max(self.begins_with(length, shared) for length in lengths) <= most

    @property
    def window_blocks(self) -> int:
        """Blocks that a window may touch, and one to write."""
        return (self.scenario.window_tokens + self.scenario.block_tokens - 2) // self.scenario.block_tokens + 2

    @property
    def longest(self) -> int:
        """Tokens of a sequence at most."""
        scenario = self.scenario
        without_end = scenario.window_tokens > 0 and self.window_blocks <= scenario.num_blocks
        return 1 << 30 if without_end else scenario.num_blocks * scenario.block_tokens

    def begins_with(self, num_tokens: int, shared: int = 0, passed: int = 0) -> int:
        """Blocks of the table that a lease of so many tokens begins with, which shares `shared` blocks behind `passed`
        null ones."""
        most, num_blocks = self.scenario.num_blocks, -(-num_tokens // self.scenario.block_tokens)
        if num_blocks <= most or self.longest <= most * self.scenario.block_tokens:
            return num_blocks
        return min(num_blocks, passed + max(most // 2, shared + 1))

    def new_keep(self, sequence: Sequence) -> Keep:
        """A name for a sequence that is to be kept."""
        request, tokens = sequence.request, sequence.tokens[: sequence.computed]
        prefix_tokens = min(sequence.prefix_tokens, len(tokens) - len(tokens) % self.scenario.block_tokens)
        self._names += 1
        name = b"k%d" % self._names
        self._promised[name] = Conversation(name, request.owner, request.root, tokens, sequence.scope, prefix_tokens)
        return Keep(name, self.kernel.between(2, 40) * 1_000_000)

    def kept(self, kept: Kept) -> None:
        """A client hears that its sequence was kept."""
        talk = self._promised.pop(kept.name, None)
        if talk is None:  # the daemon died meanwhile
            return
        if kept.num_tokens != len(talk.tokens):
            raise Violation(f"{kept.name.decode()} keeps {kept.num_tokens} tokens of {len(talk.tokens)}")
        self.workload.kept.append(talk)

    def base_tokens(self, name: bytes) -> list[int]:
        """The tokens of a kept branch, as its client knows them."""
        return next((talk.tokens for talk in self.workload.kept if talk.name == name), [])

    def gave_out(self, request: Request, sample: int, token: int) -> bool:
        """A client gets a token; False where it was the last of its sample."""
        tokens = request.outputs.setdefault(sample, [])
        tokens.append(token)
        if tokens != request.solo(sample)[: len(tokens)]:
            raise Violation(f"r{request.number}.{sample}: a wrong token was given out")
        return len(tokens) < request.max_tokens

    def sample_ended(self, request: Request) -> None:
        """One sample is complete; perhaps it was the last one."""
        done = [tokens for tokens in request.outputs.values() if len(tokens) == request.max_tokens]
        if len(done) == request.samples:
            self.request_ended(request, "complete")

    def request_ended(self, request: Request, how: str) -> None:
        """A request is over for its client."""
        if request.ended:
            raise Violation(f"r{request.number} ended twice")
        self.kernel.say(f"gateway r{request.number} ends: {how}")
        request.ended = how
        self.open_requests.remove(request)

    def lied(self, process: SimDecoder, lease: LeaseId | None) -> bool:
        """Whether a decoder's report about this lease was made to lie."""
        return (process.epoch, lease) in self.lies

    # ---- the arena

    def copy(self, process: SimDecoder, sequence: Sequence, plan: CopyPlan) -> None:
        """A decoder runs a copy-on-write."""
        self.invariants.may_write(process, sequence, plan.target)
        place = len(sequence.table) - 1 - sequence.table[::-1].index(plan.target)  # before a window it may stand, too
        position = place * self.scenario.block_tokens
        self.invariants.is_scrubbed(process, sequence, plan.target, position)
        self.memory.copy(plan.source, plan.target, plan.num_tokens)
        if self.scenario.group_window:
            target = self._window_to_write(process, sequence, plan.target, position)
            self.windows.copy(process.windows_of[plan.source], target, plan.num_tokens)

    def read(self, process: SimDecoder, sequence: Sequence) -> None:
        """A decoder attends to what a sequence has computed, as far back as its layers read."""
        self.invariants.is_attached(process)
        who = f"{process.name} for {sequence.name} of {sequence.request.tenant}"
        window = self.scenario.window_tokens
        begin = max(0, sequence.computed + 1 - window) if window else 0
        self.memory.read(sequence.table, sequence.cells, begin, sequence.computed, who)
        if self.scenario.group_window:
            begin = max(0, sequence.computed + 1 - self.scenario.group_window)
            table = [process.windows_of.get(block, 0) for block in sequence.table]
            self.windows.read(table, sequence.cells, begin, sequence.computed, f"{who}, in its window,")

    def write(self, process: SimDecoder, sequence: Sequence, count: int) -> None:
        """A decoder computes `count` more tokens of a sequence."""
        size = self.scenario.block_tokens
        last = window = 0
        for position in range(sequence.computed, sequence.computed + count):
            block = sequence.table[position // size]
            if block != last:
                self.invariants.may_write(process, sequence, block)
                self.invariants.is_scrubbed(process, sequence, block, position)
                if self.scenario.group_window:
                    window = self._window_to_write(process, sequence, block, position)
                last = block
            self.memory.write(block, position % size, sequence.cells[position])
            if window:
                self.windows.write(window, position % size, sequence.cells[position])

    def _window_to_write(self, process: SimDecoder, sequence: Sequence, block: int, position: int) -> int:
        """The window block of a block that a sequence writes, as its decoder knows it."""
        window = process.windows_of.get(block, 0)
        self.invariants.may_write_window(process, sequence, block, window, position)
        return window


def run(seed: int, *, only: frozenset[str] | None = None, echo: bool = False, recount: bool = True) -> str:
    """Runs one seed; returns the digest of its trace. Raises Violation, with the seed and the end of the trace."""
    world = World(seed, only=only, echo=echo)
    world.invariants.recount = recount
    try:
        return world.run()
    except Exception as error:
        tail = "\n".join(world.kernel.lines[-25:])
        replay = f"python -m tests.simulation --seed {seed} -v"
        raise Violation(f"seed {seed}: {error!r}\nat the end of this trace (replay: {replay})\n{tail}") from error
