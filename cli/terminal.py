"""What a long-running command says to whoever started it, who may have gone: a node outlives the reader of its lines.

Invariant: no line raises, and none is waited for. What is lost on the terminal stands in the logs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line at once, to stderr unless told otherwise. Where its reader has gone (`tessera up | head`) nothing
    is printed any more; a line that a full disk does not take is lost."""
    stream = sys.stderr if stream is None else stream
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:  # else it would be raised once more when Python ends
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    except OSError:
        return
