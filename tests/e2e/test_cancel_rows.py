"""Rows 22, 23 and 24 of the cases: work ends with the client that wanted it, and identity comes from the server."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from common.rpc import bearer_metadata, open_sync_channel, unix_target
from tessera.admin.v1 import admin_pb2, admin_pb2_grpc
from tests.e2e.client import make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import Process, poll
from tests.e2e.prompts import Prompts
from tests.e2e.repeats import repeats
from tests.e2e.rig import Node

B = 16
LONG = 1000
STOP_SECONDS = 1.0  # cases.md
STEPS_A_SECOND = 50  # of the slow node, at most


def check_stopped(node: Node, solo: Solo, received: int, before: admin_pb2.GetSnapshotResponse) -> None:
    """Within a second nothing is active, and the token counter moves by what a probe generates and no more."""
    poll(lambda: not node.admin.snapshot().active_blocks, within=STOP_SECONDS, what="active falls to 0")
    stopped = node.quiet().generated_tokens
    assert stopped > before.generated_tokens, "positive control: tokens were generated"
    assert stopped - before.generated_tokens <= received + 2 + STEPS_A_SECOND * STOP_SECONDS
    solo.probe(node)
    assert node.quiet().generated_tokens == stopped + 4, "only the probe's four tokens came after the stop"


def test_row_23a_cancel_stops_the_decoder(slow_node: Node, solo: Solo, prompts: Prompts) -> None:
    """After call.cancel the blocks return and no token is generated."""
    before = slow_node.quiet()
    stream = slow_node.stream(make_request(prompts.tokens(B), new=LONG))
    stream.read(5)
    stream.cancel()
    check_stopped(slow_node, solo, 5, before)


def test_row_23b_closing_the_channel_stops_the_decoder(slow_node: Node, solo: Solo, prompts: Prompts) -> None:
    """After the channel is closed the blocks return and no token is generated."""
    before = slow_node.quiet()
    channel = open_sync_channel(slow_node.target)
    stream = slow_node.stream(make_request(prompts.tokens(B), new=LONG), channel=channel)
    stream.read(5)
    channel.close()
    check_stopped(slow_node, solo, 5, before)


CLIENT = """
import sys
from common.credentials import read_secret
from common.rpc import open_sync_channel
from pathlib import Path
from tests.e2e.client import Stream, make_request
key = read_secret(Path(sys.argv[2]))
stream = Stream(open_sync_channel(sys.argv[1]), key, make_request(range(50, 66), new=1000), 120)
while stream.step():
    print("received", stream.num_tokens, flush=True)
