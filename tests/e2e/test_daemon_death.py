"""kill -9 of the cache manager under load, at every kind of moment: no stream ends, no token is wrong, what was warm is
a hit afterwards, and nothing stays held. How long nothing new could begin is printed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from common.tokens import pack_tokens
from gateway.router import Candidate, affinity, choose_decoder
from tests.e2e.client import Background, make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import poll
from tests.e2e.prompts import Prompts
from tests.e2e.repeats import repeats
from tests.e2e.rig import START_SECONDS, Node, SupervisedNode

B = 16
SLOW = ["step_delay=0.02", "poison_on_free=1"]  # a block that is freed under a reader turns its tokens wrong


def attempt(call: Callable[[], object]) -> object:
    """The answer, or None while nobody gives one."""
    try:
        return call()
    except grpc.RpcError:
        return None


def await_moment(seconds: float) -> None:
    """Lets the node work on for so long."""
    end = time.monotonic() + seconds
    poll(lambda: time.monotonic() > end, within=seconds + 5, what="the moment has come")


def wait_for_epoch(node: Node, above: int) -> None:
    """Waits until a later daemon answers and has taken the cache over."""
    poll(
        lambda: attempt(lambda: (now := node.admin.snapshot()).epoch > above and now.sessions >= node.num_decoders),
        within=30,
        what="a new cache manager has every decoder back",
    )


def kill_daemon(node: Node) -> float:
    """kill -9, start again at once, wait until a new request is served; the seconds without service."""
    epoch = node.admin.snapshot().epoch
    started = time.monotonic()
    node.processes["cachemgr"].kill()
    node.processes["cachemgr"].start()
    node.again(make_request([5, 6, 7], new=1, no_store=True))
    seconds = time.monotonic() - started
    assert node.admin.snapshot().epoch > epoch
    print(f"without service for {seconds:.2f} s")
    return seconds


@pytest.fixture(scope="module")
def shared_mortal(tiny_model: Path) -> Iterator[Node]:
    """A slow node whose cache manager the tests kill; prompts are prefilled in chunks of two blocks."""
    with Node(tiny_model, faults=SLOW, options=["--threads", "1", "--chunk-tokens", "32"]) as node:
        yield node


@pytest.fixture
def mortal(shared_mortal: Node, solo: Solo) -> Iterator[Node]:
    """The mortal node, quiet and empty before the test, and quiet after it."""
    shared_mortal.fresh()
    yield shared_mortal
    shared_mortal.quiet()


def check_warm(node: Node, solo: Solo, tokens: list[int], extra: list[int]) -> None:
    """What was cached of a prompt before is a hit."""
    request = make_request([*tokens, *extra], new=4)
    result = node.generate(request)
    assert result.cached_tokens >= len(tokens), f"{result.cached_tokens} of {len(tokens)} warm tokens were hit"
    solo.check(request, result)


def test_idle(mortal: Node, solo: Solo, prompts: Prompts) -> None:
    """With nothing running: the whole cache, a partly filled tail included, is there afterwards."""
    tokens = prompts.tokens(4 * B + 5)
    mortal.generate(make_request(tokens, new=1))
    before = mortal.quiet()
    kill_daemon(mortal)
    after = mortal.quiet()
    assert after.adopted_blocks == before.indexed_blocks
    assert after.cached_blocks == before.cached_blocks
    check_warm(mortal, solo, tokens, prompts.tokens(3))


def test_prefill(mortal: Node, solo: Solo, prompts: Prompts) -> None:
    """Between two chunks of a long prompt."""
    warm = prompts.tokens(2 * B)
    mortal.generate(make_request(warm, new=1))
    request = make_request(prompts.tokens(12 * B + 3), new=20)
    running = mortal.background(request)
    poll(mortal.admin.leases, within=20, what="the prompt is admitted")
    kill_daemon(mortal)
    solo.check(request, running.result())
    check_warm(mortal, solo, warm, prompts.tokens(3))


@pytest.mark.parametrize("num", [1, 4])
def test_decode(mortal: Node, solo: Solo, prompts: Prompts, num: int) -> None:
    """While streams decode, with a prefix that they share, over several ends of blocks."""
    warm = prompts.tokens(3 * B + 5)
    mortal.generate(make_request(warm, new=1))
    requests = [make_request([*warm, *prompts.tokens(2 + i)], new=4 * B) for i in range(num)]
    streams = [mortal.stream(request) for request in requests]
    for stream in streams:
        stream.read(3)
    kill_daemon(mortal)
    for request, stream in zip(requests, streams, strict=True):
        solo.check(request, stream.finish())
    check_warm(mortal, solo, warm, prompts.tokens(3))


def test_samples_that_share_a_prompt(mortal: Node, solo: Solo, prompts: Prompts) -> None:
    """Four samples of one prompt, each with a copy of its tail."""
    request = make_request(prompts.tokens(2 * B + 7), new=2 * B, n=4, temperature=1.0, seed=11)
    stream = mortal.stream(request)
    stream.read(5)
    kill_daemon(mortal)
    solo.check(request, stream.finish())


def test_two_deaths_in_a_row(mortal: Node, solo: Solo, prompts: Prompts) -> None:
    """The second daemon dies as soon as it has the decoder back."""
    request = make_request(prompts.tokens(3 * B + 2), new=5 * B)
    stream = mortal.stream(request)
    stream.read(3)
    for _ in range(2):
        epoch = mortal.admin.snapshot().epoch
        mortal.processes["cachemgr"].kill()
        mortal.processes["cachemgr"].start()
        wait_for_epoch(mortal, epoch)
    solo.check(request, stream.finish())


def test_a_request_that_is_sent_meanwhile(mortal: Node, solo: Solo, prompts: Prompts) -> None:
    """It is served by the new daemon, or told UNAVAILABLE; nothing else."""
    mortal.processes["cachemgr"].kill()
    request = make_request(prompts.tokens(2 * B), new=4)
    sent = mortal.background(request)
    mortal.processes["cachemgr"].start()
    try:
        solo.check(request, sent.result())
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error
    solo.check(request, mortal.again(request))


@pytest.mark.parametrize(
    "operation", ["report", *(pytest.param(name, marks=pytest.mark.slow) for name in ("acquire", "credit"))]
)
@repeats(20, few=3)
def test_while_an_operation_is_on_its_way(
    tiny_model: Path, solo: Solo, prompts: Prompts, operation: str, rounds: int
) -> None:
    """Each operation waits in the daemon for a while, so that a death falls before it is done: seals, admissions with
    a copy, and credit are presented again or asked for again."""
    options = ["--threads", "1", "--chunk-tokens", "32"]
    with Node(tiny_model, faults=[*SLOW, f"delay={operation}:0.05"], options=options) as node:
        warm = prompts.tokens(3 * B + 5)
        node.generate(make_request(warm, new=1))
        for number in range(rounds):
            requests = [make_request([*warm, *prompts.tokens(3 + i)], new=3 * B) for i in range(2)]
            requests.append(make_request(prompts.tokens(5 * B), new=B))
            running = [node.background(request) for request in requests]
            poll(lambda: attempt(node.admin.leases), within=20, what="a request is admitted")
            time_of_death = prompts.random.random() * 0.5
            await_moment(time_of_death)
            kill_daemon(node)
            for request, call in zip(requests, running, strict=True):
                solo.check(request, call.result())
            check_warm(node, solo, warm, prompts.tokens(3))
            node.quiet()
            print(f"round {number}: {operation}, after {time_of_death:.2f} s")


@repeats(10, few=3)
def test_under_pressure(mortal: Node, solo: Solo, prompts: Prompts, rounds: int) -> None:
    """A small pool that evicts and preempts all the time dies at random moments: every stream ends as if alone."""
    for number in range(rounds):
        shared = prompts.tokens(3 * B + 1)
        requests = [make_request([*shared, *prompts.tokens(5 + i)], new=3 * B) for i in range(3)]
        requests += [make_request(prompts.tokens(6 * B + i), new=2 * B) for i in range(3)]
        running: list[Background] = [mortal.background(request) for request in requests]
        poll(lambda: attempt(lambda: len(mortal.admin.leases()) > 1), within=20, what="requests are admitted")
        await_moment(prompts.random.random())
        kill_daemon(mortal)
        for request, call in zip(requests, running, strict=True):
            solo.check(request, call.result())
        mortal.quiet()
        print(f"round {number} of {rounds}")


def test_with_no_decoder_alive_it_starts_empty(tiny_model: Path, solo: Solo, prompts: Prompts) -> None:
    """Both are killed: the memory is gone, the new daemon knows it at once and serves from nothing."""
    with Node(tiny_model, options=["--threads", "1"]) as node:
        tokens = prompts.tokens(4 * B)
        node.generate(make_request(tokens, new=1))
        decoder, daemon = node.processes["decoder-0"], node.processes["cachemgr"]
        daemon.kill()
        decoder.kill()
        daemon.start()
        decoder.start()
        request = make_request(tokens, new=4)
        result = node.again(request)
        assert result.cached_tokens == 0
        solo.check(request, result)
        assert node.quiet().adopted_blocks == 0


def prompt_for(decoder: int, prompts: Prompts) -> list[int]:
    """A prompt that the gateway gives to this one of two decoders whose batches have room: left to chance, all of six
    prompts go to the same one in 3 of 100 runs."""
    decoders = [Candidate(index, load=0, capacity=1) for index in range(2)]
    while True:
        tokens = prompts.tokens(2 * B)
        if choose_decoder(affinity(pack_tokens(tokens), B, "default"), decoders).index == decoder:
            return tokens


def test_of_two_decoders_one_is_dead(tiny_model: Path, solo: Solo, prompts: Prompts) -> None:
    """The daemon and one decoder die together: the other hands the memory back, its stream goes on, what the dead one
    had published is a hit, and what it held is free."""
    with Node(tiny_model, decoders=2, faults=SLOW, options=["--threads", "1"]) as node:
        node.await_decoders()
        warm = prompts.tokens(3 * B)
        node.generate(make_request(warm, new=1))
        requests = [make_request(prompt_for(place % 2, prompts), new=3 * B) for place in range(4)]
        running = [node.background(request) for request in requests]
        dead = node.processes["decoder-1"]
        busy = lambda: all(session.leases for session in node.admin.sessions())  # noqa: E731
        poll(busy, within=20, what="both decoders are at work")
        node.processes["cachemgr"].kill()
        dead.kill()
        node.processes["cachemgr"].start()
        ended = 0
        for request, call in zip(requests, running, strict=True):
            try:
                solo.check(request, call.result())
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE, error
                ended += 1
        assert 1 <= ended < len(requests), "the streams of the dead decoder end, those of the other do not"
        check_warm(node, solo, warm, prompts.tokens(3))
        assert node.quiet().adopted_blocks >= 3
        dead.start()
        poll(lambda: len(node.admin.sessions()) == 2, within=START_SECONDS, what="the other decoder is back")
        node.quiet()


@pytest.mark.slow
def test_a_decoder_that_does_not_come_back_is_waited_for_and_then_quarantined(
    tiny_model: Path, solo: Solo, prompts: Prompts
) -> None:
    """One of two decoders is stopped when the daemon dies: the wait for it is bounded; what it may write stays
    quarantined until it goes on, has lost its session and begins anew."""
    options = ["--threads", "1", "--lease-seconds", "2", "--grace-seconds", "1"]
    with Node(tiny_model, decoders=2, faults=SLOW, options=options) as node:
        requests = [make_request(prompts.tokens(2 * B + i), new=4 * B) for i in range(4)]
        running = [node.background(request) for request in requests]
        poll(lambda: len(node.admin.leases()) == 4, within=20, what="all are admitted")
        session = node.admin.leases()[0].session
        pid = next(view.process_id for view in node.admin.sessions() if view.session == session)
        stopped = next(process for process in node.processes.values() if process.pid == pid)
        stopped.send(signal.SIGSTOP)
        try:
            epoch = node.admin.snapshot().epoch
            node.processes["cachemgr"].kill()
            node.processes["cachemgr"].start()
            poll(
                lambda: attempt(lambda: (now := node.admin.snapshot()).epoch > epoch and now.quarantined_blocks),
                within=30,
                what="the new daemon has adopted",
            )
            other = make_request(prompts.tokens(B), new=2)
            solo.check(other, node.again(other))
            assert node.admin.snapshot().quarantined_blocks > 0
        finally:
            stopped.send(signal.SIGCONT)
        for request, call in zip(requests, running, strict=True):
            try:
                solo.check(request, call.result())
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE, error
        poll(lambda: not node.busy(), within=30, what="the stopped decoder has begun anew")
        node.quiet()


def test_the_supervisor_brings_it_back(tiny_model: Path, solo: Solo, prompts: Prompts) -> None:
    """Under `tessera up`: neither decoder nor gateway is restarted, and the running stream does not notice."""
    with SupervisedNode(tiny_model, faults=SLOW, options=["--threads", "1"]) as node:
        warm = prompts.tokens(4 * B)
        node.generate(make_request(warm, new=1))
        decoder, gateway = node.decoder_pid(), node.child("gateway")
        request = make_request(prompts.tokens(2 * B), new=6 * B)
        stream = node.stream(request)
        stream.read(3)
        started = time.monotonic()
        os.kill(node.child("cachemgr"), signal.SIGKILL)
        short = make_request([*warm, 9], new=2)
        result = node.again(short)
        print(f"without service for {time.monotonic() - started:.2f} s, 0.25 s of them the supervisor's pause")
        assert result.cached_tokens == 4 * B
        solo.check(short, result)
        solo.check(request, stream.finish())
        assert (node.decoder_pid(), node.child("gateway")) == (decoder, gateway)
        node.quiet()
