"""A client of the Generate RPC that checks the stream's grammar while it reads, for the end-to-end tests.

Invariant: a `Result` exists only for a stream that kept the contract: accepted first and once, no delta of a sample
after its finish, one finish for each sample, one summary, last; counts that agree with the tokens received.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from common.rpc import bearer_metadata
from tessera.inference.v1 import inference_pb2 as pb
from tessera.inference.v1 import inference_pb2_grpc

CALL_SECONDS = 120.0


def make_request(
    prompt: Sequence[int] | str | pb.Chat,
    *,
    new: int | None = 16,
    temperature: float | None = 0.0,
    n: int | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = True,
    min_tokens: int | None = None,
    include_stop: bool = False,
    bias: Mapping[int, float] | None = None,
    logprobs: int | None = None,
    no_read: bool = False,
    no_store: bool = False,
    label: str = "",
    **sampling: Any,
) -> pb.GenerateRequest:
    """A request with what tests vary; greedy and 16 new tokens unless said."""
    request = pb.GenerateRequest(request_label=label)
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, pb.Chat):
        request.chat.CopyFrom(prompt)
    else:
        request.token_ids.ids.extend(prompt)
    request.sampling.CopyFrom(pb.Sampling(temperature=temperature, n=n, seed=seed, logit_bias=bias or {}, **sampling))
    request.stopping.CopyFrom(
        pb.Stopping(
            max_tokens=new,
            min_tokens=min_tokens,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            include_stop=include_stop,
        )
    )
    if logprobs is not None:
        request.output.logprobs = logprobs
    request.cache.no_read = no_read
    request.cache.no_store = no_store
    return request


@dataclass(slots=True)
class Sample:
    """What one sample has brought so far."""

    chunks: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)  # tokens received with each chunk
    logprobs: list[float] = field(default_factory=list)
    reason: int | None = None
    stop: str = ""
    handle: str = ""
    session_tokens: int = 0

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.chunks)


@dataclass(slots=True)
class Result:
    """A stream that has ended well."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    samples: dict[int, Sample]
    usage: pb.Usage
    timing: pb.Timing

    @property
    def token_ids(self) -> list[int]:
        """Token ids of sample 0."""
        return self.samples[0].token_ids

    @property
    def text(self) -> str:
        """Text of sample 0."""
        return self.samples[0].text

    @property
    def logprobs(self) -> list[float]:
        """Log-probabilities of sample 0."""
        return self.samples[0].logprobs


class Stream:
    """One running Generate call. `read` and `finish` block; `cancel` may come from another thread."""

    def __init__(self, channel: grpc.Channel, key: str, request: pb.GenerateRequest, timeout: float) -> None:
        self._num_samples = request.sampling.n if request.sampling.HasField("n") else 1
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        self.call: Any = stub.Generate(request, metadata=bearer_metadata(key), timeout=timeout)
        self._events: Iterator[pb.GenerateResponse] = iter(self.call)
        self.accepted: pb.Accepted | None = None
        self.samples: dict[int, Sample] = {}
        self.summary: pb.Summary | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens received over all samples."""
        return sum(len(sample.token_ids) for sample in self.samples.values())

    @property
    def request_id(self) -> str:
        """The server-made id; the stream has begun."""
        if self.accepted is None:
            raise AssertionError("no accepted message yet")
        return self.accepted.request_id

    def step(self) -> bool:
        """Read one message; False at the end of the stream. Raises grpc.RpcError as the call does."""
        event = next(self._events, None)
        if event is None:
            self._check_end()
            return False
        if self.summary is not None:
            raise AssertionError("a message came after the summary")
        match event.WhichOneof("event"):
            case "accepted":
                if self.accepted is not None or self.samples:
                    raise AssertionError("accepted came twice, or late")
                self.accepted = event.accepted
            case "delta":
                self._take_delta(event.delta)
            case "finished":
                sample = self._sample(event.finished.index)
                if not event.finished.reason:
                    raise AssertionError("a finish without a reason")
                sample.reason, sample.stop = event.finished.reason, event.finished.stop
                sample.handle, sample.session_tokens = event.finished.session_handle, event.finished.session_tokens
            case "summary":
                self.summary = event.summary
            case other:
                raise AssertionError(f"unknown event {other}")
        return True

    def _sample(self, index: int) -> Sample:
        if self.accepted is None:
            raise AssertionError("accepted did not come first")
        if not 0 <= index < self._num_samples:
            raise AssertionError(f"sample {index} of {self._num_samples}")
        sample = self.samples.setdefault(index, Sample())
        if sample.reason is not None:
            raise AssertionError(f"sample {index} went on after its finish")
        return sample

    def _take_delta(self, delta: pb.Delta) -> None:
        sample = self._sample(delta.index)
        sample.chunks.append(delta.text)
        sample.token_ids.extend(delta.token_ids)
        sample.token_counts.append(len(delta.token_ids))
        sample.logprobs.extend(item.logprob for item in delta.logprobs)

    def _check_end(self) -> None:
        if self.accepted is None or self.summary is None:
            raise AssertionError("the stream ended without accepted or summary")
        unfinished = [i for i in range(self._num_samples) if i not in self.samples or self.samples[i].reason is None]
        if unfinished:
            raise AssertionError(f"samples {unfinished} never finished")
        usage = self.summary.usage
        if usage.completion_tokens != self.num_tokens:
            raise AssertionError(f"usage counts {usage.completion_tokens} tokens, {self.num_tokens} were received")
        counts = (usage.prompt_tokens, usage.cached_tokens)
        if counts != (self.accepted.prompt_tokens, self.accepted.cached_tokens):
            raise AssertionError(f"usage {counts} differs from accepted")
        if not 0 <= usage.cached_tokens < usage.prompt_tokens:
            raise AssertionError(f"{usage.cached_tokens} cached of {usage.prompt_tokens} prompt tokens")

    def read(self, num_tokens: int) -> None:
        """Read until so many tokens are there. Raises AssertionError where the stream ends before."""
        while self.num_tokens < num_tokens:
            if not self.step():
                raise AssertionError(f"the stream ended after {self.num_tokens} tokens")

    def finish(self) -> Result:
        """Read to the end."""
        while self.step():
            pass
        if self.accepted is None or self.summary is None:
            raise AssertionError("unreachable: checked at the end")
        accepted = self.accepted
        return Result(
            accepted.request_id, accepted.prompt_tokens, accepted.cached_tokens, self.samples, self.summary.usage,
            self.summary.timing,
        )  # fmt: skip

    def cancel(self) -> None:
        """Cancel the call."""
        self.call.cancel()


class Background(threading.Thread):
    """Finishes a stream in a thread; `result` joins it and gives its result or raises its error."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(daemon=True)
        self.stream = stream
        self._outcome: Result | BaseException | None = None
        self.start()

    def run(self) -> None:
        """Body of the thread."""
        try:
            self._outcome = self.stream.finish()
        except (grpc.RpcError, AssertionError) as error:
            self._outcome = error

    def result(self, within: float = CALL_SECONDS) -> Result:
        """The result; raises what the stream raised."""
        self.join(within)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        if self._outcome is None:
            raise AssertionError(f"the stream did not end within {within} s")
        return self._outcome
