"""Handing the arena back: only the process that was asked may, once, and only the very memory is taken."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from cachemgr.arena.handoff import Handoff
from cachemgr.arena.host import HostArena
from common.arena_frames import encode_return
from common.arena_sizes import ArenaSizes
from common.arena_wire import return_arena
from common.errors import PermissionDenied

NONCE = bytes(range(32))
SIZE = ArenaSizes(3, 4096)


@contextlib.asynccontextmanager
async def wanting() -> AsyncIterator[tuple[Handoff, Path, list[int]]]:
    """A hand-off that has no memory and wants it; what it was given."""
    taken: list[int] = []

    def take(fd: int) -> bool:
        taken.append(fd)
        return True

    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        path = Path(folder) / "arena.sock"
        handoff = Handoff(lambda *_: None)
        handoff.want_arena(take)
        await handoff.start(path)
        try:
            yield handoff, path, taken
        finally:
            await handoff.stop()
            for fd in taken:
                os.close(fd)


def test_the_asked_process_hands_the_memory_back_once() -> None:
    """The fd that arrives is the very memory; the same token is no good a second time."""

    async def body() -> None:
        arena = HostArena(SIZE, nonce=NONCE)
        async with wanting() as (handoff, path, taken):
            token = handoff.ask(os.getpid())
            await asyncio.to_thread(return_arena, path, token, arena.fileno())
            assert os.fstat(taken[0]).st_ino == os.fstat(arena.fileno()).st_ino
            assert not os.get_inheritable(taken[0])
            with pytest.raises(PermissionDenied):
                await asyncio.to_thread(return_arena, path, token, arena.fileno())
            assert len(taken) == 1
        arena.close()

    asyncio.run(body())


def test_others_and_wrong_tokens_are_refused_and_leak_nothing() -> None:
    """A token for another process, a made-up one, and any when nothing is wanted: refused, and no fd stays open."""

    async def body() -> None:
        arena = HostArena(SIZE, nonce=NONCE)
        async with wanting() as (handoff, path, taken):
            before = len(os.listdir("/proc/self/fd"))
            for token in (handoff.ask(os.getpid() + 1), bytes(16)):
                with pytest.raises(PermissionDenied):
                    await asyncio.to_thread(return_arena, path, token, arena.fileno())
            token = handoff.ask(os.getpid())
            handoff.want_arena(None)
            with pytest.raises(PermissionDenied):
                await asyncio.to_thread(return_arena, path, token, arena.fileno())
            assert taken == []
            assert len(os.listdir("/proc/self/fd")) == before
        arena.close()

    asyncio.run(body())


@pytest.mark.parametrize("count", [0, 2])
def test_a_return_carries_exactly_one_fd(count: int) -> None:
    """None or two is refused or dropped, and every one that came is closed."""

    async def body() -> None:
        arena = HostArena(SIZE, nonce=NONCE)
        async with wanting() as (handoff, path, taken):
            token = handoff.ask(os.getpid())
            before = len(os.listdir("/proc/self/fd"))

            def send() -> bytes:
                with socket.socket(socket.AF_UNIX) as link:
                    link.settimeout(10)
                    link.connect(str(path))
                    socket.send_fds(link, [encode_return(token)], [arena.fileno()] * count)
                    return link.recv(200)

            await asyncio.to_thread(send)
            assert taken == []
            assert len(os.listdir("/proc/self/fd")) == before
        arena.close()

    asyncio.run(body())


def test_only_the_same_memory_is_adopted() -> None:
    """Another nonce, size or seal, a plain file and a read-only fd are refused by what differs, and closed; the memory
    itself is taken, and stays sealed."""
    arena = HostArena(SIZE, nonce=NONCE)
    twin = HostArena.adopt(os.dup(arena.fileno()), SIZE, nonce=NONCE)
    assert os.fstat(twin.fileno()).st_ino == os.fstat(arena.fileno()).st_ino
    twin.close()
    bare = os.memfd_create("bare", os.MFD_ALLOW_SEALING)
    os.ftruncate(bare, arena.arena_bytes)
    os.pwrite(bare, NONCE, 0)
    readonly = os.open(f"/proc/self/fd/{arena.fileno()}", os.O_RDONLY)
    with tempfile.TemporaryFile() as plain:
        cases = [
            (os.dup(arena.fileno()), SIZE, bytes(32), "nonce"),
            (os.dup(arena.fileno()), replace(SIZE, num_blocks=4), NONCE, "bytes"),
            (bare, SIZE, NONCE, "seals"),
            (readonly, SIZE, NONCE, "cannot be written"),
            (os.dup(plain.fileno()), SIZE, NONCE, "no sealed memory file"),
        ]
        for fd, size, nonce, why in cases:
            with pytest.raises(ValueError, match=why):
                HostArena.adopt(fd, size, nonce=nonce)
            with pytest.raises(OSError):
                fcntl.fcntl(fd, fcntl.F_GETFD)
    arena.close()
