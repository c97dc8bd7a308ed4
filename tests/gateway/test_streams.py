"""What ends or slows a stream: cancels, deadlines, closed channels, slow readers, decoders that die or fail."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from common.rpc import bearer_metadata
from tessera.decode.v1 import decode_pb2
from tessera.inference.v1 import inference_pb2 as pb
from tests.gateway.support import Node, async_test, collect, details_of, eventually, node, request

LONG = 3500


def endless(here: Node) -> None:
    """Have the decoder take its time: one token whenever the loop has turned a few times."""

    async def pause() -> None:
        await asyncio.sleep(0.002)

    here.decoder.step_gate = pause


async def assert_stopped(here: Node) -> None:
    """The decoder was told to end request 1, once, and makes nothing for it any more."""
    await eventually(lambda: not here.decoder.running)
    assert here.decoder.cancelled == [(1, None)]


@async_test
async def test_a_cancelled_call_ends_at_the_decoder() -> None:
    """Row 23a: call.cancel reaches the decoder, and the gateway's place is free again."""
    async with node() as here, here.channel() as channel:
        endless(here)
        call = here.stub(channel).Generate(request(max_tokens=LONG))
        await call.read()
        call.cancel()
        await assert_stopped(here)
        await eventually(lambda: here.gateway.running == 0)


@async_test
async def test_a_call_cancelled_before_its_first_token_ends_at_the_decoder() -> None:
    """Row 23a: a request that still waits in the decoder is ended too."""
    async with node() as here, here.channel() as channel:
        here.decoder.gate.clear()
        call = here.stub(channel).Generate(request())
        task = asyncio.create_task(call.read())
        await eventually(lambda: bool(here.decoder.submitted))
        call.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await assert_stopped(here)


@async_test
async def test_a_closed_channel_ends_its_requests_at_the_decoder() -> None:
    """Row 23b: closing the channel is a cancel of all its calls."""
    async with node() as here:
        endless(here)
        channel = here.channel()
        await here.stub(channel).Generate(request(max_tokens=LONG)).read()
        await channel.close()
        await assert_stopped(here)


@async_test
async def test_a_deadline_ends_the_request_at_the_decoder() -> None:
    """Row 23d: the caller gets DEADLINE_EXCEEDED and the decoder a cancel."""
    async with node() as here, here.channel() as channel:
        endless(here)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(here.stub(channel).Generate(request(max_tokens=LONG), timeout=0.3))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await assert_stopped(here)


@async_test
async def test_a_finished_stream_sends_no_cancel() -> None:
    """The positive control of the cancels: a stream that was read to its end leaves nothing to cancel."""
    async with node() as here, here.channel() as channel:
        await collect(here.stub(channel).Generate(request(max_tokens=100)))
        await eventually(lambda: here.gateway.running == 0)
        assert here.decoder.cancelled == []


@async_test
async def test_a_reader_that_stops_pauses_its_own_request_alone() -> None:
    """A stalled reader's window closes while a neighbour on the same channel streams to its end; then it goes on."""
    async with node(window=64) as here, here.narrow_channel() as channel:
        stub = here.stub(channel)
        message = request(max_tokens=LONG)
        message.output.logprobs = 0
        stalled = stub.Generate(message, metadata=bearer_metadata("key-a"))
        first = await stalled.read()
        assert first.WhichOneof("event") == "accepted"
        produced, quiet = -1, 0
        while quiet < 20:  # until the decoder stands still
            await asyncio.sleep(0.02)
            quiet = quiet + 1 if here.decoder.produced == produced else 0
            produced = here.decoder.produced
        assert produced < LONG
        reported = max(tokens for number, tokens in here.decoder.consumed if number == 1)
        assert reported <= produced <= reported + 64 + 1
        neighbour = await collect(stub.Generate(request(max_tokens=500), metadata=bearer_metadata("key-b")))
        assert len(neighbour.token_ids()) == 500
        assert here.decoder.produced == produced + 500
        rest = await collect(stalled)
        assert len(rest.token_ids()) == LONG
        assert rest.kinds[-1] == "summary"


@async_test
async def test_reading_is_reported_seldom_and_never_too_late() -> None:
    """Consumed is sent at most once in 32 tokens, or in half a small window, and never stalls a reader."""
    for window, every in ((256, 32), (8, 4), (1, 1)):
        async with node(window=window) as here, here.channel() as channel:
            answer = await collect(here.stub(channel).Generate(request(max_tokens=200)))
            assert len(answer.token_ids()) == 200
            reports = [tokens for _, tokens in here.decoder.consumed]
            assert reports == sorted(reports)
            assert 0 < len(reports) <= 200 // every


