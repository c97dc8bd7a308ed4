"""The moments of the kill matrix: load that brings a node into one, and how Admin shows that it has come.

Used by `test_kill_matrix.py`, on a pool of `POOL_BLOCKS` and chunks of two blocks. A moment is reached when `reached`
says so of the counters; what strikes then strikes within a few milliseconds of it, after a seeded delay. `evicts` marks
those that push what was warm out of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tessera.admin.v1 import admin_pb2
from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import make_request
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node

B = 16
POOL_BLOCKS = 48
Counters = admin_pb2.GetSnapshotResponse


@dataclass(frozen=True)
class Moment:
    """`load` makes the requests; `reached` compares the counters now with those from before the load."""

    name: str
    load: Callable[[Prompts, list[int]], list[pb.GenerateRequest]]
    reached: Callable[[Node, Counters, Counters], bool]
    evicts: bool = False


def _one(new: int = 40) -> Callable[[Prompts, list[int]], list[pb.GenerateRequest]]:
    return lambda prompts, _warm: [make_request(prompts.tokens(2 * B), new=new)]


def _within_a_prompt(node: Node, _before: Counters, _now: Counters) -> bool:
    return any(B <= lease.sealed_tokens < 22 * B for lease in node.admin.leases())


def _copies(prompts: Prompts, warm: list[int]) -> list[pb.GenerateRequest]:
    hits = [make_request([*warm, *prompts.tokens(3 + i)], new=20) for i in range(3)]
    return [*hits, make_request([*warm, *prompts.tokens(7)], new=20, n=3, temperature=1.0, seed=3)]


def _big(num: int, blocks: int, new: int) -> Callable[[Prompts, list[int]], list[pb.GenerateRequest]]:
    return lambda prompts, _warm: [make_request(prompts.tokens(blocks * B - i), new=new) for i in range(num)]


MOMENTS = [
    Moment("idle", lambda _prompts, _warm: [], lambda _node, _before, _now: True),
    Moment("queued", _big(2, 30, 24), lambda _node, _before, now: now.queued_requests > 0, evicts=True),
    Moment("prefill", _big(1, 24, 8), _within_a_prompt),
    Moment("first token", _one(), lambda _node, before, now: now.generated_tokens > before.generated_tokens),
    Moment("decode", _one(), lambda _node, before, now: now.generated_tokens > before.generated_tokens + 5),
    Moment("copy", _copies, lambda _node, before, now: now.cow_copies > before.cow_copies),
    Moment("seal", _one(3 * B), lambda _node, before, now: now.indexed_blocks > before.indexed_blocks + 2),
    Moment("evict", _big(4, 20, 8), lambda _node, before, now: now.evictions > before.evictions, evicts=True),
]
