"""What a failed call means, in words for a person: what the server said, or why it could not be reached.

A server of ours always sends `google.rpc` details, so an answer is never taken for a missing server. Without them the
text is that of gRPC's own core; the pieces of it that are known become sentences, everything else is shown as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import grpc

from common.errors import InvalidArgument, TesseraError
from common.interceptors import error_from_rpc

DETAILS_KEY = "grpc-status-details-bin"
NOT_CONNECTED = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")
NOBODY_THERE = ("Connection refused", "No such file or directory")
SAID_ALREADY = ("field", "method")  # by the message
BROKEN_OFF = ("Socket closed", "Connection reset", "Broken pipe", "GOAWAY", "ping timeout", "keepalive")


_TOO_LARGE: Final = re.compile(r"(?:Sent|Received) message larger than max \((\d+) vs\. (\d+)\)")


def explain_failure(
    error: grpc.RpcError, target: str, absent: str, *, secure: bool = False, flags: Mapping[str, str] | None = None
) -> str:
    """One line about a failed call to `target`; `absent` says what to do where nothing listens there, and `flags` has
    what a user typed for fields of the request."""
    failure = error_from_rpc(error)
    trailing: Any = (error.trailing_metadata() if isinstance(error, grpc.Call) else None) or ()
    if not any(key == DETAILS_KEY for key, _ in trailing):
        reason = explain_connection(failure.code, failure.message, target, absent, secure=secure)
        if reason is not None:
            return reason
        if (large := _TOO_LARGE.search(failure.message)) is not None:
            return f"a message of {large[1]} bytes is too large; one holds at most {large[2]} bytes"
    return name_flags(explain_refusal(failure), flags or {}, failure.metadata.get("field", ""))


def name_flags(text: str, flags: Mapping[str, str], field: str = "") -> str:
    """`text` with the flags of a command in the place of fields. A field that is one plain word, which may be a word of
    the sentence, gives way only where it is the `field` that was refused."""
    for name, flag in flags.items():
        if "_" in name or "." in name:
            text = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)", flag, text)
        elif name == field:
            text = text.replace(f"{name}:", f"{flag}:", 1)
    return text


def explain_refusal(failure: TesseraError) -> str:
    """What the server said, with its numbers and when to try again."""
    text = failure.message
    if isinstance(failure, InvalidArgument):
        return f"the server refused {text}"
    numbers = {name: value for name, value in failure.metadata.items() if name not in SAID_ALREADY}
    extra = f" ({', '.join(f'{k} {v}' for k, v in numbers.items())})" if numbers else ""
    retry = ""
    if failure.retry_after_seconds is not None:
        again = " in" if text.endswith("try again") else "; try again in"
        retry = f"{again} {failure.retry_after_seconds:.1f} s"
    return f"{failure.code.name}: {text}{extra}{retry}"


def explain_connection(code: grpc.StatusCode, text: str, target: str, absent: str, *, secure: bool) -> str | None:
    """Why there was no connection, or how it broke off; None where `text` says neither."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer from {target} in time; the process there may be stopped or busy"
    if code is not grpc.StatusCode.UNAVAILABLE:
        return None
    if not text.startswith(NOT_CONNECTED):
        if any(piece in text for piece in BROKEN_OFF):
            return f"the connection to {target} broke off; what was running there has ended"
        return None
    if any(piece in text for piece in NOBODY_THERE):
        return f"nothing answers at {target}; {absent}"
    if "resolv" in text or "DNS" in text:
        return f"there is no host of the name in {target}"
    if "timed out" in text:
        return f"what listens at {target} does not answer; the process there may be stopped or busy"
    if not secure and "Socket closed" in text:
        return f"{target} takes no plaintext; if the gateway uses TLS, name its certificate: --tls-ca FILE"
    if secure and "WRONG_VERSION_NUMBER" in text:
        return f"{target} does not speak TLS; leave --tls-ca out"
    if secure and "CERTIFICATE_VERIFY_FAILED" in text:
        return f"the certificate of {target} is not signed by one in the file of --tls-ca"
    if secure:
        return f"no TLS connection to {target}: its certificate may be for another name, or not be trusted by --tls-ca"
    return f"no connection to {target}: {text.rpartition('last error: ')[2]}"
