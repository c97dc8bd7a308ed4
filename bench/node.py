"""The node that a bench calls: the three real processes, started with a fresh state directory, or a running node.

A started node never outlives the bench and leaves no state behind. The benches call it over its public service alone.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.setting import Setting
from cli.errors import EXIT_USAGE, CommandError
from cli.node import plan_node
from cli.supervisor import Supervisor
from common.credentials import read_secret
from common.errors import TesseraError
from common.paths import StatePaths, default_state_dir

READY_SECONDS = 300.0
STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to send requests, and the tenant key to send with them (never printed). A started node has `logs`."""

    target: str
    key: str
    started: bool
    logs: Path | None = None


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Options that name a running node instead of starting one."""
    group = parser.add_argument_group("node")
    group.add_argument("--endpoint", metavar="HOST:PORT", help="use this running node instead of starting one")
    group.add_argument("--key-file", type=Path, metavar="FILE", help="tenant key of the running node")
    group.add_argument("--pool-bytes", default="2G", metavar="SIZE", help="pool of the node that is started")


@contextmanager
def open_node(namespace: argparse.Namespace, setting: Setting, more: Sequence[str] = ()) -> Iterator[Endpoint]:
    """The node the command line asks for. Raises CommandError if it cannot be reached or does not start."""
    if namespace.endpoint is not None:
        key_file = namespace.key_file or StatePaths(default_state_dir(os.environ)).default_key
        try:
            key = read_secret(key_file)
        except (TesseraError, OSError) as error:
            raise CommandError(f"cannot read the tenant key: {error}; name it with --key-file", EXIT_USAGE) from None
        yield Endpoint(namespace.endpoint, key, started=False)
        return
    if namespace.key_file is not None:
        raise CommandError("--key-file goes with --endpoint", EXIT_USAGE)
    with started_node(setting, ["--pool-bytes", namespace.pool_bytes, *more]) as endpoint:
        yield endpoint


@contextmanager
def started_node(setting: Setting, flags: Sequence[str]) -> Iterator[Endpoint]:
    """Start cache manager, decoder and gateway with `flags`; stop them and remove their state at the end."""
    # A short folder: a Unix socket's path has 107 bytes.
    with tempfile.TemporaryDirectory(prefix="tessera-bench-") as folder:
        listen = f"127.0.0.1:{_free_port()}"
        given = [
            *("--model", str(setting.model), "--dtype", setting.dtype, "--threads", str(setting.threads)),
            *("--listen", listen, "--state-dir", folder, "--log-level", "warning"),
            *flags,
        ]
        # The options are all named here; a TESSERA_* variable of the shell must not change what is measured.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
        node = plan_node(given, environ)
        node.prepare()
        said: list[str] = []
        supervisor = Supervisor(node.stages(), node.paths.logs_dir, said.append, environ=environ)
        try:
            try:
                supervisor.start(READY_SECONDS)
            except CommandError as error:
                raise CommandError("\n".join([*said[-20:], error.message])) from None
            yield Endpoint(listen, read_secret(node.paths.default_key), started=True, logs=node.paths.logs_dir)
        finally:
            supervisor.stop(STOP_SECONDS)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
