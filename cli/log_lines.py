"""What a line of a process's log means to a person at the terminal. Pure: a line in, a sentence or nothing out.

Only errors and the progress of loading are for the terminal; everything else stays in the file. A sentence never holds
more than the log does, and no frames.
"""

from __future__ import annotations

import json
import re
from typing import Any

LOUD_LEVELS = ("error", "critical")
PROGRESS = "loading the model: "
COMPILING = "compiling kernels, which is done once per machine and pair of --dtype and --kv-dtype: "
COMPILING_TAKES = "6 to 20 s of processor time"
SENTENCES = {
    "handler_failed": "a call failed by a defect of ours ({error} in {method})",
    "integrity_violated": "{violations} invariants of the cache are broken, the first: {first}",
    "lease_refused": "the cache manager refused blocks ({reason})",
    "loop_failed": "the engine failed ({error}); all its requests have ended",
    "step_failed": "a step failed ({error}); its {sequences} sequences have ended",
}
"""Event -> how it is said; an event without its fields, or without a line here, is said by its name."""

_SHOWN_APART = frozenset({"event", "level", "timestamp", "process", "exception", "frames"})
_NATIVE = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d|WARNING: All log messages before absl")


def parse_event(line: str) -> dict[str, Any] | None:
    """The structured event in a line; None for any other text."""
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def loud_line(line: str) -> str | None:
    """What to show of a log line on the terminal while its process runs; None for everything that stays in the file."""
    if line.startswith("error: "):
        return line
    event = parse_event(line)
    if event is None:
        return None
    if event.get("event") == "model_loading" and isinstance(event.get("fraction"), int | float):
        return f"{PROGRESS}{event.get('stage', '')} {event['fraction']:.0%}".replace("%", " %")
    if event.get("event") == "model_loaded":
        return f"{PROGRESS}done in {event.get('seconds')} s"
    if event.get("event") == "kernels_compiling":
        so_far = f"{event.get('functions')} functions in {event.get('seconds')} s so far"
        return COMPILING + (so_far if event.get("functions") else COMPILING_TAKES)
    if event.get("level") not in LOUD_LEVELS or event.get("event") == "service_failed":  # an `error: ` line follows it
        return None
    return say_event(event)


def say_event(event: dict[str, Any]) -> str:
    """An event as one sentence."""
    name = str(event.get("event", "error"))
    fields = {key: value for key, value in event.items() if key not in _SHOWN_APART}
    try:
        sentence = SENTENCES[name].format_map(fields)
    except KeyError:
        parts = [f"{key.replace('_', ' ')} {value}" for key, value in fields.items()]
        sentence = name.replace("_", " ") + (f": {', '.join(parts)}" if parts else "")
    return " ".join(sentence.split())


def last_words(lines: list[str], count: int) -> list[str]:
    """What explains an unexpected end: errors in words and plain text (a traceback), at most `count` lines of it."""
    shown = []
    for line in lines:
        if line.startswith("{"):
            said = loud_line(line)
            if said is not None and not said.startswith((PROGRESS, COMPILING)):
                shown.append(said)
        elif line.strip() and not _NATIVE.match(line):
            shown.append(line)
    return shown[-count:]
