"""Floors, ceilings, pins, priorities and times to live of tenants, with real processes: a flood by one leaves another's
floor whole, over-quota is an answer with numbers, and nothing of one tenant's is left in a block that another gets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tessera.admin.v1 import admin_pb2
from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import patience, poll
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node

B = 16
_NUMBERS = itertools.count(1)


class Tenant:
    """One tenant of a node, with a key."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.name = f"quota-{next(_NUMBERS)}"
        self.key = node.new_tenant(self.name)

    def set(self, **quota: float) -> None:
        """Change its quota."""
        self.node.admin.call("UpdateTenant", admin_pb2.UpdateTenantRequest(tenant=self.name, **quota))

    def serve(self, tokens: Sequence[int], new: int = 1, **cache: float) -> int:
        """Run a prompt; returns how many of its tokens were cached."""
        request = make_request(tokens, new=new)
        request.cache.MergeFrom(pb.Cache(**cache))
        return self.node.generate(request, key=self.key).cached_tokens

    @property
    def used(self) -> int:
        """Blocks that are charged to it."""
        rows = self.node.admin.snapshot().tenants
        return next((int(row.used_blocks) for row in rows if row.tenant == self.name), 0)


@pytest.fixture
def tenants(node: Node) -> Iterator[tuple[Tenant, Tenant]]:
    """Two tenants of the shared node; they are deleted afterwards, so that no floor outlives its test."""
    pair = (Tenant(node), Tenant(node))
    yield pair
    for tenant in pair:
        node.admin.call("DeleteTenant", admin_pb2.DeleteTenantRequest(tenant=tenant.name))


def numbers_of(error: grpc.RpcError) -> dict[str, str]:
    """The reason and the numbers of a refusal."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return {"reason": info.reason, **info.metadata}
    raise AssertionError("the refusal has no details")


@pytest.mark.parametrize("floor", [14, 0])
def test_a_flood_leaves_the_floor_of_another_whole(
    node: Node, prompts: Prompts, tenants: tuple[Tenant, Tenant], floor: int
) -> None:
    """With a floor every prompt is still a hit after a flood of ten pools; the control, without, has lost some."""
    calm, flood = tenants
    calm.set(floor_blocks=floor)
    flood.set(weight=1000.0)
    kept = [prompts.tokens(4 * B) for _ in range(3)]
    for tokens in kept:
        calm.serve(tokens)
    for _ in range(8):
        requests = [make_request(prompts.tokens(8 * B - 4), new=4) for _ in range(5)]
        node.together(requests, keys=[flood.key] * 5)
    used = calm.used
    cached = [calm.serve(tokens) for tokens in kept]
    if floor:
        assert (used, cached) == (12, [4 * B - 1] * 3)
    else:
        assert used < 12
        assert cached != [4 * B - 1] * 3


def test_a_ceiling_refuses_with_numbers_and_harms_nobody_else(
    node: Node, solo: Solo, prompts: Prompts, tenants: tuple[Tenant, Tenant]
) -> None:
    """A prompt above the ceiling is refused with what it needs; of several at once each ends well or is refused."""
    small, other = tenants
    small.set(ceiling_blocks=6)
    with pytest.raises(grpc.RpcError) as caught:
        small.serve(prompts.tokens(8 * B))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    expected = {"reason": "QUOTA_EXCEEDED", "subject": "tenant_blocks", "needed": "8", "usable": "6"}
    assert expected.items() <= numbers_of(caught.value).items()
    # The first three fit, and need their next block in the same step: never do all of them end.
    requests = [make_request(prompts.tokens(B + 3 + i // 3), new=24) for i in range(6)]
    running = [node.background(request, key=small.key) for request in requests]
    beside = make_request(prompts.tokens(3 * B), new=40)
    solo.check(beside, node.generate(beside, key=other.key))
    served = 0
    for request, call in zip(requests, running, strict=True):
        try:
            result = call.result()
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
            assert numbers_of(error)["reason"] == "QUOTA_EXCEEDED"
        else:
            solo.check(request, result)
            served += 1
    assert served
    assert small.used <= 6
    node.quiet()


def test_growth_above_a_ceiling_ends_that_stream_with_numbers(
    node: Node, solo: Solo, prompts: Prompts, tenants: tuple[Tenant, Tenant]
) -> None:
    """What a stream brought before it outgrew its tenant's ceiling is right; its end says why; another goes on."""
    small, other = tenants
    small.set(ceiling_blocks=4)
    tokens = prompts.tokens(2 * B)
    stream = node.stream(make_request(tokens, new=200), key=small.key)
    beside = node.background(make_request(tokens, new=100), key=other.key)
    with pytest.raises(grpc.RpcError) as caught:
        stream.finish()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert numbers_of(caught.value)["needed"] == "1"
    brought = stream.samples[0].token_ids
    assert B < len(brought) < 4 * B
    alone = solo(make_request(tokens, new=200)).token_ids
    assert brought == alone[: len(brought)]
    assert beside.result().token_ids == alone[:100]
    assert small.serve(tokens) == 2 * B - 1
    node.quiet()


