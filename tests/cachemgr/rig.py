"""Helpers of the daemon's tests: polling with a deadline, short socket folders, child processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 20.0


async def eventually(check: Callable[[], object], deadline_seconds: float = DEADLINE_SECONDS) -> None:
    """Poll `check` until it is true; AssertionError at the deadline."""
    end = time.monotonic() + deadline_seconds
    while not check():
        assert time.monotonic() < end, "the state did not come about"
        await asyncio.sleep(0.01)


async def eventually_async(check: Callable[[], Awaitable[object]], deadline_seconds: float = DEADLINE_SECONDS) -> None:
    """Poll the coroutine `check` until its result is true."""
    end = time.monotonic() + deadline_seconds
    while not await check():
        assert time.monotonic() < end, "the state did not come about"
        await asyncio.sleep(0.02)


def spawn_python(source: str, *arguments: str, **options: object) -> subprocess.Popen[bytes]:
    """A real second process that runs `source`, with pipes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-c", source, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **options,
    )


async def read_line(process: subprocess.Popen[bytes], deadline_seconds: float = DEADLINE_SECONDS) -> str:
    """One line of the child's output, without blocking the loop."""
    assert process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), deadline_seconds)
    return line.decode().strip()
