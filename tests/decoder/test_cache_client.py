"""The session over real sockets with a real daemon: attach, lose, attach anew, and every way an answer can be wrong."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.errors import Aborted, FailedPrecondition, Internal, TesseraError, Unauthenticated, Unavailable
from common.faults import Faults
from common.layout import KvDtype, KvLayout
from common.rpc import unix_target
from decoder.cache_api import AbortAsked, Acquire, Acquired, Attached, Event, Lost
from decoder.cache_client import GrpcCacheClient
from decoder.cache_messages import Pending, event_of, failure_error, request_of
from decoder.engine import Engine, EngineOptions
from decoder.holdings import Held, Holdings
from decoder.resume_messages import SessionProof, resume_message
from decoder.sequence import LeaseId, Request, RequestNumber, SamplingParams, SequenceId, StoppingParams
from decoder.session_target import SessionTarget
from tessera.admin.v1 import admin_pb2
from tessera.cache.v1 import cache_pb2
from tessera.common.v1 import common_pb2
from tests.cachemgr.daemon_rig import Rig, running
from tests.decoder.rig import RecallModel, RecordingSink, greedy_oracle, prompt_of, solo
from tests.decoder.rig import request as plain_request

KEY = common_pb2.CacheKey(weights_digest=b"w" * 32, kv_dtype="float32", kv_quantization="none", layout_version=1)


async def until(probe: Callable[[], Any], what: str, seconds: float = 10.0) -> Any:
    deadline = asyncio.get_running_loop().time() + seconds
    while not (answer := probe()):
        assert asyncio.get_running_loop().time() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.005)
    return answer


def target_of(rig: Rig, **changes: Any) -> SessionTarget:
    values = {
        "target": unix_target(rig.paths.cachemgr_socket),
        "secret": rig.paths.internal_key.read_text().strip(),
        "arena_socket": rig.paths.arena_socket,
        "layout": RecallModel().layout,
        "key": KEY,
        "decoder_name": "decoder-0",
    }
    return SessionTarget(**{**values, **changes})


class Decoder:
    """An engine in its thread, its client on this loop."""

    def __init__(self, rig: Rig, **options: Any) -> None:
        self.model = options.pop("model", None) or RecallModel()
        changes = {name: options.pop(name) for name in ("target",) if name in options}
        self.client = GrpcCacheClient(target_of(rig, layout=self.model.layout, **changes), **options)
        self.engine = Engine(self.model, None, self.client, EngineOptions(chunk_tokens=16))
        self.sink = RecordingSink()
        self.engine.start()
        self.running = asyncio.create_task(self.client.run())

    async def close(self) -> None:
        self.engine.stop()
        assert await asyncio.to_thread(self.engine.join, 10)
        await self.client.close()
        await asyncio.wait_for(self.running, 10)

    async def submit(self, rig: Rig, number: int, prompt: list[int], **options: Any) -> None:
        await self.take(rig, plain_request(number, prompt, **options))

    async def take(self, rig: Rig, item: Request) -> None:
        grant = await rig.grant()
        fields = {name: getattr(item, name) for name in Request.__dataclass_fields__}
        self.engine.submit(Request(**{**fields, "grant": grant}), self.sink)

    async def done(self, number: int) -> None:
        await until(lambda: self.sink.done(number), f"request {number} has ended")


@contextlib.asynccontextmanager
async def decoding(rig: Rig, **options: Any) -> AsyncIterator[Decoder]:
    decoder = Decoder(rig, **options)
    try:
        await until(lambda: decoder.engine.is_serving, "serving")
        yield decoder
    finally:
        await decoder.close()


def run(body: Callable[[Rig], Awaitable[None]], **options: Any) -> None:
    async def inside() -> None:
        async with running(**{"pool_blocks": 64, **options}) as rig:
            await body(rig)

    asyncio.run(inside())


def test_each_attach_of_a_process_is_sent_after_the_ones_before() -> None:
    """By the number that it carries, whichever client of the process sends it: so the daemon knows their order."""
    targets = [SessionTarget("unix:a", "", Path("b"), RecallModel().layout, KEY, name) for name in ("d0", "d1", "d0")]
    sent = [target.attach_message().sent_ns for target in targets for _ in range(3)]
    assert sent[0] > 0
    assert sent == sorted(set(sent))


def test_requests_over_the_wire_equal_their_solo_runs_and_leave_nothing() -> None:
    """Prefix hits by copy, samples by fork and growth by credit, all through the daemon's sockets."""

    async def body(rig: Rig) -> None:
        async with decoding(rig) as decoder:
            await decoder.submit(rig, 1, prompt_of(18), max_tokens=30)
            await decoder.done(1)
            await decoder.submit(rig, 2, prompt_of(18), max_tokens=30)
            await decoder.submit(rig, 3, prompt_of(18), max_tokens=9, num_samples=4, temperature=1.0, seed=7)
            await decoder.done(2)
            await decoder.done(3)
            assert decoder.sink.tokens[1, 0] == decoder.sink.tokens[2, 0] == greedy_oracle(prompt_of(18), 30)
            assert (decoder.sink.cached[1], decoder.sink.cached[2]) == (0, 17)
            expected = solo(plain_request(3, prompt_of(18), max_tokens=9, num_samples=4, temperature=1.0, seed=7))
            assert {sample: decoder.sink.tokens[3, sample] for sample in range(4)} == expected
            for _ in range(400):
                if await rig.is_quiet():
                    break
                await asyncio.sleep(0.005)
            assert await rig.is_quiet()
            snapshot = await rig.snapshot()
            assert (snapshot.sessions, snapshot.generated_tokens) == (1, 30 + 30 + 36)
        snapshot = await rig.snapshot()
        assert (snapshot.leases, snapshot.active_blocks) == (0, 0)

    run(body)


