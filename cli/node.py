"""What the processes of one node are called with: the command lines of cache manager, decoders and gateway.

Every process takes the same options, so the user's own flags go to all of them unchanged; what differs (state
directory, model, index of a decoder, threads) is appended and, being last, wins. Used by `up` and `demo`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cli.child import PORT_ALONE, ChildSpec
from cli.errors import EXIT_USAGE, CommandError, refuse_option
from cli.model_store import ModelStore
from cli.ports import UNIX, check_free
from common.addresses import split_host_port
from common.config import Options, build_parser, load_options
from common.errors import TesseraError
from common.paths import StatePaths, models_dir
from common.rpc import unix_target

OTHER_VARIABLES = {
    f"TESSERA_{name}" for name in ("EXTRAS", "FAULTS", "GPU", "MODELS", "PUBLISH", "VERSION")
}  # of compose.yaml


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A node that is about to run: its options, its paths and the flags that all its processes share."""

    options: Options
    paths: StatePaths
    flags: tuple[str, ...]

    def stages(self) -> list[list[ChildSpec]]:
        """Cache manager, decoders, gateway: each uses the one before, so they end in the reverse order."""
        decoders = [self._child("decoder", index) for index in range(self.options.decoders)]
        return [[self._child("cachemgr")], decoders, [self._child("gateway")]]

    def _child(self, service: str, index: int = 0) -> ChildSpec:
        command = [sys.executable, "-m", service, *self.flags]
        name = service
        if service == "decoder":
            name = f"decoder-{index}"
            command += ["--decoder-index", str(index), "--threads", str(self._threads())]
        own_port = None
        if service == "gateway" and not self.options.listen.startswith(UNIX):
            own_port = split_host_port(self.options.listen)[1]
        return ChildSpec(name, tuple(command), self.health_target(service, index), own_port)

    def prepare(self) -> None:
        """Make the folders of the state directory. Raises CommandError where that cannot be."""
        try:
            self.paths.prepare()
        except TesseraError as error:
            raise CommandError(error.message) from None

    def check_ports(self) -> None:
        """Raise CommandError, with the option, where an address that this node will listen on is taken or is none."""
        check_free("--listen", self.options.listen)
        if self.options.admin_listen is not None:
            check_free("--admin-listen", self.options.admin_listen)

    def health_target(self, service: str, index: int = 0) -> str:
        """Where a process answers `grpc.health.v1`; of a gateway behind TLS only its port."""
        if service == "cachemgr":
            return unix_target(self.paths.cachemgr_socket)
        if service == "decoder":
            return unix_target(self.paths.decoder_socket(index))
        return self.options.listen if self.options.tls_cert is None else f"{PORT_ALONE}{self.options.listen}"

    def _threads(self) -> int:
        if self.options.threads or self.options.decoders == 1:
            return self.options.threads
        return max(1, len(os.sched_getaffinity(0)) // self.options.decoders)


def plan_node(arguments: Sequence[str], environ: Mapping[str, str], overrides: Sequence[str] = ()) -> Node:
    """Read the options of `tessera up` and find the model. Raises CommandError with what to do about it. It changes
    nothing: the processes make the folders that they need."""
    options = read_options([*arguments, *overrides], environ)
    try:
        paths = StatePaths(options.state_dir.absolute())
        model = find_model(options.model, environ)
        draft = None
        if options.draft_model is not None:
            draft = find_model(options.draft_model, environ, "--draft-model")
        paths.check()
    except TesseraError as error:
        raise CommandError(error.message) from None
    extra: tuple[str, ...] = ("--state-dir", str(paths.state_dir), "--model", str(model))
    if draft is not None:
        extra = (*extra, "--draft-model", str(draft))
    return Node(dataclasses.replace(options, model=model, draft_model=draft), paths, (*arguments, *overrides, *extra))


def read_options(arguments: Sequence[str], environ: Mapping[str, str], command: str = "up") -> Options:
    """The options of `tessera up`, or of another `command` that takes them. Raises CommandError with the option and its
    source where one is wrong."""
    parser = up_parser()
    parser.prog = f"tessera {command}"
    namespace = parser.parse_args(arguments)
    try:
        options = load_options(namespace, environ)
    except ValueError as error:
        raise CommandError(str(error), EXIT_USAGE) from None
    if namespace.decoder_index is not None or options.decoder_index:
        raise CommandError(
            "--decoder-index (TESSERA_DECODER_INDEX, decoder_index) is for `tessera decoder` alone; "
            "a node numbers its decoders itself, --decoders says how many",
            EXIT_USAGE,
        )
    return options


def up_parser() -> argparse.ArgumentParser:
    """The parser of `tessera up` and `tessera demo`; what only a single decoder may be told is not in its help."""
    parser = build_parser("up")
    for action in parser._actions:
        if action.dest == "decoder_index":
            action.help = argparse.SUPPRESS
    return parser


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables that look like options of ours and are none: most likely misspelt, and without effect."""
    known = {f"TESSERA_{action.dest.upper()}" for action in build_parser("up")._actions} | OTHER_VARIABLES
    return sorted(name for name in environ if name.startswith("TESSERA_") and name not in known)


def find_model(model: Path | None, environ: Mapping[str, str], option: str = "--model") -> Path:
    """The model to serve: the one that `option` named (a path or the name of a fetched one), else the demo model."""
    store = ModelStore(models_dir(environ))
    if model is None:
        if not store.demo_path.is_file():
            raise CommandError("no model. Get the demo model with `tessera model fetch`, or name one with --model PATH")
        return store.demo_path
    if model.exists():
        return model.absolute()
    fetched = store.find(str(model))
    if fetched is None:
        refuse_option(option, f"no model at {model}, and none of that name is fetched (`tessera model list`)")
    return fetched
