"""The decoder's engine in this process, over the pure cache manager: no socket, no protobuf, no other process.

What `bench/overhead.py` compares the three processes with. The engine, the scheduler, the kernels and the cache manager
are those of the real node; only the processes and what lies between them are missing. One thread; it serves one closed
loop at a time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.client import Answer, Load
from bench.setting import BLOCK_TOKENS, Setting
from cachemgr.manager import CacheManager
from cli.errors import CommandError
from common.errors import TesseraError
from decoder.engine import Engine, EngineOptions
from decoder.grouped_arena import private_arena
from decoder.inprocess import InProcessClient
from decoder.outputs import StepResult
from decoder.sequence import Request, RequestNumber, SamplingParams, StoppingParams
from decoder.weights import load_model

STALL_SECONDS = 60.0
READ_AHEAD = 64


class _Loop:
    """A `Sink` that notes when tokens come and asks a stream's next prompt when its last answer has ended."""

    def __init__(self, engine: Engine, streams: Sequence[Sequence[Sequence[int]]], max_tokens: int) -> None:
        self._engine = engine
        self._queues = [list(reversed(stream)) for stream in streams]
        self._max_tokens = max_tokens
        self._numbers = itertools.count(1)
        self._stream_of: dict[RequestNumber, int] = {}
        self._began: dict[RequestNumber, float] = {}
        self._prompt_tokens: dict[RequestNumber, int] = {}
        self._cached: dict[RequestNumber, int] = {}
        self._arrivals: dict[RequestNumber, list[float]] = {}
        self._tokens: dict[RequestNumber, list[int]] = {}
        self.answers: list[Answer] = []
        self.error: TesseraError | None = None

    @property
    def open_requests(self) -> int:
        """Requests without an end."""
        return len(self._stream_of)

    def begin(self) -> None:
        """Ask the first prompt of every stream."""
        for index in range(len(self._queues)):
            self._ask_next(index)

    def _ask_next(self, stream: int) -> None:
        if not self._queues[stream]:
            return
        prompt = np.asarray(self._queues[stream].pop(), np.int32)
        number = RequestNumber(next(self._numbers))
        request = Request(
            number=number,
            request_id=f"bench-{number}",
            grant=b"",
            prompt=prompt,
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens=self._max_tokens),
        )
        self._stream_of[number] = stream
        self._prompt_tokens[number] = len(prompt)
        self._arrivals[number], self._tokens[number] = [], []
        self._began[number] = time.perf_counter()
        self._engine.submit(request, self)

    def deliver(self, result: StepResult) -> None:
        """Called by the engine at the end of a step."""
        now = time.perf_counter()
        for started in result.started:
            self._cached[started.number] = started.cached_tokens
        for token in result.tokens:
            self._arrivals[token.number].append(now)
            seen = self._tokens[token.number]
            seen.append(token.token)
            if len(seen) % READ_AHEAD == 0:
                self._engine.consumed(self, token.number, len(seen))
        for ended in result.ended:
            self._finish(ended.number)
        for failed in result.failed:
            self.error = failed.error
            self._stream_of.pop(failed.number, None)

    def _finish(self, number: RequestNumber) -> None:
        arrivals = self._arrivals.pop(number)
        self.answers.append(
            Answer(
                ttft_seconds=arrivals[0] - self._began.pop(number),
                gaps_seconds=tuple(later - earlier for earlier, later in itertools.pairwise(arrivals)),
                message_tokens=(1,) * len(arrivals),
                prompt_tokens=self._prompt_tokens.pop(number),
                cached_tokens=self._cached.pop(number, 0),
                token_ids=tuple(self._tokens.pop(number)),
            )
        )
        self._ask_next(self._stream_of.pop(number))


class LocalEngine:
    """A model, an arena in ordinary memory, a cache manager and the engine over them. `model`: one that is loaded."""

    def __init__(self, setting: Setting, pool_bytes: int, max_batch: int, model: Any = None) -> None:
        dtype = "bfloat16" if setting.dtype == "bfloat16" else "float32"
        if model is None:
            model = load_model(setting.model, dtype, BLOCK_TOKENS, threads=setting.threads)  # type: ignore[arg-type,unused-ignore]
        self.model = model
        layout = self.model.layout
        num_blocks = max(2, layout.blocks_in(pool_bytes))
        self.arena = private_arena(layout, num_blocks)
        self.model.warm_up(self.arena)
        self.manager = CacheManager(
            num_blocks=num_blocks, block_tokens=BLOCK_TOKENS, window_tokens=layout.window_tokens,
            num_window_blocks=layout.num_window_blocks(num_blocks), epoch=1,
        )  # fmt: skip
        session = self.manager.attach(decoder_name="bench", process_id=1, now_ns=time.monotonic_ns())
        client = InProcessClient(self.manager, session, tenant="bench", root=bytes(32), clock_ns=time.monotonic_ns)
        self.engine = Engine(self.model, self.arena, client, EngineOptions(max_batch=max_batch))

    def closed_loop(self, streams: Sequence[Sequence[Sequence[int]]], max_tokens: int) -> Load:
        """As `BenchClient.closed_loop`. Raises CommandError where a request fails or nothing moves."""
        loop = _Loop(self.engine, streams, max_tokens)
        began = moved = time.perf_counter()
        loop.begin()
        while loop.open_requests and loop.error is None:
            if self.engine.step():
                moved = time.perf_counter()
            elif time.perf_counter() - moved > STALL_SECONDS:
                raise CommandError(f"the engine stands still with {loop.open_requests} requests open")
            else:
                time.sleep(0.001)
        seconds = time.perf_counter() - began
        if loop.error is not None:
            raise CommandError(f"the engine in this process failed a request: {loop.error.message}")
        self.engine.step()  # tells the cache manager of the last releases
        return Load(tuple(loop.answers), seconds)
