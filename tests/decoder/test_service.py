"""DecodeService over a real socket: one stream, one message a step, refusals alone, ends that reach the blocks."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from common.errors import ResourceExhausted
from common.interceptors import BearerInterceptor, ErrorInterceptor
from common.rpc import MAX_MESSAGE_BYTES, bind, make_server, open_channel, unix_target
from common.tokens import pack_tokens
from decoder.outputs import Moments, SampleToken, Started, StepResult
from decoder.prompt_logprobs import MAX_ENTRIES
from decoder.sampler import Logprobs
from decoder.sequence import RequestNumber
from decoder.service import JOINED_BYTES, Backend, DecodeService, GatewayStream
from decoder.validation import ServedModel
from tessera.decode.v1 import decode_pb2, decode_pb2_grpc
from tessera.inference.v1 import inference_pb2
from tests.decoder.rig import EOS, VOCAB, Node, greedy_oracle, prompt_of

SECRET = "internal_secret"


class Gateway:
    """The client's side of one stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = decode_pb2_grpc.DecodeServiceStub(channel).Connect()
        self.steps: list[decode_pb2.StepOutput] = []
        self.welcome: decode_pb2.Welcome | None = None

    async def send(self, **message: Any) -> None:
        await self.call.write(decode_pb2.ConnectRequest(**message))

    async def submit(self, number: int, prompt: list[int], **changes: Any) -> None:
        submit = decode_pb2.Submit(
            request=number, request_id=f"request-{number}", grant=b"g", tokens=pack_tokens(prompt)
        )
        submit.sampling.temperature = 0
        submit.stopping.max_tokens = 8
        submit.stopping.ignore_eos = True
        for path, value in changes.items():
            section, name = path.split("__")
            setattr(getattr(submit, section), name, value)
        await self.send(submit=submit)

    async def read(self) -> decode_pb2.ConnectResponse:
        response = await asyncio.wait_for(self.call.read(), 10)
        if response is not grpc.aio.EOF and response.HasField("step"):
            self.steps.append(response.step)
        return response

    async def until(self, done: Callable[[], Any]) -> None:
        while not done():
            assert await self.read() is not grpc.aio.EOF

    def tokens(self, number: int, index: int = 0) -> list[int]:
        return [
            token
            for step in self.steps
            for item in step.tokens
            if (item.request, item.index) == (number, index)
            for token in item.token_ids
        ]

    def ended(self, number: int) -> decode_pb2.RequestEnded | None:
        return next((item for step in self.steps for item in step.ended if item.request == number), None)

    def failed(self, number: int) -> decode_pb2.RequestFailed | None:
        return next((item for step in self.steps for item in step.failed if item.request == number), None)


