"""Where the admin RPC may be served beside its Unix socket: on loopback alone, because it has no TLS. Pure."""

from __future__ import annotations

import ipaddress

from common.addresses import split_host_port
from common.errors import FailedPrecondition


def refuse_beyond_loopback(listen: str) -> None:
    """Raises FailedPrecondition unless `listen` (host:port) is a loopback address: the admin listener has no TLS."""
    try:
        host, _ = split_host_port(listen)
    except ValueError as error:
        raise FailedPrecondition(f"--admin-listen: {error}") from None
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise FailedPrecondition(
            f"--admin-listen {listen}: the admin RPC has no TLS in this build and is served on loopback addresses "
            "alone; use 127.0.0.1, [::1] or localhost, or forward the Unix socket"
        )
