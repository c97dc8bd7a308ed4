"""Blocks that held another tenant's keys and values are zero before the decoder computes into them."""

from __future__ import annotations

import numpy as np
import pytest

from cachemgr.ids import TenantId
from cachemgr.manager import CacheManager
from cachemgr.quotas import Quota
from common.errors import ResourceExhausted
from decoder.batch import StepBatch
from decoder.cache_api import Event, Report, Scrub
from decoder.cache_messages import Pending, event_of
from decoder.scrubbing import zero_blocks
from tessera.cache.v1 import cache_pb2
from tests.decoder.rig import BLOCK_TOKENS, Node, RecallModel, greedy_oracle, prompt_of, request

NUM_BLOCKS = 16


def two_tenants(manager: CacheManager, arena: np.ndarray) -> tuple[Node, Node]:
    """Two decoders' sessions on one pool, each for a tenant of its own; nothing poisons what is freed."""
    first, second = (
        Node(manager=manager, arena=arena, tenant=tenant, root=tenant.encode().ljust(32, b"."))
        for tenant in ("acme", "blau")
    )
    return first, second


def watch(node: Node) -> list[bool]:
    """For each block that a step of the node begins to write: whether it was zero then."""
    seen: list[bool] = []

    def look(batch: StepBatch) -> None:
        for index, table in enumerate(batch.block_tables):
            for row in range(batch.query_starts[index], batch.query_starts[index + 1]):
                block, slot = divmod(int(batch.positions[row]), BLOCK_TOKENS)
                if slot == 0:
                    seen.append(not node.arena[table[block]].any())

    node.model.on_forward = look
    return seen


@pytest.mark.parametrize("scrubs", [True, False])
def test_no_byte_of_another_tenant_is_left_when_a_block_is_begun(scrubs: bool) -> None:
    """Prompt and growth of one tenant begin zero blocks in a pool that another filled; the control: its bytes."""
    manager = CacheManager(num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, epoch=1)
    arena = np.zeros((NUM_BLOCKS + 1, *RecallModel().layout.block_shape), np.float32)
    first, second = two_tenants(manager, arena)
    for number in range(4):
        first.submit(request(number, prompt_of(4 * BLOCK_TOKENS, seed=number), max_tokens=1))
    first.finish(0, 1, 2, 3)
    assert manager.snapshot().cached_blocks == NUM_BLOCKS
    seen = watch(second)
    if not scrubs:
        second.client._post = lambda event, post=second.client._post: None if isinstance(event, Scrub) else post(event)
    prompt = prompt_of(3 * BLOCK_TOKENS, seed=9)
    second.submit(request(1, prompt, max_tokens=14))
    second.finish(1)
    assert second.sink.tokens[1, 0] == greedy_oracle(prompt, 14)
    assert len(seen) >= 6
    assert all(seen) is scrubs
    assert manager.snapshot().scrubbed_blocks >= 6


def test_one_tenant_alone_is_scrubbed_for_credit_only() -> None:
    """A tenant's own blocks need no zeroing when they come back with a prompt."""
    manager = CacheManager(num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, epoch=1)
    arena = np.zeros((NUM_BLOCKS + 1, *RecallModel().layout.block_shape), np.float32)
    node = Node(manager=manager, arena=arena)
    for number in range(12):
        node.submit(request(number, prompt_of(4 * BLOCK_TOKENS, seed=number), max_tokens=1))
        node.finish(number)
    assert manager.snapshot().evictions > 0
    assert manager.snapshot().scrubbed_blocks == 0


def test_growth_above_the_ceiling_ends_with_numbers() -> None:
    """A sequence that outgrows its tenant's ceiling ends with RESOURCE_EXHAUSTED and its numbers; others go on."""
    manager = CacheManager(num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, epoch=1)
    arena = np.zeros((NUM_BLOCKS + 1, *RecallModel().layout.block_shape), np.float32)
    first, second = two_tenants(manager, arena)
    manager.set_quota(TenantId("acme"), Quota(ceiling_blocks=3))
    prompt = prompt_of(2 * BLOCK_TOKENS)
    first.submit(request(1, prompt, max_tokens=20, no_store=True))
    second.submit(request(1, prompt, max_tokens=20))
    first.finish(1)
    second.finish(1)
    error = first.sink.failed[1]
    assert isinstance(error, ResourceExhausted)
    assert (error.reason, error.subject, error.needed, error.usable) == ("QUOTA_EXCEEDED", "tenant_blocks", 1, 0)
    assert first.sink.tokens[1, 0] == greedy_oracle(prompt, 20)[: len(first.sink.tokens[1, 0])]
    assert second.sink.tokens[1, 0] == greedy_oracle(prompt, 20)
    first.submit(request(2, prompt_of(4 * BLOCK_TOKENS, seed=2), max_tokens=1))
    first.finish(2)
    refused = first.sink.failed[2]
    assert isinstance(refused, ResourceExhausted) and (refused.needed, refused.usable) == (4, 3)
    assert error.retry_after_seconds is refused.retry_after_seconds is None, "nothing of the tenant ends"
    first.assert_quiet()


def test_of_streams_that_reach_the_ceiling_together_the_last_ends() -> None:
    """Two streams of a tenant that need their next block in the same step: the older one brings its whole answer."""
    manager = CacheManager(num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, epoch=1)
    arena = np.zeros((NUM_BLOCKS + 1, *RecallModel().layout.block_shape), np.float32)
    node, _ = two_tenants(manager, arena)
    manager.set_quota(TenantId("acme"), Quota(ceiling_blocks=5))
    prompts = [prompt_of(2 * BLOCK_TOKENS, seed=seed) for seed in (1, 2)]
    for number, prompt in enumerate(prompts):
        node.submit(request(number, prompt, max_tokens=2 * BLOCK_TOKENS))
    node.finish(0, 1)
    assert node.sink.tokens[0, 0] == greedy_oracle(prompts[0], 2 * BLOCK_TOKENS)
    error = node.sink.failed[1]
    assert isinstance(error, ResourceExhausted)
    assert (error.reason, error.needed, error.usable) == ("QUOTA_EXCEEDED", 1, 0)
    assert error.retry_after_seconds, "the end of the other makes room"
    node.assert_quiet()


def test_scrub_comes_before_what_it_is_about() -> None:
    """Of one answer, the blocks to zero are told first, whatever the answer is."""
    answers: list[tuple[cache_pb2.SessionResponse, Pending | None]] = [
        (cache_pb2.SessionResponse(report=cache_pb2.ReportResponse(), credit=b"\2\0\0\0"), Pending(Report)),
        (cache_pb2.SessionResponse(credit=b"\2\0\0\0"), None),
    ]
    for response, pending in answers:
        response.scrub = b"\2\0\0\0"
        events: list[Event] = event_of(response, pending)
        assert isinstance(events[0], Scrub) and events[0].blocks.tolist() == [2]
        assert len(events) > 1


def test_zeroing_touches_nothing_else() -> None:
    """Exactly the named blocks are zero afterwards."""
    arena = np.ones((4, 2, 2), np.float32)
    zero_blocks(arena, Scrub(np.array([1, 3], np.int32)))
    assert arena.any(axis=(1, 2)).tolist() == [True, False, True, False]