def test_a_pool_that_is_too_small_preempts_over_the_wire() -> None:
    """Growth beyond the pool ends in preemption and the same tokens, with answers that come when they come."""

    async def body(rig: Rig) -> None:
        async with decoding(rig) as decoder:
            for number in range(5):
                await decoder.submit(rig, number, prompt_of(8, seed=number), max_tokens=30)
            for number in range(5):
                await decoder.done(number)
                assert decoder.sink.tokens[number, 0] == greedy_oracle(prompt_of(8, seed=number), 30)
            assert (await rig.snapshot()).preemptions > 0

    run(body, pool_blocks=14)


def test_a_lost_daemon_fails_requests_and_a_new_one_is_attached() -> None:
    """When the daemon goes serving ends, and requests end UNAVAILABLE once their leases have run out; a new daemon,
    which has other memory, is attached anew."""

    async def inside() -> None:
        with tempfile.TemporaryDirectory(prefix="ts-") as folder:
            state = Path(folder)
            async with contextlib.AsyncExitStack() as stack:
                async with running(state_dir=state, pool_blocks=64, lease_seconds=1.0, grace_seconds=0.5) as rig:
                    decoder = Decoder(rig)
                    stack.push_async_callback(decoder.close)
                    await until(lambda: decoder.engine.is_serving, "serving")
                    decoder.model.on_forward = lambda batch: time.sleep(0.01)
                    await decoder.submit(rig, 1, prompt_of(6), max_tokens=200)
                    await until(lambda: (1, 0) in decoder.sink.tokens, "a first token")
                await until(lambda: not decoder.engine.is_serving, "not serving", 1.0)
                await decoder.done(1)
                assert isinstance(decoder.sink.failed[1], Unavailable)
                decoder.engine.submit(plain_request(2, prompt_of(6)), decoder.sink)
                await decoder.done(2)
                assert isinstance(decoder.sink.failed[2], Unavailable)
                async with running(state_dir=state, pool_blocks=32) as rig:
                    await until(lambda: decoder.engine.is_serving, "serving again")
                    decoder.model.on_forward = lambda batch: None
                    await decoder.submit(rig, 3, prompt_of(6))
                    await decoder.done(3)
                    assert decoder.sink.tokens[3, 0] == greedy_oracle(prompt_of(6), 8)
                    assert decoder.sink.cached[3] == 0

    asyncio.run(inside())


