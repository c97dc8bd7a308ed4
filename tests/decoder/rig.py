"""What the decoder's tests share: a small exact model, an engine over a real cache manager, and a sink that remembers.

The model's logits are a function of every token that it reads back through the block tables, so that a wrong table, a
missing copy or a stale block changes tokens. All its arithmetic is in whole numbers: results never depend on the batch.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cachemgr.manager import CacheManager
from common.errors import AlreadyExists, TesseraError
from common.layout import KvDtype, KvLayout
from decoder.batch import StepBatch
from decoder.cache_api import Command
from decoder.engine import Engine, EngineOptions
from decoder.grouped_arena import GroupedArena, parts_of, private_arena
from decoder.inprocess import InProcessClient
from decoder.outputs import EndReason, SampleEnded, Started, StepResult
from decoder.sequence import BeamParams, Request, RequestNumber, SamplingParams, SpeculationParams, StoppingParams

BLOCK_TOKENS = 4
VOCAB = 97
EOS = 3
_PRIME = 2_147_483_647


class RecallModel:
    """Stores (token, position) as keys, and answers with a hash of all it reads back."""

    def __init__(
        self,
        block_tokens: int = BLOCK_TOKENS,
        vocab: int = VOCAB,
        window: int | None = None,
        group_window: int = 0,
    ) -> None:
        self.window = window  # with it the logits follow from the last `window` tokens alone: greedily it soon repeats
        self.config = SimpleNamespace(vocab_size=vocab, eos_token_ids=(EOS,), max_position=4096)
        # With `group_window` it stores all twice: a second layer, in window blocks, reads so many tokens back.
        # Logits are the same, as long as that finds what was written.
        groups = {"window_tokens": group_window, "window_layers": (1,)} if group_window else {}
        self.layout = KvLayout(2 if groups else 1, 1, 8, block_tokens, KvDtype.FLOAT32, **groups)
        self.batches: list[tuple[int, int]] = []  # (single tokens, all tokens) of each step
        self.on_forward: Callable[[StepBatch], None] = lambda batch: None

    def arena(self, num_blocks: int) -> Any:
        """An arena full of NaN, as after poison-on-free."""
        arena = private_arena(self.layout, num_blocks)
        for memory, _ in parts_of(arena, self.layout):
            memory[...] = np.nan
        return arena

    def forward(self, batch: StepBatch, arena: Any) -> np.ndarray:
        """See StepModel."""
        self.on_forward(batch)
        if not isinstance(arena, GroupedArena):
            return self._forward(batch, arena)
        window_blocks = arena.of[batch.block_tables]
        self._store(batch, arena.window_blocks, window_blocks)
        logits = self._forward(batch, arena.blocks)
        for index, table in enumerate(window_blocks):
            first, end = int(batch.query_starts[index]), int(batch.context_lens[index])
            begin = max(0, int(batch.positions[first]) + 1 - self.layout.window_tokens)
            places = np.arange(begin, end)
            size = self.layout.block_tokens
            full = arena.blocks[batch.block_tables[index][places // size], 0, 0, 0, places % size, :2]
            found = arena.window_blocks[table[places // size], 0, 0, 0, places % size, :2]
            if not np.array_equal(found, full):
                rows = np.isin(batch.logit_rows, np.arange(first, int(batch.query_starts[index + 1])))
                logits[rows] = np.nan
        return logits

    def _store(self, batch: StepBatch, arena: np.ndarray, tables: np.ndarray) -> None:
        owners = np.repeat(np.arange(len(tables)), np.diff(batch.query_starts))
        size = self.layout.block_tokens
        blocks = tables[owners, batch.positions // size]
        if not blocks.all():
            raise ValueError("a token would be written to the null block")
        arena[blocks, 0, 0, 0, batch.positions % size, :2] = np.stack([batch.token_ids, batch.positions], axis=1)

    def _forward(self, batch: StepBatch, arena: np.ndarray) -> np.ndarray:
        size = self.layout.block_tokens
        self.batches.append((batch.num_decodes, len(batch.token_ids)))
        lengths = np.diff(batch.query_starts)
        if not (lengths[: batch.num_decodes] == 1).all() or (lengths[batch.num_decodes :] == 1).any():
            raise ValueError("single tokens come first")
        hashes = np.zeros(len(batch.token_ids), np.int64)
        for index, table in enumerate(batch.block_tables):
            rows = range(batch.query_starts[index], batch.query_starts[index + 1])
            for row in rows:
                position = int(batch.positions[row])
                block = table[position // size]
                if block == 0:
                    raise ValueError("a token would be written to the null block")
                arena[block, 0, 0, 0, position % size, :2] = batch.token_ids[row], position
            context = int(batch.context_lens[index])
            if position + 1 != context:
                raise ValueError("the queries are not the end of the context")
            stored = arena[table, 0, 0, 0].reshape(-1, 8)[:context, :2].astype(np.float64)
            if not np.array_equal(stored[:, 1], np.arange(context)):
                hashes[rows] = -1  # a token was read that is not there
                continue
            if self.window is not None:
                words = stored[:, 0].astype(np.int64) + 1
                parts = [np.pad(words, (k, 0))[:context] * (7919 * k + 13) for k in range(self.window)]
                hashes[rows] = (sum(parts) % _PRIME)[batch.positions[rows.start : rows.stop]]
                continue
            sums = np.cumsum((stored[:, 0].astype(np.int64) + 1) * (7919 * np.arange(1, context + 1) + 13) % _PRIME)
            hashes[rows] = sums[batch.positions[rows.start : rows.stop]] % _PRIME
        wanted = hashes[batch.logit_rows]
        values = (
            wanted[:, None] * 48_271 + np.arange(self.config.vocab_size) * 69_621 * (wanted[:, None] + 11)
        ) % _PRIME
        logits = (values % 10_007).astype(np.float32) / np.float32(1500)
        logits[wanted < 0] = np.nan
        return logits

    def copy_blocks(self, arena: Any, sources: np.ndarray, targets: np.ndarray, counts: np.ndarray) -> None:
        """See StepModel."""
        if isinstance(arena, GroupedArena):
            self.copy_blocks(arena.window_blocks, arena.windows_of(sources), arena.windows_of(targets), counts)
            arena = arena.blocks
        for source, target, count in zip(sources, targets, counts, strict=True):
            arena[target, :, :, :, :count] = arena[source, :, :, :, :count]


class LateClient(InProcessClient):
    """Runs each command only `lateness` steps after it was sent, so that answers find a world that has moved on."""

    def __init__(self, *arguments: Any, lateness: Callable[[], int], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._lateness = lateness
        self._queue: deque[tuple[int, int, Command]] = deque()
        self._now = 0

    def send(self, session: int, command: Command) -> None:
        """See CacheClient."""
        self._queue.append((self._now + self._lateness(), session, command))

    def tick(self) -> None:
        """One step has passed: run what is due, in order."""
        self._now += 1
        while self._queue and self._queue[0][0] <= self._now:
            _, session, command = self._queue.popleft()
            super().send(session, command)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self._queue


@dataclass(eq=False)
class RecordingSink:
    """Remembers everything it is told, and that nothing comes twice, after an end or out of order."""

    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    starts: dict[int, Started] = field(default_factory=dict)
    finished: dict[tuple[int, int], SampleEnded] = field(default_factory=dict)
    ended: dict[int, tuple[int, int]] = field(default_factory=dict)
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict)
    failed: dict[int, TesseraError] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)
    num_results: int = 0

    def deliver(self, result: StepResult) -> None:
        """See Sink."""
        self.num_results += 1
        for started in result.started:
            assert started.number not in self.cached
            self.cached[started.number] = started.cached_tokens
            self.starts[started.number] = started
        for token in result.tokens:
            assert token.number in self.cached and token.number not in self.ended and token.number not in self.failed
            assert (token.number, token.sample) not in self.finished
            self.tokens.setdefault((token.number, token.sample), []).append(token.token)
            self.logprobs.setdefault((token.number, token.sample), []).append(token.logprobs)
        for finished in result.finished:
            assert (finished.number, finished.sample) not in self.finished
            self.finished[finished.number, finished.sample] = finished
        for ended in result.ended:
            assert ended.number not in self.ended and ended.number not in self.failed
            self.ended[ended.number] = (ended.completion_tokens, ended.cow_copies)
            self.drafts[ended.number] = (ended.drafted_tokens, ended.accepted_tokens)
        for failed in result.failed:
            if isinstance(failed.error, AlreadyExists):
                self.refused.append(failed.number)
                continue
            assert failed.number not in self.ended and failed.number not in self.failed
            self.failed[failed.number] = failed.error

    def done(self, number: int) -> bool:
        """Whether a request has ended, well or not."""
        return number in self.ended or number in self.failed


class Node:
    """One engine over one cache manager, stepped by hand."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        model: Any = None,
        manager: CacheManager | None = None,
        arena: Any = None,
        root: bytes = bytes(32),
        tenant: str = "acme",
        peers: dict[Any, InProcessClient] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        lateness: Callable[[], int] | None = None,
        client_class: type[InProcessClient] = InProcessClient,
        **options: Any,
    ) -> None:
        self.model = model if model is not None else RecallModel()
        size = self.model.layout.block_tokens
        self.arena = arena if arena is not None else self.model.arena(num_blocks)
        window = self.model.layout.window_tokens
        num_window_blocks = len(self.arena.window_blocks) - 1 if isinstance(self.arena, GroupedArena) else 0
        self.manager = manager or CacheManager(
            num_blocks=num_blocks, block_tokens=size, window_tokens=window, num_window_blocks=num_window_blocks,
            epoch=1, on_free=self._poison, on_window_free=self._poison_windows,
        )  # fmt: skip
        self.session = self.manager.attach(decoder_name="decoder-0", process_id=1, now_ns=0)
        self.client: InProcessClient
        if lateness is None:
            self.client = client_class(self.manager, self.session, tenant=tenant, root=root, peers=peers)
        else:
            self.client = LateClient(self.manager, self.session, tenant=tenant, root=root, lateness=lateness)
        self.options = EngineOptions(**{"max_batch": 32, "chunk_tokens": 16, **options})
        self.engine = Engine(self.model, self.arena, self.client, self.options, clock_ns=clock_ns)
        self.sink = RecordingSink()

    def _poison(self, blocks: np.ndarray) -> None:
        memory = self.arena.blocks if isinstance(self.arena, GroupedArena) else self.arena
        # NaN in every type of keys, values and scales.
        if isinstance(memory, torch.Tensor):
            memory.view(torch.uint8)[torch.from_numpy(blocks).long().to(memory.device)] = 0xFF
        else:
            memory.view(np.uint8)[blocks] = 0xFF

    def _poison_windows(self, window_blocks: np.ndarray) -> None:
        self.arena.window_blocks.view(np.uint8)[window_blocks] = 0xFF

    def submit(self, request: Request) -> None:
        """Hand a request in."""
        self.engine.submit(request, self.sink)

    def step(self, count: int = 1) -> None:
        """So many steps."""
        for _ in range(count):
            self._step()

    def _step(self) -> bool:
        moved = self.engine.step()
        if isinstance(self.client, LateClient):
            moved |= not self.client.is_idle
            self.client.tick()
        return moved

    def until(self, done: Callable[[], bool], limit: int = 5000) -> None:
        """Step until `done`, at most `limit` times; the manager's books are right after each."""
        for _ in range(limit):
            if done():
                return
            self._step()
            violations = self.manager.check_integrity()
            assert not violations, violations
        raise AssertionError(f"not done after {limit} steps")

    def finish(self, *numbers: int) -> None:
        """Step until the requests have ended, and the loop has nothing more to do."""
        self.until(lambda: all(self.sink.done(number) for number in numbers))
        self.settle()

    def settle(self) -> None:
        """Step until the loop has nothing more to do."""
        for _ in range(1000):
            if not self._step():
                return
        raise AssertionError("the loop does not come to rest")

    def assert_quiet(self) -> None:
        """Nothing is held: quiet() of the cases."""
        self.settle()
        snapshot = self.manager.snapshot()
        assert (snapshot.active_blocks, snapshot.leases, snapshot.quarantined_blocks) == (0, 0, 0), snapshot
        assert snapshot.free_blocks + snapshot.cached_blocks == snapshot.total_blocks
        assert not self.manager.check_integrity()


