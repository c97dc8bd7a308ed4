"""Who is calling: bearer keys checked by the cache manager, before a request is decoded.

Owns the invariant that a handler runs only with a tenant that the daemon named for the call's own credential; only
`grpc.health.v1` is open. Positive answers are kept for at most a second, under a keyed hash of the key (the key is
not kept), so that a revoked key works no longer than that; one that is used is asked for anew before its second is
over, so that a steady caller waits for no answer. Used by `gateway/application.py` as an interceptor.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc

from common.errors import TesseraError, Unauthenticated, Unavailable
from common.interceptors import HEALTH_PREFIX, bearer_of, refusal
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc

KEEP_SECONDS: Final = 1.0
RENEW_PART: Final = 0.5  # of an answer's time, after which its next use asks anew
MAX_KEPT: Final = 4096
MAX_QUESTIONS: Final = 64
_CALL_SECONDS: Final = 5.0
_RETURN_SECONDS: Final = 2.0  # longer than the channel pauses between two attempts to connect


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant behind a credential. `grant` proves it to the daemon; `tenant` is for routing, turns and logs,
    `weight` is its part where tenants compete."""

    tenant: str
    grant: bytes
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class _Kept:
    """An answer, good before `until`; both times in seconds of the gateway's clock."""

    until: float
    renew_at: float
    caller: Caller


class Authenticator(Protocol):
    """Turns a credential into a caller."""

    async def authenticate(self, credential: str) -> Caller:
        """Raises Unauthenticated for a credential that is not known, Unavailable while nobody can tell."""


class DaemonAuthenticator:
    """Asks the cache manager's CredentialService. `clock` gives seconds and never goes back.

    Only one question per credential is under way at a time; the cache holds at most `MAX_KEPT` answers.
    """

    def __init__(self, channel: grpc.aio.Channel, clock: Callable[[], float]) -> None:
        self._channel = channel
        self._stub = cache_pb2_grpc.CredentialServiceStub(channel)  # type: ignore[no-untyped-call]
        self._clock = clock
        self._pepper = secrets.token_bytes(32)
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[Caller]] = {}
        self._places = asyncio.Semaphore(MAX_QUESTIONS)

    async def authenticate(self, credential: str) -> Caller:
        """The caller behind `credential`."""
        name = hashlib.blake2b(credential.encode("utf-8", "replace"), key=self._pepper, digest_size=32).digest()
        kept = self._kept.get(name)
        if kept is not None:
            now = self._clock()
            if now < kept.until:
                if now >= kept.renew_at:
                    self._question(name, credential)
                return kept.caller
            del self._kept[name]
        # One caller that goes away must not cancel the question of the others.
        return await asyncio.shield(self._question(name, credential))

    def _question(self, name: bytes, credential: str) -> asyncio.Task[Caller]:
        """The question about a credential that is under way; asked now where there is none."""
        task = self._asking.get(name)
        if task is None:
            task = asyncio.create_task(self._ask(name, credential))
            self._asking[name] = task
            task.add_done_callback(lambda done: self._answered(name, done))
        return task

    def _answered(self, name: bytes, task: asyncio.Task[Caller]) -> None:
        del self._asking[name]
        if task.cancelled():
            return
        if isinstance(task.exception(), Unauthenticated):  # whoever asked has it; nobody need be left to see it
            self._kept.pop(name, None)

    async def _ask(self, name: bytes, credential: str) -> Caller:
        asked = self._clock()
        try:
            request = cache_pb2.AuthenticateRequest(key=credential)
            answer = await self._answer(request)
        except ValueError:  # a string that no protobuf can carry
            raise _unknown() from None
        except grpc.aio.AioRpcError as error:
            raise _translate(error) from None
        except TimeoutError:
            raise _away() from None
        caller = Caller(answer.tenant, answer.grant, answer.weight or 1.0)
        keep = min(KEEP_SECONDS, answer.expires_in_seconds)
        if keep > 0:
            self._kept[name] = _Kept(asked + keep, asked + keep * RENEW_PART, caller)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return caller

    async def _answer(self, request: cache_pb2.AuthenticateRequest) -> cache_pb2.AuthenticateResponse:
        """Asks; a daemon that cannot be reached is waited for a little, since it may be back before the channel knows.

        Raises TimeoutError where it is not back by then.
        """
        for last in (False, True):
            try:
                async with self._places:  # a flood of wrong keys must not become a flood at the daemon
                    answer: cache_pb2.AuthenticateResponse = await self._stub.Authenticate(
                        request, timeout=_CALL_SECONDS
                    )
                    return answer
            except grpc.aio.AioRpcError as error:
                if last or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.wait_for(self._channel.channel_ready(), _RETURN_SECONDS)
        raise AssertionError("unreachable: the second attempt returns or raises")


def _unknown() -> Unauthenticated:
    return Unauthenticated("the credential is not known", reason="UNKNOWN_CREDENTIAL")


def _translate(error: grpc.aio.AioRpcError) -> TesseraError:
    # INVALID_ARGUMENT is the daemon's word for a key that cannot be one; the caller need not know the difference.
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT):
        return _unknown()
    return _away()


def _away() -> Unavailable:
    return Unavailable(
        "credentials cannot be checked now; the cache manager is away",
        reason="CREDENTIALS_AWAY",
        retry_after_seconds=1.0,
    )


_caller: ContextVar[Caller] = ContextVar("tessera_caller")
_arrival: ContextVar[float] = ContextVar("tessera_arrival")


def current_caller() -> Caller:
    """The caller of the call that this task serves. Raises Unauthenticated outside of an authenticated call."""
    caller = _caller.get(None)
    if caller is None:
        raise Unauthenticated("the call brought no credential", reason="NO_CREDENTIAL")
    return caller


def arrival_time() -> float:
    """When the call that this task serves arrived, in seconds of the gateway's clock: before its credential was checked
    and its message read."""
    return _arrival.get()


class TenantInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Refuses every call without a known credential, before its request is read, and names the caller to the rest."""

    def __init__(self, authenticator: Authenticator, clock: Callable[[], float]) -> None:
        self._authenticator = authenticator
        self._clock = clock

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Pass a call on or refuse it."""
        if handler_call_details.method.startswith(HEALTH_PREFIX):
            return await continuation(handler_call_details)
        _arrival.set(self._clock())
        try:
            caller = await self._authenticator.authenticate(bearer_of(handler_call_details.invocation_metadata))
        except TesseraError as error:
            return refusal(error)
        # Interceptors and the handler of a call run in one task, and no other call does.
        _caller.set(caller)
        return await continuation(handler_call_details)
