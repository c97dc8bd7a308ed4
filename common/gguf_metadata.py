"""The metadata of a GGUF file (version 2 and 3, little-endian), and nothing else of it.

Reads the header alone through a memory map: 50,000 tokens in tens of milliseconds, and never a tensor. Every length
is checked against the file's end before it is used. Called by the gateway for its tokenizer and by the command line
before a start.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from common.errors import InvalidArgument

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_MAX_FIELDS: Final = 65_536
_MAX_ITEMS: Final = 16_777_216


class _Cursor:
    """A position in the file. Raises InvalidArgument where the file ends too early or a number is out of bounds."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise _broken("it ends inside its metadata")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def number(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def count(self, limit: int) -> int:
        value = int(self.number("Q"))
        if value > limit:
            raise _broken(f"a count of {value} is over {limit}")
        return value

    def string(self) -> str:
        return self.take(self.count(len(self._data))).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = int(self.number("I")), self.count(_MAX_ITEMS)
            if item in _SCALARS:
                form = f"<{count}{_SCALARS[item]}"
                return list(struct.unpack(form, self.take(struct.calcsize(form))))
            if item == _STRING:
                return self._strings(count)
            raise _broken(f"an array of type {item} is not known")
        raise _broken(f"a value of type {kind} is not known")

    def _strings(self, count: int) -> list[str]:
        # The inner loop of loading a vocabulary: no call but the two that are needed.
        data, at, end = self._data, self._at, len(self._data)
        unpack: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if at + 8 > end:
                raise _broken("it ends inside its metadata")
            (size,) = unpack(data, at)
            at += 8
            if size > end - at:
                raise _broken("it ends inside its metadata")
            strings.append(data[at : at + size].decode("utf-8", "replace"))
            at += size
        self._at = at
        return strings


def read_metadata(path: Path) -> dict[str, Any]:
    """All metadata of the file: numbers, booleans, strings and lists of them. Raises InvalidArgument, `model`."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data))
    except (OSError, ValueError) as error:
        raise _broken("it cannot be read") from error


def _parse(cursor: _Cursor) -> dict[str, Any]:
    if cursor.take(4) != _MAGIC:
        raise _broken("it is no GGUF file")
    version = int(cursor.number("I"))
    if version not in _VERSIONS:
        raise _broken(f"its version is {version}; served are 2 and 3, little-endian")
    cursor.number("Q")  # number of tensors
    fields: dict[str, Any] = {}
    for _ in range(cursor.count(_MAX_FIELDS)):
        name = cursor.string()
        fields[name] = cursor.value(int(cursor.number("I")))
    return fields


def _broken(what: str) -> InvalidArgument:
    return InvalidArgument("model", f"the model file is not served: {what}")