class Rig:
    """A served engine in its thread."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.node = Node(**options)
        self.target = unix_target(folder / "d.sock")
        self.service = DecodeService()
        self.server = make_server([ErrorInterceptor(), BearerInterceptor(SECRET)])
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self.service, self.server)
        welcome = decode_pb2.Welcome(model=inference_pb2.Model(name="recall", vocab_size=VOCAB), max_batch=32)
        model = ServedModel(VOCAB, 256, frozenset({EOS}))
        self.backend = Backend(self.node.engine, model, welcome)

    async def wait_idle(self) -> None:
        deadline = asyncio.get_running_loop().time() + 10
        while self.node.engine.num_requests or self.node.manager.snapshot().leases:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[Rig, grpc.aio.Channel]]:
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        rig = Rig(Path(folder), **options)
        rig.service.backend = rig.backend
        bind(rig.server, rig.target)
        await rig.server.start()
        rig.node.engine.start()
        try:
            async with open_channel(rig.target, SECRET) as channel:
                yield rig, channel
        finally:
            rig.node.engine.stop()
            assert await asyncio.to_thread(rig.node.engine.join, 10)
            await rig.server.stop(0)


async def connected(channel: grpc.aio.Channel) -> Gateway:
    gateway = Gateway(channel)
    response = await gateway.read()
    assert response.WhichOneof("message") == "welcome", "the welcome comes first"
    gateway.welcome = response.welcome
    return gateway


def run(body: Callable[[Rig, grpc.aio.Channel], Awaitable[None]], **options: Any) -> None:
    async def inside() -> None:
        async with serving(**options) as (rig, channel):
            await body(rig, channel)

    asyncio.run(inside())


def test_requests_on_one_stream_get_their_tokens_and_one_end() -> None:
    """Started, tokens, finished and ended come in order for each of several requests on one stream."""

    async def body(rig: Rig, channel: grpc.aio.Channel) -> None:
        gateway = await connected(channel)
        assert gateway.welcome is not None and gateway.welcome.model.name == "recall"
        for number in (1, 2, 3):
            await gateway.submit(number, prompt_of(5 + number), output__logprobs=2)
        await gateway.until(lambda: all(gateway.ended(number) for number in (1, 2, 3)))
        for number in (1, 2, 3):
            assert gateway.tokens(number) == greedy_oracle(prompt_of(5 + number), 8)
            ended = gateway.ended(number)
            assert ended is not None and ended.completion_tokens == 8
            finished = [item for step in gateway.steps for item in step.finished if item.request == number]
            assert [item.reason for item in finished] == [inference_pb2.FINISH_REASON_LENGTH]
            started = [item for step in gateway.steps for item in step.started if item.request == number]
            assert len(started) == 1 and started[0].queue_nanoseconds > 0
            moments = [value for _, value in started[0].moments.ListFields()]
            assert len(moments) == 6 and moments == sorted(moments)  # the fields are in the order of the way
        item = gateway.steps[0].tokens[0]
        assert len(item.logprobs[0].top) == 2 and item.logprobs[0].token_id == item.token_ids[0]

    run(body)


def test_a_step_costs_one_message_however_many_sequences_run() -> None:
    """Sixteen samples of one request share the messages: about one for each step, not one for each token."""

    async def body(rig: Rig, channel: grpc.aio.Channel) -> None:
        gateway = await connected(channel)
        await gateway.submit(1, prompt_of(5), sampling__temperature=1.0, sampling__seed=3, sampling__n=16)
        await gateway.until(lambda: gateway.ended(1))
        assert sum(len(item.token_ids) for step in gateway.steps for item in step.tokens) == 16 * 8
        assert len(gateway.steps) <= len(rig.node.model.batches)

    run(body)


def test_a_bad_submission_fails_alone() -> None:
    """The bad one gets its code and field; the good one beside it all its tokens."""

    async def body(rig: Rig, channel: grpc.aio.Channel) -> None:
        gateway = await connected(channel)
        await gateway.submit(1, prompt_of(6))
        await gateway.submit(2, [VOCAB + 5])
        await gateway.submit(3, prompt_of(6), sampling__temperature=float("nan"))
        await gateway.submit(4, prompt_of(200), stopping__max_tokens=4)
        await gateway.until(lambda: gateway.ended(1) and all(gateway.failed(number) for number in (2, 3, 4)))
        assert gateway.tokens(1) == greedy_oracle(prompt_of(6), 8)
        second, third, fourth = (gateway.failed(number) for number in (2, 3, 4))
        assert second is not None and (second.code, second.metadata["field"]) == (3, "tokens")
        assert third is not None and third.metadata["field"] == "sampling.temperature"
        assert fourth is not None and (fourth.code, fourth.reason) == (8, "EXCEEDS_POOL")
        assert (fourth.metadata["needed"], fourth.metadata["usable"]) == ("51", "32")

    run(body, num_blocks=32)


def test_a_full_queue_says_when_to_come_back() -> None:
    """The request that finds the queue full gets RESOURCE_EXHAUSTED with a hint in nanoseconds."""

    async def body(rig: Rig, channel: grpc.aio.Channel) -> None:
        gateway = await connected(channel)
        for number in range(1, 6):
            await gateway.submit(number, prompt_of(6, seed=number), stopping__max_tokens=200)
        await gateway.until(lambda: gateway.failed(5))
        failure = gateway.failed(5)
        assert failure is not None and (failure.reason, failure.metadata["subject"]) == ("QUEUE_FULL", "queue")
        assert failure.retry_after_nanoseconds >= 10**9

    run(body, max_batch=1, max_queue=2, step_delay_seconds=0.01)


def test_cancel_ends_a_request_and_consumed_opens_its_window() -> None:
    """A paused sample goes on when it is read; a cancelled one ends; unknown numbers are ignored."""

    async def body(rig: Rig, channel: grpc.aio.Channel) -> None:
        gateway = await connected(channel)
        await gateway.submit(1, prompt_of(5), stopping__max_tokens=12)
        await gateway.submit(2, prompt_of(6), stopping__max_tokens=200)
        await gateway.until(lambda: len(gateway.tokens(1)) == 4 and len(gateway.tokens(2)) == 4)
        await gateway.send(cancel=decode_pb2.Cancel(request=2))
        await gateway.send(cancel=decode_pb2.Cancel(request=99, index=3))
        await gateway.send(consumed=decode_pb2.Consumed(request=98, tokens=3))
        await gateway.until(lambda: gateway.ended(2))
        await gateway.send(consumed=decode_pb2.Consumed(request=1, tokens=12))
        await gateway.until(lambda: gateway.ended(1))
        assert gateway.tokens(1) == greedy_oracle(prompt_of(5), 12)
        assert len(gateway.tokens(2)) == 4
        await rig.wait_idle()

    run(body, window_tokens=3)


@pytest.mark.parametrize("how", ["cancel", "half_close", "channel"])
def test_the_end_of_a_stream_ends_its_requests(how: str) -> None:
    """However the gateway goes, its requests leave nothing behind, and another gateway's go on."""

    async def body(rig: Rig, channel: grpc.aio.Channel) -> None:
        other = await connected(channel)
        async with open_channel(rig.target, SECRET) as second:
            gateway = await connected(second)
            await gateway.submit(1, prompt_of(6), stopping__max_tokens=200)
            await other.submit(1, prompt_of(7), stopping__max_tokens=20)
            await gateway.until(lambda: gateway.tokens(1))
            if how == "cancel":
                gateway.call.cancel()
            elif how == "half_close":
                await gateway.call.done_writing()
        await other.until(lambda: other.ended(1))
        assert other.tokens(1) == greedy_oracle(prompt_of(7), 20)
        await rig.wait_idle()
        assert not rig.node.manager.check_integrity()

    run(body, step_delay_seconds=0.002)


