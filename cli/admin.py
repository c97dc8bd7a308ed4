"""`tessera admin ...`: every verb of `AdminService` that this build serves, as tables or as JSON (`--json`).

Talks to the admin socket of the state directory with its `admin.key`. Lists follow the pages to their end or --limit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from cli.admin_tables import TABLES, as_plain, show_snapshot
from cli.client import MAX_INT64, check_text, find_state, whole
from cli.errors import CommandError
from cli.failures import explain_failure
from cli.files import read_key
from common.rpc import bearer_metadata, open_sync_channel, unix_target
from tessera.admin.v1 import admin_pb2, admin_pb2_grpc

PAGE_SIZE = 1000
TIMEOUT_SECONDS = 30.0
ABSENT = "the cache manager does not run; `tessera up` starts it"
STATES = ("free", "active", "cached", "quarantined")


class AdminClient:
    """A connection to the admin RPC; a failed call becomes a CommandError."""

    def __init__(self, target: str, key: str) -> None:
        self._target = target
        self._metadata = bearer_metadata(key)
        self._channel = open_sync_channel(target)
        self._stub: Any = admin_pb2_grpc.AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def call(self, method: str, request: Any) -> Any:
        """One unary call."""
        try:
            return getattr(self._stub, method)(request, metadata=self._metadata, timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            raise CommandError(explain_failure(error, self._target, ABSENT)) from None

    def list_all(self, method: str, request: Any, field: str, limit: int | None) -> list[Any]:
        """The items of every page, at most `limit`."""
        items: list[Any] = []
        while limit is None or len(items) < limit:
            request.page_size = PAGE_SIZE if limit is None else min(PAGE_SIZE, limit - len(items))
            answer = self.call(method, request)
            items.extend(getattr(answer, field))
            if not answer.next_page_token:
                break
            request.page_token = answer.next_page_token
        return items

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def build_admin_parser() -> argparse.ArgumentParser:
    """The parser of `tessera admin`."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print JSON")
    shared.add_argument("--state-dir", type=Path, metavar="DIR", help="state directory of the node")
    shared.add_argument("--target", metavar="TARGET", help="admin RPC (default: the socket in the state directory)")
    shared.add_argument("--key-file", type=Path, metavar="FILE", help="admin key (default <state-dir>/admin.key)")
    listing = argparse.ArgumentParser(add_help=False)
    listing.add_argument("--limit", type=whole(1, MAX_INT64), metavar="N", help="at most N entries (default: all)")
    parser = argparse.ArgumentParser(prog="tessera admin", description="Look into the cache and manage it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, summary: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=summary, description=summary, parents=[shared, *parents])

    add("snapshot", "all counters at one moment")
    add("check", "check every invariant; exit status 1 if one is broken")
    blocks = add("blocks", "list blocks", listing)
    blocks.add_argument("--state", choices=STATES, help="blocks in this state alone")
    prefixes = add("prefixes", "list the nodes of the prefix index", listing)
    prefixes.add_argument("--tenant", default="", metavar="TENANT", help="of this tenant alone")
    add("leases", "list who holds blocks", listing)
    add("sessions", "list attached decoders", listing)
    evict = add("evict", "drop cached blocks")
    evict.add_argument("--all", action="store_true", help="every cached block; refused while blocks are in use")
    evict.add_argument("--tenant", default="", metavar="TENANT", help="blocks of this tenant alone")
    evict.add_argument(
        "--blocks", type=whole(1, MAX_INT64), default=0, metavar="N", help="N blocks, least recently used first"
    )
    add("abort", "end a running or queued request").add_argument("request_id", metavar="REQUEST_ID")
    add("create-tenant", "add a tenant").add_argument("tenant", metavar="TENANT")
    add("tenants", "list tenants and their keys", listing)
    key = add("create-key", "make a tenant key; it is shown this once")
    key.add_argument("tenant", metavar="TENANT")
    key.add_argument("--name", default="", metavar="NAME", help="a name for operators")
    key.add_argument("--ttl", type=float, metavar="SECONDS", help="seconds until it expires (default: never)")
    add("revoke-key", "end a tenant key").add_argument("key_id", metavar="KEY_ID")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = build_admin_parser()
    options = parser.parse_args(arguments)
    if options.command == "evict" and not (options.all or options.tenant or options.blocks):
        parser.error("evict needs --all, --tenant or --blocks")
    for name in ("tenant", "name", "key_id", "request_id"):
        check_text(name.replace("_", " "), getattr(options, name, ""))
    paths = find_state(options.state_dir)
    named = None if options.key_file is None else "--key-file"
    hint = "Start the node with `tessera up`, or name it: --key-file FILE"
    key = read_key(options.key_file or paths.admin_key, named, hint)
    client = AdminClient(options.target or unix_target(paths.admin_socket.absolute()), key)
    try:
        return COMMANDS[options.command](client, options)
    finally:
        client.close()


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _snapshot(client: AdminClient, options: argparse.Namespace) -> int:
    answer = client.call("GetSnapshot", admin_pb2.GetSnapshotRequest())
    if options.json:
        _print_json(as_plain(answer))
    else:
        print(show_snapshot(answer))
    return 0


def _check(client: AdminClient, options: argparse.Namespace) -> int:
    answer = client.call("CheckIntegrity", admin_pb2.CheckIntegrityRequest())
    if options.json:
        _print_json(as_plain(answer))
    else:
        state = "every invariant holds" if answer.ok else f"{len(answer.violations)} violations"
        print("\n".join([f"{answer.checked_blocks} blocks checked: {state}", *answer.violations]))
    return 0 if answer.ok else 1


def _list(method: str, field: str, make: Callable[[argparse.Namespace], Any]) -> Callable[..., int]:
    def run(client: AdminClient, options: argparse.Namespace) -> int:
        items = client.list_all(method, make(options), field, options.limit)
        if options.json:
            _print_json([as_plain(item) for item in items])
        else:
            print(TABLES[field](items) if items else "none")
        return 0

    return run


def _change(
    method: str, make: Callable[[argparse.Namespace], Any], describe: Callable[[argparse.Namespace, Any], str]
) -> Callable[..., int]:
    def run(client: AdminClient, options: argparse.Namespace) -> int:
        answer = client.call(method, make(options))
        if options.json:
            _print_json(as_plain(answer))
        else:
            print(describe(options, answer))
        return 0

    return run


def _key_request(options: argparse.Namespace) -> Any:
    request = admin_pb2.CreateKeyRequest(tenant=options.tenant, name=options.name)
    if options.ttl is not None:
        request.ttl_seconds = options.ttl
    return request


COMMANDS: dict[str, Callable[..., int]] = {
    "snapshot": _snapshot,
    "check": _check,
    "blocks": _list(
        "ListBlocks",
        "blocks",
        lambda o: admin_pb2.ListBlocksRequest(state=f"BLOCK_STATE_{(o.state or 'unspecified').upper()}"),
    ),
    "prefixes": _list("ListPrefixes", "prefixes", lambda o: admin_pb2.ListPrefixesRequest(tenant=o.tenant)),
    "leases": _list("ListLeases", "leases", lambda o: admin_pb2.ListLeasesRequest()),
    "sessions": _list("ListSessions", "sessions", lambda o: admin_pb2.ListSessionsRequest()),
    "tenants": _list("ListTenants", "tenants", lambda o: admin_pb2.ListTenantsRequest()),
    "evict": _change(
        "EvictBlocks",
        lambda o: admin_pb2.EvictBlocksRequest(all=o.all, tenant=o.tenant, num_blocks=o.blocks),
        lambda o, a: f"{a.evicted_blocks} blocks evicted, {a.remaining_blocks} remain in the index",
    ),
    "abort": _change(
        "AbortRequest",
        lambda o: admin_pb2.AbortRequestRequest(request_id=o.request_id),
        lambda o, a: f"request {o.request_id} has been ended",
    ),
    "create-tenant": _change(
        "CreateTenant",
        lambda o: admin_pb2.CreateTenantRequest(tenant=o.tenant),
        lambda o, a: f"tenant {a.tenant} exists; give it a key: tessera admin create-key {a.tenant}",
    ),
    "create-key": _change(
        "CreateKey", _key_request, lambda o, a: f"key id  {a.key_id}\nkey     {a.key}   (shown this once)"
    ),
    "revoke-key": _change(
        "RevokeKey",
        lambda o: admin_pb2.RevokeKeyRequest(key_id=o.key_id),
        lambda o, a: f"key {o.key_id} is over",
    ),
}
