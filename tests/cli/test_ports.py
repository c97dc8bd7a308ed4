"""Whether a port can be had, and who listens on it."""

from __future__ import annotations

import os
import socket

import pytest

from cli.errors import CommandError
from cli.ports import check_free, owns_listener


def test_a_port_that_is_taken_is_refused_with_the_option() -> None:
    """While somebody listens the address is refused with status 1 and the flag to change; afterwards it is not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(CommandError, match=r"in use by another process.*another --listen") as refused:
            check_free("--listen", f"127.0.0.1:{port}")
        with pytest.raises(CommandError, match="is in use"):
            check_free("--listen", f"0.0.0.0:{port}")
    assert refused.value.status == 1
    check_free("--listen", f"127.0.0.1:{port}")


@pytest.mark.parametrize("address", ["nothing", "127.0.0.1:x", "127.0.0.1:70000", "127.0.0.1:0"])
def test_an_address_that_is_none_is_refused_with_status_2(address: str) -> None:
    """A wrong address is told with its flag; a Unix socket has no port to check."""
    with pytest.raises(CommandError, match="--admin-listen") as refused:
        check_free("--admin-listen", address)
    assert refused.value.status == 2
    check_free("--admin-listen", "unix:/tmp/x.sock")


def test_a_listener_belongs_to_its_process_alone() -> None:
    """The process that listens owns the port; its parent, and a process that is gone, do not; nor after the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert owns_listener(os.getpid(), port)
        assert not owns_listener(os.getppid(), port)
        assert not owns_listener(2**22 + 1, port)
    assert not owns_listener(os.getpid(), port)
