"""Generate, from the client's side: order, text, stops, samples, headers and concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from common.paths import StatePaths
from common.tokens import unpack_tokens
from tessera.decode.v1 import decode_pb2
from tessera.inference.v1 import inference_pb2 as pb
from tests.gateway.support import (
    EOS,
    Answer,
    Node,
    Script,
    async_test,
    collect,
    eventually,
    ids_of,
    node,
    request,
    tiny_tokenizer,
)
from tests.tiny_adapters import adapter_config, write_adapter

ANSWER = "Once upon a time aab there was 한국 👨‍👩‍👧 a machine"


def say(*texts: str) -> Script:
    """A script in which sample i says texts[i]."""
    return lambda submit: [ids_of(texts[index % len(texts)]) for index in range(submit.sampling.n)]


def say_ids(*ids: int) -> Script:
    return lambda submit: [list(ids)] * submit.sampling.n


async def generate(here: Node, message: pb.GenerateRequest, key: str = "key-a") -> Answer:
    async with here.channel(key) as channel:
        return await collect(here.stub(channel).Generate(message))


@async_test
async def test_a_stream_has_the_order_and_counts_of_the_contract() -> None:
    """accepted, then deltas, one finished, one summary; ids are those of the decoder and the counts are right."""
    async with node() as here:
        answer = await generate(here, request("hello world", max_tokens=9))
        assert answer.kinds == ["accepted", *["delta"] * 9, "finished", "summary"]
        prompt = ids_of("hello world")
        assert answer.accepted[0].prompt_tokens == len(prompt)
        assert answer.accepted[0].cached_tokens == 1
        assert answer.token_ids() == (prompt * 9)[:9]
        assert answer.text() == tiny_tokenizer().decode(answer.token_ids())
        assert answer.finished == [pb.Finished(index=0, reason=pb.FINISH_REASON_LENGTH)]
        usage, timing = answer.summaries[0].usage, answer.summaries[0].timing
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (len(prompt), 1, 9)
        assert usage.cow_copies == 3
        assert 0 < timing.queue_seconds <= timing.ttft_seconds <= timing.total_seconds
        assert timing.queue_seconds + timing.prefill_seconds == pytest.approx(timing.ttft_seconds)
        assert timing.ttft_seconds + timing.decode_seconds == pytest.approx(timing.total_seconds)
        submit = here.decoder.submitted[0]
        assert submit.grant == b"grant of tenant-a"
        assert unpack_tokens(submit.tokens).tolist() == prompt
        assert submit.request_id == answer.accepted[0].request_id
        assert not here.decoder.cancelled


@async_test
async def test_a_seed_is_drawn_once_for_each_request_without_one() -> None:
    """Unset seeds differ from call to call; a given seed, zero too, is passed on."""
    async with node() as here:
        for sampling in (pb.Sampling(), pb.Sampling(), pb.Sampling(seed=0), pb.Sampling(seed=2**64 - 1)):
            message = request(max_tokens=1)
            message.sampling.CopyFrom(sampling)
            await generate(here, message)
        seeds = [submit.sampling.seed for submit in here.decoder.submitted]
        assert seeds[0] != seeds[1]
        assert seeds[2:] == [0, 2**64 - 1]


@async_test
async def test_prompts_as_ids_and_as_chat_reach_the_decoder() -> None:
    """Ready ids pass as they are; a conversation goes through the template; Tokenize agrees with Generate."""
    async with node() as here, here.channel() as channel:
        stub = here.stub(channel)
        await collect(
            stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), stopping=pb.Stopping(max_tokens=1)))
        )
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
        await collect(stub.Generate(pb.GenerateRequest(chat=chat, stopping=pb.Stopping(max_tokens=1))))
        first, second = (unpack_tokens(submit.tokens).tolist() for submit in here.decoder.submitted)
        assert first == [5, 6, 7]
        assert second == ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        assert list((await stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids) == second
        assert list((await stub.Tokenize(pb.TokenizeRequest(text="hi there"))).token_ids) == ids_of("hi there")
        long_text = "long text, " * 1000
        assert list((await stub.Tokenize(pb.TokenizeRequest(text=long_text))).token_ids) == ids_of(long_text)
        reply = await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids_of("한국")[:-1]))
        assert reply.text == "한" + "\ufffd"
        models = (await stub.ListModels(pb.ListModelsRequest())).models
        assert list(models) == [here.decoder.model]
        folder = StatePaths(here.state_dir).adapters_dir
        write_adapter(folder / "sql", adapter_config(4, ["q_proj"]), {"x": np.zeros(1, np.float32)})
        models = (await stub.ListModels(pb.ListModelsRequest())).models
        assert [(item.name, item.base_model, item.rank) for item in models[0].adapters] == [("sql", "tiny", 4)]


@async_test
async def test_max_tokens_is_bounded_by_the_context() -> None:
    """Unset and huge max_tokens are cut to what the context leaves; a smaller one is kept."""
    async with node() as here:
        for max_tokens in (None, 2**63 - 1, 5):
            message = pb.GenerateRequest(text="hello")
            if max_tokens is not None:
                message.stopping.max_tokens = max_tokens
            here.decoder.script = say_ids(EOS)
            await generate(here, message)
        room = here.decoder.model.max_context_tokens - len(ids_of("hello"))
        assert [submit.stopping.max_tokens for submit in here.decoder.submitted] == [room, room, 5]


@pytest.mark.parametrize("max_tokens", [1, 2, 16])
@pytest.mark.parametrize("samples", [1, 2])
def test_each_sample_has_one_finished_and_all_its_text(max_tokens: int, samples: int) -> None:
    """Row 32: for every length and number of samples nothing is missing at the end, and the summary is last."""

    @async_test
    async def scenario() -> None:
        async with node() as here:
            here.decoder.script = say("first sample says this and more", "second sample says that instead, and more")
            message = request(max_tokens=max_tokens)
            message.sampling.n = samples
            answer = await generate(here, message)
            texts = ["first sample says this and more", "second sample says that instead, and more"]
            for index in range(samples):
                expected = ids_of(texts[index])[:max_tokens]
                assert answer.token_ids(index) == expected
                assert answer.text(index) == tiny_tokenizer().decode(expected)
            assert sorted(finished.index for finished in answer.finished) == list(range(samples))
            assert answer.kinds[-1] == "summary"
            assert answer.kinds.count("summary") == answer.kinds.count("accepted") == 1
            assert answer.summaries[0].usage.completion_tokens == samples * max_tokens

    scenario()


STOPS = [
    ["aab", "ab"],
    ["time"],
    ["O"],
    ["Once upon"],
    ["a time aab the"],
    ["한"],
    ["👩‍👧 a"],
    ["machine"],
    ["e"],
    ["국 "],
]


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_at_its_first_match(stops: list[str], per_step: int, include: bool) -> None:
    """Row 29: across token and character edges the text ends at the match; usage counts the completing token."""
    ids = ids_of(ANSWER)
    ends = [end for end in range(len(ANSWER) + 1) if any(ANSWER[:end].endswith(stop) for stop in stops)]
    stop = max((stop for stop in stops if ANSWER[: ends[0]].endswith(stop)), key=len)
    text = ANSWER[: ends[0]] if include else ANSWER[: ends[0] - len(stop)]
    used = next(
        n for n in range(1, len(ids) + 1)
        if any(stop in tiny_tokenizer().decode(ids[:n]).rstrip("\ufffd") for stop in stops)
    )  # fmt: skip

    @async_test
    async def scenario() -> None:
        async with node() as here:
            here.decoder.script = say(ANSWER + " and so on" * 200)
            here.decoder.tokens_per_step = per_step
            answer = await generate(here, request(max_tokens=1000, stop=stops, include_stop=include))
            assert answer.text() == text
            assert answer.finished == [pb.Finished(index=0, reason=pb.FINISH_REASON_STOP, stop=stop)]
            assert answer.token_ids() == ids[:used]
            assert answer.summaries[0].usage.completion_tokens == used
            assert here.decoder.cancelled == [(1, 0)]
            assert here.decoder.submitted[0].stopping.stop == []
            await eventually(lambda: not here.decoder.running)

    scenario()


@async_test
async def test_a_stop_string_that_never_comes_delays_no_token() -> None:
    """Row 30: each delta brings its token's text at once, and the text equals that of a run without stops."""
    async with node() as here:
        here.decoder.script = say("plain words come one by one")
        plain = await generate(here, request(max_tokens=100))
        stopped = await generate(here, request(max_tokens=100, stop=["z" * 200]))
        assert [delta.text for delta in stopped.deltas] == [delta.text for delta in plain.deltas]
        assert all(delta.text for delta in stopped.deltas)


