"""GPU memory between real processes: daemon and decoders over real sockets, with a RECORDER for each one's driver.

It is no driver: what is shared is host memory behind the same calls. What it shows is that the memory belongs to
nobody's life: the daemon is killed, a decoder is killed, a new daemon adopts; and that what does not fit is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tessera.cache.v1 import cache_pb2
from tests.cachemgr.daemon_rig import SessionClient, attach_request
from tests.cachemgr.rig import ROOT
from tests.cachemgr.test_succession import Killable
from tests.cuda_recorder import OTHER_UUID, UUID


class Importer:
    """A child process that maps the arena; this process speaks for it with the daemon."""

    def __init__(self, node: Killable, name: str, link: socket.socket) -> None:
        self._node = node
        self._name = name
        self._link = link
        self.process_id = 0
        self._client: SessionClient | None = None
        self._answer = cache_pb2.AttachResponse()
        self._epoch = 0

    async def start(self) -> None:
        """Wait until it is there."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._link)
        self.process_id = await self._answered()

    async def ask(self, command: str, *arguments: Any) -> Any:
        """One command."""
        self._writer.write(json.dumps([command, *arguments]).encode() + b"\n")
        return await self._answered()

    async def _answered(self) -> Any:
        return json.loads(await asyncio.wait_for(self._reader.readline(), 60))

    async def attach(self) -> str:
        """A fresh session, and its memory; what `map` answers."""
        self._client = SessionClient(self._node.internal)
        response = await self._client.ask(attach=self._request())
        assert response.WhichOneof("result") == "attach", response.failure
        self._answer, self._epoch = response.attach, response.epoch
        answer: str = await self.ask("map", self._answer.arena_token.hex())
        return answer

    def _request(self) -> cache_pb2.AttachRequest:
        return attach_request(name=self._name, process_id=self.process_id)

    async def come_back(self) -> bool:
        """Resume with a new daemon; whether it wanted the memory, which it gets then."""
        request = self._request()
        nonce = bytes.fromhex(await self.ask("nonce"))
        request.resume.CopyFrom(
            cache_pb2.SessionResume(
                session_id=self._answer.session_id,
                epoch=self._epoch,
                resume_token=self._answer.resume_token,
                arena_nonce=nonce,
            )
        )
        self._client = SessionClient(self._node.internal)
        response = await self._client.ask(attach=request)
        wanted = response.attach.arena_wanted
        if wanted:
            await self.ask("hand_back", response.attach.arena_token.hex())
            response = await self._client.ask(attach=request)
        assert response.attach.resumed, response
        return bool(wanted)

    async def kill(self) -> None:
        """kill -9, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process_id, signal.SIGKILL)
        await self._reader.read()
        self._writer.close()


@contextlib.asynccontextmanager
async def node_of(
    *uuids: bytes, handles: str, device: str = "cuda", real: bool = False
) -> AsyncIterator[tuple[Killable, list[Importer]]]:
    """A daemon on a recorder's GPU, or on a real one, and a child for each of `uuids`, the GPU that it sees."""
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ts-"))
        node = Killable(
            Path(folder), "--device", device, "--arena-handles", handles, "--lease-seconds", "60",
            module="cachemgr" if real else "tests.cuda_daemon",
        )  # fmt: skip
        pairs = [socket.socketpair() for _ in uuids]
        nursery = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.cuda_importer", "real" if real else "recorder", str(node.paths.arena_socket),
            *(f"{theirs.fileno()}:{uuid.hex()}" for (_, theirs), uuid in zip(pairs, uuids, strict=True)),
            cwd=ROOT, stdin=asyncio.subprocess.PIPE, pass_fds=[theirs.fileno() for _, theirs in pairs],
        )  # fmt: skip
        stack.push_async_callback(nursery.wait)
        stack.callback(nursery.kill)
        stack.push_async_callback(node.close)
        importers = []
        for index, (ours, theirs) in enumerate(pairs):
            theirs.close()
            importers.append(Importer(node, f"d{index}", ours))
        await node.start()
        for importer in importers:
            await importer.start()
            stack.push_async_callback(importer.kill)
        yield node, importers


def test_the_memory_outlives_the_daemon_and_each_decoder() -> None:
    """The first decoder writes the nonce, the second finds it; a decoder on another GPU is refused; both go on when the
    daemon is killed; a new daemon adopts what one of them hands back, and hands it to others, while one of them is
    killed; memory whose nonce was overwritten is refused."""

    asyncio.run(outlives(UUID))


async def outlives(uuid: bytes, **how: Any) -> None:
    """The steps of the test above; `how` of `node_of`."""
    async with node_of(uuid, uuid, OTHER_UUID, uuid, handles="fd", **how) as (node, (first, second, foreign, late)):
        assert await first.attach() == "ok"
        assert "arena_nonce_written" in node.log.read_text()
        await first.ask("write", 3, 7.0)
        assert await second.attach() == "ok"
        assert node.log.read_text().count("arena_nonce_written") == 1
        assert await second.ask("read", 3) == 7.0
        assert await foreign.attach() == "DEVICE_MISMATCH {}"
        await foreign.kill()
        node.kill()
        await second.ask("write", 4, 8.0)
        assert await first.ask("read", 4) == 8.0
        await node.start()
        assert await first.come_back()
        assert not await second.come_back()
        assert "arena_adopted" in node.log.read_text()
        await first.kill()
        assert await late.attach() == "ok"
        assert await late.ask("read", 3) == 7.0 and await late.ask("read", 4) == 8.0
        await late.ask("write", 5, 9.0)
        assert await second.ask("read", 5) == 9.0
        await second.ask("write", 0, 1.0)
        assert (await late.attach()).startswith("ARENA_NONCE")
        assert await node.violations() == []
        assert "SECRET" not in node.log.read_text()


def test_the_older_handle_ends_with_its_daemon() -> None:
    """It is shared while the daemon lives; a new daemon has nothing to adopt and refuses to resume; the 64 bytes are in
    no log."""

    asyncio.run(ends(UUID))


async def ends(uuid: bytes, **how: Any) -> None:
    """The steps of the test above; `how` of `node_of`."""
    async with node_of(uuid, uuid, handles="ipc", **how) as (node, (first, second)):
        assert await first.attach() == "ok" and await second.attach() == "ok"
        await first.ask("write", 3, 7.0)
        assert await second.ask("read", 3) == 7.0
        assert not node.paths.index_journal.exists()
        assert "SECRET" not in node.log.read_text()
        node.kill()
        await node.start()
        assert "arena_orphaned" not in node.log.read_text()
        assert await second.attach() == "ok"
        await second.ask("write", 3, 1.0)
        assert await second.ask("read", 3) == 1.0
