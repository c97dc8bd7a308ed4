"""A Unix socket in front of the cache manager's that a test can cut: what is on its way then is lost.

`hold` keeps bytes of one direction back, so that a cut loses just answers, or just operations, of some moments.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path


class CutProxy:
    """Listens on `path` and passes everything on to `target` until it is cut; then connections may come again."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path = path
        self._target = target
        self.refuse = False  # let nobody in
        self._tasks: set[asyncio.Task[object]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._server: asyncio.Server | None = None
        self.release()

    async def __aenter__(self) -> CutProxy:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()

    def hold(self, direction: str) -> None:
        """Keep back what goes `up` to the daemon, or `down` to the decoder, from now on."""
        self._flowing[direction].clear()

    def release(self) -> None:
        """Let everything through."""
        for flowing in self._flowing.values():
            flowing.set()

    def cut(self) -> None:
        """Close every connection at once, with what is kept back; new ones flow."""
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        self._tasks.clear()
        self._flowing = {"up": asyncio.Event(), "down": asyncio.Event()}
        self.release()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):  # cancelled by a cut alone
            up_reader, up_writer = await asyncio.open_unix_connection(self._target)
            self._writers |= {writer, up_writer}
            up, down = self._flowing["up"], self._flowing["down"]
            await asyncio.gather(_pump(reader, up_writer, up), _pump(up_reader, writer, down))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            await flowing.wait()
            writer.write(data)
            await writer.drain()
    writer.close()
