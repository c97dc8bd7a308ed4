"""What the core tells the event log: each change of lease, block and session, once, with what it is about."""

from __future__ import annotations

import numpy as np
import pytest

from cachemgr.keys import ROOT_BYTES
from cachemgr.manager import CacheManager
from cachemgr.results import ScopeSpan, SequenceReport
from common.tokens import pack_tokens

ROOT = bytes(range(ROOT_BYTES))
NOTHING = np.zeros(0, np.int32)


class Node:
    """A manager with one session and a clock; `fresh` gives the events since the last look."""

    def __init__(self, num_blocks=8):
        self.manager = CacheManager(num_blocks=num_blocks, block_tokens=4, epoch=1)
        self.now = 100
        self.seen = 0
        self.session = self.manager.attach(decoder_name="d0", process_id=1, now_ns=self.now)

    def acquire(self, tokens, tenant="acme", **fields):
        self.now += 1
        return self.manager.acquire(
            self.session,
            tenant=tenant,
            root=ROOT,
            tokens=pack_tokens(tokens),
            request_id="secret-label",
            sample=0,
            now_ns=self.now,
            **fields,
        )

    def report(self, *sequences):
        self.now += 1
        return self.manager.report(
            self.session, sequences, returned=NOTHING, wanted=0, applied_revision=0, now_ns=self.now
        )

    def fill(self, tokens, **fields):
        lease = self.acquire(tokens, **fields).lease_id
        self.report(SequenceReport(lease, NOTHING, b"", len(tokens), True, True))

    def fresh(self):
        events = self.manager.events.since(self.seen)
        self.seen = self.manager.events.last_sequence
        return [event for _, event in events]

    def kinds(self):
        return [event.kind for event in self.fresh()]


@pytest.fixture
def node():
    made = Node()
    assert made.kinds() == ["session_attached"]
    return made


def test_life_of_a_lease(node):
    """Granted, published, ended: with session, lease, owner, time, and how much was cached."""
    lease = node.acquire(range(9))
    granted, *rest = node.fresh()
    assert not rest
    assert (granted.kind, granted.session, granted.lease, granted.now_ns) == (
        "lease_granted",
        node.session,
        lease.lease_id,
        node.now,
    )
    assert node.manager.owner_name(granted.owner) == "acme"
    assert dict(granted.detail) == {"num_tokens": 9, "cached_tokens": 0}
    node.report(SequenceReport(lease.lease_id, NOTHING, b"", 8, False, False))
    (published,) = node.fresh()
    assert published.kind == "blocks_published"
    assert published.blocks.tolist() == lease.blocks[:2].tolist()
    node.report(SequenceReport(lease.lease_id, NOTHING, b"", 9, False, True))
    assert node.kinds() == ["blocks_published", "lease_ended"]  # the tail
    node.acquire(range(9))
    (granted,) = node.fresh()
    assert granted.detail["cached_tokens"] == 8


def test_nothing_that_a_caller_chose_is_in_an_event(node):
    """Request ids and tokens are in none of them."""
    node.fill(range(70, 79))
    shown = repr(node.fresh())
    assert "secret-label" not in shown
    assert "lease_granted" in shown  # positive control


def test_evictions_name_their_blocks_owners_and_cause(node):
    """Blocks that make room, by an operator, and by a purge: each says so, once for each owner."""
    node.fill(range(8))
    node.fill(range(100, 108), tenant="blue")
    node.fresh()
    node.acquire(range(200, 232), tenant="cyan")
    evicted = [event for event in node.fresh() if event.kind == "blocks_evicted"]
    shown = sorted((node.manager.owner_name(event.owner), len(event.blocks)) for event in evicted)
    assert {event.detail["cause"] for event in evicted} == {"room"}
    assert [name for name, _ in shown] == ["acme", "blue"]
    assert sum(count for _, count in shown) == 4
    usage = {view.tenant: view.evictions for view in node.manager.snapshot().tenants}
    assert usage == {"acme": 2, "blue": 2, "cyan": 0}
    assert node.manager.snapshot().evictions == 4


@pytest.mark.parametrize(("call", "cause"), [("evict", "operator"), ("purge", "purged")])
def test_operators_evictions_have_their_cause(node, call, cause):
    """What an operator drops is told apart from what had to make room."""
    node.fill(range(8))
    node.fresh()
    if call == "evict":
        node.manager.evict(everything=True)
    else:
        node.manager.purge("acme")
    (evicted,) = node.fresh()
    assert (evicted.kind, evicted.detail["cause"], len(evicted.blocks)) == ("blocks_evicted", cause, 2)


def test_tail_that_something_longer_covers_is_told(node):
    """A subscriber that mirrors the index hears of every block that leaves it."""
    node.fill(range(6))
    node.fill(range(8))
    listed = set()
    for event in node.fresh():
        if event.kind == "blocks_published":
            listed |= set(event.blocks.tolist())
        if event.kind == "blocks_evicted":
            assert event.detail["cause"] == "superseded"
            listed -= set(event.blocks.tolist())
    shown = {block for view in node.manager.list_prefixes().items for block in view.blocks}
    assert listed == shown


