"""Weights between real processes, over the real socket: a memfd, or a RECORDER of driver calls, stands in for a GPU.

What it shows: one copy for all, read-only for all, filled by one, whoever dies in between. It shows nothing of a driver
or a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachemgr.arena.maker import ArenaPlace
from cachemgr.weights.memory import WeightsPlace
from cachemgr.weights.service import WeightsSocket
from cachemgr.weights.store import WeightsStore
from common.errors import FailedPrecondition, PermissionDenied
from common.weights_frames import WeightsStatus, weights_header
from common.weights_wire import WeightsLink
from tests.cachemgr.rig import ROOT, eventually
from tests.cachemgr.test_succession import Killable
from tests.cuda_recorder import Recorder, gpu_of
from tests.weights_loader import CONFIG, LAYOUT, key_of

SECRET = "node's internal key"
DEVICES = ("host", "recorder")
CHILDREN = 44
TENSORS = 3 + 9 * CONFIG.num_layers  # of the common form


class Child:
    """One process of `tests.weights_loader`."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._link.settimeout(60)
        self._lines: Any = link.makefile("rw")
        self.process_id = int(self._lines.readline())

    def say(self, *command: Any) -> None:
        """Begin a command, or let it go on."""
        self._lines.write(json.dumps(command) + "\n")
        self._lines.flush()

    async def answer(self) -> Any:
        """Its next line; None where it has ended."""
        line = await asyncio.to_thread(self._lines.readline)
        return json.loads(line) if line else None

    async def ask(self, *command: Any) -> Any:
        """One command."""
        self.say(*command)
        return await self.answer()

    async def kill(self) -> None:
        """kill -9, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process_id, signal.SIGKILL)
        assert await self.answer() is None


@pytest.fixture(scope="module")
def children() -> Iterator[Iterator[Child]]:
    """Processes, each for one use."""
    with forked(CHILDREN) as processes:
        yield processes


@contextlib.contextmanager
def forked(count: int) -> Iterator[Iterator[Child]]:
    """So many processes of `tests.weights_loader`, forked from one."""
    pairs = [socket.socketpair() for _ in range(count)]
    nursery = subprocess.Popen(
        [sys.executable, "-m", "tests.weights_loader", *(str(theirs.fileno()) for _, theirs in pairs)],
        cwd=ROOT, stdin=subprocess.PIPE, pass_fds=[theirs.fileno() for _, theirs in pairs],
    )  # fmt: skip
    for _, theirs in pairs:
        theirs.close()
    try:
        yield (Child(ours) for ours, _ in pairs)
    finally:
        nursery.kill()
        nursery.communicate()
        for ours, _ in pairs:
            ours.close()


class Service:
    """The daemon's socket, in this process."""

    def __init__(self, folder: Path, device: str, place: ArenaPlace | None) -> None:
        self.path = str(folder / "weights.sock")
        self._place = place
        self.device = device
        self.reserved = 0
        self.now = 0.0

    async def start(self, **options: float) -> None:
        """A new one, with nothing."""
        self.driver = Recorder()
        place = self._place or (ArenaPlace(gpu_of(self.driver)) if self.device == "recorder" else ArenaPlace())
        self.store = WeightsStore(
            WeightsPlace(place), reserved=lambda: self.reserved, draw_nonce=lambda: secrets.token_bytes(32)
        )
        self.socket = WeightsSocket(self.store, now=lambda: self.now, **options)
        await self.socket.start(Path(self.path), SECRET)

    def load(self, model: int = 1, *more: Any, secret: str = SECRET) -> tuple[Any, ...]:
        """The command of a child."""
        return ("load", self.path, secret, self.device, model, *more)


@contextlib.asynccontextmanager
async def serving(device: str = "host", place: ArenaPlace | None = None, **options: float) -> AsyncIterator[Service]:
    """A started service; of a real GPU where `place` says so."""
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        service = Service(Path(folder), device, place)
        await service.start(**options)
        try:
            yield service
        finally:
            await service.socket.stop()


@pytest.mark.parametrize("device", DEVICES)
def test_two_processes_have_one_copy(children: Iterator[Child], device: str) -> None:
    """The first reads every tensor, the second none; both map the same memory, read-only, with the same content; other
    weights are another copy; what is let go leaves nothing open, and the other process has its weights still."""

    async def body() -> None:
        async with serving(device) as service:
            one, two, other = next(children), next(children), next(children)
            assert await one.ask(*service.load()) == {"read": TENSORS}
            assert await two.ask(*service.load()) == {"read": 0}
            assert await other.ask(*service.load(2)) == {"read": TENSORS}
            inodes = [await child.ask("inode") for child in (one, two, other)]
            assert inodes[0] == inodes[1] != inodes[2] and all(inodes)
            contents = [await child.ask("content") for child in (one, two, other)]
            assert contents[0] == contents[1] != contents[2]
            assert await one.ask("close") == {}
            assert await two.ask("content") == contents[0]

    asyncio.run(body())


