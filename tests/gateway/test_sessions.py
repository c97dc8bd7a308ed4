"""Kept conversations at the edge: handles, what is sent on, how text and turns go on, and what is cut."""

from __future__ import annotations

from datetime import datetime

import grpc
import pytest

from common.errors import InvalidArgument, NotFound, ResourceExhausted
from common.tokens import unpack_tokens
from gateway.chat import ChatTemplate, Turn
from gateway.prompts import PromptEncoder
from gateway.sessions import handle_bytes, handle_text
from gateway.validation import ModelLimits
from tessera.cache.v1 import cache_pb2
from tessera.inference.v1 import inference_pb2 as pb
from tests.gateway.support import Answer, Node, async_test, collect, ids_of, node, tiny_tokenizer
from tests.gateway.test_tokenizer import sentencepiece
from tests.tiny_models import CHAT_TEMPLATE

HANDLE = handle_text(bytes(range(16)))


async def generate(here: Node, message: pb.GenerateRequest, key: str = "key-a") -> Answer:
    async with here.channel(key) as channel:
        return await collect(here.stub(channel).Generate(message))


def going_on(**fields: object) -> pb.GenerateRequest:
    """A request that continues and keeps, five tokens at most."""
    message = pb.GenerateRequest(stopping=pb.Stopping(max_tokens=5), **fields)  # type: ignore[arg-type]
    message.session.handle, message.session.keep_seconds = HANDLE, 60
    return message


# ---- handles


def test_a_handle_is_16_bytes_in_one_writing_alone() -> None:
    """There and back; every other writing is NOT_FOUND in the same words."""
    for number in range(256):
        handle = bytes([number]) * 16
        assert handle_bytes(handle_text(handle)) == handle
    words = set()
    for text in (
        "",
        "A",
        "A" * 21,
        "A" * 21 + "B",
        "A" * 23,
        "+" * 22,
        "\u00e9" * 22,
        HANDLE + "=",
        " " + HANDLE[1:],
        "A" * 10**5,
    ):
        with pytest.raises(NotFound) as raised:
            handle_bytes(text)
        words.add(str(raised.value))
    assert len(words) == 1


# ---- chat


def template(source: str) -> ChatTemplate:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(source, special, now=datetime.now, max_characters=10_000)


PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:{{ message.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind<|im_end|>\n{% endif %}" + CHAT_TEMPLATE
)
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)

# As Gemma has it: what the system says begins the first user's turn, and the one who answers has another name.
MERGING = (
    "{{ bos_token }}{% set said = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if said else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 is even) %}{{ raise_exception('turns must take turns') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ said if loop.first else '' }}{{ m.content | trim }}"
    "<end>\n{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "system"),
    [
        *((source, False) for source in (CHAT_TEMPLATE, PLAIN, DEFAULT_SYSTEM, ALTERNATING, MERGING)),
        *((source, True) for source in (CHAT_TEMPLATE, PLAIN, DEFAULT_SYSTEM, MERGING)),
    ],
)
def test_new_turns_alone_make_what_the_whole_conversation_has_there(source: str, system: bool) -> None:
    """Template over everything = template over the beginning, the answer, and what comes after it."""
    made = template(source)
    turns = [Turn("system", "Be brief.")] if system else []
    turns.append(Turn("user", "one"))
    prompt = made.render(turns)
    for word in ("two", "three"):
        answer, new = f"answer to {turns[-1].content}", Turn("user", word)
        whole = made.render([*turns, Turn("assistant", answer), new])
        prompt = prompt + answer + made.render_after_answer([new])
        assert prompt == whole
        turns += [Turn("assistant", answer), new]


def test_several_new_turns_at_once() -> None:
    """The client may bring an answer of its own between two questions."""
    made = template(CHAT_TEMPLATE)
    new = [Turn("user", "b"), Turn("assistant", "c"), Turn("user", "d")]
    whole = made.render([Turn("user", "a"), Turn("assistant", "A"), *new])
    assert made.render([Turn("user", "a")]) + "A" + made.render_after_answer(new) == whole


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content }}|{% endfor %}{{ messages | length }}",
        "{{ messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join }}"
        "{% for m in messages if m.role != 'system' %}{{ m.content }}|{% endfor %}",
        "{{ messages[-1].content }}",
        "{% for m in messages %}{{ m.content | upper }}|{% endfor %}",
    ],
)
def test_a_template_that_cannot_go_on_says_so(source: str) -> None:
    """What depends on earlier turns, moves new ones to the front, or leaves the answer out must be sent whole."""
    with pytest.raises(InvalidArgument, match="send the whole conversation"):
        template(source).render_after_answer([Turn("system", "s"), Turn("user", "x")])


