"""`tessera admin`: tenants, their keys and quotas, and the groups that may share a scope."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from cli.admin_arguments import MAX_TTL_SECONDS, Subcommands, listing_arguments, shared_arguments
from cli.admin_client import AdminClient, print_answer, print_json
from cli.admin_plain import as_plain
from cli.admin_pool import list_command
from cli.admin_tenant_tables import show_groups, show_keys, show_tenants
from cli.errors import EXIT_USAGE, CommandError
from common.arguments import number, seconds, whole
from common.words import count
from tessera.admin.v1 import admin_pb2

MAX_UINT64 = 2**64 - 1


_POSITIONALS = {
    "tenant": "its name, as `tenants` lists it",
    "key_id": "its id, as `keys` lists it; not the key itself",
    "group": "its name, as `groups` lists it",
}
_KEY_TEXT = re.compile(r"tsr_([0-9a-f]{16})_")


def add_commands(commands: Subcommands) -> None:
    """Their parsers: `tenants`, `keys` and `groups` list where no verb follows."""
    tenants = _family(commands, "tenants", "list tenants, or create, update, delete and rotate one", _TENANTS)
    _verb(tenants, "create", "add a tenant", _create_tenant, "tenant")
    update = _verb(tenants, "update", "change a tenant's quota; what is not named stays", _update_tenant, "tenant")
    for name, text in (
        ("floor", "blocks that others cannot take"),
        ("ceiling", "blocks that it cannot pass; 0: the whole pool"),
        ("pins", "blocks that pins may keep"),
    ):
        update.add_argument(f"--{name}", type=whole(0, MAX_UINT64), metavar="N", help=text)
    update.add_argument(
        "--weight", type=number, metavar="W", help="weight in sharing idle room, 0.001 to 1000000 (at first 1)"
    )
    _verb(tenants, "delete", "end a tenant: keys, requests, blocks, secret", _delete_tenant, "tenant")
    _verb(tenants, "rotate", "give a tenant a new secret: nothing that it cached is found again", _rotate, "tenant")
    keys = _family(commands, "keys", "list tenant keys, or create and revoke one", _list_keys)
    create = _verb(keys, "create", "make a tenant key; it is shown this once", _create_key, "tenant")
    revoke = _verb(keys, "revoke", "end a tenant key", _revoke_key, "key_id")
    groups = _family(commands, "groups", "list groups, or create, update and delete one", _GROUPS)
    made = _verb(groups, "create", "make a group of tenants that may share a scope", _create_group, "group")
    made.add_argument("members", nargs="*", metavar="TENANT", help="its members")
    change = _verb(groups, "update", "change a group's members", _update_group, "group")
    change.add_argument("--add", action="append", default=[], metavar="TENANT", help="a new member; repeatable")
    change.add_argument("--remove", action="append", default=[], metavar="TENANT", help="a member to drop; repeatable")
    _verb(groups, "delete", "end a group and drop its blocks", _delete_group, "group")
    # The short forms of one command each.
    shared = [shared_arguments(inner=True)]
    short = commands.add_parser("create-tenant", help="add a tenant", description="add a tenant", parents=shared)
    short.add_argument("tenant", metavar="TENANT", help="1 to 64 of a-z, 0-9, - and _")
    short.set_defaults(run=_create_tenant)
    text = "make a tenant key; it is shown this once"
    short = commands.add_parser("create-key", help=text, description=text, parents=shared)
    short.add_argument("tenant", metavar="TENANT", help=_POSITIONALS["tenant"])
    short.set_defaults(run=_create_key)
    for parser in (create, short):
        parser.add_argument("--name", default="", metavar="NAME", help="a name for operators")
        parser.add_argument(
            "--ttl",
            type=seconds(0, MAX_TTL_SECONDS),
            metavar="SECONDS",
            help="seconds until it expires, 86400 for a day (default: never)",
        )
    short = commands.add_parser("revoke-key", help="end a tenant key", description="end a tenant key", parents=shared)
    short.add_argument("key_id", metavar="KEY_ID", help=_POSITIONALS["key_id"])
    short.set_defaults(run=_revoke_key)
    for parser in (revoke, short):
        parser.set_defaults(check=_check_key_id)
    change.set_defaults(check=_check_members)


def _family(commands: Subcommands, name: str, summary: str, listed: Callable[..., int]) -> Subcommands:
    described = f"{summary}; without a verb they are listed"
    parser = commands.add_parser(
        name, help=summary, description=described, parents=[shared_arguments(inner=True), listing_arguments()]
    )
    parser.set_defaults(run=listed)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    parents = [shared_arguments(inner=True), listing_arguments(inner=True)]
    verbs.add_parser("list", help="list them", parents=parents).set_defaults(run=listed)
    return verbs


def _verb(
    verbs: Subcommands, name: str, summary: str, run: Callable[..., int], positional: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=summary, description=summary, parents=[shared_arguments(inner=True)]
    )
    parser.add_argument(positional, metavar=positional.upper(), help=_POSITIONALS[positional])
    parser.set_defaults(run=run)
    return parser


_TENANTS = list_command("ListTenants", "tenants", lambda o: admin_pb2.ListTenantsRequest(), show_tenants)
_GROUPS = list_command("ListGroups", "groups", lambda o: admin_pb2.ListGroupsRequest(), show_groups)


def _check_key_id(options: argparse.Namespace) -> None:
    """A key that is sent in the place of its id would be a secret where ids are written."""
    if (found := _KEY_TEXT.match(options.key_id)) is not None:
        raise CommandError(f"KEY_ID: that is the key itself; name its id: {found[1]}", EXIT_USAGE)


def _check_members(options: argparse.Namespace) -> None:
    if not (options.add or options.remove):
        raise CommandError("there is nothing to change; give --add TENANT or --remove TENANT", EXIT_USAGE)


def _list_keys(client: AdminClient, options: argparse.Namespace) -> int:
    tenants = client.list_all("ListTenants", admin_pb2.ListTenantsRequest(), "tenants", options.limit)
    if options.json:
        print_json([{"tenant": item.tenant, **as_plain(key)} for item in tenants for key in item.keys])
    else:
        print(show_keys(tenants) if tenants else "none")
    return 0


def _create_tenant(client: AdminClient, options: argparse.Namespace) -> int:
    answer = client.call("CreateTenant", admin_pb2.CreateTenantRequest(tenant=options.tenant))
    text = f"tenant {answer.tenant} created; give it a key: tessera admin create-key {answer.tenant}"
    return print_answer(options, answer, text)


def _update_tenant(client: AdminClient, options: argparse.Namespace) -> int:
    request = admin_pb2.UpdateTenantRequest(tenant=options.tenant)
    fields = {"floor_blocks": "floor", "ceiling_blocks": "ceiling", "pin_blocks": "pins", "weight": "weight"}
    for field, option in fields.items():
        value = getattr(options, option)
        if value is not None:
            setattr(request, field, value)
    if not request.ListFields()[1:]:
        known = ", ".join(f"--{name}" for name in fields.values())
        raise CommandError(f"there is nothing to change; give one of {known}", EXIT_USAGE)
    answer = client.call("UpdateTenant", request)
    return print_answer(options, answer, f"the quota of tenant {options.tenant} is changed")


def _delete_tenant(client: AdminClient, options: argparse.Namespace) -> int:
    answer = client.call("DeleteTenant", admin_pb2.DeleteTenantRequest(tenant=options.tenant))
    return print_answer(
        options, answer, f"tenant {options.tenant} is gone, and {count(answer.evicted_blocks, 'block')} with it"
    )


def _rotate(client: AdminClient, options: argparse.Namespace) -> int:
    answer = client.call("RotateTenantSecret", admin_pb2.RotateTenantSecretRequest(tenant=options.tenant))
    text = f"tenant {options.tenant} has a new secret; {count(answer.evicted_blocks, 'block')} dropped"
    return print_answer(options, answer, text)


def _create_key(client: AdminClient, options: argparse.Namespace) -> int:
    request = admin_pb2.CreateKeyRequest(tenant=options.tenant, name=options.name)
    if options.ttl is not None:
        request.ttl_seconds = options.ttl
    answer = client.call("CreateKey", request)
    return print_answer(options, answer, f"key id  {answer.key_id}\nkey     {answer.key}   (shown this once)")


def _revoke_key(client: AdminClient, options: argparse.Namespace) -> int:
    answer = client.call("RevokeKey", admin_pb2.RevokeKeyRequest(key_id=options.key_id))
    return print_answer(options, answer, f"key {options.key_id} is revoked")


def _create_group(client: AdminClient, options: argparse.Namespace) -> int:
    request: Any = admin_pb2.CreateGroupRequest(group=options.group, tenants=options.members)
    answer = client.call("CreateGroup", request)
    return print_answer(options, answer, f"group {options.group} created, with {count(len(options.members), 'member')}")


def _update_group(client: AdminClient, options: argparse.Namespace) -> int:
    request = admin_pb2.UpdateGroupRequest(group=options.group, add_tenants=options.add, remove_tenants=options.remove)
    answer = client.call("UpdateGroup", request)
    return print_answer(options, answer, f"the members of group {options.group} are changed")


def _delete_group(client: AdminClient, options: argparse.Namespace) -> int:
    answer = client.call("DeleteGroup", admin_pb2.DeleteGroupRequest(group=options.group))
    return print_answer(
        options, answer, f"group {options.group} is gone, and {count(answer.evicted_blocks, 'block')} with it"
    )
