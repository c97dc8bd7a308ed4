"""The file of the index journal: made, found again, and thrown away.

Invariants: the file is private (0600 from its first byte) and lies whole on its disk before it is used, so that no
store into it can fail; a file that is damaged, of another version or of an earlier start of the machine is no journal.
Called by the daemon, under the lock of the state directory. What is in it is `journal.py`'s.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachemgr.journal import IndexJournal
from cachemgr.journal_format import BOOT_BYTES, JournalIdentity, Sections, write_header
from common.errors import FailedPrecondition
from common.logs import get_logger

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> bytes:
    """Tells starts of the machine apart: no process, and so no arena, survives one."""
    return bytes.fromhex(_BOOT_ID.read_text("ascii").strip().replace("-", ""))[:BOOT_BYTES]


def create_journal(path: Path, identity: JournalIdentity, epoch: int) -> IndexJournal:
    """A new, empty journal in place of whatever was there. Raises FailedPrecondition where there is no room for it."""
    size = Sections.of(identity.num_blocks, identity.block_tokens, identity.num_window_blocks).end
    fresh = path.with_name(f".{path.name}.new")
    fd = -1
    try:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(fd, 0, size)
        memory, give_back = _mapped(fd, size)
        write_header(memory, identity, epoch)
        fresh.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise FailedPrecondition(
            f"the index journal of {size} bytes cannot be made: {error.strerror}; make room in the state directory",
            reason="JOURNAL",
            metadata={"needed_bytes": str(size)},
        ) from None
    finally:
        if fd >= 0:
            os.close(fd)
    return IndexJournal(memory, give_back)


def open_journal(path: Path, boot: bytes) -> IndexJournal | None:
    """The journal at `path`, writable; None where there is none that counts."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) & 0o077 or not found.st_size:
            get_logger().warning("journal_refused", cause="mode or kind of the file")
            return None
        journal = IndexJournal(*_mapped(fd, found.st_size))
    except (OSError, ValueError):
        get_logger().warning("journal_refused", cause="damaged, or of another version")
        return None
    finally:
        os.close(fd)
    return journal if journal.identity.boot == boot else None


def discard_journal(path: Path) -> None:
    """No journal any more. Harmless when repeated."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _mapped(fd: int, size: int) -> tuple[NDArray[np.uint8], Callable[[], None]]:
    """The bytes of a file, and what gives back their memory: by madvise(2) a shared mapping of a file loses nothing by
    that, changed pages too stay where the kernel keeps those of files."""
    pages = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(pages, np.uint8), partial(pages.madvise, mmap.MADV_DONTNEED)
