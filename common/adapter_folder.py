"""The folder of adapters of a node: names, and how they are put there and taken away while decoders read.

An entry is a directory in the PEFT form. `add` makes a directory with a name of its own and points a symbolic link at
it, whose replacement is one rename: whoever resolves a name sees the old content or the new one, whole. A directory
that somebody put there by hand serves as well. Used by the command line (`add`, `remove`) and by decoders (`locate`).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.adapter_config import CONFIG_FILE, TENSORS_FILE, read_adapter_config
from common.errors import AlreadyExists, InvalidArgument, NotFound

ALLOWED_NAMES: Final = "1..64 letters, digits, '.', '_' and '-', the first one no dot"
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")

Stamp = tuple[tuple[int, int, int, int], ...]


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may have this name."""
    return _NAME.fullmatch(name) is not None


def check_adapter_name(name: str, field: str = "adapter") -> None:
    """Raise InvalidArgument where an adapter cannot have this name."""
    if not is_adapter_name(name):
        raise InvalidArgument(field, f"is no name of an adapter; allowed are {ALLOWED_NAMES}")


def adapter_not_found(name: str) -> NotFound:
    """The error of a name that is not in the folder."""
    return NotFound(f"there is no adapter {name!r}", reason="ADAPTER_NOT_FOUND", metadata={"field": "adapter"})


@dataclass(frozen=True, slots=True)
class Located:
    """Where an adapter's content lies now. `stamp` is that of its files: equal stamps, equal content."""

    directory: Path
    stamp: Stamp


class AdapterFolder:
    """The adapters below one path, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def locate(self, name: str) -> Located:
        """Resolve a name. Raises NotFound, and InvalidArgument where it is no name."""
        check_adapter_name(name)
        try:
            directory = (self._path / name).resolve(strict=True)
            stamp = tuple(
                (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
                for stat in (
                    (directory / file).stat() for file in (CONFIG_FILE, TENSORS_FILE) if _exists(directory / file)
                )
            )
        except (OSError, RuntimeError):
            raise adapter_not_found(name) from None
        if not directory.is_dir():
            raise adapter_not_found(name)
        return Located(directory, stamp)

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries())

    def _entries(self) -> Iterator[str]:
        if self._path.is_dir():
            yield from (item.name for item in self._path.iterdir() if is_adapter_name(item.name) and item.is_dir())

    def add(self, name: str, source: Path) -> None:
        """Copy the adapter in `source` in, in the place of the one of that name.

        Raises InvalidArgument where it could never be served, AlreadyExists where the name is a directory that was not
        made here, and OSError.
        """
        check_adapter_name(name)
        try:
            read_adapter_config(source)
        except FileNotFoundError:
            raise InvalidArgument("adapter", f"{source} is no directory") from None
        place = self._path / name
        if place.is_dir() and not place.is_symlink():
            raise AlreadyExists(f"{place} is a directory that was put there by hand; remove it first")
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        token = secrets.token_hex(8)
        content, link = self._path / f".content-{token}", self._path / f".link-{token}"
        try:
            content.mkdir(mode=0o700)
            for file in (CONFIG_FILE, TENSORS_FILE):
                shutil.copyfile(source / file, content / file)
            link.symlink_to(content.name)
            old = place.resolve() if place.is_symlink() else None
            link.replace(place)
        except BaseException:
            link.unlink(missing_ok=True)
            shutil.rmtree(content, ignore_errors=True)
            raise
        self._drop(old)

    def remove(self, name: str) -> None:
        """Take an adapter away; requests that run with it go on. Raises NotFound and OSError."""
        check_adapter_name(name)
        place = self._path / name
        if place.is_symlink():
            content = place.resolve()
            place.unlink()
            self._drop(content)
            return
        if not place.is_dir():
            raise adapter_not_found(name)
        gone = self._path / f".content-{secrets.token_hex(8)}"
        place.rename(gone)
        self._drop(gone)

    def _drop(self, content: Path | None) -> None:
        # A link that leads out of the folder is somebody else's: what it names stays.
        if content is not None and content.parent == self._path.resolve() and content.name.startswith(".content-"):
            shutil.rmtree(content, ignore_errors=True)


def _exists(path: Path) -> bool:
    return os.path.exists(path)
