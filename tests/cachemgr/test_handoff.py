"""The arena socket: the fd reaches the one right process, once; garbage harms nobody."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from cachemgr.arena.handoff import Handoff
from cachemgr.arena.host import HostArena
from common.arena_frames import (
    REPLY_BYTES,
    REQUEST_BYTES,
    ArenaInfo,
    ArenaStatus,
    FrameError,
    decode_reply,
    encode_reply,
    encode_request,
)
from common.arena_sizes import ArenaSizes
from common.arena_wire import confirm_written, fetch_arena
from common.errors import FailedPrecondition, PermissionDenied, Unavailable
from tests.cachemgr.rig import eventually, read_line, spawn_python

FINGERPRINT = b"f" * 16
NONCE = bytes(range(32))
CHILD = """
import mmap, sys
from common.arena_wire import fetch_arena
fd, info = fetch_arena(sys.argv[1], bytes.fromhex(sys.stdin.readline()))
view = mmap.mmap(fd, info.arena_bytes)
print(view[:32] == info.nonce, info.num_blocks, info.layout_fingerprint.decode(), flush=True)
sys.stdin.readline()
view[info.block_bytes : info.block_bytes + 5] = b"hello"
print(view[2 * info.block_bytes : 2 * info.block_bytes + 5].decode(), flush=True)
sys.stdin.readline()
"""


@contextlib.asynccontextmanager
async def serving(**options):
    """A hand-off on a short path, its arena, and the list of hand-overs."""
    handed = []
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        path = Path(folder) / "arena.sock"
        arena = HostArena(ArenaSizes(3, 4096), nonce=NONCE)
        handoff = Handoff(lambda *hand: handed.append(hand), **options)
        handoff.serve_arena(arena, FINGERPRINT)
        await handoff.start(path)
        try:
            yield handoff, path, arena, handed
        finally:
            await handoff.stop()
            arena.close()
            for _, _, pidfd in handed:
                os.close(pidfd)


async def fetch_here(path, token):
    fd, info = await asyncio.to_thread(fetch_arena, path, token)
    os.close(fd)
    return info


async def raw_exchange(path, data, *, close_write=True):
    """Send raw bytes; what comes back until the daemon closes."""
    reader, writer = await asyncio.open_unix_connection(path)
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
        if close_write:
            writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def test_second_process_maps_the_same_memory():
    """A real second process sees the nonce, and what either side writes is seen by the other."""

    async def body():
        async with serving() as (handoff, path, arena, handed):
            child = spawn_python(CHILD, str(path))
            with child:
                token = handoff.offer(7, child.pid)
                child.stdin.write(token.hex().encode() + b"\n")
                child.stdin.flush()
                assert await read_line(child) == f"True 3 {FINGERPRINT.decode()}"
                os.pwrite(arena.fileno(), b"world", 2 * 4096)
                child.stdin.write(b"\n")
                child.stdin.flush()
                assert await read_line(child) == "world"
                assert os.pread(arena.fileno(), 5, 4096) == b"hello"
                assert [(session, pid) for session, pid, _ in handed] == [(7, child.pid)]
                ready = asyncio.Event()
                asyncio.get_running_loop().add_reader(handed[0][2], ready.set)
                assert not ready.is_set()
                child.kill()
                await asyncio.wait_for(ready.wait(), 10)
                asyncio.get_running_loop().remove_reader(handed[0][2])

    asyncio.run(body())


def test_socket_is_for_its_owner_alone():
    """The socket file has mode 0600."""

    async def body():
        async with serving() as (_, path, _, _):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600

    asyncio.run(body())


def test_token_is_good_once():
    """The second use of a token gets no memory; the first did."""

    async def body():
        async with serving() as (handoff, path, _, handed):
            token = handoff.offer(1, os.getpid())
            assert (await fetch_here(path, token)).num_blocks == 3
            with pytest.raises(PermissionDenied):
                await fetch_here(path, token)
            assert len(handed) == 1

    asyncio.run(body())


def test_another_process_gets_nothing_for_a_right_token_and_spends_it():
    """A token of another process is refused, and is worthless afterwards."""

    async def body():
        async with serving() as (handoff, path, _, handed):
            token = handoff.offer(1, os.getppid())
            for _ in range(2):
                with pytest.raises(PermissionDenied):
                    await fetch_here(path, token)
            assert handed == []
            await fetch_here(path, handoff.offer(1, os.getpid()))
            assert len(handed) == 1

    asyncio.run(body())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("user", "allowed"), [(0, True), (65534, False)])
def test_another_user_gets_nothing_for_a_right_token_of_its_own_process(user, allowed):
    """SO_PEERCRED's user must be the daemon's, even where token, process and file modes would let the peer in."""

    async def body():
        async with serving() as (handoff, path, _, handed):
            path.parent.chmod(0o711)
            path.chmod(0o666)
            ours, theirs = socket.socketpair()
            child = os.fork()
            if child == 0:
                os._exit(_fetch_as(user, path, theirs))
            theirs.close()
            ours.send(handoff.offer(1, child))
            status = await asyncio.to_thread(os.waitpid, child, 0)
            ours.close()
            assert os.waitstatus_to_exitcode(status[1]) == (0 if allowed else 13)
            assert len(handed) == int(allowed)

    asyncio.run(body())


def _fetch_as(user, path, link):
    """In a child: become `user`, fetch with the token that comes; 0 where the memory came, 13 where it was refused."""
    try:
        os.setuid(user)
        os.close(fetch_arena(path, link.recv(16))[0])
    except PermissionDenied:
        return 13
    except (OSError, Unavailable):
        return 1
    return 0


def test_wrong_withdrawn_and_replaced_tokens_are_refused():
    """Only the newest token of a live session is good."""

    async def body():
        async with serving() as (handoff, path, _, handed):
            with pytest.raises(PermissionDenied):
                await fetch_here(path, bytes(16))
            old = handoff.offer(1, os.getpid())
            new = handoff.offer(1, os.getpid())
            with pytest.raises(PermissionDenied):
                await fetch_here(path, old)
            gone = handoff.offer(2, os.getpid())
            handoff.withdraw(2)
            with pytest.raises(PermissionDenied):
                await fetch_here(path, gone)
            assert handed == []
            await fetch_here(path, new)
            assert [session for session, _, _ in handed] == [1]

    asyncio.run(body())


def test_garbage_short_huge_and_foreign_frames_leave_it_serving():
    """After every kind of bad frame the right request is still answered, and no garbage gets a byte of memory."""

    async def body():
        async with serving() as (handoff, path, _, handed):
            good = encode_request(bytes(16))
            frames = [
                b"",
                b"\0",
                good[:-1],
                os.urandom(REQUEST_BYTES),
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2,
                b"\xff" * (4 << 20),
            ]
            for frame in frames:
                assert await raw_exchange(path, frame) == b""
            reply = await raw_exchange(path, encode_request(bytes(16), version=99))
            assert decode_reply(reply)[0] is ArenaStatus.VERSION_MISMATCH
            assert handed == []
            await fetch_here(path, handoff.offer(1, os.getpid()))

    asyncio.run(body())


def test_slow_peers_are_dropped_and_hold_nobody_up():
    """Silent connections up to the limit are dropped at their deadline; a request after them is served."""

    async def body():
        async with serving(request_timeout_seconds=0.2, max_connections=4) as (handoff, path, _, _):
            idle = []
            for _ in range(4):
                link = socket.socket(socket.AF_UNIX)
                link.connect(str(path))
                link.send(b"TSR")
                link.setblocking(False)
                idle.append(link)
            loop = asyncio.get_running_loop()
            for link in idle:
                assert await asyncio.wait_for(loop.sock_recv(link, 1), 10) == b""
                link.close()
            await fetch_here(path, handoff.offer(1, os.getpid()))

    asyncio.run(body())


def test_no_fd_is_lost_whatever_peers_send():
    """The daemon's fds are as many after a hundred good and bad exchanges as before."""

    async def body():
        async with serving() as (handoff, path, _, handed):
            await fetch_here(path, handoff.offer(1, os.getpid()))
            before = len(os.listdir("/proc/self/fd")) - len(handed)
            for number in range(50):
                await fetch_here(path, handoff.offer(number, os.getpid()))
                with pytest.raises(PermissionDenied):
                    await fetch_here(path, bytes(16))
            await eventually(lambda: len(os.listdir("/proc/self/fd")) - len(handed) <= before)

    asyncio.run(body())