"""


def test_row_23c_killing_the_client_stops_the_decoder(
    slow_node: Node, solo: Solo, prompts: Prompts, tmp_path: Path
) -> None:
    """After kill -9 of the client process the blocks return and no token is generated."""
    before = slow_node.quiet()
    client = Process("client", ["-c", CLIENT, slow_node.target, str(slow_node.paths.default_key)], tmp_path / "log")
    client.start()
    try:
        poll(lambda: "received 5\n" in client.text(), within=60, what="the client receives tokens")
        client.send(signal.SIGKILL)
        client.wait(10)
    finally:
        client.kill()
    received = client.text().count("received")
    check_stopped(slow_node, solo, received, before)


def test_row_23d_a_deadline_stops_the_decoder(slow_node: Node, solo: Solo, prompts: Prompts) -> None:
    """After a deadline of 300 ms the call ends with DEADLINE_EXCEEDED, the blocks return, no token is generated."""
    before = slow_node.quiet()
    stream = slow_node.stream(make_request(prompts.tokens(B), new=LONG), timeout=0.3)
    with pytest.raises(grpc.RpcError) as caught:
        stream.finish()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    if stream.num_tokens:
        check_stopped(slow_node, solo, stream.num_tokens, before)
    else:
        slow_node.quiet()


def test_row_23_a_queued_request_that_is_cancelled_never_runs(slow_node: Node, solo: Solo, prompts: Prompts) -> None:
    """What waits for room and is cancelled takes no block and generates nothing; what runs is not disturbed."""
    big = make_request(prompts.tokens(20 * B), new=40)
    running = slow_node.stream(big)
    running.read(1)
    waiting = slow_node.stream(make_request(prompts.tokens(20 * B), new=40))
    poll(lambda: slow_node.admin.snapshot().queued_requests, within=10, what="the second one waits")
    waiting.cancel()
    poll(lambda: not slow_node.admin.snapshot().queued_requests, within=STOP_SECONDS, what="the queue is empty")
    misses = slow_node.admin.snapshot().misses
    solo.check(big, running.finish())
    assert slow_node.quiet().misses == misses, "it was never admitted"


@repeats(50)
def test_row_23_cancels_at_every_moment_leave_nothing(
    node: Node, solo: Solo, tiny_model: Path, seed: int, rounds: int
) -> None:
    """Cancels before, while and after the first token, with n = 3 as well: quiet afterwards, neighbours equal solo."""
    for number in range(rounds):
        prompts = Prompts(tiny_model, seed + number)
        neighbour = make_request(prompts.tokens(2 * B), new=60)
        running = node.background(neighbour)
        for tokens in (0, 1, 2, B, 40):
            stream = node.stream(make_request(prompts.tokens(B + 3), new=120, n=3, temperature=1.0, seed=1))
            if tokens:
                stream.read(tokens)
            stream.cancel()
        solo.check(neighbour, running.result())
        node.quiet()


@repeats(50)
def test_row_24_an_abandoned_turn_is_never_committed_beyond_what_was_computed(
    slow_node: Node, solo: Solo, tiny_model: Path, seed: int, rounds: int
) -> None:
    """Disconnect after five tokens, and send the prompt with another tail at once: equal solo, honest cached tokens."""
    for number in range(rounds):
        prompts = Prompts(tiny_model, seed + number)
        tokens = prompts.tokens(2 * B + 5)
        turn = make_request(tokens, new=200)
        stream = slow_node.stream(turn)
        stream.read(5)
        received = list(stream.samples[0].token_ids)
        stream.cancel()
        assert received[:5] == solo(make_request(tokens, new=5)).token_ids
        follow_up = make_request([*tokens, *received[:5], prompts.first(), prompts.first()], new=6)
        result = slow_node.generate(follow_up)
        solo.check(follow_up, result)
        assert 2 * B <= result.cached_tokens <= len(tokens) + 6
        slow_node.quiet()


def test_row_22_equal_labels_are_two_requests(node: Node, solo: Solo, prompts: Prompts) -> None:
    """Two tenants with one label at once, different prompts: both equal solo, with ids of the server's own."""
    other = node.new_tenant("row22")
    requests = [make_request(prompts.tokens(3 * B), new=40, label="same") for _ in range(4)]
    results = node.together(requests, keys=[node.key, other, node.key, other])
    for request, result in zip(requests, results, strict=True):
        solo.check(request, result)
    assert len({result.request_id for result in results}) == 4


def test_row_22_only_the_operator_can_abort_a_request(slow_node: Node, solo: Solo, prompts: Prompts) -> None:
    """A tenant's key aborts nothing, not even its own; the admin credential does, and the neighbour goes on."""
    victim = slow_node.stream(make_request(prompts.tokens(2 * B), new=200))
    neighbour = make_request(prompts.tokens(2 * B), new=60)
    running = slow_node.background(neighbour)
    victim.read(2)
    request = admin_pb2.AbortRequestRequest(request_id=victim.request_id)
    with open_sync_channel(unix_target(slow_node.paths.admin_socket)) as channel:
        abort: Callable[..., object] = admin_pb2_grpc.AdminServiceStub(channel).AbortRequest  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as caught:
            abort(request, metadata=bearer_metadata(slow_node.key), timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    victim.read(victim.num_tokens + 3)
    slow_node.admin.call("AbortRequest", request)
    try:
        assert len(victim.finish().token_ids) < 200
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.ABORTED
    solo.check(neighbour, running.result())
    with pytest.raises(grpc.RpcError) as missing:
        slow_node.admin.call("AbortRequest", admin_pb2.AbortRequestRequest(request_id="no-such-request"))
    assert missing.value.code() is grpc.StatusCode.NOT_FOUND
