"""The parser of every command line: an error is one line, with what was wrong, what is allowed and where to read on.

argparse alone prints its whole usage block in front of an error, which then is the last of twenty lines. Here too are
the types of numbers, which name their range. Used by the services, by `cli/` and by `bench/`; it knows no option.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable
from typing import Any, Final, NoReturn

_EXIT_USAGE: Final = 2
_MAX_SHOWN: Final = 40


class CommandParser(argparse.ArgumentParser):
    """As argparse's own, and its sub-parsers are of this class too; each refuses what it does not know by itself."""

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one line on stderr."""
        said = message.removeprefix("argument ").replace("not allowed with argument ", "not allowed with ")
        self.exit(_EXIT_USAGE, f"{self.prog}: {said} (see `{self.prog} --help`)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """All of the arguments, or `error`: the parser of the subcommand says what that one does not have."""
        found, extras = super().parse_known_args(args, namespace)
        if extras:
            self.error(self._unknown(extras[0]))
        return found, extras

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"{_shown(argument)} is one argument too many"
        name = argument.partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, 1)
        return f"there is no option {_shown(name)}{f'; did you mean {near[0]}?' if near else ''}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            allowed = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(action, f"{_shown(str(value))} is not one of {allowed}")


def whole(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number in low..high; argparse puts the flag before what is wrong."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{_shown(text)} is no whole number in {low}..{high}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text[:_MAX_SHOWN]} is outside {low}..{high}")
        return value

    return parse


def number(text: str) -> float:
    """An argparse type: a number, no infinity; who gets it knows its range."""
    return _finite(text, "number")


def seconds(low: float, high: float) -> Callable[[str], float]:
    """An argparse type: seconds, at least `low`, or more than that where it is 0, and at most `high`."""
    allowed = f"{f'{low:g} to' if low else 'more than 0, at most'} {high:.10g} seconds"

    def parse(text: str) -> float:
        value = _finite(text, "number of seconds")
        if not low <= value <= high or value == 0:
            raise argparse.ArgumentTypeError(f"{text[:_MAX_SHOWN]} is outside what is allowed: {allowed}")
        return value

    return parse


def _finite(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{_shown(text)} is no {what}")
    return value


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…")
