"""Prompts to ids beside a running event loop."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from common.errors import FailedPrecondition, InvalidArgument
from gateway.prompts import MAX_DETOKENIZED, PromptEncoder
from gateway.tokenizer import ModelTokenizer
from gateway.validation import ModelLimits
from tessera.inference.v1 import inference_pb2 as pb
from tests.gateway.support import async_test, tiny_tokenizer

LIMITS = ModelLimits("tiny", 512, 1_000_000)


def encoder(tokenizer: ModelTokenizer | None = None) -> PromptEncoder:
    return PromptEncoder(tokenizer or tiny_tokenizer(), lambda: datetime(2026, 1, 1, tzinfo=UTC))


@async_test
async def test_the_loop_turns_while_a_long_prompt_is_tokenized() -> None:
    """A prompt of half a megabyte is tokenized in a thread that lets the loop run; the ids are those of one call."""
    text = "The quick brown fox jumps over the lazy dog. " * 11_000
    prompts = encoder()
    task = asyncio.create_task(prompts.tokenize(pb.TokenizeRequest(text=text), LIMITS))
    turns = 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 10
    assert await task == tiny_tokenizer().encode(text, add_special_tokens=True)
    prompts.close()


@async_test
async def test_text_that_can_never_fit_is_refused_before_it_is_tokenized() -> None:
    """The bound on bytes follows from the context and the longest token, for text and for conversations."""
    small = ModelLimits("tiny", 512, 16)
    most = 16 * tiny_tokenizer().max_bytes_per_token
    prompts = encoder()
    with pytest.raises(InvalidArgument, match="never fit") as caught:
        await prompts.tokenize(pb.TokenizeRequest(text="x" * (most + 1)), small)
    assert caught.value.field == "text"
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * most), pb.ChatMessage(role="user", content="x")])
    with pytest.raises(InvalidArgument, match="never fit"):
        await prompts.tokenize(pb.TokenizeRequest(chat=chat), small)
    assert len(await prompts.tokenize(pb.TokenizeRequest(text="x" * most), small)) > 16


@async_test
async def test_a_model_without_a_template_takes_no_conversations() -> None:
    """Without a chat template a conversation is refused and text is served."""
    tiny = tiny_tokenizer()
    bare = ModelTokenizer(tiny._tokenizer, special_tokens={}, eos_token_ids=(), chat_template=None)
    prompts = encoder(bare)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
    with pytest.raises(InvalidArgument, match="template"):
        await prompts.tokenize(pb.TokenizeRequest(chat=chat), LIMITS)
    assert await prompts.tokenize(pb.TokenizeRequest(text="x"), LIMITS)


@async_test
async def test_ids_that_the_model_does_not_have_are_no_fault_of_the_caller() -> None:
    """A tokenizer that does not fit the decoder's model is an operator's error, and reaches no decoder."""
    with pytest.raises(FailedPrecondition, match="tokenizer"):
        await encoder().encode_prompt(pb.GenerateRequest(text="hello"), ModelLimits("tiny", 4, 100))


@async_test
async def test_detokenizing_is_bounded_and_checked() -> None:
    """Ids outside the vocabulary and endless lists are refused; no ids are no text; long lists are served."""
    prompts = encoder()
    assert await prompts.detokenize([], LIMITS) == ""
    for ids in ([512], [-1], [0] * (MAX_DETOKENIZED + 1)):
        with pytest.raises(InvalidArgument):
            await prompts.detokenize(ids, LIMITS)
    ids = tiny_tokenizer().encode("한국어 text " * 1000, add_special_tokens=False)
    assert await prompts.detokenize(ids, LIMITS) == "한국어 text " * 1000
