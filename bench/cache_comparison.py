"""The five operations of a prefix cache by our core and by the two plain managers, in one run.

Each takes prompts as its engine does, made outside of what is timed: packed tokens for ours, a list of ids for the
others. `bench/core.py` prints the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

import numpy as np

from bench.cache_workload import BLOCK_TOKENS, Workload, time_calls
from bench.cache_yardsticks import HashChainCache, RadixPageCache
from bench.table import Cell, median

SHORT_TOKENS = 8192
LONG_TOKENS = 32_768


class Engine(Protocol):
    """One manager under test. Prompts are in its own form."""

    def match(self, prompt: Any) -> object: ...
    def cycle(self, prompt: Any) -> object: ...
    def prompt(self, tokens: bytes) -> Any: ...


class Ours:
    """The core of the daemon; its clock ticks as in `bench/core.py`."""

    def __init__(self, num_blocks: int) -> None:
        self._load = Workload(num_blocks, 0, SHORT_TOKENS)
        self._prompts = count()
        self.cycle = self._load.cycle

    def match(self, prompt: bytes) -> object:
        index = self._load.manager._state.index
        tree = next(iter(index.forest.trees.values()))
        return index.match(tree, prompt, len(prompt) // 4 - 1)

    def prompt(self, tokens: bytes) -> bytes:
        self._load.tick(next(self._prompts))
        return tokens


class Radix:
    """A radix tree of pages."""

    def __init__(self, num_blocks: int) -> None:
        cache = RadixPageCache(num_blocks, BLOCK_TOKENS)
        self.cycle, self.match = cache.cycle, cache.match

    def prompt(self, tokens: bytes) -> list[int]:
        return _token_ids(tokens)


class HashChain:
    """Chained hashes in a dictionary; a match hashes the prompt."""

    def __init__(self, num_blocks: int) -> None:
        self._cache = HashChainCache(num_blocks, BLOCK_TOKENS)
        self.cycle = self._cache.cycle

    def match(self, prompt: list[int]) -> object:
        return self._cache.match(self._cache.hashes(prompt))

    def prompt(self, tokens: bytes) -> list[int]:
        return _token_ids(tokens)


def compare(blocks: int, published: int, rounds: int) -> list[list[Cell]]:
    """Rows: operation, p50 in microseconds of ours, the radix and the chain, and how many times ours they take."""
    results = [_measure(kind, blocks, published, rounds) for kind in (Ours, Radix, HashChain)]
    ours, radix, chain = results
    return [
        [name, ours[name], radix[name], chain[name], radix[name] / ours[name], chain[name] / ours[name]]
        for name in ours
    ]


def _measure(kind: Callable[[int], Engine], blocks: int, published: int, rounds: int) -> dict[str, float]:
    random = np.random.default_rng(2)
    found: dict[str, float] = {}

    def fresh(num_tokens: int) -> bytes:
        return random.integers(0, 50_000, num_tokens, dtype=np.int32).tobytes()

    def fill(engine: Engine, num_blocks: int, num_tokens: int) -> list[bytes]:
        sent = [fresh(num_tokens) for _ in range(num_blocks * BLOCK_TOKENS // num_tokens)]
        for tokens in sent:
            engine.cycle(engine.prompt(tokens))
        return sent

    engine = kind(blocks)
    sent = fill(engine, published, SHORT_TOKENS)

    def resident(number: int) -> Any:
        return engine.prompt(sent[number % len(sent)])

    def half_resident(number: int) -> Any:
        return engine.prompt(sent[number % len(sent)][: SHORT_TOKENS // 2 * 4] + fresh(SHORT_TOKENS // 2))

    found["match, 8,192 resident"] = median(time_calls(rounds, resident, engine.match))
    found["whole cycle on a hit, 8,192"] = median(time_calls(rounds, resident, engine.cycle))
    found["whole cycle, half resident, 8,192"] = median(time_calls(rounds, half_resident, engine.cycle))

    full = kind(blocks)
    fill(full, blocks, SHORT_TOKENS)
    name = "whole cycle on 8,192 new tokens, with eviction"
    found[name] = median(time_calls(rounds, lambda _: full.prompt(fresh(SHORT_TOKENS)), full.cycle))

    long = kind(blocks)
    long_sent = fill(long, published, LONG_TOKENS)
    name = "match, 32,768 resident"
    found[name] = median(time_calls(rounds, lambda n: long.prompt(long_sent[n % len(long_sent)]), long.match))
    return found


def _token_ids(tokens: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(tokens, np.int32).tolist()
    return ids
