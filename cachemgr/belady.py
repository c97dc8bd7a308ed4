"""The best hit rate that any eviction could have had: Belady's rule over recorded admissions, beside LRU and no limit.

An admission is the chain of its block names. A name stands for a block and all before it, so a chain always brings its
own beginning. A hit is a leading block that is resident. While a chain is admitted all its blocks are; what the pool
cannot hold at all is left out of every figure. Pure; called by the admin service and `bench/replay.py`.

Belady's rule (L. A. Belady, 1966): drop what is used again last. A block is never used again before those in front of
it, so with ties broken by depth the rule drops leaves first by itself: the bound is one that an index of prefixes could
reach, block by block, if it knew the future. It counts whole blocks, and no holds beyond one admission.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

_NEVER = 1 << 62


class HitRates(NamedTuple):
    """Leading blocks found over blocks asked for, 0..1; all 0 where nothing could be admitted.

    hit:      least recently used, leaves first, in `num_blocks`
    best:     Belady's rule in `num_blocks`
    infinite: nothing is ever dropped
    """

    hit: float
    best: float
    infinite: float


def best_hit_rate(admissions: Sequence[Sequence[Hashable]], num_blocks: int) -> HitRates:
    """Replays chains of block names through a pool of `num_blocks`. Costs some microseconds a block.

    Raises ValueError where `num_blocks` is below 1 or a chain names a block twice.
    """
    if num_blocks < 1:
        raise ValueError(f"num_blocks is {num_blocks}; allowed is 1 and more")
    chains = _numbered([chain for chain in admissions if len(chain) <= num_blocks])
    total = sum(map(len, chains))
    if not total:
        return HitRates(0.0, 0.0, 0.0)
    return HitRates(
        _recent_hits(chains, num_blocks) / total, _best_hits(chains, num_blocks) / total, _all_hits(chains) / total
    )


def _numbered(admissions: Sequence[Sequence[Hashable]]) -> list[list[int]]:
    """Names become small numbers in the order of first sight, so that a block's number is above its predecessors'."""
    numbers: dict[Hashable, int] = {}
    chains = []
    for admission in admissions:
        chain = [numbers.setdefault(name, len(numbers)) for name in admission]
        if len(set(chain)) != len(chain):
            raise ValueError("an admission names a block twice")
        chains.append(chain)
    return chains


def _leading(chain: list[int], resident: Container[int]) -> int:
    """How many leading blocks of a chain are resident."""
    found = 0
    for block in chain:
        if block not in resident:
            break
        found += 1
    return found


def _all_hits(chains: list[list[int]]) -> int:
    seen: set[int] = set()
    hits = 0
    for chain in chains:
        hits += _leading(chain, seen)
        seen.update(chain)
    return hits


def _recent_hits(chains: list[list[int]], num_blocks: int) -> int:
    # Used from the last block to the first, a chain's end is always older than its beginning.
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for chain in chains:
        hits += _leading(chain, resident)
        for block in reversed(chain):
            resident[block] = None
            resident.move_to_end(block)
        while len(resident) > num_blocks:
            resident.popitem(last=False)
    return hits


def _best_hits(chains: list[list[int]], num_blocks: int) -> int:
    following = _next_uses(chains)
    resident: dict[int, int] = {}  # block -> the admission that uses it next
    heap: list[tuple[int, int]] = []  # (-next use, -number), also stale ones
    hits = 0
    for number, chain in enumerate(chains):
        hits += _leading(chain, resident)
        for block, then in zip(chain, following[number], strict=True):
            resident[block] = then
            heappush(heap, (-then, -block))
        own = set(chain)
        aside = []
        while len(resident) > num_blocks:
            entry = heappop(heap)
            block = -entry[1]
            if resident.get(block) != -entry[0]:
                continue
            if block in own:
                aside.append(entry)
                continue
            del resident[block]
        for entry in aside:
            heappush(heap, entry)
        if len(heap) > 4 * len(resident) + 1024:
            heap = [(-then, -block) for block, then in resident.items()]
            heapify(heap)
    return hits


def _next_uses(chains: list[list[int]]) -> list[list[int]]:
    """For each block of each admission, the number of the next admission that uses it."""
    upcoming: dict[int, int] = {}
    following: list[list[int]] = []
    for number in range(len(chains) - 1, -1, -1):
        following.append([upcoming.get(block, _NEVER) for block in chains[number]])
        upcoming.update(dict.fromkeys(chains[number], number))
    following.reverse()
    return following
