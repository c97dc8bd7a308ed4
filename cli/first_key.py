"""The key of the default tenant on the terminal: shown once, when the node that made it is ready for the first time.

Invariant: a mark in `run/` lies there from before the key is made until it has been shown, so a first start that failed
later on (the model was bad, a port was taken) leaves it to the next one. Called by `up`; it never makes a key.
"""

from __future__ import annotations

from common.credentials import read_secret
from common.errors import TesseraError
from common.paths import StatePaths


def expect_key(paths: StatePaths) -> None:
    """Call before a cache manager starts: leaves the mark where there is no key yet."""
    if not paths.default_key.exists():
        paths.unshown_key_mark.touch(mode=0o600)


def unshown_key(paths: StatePaths) -> str | None:
    """The key, or why it cannot be had, where it was not shown yet; None where it was. Takes the mark away."""
    if not paths.unshown_key_mark.exists():
        return None
    paths.unshown_key_mark.unlink(missing_ok=True)
    if not paths.default_key.exists():  # an older database of tenants, whose key's file is lost
        return "none in the file; make another one: tessera admin create-key default"
    try:
        return f"{read_secret(paths.default_key)}  (of tenant default; shown this once)"
    except TesseraError as error:
        return error.message
