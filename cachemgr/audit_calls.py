"""Puts each admin call that may change something into the audit log, with its end.

Invariant: what is written of a request are numbers, flags, names and counts of lists; never a token id, a cache key,
the secret of a tenant's key (not where one was sent in the place of a name either) or anything that a caller could make
long. Of an answer only the fields that are named here are written. An interceptor of the admin server, inside the one
that makes statuses of errors; what the roles refuse is written there.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from cachemgr.audit import AuditLog
from cachemgr.roles import Role, changes, current_role, method_name
from cachemgr.tenant_keys import hide_keys
from common.errors import TesseraError

MAX_TEXT: Final = 128
MAX_ITEMS: Final = 32
ANSWERED: Final = frozenset(
    {
        "key_id",
        "evicted_blocks",
        "remaining_blocks",
        "pin",
        "pinned_tokens",
        "pinned_blocks",
        "changed_tokens",
        "num_tokens",
        "drained",
        "leases",
    }
)
"""Fields of answers that are written; a new one is not, unless it is named here: it could be a secret."""
_TOKENS: Final = "token_ids"


class AuditInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Writes one line for each call that may change something: when it has ended, before its caller knows."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Wrap the handler of a call."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None or not changes(method) or handler.request_streaming or handler.response_streaming:
            return handler

        name = method_name(method)

        async def unary(request: Any, context: Any) -> Any:
            who, fields = current_role.get(Role.READER).value, shown_fields(request)
            try:
                answer = await handler.unary_unary(request, context)
            except BaseException as error:  # it goes on as it came, and is told to the caller after this
                self._audit.record(who, name, fields, _outcome(error), {}, context.peer())
                raise
            self._audit.record(who, name, fields, "OK", shown_answer(answer), context.peer())
            return answer

        def decode(data: bytes) -> Any:
            try:
                return handler.request_deserializer(data)
            except DecodeError:
                self._audit.record(current_role.get(Role.READER).value, name, {}, "INVALID_ARGUMENT", {})
                raise

        return grpc.unary_unary_rpc_method_handler(unary, decode, handler.response_serializer)


def _outcome(error: BaseException) -> str:
    if isinstance(error, TesseraError):
        return error.code.name
    return "INTERNAL" if isinstance(error, Exception) else "CANCELLED"


def shown_fields(request: Any) -> dict[str, Any]:
    """What of a request may be written: token ids as their number, messages as the fact that they are set."""
    shown: dict[str, Any] = {}
    for field, value in request.ListFields():
        if field.name == _TOKENS:
            shown["num_token_ids"] = len(value)
        elif field.message_type is not None:
            shown[field.name] = "set"
        elif field.is_repeated:
            shown[field.name] = [_short(item) for item in value[:MAX_ITEMS]]
        else:
            shown[field.name] = _short(value)
    return shown


def shown_answer(answer: Any) -> dict[str, Any]:
    """What of an answer may be written."""
    return {field.name: _short(value) for field, value in answer.ListFields() if field.name in ANSWERED}


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return hide_keys(value)[:MAX_TEXT]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, int) else "set"
