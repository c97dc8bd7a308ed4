"""The `tessera` command: picks one module per command and imports nothing else, so that `tessera probe` stays fast.

Ctrl-C ends a command quietly at any moment from here on, while it is still importing as well.

Every command module has `main(arguments) -> int`. Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

import common  # noqa: F401 - sets what gRPC reads when it is first imported
from cli.errors import EXIT_INTERRUPTED, EXIT_USAGE, CommandError

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("cli.demo", "stream two answers that share a prefix, then stop everything"),
    "up": ("cli.up", "run cache manager, decoders and gateway on this machine"),
    "generate": ("cli.generate", "send one prompt and stream the answer"),
    "chat": ("cli.chat", "talk to the model; the conversation stays cached"),
    "admin": ("cli.admin", "look into the cache, evict, abort, manage tenants and keys"),
    "plan": ("cli.plan", "what keys and values of a model take, and how many sequences fit"),
    "model": ("cli.model", "fetch and list models"),
    "adapter": ("cli.adapter", "add, remove and list LoRA adapters"),
    "probe": ("cli.probe", "ask one process for its health (for containers)"),
    "cachemgr": ("cli.service", "run the cache manager alone"),
    "decoder": ("cli.service", "run one decoder alone"),
    "gateway": ("cli.service", "run the gateway alone"),
    "bench": ("cli.bench", "measure; each benchmark prints a table"),
}
NEEDS_ITS_NAME = ("cachemgr", "decoder", "gateway")
CLIENTS = ("generate", "chat", "admin", "probe")


def usage() -> str:
    """The text of `tessera --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        ["usage: tessera COMMAND [OPTIONS]", "", *lines, "", "`tessera COMMAND --help` lists the options of a command."]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(given: list[str]) -> int:
    if given[:1] in (["--help"], ["-h"], ["help"]):
        print(usage())
        return 0
    if given[:1] in (["--version"], ["version"]):
        from importlib import metadata

        print(f"tessera {metadata.version('tessera-cache')}")
        return 0
    if not given:
        sys.stderr.write(f"{usage()}\n")
        return EXIT_USAGE
    if given[0] not in COMMANDS:
        near = difflib.get_close_matches(given[0], COMMANDS, 1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        sys.stderr.write(f"tessera: no such command: {given[0]}; {meant} (see `tessera --help`)\n")
        return EXIT_USAGE
    name, rest = given[0], given[1:]
    if name in CLIENTS:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what its core logs about a connection, we say in words
    module = _import_quietly(COMMANDS[name][0])
    try:
        return int(module.main([name, *rest] if name in NEEDS_ITS_NAME else rest))
    except CommandError as error:
        sys.stderr.write(f"tessera {name}: {error.message}\n")
        return error.status
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; say nothing more to anyone
        return 1


def _import_quietly(name: str) -> ModuleType:
    """Import a command. Ctrl-C meanwhile ends the process: an exception would surface anywhere in half-made modules."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and neither ignored nor a caller's own
    if usual:
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(EXIT_INTERRUPTED))
    try:
        return importlib.import_module(name)
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    raise SystemExit(main())