@pytest.mark.parametrize("length", [2 * B, 30 * B])
@pytest.mark.parametrize("how", ["floor", "pin", "none"])
def test_what_others_floors_and_pins_keep_stops_nobody(
    node: Node, solo: Solo, prompts: Prompts, tenants: tuple[Tenant, Tenant], how: str, length: int
) -> None:
    """A stream that outgrows what is left, or a prompt that is larger at once, ends with numbers within seconds; the
    small requests of both tenants behind it are served. Without floor and pin the same request is served whole."""
    calm, big = tenants
    calm.set(floor_blocks=5 * (how == "floor"), pin_blocks=5)
    kept = prompts.tokens(5 * B)
    calm.serve(kept)
    node.quiet()  # its last block is published when its lease has ended
    if how == "pin":
        pin = node.admin.call("PinPrefix", admin_pb2.PinPrefixRequest(tenant=calm.name, token_ids=kept))
        assert pin.pinned_blocks == 5
    request = make_request(prompts.tokens(length), new=31 * B - length)
    begun = time.monotonic()
    running = node.background(request, key=big.key)
    small = [make_request(prompts.tokens(B), new=4) for _ in range(4)]
    beside = [node.background(item, key=(calm, big)[place % 2].key) for place, item in enumerate(small)]
    if how == "none":
        solo.check(request, running.result())
    else:
        with pytest.raises(grpc.RpcError) as caught:
            running.result()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        needed = str(max(28, length // B))
        expected = {"reason": "EXCEEDS_USABLE", "subject": "blocks", "needed": needed, "usable": "27"}
        assert expected.items() <= numbers_of(caught.value).items()
        assert time.monotonic() - begun < patience(20)
    for item, call in zip(small, beside, strict=True):
        solo.check(item, call.result())
    if how == "floor":
        assert calm.used >= 5
    if how == "pin":
        assert calm.serve(kept) == 5 * B - 1
        node.admin.call("UnpinPrefix", admin_pb2.UnpinPrefixRequest(pin=pin.pin))
    node.quiet()


def test_a_time_to_live_and_a_priority_of_a_request_count(
    node: Node, prompts: Prompts, tenants: tuple[Tenant, Tenant]
) -> None:
    """What shall live for half a second is gone by itself soon; what has priority 0 goes before what is older."""
    tenant, _ = tenants
    short, old, cheap = (prompts.tokens(4 * B) for _ in range(3))
    tenant.serve(old)
    tenant.serve(short, ttl_seconds=0.5)
    assert tenant.used >= 8
    poll(lambda: tenant.used <= 4, within=20, what="the short-lived prompt has expired")
    assert tenant.serve(old) == 4 * B - 1
    tenant.serve(cheap, priority=0)
    node.quiet()  # else the lease may hold them still
    node.admin.call("EvictBlocks", admin_pb2.EvictBlocksRequest(tenant=tenant.name, num_blocks=4))
    assert tenant.serve(old) == 4 * B - 1
    assert tenant.serve(cheap) == 0


def test_a_pin_survives_a_flood_of_its_own_tenant(node: Node, prompts: Prompts, tenants: tuple[Tenant, Tenant]) -> None:
    """A pinned prompt is a hit after ten pools of others; beyond the budget a pin is refused with numbers."""
    tenant, _ = tenants
    tenant.set(pin_blocks=4)
    kept, larger = prompts.tokens(4 * B), prompts.tokens(6 * B)
    tenant.serve(kept)
    pin = node.admin.call("PinPrefix", admin_pb2.PinPrefixRequest(tenant=tenant.name, token_ids=kept))
    assert (pin.pinned_tokens, pin.pinned_blocks) == (4 * B, 4)
    for _ in range(20):
        tenant.serve(prompts.tokens(16 * B))
    assert tenant.serve(kept) == 4 * B - 1
    tenant.serve(larger)
    with pytest.raises(grpc.RpcError) as caught:
        node.admin.call("PinPrefix", admin_pb2.PinPrefixRequest(tenant=tenant.name, token_ids=larger))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert numbers_of(caught.value)["usable"] == "4"
    node.admin.call("UnpinPrefix", admin_pb2.UnpinPrefixRequest(pin=pin.pin))
    node.quiet()


def test_blocks_that_cross_tenants_are_counted_as_scrubbed(
    node: Node, solo: Solo, prompts: Prompts, tenants: tuple[Tenant, Tenant]
) -> None:
    """A tenant that takes over the other's whole pool has every block zeroed first, and its replies are as alone."""
    first, second = tenants
    for _ in range(4):
        first.serve(prompts.tokens(8 * B))
    before = node.admin.snapshot().scrubbed_blocks
    requests = [make_request(prompts.tokens(8 * B - 4), new=4) for _ in range(4)]
    for request in requests:
        solo.check(request, node.generate(request, key=second.key))
    assert node.admin.snapshot().scrubbed_blocks - before >= 16
