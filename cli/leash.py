"""Becomes another program that dies when its parent dies, even if the parent is killed with SIGKILL.

    python -I -S leash.py <parent pid> <program> <arguments...>

A program of its own, and not a hook between fork and exec: such a hook would run Python in a copy of a process that has
threads. It uses the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_ORPHANED = 125


def tie_to_parent(parent: int) -> str | None:
    """Ask the kernel to kill this process when `parent` dies; the reason if that cannot be."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        return f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}"
    return None if os.getppid() == parent else "the parent has gone"  # it may have died before the line above


def main() -> None:
    """Tie this process to its parent, then become the program; raises SystemExit if that cannot be."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    refusal = tie_to_parent(parent)
    if refusal is not None:
        sys.stderr.write(f"error: {refusal}\n")
        raise SystemExit(EXIT_ORPHANED)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