@pytest.mark.parametrize("device", DEVICES)
def test_nobody_writes_to_what_is_shared(children: Iterator[Child], device: str) -> None:
    """A reader that tries dies of it, the filler too, which wrote there before; the content stays."""

    async def body() -> None:
        async with serving(device) as service:
            filler, reader, watcher = next(children), next(children), next(children)
            for child in (filler, reader, watcher):
                await child.ask(*service.load())
            content = await watcher.ask("content")
            for child in (reader, filler):
                assert await child.ask("write") is None
            assert await watcher.ask("content") == content

    asyncio.run(body())


@pytest.mark.parametrize("device", DEVICES)
def test_the_next_one_fills_when_the_filler_dies(children: Iterator[Child], device: str) -> None:
    """Two wait while the first lays weights down; it is killed in the middle; one of them fills, the other reads."""

    async def body() -> None:
        async with serving(device) as service:
            filler, *waiting = (next(children) for _ in range(3))
            assert await filler.ask(*service.load(1, 5)) == "stalled"
            for child in waiting:
                child.say(*service.load())
            await filler.kill()
            loaded = [await child.answer() for child in waiting]
            assert sorted(it["read"] for it in loaded) == [0, TENSORS]
            contents = [await child.ask("content") for child in waiting]
            assert contents[0] == contents[1]

    asyncio.run(body())


def test_a_filler_that_takes_too_long_is_left_behind(children: Iterator[Child]) -> None:
    """Another one fills other memory; the slow one is told that it holds nothing, and can touch nothing of it."""

    async def body() -> None:
        async with serving(fill_seconds=2.0) as service:
            slow, quick = next(children), next(children)
            assert await slow.ask(*service.load(1, 5)) == "stalled"
            assert await quick.ask(*service.load()) == {"read": TENSORS}
            content = await quick.ask("content")
            slow.say("go on")
            assert (await slow.answer())["reason"] == "WEIGHTS_UNAVAILABLE"
            assert await quick.ask("content") == content

    asyncio.run(body())


def test_a_restarted_decoder_reads_nothing(children: Iterator[Child]) -> None:
    """All are killed, the next one within the time maps what they had; after it, it loads again."""

    async def body() -> None:
        async with serving() as service:
            first, second, third = (next(children) for _ in range(3))
            assert await first.ask(*service.load()) == {"read": TENSORS}
            await first.kill()
            await eventually(lambda: not service.store.copies[0].holders)
            service.now += 599.0
            service.socket.tick()
            assert await second.ask(*service.load()) == {"read": 0}
            await second.kill()
            await eventually(lambda: not service.store.copies[0].holders)
            service.now += 600.0
            service.socket.tick()
            assert await third.ask(*service.load()) == {"read": TENSORS}

    asyncio.run(body())


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_fit_is_refused_by_its_reason(children: Iterator[Child], device: str) -> None:
    """A wrong key of the node; too little memory, with the numbers; another device; nothing stays open."""

    async def body() -> None:
        async with serving(device) as service:
            child = next(children)
            told = await child.ask(*service.load(secret="another"))
            assert told == {"reason": "WEIGHTS_REFUSED", "numbers": [], "leaks": {}}
            service.reserved = 1 << 60
            told = await child.ask(*service.load())
            assert told["reason"] == "NO_MEMORY" and told["numbers"][0] >= LAYOUT.num_bytes and told["numbers"][1] == 0
            service.reserved = 0
            service.device = "host" if device == "recorder" else "recorder"
            told = await child.ask(*service.load())
            assert (told["reason"], told["leaks"]) == ("DEVICE_MISMATCH", {})

    asyncio.run(body())


def test_memory_that_a_killed_process_had_is_waited_for(children: Iterator[Child]) -> None:
    """Where the books have room and the driver has not yet, a decoder waits a little; past that, it is told."""

    async def body() -> None:
        async with serving("recorder") as service:
            child = next(children)
            service.driver.memory_taken = service.driver.memory
            child.say(*service.load())
            await eventually(lambda: service.driver.calls.count("cuMemCreate") >= 2)
            service.driver.memory_taken = 0
            assert await child.answer() == {"read": TENSORS}
            service.driver.memory_taken = service.driver.memory
            late = next(children)
            late.say(*service.load(2))
            refused = service.driver.calls.count("cuMemCreate")
            await eventually(lambda: service.driver.calls.count("cuMemCreate") > refused)
            service.now += 60.0
            assert (await late.answer())["reason"] == "NO_MEMORY"

    asyncio.run(body())


