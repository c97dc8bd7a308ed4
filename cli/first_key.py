"""The key of the default tenant on the terminal: shown once, when the node that made it is ready for the first time.

Invariant: a mark in `run/` lies there from before the key is made until it has been shown, so a first start that failed
later on (the model was bad, a port was taken) leaves it to the next one. It is shown to a terminal alone: a file or a
pipe would keep it beyond the mode of its own file. Called by `up`; it never makes a key.
"""

from __future__ import annotations

from common.credentials import read_secret
from common.errors import TesseraError
from common.paths import StatePaths


def expect_key(paths: StatePaths) -> None:
    """Call before a cache manager starts: leaves the mark where there is no key yet."""
    if not paths.default_key.exists():
        paths.unshown_key_mark.touch(mode=0o600)


def unshown_key(paths: StatePaths, *, terminal: bool) -> str | None:
    """The key, or why it cannot be had, where it was not shown yet; None where it was. Takes the mark away.

    Without a `terminal` to show it on: where it lies, and the mark stays.
    """
    if not paths.unshown_key_mark.exists():
        return None
    told, is_shown = _tell(paths, terminal=terminal)
    if is_shown:
        paths.unshown_key_mark.unlink(missing_ok=True)
    return told


def _tell(paths: StatePaths, *, terminal: bool) -> tuple[str, bool]:
    """What to say of the key, and whether that is all that ever will be said."""
    if not paths.default_key.exists():  # an older database of tenants, whose key's file is lost
        return "none in the file; make another one: tessera admin create-key default", True
    try:
        key = read_secret(paths.default_key)
    except TesseraError as error:
        return error.message, True
    if not terminal:
        return f"in {paths.default_key}  (of tenant default; shown on a terminal alone)", False
    return f"{key}  (of tenant default; shown this once)", True