@pytest.mark.parametrize("operation", ["acquire", "report", "fork"])
def test_an_operation_that_is_lost_ends_the_session_and_a_new_one_serves(operation: str) -> None:
    """A missing answer is seen by the next one or by the clock; requests end, nothing hangs, and work goes on."""

    async def body(rig: Rig) -> None:
        async with decoding(rig, answer_seconds=0.4) as decoder:
            await decoder.submit(rig, 1, prompt_of(9), max_tokens=30, num_samples=2, temperature=1.0)
            await decoder.done(1)
            assert isinstance(decoder.sink.failed.get(1), Unavailable | None)
            await until(lambda: decoder.engine.is_serving, "serving again")
            await decoder.submit(rig, 2, prompt_of(9))
            await decoder.done(2)
            assert decoder.sink.tokens.get((2, 0)) == greedy_oracle(prompt_of(9), 8), decoder.sink.failed
            for _ in range(400):
                if await rig.is_quiet():
                    break
                await asyncio.sleep(0.005)
            assert await rig.is_quiet()

    run(body, faults=Faults(drop_message={operation: 1}))


def test_an_allocation_that_fails_once_is_tried_again() -> None:
    """A pool that says full although nothing runs is asked again by itself: the request is served a moment later."""

    async def body(rig: Rig) -> None:
        async with decoding(rig) as decoder:
            await decoder.submit(rig, 1, prompt_of(9))
            await decoder.done(1)
            assert decoder.sink.tokens.get((1, 0)) == greedy_oracle(prompt_of(9), 8), decoder.sink.failed

    run(body, faults=Faults(fail_allocation=1))


def test_the_operator_ends_a_request_through_the_daemon() -> None:
    """AbortRequest finds a running request in the decoder and ends it with ABORTED; an unknown one is NOT_FOUND."""

    async def body(rig: Rig) -> None:
        async with decoding(rig) as decoder:
            decoder.model.on_forward = lambda batch: time.sleep(0.005)
            await decoder.submit(rig, 1, prompt_of(6), max_tokens=200)
            await until(lambda: (1, 0) in decoder.sink.tokens, "a first token")
            await rig.admin.AbortRequest(admin_pb2.AbortRequestRequest(request_id="request-1"))
            told = len(decoder.sink.tokens[1, 0])
            await decoder.done(1)
            assert isinstance(decoder.sink.failed[1], Aborted)
            assert len(decoder.sink.tokens[1, 0]) == told < 200, "no token after the answer"

    run(body)


def test_a_decoder_that_does_not_fit_is_told_why_and_ends() -> None:
    """Another layout than the daemon's, or a wrong credential, ends `run` with the reason and attaches nothing."""

    async def body(rig: Rig) -> None:
        async with decoding(rig):
            other = KvLayout(2, 1, 8, 4, KvDtype.FLOAT32)
            wrong = GrpcCacheClient(target_of(rig, layout=other, decoder_name="decoder-1"))
            with pytest.raises(FailedPrecondition):
                await asyncio.wait_for(wrong.run(), 10)
            stranger = GrpcCacheClient(target_of(rig, secret="internal_wrong", decoder_name="decoder-1"))
            with pytest.raises(Unauthenticated):
                await asyncio.wait_for(stranger.run(), 10)
            assert (await rig.snapshot()).sessions == 1

    run(body)


def test_commands_of_another_session_are_dropped() -> None:
    """What was meant for a lost session never reaches the next; what is meant for this one does."""

    async def body(rig: Rig) -> None:
        events: list[Event] = []
        client = GrpcCacheClient(target_of(rig))
        client.start(events.append)
        task = asyncio.create_task(client.run())
        attached = await until(lambda: next((e for e in events if isinstance(e, Attached)), None), "attached")
        grant = await rig.grant()
        for sequence_id, session in ((1, attached.session + 1), (2, attached.session)):
            client.send(
                session, Acquire(SequenceId(sequence_id), grant, b"\x05\x00\x00\x00", "r", 0, False, False, False, 50)
            )
        await until(lambda: any(isinstance(e, Acquired) for e in events), "an answer")
        assert [e.sequence_id for e in events if isinstance(e, Acquired)] == [SequenceId(2)]
        client.abandon(attached.session)
        await until(lambda: any(isinstance(e, Lost) for e in events), "lost")
        assert sum(isinstance(e, Attached) for e in events) == 1, "not before resume"
        client.resume()
        await until(lambda: sum(isinstance(e, Attached) for e in events) == 2, "attached anew")
        await client.close()
        await asyncio.wait_for(task, 10)

    run(body)


