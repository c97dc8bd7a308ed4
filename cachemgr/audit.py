"""The audit log: one JSON line for each admin call that changes something or would have.

Invariant: lines are whole and in order, the files are 0600 from their first byte and bounded in size, and no line holds
a secret or a token. A disk that takes no line stops nobody: the failure is logged, and so is each call by its name.
Written by the interceptors of the admin server (`roles.py`, `audit_calls.py`), from the event loop.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from common.logs import get_logger

MAX_FILE_BYTES: Final = 8 * 1024 * 1024
OLD_FILES: Final = 3
UNKNOWN_PER_SECOND: Final = 10
"""Lines for callers without a known credential, so that those cannot push out what others did."""
_SECOND_NS: Final = 1_000_000_000


class AuditLog:
    """Appends to `path`; full files become `path`.1 (the newest) to `path`.3."""

    def __init__(
        self, path: Path, *, wall_ns: Callable[[], int] = time.time_ns, max_file_bytes: int = MAX_FILE_BYTES
    ) -> None:
        self._path = path
        self._wall_ns = wall_ns
        self._max_file_bytes = max_file_bytes
        self._fd: int | None = None
        self._begins_torn = False
        self._second = 0
        self._unknown = 0
        self._suppressed = 0

    def record(
        self, who: str, method: str, fields: Mapping[str, Any], outcome: str, result: Mapping[str, Any], peer: str = ""
    ) -> None:
        """One call: by which role, what with which fields, the name of its status code, and what it answered."""
        now = self._wall_ns()
        if who == "unknown" and self._is_too_many(now):
            return
        line: dict[str, Any] = {
            "time": _moment(now),
            "who": who,
            "method": method,
            "fields": dict(fields),
            "outcome": outcome,
        }
        if result:
            line["result"] = dict(result)
        if peer:
            line["peer"] = peer
        if self._suppressed:
            line["suppressed"], self._suppressed = self._suppressed, 0
        try:
            self._append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            self._close()
            get_logger().error("audit_write_failed", error=error.strerror, method=method, role=who, outcome=outcome)

    def close(self) -> None:
        """Close the file. Harmless when repeated."""
        self._close()

    def _is_too_many(self, now_ns: int) -> bool:
        second = now_ns // _SECOND_NS
        if second != self._second:
            self._second, self._unknown = second, 0
        self._unknown += 1
        if self._unknown <= UNKNOWN_PER_SECOND:
            return False
        self._suppressed += 1
        return True

    def _append(self, line: bytes) -> None:
        fd = self._fd if self._fd is not None else self._open()
        if os.fstat(fd).st_size + len(line) > self._max_file_bytes:
            self._rotate()
            fd = self._open()
        if self._begins_torn:
            line = b"\n" + line
        if os.write(fd, line) != len(line):
            raise OSError(0, "the line was cut off")
        self._begins_torn = False

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = self._fd = os.open(self._path, flags, 0o600)
        found = os.fstat(fd)
        if stat.S_IMODE(found.st_mode) != 0o600:
            os.fchmod(fd, 0o600)
        self._begins_torn = os.pread(fd, 1, max(0, found.st_size - 1)) not in (b"", b"\n")  # its end is no line's
        return fd

    def _rotate(self) -> None:
        self._close()
        for number in range(OLD_FILES, 0, -1):
            source = self._path if number == 1 else _numbered(self._path, number - 1)
            with contextlib.suppress(FileNotFoundError):
                os.replace(source, _numbered(self._path, number))

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _moment(wall_ns: int) -> str:
    seconds, rest = divmod(wall_ns, _SECOND_NS)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest // 1_000_000:03d}Z"
