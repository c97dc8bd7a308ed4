"""Secrets in files: made at random, mode 0600, never overwritten, refused when others could read them."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from common.errors import FailedPrecondition

MAX_SECRET_BYTES = 512


def new_secret(prefix: str) -> str:
    """A fresh secret of 256 random bits behind `prefix`."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"


def write_secret(path: Path, text: str) -> bool:
    """Write `text` to a new file of mode 0600, whole or not at all. False if the file is there already."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(name, path)  # unlike rename, link never replaces what is there
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    return True


def read_secret(path: Path) -> str:
    """The secret in `path`. Raises FailedPrecondition if it is absent, empty or readable by others."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(MAX_SECRET_BYTES + 1)
    except FileNotFoundError:
        raise FailedPrecondition(f"credential file {path.name} is not there; the cache manager makes it") from None
    except PermissionError:
        raise FailedPrecondition(f"credential file {path.name} may not be read by this user") from None
    if mode & 0o077:
        raise FailedPrecondition(f"credential file {path.name} has mode {mode:04o}; allowed is 0600")
    text = data.decode("utf-8", "replace").strip()
    if not text or len(data) > MAX_SECRET_BYTES:
        raise FailedPrecondition(
            f"credential file {path.name} holds {len(data)} bytes; allowed are 1..{MAX_SECRET_BYTES}"
        )
    return text
