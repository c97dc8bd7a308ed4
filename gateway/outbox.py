"""What waits to be sent to one decoder. Owns the bound on it: at most one window report a request, and no wait to add.

Adding never blocks, so a cancel can be sent from any cleanup. Used by `gateway/decoders.py` alone.
"""

from __future__ import annotations

import asyncio
from collections import deque

from tessera.decode.v1 import decode_pb2


class Outbox:
    """Messages in order; reports of what was read overtake nothing and merge per request."""

    def __init__(self) -> None:
        self._messages: deque[decode_pb2.ConnectRequest] = deque()
        self._consumed: dict[int, int] = {}
        self._filled = asyncio.Event()

    def submit(self, submit: decode_pb2.Submit) -> None:
        """Queue a new request."""
        self._put(decode_pb2.ConnectRequest(submit=submit))

    def vocabulary(self, vocabulary: decode_pb2.Vocabulary) -> None:
        """Queue the bytes of the tokens."""
        self._put(decode_pb2.ConnectRequest(vocabulary=vocabulary))

    def cancel(self, request: int, index: int | None = None, *, finish: bool = False) -> None:
        """Queue the end of a request, or of one sample. A request that was not sent yet is forgotten instead."""
        if index is not None:
            cancel = decode_pb2.Cancel(request=request, index=index, finish=finish)
            self._put(decode_pb2.ConnectRequest(cancel=cancel))
            return
        self._consumed.pop(request, None)
        for message in self._messages:
            if message.HasField("submit") and message.submit.request == request:
                self._messages.remove(message)
                return
        self._put(decode_pb2.ConnectRequest(cancel=decode_pb2.Cancel(request=request)))

    def consumed(self, request: int, tokens: int) -> None:
        """Queue a report that `tokens` of a request are read, in place of an older one."""
        self._consumed[request] = tokens
        self._filled.set()

    async def next(self) -> decode_pb2.ConnectRequest:
        """The next message to send; waits for one."""
        while True:
            if self._messages:
                return self._messages.popleft()
            if self._consumed:
                request = next(iter(self._consumed))
                tokens = self._consumed.pop(request)
                return decode_pb2.ConnectRequest(consumed=decode_pb2.Consumed(request=request, tokens=tokens))
            self._filled.clear()
            await self._filled.wait()

    def _put(self, message: decode_pb2.ConnectRequest) -> None:
        self._messages.append(message)
        self._filled.set()
