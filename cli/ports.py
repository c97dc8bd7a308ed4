"""TCP ports of this machine: whether one can be listened on, and whether a certain process is the one that listens.

`tessera up` asks the first before it starts anything, and the second before it calls the gateway ready: another node's
gateway on the same port answers health questions just as well. Reads `/proc`; it never keeps a port.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from cli.errors import EXIT_USAGE, CommandError
from common.addresses import split_host_port

LISTENING = "0A"  # the state in /proc/net/tcp
UNIX = "unix:"


def check_free(option: str, address: str) -> None:
    """Raise CommandError, with the flag `option`, unless `address` can be listened on now. Unix sockets pass."""
    if address.startswith(UNIX):
        return
    try:
        host, port = split_host_port(address)
    except ValueError as error:
        raise CommandError(f"{option}: {error}", EXIT_USAGE) from None
    if port == 0:
        raise CommandError(f"{option} {address}: name a port; clients could not know which one was picked", EXIT_USAGE)
    try:
        places = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise CommandError(f"{option} {address}: no such host ({error})", EXIT_USAGE) from None
    for family, kind, protocol, _, place in places:
        try:
            probe = socket.socket(family, kind, protocol)
        except OSError:  # this machine does not speak that family; the gateway leaves it out as well
            continue
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that end do not hold a port
            if family == socket.AF_INET6 and host != "::":
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(place)
                probe.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise CommandError(
                        f"{address} is in use by another process; stop it, or choose another {option}"
                    ) from None
                if error.errno != errno.EADDRNOTAVAIL or len(places) == 1:
                    raise CommandError(
                        f"cannot listen on {option} {address}: {os.strerror(error.errno or 0)}"
                    ) from None


def owns_listener(process_id: int, port: int) -> bool:
    """Whether process `process_id` itself listens on TCP `port`, on whatever address. False once it has ended."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return False
    try:
        return any(_link(entry) in sockets for entry in os.scandir(f"/proc/{process_id}/fd"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def _link(entry: os.DirEntry[str]) -> str:
    try:
        return os.readlink(entry.path)
    except OSError:  # closed since it was listed
        return ""


def _listening_inodes(port: int) -> set[str]:
    """The sockets of this network namespace that listen on `port`."""
    found = set()
    for name in ("tcp", "tcp6"):
        table = Path("/proc/self/net") / name
        if not table.exists():
            continue
        for line in table.read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found
