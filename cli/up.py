"""`tessera up`: cache manager, decoders and gateway of one machine, watched until Ctrl-C drains them.

Ready only when the health service of every process says so. It takes the options of the services and gives each of
them all of it; the one option of its own is --ephemeral.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cli.client import Client
from cli.errors import EXIT_USAGE, CommandError
from cli.files import read_authority, read_key
from cli.first_key import expect_key, unshown_key
from cli.fresh_state import FreshState
from cli.interrupts import Interrupts
from cli.node import Node, plan_node, unknown_variables, up_parser
from cli.node_lock import refuse_second, sole_supervisor
from cli.node_phase import COMPILING, DRAINING, STARTING, tell_phase
from cli.preflight import check_options
from cli.supervisor import POLL_SECONDS, RefusedStart, Stopped, Supervisor
from cli.terminal import say
from common.paths import default_state_dir

READY_SECONDS = 900.0  # busy cores may compile kernels for minutes; a child that dies too often ends the wait sooner
GRACE_BEYOND_DRAIN_SECONDS = 5.0
EPHEMERAL = "--ephemeral"


def main(arguments: Sequence[str]) -> int:
    """Run the node until it is asked to stop; returns 0 if everything drained and ended by itself."""
    if {"--help", "-h"} & set(arguments):
        parser = up_parser()
        parser.description = __doc__.partition("\n")[0] if __doc__ else None
        parser.add_argument(EPHEMERAL, action="store_true", help="use a fresh state directory and remove it at the end")
        parser.print_help()
        return 0
    interrupts = Interrupts()
    with state_directory(arguments) as flags:
        node = plan_node([flag for flag in arguments if flag != EPHEMERAL], os.environ, flags)
        check_options(node.options)
        refuse_second(node.paths)
        node.check_ports()
        fresh = FreshState(node)
        with sole_supervisor(node.paths):
            for name in unknown_variables(os.environ):
                say(f"tessera: warning: {name} is no option and has no effect")
            return _run(node, interrupts, fresh)


@contextmanager
def state_directory(arguments: Sequence[str]) -> Iterator[list[str]]:
    """The flags that name a fresh state directory where --ephemeral asks for one; it is removed afterwards."""
    if EPHEMERAL not in arguments:
        yield []
        return
    if any(flag.partition("=")[0] == "--state-dir" for flag in arguments):
        raise CommandError(f"{EPHEMERAL} makes a state directory of its own; leave it or --state-dir out", EXIT_USAGE)
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder:
        yield ["--state-dir", folder]


def make_supervisor(node: Node, interrupts: Interrupts) -> Supervisor:
    """The supervisor of `node`; what it has to say goes to stderr, and that it compiles to its clients too."""
    return Supervisor(
        stages=node.stages(),
        log_dir=node.paths.logs_dir,
        announce=lambda line: say(f"tessera: {line}"),
        stopping=interrupts.stopping,
        compiling=lambda: tell_phase(node.paths, COMPILING),
    )


def drain_grace_seconds(node: Node) -> float:
    """How long one stage may take to end by itself."""
    return node.options.drain_seconds + GRACE_BEYOND_DRAIN_SECONDS


def _run(node: Node, interrupts: Interrupts, fresh: FreshState) -> int:
    supervisor = make_supervisor(node, interrupts)
    expect_key(node.paths)
    began = time.monotonic()
    status, is_refused = 0, False
    tell_phase(node.paths, STARTING)
    tell_endpoint(node)
    try:
        supervisor.start(READY_SECONDS)
        tell_phase(node.paths, None)
        seconds = time.monotonic() - began
        key = unshown_key(node.paths, terminal=sys.stdout.isatty())
        told = describe_node(node, supervisor.pids(), seconds, key=key, chats=takes_conversations(node))
        say(told, sys.stdout)
        while not interrupts.stopping():
            supervisor.poll()
            time.sleep(POLL_SECONDS)
    except Stopped:
        pass
    except CommandError as error:
        say(f"tessera up: {error.message}")
        status, is_refused = error.status, isinstance(error, RefusedStart)
    finally:
        tell_phase(node.paths, DRAINING)
        say("tessera: draining; Ctrl-C again kills")
        clean = supervisor.stop(drain_grace_seconds(node), interrupts.hurry)
        node.paths.endpoint_file.unlink(missing_ok=True)
        tell_phase(node.paths, None)
    if is_refused and fresh.remove():
        told = f"{node.paths.state_dir} is removed again, with its logs: this start had made it"
        say(f"tessera: {told}")
    say("tessera: stopped")
    return status if clean else status or 1


def tell_endpoint(node: Node) -> None:
    """Leave in the state directory where the node can be called, for the clients on this machine; from its start on, so
    that what they say of a node that is not ready names its address, and no key goes to another one."""
    options = node.options
    lines = [callable_address(options.listen, secure=options.tls_cert is not None)]
    if options.tls_cert is not None:
        lines.append(str(options.tls_cert.absolute()))
    fresh = node.paths.endpoint_file.with_suffix(".new")
    fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
    fresh.replace(node.paths.endpoint_file)


def takes_conversations(node: Node) -> bool:
    """Whether the model has a chat template; where the gateway cannot be asked, it may have one."""
    listen, certificate = node.options.listen, node.options.tls_cert
    endpoint = callable_address(listen, secure=certificate is not None)
    try:
        with Client(endpoint, read_key(node.paths.default_key, None, ""), read_authority(certificate)) as client:
            return client.has_chat_template()
    except CommandError:
        return True


def describe_node(node: Node, pids: dict[str, int], seconds: float, *, key: str | None, chats: bool = True) -> str:
    """What runs, where it answers and how to call it; `key` is what to say of the default tenant's, and without
    `chats` the model has no chat template."""
    options, paths = node.options, node.paths
    command = "tessera" if shutil.which("tessera") else sys.argv[0]
    endpoint = callable_address(options.listen, secure=options.tls_cert is not None)
    state = f" --state-dir {paths.state_dir}" if options.state_dir != default_state_dir(os.environ) else ""
    scheme = "TLS" if options.tls_cert is not None else "plaintext"
    lines = [
        f"\nready after {seconds:.1f} s",
        f"  model      {options.model}  ({options.dtype}, {options.block_tokens}-token blocks)",
        f"  public     {options.listen}  ({scheme})   key    {paths.default_key}",
        f"  admin      unix:{paths.admin_socket}   key    {paths.admin_key}",
        f"  logs       {paths.logs_dir}",
        "  processes  " + ", ".join(f"{name} {pid}" for name, pid in pids.items()),
        "\ntry",
        *_questions(f"{command} %s{state}", chats),
        f"  {command} admin snapshot{state}",
        f"  {grpcurl_line(endpoint, str(paths.default_key), options.tls_cert)}",
        "\nin Python",
        *(f"  {line}" for line in python_lines(endpoint, str(paths.default_key), options.tls_cert)),
        "\nCtrl-C drains and stops",
    ]
    if key is not None:
        lines.insert(4, f"  key        {key}")
    return "\n".join(lines)


def _questions(command: str, chats: bool) -> list[str]:
    """Lines that ask the model; %s of `command` is the name of one."""
    if chats:
        return [f"  {command % 'generate'} 'Why is the sky blue?'", f"  {command % 'chat'}"]
    return [f"  {command % 'generate'} --raw 'The sky is blue because'  (the model has no chat template)"]


def callable_address(listen: str, *, secure: bool) -> str:
    """Where a client on this machine finds a listener: names of every interface become this one's."""
    host, _, port = listen.rpartition(":")
    everywhere = host in ("0.0.0.0", "[::]", "")
    return f"{'localhost' if secure else '127.0.0.1'}:{port}" if everywhere else listen


