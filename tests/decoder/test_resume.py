"""A broken session stream in mid-work, over real sockets with a real daemon: nothing that runs notices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from cachemgr.kept import expire
from common.errors import Unavailable
from common.rpc import unix_target
from decoder.batch import StepBatch
from decoder.cache_api import Attached, Away, Event, Lost, Resumed
from decoder.cache_client import GrpcCacheClient
from decoder.holdings import Holdings
from decoder.sequence import SpeculationMode
from tessera.admin.v1 import admin_pb2
from tests.cachemgr.daemon_rig import Rig, attach_request, running
from tests.decoder.cut_proxy import CutProxy
from tests.decoder.rig import Node, RecallModel, greedy_oracle, prompt_of, solo
from tests.decoder.rig import request as plain_request
from tests.decoder.test_cache_client import Decoder, target_of, until
from tests.decoder.test_engine_beams import beamed, expected
from tests.decoder.test_engine_speculation import LOOKUP, Teller

STEP_SECONDS = 0.004
LOAD_SECONDS = 60.0


@contextlib.asynccontextmanager
async def behind_proxy(rig: Rig, **options: object) -> AsyncIterator[tuple[Decoder, CutProxy]]:
    """A decoder whose stream to the daemon can be cut; its steps take a moment."""
    async with CutProxy(rig.paths.state_dir / "p.sock", rig.paths.cachemgr_socket) as proxy:
        decoder = Decoder(rig, target=unix_target(proxy.path), **options)
        decoder.model.on_forward = lambda batch: time.sleep(STEP_SECONDS)
        try:
            await until(lambda: decoder.engine.is_serving, "serving")
            yield decoder, proxy
        finally:
            await decoder.close()


async def quiet(rig: Rig) -> None:
    deadline = asyncio.get_running_loop().time() + 10
    while not await rig.is_quiet():
        assert asyncio.get_running_loop().time() < deadline, await rig.snapshot()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("seed", "group_window"), [*((seed, 0) for seed in range(6)), (6, 9), (7, 9), (8, 17)])
def test_streams_that_break_under_load_change_nothing(seed: int, group_window: int) -> None:
    """Cut again and again at random moments, with reports, answers or nothing lost: every request ends with the tokens
    of its solo run, none fails, and afterwards nothing is held. With layer groups the window blocks that are still read
    are presented too, and stay."""
    dice = random.Random(seed)
    requests = []
    for number in range(24):
        prompt = prompt_of(dice.choice((3, 8, 9, 17, 30)), seed=dice.randrange(6))
        samples = dice.choice((1, 1, 1, 3))
        sampling = {"num_samples": samples, "temperature": 1.0, "seed": number} if samples > 1 else {}
        speculation = LOOKUP if number % 3 == 0 else None
        requests.append(
            plain_request(number, prompt, max_tokens=dice.randrange(5, 60), speculation=speculation, **sampling)
        )
    answers = {request.number: solo(request) for request in requests}
    for number in range(24, 28):
        requests.append(beamed(number, prompt_of(9, seed=number), 3, max_tokens=9))

    async def inside() -> None:
        blocks, model = dice.choice((40, 200)), RecallModel(group_window=group_window)
        async with running(pool_blocks=blocks) as rig, behind_proxy(rig, model=model) as (decoder, proxy):
            session = (await rig.snapshot()).sessions
            teller = Teller(answers, 0.4, seed)
            decoder.engine._loop._speculator._drafters[SpeculationMode.PROMPT_LOOKUP] = teller
            for request in requests:
                await decoder.take(rig, request)
            cuts, deadline = 0, time.monotonic() + LOAD_SECONDS
            while not all(decoder.sink.done(request.number) for request in requests):
                assert time.monotonic() < deadline, "the requests do not come to their ends"
                way = dice.choice(("up", "down", "both", "none"))
                for direction in ("up", "down"):
                    if way in (direction, "both"):
                        proxy.hold(direction)
                await asyncio.sleep(dice.uniform(0, 0.03))
                proxy.cut()
                cuts += 1
                await asyncio.sleep(dice.uniform(0, 0.1))
            assert cuts > 3 and session == 1
            assert not decoder.sink.failed, decoder.sink.failed
            for request in requests:
                told = [decoder.sink.tokens[request.number, s] for s in range(request.sampling.num_samples)]
                if request.beam is None:
                    assert dict(enumerate(told)) == solo(request)
                else:
                    assert [tuple(tokens) for tokens in told] == [tokens for tokens, _ in expected(request)]
            await quiet(rig)
            assert (await rig.snapshot()).sessions == 1

    asyncio.run(inside())


def test_what_is_held_is_gone_on_with_while_the_daemon_cannot_be_reached() -> None:
    """Nothing passes for a while: tokens keep coming from the credit, the health says no; then the session goes on."""

    async def inside() -> None:
        async with running(pool_blocks=200) as rig, behind_proxy(rig) as (decoder, proxy):
            await decoder.submit(rig, 1, prompt_of(9), max_tokens=200)
            await until(lambda: len(decoder.sink.tokens.get((1, 0), ())) > 8, "some tokens")
            proxy.refuse = True
            proxy.cut()
            await until(lambda: not decoder.engine.is_serving, "not serving", 1.0)
            told = len(decoder.sink.tokens[1, 0])
            await until(lambda: len(decoder.sink.tokens[1, 0]) > told, "tokens without a daemon")
            await decoder.submit(rig, 2, prompt_of(9), max_tokens=3)
            proxy.refuse = False
            await decoder.done(1)
            await decoder.done(2)
            assert decoder.sink.tokens[1, 0] == greedy_oracle(prompt_of(9), 200)
            assert decoder.sink.tokens[2, 0] == greedy_oracle(prompt_of(9), 3)
            await quiet(rig)

    asyncio.run(inside())


def test_a_decoder_that_cannot_come_back_in_time_gives_up() -> None:
    """Once its lease has run out by its own clock it gives no token out; once the grace is over, requests end."""

    async def inside() -> None:
        options = {"pool_blocks": 64, "lease_seconds": 0.6, "grace_seconds": 0.4}
        async with running(**options) as rig, behind_proxy(rig) as (decoder, proxy):
            await decoder.submit(rig, 1, prompt_of(6), max_tokens=4000)
            await until(lambda: (1, 0) in decoder.sink.tokens, "a first token")
            proxy.refuse = True
            proxy.cut()
            cut = time.monotonic()
            await decoder.done(1)
            assert isinstance(decoder.sink.failed[1], Unavailable)
            assert time.monotonic() - cut >= 0.5, "not before its time"
            given = decoder.sink.tokens[1, 0]
            assert given == greedy_oracle(prompt_of(6), len(given))
            proxy.refuse = False
            await until(lambda: decoder.engine.is_serving, "serving again")
            await decoder.submit(rig, 2, prompt_of(6), max_tokens=5)
            await decoder.done(2)
            assert decoder.sink.tokens[2, 0] == greedy_oracle(prompt_of(6), 5)
            await quiet(rig)

    asyncio.run(inside())


def test_silence_is_filled_with_heartbeats() -> None:
    """A decoder with nothing to say keeps its session for many times the lease; without heartbeats it is over."""

    async def inside() -> None:
        async with running(lease_seconds=0.5, pool_blocks=64) as rig, behind_proxy(rig) as (decoder, _):
            mute = await rig.session()
            await mute.ask(attach=attach_request(name="mute", num_layers=1))
            assert (await rig.snapshot()).sessions == 2
            ended = time.monotonic() + 4 * 0.5
            while time.monotonic() < ended:
                assert decoder.engine.is_serving
                await asyncio.sleep(0.02)
            sessions = (await rig.admin.ListSessions(admin_pb2.ListSessionsRequest())).sessions
            assert [session.decoder_name for session in sessions] == ["decoder-0"], "positive control: mute is over"

    asyncio.run(inside())


def test_tokens_of_a_step_in_which_the_lease_ran_out_are_not_given_out() -> None:
    """The engine finds itself late after a step: what it computed is kept back until the daemon says that the lease is
    alive, and then computed again."""

    async def inside() -> None:
        options = {"pool_blocks": 64, "lease_seconds": 0.5, "grace_seconds": 30.0}
        async with running(**options) as rig, behind_proxy(rig) as (decoder, proxy):
            await decoder.submit(rig, 1, prompt_of(6), max_tokens=60)
            await until(lambda: (1, 0) in decoder.sink.tokens, "a first token")
            proxy.hold("down")
            await until(lambda: decoder.client.is_fenced(1), "the lease has run out")
            late = len(decoder.model.batches)
            told = len(decoder.sink.tokens[1, 0])
            await until(lambda: len(decoder.model.batches) <= late + 1, "no more steps")
            assert len(decoder.sink.tokens[1, 0]) <= told + 1
            proxy.cut()
            await decoder.done(1)
            assert decoder.sink.tokens[1, 0] == greedy_oracle(prompt_of(6), 60)
            await quiet(rig)

    asyncio.run(inside())


def test_a_step_that_ended_after_the_lease_is_not_committed_and_runs_again() -> None:
    """The lease runs out while the model computes: no token of that step is told, none is computed until it is alive
    again, and then the same tokens come, once."""
    node = Node()
    fenced = False
    node.client.is_fenced = lambda session: fenced  # type: ignore[method-assign]

    def run_out(batch: StepBatch) -> None:
        nonlocal fenced
        fenced = True

    node.submit(plain_request(1, prompt_of(6), max_tokens=12))
    node.step(5)
    told = len(node.sink.tokens[1, 0])
    node.model.on_forward = run_out
    node.step(3)
    computed = len(node.model.batches)
    assert len(node.sink.tokens[1, 0]) == told
    node.step(3)
    assert len(node.model.batches) == computed, "nothing is computed meanwhile"
    node.model.on_forward = lambda batch: None
    fenced = False
    node.finish(1)
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt_of(6), 12)
    assert told < 12, "positive control: there was something to tell"
    node.assert_quiet()


@pytest.mark.parametrize("seed", range(4))
def test_kept_conversations_go_on_whatever_breaks_meanwhile(seed: int) -> None:
    """Conversations of three turns by handle, under cuts: every turn ends and equals the solo run of the whole;
    a handle that was lost with an answer costs no more than sending everything again."""
    dice = random.Random(seed)

    async def inside() -> None:
        async with running(pool_blocks=200) as rig, behind_proxy(rig) as (decoder, proxy):
            numbers = itertools.count()
            kept = lost = 0

            async def converse(talk: int) -> None:
                nonlocal kept, lost
                said: list[int] = []
                handle = b""
                for turn in range(3):
                    number, new = next(numbers), prompt_of(dice.randrange(1, 12), seed=100 * talk + turn)
                    item = plain_request(number, new if handle else [*said, *new], max_tokens=dice.randrange(2, 40))
                    item = replace(item, keep_seconds=600.0, session_handle=handle)
                    await decoder.take(rig, item)
                    await decoder.done(number)
                    assert number not in decoder.sink.failed, decoder.sink.failed
                    said += new
                    answer = decoder.sink.tokens[number, 0]
                    assert answer == greedy_oracle(said, item.stopping.max_tokens)
                    said += answer
                    ended = decoder.sink.finished[number, 0].handle
                    kept, lost = kept + (ended is not None), lost + (ended is None)
                    assert ended is None or ended.num_tokens == len(said)
                    handle = b"" if ended is None else ended.handle

            talks = asyncio.gather(*(converse(talk) for talk in range(10)))
            cuts, deadline = 0, time.monotonic() + LOAD_SECONDS
            while not talks.done():
                assert time.monotonic() < deadline, "the conversations do not come to their ends"
                for direction in dice.choice(((), ("up",), ("down",), ("up", "down"))):
                    proxy.hold(direction)
                await asyncio.sleep(dice.uniform(0, 0.02))
                proxy.cut()
                cuts += 1
                await asyncio.sleep(dice.uniform(0, 0.08))
            await talks
            assert cuts > 3 and kept > 0 and kept + lost == 30, "positive control: some went on by handle"
            manager = rig.daemon._owner.manager
            assert len(manager.list_branches().items) >= kept
            expire(manager._state, 2**62)
            await quiet(rig)

    asyncio.run(inside())


def test_only_what_was_presented_last_is_gone_on_from() -> None:
    """An answer to an older `Away` is passed by, whenever it comes: the session goes on from the newest one's."""

    async def inside() -> None:
        async with contextlib.AsyncExitStack() as stack:
            rig = await stack.enter_async_context(running(pool_blocks=64))
            proxy = await stack.enter_async_context(CutProxy(rig.paths.state_dir / "p.sock", rig.paths.cachemgr_socket))
            events: list[Event] = []
            client = GrpcCacheClient(target_of(rig, target=unix_target(proxy.path)))
            client.start(events.append)
            task = asyncio.create_task(client.run())
            await until(lambda: any(isinstance(event, Attached) for event in events), "attached")
            proxy.cut()
            asked = await until(lambda: next((e for e in events if isinstance(e, Away) and e.number), None), "asked")
            stale = Holdings((), np.array([1], np.int32), asked.number - 1)
            client.present(asked.session, stale)
            client.present(asked.session, Holdings((), np.zeros(0, np.int32), asked.number))
            await until(lambda: any(isinstance(event, Resumed) for event in events), "resumed")
            assert not any(isinstance(event, Lost) for event in events)
            await client.close()
            await asyncio.wait_for(task, 10)

    asyncio.run(inside())
