"""`tessera cachemgr|decoder|gateway`: becomes that service's own process, with the same options and the same id."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Replace this process by `python -m <service> <options>`; does not return."""
    os.execv(sys.executable, [sys.executable, "-m", *arguments])