def test_end_of_a_session_whose_process_may_live(node):
    """Leases end, blocks are quarantined, and later released."""
    lease = node.acquire(range(8))
    node.fresh()
    node.manager.detach(node.session, process_dead=False, now_ns=200)
    ended, quarantined, over = node.fresh()
    assert [ended.kind, quarantined.kind, over.kind] == ["lease_ended", "blocks_quarantined", "session_ended"]
    assert sorted(quarantined.blocks.tolist()) == sorted(lease.blocks.tolist())
    node.manager.process_gone(node.session)
    assert node.kinds() == ["quarantine_released"]


def test_mirror_of_the_index_is_the_index():
    """Whoever follows the log knows at each moment which blocks are listed: over many prompts in a small pool."""
    node, listed = Node(num_blocks=12), set()
    random = np.random.default_rng(5)
    for _ in range(200):
        length = int(random.integers(1, 20))
        node.fill(random.integers(0, 3, length), tenant=["acme", "blue"][int(random.integers(2))])
        for event in node.fresh():
            blocks = set(event.blocks.tolist())
            if event.kind == "blocks_published":
                assert not blocks & listed
                listed |= blocks
            elif event.kind == "blocks_evicted":
                assert blocks <= listed
                listed -= blocks
        pages = node.manager.list_prefixes(limit=1000)
        assert listed == {block for view in pages.items for block in view.blocks}


def test_published_blocks_are_told_while_they_are_what_they_were(node):
    """Name and tokens of an event's blocks are right, also after nodes were cut, and gone once the blocks are."""
    node.fill(range(8))
    (event,) = [item for item in node.fresh() if item.kind == "blocks_published"]
    told = node.manager.published_blocks(event)
    assert told.tokens == pack_tokens(range(8))
    assert told.name == node.manager.list_prefixes().items[0].name
    node.fill([0, 1, 2, 3, 9, 9, 9, 9])  # cuts the node
    assert node.manager.published_blocks(event) == told
    node.manager.evict(everything=True)
    assert node.manager.published_blocks(event) is None
    node.fill(range(50, 58))
    node.fill(range(60, 84))  # the same block numbers hold something else now
    assert node.manager.published_blocks(event) is None


def test_name_in_the_middle_of_a_node_is_that_of_its_blocks(node):
    """Blocks that were appended to a node later do not change the name of those before."""
    lease = node.acquire(range(12)).lease_id
    node.report(SequenceReport(lease, NOTHING, b"", 8, False, False))
    first = next(item for item in node.fresh() if item.kind == "blocks_published")
    before = node.manager.published_blocks(first)
    node.report(SequenceReport(lease, NOTHING, b"", 12, False, False))
    assert node.manager.published_blocks(first) == before
    second = next(item for item in node.fresh() if item.kind == "blocks_published")
    assert node.manager.published_blocks(second).tokens == pack_tokens(range(8, 12))
    assert node.manager.published_blocks(second).name != before.name


def test_blocks_of_a_wider_scope_are_told_apart_from_the_private_ones(node):
    """Each run is its owner's: the scope's blocks are published as the scope's, what hangs below as the tenant's."""
    node.fill(range(16), prefix=ScopeSpan("@public", bytes(ROOT_BYTES), 8))
    published = [event for event in node.fresh() if event.kind == "blocks_published"]
    told = {node.manager.owner_name(event.owner): node.manager.published_blocks(event) for event in published}
    assert {name: blocks.tokens for name, blocks in told.items()} == {
        "@public": pack_tokens(range(8)),
        "acme": pack_tokens(range(8, 16)),
    }
    names = {view.tenant: view.name for view in node.manager.list_prefixes().items}
    assert {name: blocks.name for name, blocks in told.items()} == names
    node.manager.purge("@public")
    evicted = [event for event in node.fresh() if event.kind == "blocks_evicted"]
    owners = {node.manager.owner_name(event.owner): len(event.blocks) for event in evicted}
    assert owners == {"@public": 2, "acme": 2}


def test_purged_owner_leaves_no_tokens_in_memory(node):
    """What was remembered of its prompts, to explain and to replay, goes with its blocks; others' stays."""
    for tenant, first in (("acme", 0), ("blue", 100)):
        node.fill(range(first, first + 8), tenant=tenant)
    node.manager.evict(num_blocks=4)
    ghosts, state = node.manager._state.index.forest.ghosts, node.manager._state
    acme, blue = state.known_owner("acme"), state.known_owner("blue")
    assert ghosts.of(acme, ROOT) and ghosts.of(blue, ROOT)
    assert [item.owner for item in node.manager.recent.copy()] == [acme, blue]
    node.manager.purge("acme")
    assert not ghosts.of(acme, ROOT) and ghosts.of(blue, ROOT)
    assert [item.owner for item in node.manager.recent.copy()] == [blue]
    node.fill(range(200, 208), tenant="blue")
    node.manager.evict(num_blocks=2)
    assert len(ghosts.of(blue, ROOT)) == 2  # and new ones are still noted
