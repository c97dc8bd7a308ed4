"""Runs one service: an event loop whose stop event is set by SIGTERM or SIGINT; errors become exit codes.

The loop is uvloop's where that is installed, else asyncio's own. Both do the same; but a thread that calls
`call_soon_threadsafe` of asyncio's gives up the interpreter lock to the loop's thread, in the middle of a step.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from common.errors import TesseraError
from common.logs import get_logger
from common.scheduling import prefer_latency

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


def settle_heap() -> None:
    """Call once what a service builds at start is there: it is never garbage, so collections need not walk it.

    A full collection over the modules and models of a process takes tens of milliseconds, in the middle of a step.
    """
    gc.collect()
    gc.freeze()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The loop that a service runs on."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()  # untyped where it is not installed
    return loop


def run_service(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> int:
    """Run `main(stop)` until it returns; `stop` is set by the first SIGTERM or SIGINT. Returns the exit status."""

    prefer_latency()

    async def body() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await main(stop)

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(body())
    except TesseraError as error:
        get_logger().error("service_failed", reason=error.reason, message=error.message)
        sys.stderr.write(f"error: {error.message}\n")
        return EXIT_FAILED
    return EXIT_OK
