"""Who may call what ("how it is shown" 6), what tenants see of each other, what garbage on a socket can do."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
from collections.abc import Iterator

import grpc
import pytest

from common.rpc import open_sync_channel, unix_target
from tessera.admin.v1 import admin_pb2
from tessera.cache.v1 import cache_pb2
from tessera.decode.v1 import decode_pb2
from tests.e2e.client import make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import poll
from tests.e2e.prompts import Prompts
from tests.e2e.reflect import REFLECTION_METHOD, call_raw, list_methods
from tests.e2e.rig import Node

B = 16
REFUSED = grpc.StatusCode.UNAUTHENTICATED
HEALTH = "/grpc.health.v1.Health/"


@pytest.fixture(params=["public", "admin"])
def service(request: pytest.FixtureRequest, shared_node: Node) -> Iterator[tuple[grpc.Channel, str, list[str]]]:
    """Channel of a public service, its right credential, and credentials that are right elsewhere."""
    node, keys = shared_node, [shared_node.key, shared_node.admin_key, shared_node.internal_key]
    public = request.param == "public"
    target = node.target if public else unix_target(node.paths.admin_socket)
    right = node.key if public else node.admin_key
    with open_sync_channel(target) as channel:
        yield channel, right, [key for key in keys if key != right]


def test_every_method_without_credentials_is_refused(
    service: tuple[grpc.Channel, str, list[str]], solo: Solo, shared_node: Node
) -> None:
    """Enumerated by reflection: no, empty, wrong and foreign credentials are UNAUTHENTICATED; the right one is not."""
    channel, right, others = service
    methods = list_methods(channel, right)
    ours = [path for path in methods if path.startswith("/tessera.")]
    assert len(ours) >= 4, "positive control: reflection names our methods"
    assert REFLECTION_METHOD in methods
    for path in methods:
        if path.startswith(HEALTH):
            assert call_raw(channel, path, None) is not REFUSED, "health is open to probes"
            continue
        for wrong in (None, "wrong", right[:-1], right + "x", right.swapcase(), *others):
            assert call_raw(channel, path, wrong) is REFUSED, (path, wrong is None)
        assert call_raw(channel, path, right, scheme="Basic") is REFUSED, path
        assert call_raw(channel, path, right) is not REFUSED, path
        if path.endswith("/DrainPool"):
            shared_node.admin.call("DrainPool", admin_pb2.DrainPoolRequest(resume=True))
    solo.probe(shared_node)


def test_unknown_methods_say_nothing_without_credentials(service: tuple[grpc.Channel, str, list[str]]) -> None:
    """A method that does not exist is no way in."""
    channel, _right, _others = service
    assert call_raw(channel, "/tessera.none.v1.Nothing/Nothing", None) in (REFUSED, grpc.StatusCode.UNIMPLEMENTED)


def test_internal_sockets_need_the_internal_key(shared_node: Node, solo: Solo) -> None:
    """Every method of the internal services refuses no credential and every other credential of the node."""
    node = shared_node
    sockets = {
        node.paths.cachemgr_socket: cache_pb2.DESCRIPTOR,
        node.paths.decoder_socket(0): decode_pb2.DESCRIPTOR,
    }
    checked = 0
    for path, file in sockets.items():
        with open_sync_channel(unix_target(path)) as channel:
            for name, described in file.services_by_name.items():
                for method in described.methods_by_name:
                    full = f"/{file.package}.{name}/{method}"
                    for wrong in (None, "wrong", node.key, node.admin_key):
                        assert call_raw(channel, full, wrong) is REFUSED, full
                    assert call_raw(channel, full, node.internal_key, seconds=1.0) is not grpc.StatusCode.UNIMPLEMENTED
                    checked += 1
    assert checked == 6
    solo.probe(node)
    node.quiet()


def test_state_files_are_for_their_owner_alone(shared_node: Node) -> None:
    """Credentials, the tenant database and sockets have mode 0600, their folders 0700."""
    paths = shared_node.paths
    keys = [paths.default_key, paths.admin_key, paths.reader_key, paths.internal_key]
    files = [*keys, paths.tenants_db, *paths.run_dir.glob("*.sock")]
    assert len(files) >= 9, "positive control: they are there"
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
    for folder in (paths.state_dir, paths.run_dir):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder.name
    database = b"".join(path.read_bytes() for path in paths.state_dir.glob("tenants.db*"))
    assert shared_node.key.encode() not in database
    assert shared_node.key.rpartition("_")[2].encode() not in database


def test_a_tenant_never_gets_the_tokens_of_another(node: Node, solo: Solo, prompts: Prompts) -> None:
    """The same prompt: tenant A hits its own prefix, B does not hit A's, and then hits its own."""
    mine, theirs = node.new_tenant("tenant-a"), node.new_tenant("tenant-b")
    request = make_request(prompts.tokens(4 * B))
    solo.check(request, node.generate(request, key=mine))
    hit = node.generate(request, key=mine)
    assert hit.cached_tokens == 4 * B - 1, "positive control: the same tenant does hit"
    foreign = node.generate(request, key=theirs)
    assert foreign.cached_tokens == 0
    assert node.generate(request, key=theirs).cached_tokens == 4 * B - 1
    assert node.generate(request).cached_tokens == 0, "nor does the default tenant"
    for result in (hit, foreign):
        solo.check(request, result)
    owners = {prefix.tenant for prefix in node.admin.prefixes()}
    assert {"tenant-a", "tenant-b"} <= owners
    node.admin.call("EvictBlocks", admin_pb2.EvictBlocksRequest(tenant="tenant-a"))
    assert node.generate(request, key=mine).cached_tokens == 0
    assert node.generate(request, key=theirs).cached_tokens == 4 * B - 1, "an eviction of A leaves B's blocks"


