"""The parser of every command line: an error is one line that names what was wrong, and what is allowed."""

from __future__ import annotations

import pytest

from common.arguments import CommandParser, number, seconds, whole


def make_parser() -> CommandParser:
    """A parser with one of everything."""
    parser = CommandParser(prog="tool")
    parser.add_argument("--count", type=whole(1, 16))
    parser.add_argument("--heat", type=number)
    parser.add_argument("--pause", type=seconds(0, 600))
    parser.add_argument("--interval", type=seconds(0.2, 3600))
    parser.add_argument("--kind", choices=("red", "blue"))
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--this")
    either.add_argument("--that")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("make").add_argument("--limit", type=whole(1, 3))
    commands.add_parser("drop").add_argument("name", metavar="NAME")
    return parser


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "tool: the following arguments are required: COMMAND (see `tool --help`)"),
        (["melt"], "tool: COMMAND: 'melt' is not one of make, drop (see `tool --help`)"),
        (["--count", "17", "make"], "tool: --count: 17 is outside 1..16 (see `tool --help`)"),
        (
            ["--count", "x" * 99, "make"],
            f"tool: --count: '{'x' * 40}…' is no whole number in 1..16 (see `tool --help`)",
        ),
        (["--heat", "nan", "make"], "tool: --heat: 'nan' is no number (see `tool --help`)"),
        (["--heat", "inf", "make"], "tool: --heat: 'inf' is no number (see `tool --help`)"),
        (["--pause", "1d", "make"], "tool: --pause: '1d' is no number of seconds (see `tool --help`)"),
        (
            ["--pause", "0", "make"],
            "tool: --pause: 0 is outside what is allowed: more than 0, at most 600 seconds (see `tool --help`)",
        ),
        (
            ["--interval", "0.1", "make"],
            "tool: --interval: 0.1 is outside what is allowed: 0.2 to 3600 seconds (see `tool --help`)",
        ),
        (["--kind", "green", "make"], "tool: --kind: 'green' is not one of red, blue (see `tool --help`)"),
        (["--this", "1", "--that", "2", "make"], "tool: --that: not allowed with --this (see `tool --help`)"),
        (
            ["make", "--limt", "2"],
            "tool make: there is no option '--limt'; did you mean --limit? (see `tool make --help`)",
        ),
        (["make", "--secret=x"], "tool make: there is no option '--secret' (see `tool make --help`)"),
        (["make", "more"], "tool make: 'more' is one argument too many (see `tool make --help`)"),
        (["drop"], "tool drop: the following arguments are required: NAME (see `tool drop --help`)"),
    ],
)
def test_an_error_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, the part of the command that was wrong, what is allowed, and no usage block."""
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{said}\n"


def test_what_is_right_is_taken() -> None:
    """Positive control: the ends of each range, and a number below zero."""
    given = ["--count", "16", "--heat", "-2.5", "--pause", "600", "--interval", "0.2", "--kind", "red"]
    found = make_parser().parse_args([*given, "make", "--limit", "3"])
    assert (found.count, found.heat, found.pause, found.interval, found.kind) == (16, -2.5, 600.0, 0.2, "red")
    assert (found.command, found.limit) == ("make", 3)


def test_help_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """--help still shows the usage and every option."""
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(["--help"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert shown.startswith("usage: tool") and "--interval" in shown