def test_a_daemon_that_is_not_there_is_waited_for() -> None:
    """Without a daemon `run` keeps trying, posts nothing, and ends when it is closed."""

    async def inside() -> None:
        with tempfile.TemporaryDirectory(prefix="ts-") as folder:
            events: list[Event] = []
            target = SessionTarget(
                unix_target(Path(folder) / "none.sock"), "x", Path(folder) / "a.sock", RecallModel().layout, KEY, "d"
            )
            client = GrpcCacheClient(target)
            client.start(events.append)
            attempts: list[str] = []
            client._log = SimpleNamespace(info=lambda event, **_: attempts.append(event))
            task = asyncio.create_task(client.run())
            await until(lambda: attempts.count("attach_failed") >= 3, "three attempts")
            assert not task.done() and not events
            await client.close()
            await asyncio.wait_for(task, 10)

    asyncio.run(inside())


# ---- the conversion alone


def test_answers_of_another_kind_are_refused() -> None:
    """An answer that does not belong to its operation is a defect and not silently passed on."""
    response = cache_pb2.SessionResponse(sequence=3, fork=cache_pb2.ForkResponse())
    with pytest.raises(Internal):
        event_of(response, Pending(Acquire, SequenceId(1)))


def test_failures_keep_their_numbers() -> None:
    """A full pool arrives as the typed error with needed and usable."""
    failure = cache_pb2.Failure(
        code=8, reason="POOL_FULL", message="full", metadata={"subject": "blocks", "needed": "9", "usable": "4"}
    )
    error: TesseraError = failure_error(failure)
    assert (error.reason, getattr(error, "needed", None), getattr(error, "usable", None)) == ("POOL_FULL", 9, 4)


def test_pushes_become_events() -> None:
    """An abort and the credit of a message are told; an empty push is nothing."""
    push = cache_pb2.SessionResponse(abort=cache_pb2.AbortPush(abort_id=4, request_id="r"))
    assert event_of(push, None) == [AbortAsked(4, "r")]
    granted = event_of(cache_pb2.SessionResponse(credit=np.array([3, 4], "<i4").tobytes()), None)
    assert [event.blocks.tolist() for event in granted] == [[3, 4]]  # type: ignore[union-attr]
    assert event_of(cache_pb2.SessionResponse(), None) == []


def test_requests_never_show_grants_or_prompts() -> None:
    """What goes into logs by accident shows neither the grant nor the tokens."""
    item = Request(RequestNumber(1), "r", b"GRANT", np.array([77], np.int32), SamplingParams(), StoppingParams(1))
    command = Acquire(SequenceId(1), b"GRANT", b"TOKENS", "r", 0, False, False, False, 50)
    assert "GRANT" not in repr(item) + repr(command)
    assert "TOKENS" not in repr(command) and "77" not in repr(item)


def test_an_adapter_is_part_of_the_key_of_its_requests_alone() -> None:
    """An acquire, and what is held when a stream breaks, carry the digest of their adapter and all of the model's key;
    those without one the model's key as it is."""
    key = common_pb2.CacheKey(weights_digest=b"w", tokenizer_digest=b"t", layout_version=1)
    held = Held(LeaseId(1), b"g", b"", np.zeros(1, np.int32), 0, None, "r", 0, False, 50, 0.0)
    command = Acquire(SequenceId(1), b"g", b"", "r", 0, False, False, False, 50)
    memory: Any = SimpleNamespace(read_nonce=lambda: b"n")
    for digest in (b"", b"adapter"):
        wanted = common_pb2.CacheKey(
            weights_digest=b"w", tokenizer_digest=b"t", layout_version=1, adapter_digest=digest
        )
        acquire = request_of(replace(command, adapter_digest=digest), 1, 0, key).acquire
        holdings = Holdings((replace(held, adapter_digest=digest),), np.zeros(0, np.int32))
        resumed = resume_message(SessionProof(1, 1, b"p", memory), holdings, key)
        assert acquire.key == resumed.sequences[0].key == wanted
    assert not key.adapter_digest
