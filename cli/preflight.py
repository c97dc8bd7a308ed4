"""What can be wrong with the options of a node, found before any of its processes starts: listeners, certificates, the
device, threads, folders, and what a look at the model's files tells (`model_check.py`).

Invariant: nothing that would be served is refused here; what needs more than a look is left to the service that needs
it. Called by `up` and `demo`; it starts and changes nothing.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from cli.errors import CommandError, refuse_option
from cli.model_check import check_fit, look_at_model
from common.addresses import is_local, split_host_port
from common.config import Options
from common.cuda_driver import open_gpu
from common.errors import TesseraError
from common.paths import SOCKET_PATH_BYTES

UNIX = "unix:"
EVERYWHERE = ("0.0.0.0", "::")


def check_options(options: Options) -> None:
    """Raises CommandError, with the option and what is allowed, for what no process of the node would start with."""
    _check_certificate(options)
    _check_listeners(options)
    cores = len(os.sched_getaffinity(0))
    if options.threads > cores:
        refuse_option("--threads", f"{options.threads} is outside 0..{cores}, the CPUs of this machine for one decoder")
    if options.adapters_path.exists() and not options.adapters_path.is_dir():
        refuse_option("--adapters-dir", f"{options.adapters_path} is no directory")
    try:
        open_gpu(options.device)
    except TesseraError as error:
        option = f"--device {options.device}: "
        raise CommandError(f"{option}{error.message.removeprefix(option)}") from None
    if options.draft_model is not None:
        look_at_model("--draft-model", options.draft_model)
    if options.model is not None:
        check_fit(options, look_at_model("--model", options.model))


def _check_certificate(options: Options) -> None:
    cert, key = options.tls_cert, options.tls_key
    if cert is None or key is None:
        return
    for option, path in (("--tls-cert", cert), ("--tls-key", key)):
        try:
            path.open("rb").close()
        except OSError as error:
            refuse_option(option, f"{path} cannot be read: {error.strerror}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")  # how strong a key must be is not judged here
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or "NO_PEM"
        refuse_option(
            "--tls-cert", f"{cert} and --tls-key {key} are no PEM certificate and its key without a password ({why})"
        )


def _check_listeners(options: Options) -> None:
    if not (options.tls_cert or options.insecure_listen or is_local(options.listen)):
        refuse_option(
            "--listen",
            f"{options.listen} is beyond loopback: give --tls-cert and --tls-key, or accept keys and prompts in "
            "plaintext with --insecure-listen",
        )
    if options.listen.startswith(UNIX):
        _check_socket(Path(options.listen.removeprefix(UNIX)))
    if options.admin_listen is None:
        return
    if not is_local(options.admin_listen):
        refuse_option("--admin-listen", f"{options.admin_listen} is beyond loopback; the admin RPC has no TLS")
    if not options.listen.startswith(UNIX) and _overlap(options.listen, options.admin_listen):
        refuse_option("--admin-listen", f"{options.admin_listen} is the address of --listen; choose another port")


def _check_socket(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        refuse_option("--listen", f"there is no folder {path.absolute().parent} for the socket")
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        refuse_option("--listen", f"{path} is too long for a Unix socket; allowed are {SOCKET_PATH_BYTES} bytes")


def _overlap(listen: str, admin_listen: str) -> bool:
    (host, port), (admin_host, admin_port) = split_host_port(listen), split_host_port(admin_listen)
    return port == admin_port and (host == admin_host or host in EVERYWHERE)
