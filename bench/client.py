"""The client of the benches: asks over the public service and notes when what arrived.

Closed loop: each of N streams asks its next prompt when its last answer has ended. It does as little as it can for each
message, since it shares the machine's cores with the node; the CPU time it took is part of the result. Times are from
`time.perf_counter`, in seconds; a token's time is when its message was read.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import grpc

from bench.node import Endpoint
from bench.table import quantile
from cli.errors import CommandError
from common.interceptors import error_from_rpc
from common.rpc import open_channel
from tessera.inference.v1 import inference_pb2, inference_pb2_grpc

CALL_SECONDS = 600.0
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered prompt.

    message_tokens: tokens of each message that had any; more than one where the reader was slower than the engine
    gaps_seconds:   times between those messages, one fewer
    """

    ttft_seconds: float
    gaps_seconds: tuple[float, ...]
    message_tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]

    @property
    def steps_seconds(self) -> tuple[float, ...]:
        """Time of each step after the first token: a message of k tokens stands for k steps of equal length."""
        pairs = zip(self.gaps_seconds, self.message_tokens[1:], strict=True)
        return tuple(gap / count for gap, count in pairs for _ in range(count))


@dataclass(frozen=True, slots=True)
class Load:
    """What one closed loop brought, whoever ran it. `seconds` is from the first question to the last token."""

    answers: tuple[Answer, ...]
    seconds: float
    client_cpu_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all streams over the wall time."""
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds

    @property
    def cached_fraction(self) -> float:
        """Prompt tokens that came from the cache, of all prompt tokens."""
        return sum(answer.cached_tokens for answer in self.answers) / sum(a.prompt_tokens for a in self.answers)

    def ttft(self, fraction: float) -> float:
        """Quantile of the times to first token."""
        return quantile([answer.ttft_seconds for answer in self.answers], fraction)

    def gap(self, fraction: float) -> float | None:
        """Quantile of the times between messages of a stream; None where no stream had two."""
        gaps = [gap for answer in self.answers for gap in answer.gaps_seconds]
        return quantile(gaps, fraction) if gaps else None

    def step(self) -> float | None:
        """Median time of a step; None where no stream had two."""
        steps = [step for answer in self.answers for step in answer.steps_seconds]
        return quantile(steps, 0.5) if steps else None


class BenchClient:
    """A blocking face over an aio channel: one event loop, any number of streams. A context manager."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._runner = asyncio.Runner()
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    def __enter__(self) -> BenchClient:
        self._runner.run(self._connect())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._channel is not None:
            self._runner.run(self._channel.close())
        self._runner.close()

    async def _connect(self) -> None:
        self._channel = open_channel(self._endpoint.target, self._endpoint.key)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call,unused-ignore]

    def model(self) -> inference_pb2.Model:
        """The model the node serves. Raises CommandError where it cannot be asked."""

        async def call() -> inference_pb2.Model:
            answer = await self._stub.ListModels(inference_pb2.ListModelsRequest(), timeout=30.0)
            if not answer.models:
                raise CommandError("the node serves no model")
            first: inference_pb2.Model = answer.models[0]
            return first

        return self._run(call())

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, as Generate would see it."""

        async def call() -> list[int]:
            answer = await self._stub.Tokenize(inference_pb2.TokenizeRequest(text=text), timeout=30.0)
            return list(answer.token_ids)

        return self._run(call())

    def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """One prompt, greedy, exactly `max_tokens` tokens."""
        return self._run(self._ask(_request(prompt, max_tokens)))

    def closed_loop(self, streams: Sequence[Sequence[Sequence[int]]], max_tokens: int) -> Load:
        """Each stream asks its prompts one after another, all streams at once."""
        requests = [[_request(prompt, max_tokens) for prompt in stream] for stream in streams]

        async def one(stream: Sequence[inference_pb2.GenerateRequest]) -> list[Answer]:
            return [await self._ask(request) for request in stream]

        async def every() -> list[list[Answer]]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(stream)) for stream in requests]
            return [task.result() for task in tasks]

        cpu, began = time.process_time(), time.perf_counter()
        answers = self._run(every())
        seconds = time.perf_counter() - began
        flat = tuple(answer for stream in answers for answer in stream)
        return Load(flat, seconds, time.process_time() - cpu)

    async def _ask(self, request: inference_pb2.GenerateRequest) -> Answer:
        arrivals: list[float] = []
        counts: list[int] = []
        tokens: list[int] = []
        prompt_tokens = cached_tokens = 0
        began = time.perf_counter()
        async for response in self._stub.Generate(request, timeout=CALL_SECONDS):
            ids = response.delta.token_ids
            if ids:
                arrivals.append(time.perf_counter())
                counts.append(len(ids))
                tokens.extend(ids)
            elif response.HasField("accepted"):
                prompt_tokens = response.accepted.prompt_tokens
                cached_tokens = response.accepted.cached_tokens
        if not arrivals:
            raise CommandError("an answer ended without a token")
        gaps = tuple(later - earlier for earlier, later in itertools.pairwise(arrivals))
        return Answer(arrivals[0] - began, gaps, tuple(counts), prompt_tokens, cached_tokens, tuple(tokens))

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        try:
            return self._runner.run(work)
        except (grpc.RpcError, BaseExceptionGroup) as error:
            first: BaseException = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            if not isinstance(first, grpc.RpcError):
                raise first from None
            failure = error_from_rpc(first)
            raise CommandError(f"{self._endpoint.target}: {failure.code.name}: {failure.message}") from None


def _request(prompt: Sequence[int], max_tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.Sampling(temperature=0.0),
        stopping=inference_pb2.Stopping(max_tokens=max_tokens, ignore_eos=True),
    )
