"""A daemon in this process on a short state directory, and plain gRPC clients of it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from cachemgr.arena.maker import HOST_MEMORY, ArenaPlace
from cachemgr.clocks import Clocks
from cachemgr.daemon import Daemon
from common.arena_frames import PROTOCOL_VERSION
from common.config import Options
from common.faults import Faults
from common.layout import KvDtype, KvLayout
from common.paths import StatePaths
from common.rpc import open_channel, unix_target
from common.tokens import pack_tokens
from tessera.admin.v1 import admin_pb2, admin_pb2_grpc
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc
from tessera.common.v1 import common_pb2

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_tokens=4, dtype=KvDtype.FLOAT32)
BLOCKS = 8
KEY = common_pb2.CacheKey(weights_digest=b"w" * 32, kv_dtype="float32", kv_quantization="none", layout_version=1)


def layout_message(layout: KvLayout = LAYOUT, **changes: Any) -> common_pb2.KvLayout:
    """The layout as protobuf, with some fields changed."""
    fields = {name: getattr(layout, name) for name in KvLayout.__slots__}
    return common_pb2.KvLayout(**{**fields, **changes})


def ids(data: bytes) -> list[int]:
    """Packed int32 as a list."""
    return np.frombuffer(data, "<i4").tolist()


class SessionClient:
    """One decoder's stream; `ask` answers with the response to one operation and keeps pushes aside."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = cache_pb2_grpc.CacheServiceStub(channel).Session()
        self.sequence = 0
        self.pushes: list[cache_pb2.SessionResponse] = []
        self.attached: cache_pb2.AttachResponse | None = None

    async def send(self, *, applied_revision: int = 0, **operation: Any) -> int:
        """Write one operation; its sequence number."""
        self.sequence += 1
        await self.call.write(
            cache_pb2.SessionRequest(sequence=self.sequence, applied_revision=applied_revision, **operation)
        )
        return self.sequence

    async def ask(self, **operation: Any) -> cache_pb2.SessionResponse:
        """Write one operation and read its answer."""
        return await self.answer(await self.send(**operation))

    async def answer(self, sequence: int) -> cache_pb2.SessionResponse:
        """Read until the answer to `sequence`."""
        while True:
            response = await self.read()
            if response.sequence == sequence:
                return response
            assert response.sequence == 0, "an answer out of order"
            self.pushes.append(response)

    async def read(self) -> cache_pb2.SessionResponse:
        """The next message; AssertionError at the end of the stream."""
        response = await self.call.read()
        assert response is not grpc.aio.EOF, "the stream ended"
        return response

    async def push(self) -> cache_pb2.SessionResponse:
        """The next push."""
        return self.pushes.pop(0) if self.pushes else await self.read()

    async def attach(self, *, name: str = "d0", process_id: int | None = None) -> SessionClient:
        """Attach with the rig's layout."""
        response = await self.ask(attach=attach_request(name=name, process_id=process_id))
        assert response.WhichOneof("result") == "attach", response.failure
        self.attached = response.attach
        return self

    async def close(self) -> None:
        """Close our side and wait for the daemon's; only pushes may still come."""
        await self.call.done_writing()
        while (response := await self.call.read()) is not grpc.aio.EOF:
            assert response.sequence == 0, "an answer that was not waited for"


def attach_request(
    *, name: str = "d0", process_id: int | None = None, sent_ns: int | None = None, **layout: Any
) -> cache_pb2.AttachRequest:
    """An attach with the rig's layout, some fields changed; sent now unless it says otherwise."""
    return cache_pb2.AttachRequest(
        protocol_version=PROTOCOL_VERSION,
        decoder_name=name,
        layout=layout_message(**layout),
        process_id=os.getpid() if process_id is None else process_id,
        sent_ns=time.monotonic_ns() if sent_ns is None else sent_ns,
    )


def acquire_request(grant: bytes, tokens: list[int], **fields: Any) -> cache_pb2.AcquireRequest:
    """An acquire of a prompt."""
    values = {"key": KEY, "request_id": "r1", "priority": 50, **fields}
    return cache_pb2.AcquireRequest(grant=grant, tokens=pack_tokens(tokens), **values)


def report_request(*sequences: dict[str, Any], **fields: Any) -> cache_pb2.ReportRequest:
    """A report of sequences given as fields."""
    return cache_pb2.ReportRequest(sequences=[cache_pb2.SequenceReport(**item) for item in sequences], **fields)


class Rig:
    """The daemon, its paths, and clients with the right credentials."""

    def __init__(self, daemon: Daemon, paths: StatePaths, shown: list[str]) -> None:
        self.daemon = daemon
        self.paths = paths
        self.shown = shown
        self._stack = contextlib.AsyncExitStack()

    async def channel(self, socket: Path, secret: str | None) -> grpc.aio.Channel:
        """A channel that is closed with the rig."""
        return await self._stack.enter_async_context(open_channel(unix_target(socket), secret))

    async def open(self) -> None:
        """Connect the clients."""
        self.internal = await self.channel(self.paths.cachemgr_socket, self.paths.internal_key.read_text().strip())
        self.admin = admin_pb2_grpc.AdminServiceStub(
            await self.channel(self.paths.admin_socket, self.paths.admin_key.read_text().strip())
        )
        self.credentials = cache_pb2_grpc.CredentialServiceStub(self.internal)
        self.default_key = self.paths.default_key.read_text().strip()

    async def close(self) -> None:
        """Disconnect."""
        await self._stack.aclose()

    async def grant(self, key: str | None = None) -> bytes:
        """A grant of the default tenant, or of the given key's."""
        response = await self.credentials.Authenticate(cache_pb2.AuthenticateRequest(key=key or self.default_key))
        return response.grant

    async def session(self) -> SessionClient:
        """A stream that is not attached yet."""
        return SessionClient(self.internal)

    async def attach(self, **fields: Any) -> SessionClient:
        """An attached stream."""
        return await SessionClient(self.internal).attach(**fields)

    async def snapshot(self) -> admin_pb2.GetSnapshotResponse:
        """All counters."""
        return await self.admin.GetSnapshot(admin_pb2.GetSnapshotRequest())

    async def is_sound(self) -> bool:
        """Whether CheckIntegrity passes."""
        return (await self.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest())).ok

    async def is_quiet(self) -> bool:
        """Nothing is held and every invariant holds."""
        now = await self.snapshot()
        nothing = now.active_blocks == now.leases == now.quarantined_blocks == 0
        return nothing and now.free_blocks + now.cached_blocks == now.total_blocks and await self.is_sound()


@contextlib.asynccontextmanager
async def running(
    *,
    state_dir: Path | None = None,
    faults: Faults | None = None,
    clocks: Clocks | None = None,
    place: ArenaPlace = HOST_MEMORY,
    **options: Any,
) -> AsyncIterator[Rig]:
    """A started daemon with BLOCKS blocks, stopped at the end."""
    with contextlib.ExitStack() as stack:
        folder = state_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ts-")))
        chosen = replace(Options(state_dir=folder, pool_blocks=BLOCKS), faults=faults or Faults(), **options)
        shown: list[str] = []
        daemon = Daemon(chosen, show_key=shown.append, clocks=clocks, place=place)
        try:
            await daemon.start()
            rig = Rig(daemon, StatePaths(folder), shown)
            await rig.open()
            try:
                yield rig
            finally:
                await rig.close()
        finally:
            await daemon.stop()
