"""Chooses a decoder for a prompt: the one that most likely has its prefix warm, unless it is overloaded. Pure.

Prompts that share their leading blocks go to the same decoder (rendezvous hashing: when decoders come and go, only
their own prompts move). Every decoder sees the whole node's cache, so a wrong choice costs time and never a hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from common.layout import TOKEN_BYTES

AFFINITY_BLOCKS: Final = 4


@dataclass(frozen=True, slots=True)
class Candidate:
    """One decoder that can take a request. `load` is its running and waiting samples, `capacity` its batch size."""

    index: int
    load: int
    capacity: int


def affinity(tokens: bytes, block_tokens: int, tenant: str) -> int:
    """64-bit name of the leading blocks of a prompt (packed int32); tenants never share one on purpose."""
    head = tokens[: AFFINITY_BLOCKS * block_tokens * TOKEN_BYTES]
    return int(xxhash.xxh3_64_intdigest(head, seed=xxhash.xxh3_64_intdigest(tenant.encode())))


def choose_decoder(name: int, candidates: Sequence[Candidate]) -> Candidate:
    """The candidate for a prompt named `name`. Raises ValueError if there are none.

    The rendezvous winner keeps it while its batch has room, or while nobody is less than half as loaded.
    """
    if not candidates:
        raise ValueError("there is no candidate")
    data = name.to_bytes(8, "little")
    winner = max(candidates, key=lambda one: (xxhash.xxh3_64_intdigest(data, seed=one.index), one.index))
    least = min(candidates, key=lambda one: (one.load * max(1, winner.capacity), one.index))
    if winner.load < winner.capacity or least.load * 2 >= winner.load:
        return winner
    return least
