"""Structured logs: one JSON object a line on stderr (or readable lines on a terminal), events named verb_noun.

Prompt text, keys, grants and handles never reach a log; `drop_secrets` is the last guard against a slip.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any

import structlog

LEVELS = ("debug", "info", "warning", "error")
FORBIDDEN = frozenset(
    {"key", "secret", "grant", "token", "arena_token", "authorization", "prompt", "text", "fd", "nonce"}
)


def drop_secrets(_logger: object, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace the value of a field that must never be logged."""
    for name in FORBIDDEN & event.keys():
        event[name] = "<redacted>"
    return event


class StderrLogger:
    """Writes each line to the standard error of the moment, so that a redirected stream is followed.

    A line that a full disk does not take is lost and stops nobody. The next that is taken begins on a line of its own,
    whatever was left of those before, and their number follows it.
    """

    _num_lost = 0
    _torn = False

    def __init__(self, *_args: object) -> None:
        pass

    def msg(self, message: str) -> None:
        """Write one line."""
        try:
            descriptor = sys.stderr.fileno()
        except (OSError, ValueError):  # a stream in memory
            sys.stderr.write(f"{message}\n")
            sys.stderr.flush()
            return
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        StderrLogger._write(descriptor, f"{message}\n".encode("utf-8", "backslashreplace"))

    @classmethod
    def _write(cls, descriptor: int, line: bytes) -> None:
        left = line if not cls._torn else b"\n" + line
        try:
            while left:  # past the stream's buffer, which keeps or drops what it could not write as it likes
                left = left[os.write(descriptor, left) :]
                cls._torn = bool(left)
        except OSError:
            cls._num_lost += 1
            return
        if cls._num_lost:
            num_lost, cls._num_lost = cls._num_lost, 0
            get_logger().warning("log_lines_lost", num_lines=num_lost)

    debug = info = warning = error = critical = exception = msg


def where(error: BaseException) -> list[str]:
    """The frames of an exception, innermost last, without its message: that could quote what a caller sent."""
    return [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]


def configure_logs(process: str, level: str = "info") -> None:
    """Set structlog up for this process. Raises ValueError on an unknown level."""
    if level not in LEVELS:
        raise ValueError(f"log level is {level!r}; allowed are {', '.join(LEVELS)}")
    terminal = sys.stderr.isatty()
    renderer: Any = structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            drop_secrets,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=StderrLogger,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)


def get_logger() -> Any:
    """A bound structlog logger."""
    return structlog.get_logger()
