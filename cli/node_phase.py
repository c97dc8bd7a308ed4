"""What a `tessera up` does while it cannot be called: a file in `run/` that tells clients of its state directory.

Invariant: the file is there from the start of a node until it is ready, and from the beginning of its end until it has
ended. One that a killed node left behind is known by its process, which is gone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from cli.node_lock import describe_absence, is_supervised
from common.paths import StatePaths

STARTING: Final = "starting"
COMPILING: Final = "compiling"
DRAINING: Final = "draining"
_ADVICE: Final = {
    STARTING: "wait until it says that it is ready",
    COMPILING: "its kernels are made once per machine, which may take minutes; wait until it says that it is ready",
    DRAINING: "it takes nothing new; start it again when it has stopped",
}


def tell_phase(paths: StatePaths, phase: str | None) -> None:
    """Leave word of what this process does; None takes it away."""
    if phase is None:
        paths.phase_file.unlink(missing_ok=True)
        return
    fresh = paths.phase_file.with_suffix(".new")
    fresh.write_text(f"{phase} {os.getpid()}\n", encoding="utf-8")
    fresh.replace(paths.phase_file)


def is_starting(paths: StatePaths) -> bool:
    """Whether the node of this state directory starts and is not ready yet."""
    told = _read(paths)
    return told is not None and told[0] in (STARTING, COMPILING)


def describe_phase(paths: StatePaths) -> str | None:
    """A sentence about the node of this state directory while it starts or drains; None where it does neither."""
    told = _read(paths)
    if told is None:
        return None
    phase, pid = told
    return f"the node of {paths.state_dir} is {phase} (process {pid}); {_ADVICE[phase]}"


def describe_silence(paths: StatePaths, process: str, environ: Mapping[str, str]) -> str:
    """A sentence for who called a process of the node of this state directory, where nothing answered."""
    if (phase := describe_phase(paths)) is not None:
        return phase
    if is_supervised(paths):
        return f"the {process} of the node of {paths.state_dir} has ended and is being started again; try again"
    return describe_absence(paths, environ)


def _read(paths: StatePaths) -> tuple[str, str] | None:
    """The phase and its process; None where there is none, or one of a process that is gone."""
    try:
        phase, pid = paths.phase_file.read_text(encoding="utf-8").split()
        os.kill(int(pid), 0)
    except PermissionError:
        pass  # it is there, and another user's
    except (OSError, ValueError, OverflowError):
        return None
    return (phase, pid) if phase in _ADVICE else None