@pytest.mark.parametrize("device", DEVICES)
def test_memory_without_the_right_header_is_refused(children: Iterator[Child], device: str) -> None:
    """A stale digest in it, or another nonce than the daemon's; with the right one it is mapped."""

    async def body() -> None:
        async with serving(device) as service:
            child = next(children)
            for number, (stale, reason) in enumerate(((True, "WEIGHTS_HEADER"), (False, ""))):
                key = key_of(number)
                copy = service.store.ask(-1 - number, key, LAYOUT.num_bytes)  # as no connection, whose end would end it
                assert copy is not None
                header = weights_header(key_of(9) if stale else key, LAYOUT.num_bytes, copy.nonce)
                os.pwrite(copy.memory.fileno(), header, 0)
                copy.memory.seal()
                copy.filler = None
                told = await child.ask(*service.load(number))
                assert told == ({"reason": reason, "numbers": [], "leaks": {}} if stale else {"read": 0})

    asyncio.run(body())


def test_a_wrong_size_or_word_is_refused() -> None:
    """Another size under the same key; a filler's word without the proof, after which somebody else fills."""

    async def body() -> None:
        async with serving() as service:

            def steps() -> None:
                key = key_of(1)
                first = WeightsLink(service.path, SECRET, key, 8192)
                reply, fd = first.ask()
                assert reply.status is WeightsStatus.FILL
                os.close(fd)
                with pytest.raises(PermissionDenied):
                    WeightsLink(service.path, SECRET, key, 4096).ask()
                with pytest.raises(PermissionDenied):
                    first.filled(bytes(32))
                second = WeightsLink(service.path, SECRET, key, 8192)
                reply, fd = second.ask()
                assert reply.status is WeightsStatus.FILL
                os.close(fd)
                for link in (first, second):
                    link.close()

            await asyncio.to_thread(steps)
            await eventually(lambda: not service.store.copies)

    asyncio.run(body())


def test_no_fd_is_lost_and_garbage_harms_nobody() -> None:
    """After many good, bad and broken requests the daemon has as many fds as before, and serves."""

    async def body() -> None:
        async with serving() as service:

            def good() -> None:
                link = WeightsLink(service.path, SECRET, key_of(1), 8192)
                os.close(link.ask()[1])
                link.close()

            def bad(data: bytes) -> None:
                with socket.socket(socket.AF_UNIX) as link:
                    link.connect(service.path)
                    with contextlib.suppress(OSError):
                        socket.send_fds(link, [data], [0])
                        link.shutdown(socket.SHUT_WR)
                        link.recv(1000)

            before = len(os.listdir("/proc/self/fd"))
            for number in range(20):
                await asyncio.to_thread(good)
                await asyncio.to_thread(bad, bytes([number]) * (20 * number + 1))
            await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
            await asyncio.to_thread(good)

    asyncio.run(body())


def test_an_unsealed_memory_is_not_taken(tmp_path: Path) -> None:
    """Nobody at the socket is a retryable error; a reply with memory that others can write is refused and closed."""
    from common.errors import Unavailable
    from common.weights_frames import REQUEST_BYTES, WeightsReply, encode_reply

    with pytest.raises(Unavailable):
        WeightsLink(tmp_path / "none.sock", SECRET, key_of(1), 4096)
    before = len(os.listdir("/proc/self/fd"))
    writable = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(writable, 4096)
    with tempfile.TemporaryDirectory(prefix="ts-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen(1)
        link = WeightsLink(f"{folder}/s", SECRET, key_of(1), 4096)
        theirs, _ = listener.accept()
        socket.send_fds(theirs, [encode_reply(WeightsReply(WeightsStatus.READ, memory_bytes=4096))], [writable])
        with pytest.raises(FailedPrecondition) as caught:
            link.ask()
        assert caught.value.reason == "WEIGHTS_SEALS"
        assert len(theirs.recv(1000)) == REQUEST_BYTES
        theirs.close()
        link.close()
    os.close(writable)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("device", DEVICES)
def test_the_weights_outlive_the_daemon(children: Iterator[Child], device: str) -> None:
    """A real daemon is killed: decoders keep what they map, hand it to the next daemon, and a decoder that comes then
    reads nothing and maps the very same memory."""

    async def body() -> None:
        with tempfile.TemporaryDirectory(prefix="ts-") as folder:
            options = ("--device", "cuda") if device == "recorder" else ()
            module = "tests.cuda_daemon" if device == "recorder" else "cachemgr"
            node = Killable(Path(folder), *options, module=module)
            try:
                await node.start()
                secret = node.paths.internal_key.read_text().strip()
                load = ("load", str(node.paths.weights_socket), secret, device, 1)
                one, two, late = (next(children) for _ in range(3))
                assert await one.ask(*load) == {"read": TENSORS}
                assert await two.ask(*load) == {"read": 0}
                inode, content = await one.ask("inode"), await one.ask("content")
                node.kill()
                assert await two.ask("content") == content
                await node.start()
                await eventually(lambda: node.log.read_text().count('"holders": 2') >= 2)
                assert "weights_adopted" in node.log.read_text()
                assert await late.ask(*load) == {"read": 0}
                assert await late.ask("inode") == inode
                assert await late.ask("content") == content
                assert secret not in node.log.read_text()
            finally:
                await node.close()

    asyncio.run(body())
