"""Structured logs: one JSON object a line on stderr (or readable lines on a terminal), events named verb_noun.

Prompt text, keys, grants and handles never reach a log; `drop_secrets` is the last guard against a slip.
"""

from __future__ import annotations

import logging
import sys
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
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)


def get_logger() -> Any:
    """A bound structlog logger."""
    return structlog.get_logger()