def grpcurl_line(listen: str, key_file: str, tls_cert: Path | None = None) -> str:
    """A grpcurl call that works through reflection."""
    plain = "-plaintext " if tls_cert is None else f"-cacert {tls_cert} "
    body = '{"text": "The sky is", "stopping": {"max_tokens": 16}}'
    header = f'-H "authorization: Bearer $(cat {key_file})"'
    return f"grpcurl {plain}{header} -d '{body}' {listen} tessera.inference.v1.InferenceService/Generate"


def python_lines(listen: str, key_file: str, tls_cert: Path | None = None) -> list[str]:
    """A client on plain grpcio."""
    channel = f"grpc.insecure_channel({listen!r})"
    if tls_cert is not None:
        trust = f"grpc.ssl_channel_credentials(open({str(tls_cert)!r}, 'rb').read())"
        channel = f"grpc.secure_channel({listen!r}, {trust})"
    return [
        "import grpc",
        "from tessera.inference.v1 import inference_pb2 as pb, inference_pb2_grpc as rpc",
        f"key = open({key_file!r}).read().strip()",
        f"stub = rpc.InferenceServiceStub({channel})",
        'request = pb.GenerateRequest(text="The sky is", stopping=pb.Stopping(max_tokens=16))',
        'for answer in stub.Generate(request, metadata=[("authorization", f"Bearer {key}")]):',
        '    print(answer.delta.text, end="", flush=True)',
    ]