@async_test
async def test_half_a_stop_string_at_the_end_is_delivered_before_finished() -> None:
    """Row 30: text that was held back comes out when the sample ends without the stop."""
    async with node() as here:
        here.decoder.script = say("the end is END OF")
        answer = await generate(here, request(max_tokens=100, stop=["END OF TEXT"]))
        assert answer.text() == "the end is END OF"
        assert answer.finished[0].reason == pb.FINISH_REASON_LENGTH


@async_test
async def test_a_stop_string_on_the_last_token_is_a_stop() -> None:
    """Row 32: where max_tokens and the stop meet on one token, the reason is the stop and nothing is cancelled."""
    async with node() as here:
        ids = ids_of("alpha beta")
        here.decoder.script = say("alpha beta")
        answer = await generate(here, request(max_tokens=len(ids), stop=["eta"]))
        assert answer.text() == "alpha b"
        assert answer.finished == [pb.Finished(index=0, reason=pb.FINISH_REASON_STOP, stop="eta")]
        assert here.decoder.cancelled == []


@async_test
async def test_stops_of_one_sample_leave_the_others_running() -> None:
    """With several samples only the one that matched ends; the summary comes when all have."""
    async with node() as here:
        here.decoder.script = say("short stop here", "a longer answer that goes on to its own end")
        message = request(max_tokens=1000, stop=["stop"])
        message.sampling.n = 2
        answer = await generate(here, message)
        assert (answer.text(0), answer.text(1)) == ("short ", "a longer answer that goes on to its own end")
        assert {finished.index: finished.reason for finished in answer.finished} == {
            0: pb.FINISH_REASON_STOP,
            1: pb.FINISH_REASON_LENGTH,
        }
        assert answer.kinds[-1] == "summary"
        assert answer.summaries[0].usage.completion_tokens == len(answer.token_ids(0)) + len(answer.token_ids(1))


