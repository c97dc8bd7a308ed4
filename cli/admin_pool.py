"""`tessera admin`: commands that look at the whole pool and act on it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from cli.admin_arguments import Subcommands, listing_arguments, shared_arguments
from cli.admin_client import AdminClient, print_answer, print_json
from cli.admin_plain import as_plain
from cli.admin_tables import show_blocks, show_leases, show_prefixes, show_sessions, show_snapshot
from cli.admin_tenant_tables import show_branches
from cli.admin_tree import show_tree
from cli.client import MAX_INT64
from cli.errors import EXIT_USAGE, CommandError
from common.arguments import seconds, whole
from common.words import count
from tessera.admin.v1 import admin_pb2

STATES = ("free", "active", "cached", "quarantined")
DRAIN_MARGIN_SECONDS = 15.0
DEFAULT_DRAIN_SECONDS, MAX_DRAIN_SECONDS = 30.0, 86_400.0


def add_commands(commands: Subcommands) -> None:
    """Their parsers."""
    shared, listing = shared_arguments(inner=True), listing_arguments()

    def add(name: str, summary: str, run: Callable[..., int], *parents: Any) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(
            name, help=summary, description=summary, parents=[shared, *parents]
        )
        parser.set_defaults(run=run)
        return parser

    add("snapshot", "all counters at one moment", _snapshot)
    add("check", "check every invariant; exit status 1 if one is broken", _check)
    blocks = add("blocks", "list blocks", list_command("ListBlocks", "blocks", _blocks_request, show_blocks), listing)
    blocks.add_argument("--state", choices=STATES, help="blocks in this state alone")
    prefixes = add(
        "prefixes",
        "list the nodes of the prefix index",
        list_command("ListPrefixes", "prefixes", _prefixes, show_prefixes),
        listing,
    )
    prefixes.add_argument("--tenant", default="", metavar="TENANT", help="of this tenant alone")
    tree = add("tree", "draw the prefix index as a tree", _tree, listing)
    tree.add_argument("--tenant", default="", metavar="TENANT", help="of this tenant alone")
    leases = list_command("ListLeases", "leases", lambda o: admin_pb2.ListLeasesRequest(), show_leases)
    add("leases", "list who holds blocks", leases, listing)
    sessions = list_command("ListSessions", "sessions", lambda o: admin_pb2.ListSessionsRequest(), show_sessions)
    add("sessions", "list attached decoders", sessions, listing)
    branches = list_command("ListBranches", "branches", lambda o: admin_pb2.ListBranchesRequest(), show_branches)
    add("branches", "list kept conversations", branches, listing)
    drop = add("drop-branch", "end a kept conversation; what it computed stays cached", _drop_branch)
    drop.add_argument("branch", type=whole(1, MAX_INT64), metavar="BRANCH", help="its number, as `branches` lists it")
    evict = add("evict", "drop cached blocks", _evict)
    evict.add_argument("--all", action="store_true", help="every cached block; refused while blocks are in use")
    evict.add_argument("--tenant", default="", metavar="TENANT", help="blocks of this tenant alone")
    evict.add_argument(
        "--blocks", type=whole(1, MAX_INT64), default=0, metavar="N", help="N blocks, least recently used first"
    )
    evict.set_defaults(check=_check_evict)
    abort = add("abort", "end a running or queued request", _abort)
    abort.add_argument("request_id", metavar="REQUEST_ID", help="as `leases` lists it, and as the client was told")
    drain = add("drain", "let nothing new begin and wait; exit status 1 if something still runs", _drain)
    drain.add_argument(
        "--timeout",
        type=seconds(0, MAX_DRAIN_SECONDS),
        metavar="SECONDS",
        help="wait so many seconds at most (default 30)",
    )
    drain.add_argument("--resume", action="store_true", help="let new work begin again")


def list_command(
    method: str,
    field: str,
    make: Callable[[argparse.Namespace], Any],
    table: Callable[[Sequence[Any]], str],
) -> Callable[..., int]:
    """A command that prints every page of a list."""

    def run(client: AdminClient, options: argparse.Namespace) -> int:
        items = client.list_all(method, make(options), field, options.limit)
        if options.json:
            print_json([as_plain(item) for item in items])
        else:
            print(table(items) if items else "none")
        return 0

    return run


def _blocks_request(options: argparse.Namespace) -> Any:
    return admin_pb2.ListBlocksRequest(state=f"BLOCK_STATE_{(options.state or 'unspecified').upper()}")


def _prefixes(options: argparse.Namespace) -> Any:
    return admin_pb2.ListPrefixesRequest(tenant=options.tenant)


def _snapshot(client: AdminClient, options: argparse.Namespace) -> int:
    answer = client.call("GetSnapshot", admin_pb2.GetSnapshotRequest())
    return print_answer(options, answer, show_snapshot(answer))


def _check(client: AdminClient, options: argparse.Namespace) -> int:
    answer = client.call("CheckIntegrity", admin_pb2.CheckIntegrityRequest())
    state = "every invariant holds" if answer.ok else count(len(answer.violations), "violation")
    print_answer(
        options, answer, "\n".join([f"{count(answer.checked_blocks, 'block')} checked: {state}", *answer.violations])
    )
    return 0 if answer.ok else 1


def _tree(client: AdminClient, options: argparse.Namespace) -> int:
    items = client.list_all("ListPrefixes", _prefixes(options), "prefixes", options.limit)
    if options.json:
        print_json([as_plain(item) for item in items])
    else:
        print(show_tree(items) if items else "none")
    return 0


def _check_evict(options: argparse.Namespace) -> None:
    if not (options.all or options.tenant or options.blocks):
        raise CommandError("evict needs --all, --tenant TENANT or --blocks N", EXIT_USAGE)
    if options.all and (options.tenant or options.blocks):
        raise CommandError("--all excludes --tenant and --blocks; --tenant alone means all of that tenant", EXIT_USAGE)


def _evict(client: AdminClient, options: argparse.Namespace) -> int:
    request = admin_pb2.EvictBlocksRequest(all=options.all, tenant=options.tenant, num_blocks=options.blocks)
    answer = client.call("EvictBlocks", request)
    text = f"{count(answer.evicted_blocks, 'block')} evicted, {answer.remaining_blocks} remain in the index"
    return print_answer(options, answer, text)


def _abort(client: AdminClient, options: argparse.Namespace) -> int:
    answer = client.call("AbortRequest", admin_pb2.AbortRequestRequest(request_id=options.request_id))
    return print_answer(options, answer, f"request {options.request_id} has been ended")


def _drop_branch(client: AdminClient, options: argparse.Namespace) -> int:
    answer = client.call("DropBranch", admin_pb2.DropBranchRequest(branch=options.branch))
    return print_answer(options, answer, f"conversation {options.branch} is over; what it computed stays cached")


def _drain(client: AdminClient, options: argparse.Namespace) -> int:
    request = admin_pb2.DrainPoolRequest(timeout_seconds=options.timeout or 0.0, resume=options.resume)
    answer = client.call("DrainPool", request, (options.timeout or DEFAULT_DRAIN_SECONDS) + DRAIN_MARGIN_SECONDS)
    if options.resume:
        return print_answer(options, answer, "new work begins again")
    state = "nothing is held" if answer.drained else f"{count(answer.leases, 'lease')} still held"
    text = f"nothing new begins; {state}; `tessera admin drain --resume` ends it"
    print_answer(options, answer, text)
    return 0 if answer.drained else 1
