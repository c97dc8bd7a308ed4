"""Who is at the other end of a Unix socket, as the kernel says. No state; called by `handoff.py`."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from typing import Final

_SO_PEERPIDFD: Final = 77  # Linux 6.5: the peer's pidfd, free of the race of opening one by number
_CREDENTIALS: Final = struct.Struct("=iII")  # struct ucred: pid, uid, gid


@dataclass(frozen=True, slots=True)
class Peer:
    """Who the kernel says is at the other end of a Unix socket."""

    process_id: int
    user_id: int


def peer_of(link: socket.socket) -> Peer:
    """Process and user at the other end, as they were when it connected. OSError where the kernel does not say."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process_id, user_id, _ = _CREDENTIALS.unpack(raw)
    return Peer(process_id, user_id)


def open_peer_pidfd(link: socket.socket, peer: Peer) -> int:
    """A pidfd of the peer; the caller's. OSError where it has ended."""
    try:
        pidfd = link.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return os.pidfd_open(peer.process_id)
    os.set_inheritable(pidfd, False)
    return pidfd
