"""The public gRPC client of the command line: one connection, its credential, and one answer with its numbers.

`generate`, `chat` and `demo` use it. It reads the default tenant's key from the state directory unless told otherwise,
and turns what gRPC says into a message for a person. It never keeps an answer's text.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from cli.errors import EXIT_USAGE, CommandError
from cli.failures import explain_failure
from cli.files import read_authority, read_key
from cli.node_address import find_state, require_address
from cli.node_phase import describe_phase, describe_silence
from common.interceptors import error_from_rpc
from common.paths import StatePaths
from common.rpc import bearer_metadata, open_sync_channel
from common.words import count
from tessera.inference.v1 import inference_pb2, inference_pb2_grpc

MAX_INT64, MAX_UINT64 = 2**63 - 1, 2**64 - 1
MIN_RATE_TOKENS, MIN_RATE_SECONDS = 16, 0.05  # of a shorter answer the rate would say more about messages than tokens
TOKENIZE_SECONDS = 30.0
SHORT_SECONDS = 2.0
NO_TEMPLATE_FIELD = "chat"  # a conversation is refused as a whole where the model has no chat template
# What a user types for the fields of a request.
FLAGS = {
    "adapter": "--adapter", "model": "--model", "beam.length_penalty": "--length-penalty", "beam.width": "--beams",
    "output.constraint.grammar": "--grammar", "output.constraint.json_schema": "--json-schema",
    "output.constraint.regex": "--regex", "output.logprobs": "--logprobs",
    "output.prompt_logprobs": "--prompt-logprobs", "sampling.min_p": "--min-p", "sampling.n": "--n",
    "sampling.seed": "--seed", "sampling.temperature": "--temperature", "sampling.top_k": "--top-k",
    "sampling.top_p": "--top-p", "speculation.draft_tokens": "--draft-tokens", "speculation.mode": "--speculate",
    "stopping.max_tokens": "--max-tokens", "stopping.stop": "--stop",
}  # fmt: skip
NO_NODE = "Start the node with `tessera up`, name its folder where `up` was given one: --state-dir DIR, or the file:"
ABSENT = "start the node with `tessera up`, or name another: --endpoint HOST:PORT"


@dataclass(slots=True)
class Numbers:
    """What one request cost; times in seconds as this client saw them. `stop` and `session_handle` are those of the
    sample that ended last; `cut_tokens` is the length of the last that a bound cut off, None where none was."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_seconds: float = 0.0
    decode_seconds: float = 0.0
    stop: str = ""
    session_handle: str = field(default="", repr=False)
    prompt_logprobs: list[Any] = field(default_factory=list, repr=False)
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cut_tokens: int | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Decode rate from the first token to the last; None where the answer is too short to tell one."""
        if self.completion_tokens < MIN_RATE_TOKENS or self.decode_seconds < MIN_RATE_SECONDS:
            return None
        return (self.completion_tokens - 1) / self.decode_seconds

    def describe(self) -> str:
        """One line for a terminal."""
        rate = self.tokens_per_second
        drafts = f", {self.accepted_tokens} of {self.drafted_tokens} guesses right" if self.drafted_tokens else ""
        return (
            f"{count(self.prompt_tokens, 'prompt token')}, {self.cached_tokens} of them cached; first token after "
            f"{self.ttft_seconds * 1e3:.0f} ms; {count(self.completion_tokens, 'token')}"
            f"{'' if rate is None else f', {rate:.1f} tokens/s'}{drafts}"
        )

    def describe_cut(self, max_tokens: int) -> str | None:
        """One line that an answer was cut off: by `max_tokens`, or by the end of the context. None where none was."""
        if self.cut_tokens is None:
            return None
        if self.cut_tokens < max_tokens:
            return "the answer was cut off: prompt and answer fill the model's context"
        return f"the answer was cut off after {count(max_tokens, 'token')}; --max-tokens N allows more"


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Options of every command that calls the gateway."""
    group = parser.add_argument_group("connection")
    group.add_argument(
        "--endpoint", metavar="HOST:PORT", help="the gateway (default: that of the node of the state directory)"
    )
    group.add_argument("--key-file", type=Path, metavar="FILE", help="tenant key (default <state-dir>/default.key)")
    group.add_argument("--state-dir", type=Path, metavar="DIR", help="state directory of the node")
    group.add_argument("--tls-ca", type=Path, metavar="FILE", help="use TLS and trust these PEM certificates")


def check_text(name: str, text: str) -> str:
    """`text` as it is. Raises CommandError where it came from bytes that are no UTF-8: no message can carry those."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CommandError(f"{name} is no UTF-8 text (character {error.start + 1})", EXIT_USAGE) from None
    return text


def add_turns(request: inference_pb2.GenerateRequest, turns: Sequence[tuple[str, str]]) -> None:
    """Make `turns` (role, content) the request's conversation."""
    for role, content in turns:
        request.chat.messages.add(role=role, content=content)


