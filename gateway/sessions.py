"""Session handles at the edge: their text, the fields that name them, and what a tenant does to kept conversations.

Owns the rule that a handle which cannot be one is NOT_FOUND in the words of one that is not known, and that no handle
is ever logged. The cache manager decides; the tenant is that of the caller's grant. Called by `gateway/service.py`,
`gateway/validation.py` and `gateway/generation.py`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import grpc

from common.errors import InvalidArgument, NotFound, TesseraError, Unavailable
from common.interceptors import error_from_rpc
from gateway.auth import Caller
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc
from tessera.inference.v1 import inference_pb2

HANDLE_BYTES: Final = 16
DEFAULT_KEEP_SECONDS: Final = 600.0
LONGEST_KEEP_SECONDS: Final = 86_400.0  # the cache manager's own limit is lower; this keeps the number finite
MAX_FORKS: Final = 16
MAX_TOKENS: Final = 2**31 - 1
_CALL_SECONDS: Final = 5.0
_REFUSALS: Final = ("NOT_FOUND", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "PERMISSION_DENIED")
_HANDLE_CHARACTERS: Final = 22

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What a request asks about sessions. `handle` empty: none is continued; `num_tokens` 0: all of it;
    `keep_seconds` 0: this one is not kept."""

    handle: bytes = field(default=b"", repr=False)
    num_tokens: int = 0
    keep_seconds: float = 0.0


NO_SESSION: Final = SessionPlan()


def handle_text(handle: bytes) -> str:
    """A handle as clients see it: URL-safe base64 without padding; empty for none."""
    return base64.urlsafe_b64encode(handle).rstrip(b"=").decode()


def handle_bytes(text: str) -> bytes:
    """The 16 bytes of a handle. Raises NotFound for text that is none."""
    if len(text) == _HANDLE_CHARACTERS and text.isascii():
        try:
            handle = base64.b64decode(f"{text}==", altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            handle = b""
        if len(handle) == HANDLE_BYTES and handle_text(handle) == text:
            return handle
    raise NotFound("there is no such kept conversation; it may have expired", reason="BRANCH_NOT_FOUND")


def check_session(request: inference_pb2.GenerateRequest) -> SessionPlan:
    """The session fields of a request. Raises InvalidArgument, and NotFound for a handle that cannot be one."""
    if not request.HasField("session"):
        return NO_SESSION
    session = request.session
    if session.HasField("num_tokens"):
        if not session.handle:
            raise InvalidArgument("session.num_tokens", "allowed is none without session.handle")
        if not 1 <= session.num_tokens <= MAX_TOKENS:
            raise InvalidArgument("session.num_tokens", f"is {session.num_tokens}; allowed is 1 to its tokens")
    if session.handle and request.sampling.HasField("n") and request.sampling.n != 1:
        raise InvalidArgument("sampling.n", f"is {request.sampling.n}; with session.handle 1 is allowed")
    keep = check_keep("session.keep_seconds", session.keep_seconds) if session.HasField("keep_seconds") else 0.0
    handle = handle_bytes(session.handle) if session.handle else b""
    return SessionPlan(handle, session.num_tokens, keep)


def check_keep(name: str, seconds: float) -> float:
    """How long to keep. Raises InvalidArgument; NaN is refused."""
    if not seconds > 0:
        raise InvalidArgument(name, f"is {seconds:g}; allowed is a number of seconds > 0")
    return min(seconds, LONGEST_KEEP_SECONDS)


class Branches:
    """The cache manager's BranchService, for callers."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = cache_pb2_grpc.BranchServiceStub(channel)  # type: ignore[no-untyped-call]

    async def fork(
        self, caller: Caller, request: inference_pb2.ForkSessionRequest
    ) -> inference_pb2.ForkSessionResponse:
        """More handles of a conversation."""
        count = request.count or 1
        if not 1 <= count <= MAX_FORKS:
            raise InvalidArgument("count", f"is {request.count}; allowed are 1..{MAX_FORKS}")
        keep = DEFAULT_KEEP_SECONDS
        if request.HasField("keep_seconds"):
            keep = check_keep("keep_seconds", request.keep_seconds)
        asked = cache_pb2.ForkBranchRequest(
            grant=caller.grant, handle=handle_bytes(request.handle), count=count, ttl_seconds=keep
        )
        answer = await _answer(self._stub.ForkBranch(asked, timeout=_CALL_SECONDS))
        return inference_pb2.ForkSessionResponse(
            handles=[handle_text(handle) for handle in answer.handles], num_tokens=answer.num_tokens
        )

    async def rollback(self, caller: Caller, request: inference_pb2.RollbackSessionRequest) -> None:
        """Cut a conversation back."""
        if not 1 <= request.num_tokens <= MAX_TOKENS:
            raise InvalidArgument("num_tokens", f"is {request.num_tokens}; allowed is 1 to its tokens")
        await self.cut(caller, handle_bytes(request.handle), request.num_tokens)

    async def cut(self, caller: Caller, handle: bytes, num_tokens: int) -> None:
        """Cut a conversation back to its first tokens."""
        asked = cache_pb2.RollbackBranchRequest(grant=caller.grant, handle=handle, num_tokens=num_tokens)
        await _answer(self._stub.RollbackBranch(asked, timeout=_CALL_SECONDS))

    async def drop(self, caller: Caller, request: inference_pb2.DropSessionRequest) -> None:
        """End a conversation."""
        asked = cache_pb2.DropBranchRequest(grant=caller.grant, handle=handle_bytes(request.handle))
        await _answer(self._stub.DropBranch(asked, timeout=_CALL_SECONDS))


async def _answer(call: Awaitable[Answer]) -> Answer:
    """The answer of the cache manager; its refusals are the caller's, and anything else means that it is away."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        refusal: TesseraError = error_from_rpc(error)
        if error.code().name not in _REFUSALS:
            refusal = Unavailable(
                "the cache manager is away; try again", reason="SESSIONS_AWAY", retry_after_seconds=1.0
            )
        raise refusal from None