@async_test
async def test_the_death_of_the_decoder_is_unavailable_and_its_return_is_found() -> None:
    """Running streams end with UNAVAILABLE and a retry hint, health follows, and the next request is served."""
    async with node() as here, here.channel() as channel:
        endless(here)
        call = here.stub(channel).Generate(request(max_tokens=LONG))
        await call.read()
        await here.decoder_servers[0].kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(caught.value, error_details_pb2.RetryInfo) is not None
        assert details_of(caught.value, error_details_pb2.ErrorInfo).reason == "DECODER_AWAY"
        await eventually(lambda: not here.gateway.is_serving, seconds=2.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(here.stub(channel).Generate(request()))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        here.decoder.step_gate = None
        await here.decoder_servers[0].start()
        await eventually(lambda: here.gateway.is_serving, seconds=5.0)
        answer = await collect(here.stub(channel).Generate(request()))
        assert answer.kinds[-1] == "summary"


@async_test
async def test_one_of_two_decoders_may_die() -> None:
    """While one decoder is there, new requests go to it and health stays SERVING."""
    async with node(num_decoders=2) as here, here.channel() as channel:
        await eventually(lambda: all(decoder.connections for decoder in here.decoders))
        await here.decoder_servers[0].kill()
        for number in range(8):
            answer = await collect(here.stub(channel).Generate(request(f"prompt number {number}")))
            assert answer.kinds[-1] == "summary"
        assert here.gateway.is_serving
        assert len(here.decoders[1].submitted) == 8


@async_test
async def test_two_decoders_share_the_prompts_by_their_prefix() -> None:
    """Different prompts use both decoders, and one prompt always the same."""
    async with node(num_decoders=2) as here, here.channel() as channel:
        await eventually(lambda: all(decoder.connections for decoder in here.decoders))
        stub = here.stub(channel)
        for number in range(24):
            for _ in range(2):
                await collect(stub.Generate(request(f"{number} different prompt", max_tokens=1)))
        counts = [len(decoder.submitted) for decoder in here.decoders]
        assert sum(counts) == 48
        assert all(count > 0 and count % 2 == 0 for count in counts)


FAILURES: list[tuple[dict[str, Any], grpc.StatusCode, list[Any]]] = [
    (
        {
            "code": 8,
            "reason": "EXCEEDS_POOL",
            "message": "needs 40 blocks",
            "metadata": {"subject": "blocks", "needed": "40", "usable": "32"},
        },
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        [error_details_pb2.QuotaFailure],
    ),
    (
        {"code": 8, "reason": "QUEUE_FULL", "message": "full", "retry_after_nanoseconds": 5 * 10**8},
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        [error_details_pb2.RetryInfo],
    ),
    (
        {"code": 3, "reason": "INVALID_ARGUMENT", "message": "tokens: bad", "metadata": {"field": "tokens"}},
        grpc.StatusCode.INVALID_ARGUMENT,
        [error_details_pb2.BadRequest],
    ),
    ({"code": 14, "reason": "DRAINING", "message": "away"}, grpc.StatusCode.UNAVAILABLE, []),
    ({"code": 10, "reason": "ABORTED", "message": "aborted"}, grpc.StatusCode.ABORTED, []),
    ({"code": 16, "reason": "BAD_GRANT", "message": "no"}, grpc.StatusCode.UNAUTHENTICATED, []),
    ({"code": 99, "reason": "WHAT", "message": "odd"}, grpc.StatusCode.INTERNAL, []),
]


@async_test
async def test_a_refusal_speaks_of_the_clients_own_fields() -> None:
    """What the internal protocol calls otherwise has its public name, in the text and in the details."""
    async with node() as here, here.channel() as channel:
        here.decoder.failure = decode_pb2.RequestFailed(
            code=3,
            reason="INVALID_ARGUMENT",
            message="base_tokens: is 9; allowed is 1..4",
            metadata={"field": "base_tokens"},
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(here.stub(channel).Generate(request()))
        assert caught.value.details() == "session.num_tokens: is 9; allowed is 1..4"
        bad = details_of(caught.value, error_details_pb2.BadRequest)
        assert [violation.field for violation in bad.field_violations] == ["session.num_tokens"]


@pytest.mark.parametrize(("failure", "code", "kinds"), FAILURES)
def test_a_failure_of_the_decoder_keeps_its_code_and_details(
    failure: dict[str, Any], code: grpc.StatusCode, kinds: list[Any]
) -> None:
    """Code, reason, numbers and retry hint reach the client as google.rpc details, and no cancel goes back."""

    @async_test
    async def scenario() -> None:
        async with node() as here, here.channel() as channel:
            here.decoder.failure = decode_pb2.RequestFailed(**failure)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(here.stub(channel).Generate(request()))
            assert caught.value.code() is code
            info = details_of(caught.value, error_details_pb2.ErrorInfo)
            assert (info.reason, info.domain) == (failure["reason"], "tessera")
            assert all(details_of(caught.value, kind) is not None for kind in kinds)
            here.decoder.failure = None
            answer = await collect(here.stub(channel).Generate(request()))
            assert answer.kinds[-1] == "summary"
            assert here.decoder.cancelled == []

    scenario()


@async_test
async def test_a_gateway_that_is_full_refuses_with_a_retry_hint() -> None:
    """Over its bound a gateway refuses at once, with numbers; a place that comes free is given again."""
    async with node(max_queue=1, max_batch=1) as here, here.channel() as channel:
        here.decoder.gate.clear()
        stub = here.stub(channel)
        held = [asyncio.create_task(collect(stub.Generate(request()))) for _ in range(2)]
        await eventually(lambda: here.gateway.running == 2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(request()))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(caught.value, error_details_pb2.RetryInfo) is not None
        assert details_of(caught.value, error_details_pb2.QuotaFailure) is not None
        here.decoder.gate.set()
        await asyncio.gather(*held)
        assert (await collect(stub.Generate(request()))).kinds[-1] == "summary"


def bad_requests() -> list[tuple[pb.GenerateRequest, grpc.StatusCode]]:
    invalid, missing = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
    chat = pb.Chat(messages=[pb.ChatMessage(role="root", content="x")])
    return [
        (pb.GenerateRequest(), invalid),
        (pb.GenerateRequest(text=""), invalid),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), invalid),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**63 - 1])), invalid),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), invalid),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 4096)), invalid),
        (pb.GenerateRequest(text="word " * 5000), invalid),
        (pb.GenerateRequest(text="x" * 3_000_000), invalid),
        (pb.GenerateRequest(chat=pb.Chat()), invalid),
        (pb.GenerateRequest(chat=chat), invalid),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(temperature=float("nan"))), invalid),
        (pb.GenerateRequest(text="x", stopping=pb.Stopping(max_tokens=0)), invalid),
        (pb.GenerateRequest(text="x", model="other"), missing),
        (pb.GenerateRequest(text="x", adapter=".a"), invalid),
    ]


