"""Where the admin RPC may be served beside its Unix socket: on loopback alone, because it has no TLS. Pure."""

from __future__ import annotations

from common.addresses import is_local, split_host_port
from common.errors import FailedPrecondition


def refuse_beyond_loopback(listen: str) -> None:
    """Raises FailedPrecondition unless `listen` (host:port) is a loopback address: the admin listener has no TLS."""
    try:
        split_host_port(listen)  # a socket's path is none
        local = is_local(listen)
    except ValueError as error:
        raise FailedPrecondition(f"--admin-listen: {error}") from None
    if not local:
        raise FailedPrecondition(
            f"--admin-listen {listen}: the admin RPC has no TLS in this build and is served on loopback addresses "
            "alone; use 127.0.0.1, [::1] or localhost, or forward the Unix socket"
        )
