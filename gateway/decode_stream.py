"""One request at a decoder, as its handler sees it: updates come out, reading and cancelling go in.

Owns two invariants: what waits here is bounded by the window (a decoder that overruns it loses the request), and a
request that is closed before its end is cancelled at the decoder exactly once. Made by `gateway/decoders.py`, used
by `gateway/generation.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from common.errors import Internal, TesseraError
from gateway.outbox import Outbox
from tessera.decode.v1 import decode_pb2
from tessera.inference.v1 import inference_pb2

REPORT_TOKENS: Final = 64  # of a request are read between two reports of it
_SLACK_TOKENS: Final = 64  # a step may bring several tokens past the window


@dataclass(frozen=True, slots=True)
class Start:
    """The request was admitted. `base_tokens` are the last of the kept conversation that it continues, `prompt_tokens`
    counts all of that (0: not said). `moments` of its way there are for the log."""

    cached_tokens: int
    queue_seconds: float
    prompt_tokens: int = 0
    base_tokens: tuple[int, ...] = field(default=(), repr=False)
    prompt_logprobs: tuple[inference_pb2.TokenLogprob, ...] = field(default=(), repr=False)
    moments: decode_pb2.Moments = field(default_factory=decode_pb2.Moments)


@dataclass(frozen=True, slots=True)
class Gain:
    """Tokens that one sample gained, in order. `logprobs` are one for each token, or empty if not asked for."""

    index: int
    token_ids: list[int]
    logprobs: list[inference_pb2.TokenLogprob]


@dataclass(frozen=True, slots=True)
class SampleEnd:
    """One sample ended at the decoder."""

    index: int
    reason: int
    stop_token_id: int | None
    session_handle: bytes = field(default=b"", repr=False)
    session_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The request ended well at the decoder."""

    cow_copies: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class Update:
    """What one message brought to one request; `gains` holds at most one entry for each sample."""

    start: Start | None = None
    gains: list[Gain] = field(default_factory=list)
    sample_ends: list[SampleEnd] = field(default_factory=list)
    end: RequestEnd | None = None
    failure: TesseraError | None = None
    num_tokens: int = 0  # over all samples

    def add_tokens(
        self, index: int, token_ids: Iterable[int], logprobs: Iterable[inference_pb2.TokenLogprob] = ()
    ) -> None:
        """Add tokens that sample `index` gained after those it has here."""
        new = list(token_ids)
        self.num_tokens += len(new)
        for gain in self.gains:
            if gain.index == index:
                gain.token_ids.extend(new)
                gain.logprobs.extend(logprobs)
                return
        self.gains.append(Gain(index, new, list(logprobs)))


class DecodeStream:
    """The gateway's end of one request. `number` names it on the decoder's stream."""

    def __init__(
        self,
        number: int,
        num_samples: int,
        window_tokens: int,
        outbox: Outbox,
        forget: Callable[[int], None],
    ) -> None:
        self.number = number
        self.num_samples = num_samples
        self._outbox = outbox
        self._forget = forget
        self._updates: deque[Update] = deque()
        self._waiter: asyncio.Future[None] | None = None  # of the one reader
        self._waiting_tokens = 0
        self._max_waiting = num_samples * (window_tokens + _SLACK_TOKENS)
        self._report_every = max(1, min(REPORT_TOKENS, window_tokens // 2))
        self._consumed = 0
        self._reported = 0
        self._over = False  # the decoder said its last word, or was told ours

    async def next(self) -> Update:
        """The next update. Raises the error that ended the request."""
        while not self._updates:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        update = self._updates.popleft()
        self._waiting_tokens -= update.num_tokens
        if update.failure is not None:
            raise update.failure
        return update

    def consumed(self, tokens: int) -> None:
        """Say that the client has read so many more tokens; the decoder hears of it now and then."""
        self._consumed += tokens
        if not self._over and self._consumed - self._reported >= self._report_every:
            self._reported = self._consumed
            self._outbox.consumed(self.number, self._consumed)

    def cancel_sample(self, index: int, *, finish: bool = False) -> None:
        """End one sample at the decoder; with `finish` it ended well, and the decoder's word on it will come."""
        if not self._over:
            self._outbox.cancel(self.number, index, finish=finish)

    def close(self) -> None:
        """Let go; a request that still runs is cancelled at the decoder. May be called at any time, and again."""
        if not self._over:
            self._over = True
            self._outbox.cancel(self.number)
        self._forget(self.number)

    def push(self, update: Update) -> None:
        """Hand over what a step brought (by the client of the decoder alone)."""
        if self._over:
            return
        self._waiting_tokens += update.num_tokens
        if self._waiting_tokens > self._max_waiting:
            self.close()
            self._put(Update(failure=Internal("a decoder ran past the window of the request")))
            return
        if update.end is not None or update.failure is not None:
            self._over = True
        self._put(update)

    def _put(self, update: Update) -> None:
        self._updates.append(update)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: TesseraError) -> None:
        """End the request with an error, without a word to the decoder."""
        self.push(Update(failure=error))

    def abandon(self, error: TesseraError) -> None:
        """End the request with an error for its client, and at the decoder too."""
        if not self._over:
            self._outbox.cancel(self.number)
            self.push(Update(failure=error))
