"""`tessera cachemgr|decoder|gateway`: becomes that service, in this process, exactly as `python -m <service>` would.

Ctrl-C before the service listens for signals itself (while it imports) ends the process quietly with status 130.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence

from cli.errors import EXIT_INTERRUPTED


def main(arguments: Sequence[str]) -> int:
    """Run the service `arguments[0]` with the options after it; its exit status comes as SystemExit."""
    service = arguments[0]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # neither ignored nor a caller's own
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(EXIT_INTERRUPTED))
    sys.argv = [service, *arguments[1:]]
    runpy.run_module(service, run_name="__main__", alter_sys=True)
    return 0
