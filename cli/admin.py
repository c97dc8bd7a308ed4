"""`tessera admin ...`: every verb of `AdminService`, as tables or as JSON (`--json`).

Talks to the admin socket of the state directory with its `admin.key`; with `reader.key` (`--key-file`) it may look and
change nothing. Lists follow the pages to their end or --limit. The commands are in a module for each subject.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cli import admin_events, admin_pool, admin_prefixes, admin_tenants, admin_top
from cli.admin_arguments import check_prompt, shared_arguments
from cli.admin_client import AdminClient
from cli.client import check_text
from common.arguments import CommandParser

TEXTS = ("tenant", "name", "key_id", "request_id", "group", "model", "endpoint")


def build_admin_parser() -> argparse.ArgumentParser:
    """The parser of `tessera admin`."""
    parser = CommandParser(
        prog="tessera admin", description="Look into the cache and manage it.", parents=[shared_arguments()]
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (admin_pool, admin_top, admin_prefixes, admin_tenants, admin_events):
        module.add_commands(commands)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    options = build_admin_parser().parse_args(arguments)
    for name in TEXTS:
        check_text(name.replace("_", " "), getattr(options, name, "") or "")
    for name in ("members", "add", "remove"):
        for text in getattr(options, name, ()):
            check_text(name, text)
    if "text" in options:  # what argparse cannot see, before anything is connected to
        check_prompt(options)
    if "check" in options:
        options.check(options)
    client = AdminClient.from_options(options)
    try:
        return int(options.run(client, options))
    finally:
        client.close()
