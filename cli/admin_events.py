"""`tessera admin events`: follow what changes, resumable after the last number that was seen."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from cli.admin_arguments import Subcommands, shared_arguments
from cli.admin_client import AdminClient
from cli.admin_plain import as_plain
from cli.client import MAX_INT64
from common.arguments import whole
from tessera.admin.v1 import admin_pb2

MAX_UINT64 = 2**64 - 1
MAX_SHOWN_BLOCKS = 8


def add_commands(commands: Subcommands) -> None:
    """Its parser."""
    summary = "follow what changes, until Ctrl-C"
    parser = commands.add_parser("events", help=summary, description=summary, parents=[shared_arguments(inner=True)])
    parser.add_argument(
        "--after", type=whole(0, MAX_UINT64), metavar="N", help="from the event after number N (0: all that is known)"
    )
    parser.add_argument("--epoch", type=whole(0, MAX_UINT64), default=0, metavar="E", help="refuse another epoch")
    parser.add_argument("--tokens", action="store_true", help="with the tokens of published blocks")
    parser.add_argument("--limit", type=whole(1, MAX_INT64), metavar="N", help="end after N events")
    parser.set_defaults(run=_events)


def _events(client: AdminClient, options: argparse.Namespace) -> int:
    request = admin_pb2.WatchEventsRequest(epoch=options.epoch, with_tokens=options.tokens)
    if options.after is not None:
        request.after_sequence = options.after
    seen = 0
    stream = client.stream("WatchEvents", request)
    try:
        for event in stream:
            # One line an event, also as JSON, so that a program reads them as they come.
            print(json.dumps(as_plain(event), ensure_ascii=False) if options.json else show_event(event), flush=True)
            seen += 1
            if seen == options.limit:
                break
    except KeyboardInterrupt:
        pass  # the usual way to end it
    finally:
        stream.close()  # type: ignore[attr-defined]
    return 0


def show_event(event: Any) -> str:
    """One event as one line."""
    moment = time.strftime("%H:%M:%S", time.localtime(event.unix_seconds))
    parts = [f"{event.sequence:>8}  {moment}.{int(event.unix_seconds % 1 * 1000):03d}  {event.kind:<20}"]
    if event.tenant:
        parts.append(f"tenant {event.tenant}")
    if event.session:
        parts.append(f"session {event.session}")
    if event.lease:
        parts.append(f"lease {event.lease}")
    if event.blocks:
        shown = " ".join(map(str, event.blocks[:MAX_SHOWN_BLOCKS]))
        rest = f" … ({len(event.blocks)})" if len(event.blocks) > MAX_SHOWN_BLOCKS else ""
        parts.append(f"blocks {shown}{rest}")
    parts += [f"{name} {event.detail[name]}" for name in sorted(event.detail)]
    if event.name:
        parts.append(f"name {event.name}")
    if event.token_ids:
        parts.append(f"tokens {' '.join(map(str, event.token_ids))}")
    return "  ".join(parts).rstrip()