def test_a_revoked_key_ends_within_seconds(node: Node, prompts: Prompts) -> None:
    """After RevokeKey calls are UNAUTHENTICATED (the gateway keeps an answer for a second), other keys work on."""
    node.admin.call("CreateTenant", admin_pb2.CreateTenantRequest(tenant="revoked"))
    made = node.admin.call("CreateKey", admin_pb2.CreateKeyRequest(tenant="revoked"))
    node.secrets.add(made.key)
    request = make_request(prompts.tokens(4), new=1)
    node.generate(request, key=made.key)
    node.admin.call("RevokeKey", admin_pb2.RevokeKeyRequest(key_id=made.key_id))

    def refused() -> bool:
        try:
            node.generate(request, key=made.key)
        except grpc.RpcError as error:
            return error.code() is REFUSED
        return False

    poll(refused, within=5, what="the revoked key is refused")
    node.generate(request)


def test_garbage_on_every_socket_leaves_the_node_serving(node: Node, solo: Solo, prompts: Prompts, seed: int) -> None:
    """Random bytes, other protocols, half frames and silence on all five sockets, with a stream running beside."""
    source = random.Random(seed)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    payloads = [
        b"", b"\0", b"\xff" * 70_000, source.randbytes(4096), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        preface, preface + source.randbytes(512), preface + b"\0\0\0\x04\0\0\0\0\0" + b"\xff\xff\xff\x01\x25" * 40,
        b"\x10\0\0\0" + source.randbytes(16), source.randbytes(48), b"\xff\xff\xff\xff",
    ]  # fmt: skip
    host, port = node.target.split(":")
    sockets: list[tuple[int, str | tuple[str, int]]] = [(socket.AF_INET, (host, int(port)))]
    sockets += [(socket.AF_UNIX, str(path)) for path in sorted(node.paths.run_dir.glob("*.sock"))]
    assert len(sockets) == 6, sockets
    request = make_request(prompts.tokens(2 * B), new=200)
    running = node.background(request)
    pids = {name: process.pid for name, process in node.processes.items()}
    held = []
    for family, address in sockets:
        for payload in payloads:
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.settimeout(5)
            connection.connect(address)
            # The server may hang up before it has read all of it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
                connection.sendall(payload)
            if source.random() < 0.5:
                connection.close()
            else:
                held.append(connection)
    solo.check(request, running.result())
    for connection in held:
        connection.close()
    solo.probe(node)
    assert {name: process.pid for name, process in node.processes.items() if process.status() is None} == pids
    assert node.admin.violations() == []


def test_descriptors_do_not_grow_with_requests_and_connections(node: Node, prompts: Prompts) -> None:
    """After calls, cancels and connections no process holds more descriptors than before."""

    def counts() -> dict[str, int]:
        return {name: len(os.listdir(f"/proc/{process.pid}/fd")) for name, process in node.processes.items()}

    def work() -> None:
        for _ in range(15):
            with open_sync_channel(node.target) as channel:
                stream = node.stream(make_request(prompts.tokens(6), new=30), channel=channel)
                stream.read(1)
                stream.cancel()
                node.stream(make_request(prompts.tokens(6), new=2), channel=channel).finish()

    work()
    node.quiet()
    before = counts()
    work()
    node.quiet()
    poll(
        lambda: all(now <= before[name] + 2 for name, now in counts().items()), within=20,
        what=f"descriptors are back at {before}",
    )  # fmt: skip