def test_a_message_that_is_not_set_ends_the_stream() -> None:
    """A frame without a message breaks the protocol: INVALID_ARGUMENT for that stream."""

    async def body(rig: Rig, channel: grpc.aio.Channel) -> None:
        gateway = await connected(channel)
        await gateway.send()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.until(lambda: False)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(body)


def test_nobody_comes_in_without_the_internal_credential() -> None:
    """No credential, or another one, is refused; with the right one the same call is served."""

    async def body(rig: Rig, channel: grpc.aio.Channel) -> None:
        for secret in (None, "internal_wrong"):
            async with open_channel(rig.target, secret) as stranger:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await Gateway(stranger).read()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await connected(channel)

    run(body)


def test_before_the_model_is_loaded_it_is_unavailable() -> None:
    """A stream that comes too early is told so, and may come again."""

    async def body(rig: Rig, channel: grpc.aio.Channel) -> None:
        rig.service.backend = None
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Gateway(channel).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        rig.service.backend = rig.backend
        await connected(channel)

    run(body)


def test_results_that_wait_are_joined_in_order_and_bounded() -> None:
    """A slow stream gets what has come in one message, in order; past the bound the stream ends."""

    async def inside() -> None:
        stream = GatewayStream(asyncio.get_running_loop(), limit=4)
        for token in range(4):
            stream.deliver(StepResult(tokens=[SampleToken(RequestNumber(1), 0, token, None)]))
        output = await stream.next()
        assert output is not None
        assert [item.token_ids[0] for item in output.tokens] == [0, 1, 2, 3]
        for _ in range(5):
            stream.deliver(StepResult())
        with pytest.raises(ResourceExhausted):
            await stream.next()
        closed = GatewayStream(asyncio.get_running_loop())
        closed.close()
        assert await closed.next() is None

    asyncio.run(inside())


def test_log_probabilities_of_many_prompts_are_told_in_several_messages() -> None:
    """As much as thirty-two prompts may have, started in one step, never passes a message's limit; the order stays."""
    tokens = MAX_ENTRIES // 21
    values = (Logprobs(-1.5, tuple((2**17 + place, -2.5) for place in range(20))),) * (tokens - 1)
    prompt = np.full(tokens, 2**17, np.int32)

    async def body() -> None:
        stream = GatewayStream(asyncio.get_running_loop())
        starts = [Started(RequestNumber(n), 0, Moments(0), tokens, (), values, prompt) for n in range(12)]
        gains = [SampleToken(RequestNumber(n), 0, 5, None) for n in range(12)]
        stream.deliver(StepResult(started=starts, tokens=gains))
        stream.deliver(StepResult(tokens=gains))
        stream.close()
        started: list[int] = []
        told: list[int] = []
        largest = 0
        while (output := await stream.next()) is not None:
            started += [item.request for item in output.started]
            told += [item.request for item in output.tokens]
            assert set(told) <= set(started)
            largest = max(largest, output.ByteSize())
        assert started == list(range(12))
        assert told == [*range(12), *range(12)]
        assert JOINED_BYTES // 2 < largest < JOINED_BYTES + 2**20 < MAX_MESSAGE_BYTES

    asyncio.run(body())
