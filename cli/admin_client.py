"""A connection to the admin RPC for the command line: calls, pages to their end, streams. A failed call becomes a
CommandError with what the server said.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

import grpc

from cli.admin_plain import as_plain
from cli.client import NO_NODE
from cli.errors import CommandError
from cli.failures import explain_failure
from cli.files import read_key
from cli.node_address import find_state
from cli.node_phase import describe_silence
from common.interceptors import error_from_rpc
from common.paths import StatePaths
from common.rpc import bearer_metadata, open_sync_channel, unix_target
from tessera.admin.v1 import admin_pb2_grpc

PAGE_SIZE = 1000
TIMEOUT_SECONDS = 30.0
# What a user types for the fields of a request.
FLAGS = {
    "add_tenants": "--add", "branch": "BRANCH", "ceiling_blocks": "--ceiling", "floor_blocks": "--floor",
    "key_id": "KEY_ID", "num_blocks": "--blocks", "pin_blocks": "--pins", "priority": "--set",
    "remove_tenants": "--remove", "request_id": "REQUEST_ID", "timeout_seconds": "--timeout",
    "token_ids": "the prompt", "ttl_seconds": "--ttl", "weight": "--weight",
}  # fmt: skip
# What to do where the server names such a reason.
ADVICE = {
    "APPROVAL_NOT_FOUND": "`tessera admin approved` lists all",
    "BRANCH_NOT_FOUND": "`tessera admin branches` lists all",
    "BLOCKS_IN_USE": "`tessera admin drain` waits for leases, `drop-branch` ends a kept conversation; --tenant T and "
    "--blocks N drop what nobody holds",
    "GROUP_NOT_FOUND": "`tessera admin groups` lists all",
    "KEY_NOT_FOUND": "`tessera admin keys` lists the ids of all",
    "PIN_NOT_FOUND": "`tessera admin pins` lists all",
    "REQUEST_NOT_FOUND": "`tessera admin leases` lists those that hold blocks",
    "TENANT_NOT_FOUND": "`tessera admin tenants` lists all",
    "UNKNOWN_CREDENTIAL": "name this node's admin.key: --key-file FILE, or its folder: --state-dir DIR",
}
ABSENT = "the cache manager does not run; `tessera up` starts it"


class AdminClient:
    """One connection with one credential."""

    def __init__(self, target: str, key: str, own: StatePaths | None = None) -> None:
        """`own` is the state directory of the node behind `target`, where that is known."""
        self._target = target
        self._own = own
        self._metadata = bearer_metadata(key)
        self._channel = open_sync_channel(target)
        self._stub: Any = admin_pb2_grpc.AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> AdminClient:
        """Connect as the command line says. Raises CommandError where the key cannot be read."""
        paths = find_state(options.state_dir)
        named = None if options.key_file is None else "--key-file"
        hint = f"{NO_NODE} --key-file FILE"
        key = read_key(options.key_file or paths.admin_key, named, hint)
        if options.target:
            return cls(options.target, key)
        return cls(unix_target(paths.admin_socket.absolute()), key, paths)

    def call(self, method: str, request: Any, timeout_seconds: float = TIMEOUT_SECONDS) -> Any:
        """One unary call."""
        try:
            return getattr(self._stub, method)(request, metadata=self._metadata, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise self._failure(error) from None

    def stream(self, method: str, request: Any) -> Iterator[Any]:
        """The answers of a streaming call; leaving the loop ends it."""
        call = getattr(self._stub, method)(request, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._failure(error) from None
        finally:
            call.cancel()

    def list_all(self, method: str, request: Any, field: str, limit: int | None = None) -> list[Any]:
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

    def _failure(self, error: grpc.RpcError) -> CommandError:
        absent = ABSENT if self._own is None else describe_silence(self._own, "cache manager", os.environ)
        message = explain_failure(error, self._target, absent, flags=FLAGS)
        advice = ADVICE.get(error_from_rpc(error).reason)
        return CommandError(message if advice is None else f"{message}; {advice}")

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def print_json(value: object) -> None:
    """One JSON document."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_answer(options: argparse.Namespace, answer: Any, text: str) -> int:
    """An answer as JSON or as `text`; the exit status."""
    if options.json:
        print_json(as_plain(answer))
    else:
        print(text)
    return 0
