"""Prompts to token ids: text, conversations and ready ids, without ever holding up the event loop.

Owns the bound on a prompt's text (what can never fit the context is refused before it is tokenized) and the small
thread pool for long ones. Called by `gateway/service.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, Final, TypeVar

import numpy as np

from common.errors import FailedPrecondition, InvalidArgument
from gateway.chat import ChatTemplate, Turn
from gateway.tokenizer import ModelTokenizer
from gateway.validation import Ids, ModelLimits, check_prompt_length, check_token_ids
from tessera.decode.v1 import decode_pb2
from tessera.inference.v1 import inference_pb2

INLINE_CHARACTERS: Final = 2048  # shorter text takes less time to tokenize than to hand to a thread
INLINE_TOKENS: Final = 2048
MAX_DETOKENIZED: Final = 1_048_576
_THREADS: Final = 2

Result = TypeVar("Result")


class PromptEncoder:
    """Tokenizing for one model. `max_context_tokens` bounds the text of any prompt; `now` is the templates' clock."""

    def __init__(self, tokenizer: ModelTokenizer, now: Callable[[], datetime]) -> None:
        self._tokenizer = tokenizer
        self._now = now
        self._vocabulary: decode_pb2.Vocabulary | None = None
        self._templates: dict[int, ChatTemplate] = {}
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="tokenize")

    @property
    def tokenizer(self) -> ModelTokenizer:
        """The tokenizer of the model."""
        return self._tokenizer

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode_prompt(self, request: inference_pb2.GenerateRequest, limits: ModelLimits) -> Ids:
        """The prompt of a request as ids that fit the model; after a kept conversation, what comes after that one, and
        none is allowed. Raises InvalidArgument naming the field."""
        kind = request.WhichOneof("prompt")
        continues = bool(request.session.handle)
        if kind is None and continues:
            return np.empty(0, np.int64)
        if kind == "token_ids":
            check_prompt_length("token_ids.ids", len(request.token_ids.ids), limits)
            ids: Ids = np.asarray(request.token_ids.ids, np.int64)
            check_token_ids("token_ids.ids", ids, limits.vocab_size)
            return ids
        ids = np.array(await self._encode(kind, request, limits, continues=continues), np.int64)
        check_prompt_length("chat.messages" if kind == "chat" else "text", len(ids), limits)
        if int(ids.max()) >= limits.vocab_size:
            raise FailedPrecondition("the tokenizer of this gateway does not fit the model of the decoder")
        return ids

    async def vocabulary(self, limits: ModelLimits) -> decode_pb2.Vocabulary:
        """The bytes of every token, for a decoder. Raises Unimplemented where the tokens are no byte strings."""
        if self._vocabulary is None:
            tokens = await self._in_thread(self._tokenizer.all_token_bytes)
            self._vocabulary = decode_pb2.Vocabulary(tokens=tokens[: limits.vocab_size])
        return self._vocabulary

    async def tokenize(self, request: inference_pb2.TokenizeRequest, limits: ModelLimits) -> list[int]:
        """The ids of a prompt, exactly as Generate would see them."""
        return await self._encode(request.WhichOneof("prompt"), request, limits)

    async def detokenize(self, ids: Sequence[int], limits: ModelLimits) -> str:
        """The text of ids."""
        if len(ids) > MAX_DETOKENIZED:
            raise InvalidArgument("token_ids", f"holds {len(ids)} ids; allowed are at most {MAX_DETOKENIZED}")
        check_token_ids("token_ids", ids, limits.vocab_size)
        if len(ids) <= INLINE_TOKENS:
            return self._tokenizer.decode(ids)
        return await self._in_thread(self._tokenizer.decode, ids)

    async def _encode(
        self, kind: str | None, request: Any, limits: ModelLimits, *, continues: bool = False
    ) -> list[int]:
        max_bytes = limits.max_context_tokens * self._tokenizer.max_bytes_per_token
        if kind == "text":
            text = request.text
            if not text:
                raise InvalidArgument("text", "is empty; allowed is one character or more")
            _check_bytes("text", len(text.encode()), max_bytes, limits)
            encode = self._tokenizer.encode_continuation if continues else self._encode_text
            if len(text) <= INLINE_CHARACTERS:
                return encode(text)
            return await self._in_thread(encode, text)
        if kind == "chat":
            turns = [Turn(message.role, message.content) for message in request.chat.messages]
            _check_bytes("chat.messages", sum(len(turn.content.encode()) for turn in turns), max_bytes, limits)
            return await self._in_thread(self._encode_chat, turns, max_bytes, continues)
        raise InvalidArgument("prompt", "is not set; allowed is one of text, token_ids and chat")

    def _encode_text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=True)

    def _encode_chat(self, turns: Sequence[Turn], max_characters: int, continues: bool) -> list[int]:
        template = self._templates.get(max_characters)
        if template is None:
            source = self._tokenizer.chat_template
            if source is None:
                raise InvalidArgument("chat", "the model has no chat template; send text or token_ids")
            template = ChatTemplate(
                source, self._tokenizer.special_tokens, now=self._now, max_characters=max_characters
            )
            self._templates[max_characters] = template
        if continues:
            return self._tokenizer.encode_continuation(template.render_after_answer(turns))
        # The template writes the model's special tokens itself, BOS included.
        return self._tokenizer.encode(template.render(turns), add_special_tokens=False)

    async def _in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _check_bytes(field: str, num_bytes: int, max_bytes: int, limits: ModelLimits) -> None:
    if num_bytes > max_bytes:
        raise InvalidArgument(
            field,
            f"is {num_bytes} bytes; over {max_bytes} bytes can never fit the {limits.max_context_tokens} tokens "
            f"of {limits.name}",
        )
