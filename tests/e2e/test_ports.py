"""The port of a node is its own, also while its gateway is dead."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.e2e import rig

ASK = """
import sys
from tests.e2e import rig
rig.random.sample = lambda ports, count: [int(sys.argv[1]), int(sys.argv[1]) + 1, *ports]
print(rig.free_port())
"""


def test_no_other_process_is_given_the_port_of_a_node() -> None:
    """Nobody listens there, and another process that would take it first takes the next one that is free."""
    port = rig.free_port()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))  # positive control: it could be had
    done = subprocess.run([sys.executable, "-c", ASK, str(port)], capture_output=True, text=True, check=True)
    assert int(done.stdout) != port


def test_the_system_gives_the_port_to_nobody() -> None:
    """Of many ports that it gives, none is one of those that nodes take."""
    ports = set(rig.unassigned_ports())
    for _ in range(200):
        with socket.socket() as asking:
            asking.bind(("127.0.0.1", 0))
            assert int(asking.getsockname()[1]) not in ports or len(ports) == 2**16 - rig.LEAST_PORT
    assert rig.free_port() in ports
