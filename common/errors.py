"""The error tree. An error knows its gRPC code, a stable reason, what was wrong and what is allowed.

    TesseraError
    ├── InvalidArgument      a field is wrong: which, and what is allowed
    ├── Unauthenticated      no credential, or one that is not known
    ├── PermissionDenied     known, but not allowed this
    ├── NotFound             no such object for this caller
    ├── AlreadyExists        the name is taken
    ├── FailedPrecondition   right request, wrong state
    ├── OutOfRange           a place in a sequence that is known no more, or not yet
    ├── ResourceExhausted    would not fit: needed and usable numbers, perhaps when to retry
    ├── Unavailable          a part of the node is away; retryable
    ├── DeadlineExceeded     the caller's time is over
    ├── Aborted              ended by the operator
    ├── Unimplemented        a named field or method that this build does not serve
    └── Internal             our defect

Services raise these; `common/interceptors.py` turns them into statuses with `google.rpc` details. Messages never
hold secrets, prompt text, handles, paths of the arena or another tenant's data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import grpc


class TesseraError(Exception):
    """Base of all errors that may cross a process boundary."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata: dict[str, str] = dict(metadata or {})
        self.retry_after_seconds = retry_after_seconds


class InvalidArgument(TesseraError):
    """A request field is wrong; `field` is its proto path, the message says what is allowed."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_ARGUMENT"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}", metadata={"field": field})
        self.field = field
        self.description = description


class Unauthenticated(TesseraError):
    """The caller brought no credential, or one that is unknown, expired or revoked."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class PermissionDenied(TesseraError):
    """The caller is known and may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class NotFound(TesseraError):
    """The object does not exist for this caller."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class AlreadyExists(TesseraError):
    """An object of that name exists."""

    code = grpc.StatusCode.ALREADY_EXISTS
    default_reason = "ALREADY_EXISTS"


class FailedPrecondition(TesseraError):
    """The request is right but the system is not in a state that allows it."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class OutOfRange(TesseraError):
    """A place in a sequence that is known no more, or not yet; the metadata tells what is."""

    code = grpc.StatusCode.OUT_OF_RANGE
    default_reason = "OUT_OF_RANGE"


class ResourceExhausted(TesseraError):
    """The request does not fit; `needed` and `usable` are counts of `subject`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "RESOURCE_EXHAUSTED"

    def __init__(
        self,
        message: str,
        *,
        subject: str,
        needed: int,
        usable: int,
        reason: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(
            message,
            reason=reason,
            metadata={"subject": subject, "needed": str(needed), "usable": str(usable)},
            retry_after_seconds=retry_after_seconds,
        )
        self.subject = subject
        self.needed = needed
        self.usable = usable


class Unavailable(TesseraError):
    """A part of the node is away or draining; the call may be tried again."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class DeadlineExceeded(TesseraError):
    """The caller's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Aborted(TesseraError):
    """The operator ended the request."""

    code = grpc.StatusCode.ABORTED
    default_reason = "ABORTED"


class Unimplemented(TesseraError):
    """A field or method this build does not serve, by name."""

    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "UNIMPLEMENTED"


class Internal(TesseraError):
    """A defect of ours."""

    code = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"
