"""Which event loop a service runs on."""

from __future__ import annotations

import asyncio
import importlib.util
import sys

import pytest

from common.serving import EXIT_OK, run_service


def loop_of_a_service() -> str:
    """The package of the loop that `run_service` makes."""
    seen: list[str] = []

    async def note(_stop: asyncio.Event) -> None:
        seen.append(type(asyncio.get_running_loop()).__module__.partition(".")[0])

    assert run_service(note) == EXIT_OK
    return seen[0]


def test_a_service_runs_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where uvloop cannot be imported a service runs on the loop of asyncio; where it can, on uvloop's."""
    assert loop_of_a_service() == ("uvloop" if importlib.util.find_spec("uvloop") else "asyncio")
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop_of_a_service() == "asyncio"
