"""How `generate` and `chat` wait for a node that is not ready yet, so that they may be typed right after `tessera up`.

Invariant: the wait is bounded, is announced on stderr before it begins, and ends at once when the node is ready or
begins to end; what comes after it fails as it would have failed before. Unasked, only the node of the state directory
is waited for, and only while it says that it starts, or for the moment in which a `tessera up` that was typed just
before says nothing yet; `--wait` waits for whatever gateway is named until its health is SERVING.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Final

from cli.files import read_authority
from cli.node_address import find_address, find_state
from cli.node_phase import describe_phase, is_starting
from cli.probe import check_health
from common.arguments import whole

START_SECONDS: Final = 60
"""How long a node that starts is waited for where nobody says how long."""
MAX_SECONDS: Final = 86_400
POLL_SECONDS: Final = 0.1
MOMENT_SECONDS: Final = 1.0
"""How long a `tessera up` takes, from its typing on, to say that it starts."""
HEALTH_SECONDS: Final = 1.0


def add_wait_option(parser: argparse.ArgumentParser) -> None:
    """The option of the commands that wait."""
    parser.add_argument(
        "--wait", type=whole(0, MAX_SECONDS), metavar="SECONDS",
        help=f"wait so long for the gateway to be ready; 0 does not wait (default: {START_SECONDS} for a node on this "
        "machine that is starting, else 0)",
    )  # fmt: skip


def wait_for_node(
    options: argparse.Namespace,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when the node can be called, when there is nothing to wait for, or when the time is over."""
    paths = find_state(options.state_dir)
    if options.wait is None and options.endpoint is not None:
        return

    if options.wait is None:
        said = clock() + MOMENT_SECONDS
        while describe_phase(paths) is None and find_address(paths) is None and clock() < said:
            sleep(POLL_SECONDS)

    def goes_on() -> bool:
        return is_starting(paths) if options.wait is None else not _is_serving(options)

    seconds = START_SECONDS if options.wait is None else options.wait
    if not seconds or not goes_on():
        return
    which = f"the node of {paths.state_dir}" if options.endpoint is None else options.endpoint
    advice = "; --wait SECONDS says how long" if options.wait is None else ""
    print(f"tessera: {which} is not ready yet; waiting at most {seconds} s{advice}", file=sys.stderr, flush=True)
    deadline = clock() + seconds
    while goes_on() and clock() < deadline:
        sleep(POLL_SECONDS)


def _is_serving(options: argparse.Namespace) -> bool:
    found = find_address(find_state(options.state_dir), options.endpoint)
    if found is None:
        return False
    endpoint, certificate = found
    authority = read_authority(options.tls_ca or certificate)
    return check_health(endpoint, HEALTH_SECONDS, tls_ca=authority) == "SERVING"
