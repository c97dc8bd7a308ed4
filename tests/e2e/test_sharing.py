"""Scopes and sharing while computing, through the public RPCs: one prefix for many tenants, computed by one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from common.tokens import pack_tokens
from gateway.router import Candidate, affinity, choose_decoder
from tessera.admin.v1 import admin_pb2
from tessera.common.v1 import common_pb2
from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import poll
from tests.e2e.prompts import Prompts
from tests.e2e.rig import START_SECONDS, Node

B = 16
LONG = 30 * B


@pytest.fixture(scope="module")
def shared_pair(tiny_model: Path) -> Iterator[Node]:
    """Two decoders that prefill a block in a slow step, on a pool of 192 blocks."""
    options = ["--threads", "1", "--max-batch", "4", "--chunk-tokens", str(B)]
    with Node(tiny_model, pool_blocks=192, decoders=2, options=options, faults=["step_delay=0.03"]) as node:
        node.await_decoders()
        yield node


@pytest.fixture
def pair(shared_pair: Node) -> Iterator[Node]:
    """The two decoders, quiet and empty before the test and quiet after it."""
    shared_pair.fresh()
    yield shared_pair
    shared_pair.quiet()


def scoped(
    prompt: Sequence[int], scope: common_pb2.Scope, *, name: str = "", count: int = 0, new: int = 6
) -> pb.GenerateRequest:
    """A request whose first tokens lie in a scope."""
    request = make_request(prompt, new=new)
    request.cache.scope = scope
    request.cache.scope_name = name
    request.cache.public_tokens = count
    return request


def waits(node: Node) -> int:
    """Waits for a prefix so far."""
    return int(node.admin.snapshot().waits)


def sealed(node: Node) -> int:
    """Most tokens that a running sequence has sealed."""
    return max((lease.sealed_tokens for lease in node.admin.leases()), default=0)


def tenants_on(node: Node, prompt: Sequence[int], name: str) -> list[str]:
    """Keys of two new tenants whose requests with this prompt go to the first and to the second decoder."""
    both = [Candidate(index, 0, 4) for index in range(2)]
    chosen: dict[int, str] = {}
    number = 0
    while len(chosen) < 2:
        tenant = f"{name}-{number}"
        chosen.setdefault(choose_decoder(affinity(pack_tokens(prompt), B, tenant), both).index, tenant)
        number += 1
    return [node.new_tenant(chosen[index]) for index in range(2)]


def test_two_requests_at_once_compute_their_prompt_once(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """The second waits for the first and reads all of it; both are equal solo, and Admin shows one wait and one hit."""
    request = make_request(prompts.tokens(LONG), new=6)
    before = pair.admin.snapshot()
    first, second = pair.together([request, request])
    solo.check(request, first)
    solo.check(request, second)
    now = pair.quiet()
    assert sorted((first.cached_tokens, second.cached_tokens)) == [0, LONG - 1]
    assert now.hit_tokens - before.hit_tokens == LONG - 1
    assert (now.hits - before.hits, now.misses - before.misses) == (1, 1)
    assert now.waits - before.waits == 1


def test_if_the_first_is_cancelled_midway_the_second_computes_the_rest(
    pair: Node, solo: Solo, prompts: Prompts
) -> None:
    """What the first has sealed serves the second, which goes on at once."""
    request = make_request(prompts.tokens(LONG), new=6)
    before = waits(pair)
    first = pair.stream(request)
    poll(lambda: sealed(pair) >= 4 * B, within=20, what="the first has computed a part")
    second = pair.background(request)
    poll(lambda: waits(pair) > before, within=20, what="the second waits")
    first.cancel()
    result = second.result()
    solo.check(request, result)
    assert 4 * B <= result.cached_tokens < LONG - 1


def test_tenants_share_an_approved_prefix_and_nothing_else(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """Before its approval the prefix is refused. Then two decoders serve it to two tenants at once, computed once."""
    system, tail = prompts.tokens(6 * B), prompts.tokens(2 * B)
    request = scoped([*system, *tail], common_pb2.SCOPE_PUBLIC, count=len(system))
    keys = tenants_on(pair, request.token_ids.ids, "public")
    with pytest.raises(grpc.RpcError) as caught:
        pair.generate(request, key=keys[0])
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    solo.probe(pair)
    pair.admin.call("ApprovePrefix", admin_pb2.ApprovePrefixRequest(name="system", token_ids=system))
    pair.quiet()
    before = waits(pair)
    results = pair.together([request, request], keys)
    for result in results:
        solo.check(request, result)
    assert sorted(result.cached_tokens for result in results) == [0, len(system)]
    assert waits(pair) == before + 1
    for key in keys:  # each has its own tail by now
        again = pair.generate(request, key=key)
        solo.check(request, again)
        assert again.cached_tokens == len(system) + len(tail) - 1
    private = make_request([*system, *tail], new=6)
    assert pair.generate(private, key=keys[0]).cached_tokens == 0


def test_the_public_scope_without_a_number_serves_what_is_not_approved_privately(
    pair: Node, solo: Solo, prompts: Prompts
) -> None:
    """No error, no token shared with another tenant, and found again by its own (docs/api.md). Once its beginning
    is approved, the same request shares it."""
    system, tail = prompts.tokens(4 * B), prompts.tokens(2 * B)
    request = scoped([*system, *tail], common_pb2.SCOPE_PUBLIC, count=0)
    keys = tenants_on(pair, request.token_ids.ids, "unapproved")
    for key, expected in ((keys[0], 0), (keys[1], 0), (keys[0], len(system) + len(tail) - 1)):
        result = pair.generate(request, key=key)
        solo.check(request, result)
        assert result.cached_tokens == expected
    pair.admin.call("ApprovePrefix", admin_pb2.ApprovePrefixRequest(name="later", token_ids=system))
    assert [pair.generate(request, key=key).cached_tokens for key in keys] == [0, len(system)]


def test_a_group_is_shared_by_its_members(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """Members hit what a member computed; a tenant that is none is refused as if there were no such group."""
    prompt = prompts.tokens(5 * B + 3)
    request = scoped(prompt, common_pb2.SCOPE_GROUP, name="team")
    keys = [pair.new_tenant(f"group-{number}") for number in range(3)]
    pair.admin.call("CreateGroup", admin_pb2.CreateGroupRequest(group="team", tenants=["group-0", "group-1"]))
    first, second = (pair.generate(request, key=key) for key in keys[:2])
    solo.check(request, first)
    solo.check(request, second)
    assert (first.cached_tokens, second.cached_tokens) == (0, 5 * B)
    refusals = []
    for name in ("team", "nobody"):
        with pytest.raises(grpc.RpcError) as caught:
            pair.generate(scoped(prompt, common_pb2.SCOPE_GROUP, name=name), key=keys[2])
        refusals.append((caught.value.code(), caught.value.details()))
    assert refusals[0] == refusals[1]
    assert refusals[0][0] is grpc.StatusCode.PERMISSION_DENIED


def test_if_the_decoder_that_computes_is_killed_the_other_computes(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """kill -9 in the middle of a shared prefix: the tenant that waits on the other decoder is served, equal solo."""
    system = prompts.tokens(LONG)
    pair.admin.call("ApprovePrefix", admin_pb2.ApprovePrefixRequest(name="long", token_ids=system))
    request = scoped([*system, 5, 6, 7], common_pb2.SCOPE_PUBLIC)
    keys = tenants_on(pair, request.token_ids.ids, "killed")
    victim = pair.processes["decoder-0"]
    lost = pair.background(request, key=keys[0])
    poll(lambda: sealed(pair) >= 4 * B, within=20, what="the first decoder has computed a part")
    before = waits(pair)
    kept = pair.background(request, key=keys[1])
    poll(lambda: waits(pair) > before, within=20, what="the second one waits")
    victim.kill()
    result = kept.result()
    solo.check(request, result)
    assert 4 * B <= result.cached_tokens < LONG
    with pytest.raises(grpc.RpcError):
        lost.result()
    victim.start()
    poll(lambda: len(pair.admin.sessions()) == 2, within=START_SECONDS, what="the new decoder is attached")
