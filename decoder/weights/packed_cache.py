"""Where packed weights are kept between and beside decoders: a folder of files (`packed_file.py`), one for a model.

Invariant: of decoders that start at once with the same model, one packs and the others wait for its file, at most
`LOCK_SECONDS` and not at all once it has died. Called by the loader, which gives `make_memory` to the model.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from common.logs import get_logger
from decoder.models.config import ModelDigests
from decoder.models.packing import PACKING_VERSION, Memory
from decoder.weights.packed_file import StoringMemory, read_file, wait_for

LOCK_SECONDS: Final = 600.0


def packed_key(digests: ModelDigests, dtype: str, num_bytes: int) -> bytes:
    """32 bytes that name what packed weights follow from."""
    text = f"{PACKING_VERSION}/{dtype}/{num_bytes}".encode()
    content = digests.weights + digests.attention + text
    return hashlib.blake2b(content, digest_size=32, person=b"tessera-packed").digest()


class PackedCache:
    """The folder for one load. `locked` stands around the whole load."""

    def __init__(self, folder: Path, digests: ModelDigests, dtype: str) -> None:
        self._folder = folder
        self._digests = digests
        self._dtype = dtype
        self._lock = -1

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Whoever packs the same model holds the rest up until its file is there."""
        try:
            self._lock = self._take_lock()
        except OSError as error:
            get_logger().warning("weights_cache_unavailable", cause=error.strerror)
        try:
            yield
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def make_memory(self, num_bytes: int) -> Memory:
        """The file's weights; without one, memory that becomes the file; without the folder, plain memory."""
        if self._lock < 0:
            return Memory(num_bytes)
        key = packed_key(self._digests, self._dtype, num_bytes)
        path = self._folder / f"{key.hex()}.packed"
        started = time.monotonic()
        memory, missing = read_file(path, key)
        if memory is not None:
            seconds = round(time.monotonic() - started, 3)
            get_logger().info("weights_mapped", bytes=memory.size, huge_bytes=memory.huge_bytes, seconds=seconds)
            return memory
        if missing != "absent":
            get_logger().warning("weights_file_refused", cause=missing)
        self._remove_leftovers(path)
        return StoringMemory(num_bytes, path, key)

    def _take_lock(self) -> int:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError(0, "the folder of packed weights is not this user's")
        self._folder.chmod(0o700)
        name = hashlib.blake2b(self._digests.weights + self._dtype.encode(), digest_size=16).hexdigest()
        lock = os.open(self._folder / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

        def try_lock() -> bool:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        if not wait_for(try_lock, LOCK_SECONDS):
            get_logger().warning("weights_cache_busy", seconds=LOCK_SECONDS)
        return lock

    def _remove_leftovers(self, path: Path) -> None:
        # Of a decoder that died while it wrote: we hold the lock, so nobody writes now.
        for leftover in self._folder.glob(f".{path.name}.*"):
            leftover.unlink(missing_ok=True)
