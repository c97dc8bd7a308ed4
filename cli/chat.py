"""`tessera chat`: a conversation. The server keeps it between turns, each of which sends the new question alone.

All turns are here too, and are sent where the server does not keep them any more (`cli/conversation.py`). A turn that
failed or was interrupted leaves the conversation as it was. Where nobody is there to read of it, because questions come
from a file or a pipe, a failed turn makes the status 1, and no question at all is wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cli.client import (
    Client,
    Numbers,
    add_connection_options,
    check_text,
)
from cli.conversation import Conversation
from cli.errors import EXIT_FAILED, EXIT_USAGE, CommandError
from cli.generation_options import add_generation_options, build_request
from cli.node_wait import add_wait_option, wait_for_node
from common.arguments import CommandParser

HELP = "/reset forgets the conversation, /exit ends (so does Ctrl-D); Ctrl-C stops an answer"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = CommandParser(prog="tessera chat", description=f"Talk to the model. {HELP}.")
    add_generation_options(parser)
    add_connection_options(parser)
    add_wait_option(parser)
    options = parser.parse_args(arguments)
    build_request(options)  # refuse what is no text before the first question
    opening = [] if options.system is None else [("system", check_text("--system", options.system))]
    if sys.stdin.isatty():
        print(HELP)
        _load_line_editing()
    wait_for_node(options)
    all_answered, num_questions = True, 0
    with Client.from_options(options) as client:
        conversation = Conversation(client, opening, keep=not options.no_cache)
        while (line := _read_line()) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                conversation.forget_handle()
                conversation = Conversation(client, opening, keep=not options.no_cache)
                print("forgotten")
            elif line.startswith("/"):
                print(HELP)
            elif line:
                num_questions += 1
                all_answered = _take_turn(conversation, options, line) and all_answered
        conversation.forget_handle()
    if sys.stdin.isatty():
        return 0
    if not num_questions:
        raise CommandError("nothing was asked: standard input holds no question; write one a line", EXIT_USAGE)
    return 0 if all_answered else EXIT_FAILED


def _take_turn(conversation: Conversation, options: argparse.Namespace, line: str) -> bool:
    """Ask and stream the answer; a turn that failed is forgotten. False where it was refused."""
    numbers = Numbers()
    try:
        for text in conversation.ask(build_request(options), check_text("your message", line), numbers):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        print("\n(stopped; this turn is forgotten)")
    except CommandError as error:
        print(f"\n{error.message}", file=sys.stderr)
        return False
    else:
        print(f"\n  [{numbers.describe()}]", flush=True)
        if (cut := numbers.describe_cut(options.max_tokens)) is not None:
            print(cut, file=sys.stderr)
    return True


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
