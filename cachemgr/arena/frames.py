"""Reading a frame and the fds that come with it from a non-blocking Unix socket, on the event loop.

Invariant: every fd that the kernel has delivered is in the caller's list, whatever happens, and is the caller's to
close; none of them survives an exec. Called by `handoff.py`, which bounds the time. It judges no frame.
"""

from __future__ import annotations

import asyncio
import socket

from common.arena_frames import FrameError
from common.arena_wire import receive_with_fds


async def read_frame(link: socket.socket, size: int, fds: list[int]) -> bytes:
    """`size` bytes; the fds that came with them are put into `fds`, whatever happens."""
    data = b""
    while len(data) < size:
        try:
            part = receive_with_fds(link, size - len(data), fds)
        except BlockingIOError:
            await _readable(link)
            continue
        if len(fds) > 1:
            raise FrameError(f"the peer sent {len(fds)} fds")
        if not part:
            raise FrameError(f"the peer closed after {len(data)} of {size} bytes")
        data += part
    return data


async def _readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(link, _wake, ready)
    try:
        await ready
    finally:
        loop.remove_reader(link)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
