"""`tessera bench NAME`: runs one module of `bench/` by name; without a name it lists what is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

from cli.errors import EXIT_USAGE, CommandError


def list_benchmarks() -> dict[str, str]:
    """Name -> first line of its docstring, of every module in `bench/` that has a `main`; none of them is imported."""
    package = importlib.util.find_spec("bench")
    folders = [] if package is None else [Path(folder) for folder in package.submodule_search_locations or []]
    found: dict[str, str] = {}
    for path in sorted(path for folder in folders for path in folder.glob("[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark with the remaining arguments; returns its exit status."""
    known = list_benchmarks()
    if not arguments or arguments[0] in ("--help", "-h"):
        print("usage: tessera bench NAME [OPTIONS]\n")
        width = max(map(len, known), default=0)
        for name, summary in known.items():
            print(f"  {name:<{width}}  {summary}")
        return 0 if arguments else EXIT_USAGE
    name = arguments[0]
    if name not in known:
        raise CommandError(f"no benchmark {name!r}; there are: {', '.join(known) or 'none'}", EXIT_USAGE)
    run = importlib.import_module(f"bench.{name}").main
    if inspect.signature(run).parameters:
        return int(run(list(arguments[1:])) or 0)
    sys.argv = [f"tessera bench {name}", *arguments[1:]]  # it reads the command line by itself
    return int(run() or 0)
