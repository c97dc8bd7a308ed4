"""`tessera chat`: a conversation. Every turn sends the whole history; the cache is what makes that cheap, and it shows.

The history lives in this process alone. A turn that failed or was interrupted leaves it as it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cli.client import (
    Client,
    Numbers,
    add_connection_options,
    add_generation_options,
    add_turns,
    build_request,
    check_text,
)
from cli.errors import EXIT_USAGE, CommandError

HELP = "/reset forgets the conversation, /exit ends (so does Ctrl-D); Ctrl-C stops an answer"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tessera chat", description=f"Talk to the model. {HELP}.")
    add_generation_options(parser)
    add_connection_options(parser)
    options = parser.parse_args(arguments)
    build_request(options)  # refuse what is no text before the first question
    opening = [] if options.system is None else [("system", check_text("--system", options.system))]
    history = list(opening)
    if sys.stdin.isatty():
        print(HELP)
        _load_line_editing()
    with Client.from_options(options) as client:
        while (line := _read_line()) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                history = list(opening)
                print("forgotten")
            elif line.startswith("/"):
                print(HELP)
            elif line:
                history = _take_turn(client, options, history, line)
    return 0


def _take_turn(
    client: Client, options: argparse.Namespace, history: list[tuple[str, str]], line: str
) -> list[tuple[str, str]]:
    """Ask, stream the answer, and return the longer history; the old one where the turn failed."""
    try:
        asked = [*history, ("user", check_text("your message", line))]
    except CommandError as error:
        print(error.message, file=sys.stderr)
        return history
    request = build_request(options)
    add_turns(request, asked)
    numbers, pieces = Numbers(), list[str]()
    try:
        for delta in client.generate(request, numbers):
            pieces.append(delta.text)
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        print("\n(stopped; this turn is forgotten)")
        return history
    except CommandError as error:
        print(f"\n{error.message}", file=sys.stderr)
        return history
    print(f"\n  [{numbers.describe()}]")
    return [*asked, ("assistant", "".join(pieces))]


def _read_line() -> str | None:
    """One line of input, stripped; None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except UnicodeDecodeError:
        raise CommandError("standard input is no UTF-8 text", EXIT_USAGE) from None


def _load_line_editing() -> None:
    """Arrow keys and history within a line, where this Python has them."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
