"""Digests of model files, and those of files that were read before, so that a decoder that starts again reads none.

Invariant: a digest counts for exactly the file that was read: path, device, inode, size, times of its content and of
its inode are the same, and it had not been changed for `SETTLED_NS` when it was read, so that no clock is too coarse to
show a change. The kernel sets the time of an inode itself: whoever may write a file cannot hide that. The list is this
user's alone (mode 0600, owner checked), comes into being whole, and is believed whole or not at all; without it files
are read. Called by `source.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

from common.logs import get_logger

NAME: Final = "digests.json"
VERSION: Final = 1
MAX_FILES: Final = 256  # the oldest entries go
MAX_BYTES: Final = 1 << 20
SETTLED_NS: Final = 2_000_000_000
DIGEST_BYTES: Final = 32
_READ_BYTES: Final = 1 << 20

Identity = tuple[int, int, int, int, int]


def identity_of(found: os.stat_result) -> Identity:
    """What a file must still be: device, inode, size, times of its content and of its inode in nanoseconds."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class KnownDigests:
    """The list in `folder`, which may be absent. Another process may write it at any time: the last one wins."""

    def __init__(self, folder: Path, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._folder = folder
        self._now_ns = now_ns

    def find(self, path: Path, identity: Identity) -> bytes | None:
        """The digest of a file that is still what it was when it was read, or None."""
        entry = self._read().get(str(path.resolve()))
        return entry[1] if entry is not None and entry[0] == identity else None

    def is_settled(self, identity: Identity) -> bool:
        """Whether a change from now on would show in the times of a file. Ask before it is read."""
        return max(identity[3:]) <= self._now_ns() - SETTLED_NS

    def store(self, path: Path, identity: Identity, digest: bytes) -> None:
        """A file was read whole and stayed what it was. What cannot be written is read again another time."""
        name = str(path.resolve())
        entries = {key: value for key, value in self._read().items() if key != name}
        entries[name] = identity, digest
        kept = list(entries.items())[-MAX_FILES:]
        text = json.dumps({"version": VERSION, "files": [[key, *it[0], it[1].hex()] for key, it in kept]})
        try:
            self._write(text.encode())
        except OSError as error:
            get_logger().warning("digests_not_stored", cause=error.strerror, effect="files are read again")

    def _read(self) -> dict[str, tuple[Identity, bytes]]:
        try:
            return _parse(self._content())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError):
            get_logger().warning("digests_refused", effect="files are read again")
            return {}

    def _content(self) -> bytes:
        fd = os.open(self._folder / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise ValueError("the list is not this user's alone")
            return file.read(MAX_BYTES + 1)

    def _write(self, content: bytes) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError(0, "the folder is not this user's")
        beside = self._folder / f".{NAME}.{os.getpid()}"
        beside.unlink(missing_ok=True)  # of a process of that id that died
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(content)
            beside.replace(self._folder / NAME)
        except OSError:
            beside.unlink(missing_ok=True)
            raise


def _parse(content: bytes) -> dict[str, tuple[Identity, bytes]]:
    if len(content) > MAX_BYTES:
        raise ValueError("the list is too long")
    values: Any = json.loads(content)
    if values["version"] != VERSION:
        return {}
    entries: dict[str, tuple[Identity, bytes]] = {}
    for name, device, inode, size, changed, inode_changed, digest in values["files"]:
        numbers = (device, inode, size, changed, inode_changed)
        if not isinstance(name, str) or any(type(number) is not int for number in numbers):
            raise ValueError("an entry has other types")
        entries[name] = numbers, _digest(digest)
    return entries


def _digest(text: str) -> bytes:
    digest = bytes.fromhex(text)
    if len(digest) != DIGEST_BYTES:
        raise ValueError("a digest has another length")
    return digest


def hash_files(paths: Iterable[Path], known: KnownDigests | None = None) -> bytes:
    """sha256 of one file, or of the concatenated sha256 of several in the given order."""
    digests = [_file_digest(path, known) for path in paths]
    return digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()


def _file_digest(path: Path, known: KnownDigests | None) -> bytes:
    with path.open("rb") as file:
        identity = identity_of(os.fstat(file.fileno()))
        found = None if known is None else known.find(path, identity)
        if found is not None:
            return found
        settled = known is not None and known.is_settled(identity)
        digest = _hash(file)
        unchanged = identity_of(os.fstat(file.fileno())) == identity
    if known is not None and settled and unchanged:
        known.store(path, identity, digest)
    return digest


def _hash(file: BinaryIO) -> bytes:
    digest = hashlib.sha256()
    while chunk := file.read(_READ_BYTES):
        digest.update(chunk)
    return digest.digest()
