"""Who may call what of the admin RPC: two credentials, two roles.

Invariant: a call is let through only with a known credential whose role may make it, before its request is decoded; a
method that is new is an operator's until its name says that it only reads. `grpc.health.v1` alone is open. The role of
the call that is being handled is in `current_role`. Called by the admin server; the refusals go to the audit log.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from enum import Enum
from typing import Any, Final

import grpc

from cachemgr.audit import AuditLog
from common.errors import PermissionDenied, TesseraError, Unauthenticated
from common.interceptors import HEALTH_PREFIX, bearer_of, refusal
from tessera.admin.v1 import admin_pb2

ADMIN_SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
READING: Final = ("Get", "List", "Check", "Explain", "Watch")
"""What the names of methods that change nothing begin with."""


class Role(Enum):
    """What a credential is good for."""

    OPERATOR = "operator"
    READER = "reader"


current_role: ContextVar[Role] = ContextVar("current_role")


def method_name(full: str) -> str:
    """The bare name of an AdminService method; empty for a method of another service."""
    service, _, name = full.lstrip("/").rpartition("/")
    return name if service == ADMIN_SERVICE else ""


def changes(full: str) -> bool:
    """Whether a call of this method may change something."""
    name = method_name(full)
    return bool(name) and not name.startswith(READING)


def is_reader() -> bool:
    """Whether the call that is being handled brought the reader's credential."""
    return current_role.get(Role.READER) is Role.READER


class RoleInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Lets operators call everything and readers what changes nothing."""

    def __init__(self, credentials: Mapping[str, Role], audit: AuditLog) -> None:
        self._credentials = [(secret.encode(), role) for secret, role in credentials.items()]
        self._audit = audit

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Pass a call on or refuse it."""
        method = handler_call_details.method
        if method.startswith(HEALTH_PREFIX):
            return await continuation(handler_call_details)
        try:
            role = self._role_of(handler_call_details.invocation_metadata)
            if role is not Role.OPERATOR and changes(method):
                raise PermissionDenied(
                    f"{method_name(method)} changes something; it needs the operator's credential (admin.key)",
                    reason="OPERATOR_NEEDED",
                    metadata={"method": method_name(method)},
                )
        except TesseraError as error:
            if changes(method):
                who = Role.READER.value if isinstance(error, PermissionDenied) else "unknown"
                self._audit.record(who, method_name(method), {}, error.code.name, {})
            return refusal(error)
        current_role.set(role)
        return await continuation(handler_call_details)

    def _role_of(self, metadata: Any) -> Role:
        credential = bearer_of(metadata).encode("utf-8", "replace")
        found = [role for secret, role in self._credentials if hmac.compare_digest(credential, secret)]
        if not found:
            raise Unauthenticated("the credential is not known", reason="UNKNOWN_CREDENTIAL")
        return found[0]
