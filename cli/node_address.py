"""Where a client on this machine finds a node: its state directory, and the address that its `tessera up` left there.

Invariant: without an address that the user gave, only a running node of the state directory is called, so that its keys
go to no process that has its port after it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from cli.errors import CommandError
from cli.node_lock import describe_absence, is_supervised
from cli.node_phase import describe_phase
from common.paths import StatePaths, default_state_dir

OTHER_NODE: Final = "or name another node's gateway: --endpoint HOST:PORT"


class Address(NamedTuple):
    """Where a gateway listens, and the certificate to trust; None: without TLS, or as the user says."""

    endpoint: str
    certificate: Path | None = None


def find_state(given: Path | None) -> StatePaths:
    """The state directory of the node: the one given, else that of TESSERA_STATE_DIR, else the default."""
    named = os.environ.get("TESSERA_STATE_DIR")
    return StatePaths(given or (Path(named).expanduser() if named else default_state_dir(os.environ)))


def find_address(paths: StatePaths, given: str | None = None) -> Address | None:
    """The address given, else that of the `tessera up` that runs on the state directory; None where none runs."""
    if given:
        return Address(given)
    try:
        lines = paths.endpoint_file.read_text(encoding="utf-8").splitlines() if is_supervised(paths) else []
    except (OSError, UnicodeDecodeError):
        return None
    if not lines:
        return None
    return Address(lines[0], Path(lines[1]) if len(lines) > 1 else None)


def require_address(paths: StatePaths, given: str | None = None) -> Address:
    """As `find_address`. Raises CommandError, with what to do, where no node runs."""
    found = find_address(paths, given)
    if found is None:
        raise CommandError(f"{describe_phase(paths) or describe_absence(paths, os.environ)}, {OTHER_NODE}")
    return found
