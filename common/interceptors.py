"""Server interceptors: who may call, and how an error becomes a status. Used by every gRPC server of ours.

`BearerInterceptor` refuses before a request is decoded. `ErrorInterceptor` turns a `TesseraError` into its status
with `google.rpc` details, and anything else into INTERNAL without its text.
"""

from __future__ import annotations

import hmac
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from common import errors
from common.errors import InvalidArgument, ResourceExhausted, TesseraError, Unauthenticated
from common.logs import get_logger, where

DOMAIN = "tessera"
HEALTH_PREFIX = "/grpc.health.v1.Health/"
MAX_CREDENTIAL_BYTES = 512

_BY_CODE: dict[grpc.StatusCode, type[TesseraError]] = {
    kind.code: kind
    for kind in (
        errors.Unauthenticated,
        errors.PermissionDenied,
        errors.NotFound,
        errors.AlreadyExists,
        errors.FailedPrecondition,
        errors.OutOfRange,
        errors.Unavailable,
        errors.DeadlineExceeded,
        errors.Aborted,
        errors.Unimplemented,
        errors.Internal,
    )
}


def code_number(code: grpc.StatusCode) -> int:
    """The canonical number of a status code."""
    return int(code.value[0])


def code_of(number: int) -> grpc.StatusCode:
    """The status code of a canonical number; UNKNOWN for a number there is not."""
    return next((code for code in grpc.StatusCode if code.value[0] == number), grpc.StatusCode.UNKNOWN)


def make_error(
    code: grpc.StatusCode,
    message: str,
    *,
    reason: str = "",
    metadata: Mapping[str, str] | None = None,
    retry_after_seconds: float | None = None,
) -> TesseraError:
    """Rebuild the typed error of a code, as it was raised in another process."""
    values = dict(metadata or {})
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field = values.get("field", "request")
        return InvalidArgument(field, message.removeprefix(f"{field}: "))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return ResourceExhausted(
            message,
            subject=values.get("subject", ""),
            needed=_to_int(values.get("needed")),
            usable=_to_int(values.get("usable")),
            reason=reason or None,
            retry_after_seconds=retry_after_seconds,
        )
    kind = _BY_CODE.get(code, errors.Internal)
    return kind(message, reason=reason or None, metadata=values, retry_after_seconds=retry_after_seconds)


def _to_int(text: str | None) -> int:
    return int(text) if text is not None and text.lstrip("-").isdigit() else 0


def error_status(error: TesseraError) -> status_pb2.Status:
    """`google.rpc.Status` of an error with ErrorInfo and what else applies."""
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)]
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.description)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhausted):
        text = f"needed {error.needed}, usable {error.usable}"
        quota = error_details_pb2.QuotaFailure.Violation(subject=error.subject, description=text)
        details.append(error_details_pb2.QuotaFailure(violations=[quota]))
    if error.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        item = any_pb2.Any()
        item.Pack(detail)
        packed.append(item)
    return status_pb2.Status(code=code_number(error.code), message=error.message, details=packed)


def error_from_rpc(call: Any) -> TesseraError:
    """The typed error behind a failed call (grpc.RpcError or grpc.aio.AioRpcError)."""
    code = call.code() or grpc.StatusCode.UNKNOWN
    message = call.details() or code.name
    reason, metadata, retry = "", {}, None
    trailing = call.trailing_metadata() or ()
    raw = next((value for key, value in trailing if key == "grpc-status-details-bin"), None)
    if raw is not None:
        for item in status_pb2.Status.FromString(raw).details:
            info, delay = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if item.Unpack(info):
                reason, metadata = info.reason, dict(info.metadata)
            elif item.Unpack(delay):
                retry = delay.retry_delay.ToNanoseconds() / 1e9
    return make_error(code, message, reason=reason, metadata=metadata, retry_after_seconds=retry)


def failure_fields(error: TesseraError) -> dict[str, Any]:
    """The fields code, reason, message and metadata that our internal messages carry an error in."""
    return {
        "code": code_number(error.code),
        "reason": error.reason,
        "message": error.message,
        "metadata": dict(error.metadata),
    }


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: TesseraError) -> None:
    """End a call with the status of `error`."""
    status = rpc_status.to_status(error_status(error))
    await context.abort(error.code, error.message, status.trailing_metadata)


