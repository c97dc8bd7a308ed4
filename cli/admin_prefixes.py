"""`tessera admin`: commands about one prefix: explain it, pin it, change its priority, let every tenant share it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from cli.admin_arguments import (
    MAX_TTL_SECONDS,
    Subcommands,
    add_prompt_arguments,
    listing_arguments,
    shared_arguments,
    tokens_of,
)
from cli.admin_client import AdminClient, print_answer
from cli.admin_pool import list_command
from cli.admin_tenant_tables import show_approved, show_pins
from cli.client import MAX_INT64
from cli.errors import EXIT_USAGE, CommandError
from common.arguments import seconds, whole
from common.words import count
from tessera.admin.v1 import admin_pb2
from tessera.common.v1 import common_pb2

MAX_UINT32 = 2**32 - 1


def add_commands(commands: Subcommands) -> None:
    """Their parsers."""
    shared, listing = shared_arguments(inner=True), listing_arguments()

    def add(name: str, summary: str, run: Callable[..., int], *parents: Any) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(
            name, help=summary, description=summary, parents=[shared, *parents]
        )
        parser.set_defaults(run=run)
        return parser

    explain = add("explain", "say how far a prompt is resident and why it stops there", _explain)
    pin = add("pin", "keep what is resident of a prefix from eviction", _pin)
    pin.add_argument(
        "--ttl",
        type=seconds(0, MAX_TTL_SECONDS),
        metavar="SECONDS",
        help="for so many seconds (default: until `unpin` ends it)",
    )
    priority = add("priority", "change the eviction priority of what is resident of a prefix", _priority)
    priority.add_argument(
        "--set", type=whole(0, 100), required=True, metavar="P", dest="priority", help="0 (first to go) to 100"
    )
    for parser in (explain, pin, priority):
        _add_scope_arguments(parser)
        add_prompt_arguments(parser)
        parser.add_argument("--tenant", default="default", metavar="TENANT", help="its tenant (default: default)")
    unpin = add("unpin", "end a pin", _unpin)
    unpin.add_argument("pin", type=whole(1, MAX_INT64), metavar="PIN", help="its number, as `pins` lists it")
    add(
        "pins", "list pins", list_command("ListPins", "pins", lambda o: admin_pb2.ListPinsRequest(), show_pins), listing
    )
    approve = add("approve", "let every tenant share a prefix; only digests of it are kept", _approve)
    approve.add_argument("name", metavar="NAME", help="a name for operators")
    add_prompt_arguments(approve)
    withdraw = add("withdraw", "end an approval and drop what no other one covers", _withdraw)
    withdraw.add_argument("name", metavar="NAME", help="its name, as `approved` lists it")
    approved = list_command(
        "ListApprovedPrefixes", "prefixes", lambda o: admin_pb2.ListApprovedPrefixesRequest(), show_approved
    )
    add("approved", "list approved prefixes", approved, listing)


def _add_scope_arguments(parser: argparse.ArgumentParser) -> None:
    """Which wider scope its first tokens lie in, as its requests say it."""
    parser.add_argument(
        "--public", type=whole(0, MAX_UINT32), metavar="N", help="its first N tokens are public (0: as far as approved)"
    )
    parser.add_argument("--group", metavar="GROUP", help="its first tokens lie in this group's scope")
    parser.add_argument(
        "--group-tokens", type=whole(0, MAX_UINT32), default=0, metavar="N", help="how many do (default: all)"
    )
    parser.set_defaults(check=_check_scope)


def _check_scope(options: argparse.Namespace) -> None:
    if options.public is not None and options.group:
        raise CommandError("--public and --group exclude each other", EXIT_USAGE)
    if options.group_tokens and not options.group:
        raise CommandError("--group-tokens belongs to a group; name it: --group GROUP", EXIT_USAGE)


def _scope_of(options: argparse.Namespace) -> common_pb2.ScopePrefix | None:
    """The wider scope that was named; None for none."""
    if options.group:
        return common_pb2.ScopePrefix(
            scope=common_pb2.SCOPE_GROUP, group=options.group, num_tokens=options.group_tokens
        )
    if options.public is not None:
        return common_pb2.ScopePrefix(scope=common_pb2.SCOPE_PUBLIC, num_tokens=options.public)
    return None


def _explain(client: AdminClient, options: argparse.Namespace) -> int:
    request = admin_pb2.ExplainPrefixRequest(
        tenant=options.tenant, token_ids=tokens_of(options), prefix=_scope_of(options)
    )
    answer = client.call("ExplainPrefix", request)
    asked = len(request.token_ids)
    verb = "is" if asked == 1 else "are"
    lines = [f"{answer.resident_tokens} of {count(asked, 'token')} {verb} resident", answer.reason]
    if answer.scope_tokens:
        lines.insert(1, f"{answer.scope_tokens} of them in the wider scope")
    if answer.private_reason:
        lines.append(answer.private_reason)
    if answer.other_token_ids:
        lines.append(f"there stand tokens {' '.join(map(str, answer.other_token_ids))}")
    return print_answer(options, answer, "\n".join(lines))


def _pin(client: AdminClient, options: argparse.Namespace) -> int:
    request = admin_pb2.PinPrefixRequest(tenant=options.tenant, token_ids=tokens_of(options), prefix=_scope_of(options))
    if options.ttl is not None:
        request.ttl_seconds = options.ttl
    answer = client.call("PinPrefix", request)
    text = f"pin {answer.pin} keeps {count(answer.pinned_tokens, 'token')} in {count(answer.pinned_blocks, 'block')}"
    return print_answer(options, answer, text)


def _unpin(client: AdminClient, options: argparse.Namespace) -> int:
    answer = client.call("UnpinPrefix", admin_pb2.UnpinPrefixRequest(pin=options.pin))
    return print_answer(options, answer, f"pin {options.pin} is over")


def _priority(client: AdminClient, options: argparse.Namespace) -> int:
    request = admin_pb2.SetPriorityRequest(
        tenant=options.tenant, token_ids=tokens_of(options), priority=options.priority, prefix=_scope_of(options)
    )
    answer = client.call("SetPriority", request)
    return print_answer(
        options, answer, f"priority {options.priority} from now on for {count(answer.changed_tokens, 'token')}"
    )


def _approve(client: AdminClient, options: argparse.Namespace) -> int:
    request = admin_pb2.ApprovePrefixRequest(name=options.name, token_ids=tokens_of(options))
    block = client.call("GetSnapshot", admin_pb2.GetSnapshotRequest()).block_tokens  # 0: no decoder has attached yet
    answer = client.call("ApprovePrefix", request)
    text = f"every tenant may share {options.name}, {count(answer.num_tokens, 'token')}"
    return print_answer(options, answer, text + of_which_whole(answer.num_tokens, block))


def of_which_whole(num_tokens: int, block_tokens: int) -> str:
    """What of an approved prefix is never shared, as only whole blocks are."""
    if not block_tokens or num_tokens % block_tokens == 0:
        return ""
    if num_tokens < block_tokens:
        return f"; nothing of it is shared, since it is shorter than a block of {block_tokens} tokens"
    return f"; shared are whole blocks, its first {num_tokens - num_tokens % block_tokens} tokens"


def _withdraw(client: AdminClient, options: argparse.Namespace) -> int:
    answer = client.call("WithdrawPrefix", admin_pb2.WithdrawPrefixRequest(name=options.name))
    text = f"{options.name} is withdrawn; {count(answer.evicted_blocks, 'block')} dropped"
    return print_answer(options, answer, text)
