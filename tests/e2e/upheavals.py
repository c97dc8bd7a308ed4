"""What befalls the fuzzer's node: processes are killed and stopped, operators change what running requests rely on.

Invariant: a change of an operator that others depend on is undone before `befall` returns, whatever else happens, so
that each round begins on the same node. `BEFORE` and `BEGUN` say what a call may end with for each kind, before its
first message and after it. Used by `fuzzer.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from tessera.admin.v1 import admin_pb2
from tests.e2e.processes import children_of, poll
from tests.e2e.rig import START_SECONDS, Node
from tests.e2e.traces import GROUP, Fault

APPROVAL: Final = "fuzz"
LOW_CEILING: Final = 6
BEFORE: Final = {
    "kill_decoder": {grpc.StatusCode.UNAVAILABLE},
    "kill_cachemgr": {grpc.StatusCode.UNAVAILABLE},
    "kill_gateway": {grpc.StatusCode.UNAVAILABLE},
    "stop_decoder": {grpc.StatusCode.UNAVAILABLE},
    "drain": {grpc.StatusCode.UNAVAILABLE},
    "leave_group": {grpc.StatusCode.PERMISSION_DENIED},
    "revoke": {grpc.StatusCode.UNAUTHENTICATED},
    "delete": {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.ABORTED},
}
# The death of the cache manager ends no stream that has begun, nor does what an operator does but for a deletion; after
# that one that was preempted is known no more.
BEGUN: Final = {
    **{kind: {grpc.StatusCode.UNAVAILABLE} for kind in ("kill_decoder", "kill_gateway", "stop_decoder")},
    "delete": {grpc.StatusCode.ABORTED, grpc.StatusCode.UNAUTHENTICATED},
}


class Upheavals:
    """Brings faults upon a node. `keys` are those of its tenants, in order; one that ends is replaced there."""

    def __init__(self, node: Node, tenants: Sequence[str], keys: list[str]) -> None:
        self._node, self._tenants, self._keys = node, tenants, keys

    def befall(self, fault: Fault) -> None:
        """Do what the fault says, and undo what is to be undone."""
        match fault.kind:
            case "evict":
                with contextlib.suppress(grpc.RpcError):  # in use, or the daemon is away
                    self._node.admin.evict_all()
            case "kill_gateway" | "kill_cachemgr" | "kill_decoder" | "stop_decoder":
                self._strike(fault)
            case _:
                getattr(self, f"_{fault.kind}")(fault)

    def approve(self, token_ids: Sequence[int]) -> None:
        """The one approved prefix from now on."""
        with contextlib.suppress(grpc.RpcError):
            self._node.admin.call("WithdrawPrefix", admin_pb2.WithdrawPrefixRequest(name=APPROVAL))
        self._insist("ApprovePrefix", admin_pb2.ApprovePrefixRequest(name=APPROVAL, token_ids=token_ids))

    def _strike(self, fault: Fault) -> None:
        name = fault.kind.partition("_")[2]
        lines = children_of(self._node.processes["up"].pid)
        found = sorted(pid for pid, line in lines.items() if name in line.split())
        if not found:
            return
        victim = found[fault.victim % len(found)]
        with contextlib.suppress(ProcessLookupError):
            if fault.kind != "stop_decoder":
                os.kill(victim, signal.SIGKILL)
                return
            os.kill(victim, signal.SIGSTOP)
            time.sleep(fault.seconds)
            os.kill(victim, signal.SIGCONT)

    def _rotate(self, fault: Fault) -> None:
        with contextlib.suppress(grpc.RpcError):  # the daemon is away, or waits for its decoders
            tenant = self._tenant(fault)
            self._node.admin.call("RotateTenantSecret", admin_pb2.RotateTenantSecretRequest(tenant=tenant))

    def _withdraw(self, fault: Fault) -> None:
        with contextlib.suppress(grpc.RpcError):
            self._node.admin.call("WithdrawPrefix", admin_pb2.WithdrawPrefixRequest(name=APPROVAL))

    def _leave_group(self, fault: Fault) -> None:
        member = [self._tenant(fault)]
        with contextlib.suppress(grpc.RpcError):
            self._node.admin.call("UpdateGroup", admin_pb2.UpdateGroupRequest(group=GROUP, remove_tenants=member))
        time.sleep(fault.seconds)
        self._insist("UpdateGroup", admin_pb2.UpdateGroupRequest(group=GROUP, add_tenants=member))

    def _lower_ceiling(self, fault: Fault) -> None:
        tenant = self._tenant(fault)
        with contextlib.suppress(grpc.RpcError):
            low = admin_pb2.UpdateTenantRequest(tenant=tenant, ceiling_blocks=LOW_CEILING)
            self._node.admin.call("UpdateTenant", low)
        time.sleep(fault.seconds)
        self._insist("UpdateTenant", admin_pb2.UpdateTenantRequest(tenant=tenant, ceiling_blocks=0))

    def _drain(self, fault: Fault) -> None:
        with contextlib.suppress(grpc.RpcError):
            self._node.admin.call("DrainPool", admin_pb2.DrainPoolRequest(timeout_seconds=fault.seconds))
        self._insist("DrainPool", admin_pb2.DrainPoolRequest(resume=True))

    def _revoke(self, fault: Fault) -> None:
        old = self._new_key(fault)
        over = admin_pb2.RevokeKeyRequest(key_id=old.split("_")[1])
        self._insist("RevokeKey", over, done=grpc.StatusCode.NOT_FOUND)  # its tenant was deleted

    def _delete(self, fault: Fault) -> None:
        tenant = self._tenant(fault)
        with contextlib.suppress(grpc.RpcError):
            self._node.admin.call("DeleteTenant", admin_pb2.DeleteTenantRequest(tenant=tenant))
        fresh = admin_pb2.CreateTenantRequest(tenant=tenant)
        self._insist("CreateTenant", fresh, done=grpc.StatusCode.ALREADY_EXISTS)
        self._new_key(fault)
        self._insist("UpdateGroup", admin_pb2.UpdateGroupRequest(group=GROUP, add_tenants=[tenant]))

    def _new_key(self, fault: Fault) -> str:
        """Gives the tenant another key; the one before."""
        place = self._place(fault)
        new = self._insist("CreateKey", admin_pb2.CreateKeyRequest(tenant=self._tenants[place])).key
        old, self._keys[place] = self._keys[place], new
        self._node.secrets.add(new)
        return old

    def _tenant(self, fault: Fault) -> str:
        return self._tenants[self._place(fault)]

    def _place(self, fault: Fault) -> int:
        """Any tenant but the first, the node's own, whose key the probes use."""
        return 1 + fault.victim % (len(self._tenants) - 1)

    def _insist(self, method: str, request: Message, done: grpc.StatusCode | None = None) -> Any:
        """The answer of a call that the daemon must take in the end; None where it ends with `done`."""
        answers: list[Any] = []

        def attempt() -> bool:
            try:
                answers.append(self._node.admin.call(method, request))
            except grpc.RpcError as error:
                if error.code() is done:
                    answers.append(None)
            return bool(answers)

        poll(attempt, within=START_SECONDS, what=f"the cache manager takes {method}")
        return answers[0]
