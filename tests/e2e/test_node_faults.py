"""Faults around a node that is at work: descriptors run out, socket files vanish, and one who has the internal key
speaks another version of the protocol, or in huge frames. What runs goes on, and what was lost comes back.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.arena_frames import PROTOCOL_VERSION
from common.rpc import bearer_metadata, open_sync_channel, unix_target
from tessera.cache.v1 import cache_pb2
from tests.e2e.client import Background, make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import poll
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node, serves

B = 16
LIMIT = 64
SESSION = "/tessera.cache.v1.CacheService/Session"
HUGE = 64 << 20


@pytest.fixture
def neighbour(slow_node: Node, solo: Solo, prompts: Prompts) -> Iterator[Background]:
    """A stream that runs beside the test and must equal its solo run in the end."""
    request = make_request(prompts.tokens(2 * B), new=50)
    running = slow_node.background(request)
    poll(lambda: running.stream.num_tokens, within=20, what="it runs")
    yield running
    solo.check(request, running.result())
    solo.probe(slow_node)


def descriptors(pid: int) -> int:
    """How many files a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("name", ["gateway", "decoder-0", "cachemgr"])
def test_a_flood_of_connections_under_a_small_limit_ends_nothing(
    slow_node: Node, solo: Solo, prompts: Prompts, neighbour: Background, name: str
) -> None:
    """A process that may have 64 descriptors, and 200 connections to it: what runs goes on, and when they are gone it
    serves as before, with as many descriptors as before."""
    process = slow_node.processes[name]
    before, usual = descriptors(process.pid), resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    assert before < LIMIT - 4, f"{name} holds {before} descriptors at rest"
    links = []
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (LIMIT, usual[1]))
    try:
        host, port = slow_node.target.split(":")
        address: Any = (host, int(port))
        if name != "gateway":
            decoder = slow_node.paths.decoder_socket(0)
            address = os.fspath(decoder if name == "decoder-0" else slow_node.paths.cachemgr_socket)
        for _ in range(200):
            link = socket.socket(socket.AF_INET if name == "gateway" else socket.AF_UNIX)
            link.setblocking(False)
            links.append(link)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                link.connect(address)
        poll(lambda: descriptors(process.pid) >= LIMIT - 2, within=20, what="it has no descriptor left")
        told = neighbour.stream.num_tokens
        poll(
            lambda: neighbour.stream.num_tokens > told or not neighbour.is_alive(), within=20, what="the stream goes on"
        )
    finally:
        for link in links:
            link.close()
        poll(lambda: descriptors(process.pid) <= before + 4, within=20, what="the connections are gone")
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, usual)
    assert process.status() is None
    request = make_request(prompts.tokens(B), new=4)
    solo.check(request, slow_node.again(request))


def test_socket_files_that_are_removed_come_back(
    slow_node: Node, solo: Solo, prompts: Prompts, neighbour: Background
) -> None:
    """Every socket of the node is unlinked under it: each is there again, the same one, and new callers are served."""
    paths = sorted(slow_node.paths.run_dir.glob("*.sock"))
    assert len(paths) == 5
    for path in paths:
        path.unlink()
    poll(lambda: all(path.exists() for path in paths), within=10, what="all of them are back")
    for path in paths:
        if path not in (slow_node.paths.arena_socket, slow_node.paths.weights_socket):  # which speak no gRPC
            poll(lambda: serves(unix_target(path)), within=10, what=f"{path.name} serves")  # noqa: B023
    request = make_request(prompts.tokens(B), new=4)
    solo.check(request, slow_node.generate(request))


def session_call(node: Node, channel: grpc.Channel, message: bytes) -> tuple[grpc.StatusCode | None, bytes]:
    """What the cache manager answers to these bytes as the first message of a decoder: a status, or its answer."""
    call: Any = channel.stream_stream(SESSION)
    running = call(iter([message]), metadata=bearer_metadata(node.internal_key), timeout=30)
    try:
        return None, next(running)
    except grpc.RpcError as error:
        return error.code(), b""
    finally:
        running.cancel()


def test_a_stranger_of_another_version_is_refused_alone(slow_node: Node, neighbour: Background) -> None:
    """An attach of another version of the protocol, or of none, is refused with both numbers; nothing is attached."""
    before = [session.session for session in slow_node.admin.sessions()]
    with open_sync_channel(unix_target(slow_node.paths.cachemgr_socket)) as channel:
        for version in (0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, 2**32 - 1):
            attach = cache_pb2.AttachRequest(protocol_version=version, decoder_name="stranger", process_id=os.getpid())
            attach.layout.num_layers = 1  # which alone would be refused as well
            request = cache_pb2.SessionRequest(sequence=1, attach=attach)
            code, answer = session_call(slow_node, channel, request.SerializeToString())
            assert code is None
            failure = cache_pb2.SessionResponse.FromString(answer).failure
            assert dict(failure.metadata) == {"want": str(version), "have": str(PROTOCOL_VERSION)}
    assert [session.session for session in slow_node.admin.sessions()] == before


def test_huge_frames_end_their_own_call(slow_node: Node, solo: Solo, prompts: Prompts, neighbour: Background) -> None:
    """Messages of 64 MiB, garbage and well-formed: refused, not kept, and the daemon keeps its memory small."""
    pid = slow_node.processes["cachemgr"].pid

    def resident() -> int:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10

    before = resident()
    well_formed = cache_pb2.SessionRequest(sequence=1)
    well_formed.acquire.tokens = bytes(HUGE)
    unlimited = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(unix_target(slow_node.paths.cachemgr_socket), options=unlimited) as channel:
        for message in (b"\xff" * HUGE, well_formed.SerializeToString()):
            code, _ = session_call(slow_node, channel, message)
            assert code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT), code
    poll(lambda: resident() <= before + (32 << 20), within=10, what="its memory is back")
    request = make_request(prompts.tokens(B), new=4)
    solo.check(request, slow_node.generate(request))
