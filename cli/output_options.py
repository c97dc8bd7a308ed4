"""What `tessera generate` and `chat` may ask for beside the text: a form that it must have, and log-probabilities.

Owns the options, how they become fields of a request, and how log-probabilities are shown. Used by
`cli/generation_options.py` and `cli/generate.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from cli.errors import EXIT_USAGE, CommandError
from cli.tables import format_table
from tessera.inference.v1 import inference_pb2

MAX_LOGPROBS: Final = 20
Whole = Callable[[int, int], Callable[[str], int]]


def add_constraint_options(parser: argparse.ArgumentParser) -> None:
    """Options for the form of the text; at most one of them."""
    group = parser.add_argument_group("form of the answer").add_mutually_exclusive_group()
    group.add_argument("--json-schema", type=Path, metavar="FILE", help="a JSON value that this schema describes")
    group.add_argument("--regex", metavar="PATTERN", help="a text that this regular expression matches as a whole")
    group.add_argument("--grammar", type=Path, metavar="FILE", help="a text of this grammar (Lark form, or GBNF)")


def add_logprob_options(parser: argparse.ArgumentParser, whole: Whole) -> None:
    """Options for log-probabilities; they are shown on stderr, as tokens by id."""
    group = parser.add_argument_group("log-probabilities (on stderr)")
    count = whole(0, MAX_LOGPROBS)
    group.add_argument("--logprobs", type=count, metavar="K", help="of each token, and of the K likeliest, 0..20")
    group.add_argument(
        "--prompt-logprobs", type=count, metavar="K",
        help="of each token of the prompt but the first, and of the K likeliest; nothing is read from the cache",
    )  # fmt: skip


def fill_output(output: inference_pb2.Output, options: argparse.Namespace) -> None:
    """The fields that the options ask for. Raises CommandError where a file cannot be read."""
    for kind in ("json_schema", "grammar"):
        path = getattr(options, kind)
        if path is not None:
            setattr(output.constraint, kind, _read_text(f"--{kind.replace('_', '-')}", path))
    if options.regex is not None:
        output.constraint.regex = _encodable("--regex", options.regex)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(options, name, None)
        if value is not None:
            setattr(output, name, value)


def show_logprobs(title: str, tokens: Sequence[tuple[int, Any]]) -> str:
    """A table of (sample or place in the prompt, TokenLogprob); `title` is that of the first column."""
    rows = [
        (number, item.token_id, f"{item.logprob:.4f}", _likeliest(item.top)) for number, item in tokens
    ]  # fmt: skip
    return format_table((title, "token id", "log-probability", "likeliest"), rows)


def _likeliest(top: Iterable[Any]) -> str:
    return "  ".join(f"{item.token_id} {item.logprob:.4f}" for item in top)


def _read_text(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{option} {path}: {error.strerror}", EXIT_USAGE) from None
    except UnicodeDecodeError as error:
        raise CommandError(f"{option} {path}: is no UTF-8 text: byte {error.start}", EXIT_USAGE) from None


def _encodable(option: str, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CommandError(f"{option} is no UTF-8 text (character {error.start + 1})", EXIT_USAGE) from None
    return text
