"""The one error of the command line: a message for a person and an exit status. `cli/__main__.py` prints it."""

from __future__ import annotations

from typing import NoReturn

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class CommandError(Exception):
    """A command cannot go on; `message` says what is wrong and what to do. Status 2 means wrong usage, 1 the rest.

    `reason` is the stable name of a server's error; empty for any other.
    """

    def __init__(self, message: str, status: int = EXIT_FAILED, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.status = status


def refuse_option(option: str, why: str) -> NoReturn:
    """Raise CommandError for wrong usage: the option first, then what is wrong with it."""
    raise CommandError(f"{option}: {why}", EXIT_USAGE)
