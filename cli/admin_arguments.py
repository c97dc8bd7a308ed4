"""Arguments that several `tessera admin` commands share, and the prompt that some take as text or as token ids.

Text becomes tokens by the gateway's own Tokenize, so that what is looked for is what a request would bring.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

from cli.client import MAX_INT64, Client, check_text
from cli.errors import EXIT_USAGE, CommandError
from common.arguments import CommandParser, whole

MAX_TTL_SECONDS: Final = 100 * 366 * 86_400.0

Subcommands = Any  # argparse's own class of sub-parsers is private


def shared_arguments(*, inner: bool = False) -> argparse.ArgumentParser:
    """Arguments of `tessera admin` and, as `inner` ones, of each command: those leave what stood before it as it is."""
    default: Any = argparse.SUPPRESS if inner else None
    shared = CommandParser(add_help=False)
    shared.add_argument("--json", action="store_true", default=default if inner else False, help="print JSON")
    shared.add_argument("--state-dir", type=Path, metavar="DIR", default=default, help="state directory of the node")
    shared.add_argument(
        "--target", metavar="TARGET", default=default, help="admin RPC (default: the socket in the state directory)"
    )
    shared.add_argument(
        "--key-file", type=Path, metavar="FILE", default=default, help="admin key (default <state-dir>/admin.key)"
    )
    return shared


def listing_arguments(*, inner: bool = False) -> argparse.ArgumentParser:
    """Arguments of every list."""
    listing = CommandParser(add_help=False)
    default: Any = argparse.SUPPRESS if inner else None
    listing.add_argument(
        "--limit", type=whole(1, MAX_INT64), metavar="N", default=default, help="at most N entries (default: all)"
    )
    return listing


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that name a prompt."""
    group = parser.add_argument_group("prompt: its text, or its token ids")
    group.add_argument("--text", metavar="TEXT", help="its text; - reads it from standard input")
    group.add_argument("--file", type=Path, metavar="FILE", help="a file with the text")
    group.add_argument("--tokens", metavar="IDS", help="token ids, separated by commas or blanks; - reads them")
    group.add_argument("--endpoint", metavar="HOST:PORT", help="the gateway that tokenizes (default: the node's)")
    group.add_argument("--tenant-key-file", type=Path, metavar="FILE", help="tenant key for it (default default.key)")
    group.add_argument("--tls-ca", type=Path, metavar="FILE", help="reach it by TLS and trust these certificates")
    group.add_argument("--model", default="", metavar="NAME", help="model of the gateway (default: its only or first)")


def check_prompt(options: argparse.Namespace) -> None:
    """Raises CommandError unless the options name exactly one prompt."""
    given = [name for name in ("text", "file", "tokens") if getattr(options, name) is not None]
    if len(given) != 1:
        raise CommandError("name one prompt: --text TEXT, --file FILE or --tokens IDS", EXIT_USAGE)


def tokens_of(options: argparse.Namespace) -> list[int]:
    """The token ids of the one prompt that the options name. Raises CommandError."""
    if options.tokens is not None:
        return _numbers(sys.stdin.read() if options.tokens == "-" else options.tokens)
    if options.file is not None:
        try:
            text = options.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "is no UTF-8 text"
            raise CommandError(f"--file {options.file}: {why}", EXIT_USAGE) from None
    else:
        text = sys.stdin.read() if options.text == "-" else options.text
    with Client.from_options(
        argparse.Namespace(
            state_dir=options.state_dir,
            key_file=options.tenant_key_file,
            endpoint=options.endpoint,
            tls_ca=options.tls_ca,
        )
    ) as client:
        return client.tokenize(check_text("the prompt", text), check_text("--model", options.model))


def _numbers(text: str) -> list[int]:
    numbers = []
    for piece in text.replace(",", " ").split():
        if not (piece.isascii() and piece.isdigit() and len(piece) < 19):
            raise CommandError(f"--tokens: {piece[:20]!r} is no token id", EXIT_USAGE)
        numbers.append(int(piece))
    if not numbers:
        raise CommandError("--tokens: there is no token id", EXIT_USAGE)
    return numbers
