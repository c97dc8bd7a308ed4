"""A Unix socket of the daemon's that hands fds over: listening, accepting, bounding how many are connected.

Invariant: the socket is mode 0600; each connection is one task that ends with `stop` and closes its link; more than
`max_connections` are closed at once. Called by the hand-offs, which give the serving; it reads and judges nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from common.errors import FailedPrecondition
from common.kept_sockets import KeptSocket
from common.logs import get_logger

ACCEPT_PAUSE_SECONDS: Final = 0.05

Serve = Callable[[socket.socket], Coroutine[Any, Any, None]]


class FdListener:
    """One listening socket on the event loop."""

    def __init__(self, name: str, serve: Serve, max_connections: int) -> None:
        self._name = name
        self._serve = serve
        self._max_connections = max_connections
        self._listener: socket.socket | None = None
        self.kept_socket: KeptSocket | None = None  # while it listens
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, path: Path) -> None:
        """Listen on `path` (mode 0600). Raises FailedPrecondition where the path holds something else."""
        kept = KeptSocket(path)
        kept.clear()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            listener.bind(os.fspath(kept.kept))
            listener.listen(self._max_connections)
            kept.publish()
        except (OSError, FailedPrecondition):
            listener.close()
            raise
        self._listener, self.kept_socket = listener, kept
        self._accepting = asyncio.create_task(self._accept(listener), name=f"{self._name}-accept")

    async def stop(self) -> None:
        """Stop listening and drop open connections. Harmless when repeated."""
        tasks = [task for task in (self._accepting, *self._connections) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.kept_socket is not None:
            self.kept_socket.remove()
            self.kept_socket = None
        if self._listener is not None:
            self._listener.close()
        self._accepting = self._listener = None

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                link, _ = await loop.sock_accept(listener)
            except OSError as error:  # for example no free fd: wait for some to come back, never spin or end
                get_logger().warning(f"{self._name}_accept_failed", error=error.strerror)
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            if len(self._connections) >= self._max_connections:
                link.close()
                continue
            task = asyncio.create_task(self._served(link), name=f"{self._name}-request")
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _served(self, link: socket.socket) -> None:
        with link:
            link.setblocking(False)
            await self._serve(link)