class Client:
    """A connection to one gateway with one tenant key; a context manager."""

    def __init__(self, endpoint: str, key: str, tls_ca: bytes | None = None, own: StatePaths | None = None) -> None:
        """`own` is the state directory of the node behind `endpoint`, where that is known."""
        credentials = None if tls_ca is None else grpc.ssl_channel_credentials(tls_ca)
        self._endpoint = endpoint
        self._own = own
        self._secure = credentials is not None
        self._key = bearer_metadata(key)
        self._channel = open_sync_channel(endpoint, credentials)
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Client:
        """Connect as the command line says. Raises CommandError where the key cannot be read, and where no address is
        given and no node runs on the state directory."""
        paths = find_state(options.state_dir)
        key = None if options.key_file is None else read_key(options.key_file, "--key-file", "")
        trusted = read_authority(options.tls_ca)
        endpoint, certificate = require_address(paths, options.endpoint)
        if key is None:
            key = read_key(paths.default_key, None, _say_how_to_have_a_key(paths))
        own = None if options.endpoint else paths
        return cls(check_text("--endpoint", endpoint), key, trusted or read_authority(certificate), own)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def tokenize(self, text: str, model: str = "") -> list[int]:
        """The token ids of a text. Raises CommandError with what the server said."""
        request = inference_pb2.TokenizeRequest(model=model, text=text)
        try:
            answer = self._stub.Tokenize(request, metadata=self._metadata(), timeout=TOKENIZE_SECONDS)
        except grpc.RpcError as error:
            raise self._failure(error) from None
        return list(answer.token_ids)

    def generate(self, request: inference_pb2.GenerateRequest, numbers: Numbers) -> Iterator[inference_pb2.Delta]:
        """Stream the deltas of an answer and fill `numbers`. Leaving the loop early cancels the call.

        Raises CommandError with what the server said.
        """
        began = time.perf_counter()
        first = None
        lengths: Counter[int] = Counter()
        call: Any = self._stub.Generate(request, metadata=self._metadata())
        try:
            for response in call:
                now = time.perf_counter()
                match response.WhichOneof("event"):
                    case "accepted":
                        numbers.prompt_tokens = response.accepted.prompt_tokens
                        numbers.cached_tokens = response.accepted.cached_tokens
                        numbers.prompt_logprobs = list(response.accepted.prompt_logprobs)
                        first, numbers.ttft_seconds = now, now - began
                    case "delta":
                        lengths[response.delta.index] += len(response.delta.token_ids)
                        yield response.delta
                        numbers.decode_seconds = now - first if first is not None else 0.0
                    case "finished":
                        numbers.stop = response.finished.stop
                        numbers.session_handle = response.finished.session_handle
                        if response.finished.reason == inference_pb2.FINISH_REASON_LENGTH:
                            numbers.cut_tokens = lengths[response.finished.index]
                    case "summary":
                        usage = response.summary.usage
                        numbers.completion_tokens = usage.completion_tokens
                        numbers.drafted_tokens = usage.drafted_tokens
                        numbers.accepted_tokens = usage.accepted_tokens
        except grpc.RpcError as error:
            raise self._failure(error) from None
        finally:
            call.cancel()

    def has_chat_template(self) -> bool:
        """Whether the model that is served by default has one. Raises CommandError with what the server said."""
        request = inference_pb2.TokenizeRequest()
        request.chat.messages.add(role="user", content="?")
        try:
            self._stub.Tokenize(request, metadata=self._metadata(), timeout=SHORT_SECONDS)
        except grpc.RpcError as error:
            if error_from_rpc(error).metadata.get("field") == NO_TEMPLATE_FIELD:
                return False
            raise self._failure(error) from None
        return True

    def drop_session(self, handle: str) -> None:
        """Have the server keep a conversation no longer. Raises CommandError with what it said."""
        request = inference_pb2.DropSessionRequest(handle=handle)
        try:
            self._stub.DropSession(request, metadata=self._metadata(), timeout=SHORT_SECONDS)
        except grpc.RpcError as error:
            raise self._failure(error) from None

    def _metadata(self) -> Any:
        """The credential of the next call. Raises CommandError where the node that it is for has ended meanwhile: what
        listens at its address now may be anyone."""
        if self._own is not None and require_address(self._own).endpoint != self._endpoint:
            raise CommandError(
                f"the node of {self._own.state_dir} has another address by now; start this command again"
            )
        return self._key

    def _failure(self, error: grpc.RpcError) -> CommandError:
        phase = None if self._own is None else describe_phase(self._own)
        absent = ABSENT if self._own is None else describe_silence(self._own, "gateway", os.environ)
        message = explain_failure(error, self._endpoint, absent, secure=self._secure, flags=FLAGS)
        failure = error_from_rpc(error)
        if phase is not None and phase not in message and failure.code is grpc.StatusCode.UNAVAILABLE:
            message += f"; {phase}"  # its gateway answers already, and has no decoder yet
        if failure.metadata.get("field") == NO_TEMPLATE_FIELD:
            message += "; `tessera generate --raw` continues plain text"
        return CommandError(message, reason=failure.reason)


def _say_how_to_have_a_key(paths: StatePaths) -> str:
    """What to do where the default tenant's key is not in the state directory."""
    phase = describe_phase(paths)
    if phase is not None:
        return phase[0].upper() + phase[1:]
    if paths.tenants_db.exists():  # the node has been here, so the file was removed; nobody can make it again
        return "Make another one with `tessera admin create-key default`, and name its file: --key-file FILE"
    return f"{NO_NODE} --key-file FILE"