def test_bad_turns_are_refused_as_ever() -> None:
    """None, a role that is none, and what the template itself refuses."""
    for turns in ([], [Turn("tool", "x")]):
        with pytest.raises(InvalidArgument, match=r"chat\.messages"):
            template(CHAT_TEMPLATE).render_after_answer(turns)
    with pytest.raises(InvalidArgument, match="alternate"):
        template(ALTERNATING).render_after_answer([Turn("assistant", "x")])


# ---- requests


@async_test
async def test_a_request_that_goes_on_sends_its_own_turn_alone() -> None:
    """Handle, tokens to go on from and time to keep reach the decoder; counts are those of the whole."""
    async with node() as here:
        here.decoder.base_tokens = ids_of("a kept conversation")
        here.decoder.script = lambda submit: [ids_of("a long answer to it all")]
        message = going_on(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="more")]))
        message.session.num_tokens = 4
        answer = await generate(here, message)
        submit = here.decoder.submitted[0]
        expected = ids_of("<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
        assert unpack_tokens(submit.tokens).tolist() == expected
        assert (submit.session_handle, submit.session_tokens, submit.keep_seconds) == (bytes(range(16)), 4, 60.0)
        assert answer.accepted[0].prompt_tokens == 4 + len(expected)
        assert answer.summaries[0].usage.prompt_tokens == 4 + len(expected)
        (finished,) = answer.finished
        assert finished.session_handle == HANDLE and finished.session_tokens == 4 + len(expected) + 5


@async_test
async def test_plain_requests_keep_nothing() -> None:
    """No session field: no handle goes in or out."""
    async with node() as here:
        answer = await generate(here, pb.GenerateRequest(text="hello", stopping=pb.Stopping(max_tokens=2)))
        submit = here.decoder.submitted[0]
        assert not submit.session_handle and not submit.keep_seconds
        assert not answer.finished[0].session_handle and not answer.finished[0].session_tokens


@async_test
async def test_an_answer_goes_on_without_a_prompt_and_without_a_seam() -> None:
    """Cut anywhere, also within a character: what comes after is the rest of the text, nothing lost or doubled."""
    text = "Once upon \u00e9\u00e8 a time \U0001f469\u200d\U0001f680 there"
    ids = ids_of(text)
    async with node() as here:
        for cut in range(1, len(ids)):
            here.decoder.base_tokens = ids[:cut]
            here.decoder.script = lambda submit, cut=cut: [ids[cut:]]
            message = going_on()
            message.stopping.max_tokens = len(ids)
            answer = await generate(here, message)
            before = tiny_tokenizer().decode(ids[:cut])
            if before.endswith("\ufffd"):
                before = before.rstrip("\ufffd")
            assert before + answer.text() == text
        assert not here.decoder.submitted[0].tokens


@async_test
async def test_text_goes_on_without_another_beginning() -> None:
    """Plain text after a kept conversation is tokenized as it stands; without a handle an empty prompt is refused."""
    async with node() as here:
        here.decoder.base_tokens = ids_of("a b")
        await generate(here, going_on(text=" c d"))
        assert unpack_tokens(here.decoder.submitted[0].tokens).tolist() == ids_of(" c d")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generate(here, pb.GenerateRequest(session=pb.Session(keep_seconds=5)))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@async_test
async def test_no_beginning_of_sequence_comes_into_the_middle() -> None:
    """A model whose texts begin with a BOS: not those that go on. Positive control: one that stands alone."""
    encoder = PromptEncoder(sentencepiece(), datetime.now)
    limits = ModelLimits("tiny", 512, 64)
    alone = await encoder.encode_prompt(pb.GenerateRequest(text=" ab"), limits)
    goes_on = await encoder.encode_prompt(pb.GenerateRequest(text=" ab", session=pb.Session(handle=HANDLE)), limits)
    encoder.close()
    assert alone[0] == 1 and 1 not in goes_on


@async_test
async def test_after_a_stop_string_the_conversation_is_cut_to_what_was_given() -> None:
    """The decoder is asked to finish the sample well, and what it has beyond the stop is cut off."""
    async with node() as here:
        here.decoder.base_tokens = ids_of("base")
        here.decoder.tokens_per_step = 2
        here.decoder.script = lambda submit: [ids_of("one two STOP three four five six seven eight nine ten")]
        message = going_on(text="x")
        message.stopping.max_tokens = 500
        message.stopping.stop.append("STOP")
        answer = await generate(here, message)
        assert answer.text() == "one two "
        (finished,) = answer.finished
        assert (finished.reason, finished.stop) == (pb.FINISH_REASON_STOP, "STOP")
        given = answer.accepted[0].prompt_tokens + len(answer.token_ids())
        assert finished.session_handle == HANDLE and finished.session_tokens == given
        (cut,) = here.branches.asked
        assert isinstance(cut, cache_pb2.RollbackBranchRequest)
        assert (cut.grant, cut.handle, cut.num_tokens) == (b"grant of tenant-a", bytes(range(16)), given)
        assert answer.kinds[-1] == "summary"


@async_test
async def test_a_conversation_that_could_not_be_cut_is_not_offered() -> None:
    """Rather no handle than one that holds what the client never got."""
    async with node() as here:
        here.branches.refusal = NotFound("gone")
        here.decoder.tokens_per_step = 2
        here.decoder.script = lambda submit: [ids_of("one two STOP three four five six seven eight nine ten")]
        message = pb.GenerateRequest(text="x", stopping=pb.Stopping(max_tokens=500, stop=["STOP"]))
        message.session.keep_seconds = 5
        answer = await generate(here, message)
        assert len(here.branches.asked) == 1, "positive control: there was something to cut"
        assert answer.finished[0].stop == "STOP" and not answer.finished[0].session_handle


# ---- what is done to kept conversations


@async_test
async def test_fork_rollback_and_drop_reach_the_cache_manager_with_the_callers_grant() -> None:
    """Handles come back as text; defaults are filled in."""
    async with node() as here, here.channel("key-b") as channel:
        stub = here.stub(channel)
        forked = await stub.ForkSession(pb.ForkSessionRequest(handle=HANDLE))
        assert [handle_bytes(text) for text in forked.handles] == [bytes([1]) * 16] and forked.num_tokens == 9
        forked = await stub.ForkSession(pb.ForkSessionRequest(handle=HANDLE, count=3, keep_seconds=2.5))
        assert len(forked.handles) == 3
        await stub.RollbackSession(pb.RollbackSessionRequest(handle=HANDLE, num_tokens=7))
        await stub.DropSession(pb.DropSessionRequest(handle=HANDLE))
        first, second, cut, dropped = here.branches.asked
        assert (first.count, first.ttl_seconds, second.count, second.ttl_seconds) == (1, 600.0, 3, 2.5)
        assert cut.num_tokens == 7
        for asked in (first, second, cut, dropped):
            assert (asked.grant, asked.handle) == (b"grant of tenant-b", bytes(range(16)))


@async_test
async def test_what_is_wrong_with_them_is_said() -> None:
    """Bad fields by name; the cache manager's refusals as they are; its absence as UNAVAILABLE."""
    async with node() as here, here.channel() as channel:
        stub = here.stub(channel)

        async def code(call: object) -> grpc.StatusCode:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call  # type: ignore[misc]
            return raised.value.code()

        invalid, missing = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
        assert await code(stub.ForkSession(pb.ForkSessionRequest(handle=HANDLE, count=17))) is invalid
        assert await code(stub.ForkSession(pb.ForkSessionRequest(handle=HANDLE, count=-1))) is invalid
        assert await code(stub.ForkSession(pb.ForkSessionRequest(handle=HANDLE, keep_seconds=0))) is invalid
        assert await code(stub.RollbackSession(pb.RollbackSessionRequest(handle=HANDLE))) is invalid
        assert await code(stub.DropSession(pb.DropSessionRequest(handle="x"))) is missing
        assert not here.branches.asked, "none of those got so far"
        here.branches.refusal = NotFound("no")
        assert await code(stub.DropSession(pb.DropSessionRequest(handle=HANDLE))) is missing
        here.branches.refusal = ResourceExhausted("full", subject="kept_branches", needed=2, usable=1)
        assert await code(stub.ForkSession(pb.ForkSessionRequest(handle=HANDLE))) is grpc.StatusCode.RESOURCE_EXHAUSTED
        here.branches.refusal = RuntimeError("a defect")
        assert await code(stub.DropSession(pb.DropSessionRequest(handle=HANDLE))) is grpc.StatusCode.UNAVAILABLE


@async_test
async def test_a_key_is_needed_for_all_of_it() -> None:
    """As for every other method."""
    async with node() as here, here.channel("no such key") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await here.stub(channel).DropSession(pb.DropSessionRequest(handle=HANDLE))
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert not here.branches.asked


@async_test
async def test_no_log_line_holds_a_handle(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither as text nor as bytes; positive control: the request itself is logged."""
    async with node() as here:
        here.decoder.base_tokens = [5]
        await generate(here, going_on(text="x"))
        async with here.channel() as channel:
            await here.stub(channel).DropSession(pb.DropSessionRequest(handle=HANDLE))
    captured = capsys.readouterr()
    written = captured.out + captured.err
    assert "request_left" in written
    assert (
        HANDLE not in written and bytes(range(16)).hex() not in written and repr(bytes(range(16)))[2:-1] not in written
    )