@async_test
async def test_stop_strings_do_not_end_a_sample_before_min_tokens() -> None:
    """Within min_tokens a stop string is text; after it the next one stops."""
    async with node() as here:
        here.decoder.script = say("x x x x x x")
        count = len(ids_of("x x x"))
        answer = await generate(here, request(max_tokens=100, min_tokens=count, stop=["x"]))
        assert answer.text() == "x x x "
        assert answer.finished[0].stop == "x"


@pytest.mark.parametrize("include", [False, True])
def test_stop_tokens_end_a_sample_by_their_id(include: bool) -> None:
    """An end-of-sequence token adds no text; a stop token's text is there with include_stop alone."""

    @async_test
    async def scenario() -> None:
        async with node() as here:
            words = ids_of("one two three")
            here.decoder.script = say_ids(*words, EOS, *words)
            answer = await generate(here, request(max_tokens=100, include_stop=include))
            assert answer.text() == "one two three"
            assert answer.finished[0] == pb.Finished(reason=pb.FINISH_REASON_STOP, stop=str(EOS))
            assert answer.token_ids() == [*words, EOS]
            answer = await generate(here, request(max_tokens=100, stop_token_ids=[words[-1]], include_stop=include))
            assert answer.text() == tiny_tokenizer().decode(words if include else words[:-1])
            assert answer.finished[0] == pb.Finished(reason=pb.FINISH_REASON_STOP, stop=str(words[-1]))

    scenario()


