"""What does a stream of gRPC cost by itself? An echo over a Unix socket in a process of its own, with our options.

Invariant: nothing of a service is in it, neither interceptor nor queue nor protobuf: what is left is the library, the
socket and the wake-ups of two processes. `bench/wire.py` runs it beside the daemon; as a program of its own
(`python -m bench.bare_stream SOCKET`) it is the echo.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from common.rpc import bind, make_server, open_channel, unix_target
from common.serving import new_event_loop

METHOD = "/bench.Bare/Echo"
START_SECONDS = 20.0


class _Echo(grpc.GenericRpcHandler):  # type: ignore[misc,unused-ignore]
    def service(self, _details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._echo)

    async def _echo(self, requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request


async def round_trips(rounds: int) -> list[float]:
    """Microseconds of `rounds` empty round trips to the echo."""
    with tempfile.TemporaryDirectory(prefix="tessera-bench-") as folder:
        path = Path(folder) / "echo.sock"
        command = [sys.executable, "-m", "bench.bare_stream", str(path)]
        process = subprocess.Popen(command, cwd=Path(__file__).parent.parent)
        try:
            begun = time.perf_counter()
            while not path.exists():
                if process.poll() is not None or time.perf_counter() - begun > START_SECONDS:
                    raise RuntimeError("the echo did not start")
                await asyncio.sleep(0.01)
            return await _timed(path, rounds)
        finally:
            process.terminate()
            process.wait()


async def _timed(path: Path, rounds: int) -> list[float]:
    times = []
    async with open_channel(unix_target(path), "none") as channel:
        await asyncio.wait_for(channel.channel_ready(), START_SECONDS)  # its socket is there before it listens
        call: Any = channel.stream_stream(METHOD)()
        for _ in range(rounds):
            answer = asyncio.ensure_future(call.read())
            await asyncio.sleep(0)  # it waits before the question is sent, as a decoder's reader does
            begun = time.perf_counter_ns()
            await call.write(b"")
            await answer
            times.append((time.perf_counter_ns() - begun) / 1000)
        call.cancel()
    return times


async def _serve(path: Path) -> None:
    server = make_server()
    server.add_generic_rpc_handlers((_Echo(),))
    bind(server, unix_target(path))
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(Path(sys.argv[1])))
