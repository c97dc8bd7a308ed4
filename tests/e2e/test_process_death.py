"""What the death of each process costs, and what it does not ("how it is shown" 5): the supervisor brings it back.

Lost with a decoder: its running requests (UNAVAILABLE). Lost with the gateway: its running calls. Lost with the cache
manager: nothing while a decoder lives. Keys and tenants survive all of it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.e2e.client import make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import Process, poll
from tests.e2e.prompts import Prompts
from tests.e2e.repeats import repeats
from tests.e2e.rig import START_SECONDS, Node, SupervisedNode, serves

B = 16


@pytest.fixture(scope="module")
def shared_supervised(tiny_model: Path) -> Iterator[SupervisedNode]:
    """A slow node under `tessera up`."""
    with SupervisedNode(tiny_model, faults=["step_delay=0.02"], options=["--threads", "1"]) as node:
        yield node


@pytest.fixture
def supervised(shared_supervised: SupervisedNode, solo: Solo) -> SupervisedNode:
    """The supervised node, serving, quiet and empty."""
    shared_supervised.again(make_request([7, 7, 7], new=1))
    shared_supervised.fresh()
    return shared_supervised


def lost(stream_error: pytest.ExceptionInfo[grpc.RpcError]) -> bool:
    """Whether a stream ended in the way that tells a client to try again."""
    return stream_error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_the_cache_survives_the_death_of_the_decoder(supervised: SupervisedNode, solo: Solo, prompts: Prompts) -> None:
    """kill -9 of the decoder in a stream: UNAVAILABLE, a restart, the prefix is still cached, nothing stays held."""
    tokens = prompts.tokens(4 * B)
    before = supervised.decoder_pid()
    stream = supervised.stream(make_request(tokens, new=300))
    stream.read(5)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as caught:
        stream.finish()
    assert lost(caught), caught.value
    request = make_request([*tokens, *prompts.tokens(5)], new=12)
    result = supervised.again(request)
    assert result.cached_tokens >= 4 * B, "what the dead decoder computed is reused"
    solo.check(request, result)
    assert supervised.decoder_pid() != before
    supervised.quiet()


def test_the_death_of_a_decoder_while_it_prefills_publishes_nothing_unfinished(
    supervised: SupervisedNode, solo: Solo, prompts: Prompts
) -> None:
    """kill -9 while many requests start: whatever is cached afterwards, the same prompts equal solo."""
    requests = [make_request(prompts.tokens(5 * B + 3), new=6) for _ in range(5)]
    running = [supervised.background(request) for request in requests]
    poll(lambda: supervised.admin.snapshot().leases, within=20, what="a request is admitted")
    os.kill(supervised.decoder_pid(), signal.SIGKILL)
    for call in running:
        try:
            call.result()
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
    for request in requests:
        solo.check(request, supervised.again(request))
    supervised.quiet()


def resident_bytes(pid: int) -> int:
    """Private memory of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@repeats(20, few=2)
def test_row_26_a_decoder_that_dies_again_and_again_costs_nothing(
    tiny_model: Path, solo: Solo, prompts: Prompts, rounds: int
) -> None:
    """kill -9 in a decode, just after it attached, while and before it registers: each restart registers, the daemon
    is as before."""
    with Node(tiny_model, faults=["step_delay=0.01"], options=["--threads", "1"]) as node:
        daemon, decoder = node.processes["cachemgr"].pid, node.processes["decoder-0"]

        def attached() -> bool:
            return any(session.process_id == decoder.pid for session in node.admin.sessions())

        def ready() -> None:
            poll(lambda: attached() and serves(node.target), within=START_SECONDS, what="the decoder is back")
            node.again(make_request([9, 9, 9], new=1))
            node.quiet()

        ready()
        descriptors, memory = 0, 0
        for number in range(rounds + 1):
            if number == 1:  # after one death everything that is made once has been made
                descriptors, memory = len(os.listdir(f"/proc/{daemon}/fd")), resident_bytes(daemon)
            match number % 4:
                case 0:
                    stream = node.stream(make_request(prompts.tokens(3 * B), new=300))
                    stream.read(4)
                    decoder.kill()
                    with pytest.raises(grpc.RpcError) as caught:
                        stream.finish()
                    assert lost(caught), caught.value
                case 1:
                    decoder.kill()
                    decoder.start()
                    poll(attached, within=START_SECONDS, what="the decoder has attached")
                    decoder.kill()
                case 2:
                    decoder.kill()
                    poll(lambda: not node.admin.sessions(), within=20, what="its session is over")
                    without = len(os.listdir(f"/proc/{daemon}/fd"))
                    decoder.start()
                    poll(
                        lambda: len(os.listdir(f"/proc/{daemon}/fd")) > without, within=START_SECONDS,  # noqa: B023
                        what="the decoder has connected",
                    )  # fmt: skip
                    decoder.kill()
                case _:
                    decoder.kill()
                    decoder.start()
                    decoder.kill()
            decoder.start()
            ready()
            assert len(node.admin.sessions()) == 1
        poll(
            lambda: len(os.listdir(f"/proc/{daemon}/fd")) <= descriptors, within=20,
            what=f"the daemon holds {descriptors} descriptors",
        )  # fmt: skip
        assert resident_bytes(daemon) <= memory * 1.2 + 8 * 2**20
        solo.probe(node)