def test_stale_socket_is_replaced_and_other_files_are_not():
    """The socket of a dead daemon goes; a file that is no socket is left alone and named."""

    async def body():
        async with serving() as (_, path, arena, _):
            stale = path.with_name("stale.sock")
            dead = socket.socket(socket.AF_UNIX)
            dead.bind(str(stale))
            dead.close()
            second = Handoff(lambda *_: None)
            second.serve_arena(arena, FINGERPRINT)
            await second.start(stale)
            with pytest.raises(PermissionDenied):
                await fetch_here(stale, bytes(16))
            await second.stop()
            other = path.with_name("file.sock")
            other.write_text("mine")
            with pytest.raises(FailedPrecondition, match=r"file\.sock"):
                await Handoff(lambda *_: None).start(other)
            assert other.read_text() == "mine"

    asyncio.run(body())


def test_client_refuses_memory_that_is_not_what_the_reply_says(tmp_path):
    """An unsealed, short or plain file, or no fd at all, is refused by the client and closed."""
    info = decode_reply(_reply(3, 4096))[1]
    plain = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, info.arena_bytes)
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, info.arena_bytes)
    small = HostArena(ArenaSizes(2, 4096), nonce=NONCE)
    right = HostArena(ArenaSizes(3, 4096), nonce=NONCE)
    cases = [([plain], FailedPrecondition), ([unsealed], FailedPrecondition), ([small.fileno()], FailedPrecondition)]
    cases += [([], FailedPrecondition), ([right.fileno()] * 2, FailedPrecondition), ([right.fileno()], None)]

    async def body():
        for number, (fds, error) in enumerate(cases):
            path = Path(folder) / f"{number}.sock"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen(1)
                fetching = asyncio.create_task(fetch_here(path, bytes(16)))
                link, _ = await asyncio.to_thread(listener.accept)
                with link:
                    assert link.recv(REQUEST_BYTES) == encode_request(bytes(16))
                    socket.send_fds(link, [_reply(3, 4096)], fds)
                if error is None:
                    assert (await fetching).arena_bytes == 4 * 4096
                else:
                    with pytest.raises(error):
                        await fetching

    before = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        asyncio.run(body())
    assert len(os.listdir("/proc/self/fd")) == before
    for fd in (plain, unsealed):
        os.close(fd)
    small.close()
    right.close()


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"num_window_blocks": 4}, False),
        ({"num_window_blocks": 0}, False),
        ({"window_block_bytes": 512}, False),
        ({"arena_bytes": 4 * 4096}, False),
    ],
)
def test_client_refuses_memory_whose_window_blocks_are_not_what_the_reply_says(changes, fits):
    """The size must be that of both pools; a reply that leaves window blocks out, or names others, is refused."""
    arena = HostArena(ArenaSizes(3, 4096, 2, 1024), nonce=NONCE)
    reply = encode_reply(ArenaStatus.OK, replace(arena.info(FINGERPRINT), **changes))

    async def body():
        with tempfile.TemporaryDirectory(prefix="ts-") as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/a.sock")
            listener.listen(1)
            fetching = asyncio.create_task(fetch_here(Path(folder) / "a.sock", bytes(16)))
            link, _ = await asyncio.to_thread(listener.accept)
            with link:
                link.recv(REQUEST_BYTES)
                socket.send_fds(link, [reply], [arena.fileno()])
            if fits:
                assert (await fetching).sizes == arena.sizes
            else:
                with pytest.raises(FailedPrecondition, match="need"):
                    await fetching

    asyncio.run(body())
    arena.close()