def bearer_of(metadata: Any) -> str:
    """The bearer credential in call metadata. Raises Unauthenticated if there is none or it is malformed."""
    values = [value for key, value in metadata or () if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        raise Unauthenticated("send exactly one `authorization: Bearer <key>`", reason="NO_CREDENTIAL")
    scheme, _, credential = values[0].partition(" ")
    if scheme.lower() != "bearer" or not credential or len(credential) > MAX_CREDENTIAL_BYTES:
        raise Unauthenticated(
            f"authorization must be `Bearer <key>` with a key of 1..{MAX_CREDENTIAL_BYTES} bytes",
            reason="BAD_CREDENTIAL",
        )
    return credential


def refusal(error: TesseraError) -> Any:
    """A handler that answers every kind of call with `error`, before any request is decoded."""

    async def refuse(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)  # reads nothing, whatever the client sends


class BearerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Refuses every call that does not bring the one secret; only `grpc.health.v1` is open."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Pass a call on or refuse it."""
        if handler_call_details.method.startswith(HEALTH_PREFIX):
            return await continuation(handler_call_details)
        try:
            credential = bearer_of(handler_call_details.invocation_metadata)
        except Unauthenticated as error:
            return refusal(error)
        if not hmac.compare_digest(credential.encode("utf-8", "replace"), self._secret):
            return refusal(Unauthenticated("the credential is not known", reason="UNKNOWN_CREDENTIAL"))
        return await continuation(handler_call_details)


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Turns what a handler raises into a status; it is the only place where that happens."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Wrap the handler of a call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        decode = handler.request_deserializer
        if not handler.request_streaming:
            decode = _Decoder(decode)
        if handler.response_streaming:
            inner_stream = handler.stream_stream if handler.request_streaming else handler.unary_stream

            async def writer(request: Any, context: Any) -> None:
                try:
                    _check_decoded(request)
                    await inner_stream(request, context)  # sends its responses by context.write
                except TesseraError as error:
                    await abort_with(context, error)
                except (grpc.RpcError, grpc.aio.AbortError, grpc.aio.BaseError):
                    raise
                except Exception as error:  # noqa: BLE001 - the last line of defence of a server
                    await abort_with(context, _unexpected(method, error))

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                try:
                    _check_decoded(request)
                    async for response in inner_stream(request, context):
                        yield response
                except TesseraError as error:
                    await abort_with(context, error)
                except (grpc.RpcError, grpc.aio.AbortError, grpc.aio.BaseError):
                    raise
                except Exception as error:  # noqa: BLE001 - the last line of defence of a server
                    await abort_with(context, _unexpected(method, error))

            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            wrapper = writer if inspect.iscoroutinefunction(inner_stream) else stream
            return make(wrapper, decode, handler.response_serializer)
        inner_unary = handler.stream_unary if handler.request_streaming else handler.unary_unary

        async def unary(request: Any, context: Any) -> Any:
            try:
                _check_decoded(request)
                return await inner_unary(request, context)
            except TesseraError as error:
                await abort_with(context, error)
            except (grpc.RpcError, grpc.aio.AbortError, grpc.aio.BaseError):
                raise
            except Exception as error:  # noqa: BLE001 - the last line of defence of a server
                await abort_with(context, _unexpected(method, error))

        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(unary, decode, handler.response_serializer)


class _Malformed:
    """Stands for a request that is no message of its type."""


class _Decoder:
    """A deserializer whose failure reaches the handler; gRPC itself would answer UNKNOWN with the exception's text."""

    def __init__(self, decode: Callable[[bytes], Any] | None) -> None:
        self._decode = decode

    def __call__(self, data: bytes) -> Any:
        try:
            return data if self._decode is None else self._decode(data)
        except DecodeError:
            return _Malformed()


def _check_decoded(request: Any) -> None:
    if isinstance(request, _Malformed):
        raise InvalidArgument("request", "is no message of the method's type")


def _unexpected(method: str, error: Exception) -> TesseraError:
    if isinstance(error, NotImplementedError):  # a method of the proto that a stock servicer leaves out
        return errors.Unimplemented("this server does not serve the method", reason="METHOD_UNIMPLEMENTED")
    get_logger().error("handler_failed", method=method, error=type(error).__name__, frames=where(error))
    return errors.Internal("an internal error ended this call; the operator's log has it")