def test_the_death_of_the_gateway_frees_its_requests(supervised: SupervisedNode, solo: Solo, prompts: Prompts) -> None:
    """kill -9 of the gateway: its calls end, their blocks return, the restarted one serves from the same cache."""
    tokens = prompts.tokens(4 * B)
    stream = supervised.stream(make_request(tokens, new=400))
    stream.read(5)
    decoder = supervised.decoder_pid()
    os.kill(supervised.child("gateway"), signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as caught:
        stream.finish()
    assert lost(caught), caught.value
    supervised.quiet()
    request = make_request([*tokens, *prompts.tokens(3)], new=8)
    result = supervised.again(request)
    solo.check(request, result)
    assert result.cached_tokens >= 4 * B
    assert supervised.decoder_pid() == decoder, "the decoder was not restarted"
    supervised.quiet()


def test_the_death_of_the_cache_manager_costs_nothing(supervised: SupervisedNode, solo: Solo, prompts: Prompts) -> None:
    """kill -9 of the cache manager: the stream goes on, and the node recovers by itself with the same keys and the same
    cache (`test_daemon_death.py` has the moments)."""
    tokens = prompts.tokens(4 * B)
    other_key = supervised.new_tenant(f"survivor-{prompts.random.randrange(10**6)}")
    request = make_request(tokens, new=200)
    stream = supervised.stream(request)
    stream.read(5)
    os.kill(supervised.child("cachemgr"), signal.SIGKILL)
    solo.check(request, stream.finish())
    short = make_request(tokens, new=8)
    again = supervised.again(short)
    solo.check(short, again)
    assert again.cached_tokens == 4 * B - 1
    foreign = supervised.generate(short, key=other_key)
    assert foreign.cached_tokens == 0, "what was adopted is still one tenant's alone"
    solo.check(short, foreign)
    supervised.quiet()


@pytest.mark.slow
def test_a_hung_decoder_is_noticed_and_comes_back(tiny_model: Path, solo: Solo, prompts: Prompts) -> None:
    """Stopped by SIGSTOP: NOT_SERVING, new calls UNAVAILABLE, then the running one as well; after SIGCONT as before."""
    with Node(tiny_model, faults=["step_delay=0.02"], options=["--threads", "1"]) as node:
        decoder = node.processes["decoder-0"]
        running = node.background(make_request(prompts.tokens(B), new=300))
        poll(node.admin.leases, within=20, what="the stream runs")
        decoder.send(signal.SIGSTOP)
        try:
            poll(lambda: not serves(node.target), within=15, what="health says that nobody serves")
            with pytest.raises(grpc.RpcError) as caught:
                node.stream(make_request(prompts.tokens(4), new=1), timeout=10).finish()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.RpcError) as caught:
                running.result(60)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            decoder.send(signal.SIGCONT)
        request = make_request(prompts.tokens(B), new=8)
        solo.check(request, node.again(request))
        assert decoder.status() is None
        node.quiet()


def test_sigterm_lets_a_running_stream_finish(tiny_model: Path, solo: Solo, prompts: Prompts) -> None:
    """SIGTERM to the supervisor: the running stream ends well, new calls are refused, every process ends, status 0."""
    request = make_request(prompts.tokens(B), new=60)
    with SupervisedNode(tiny_model, faults=["step_delay=0.05"], options=["--threads", "1"]) as node:
        stream = node.stream(request)
        stream.read(3)
        up = node.processes["up"]
        up.send(signal.SIGTERM)
        poll(lambda: not serves(node.target), within=5, what="health says that it no longer serves")
        with pytest.raises(grpc.RpcError) as caught:
            node.stream(make_request(prompts.tokens(4), new=1), timeout=10).finish()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        solo.check(request, stream.finish())
        assert up.wait(40) == 0


def test_a_second_daemon_on_one_state_directory_is_refused(
    supervised: SupervisedNode, solo: Solo, tmp_path: Path
) -> None:
    """A second cache manager, and a second `tessera up`, on one directory end with an error; the first is unharmed."""
    for name, arguments in (
        ("cachemgr", supervised.command("cachemgr")),
        ("up", ["-m", "cli", "up", *supervised.options]),
    ):
        second = Process(f"second-{name}", arguments, tmp_path / f"{name}.log")
        second.start()
        try:
            assert second.wait(90) != 0
        finally:
            second.stop()
        assert "error" in second.text().lower() or "another" in second.text().lower(), second.tail()
    solo.probe(supervised)
    supervised.quiet()
