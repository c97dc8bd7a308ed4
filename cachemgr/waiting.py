"""Sharing while computing: which leases compute a prefix that others may want, and who waits for them.

Invariants: a producer is a live lease that may still publish whole blocks of the prompt it was made for; it is found
only through the tree that it publishes into, so that nobody waits for what another tenant computes privately; each wait
becomes ready once: when all it waits for is published, or its producer ends, is rolled back or may publish no more.
Called by the manager's modules. It holds no block, and asks no clock: how long to wait is the decoder's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cachemgr.ids import LeaseId, SessionId
from cachemgr.leases import Lease
from cachemgr.nodes import Tree, common_tokens
from common.layout import TOKEN_BYTES

MAX_WAITS: Final = 1024  # for one producer; who comes later computes

_Key = tuple[Tree, bytes]
_Waiter = tuple[SessionId, str, int]  # session, request, sample: one that asks again waits once


@dataclass(slots=True, eq=False)
class _Producer:
    """keys: where it is found; until: the block of its prompt behind the last whole one; waits: (wait id, blocks)."""

    lease: Lease
    keys: list[_Key]
    until: int
    waits: dict[_Waiter, tuple[int, int]] = field(default_factory=dict)


class Waits:
    """Producers, where they are `found` (by tree and first block), and their waits."""

    def __init__(self, block_tokens: int) -> None:
        self.producers: dict[LeaseId, _Producer] = {}
        self._block_tokens = block_tokens
        self._block_bytes = block_tokens * TOKEN_BYTES
        self.found: dict[_Key, dict[LeaseId, _Producer]] = {}
        self._ready: list[tuple[SessionId, int]] = []
        self._last_wait = 0

    def enter(self, lease: Lease) -> None:
        """A lease that begins, or whose session came back: a producer if it is to compute at least one block of its
        prompt for others."""
        if not lease.store or lease.num_tokens - max(lease.granted, lease.sealed) < self._block_tokens:
            return
        if lease.lease_id in self.producers:
            return
        until, size = lease.num_tokens // self._block_tokens, self._block_bytes
        keys: list[_Key] = []
        if lease.prefix_tree is not None and lease.num_published < lease.prefix_blocks:
            keys.append((lease.prefix_tree, bytes(lease.tokens[:size])))
        start = lease.prefix_blocks
        if until > start:
            keys.append((lease.tree, bytes(lease.tokens[start * size : (start + 1) * size])))
        producer = self.producers[lease.lease_id] = _Producer(lease, keys, until)
        for key in keys:
            self.found.setdefault(key, {})[lease.lease_id] = producer

    def leave(self, lease: Lease) -> None:
        """A lease computes nothing for others any more: its waits are over."""
        producer = self.producers.pop(lease.lease_id, None)
        if producer is None:
            return
        for key in producer.keys:
            bucket = self.found[key]
            del bucket[lease.lease_id]
            if not bucket:
                del self.found[key]
        self._ready += [(waiter[0], wait) for waiter, (wait, _) in producer.waits.items()]

    def progressed(self, lease: Lease) -> None:
        """A lease has published more blocks."""
        producer = self.producers.get(lease.lease_id)
        if producer is None:
            return
        if lease.num_published >= producer.until:
            self.leave(lease)
            return
        over = [waiter for waiter, (_, blocks) in producer.waits.items() if blocks <= lease.num_published]
        self._ready += [(waiter[0], producer.waits.pop(waiter)[0]) for waiter in over]

    def find(self, tree: Tree | None, tokens: bytes, start: int, resident: int, limit: int) -> tuple[Lease, int] | None:
        """The producer of `tree` that has most blocks in common with `tokens`, and how many, if that is more than the
        `resident` ones. `start` is where the tree begins; at most `limit` blocks count."""
        if tree is None or limit <= resident:
            return None
        size = self._block_bytes
        bucket = self.found.get((tree, tokens[start * size : (start + 1) * size]))
        if bucket is None:
            return None
        best, most = None, resident
        for producer in bucket.values():
            lease = producer.lease
            end = min(limit, producer.until, lease.prefix_blocks if tree is lease.prefix_tree else limit)
            if end <= most:
                continue
            record, place = lease.tokens, most * size
            if record[place : place + size] != tokens[place : place + size]:
                continue  # no longer than the best so far; one compare of a block instead of one of all
            common = min(end, common_tokens(bytes(record[: end * size]), tokens) // self._block_tokens)
            if common > max(most, lease.num_published):  # what it has published may be gone again (`gaps.py`)
                best, most = lease, common
        return None if best is None else (best, most)

    def wait(self, producer: Lease, blocks: int, waiter: _Waiter) -> int:
        """A new wait until `blocks` blocks of a producer are published; its id, or 0 where too many wait already."""
        waits = self.producers[producer.lease_id].waits
        if len(waits) >= MAX_WAITS and waiter not in waits:
            return 0
        self._last_wait += 1
        waits[waiter] = (self._last_wait, blocks)
        return self._last_wait

    def take_ready(self) -> list[tuple[SessionId, int]]:
        """The waits that became ready since the last call."""
        ready, self._ready = self._ready, []
        return ready

    def session_left(self, session: SessionId) -> None:
        """A session is over or away: its leases produce nothing for now, and what it waits for is nobody's business."""
        for producer in list(self.producers.values()):
            if producer.lease.session_id == session:
                self.leave(producer.lease)
            else:
                for waiter in [waiter for waiter in producer.waits if waiter[0] == session]:
                    del producer.waits[waiter]
        self._ready = [item for item in self._ready if item[0] != session]
