"""`tessera admin top`: the node at a glance, redrawn on a terminal until Ctrl-C; `--once` prints it one time.

It asks for counters each time, and for the limits of the hit rate seldom: their replay costs the daemon some work.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from cli.admin_arguments import Subcommands, shared_arguments
from cli.admin_client import AdminClient, print_json
from cli.admin_plain import as_plain
from cli.top_screen import MAX_MAPPED_BLOCKS, Reading, draw
from tessera.admin.v1 import admin_pb2

LIMITS_SECONDS = 30.0
CLEAR = "\x1b[H\x1b[2J"
MIN_INTERVAL, MAX_INTERVAL = 0.2, 3600.0


def add_commands(commands: Subcommands) -> None:
    """Its parser."""
    summary = "the node at a glance: pool, tenants, decoders, hit rate and how far it is from the best possible"
    parser = commands.add_parser("top", help=summary, description=summary, parents=[shared_arguments(inner=True)])
    parser.add_argument("--once", action="store_true", help="print it one time (the default where this is no terminal)")
    parser.add_argument(
        "--interval", type=_interval, default=2.0, metavar="SECONDS", help="between two looks (default 2)"
    )
    parser.set_defaults(run=_top)


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not MIN_INTERVAL <= value <= MAX_INTERVAL:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is outside {MIN_INTERVAL:g}..{MAX_INTERVAL:g}")
    return value


def _top(client: AdminClient, options: argparse.Namespace) -> int:
    if options.json:
        now = read(client, None)
        print_json(
            {
                "snapshot": as_plain(now.snapshot),
                "sessions": [as_plain(item) for item in now.sessions],
                "hit_rate_limits": as_plain(now.limits),
            }
        )
        return 0
    last = read(client, None)
    if options.once or not sys.stdout.isatty():
        print(draw(last, None))
        return 0
    try:
        print(f"{CLEAR}{draw(last, None)}", flush=True)
        while True:
            time.sleep(options.interval)
            now = read(client, last)
            print(f"{CLEAR}{draw(now, last)}", flush=True)
            last = now
    except KeyboardInterrupt:
        return 0  # the usual way to end it


def read(client: AdminClient, last: Reading | None) -> Reading:
    """Everything that the screen shows, at one moment or nearly so."""
    snapshot: Any = client.call("GetSnapshot", admin_pb2.GetSnapshotRequest())
    sessions = client.list_all("ListSessions", admin_pb2.ListSessionsRequest(), "sessions")
    blocks = None
    if 0 < snapshot.total_blocks <= MAX_MAPPED_BLOCKS:
        blocks = [block.state for block in client.list_all("ListBlocks", admin_pb2.ListBlocksRequest(), "blocks")]
    moment = time.monotonic()
    if last is not None and moment < last.limits_moment + LIMITS_SECONDS:
        return Reading(moment, snapshot, sessions, blocks, last.limits, last.limits_moment)
    limits = client.call("GetHitRateLimits", admin_pb2.GetHitRateLimitsRequest())
    return Reading(moment, snapshot, sessions, blocks, limits, moment)
