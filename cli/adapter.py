"""`tessera adapter add NAME PATH`, `remove NAME` and `list`: the folder of LoRA adapters of a node on this machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from cli.errors import CommandError
from cli.node_address import find_state
from cli.tables import format_table
from common.adapter_config import TENSORS_FILE, read_adapter_config
from common.adapter_folder import AdapterFolder
from common.arguments import CommandParser
from common.errors import TesseraError


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    folder_options = CommandParser(add_help=False)
    folder_options.add_argument("--state-dir", type=Path, metavar="DIR", help="state directory of the node")
    folder_options.add_argument(
        "--adapters-dir", type=Path, metavar="DIR", help="folder of adapters (default: adapters in the state directory)"
    )
    parser = CommandParser(
        prog="tessera adapter", description="LoRA adapters by name. A running node sees changes with the next request."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser("add", parents=[folder_options], help="copy an adapter in, in the place of one before it")
    add.add_argument("name", metavar="NAME")
    add.add_argument("path", type=Path, metavar="PATH", help="a directory as PEFT saves it")
    remove = commands.add_parser("remove", parents=[folder_options], help="take an adapter away")
    remove.add_argument("name", metavar="NAME")
    commands.add_parser("list", parents=[folder_options], help="list adapters")
    options = parser.parse_args(arguments)
    folder = AdapterFolder(_folder_of(options))
    try:
        match options.command:
            case "add":
                _prepare(options)
                folder.add(options.name, options.path)
                print(f"added: {options.name}")
            case "remove":
                folder.remove(options.name)
                print(f"removed: {options.name}")
            case _:
                rows = [_row(folder, name) for name in folder.names()]
                header = ("name", "rank", "scale", "modules", "MB", "problem")
                print(format_table(header, rows) if rows else "none; add one with `tessera adapter add NAME PATH`")
    except TesseraError as error:
        raise CommandError(error.message) from None
    except OSError as error:
        raise CommandError(f"the folder of adapters cannot be changed: {error.strerror}") from None
    return 0


def _folder_of(options: argparse.Namespace) -> Path:
    named = options.adapters_dir or os.environ.get("TESSERA_ADAPTERS_DIR")
    if named:
        return Path(named)
    return find_state(options.state_dir).adapters_dir


def _prepare(options: argparse.Namespace) -> None:
    """Make the state directory where it holds the folder: it is closed to others from its first moment. Raises
    FailedPrecondition where it is another user's."""
    if options.adapters_dir or os.environ.get("TESSERA_ADAPTERS_DIR"):
        return
    paths = find_state(options.state_dir)
    paths.check()
    paths.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)


def _row(folder: AdapterFolder, name: str) -> tuple[object, ...]:
    try:
        directory = folder.locate(name).directory
        config = read_adapter_config(directory)
        size = (directory / TENSORS_FILE).stat().st_size
    except (TesseraError, OSError) as error:
        problem = error.message if isinstance(error, TesseraError) else "it is gone"
        return (name, None, None, None, None, problem)
    modules = "by pattern" if config.modules is None else " ".join(sorted(config.modules))
    return (name, config.rank, round(config.scale, 4), modules, round(size / 1e6, 1), None)