@async_test
async def test_bad_requests_are_refused_and_leave_a_neighbour_whole() -> None:
    """Each malformed request gets its own code and detail and reaches no decoder; a running stream is untouched."""
    async with node() as here, here.channel() as channel, here.channel("key-b") as other:
        stub = here.stub(channel)
        endless(here)
        neighbour = asyncio.create_task(collect(here.stub(other).Generate(request(max_tokens=400))))
        await eventually(lambda: here.decoder.produced > 0)
        for message, code in bad_requests():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(stub.Generate(message))
            assert caught.value.code() is code, str(message)[:80]
            assert details_of(caught.value, error_details_pb2.ErrorInfo).metadata["field"]
            if code is grpc.StatusCode.INVALID_ARGUMENT:
                assert details_of(caught.value, error_details_pb2.BadRequest).field_violations[0].description
        raw: Any = channel.unary_stream("/tessera.inference.v1.InferenceService/Generate")
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in raw(b"\xff\xff not a message"):
                pass
        answer = await neighbour
        assert len(answer.token_ids()) == 400
        assert len(here.decoder.submitted) == 1
        assert (await collect(stub.Generate(request()))).kinds[-1] == "summary"


@async_test
async def test_a_decoder_that_overruns_the_window_loses_the_request_alone() -> None:
    """What waits for a stalled reader is bounded even if a decoder ignores the window."""
    async with node(window=4) as here, here.narrow_channel() as channel:
        metadata = bearer_metadata("key-a")
        here.decoder.ignore_window = True
        message = request(max_tokens=LONG)
        message.output.logprobs = 0
        call = here.stub(channel).Generate(message, metadata=metadata)
        await call.read()
        await eventually(lambda: (1, None) in here.decoder.cancelled)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        here.decoder.ignore_window = False
        assert (await collect(here.stub(channel).Generate(request(), metadata=metadata))).kinds[-1] == "summary"
