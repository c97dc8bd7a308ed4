"""What `tessera admin` refuses or advises, and where its options may stand: one line, before anything is sent."""

from __future__ import annotations

import argparse
import json

import pytest

from cli.__main__ import main
from cli.admin import build_admin_parser
from common.errors import NotFound
from tests.cli.test_admin_commands import Node, node

__all__ = ["node"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["groups", "update", "team"], "there is nothing to change; give --add TENANT or --remove TENANT"),
        (["evict"], "evict needs --all, --tenant TENANT or --blocks N"),
        (["evict", "--all", "--tenant", "acme"], "--all excludes --tenant and --blocks"),
        (["evict", "--all", "--blocks", "3"], "--all excludes --tenant and --blocks"),
        (["explain", "--tokens", "1", "--group-tokens", "1"], "--group-tokens belongs to a group"),
        (["revoke-key", f"tsr_{'0a' * 8}_{'x' * 43}"], f"that is the key itself; name its id: {'0a' * 8}"),
        (["keys", "revoke", f"tsr_{'0a' * 8}_"], f"that is the key itself; name its id: {'0a' * 8}"),
    ],
)
def test_what_makes_no_sense_is_refused_here(
    node: Node, command: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with status 2, before anything is sent; a key that was taken for its id least of all."""
    assert main(["admin", *command, *node.flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and "x" * 43 not in line
    assert node.admin.asked == []


@pytest.mark.parametrize("seconds", ["0", "-5", "nan", "1d", "3162240001"])
@pytest.mark.parametrize("command", [["create-key", "acme"], ["keys", "create", "acme"], ["pin", "--tokens", "1"]])
def test_times_to_live_are_seconds(
    node: Node, command: list[str], seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Help and refusals say so; what is no time of them is not sent."""
    with pytest.raises(SystemExit):
        main(["admin", *command, "--ttl", seconds, *node.flags])
    assert "seconds" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["admin", command[0], "--help"] if command[0] != "keys" else ["admin", "keys", "create", "--help"])
    assert "seconds" in capsys.readouterr().out.partition("--ttl SECONDS  ")[2].partition("--t")[0]
    assert node.admin.asked == []
    assert main(["admin", *command, "--ttl", "3162240000", *node.flags]) == 0


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("KEY_NOT_FOUND", "there is none; `tessera admin keys` lists the ids of all"),
        ("TENANT_NOT_FOUND", "there is none; `tessera admin tenants` lists all"),
        ("BLOCKS_IN_USE", "`tessera admin drain`"),
        ("UNKNOWN_CREDENTIAL", "--state-dir DIR"),
        ("SOMETHING_ELSE", "there is none"),
    ],
)
def test_a_refusal_says_what_to_do(node: Node, reason: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the server's reason has an answer among these commands it is named, in the one line."""
    node.admin.refusal = NotFound("there is none", reason=reason)
    assert main(["admin", "revoke-key", "ab", *node.flags]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tessera admin: NOT_FOUND: there is none") and advice in line
    assert ("`" in line or "--" in line) is (reason != "SOMETHING_ELSE")


@pytest.mark.parametrize("command", [["snapshot"], ["keys"], ["keys", "list"], ["events", "--limit", "1"], ["top"]])
def test_connection_options_count_before_the_command_too(
    node: Node, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`tessera admin --state-dir DIR COMMAND` is what it looks like; behind the command it counts as ever."""
    assert main(["admin", *node.flags, "--json", *command]) == 0
    first = capsys.readouterr().out
    assert main(["admin", *command, *node.flags, "--json"]) == 0
    assert json.loads(first.splitlines()[0] if command[0] == "events" else first) is not None
    assert len(node.admin.asked) % 2 == 0
    with pytest.raises(SystemExit):
        main(["admin", *node.flags])
    assert "COMMAND" in capsys.readouterr().err


def test_every_argument_of_every_command_is_explained() -> None:
    """No option and no name in any help text of `tessera admin` is without a word on it."""
    unexplained = []
    left = [build_admin_parser()]
    while left:
        parser = left.pop()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                left += set(action.choices.values())
            elif not action.help:
                unexplained.append(f"{parser.prog}: {action.metavar}")
    assert unexplained == []
