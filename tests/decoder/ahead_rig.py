"""A device that runs what was queued only when it is asked for, and a node that checks what it is told meanwhile.

`LazyRecall` is `RecallModel` as a device: `launch` and copies queue, and nothing is computed before somebody waits.
`AheadNode` looks at every report on its way to the manager: what is sealed must have been written, copies told must
have run, and no lease may go, nor a block be freed, that something in the queue would still write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from decoder.batch import DrawColumns, StepBatch
from decoder.cache_api import Command, Report, SequenceReport
from decoder.grouped_arena import GroupedArena
from decoder.inprocess import InProcessClient
from decoder.sampler import Draw, sample
from decoder.sequence import SamplingParams
from tests.decoder.rig import Node, RecallModel


@dataclass(slots=True)
class Queued:
    """Something that the device has not done yet. `writes` and `reads` are blocks."""

    run: Callable[[], None]
    writes: frozenset[int]
    reads: frozenset[int] = frozenset()
    is_copy: bool = False


class LazyStep:
    """A launched step; `wait` makes the device do everything up to it."""

    def __init__(self, model: LazyRecall, number: int) -> None:
        self._model, self.number = model, number
        self.ids: np.ndarray | None = None
        self.error: Exception | None = None

    def wait(self) -> np.ndarray:
        """See Launched."""
        self._model.log.append(("wait", self.number))
        while self.ids is None and self.error is None:
            self._model.run_one()
        if self.error is not None:
            raise self.error
        assert self.ids is not None
        return self.ids


class LazyRecall(RecallModel):
    """`log` has what was launched and waited for, by number, in order; 0 are steps that were computed at once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.queue: deque[Queued] = deque()
        self.log: list[tuple[str, int]] = []
        self.fed = 0  # inputs that came from the device
        self.on_launch: Callable[[StepBatch], None] = lambda batch: None
        self.on_queued: Callable[[], None] = lambda: None
        self._drawn = np.empty(0, np.int32)
        self._launched = 0

    @property
    def written(self) -> set[int]:
        """Blocks that what is queued will write."""
        return {block for item in self.queue for block in item.writes}

    @property
    def touched(self) -> set[int]:
        """Blocks that what is queued will write or read."""
        return {block for item in self.queue for block in (*item.writes, *item.reads)} - {0}

    def launch(self, batch: StepBatch, arena: Any, draws: DrawColumns) -> LazyStep:
        """See AheadModel. Everything is copied: the engine overwrites it."""
        self._launched += 1
        self.on_launch(batch)
        self.log.append(("launch", self._launched))
        step = LazyStep(self, self._launched)
        batch = replace(
            batch, token_ids=batch.token_ids.copy(), positions=batch.positions.copy(),
            block_tables=batch.block_tables.copy(),
        )  # fmt: skip
        reads = frozenset(batch.block_tables.reshape(-1).tolist())
        arena = as_it_is(arena)
        self.queue.append(Queued(lambda: self._run(step, batch, arena, draws), self._writes(batch), reads))
        self.on_queued()
        return step

    def _run(self, step: LazyStep, batch: StepBatch, arena: Any, draws: DrawColumns) -> None:
        try:
            for row, source in enumerate(draws.sources.tolist()):
                if source >= 0:
                    batch.token_ids[row] = max(0, self._drawn[source])
                    self.fed += 1
            logits = super().forward(batch, arena)
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            step.error = error
            self._drawn = np.empty(0, np.int32)
            return
        columns = zip(draws.temperatures, draws.seeds, draws.samples, draws.positions, strict=True)
        wanted = [
            Draw(row, SamplingParams(temperature=float(t), seed=int(seed)), int(index), int(position))
            for row, (t, seed, index, position) in enumerate(columns)
        ]
        drawn = sample(logits, wanted)
        self._drawn = step.ids = np.array([-1 if it.token is None else it.token for it in drawn], np.int32)

    def _writes(self, batch: StepBatch) -> frozenset[int]:
        size, blocks = self.layout.block_tokens, set()
        for index, table in enumerate(batch.block_tables):
            rows = slice(batch.query_starts[index], batch.query_starts[index + 1])
            blocks |= set(table[batch.positions[rows] // size].tolist())
        return frozenset(blocks)

    def run_one(self) -> None:
        """Do the oldest thing that is queued."""
        item = self.queue.popleft()
        item.run()

    def quiesce(self) -> None:
        """See AheadModel."""
        while self.queue:
            self.run_one()

    def forward(self, batch: StepBatch, arena: Any) -> np.ndarray:
        """See StepModel: it is queued behind everything, and waited for."""
        self.quiesce()
        self.log.append(("forward", 0))
        return super().forward(batch, arena)

    def copy_blocks(self, arena: Any, *columns: np.ndarray) -> None:
        """See StepModel."""
        kept, arena = [column.copy() for column in columns], as_it_is(arena)
        run = super().copy_blocks
        sources, targets = (frozenset(column.tolist()) for column in kept[:2])
        self.queue.append(Queued(lambda: run(arena, *kept), targets, sources, is_copy=True))


def as_it_is(arena: Any) -> Any:
    """An arena with the window blocks that blocks have now: a device is told them with what is queued."""
    return replace(arena, of=arena.of.copy()) if isinstance(arena, GroupedArena) else arena


class CheckingClient(InProcessClient):
    """Looks at each report before the manager has it."""

    node: AheadNode
    is_silent = False
    resumed_with: list[int]

    def send(self, session: int, command: Command) -> None:
        """See CacheClient."""
        if isinstance(command, Report):
            for item in command.sequences:
                self.node.check(item)
            self.node.expect(not self.node.model.touched & set(np.asarray(command.returned).tolist()), "credit")
        super().send(session, command)

    def is_fenced(self, session: int) -> bool:
        """While the test says so."""
        return self.is_silent

    def resume(self) -> None:
        """See CacheClient."""
        self.node.expect(not self.node.model.queue, "the session ends before what it launched")
        super().resume()


class AheadNode(Node):
    """A node whose device is lazy. `violations` are what its checks found."""

    model: Any
    client: CheckingClient

    def __init__(self, num_blocks: int = 64, *, model: Any = None, **options: Any) -> None:
        self.violations: list[str] = []
        super().__init__(num_blocks, model=model or LazyRecall(), client_class=CheckingClient, **options)
        self.client.node = self

    def expect(self, condition: bool, what: str) -> None:
        """Remember where something is not so: the loop would take an exception for a fault of its own."""
        if not condition:
            self.violations.append(what)

    def assert_quiet(self) -> None:
        """Nothing is held, and nothing was told too early."""
        super().assert_quiet()
        assert not self.violations
        assert not self.model.queue

    def _poison(self, blocks: np.ndarray) -> None:
        self.expect(not self.model.touched & set(blocks.tolist()), "a block is freed that a launched step needs")
        super()._poison(blocks)

    def check(self, item: SequenceReport) -> None:
        """What a report says of one lease is so."""
        lease = self.manager._state.book.leases[item.lease_id]
        table = [*lease.table[: lease.num_blocks].tolist(), *item.taken_blocks.tolist()]
        size = self.model.layout.block_tokens
        # What a copy would have brought is not told as long as the copy is not.
        first = lease.sealed if lease.copy is None or item.copied else max(lease.sealed, lease.granted)
        positions = np.arange(first, item.sealed_tokens)
        blocks = self.arena.blocks if isinstance(self.arena, GroupedArena) else self.arena
        stored = np.array([blocks[table[at // size], 0, 0, 0, at % size, 1] for at in positions])
        self.expect(np.array_equal(stored, positions), "a token is sealed that was not written")
        self.expect(not (item.copied and any(it.is_copy for it in self.model.queue)), "a copy is told that waits")
        if item.release:
            self.expect(not self.model.written & set(table), "a lease goes whose blocks a launched step writes")