BYTES: list[Sequence[int]] = [
    [*ids_of("한국어 👨‍👩‍👧 끝")],
    [*ids_of("x한")[:-1]],
    [*ids_of("한")[1:], *ids_of("y")],
    [*ids_of("a"), ids_of("한")[-1], *ids_of("b")],
    [*ids_of("👨")[:2], *ids_of("ok")],
]


@pytest.mark.parametrize("ids", BYTES)
@pytest.mark.parametrize("stops", [[], ["zzz"]])
def test_chunks_are_whole_characters_and_join_to_the_one_shot_text(ids: Sequence[int], stops: list[str]) -> None:
    """Row 31: Korean, ZWJ emoji, lone bytes and a cut at the end stream to the text of a one-shot decode."""

    @async_test
    async def scenario() -> None:
        async with node() as here:
            here.decoder.script = say_ids(*ids)
            answer = await generate(here, request(max_tokens=1000, stop=stops))
            assert answer.text() == tiny_tokenizer().decode(ids)

    scenario()


@async_test
async def test_tokens_of_one_step_come_in_one_delta() -> None:
    """Four tokens a step make one delta with four ids, and logprobs beside them if asked for."""
    async with node() as here:
        here.decoder.tokens_per_step = 4
        message = request(max_tokens=8)
        message.output.logprobs = 0
        answer = await generate(here, message)
        assert [len(delta.token_ids) for delta in answer.deltas] == [4, 4]
        assert [[one.token_id for one in delta.logprobs] for delta in answer.deltas] == [
            list(delta.token_ids) for delta in answer.deltas
        ]


@async_test
async def test_response_headers_go_out_with_the_first_token() -> None:
    """Nothing at all reaches the client before the first token; with it come headers and accepted."""
    async with node() as here, here.channel() as channel:
        here.decoder.gate.clear()
        call = here.stub(channel).Generate(request())
        headers = asyncio.create_task(call.initial_metadata())
        await eventually(lambda: len(here.decoder.running) == 1)
        done, _ = await asyncio.wait([headers], timeout=0.3)
        assert not done
        here.decoder.gate.set()
        await headers
        assert (await call.read()).WhichOneof("event") == "accepted"
        call.cancel()


@async_test
async def test_thirty_two_concurrent_streams_each_get_their_own_text() -> None:
    """32 streams over one decoder stream, with mixed lengths and stops: each is what it would be alone."""
    async with node() as here, here.channel() as channel:
        stub = here.stub(channel)

        async def one(number: int) -> None:
            text = f"number {number} says {'word ' * number}"
            ids = ids_of(text)
            length = 5 + 7 * number
            answer = await collect(stub.Generate(request(text, max_tokens=length)))
            assert answer.token_ids() == (ids * length)[:length]
            assert answer.text() == tiny_tokenizer().decode(answer.token_ids())
            assert answer.kinds[0] == "accepted"
            assert answer.kinds[-2:] == ["finished", "summary"]

        await asyncio.gather(*(one(number) for number in range(32)))
        assert here.decoder.connections == 1
        assert not here.decoder.cancelled


@async_test
async def test_fields_that_are_not_known_are_ignored_and_not_passed_on() -> None:
    """Row 14: unknown fields, the names of internal ones among them, change nothing and reach no decoder."""
    async with node() as here:
        message = request(max_tokens=3)
        unknown = decode_pb2.Submit(request_id="x" * 100, grant=b"forged", request_label="y").SerializeToString()
        message.sampling.n = 1
        raw = message.SerializeToString() + b"\xa2\x1f" + bytes([len(unknown)]) + unknown
        sampling = message.sampling.SerializeToString() + b"\xa2\x1f\x03xyz"
        raw += b"\x2a" + bytes([len(sampling)]) + sampling
        answer = await generate(here, pb.GenerateRequest.FromString(raw))
        assert answer.summaries[0].usage.completion_tokens == 3
        assert b"xyz" not in here.decoder.submitted[0].SerializeToString()
        assert here.decoder.submitted[0].grant == b"grant of tenant-a"