def test_absent_daemon_is_unavailable(tmp_path):
    """Nobody at the socket is a retryable error that does not name the path."""
    with pytest.raises(Unavailable) as caught:
        fetch_arena(tmp_path / "none.sock", bytes(16))
    assert "none.sock" not in caught.value.message


def test_reply_frames_are_checked_field_by_field():
    """Wrong lengths, magic, version and status are refused; the right frame is read back."""
    frame = _reply(3, 4096)
    assert len(frame) == REPLY_BYTES
    assert decode_reply(frame)[1].num_blocks == 3
    for bad in (frame[:-1], frame + b"\0", b"X" + frame[1:], frame[:8] + b"\x07" + frame[9:]):
        with pytest.raises(FrameError):
            decode_reply(bad)
    with pytest.raises(FrameError, match="status"):
        decode_reply(frame[:12] + b"\x09" + frame[13:])


def _reply(num_blocks, block_bytes):
    info = ArenaInfo(num_blocks, block_bytes, (num_blocks + 1) * block_bytes, FINGERPRINT, NONCE)
    return encode_reply(ArenaStatus.OK, info)


def test_only_who_was_asked_to_write_the_nonce_is_believed_once():
    """Memory that the daemon cannot write asks its first reader for the nonce until one proves that it read it back: a
    wrong nonce, a token of nobody and a second time are refused. From then on a reader must find it."""

    async def body():
        async with serving() as (handoff, path, arena, _):
            arena.nonce_written = False
            first = handoff.offer(1, os.getpid())
            assert (await fetch_here(path, first)).nonce_wanted
            with pytest.raises(PermissionDenied):
                await asyncio.to_thread(confirm_written, path, first, bytes(32))
            for token in (first, bytes(range(16))):  # the wrong word has spent it
                with pytest.raises(PermissionDenied):
                    await asyncio.to_thread(confirm_written, path, token, NONCE)
            assert not arena.nonce_written
            again = handoff.offer(1, os.getpid())
            assert (await fetch_here(path, again)).nonce_wanted
            await asyncio.to_thread(confirm_written, path, again, NONCE)
            assert arena.nonce_written
            assert not (await fetch_here(path, handoff.offer(1, os.getpid()))).nonce_wanted

    asyncio.run(body())