def request(
    number: int,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    min_tokens: int = 0,
    stop_ids: Sequence[int] = (),
    num_logprobs: int | None = None,
    priority: int = 0,
    no_read: bool = False,
    no_store: bool = False,
    speculation: SpeculationParams | None = None,
    beam: BeamParams | None = None,
    **sampling: Any,
) -> Request:
    """A request; greedy unless said."""
    return Request(
        number=RequestNumber(number),
        request_id=f"request-{number}",
        grant=b"grant",
        prompt=np.array(prompt, np.int32),
        sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
        stopping=StoppingParams(max_tokens, min_tokens, frozenset(stop_ids)),
        num_logprobs=num_logprobs,
        no_read=no_read,
        no_store=no_store,
        priority=priority,
        speculation=speculation,
        beam=beam,
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A prompt of that length, different for each seed."""
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


def solo(item: Request) -> dict[int, list[int]]:
    """The tokens of each sample of a request alone on a fresh node that caches nothing."""
    key = (item.prompt.tobytes(), item.sampling, item.stopping)
    return {sample: list(tokens) for sample, tokens in _solo(*key)}


@functools.lru_cache(maxsize=4096)
def _solo(prompt: bytes, sampling: SamplingParams, stopping: StoppingParams) -> tuple[tuple[int, tuple[int, ...]], ...]:
    node = Node(num_blocks=1024)
    tokens = np.frombuffer(prompt, np.int32)
    node.submit(Request(RequestNumber(1), "solo", b"grant", tokens, sampling, stopping, no_read=True, no_store=True))
    node.finish(1)
    assert 1 in node.sink.ended, node.sink.failed
    return tuple((sample, tuple(tokens)) for (_, sample), tokens in node.sink.tokens.items())


def greedy_oracle(prompt: Sequence[int], count: int) -> list[int]:
    """What RecallModel says greedily, computed from the tokens alone: no blocks, no engine, no sampler."""
    tokens = list(prompt)
    for _ in range(count):
        total = sum((token + 1) * (7919 * (place + 1) + 13) % _PRIME for place, token in enumerate(tokens)) % _PRIME
        scores = [(total * 48_271 + token * 69_621 * (total + 11)) % _PRIME % 10_007 for token in range(VOCAB)]
        tokens.append(scores.index(max(scores)))
    return tokens[len(prompt) :]


def recall_logits(tokens: Sequence[int]) -> np.ndarray:
    """RecallModel's logits after `tokens`, float32 [VOCAB]."""
    total = sum((token + 1) * (7919 * (place + 1) + 13) % _PRIME for place, token in enumerate(tokens)) % _PRIME
    scores = [(total * 48_271 + token * 69_621 * (total + 11)) % _PRIME % 10_007 for token in range(VOCAB)]
    return np.array(scores, np.float32) / np.float32(1500)


def wait_until(probe: Callable[[], Any], what: str, seconds: float = 10.0) -> Any:
    """The first true answer of `probe`, polled; for tests with threads and sockets."""
    deadline = time.monotonic() + seconds
    while not (answer := probe()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.005)
    return answer


__all__ = [
    "BLOCK_TOKENS",
    "EOS",
    "VOCAB",
    "EndReason",
    "LateClient",
    "Node",
    "RecallModel",
    "RecordingSink",
    "greedy_oracle",
    "prompt_of",
    "recall_logits",
    "request",
    "solo",
    "wait_until",
]
