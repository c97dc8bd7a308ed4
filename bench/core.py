"""What does the cache manager's core cost? Times its operations in process, at a pool of 131,072 blocks of 16 tokens.

    tessera bench core [--blocks N] [--published N] [--rounds N] [--json FILE]

Prints p50 and p99 in microseconds: match of resident prompts, a whole cycle on a hit, half resident, on new tokens with
eviction, a miss, and eviction of 1,000 blocks. The garbage collector runs as it does in the daemon. It needs no model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.setting import machine_facts, positive
from bench.table import Cell, Report, quantile
from cachemgr.ids import SessionId, TenantId
from cachemgr.manager import CacheManager
from cachemgr.results import Acquired, SequenceReport

BLOCK_TOKENS = 16
TENANT = TenantId("bench")
ROOT = bytes(range(32))
NOTHING = np.zeros(0, np.int32)
WARM_UPS = 5
EVICTED = 1000
MIN_PUBLISHED = 11_000


class Workload:
    """A manager whose index is filled with prompts of one length."""

    def __init__(self, num_blocks: int, published: int, prompt_tokens: int) -> None:
        self.manager = CacheManager(num_blocks=num_blocks, block_tokens=BLOCK_TOKENS, epoch=1)
        self.session: SessionId = self.manager.attach(decoder_name="bench", process_id=1, now_ns=0)
        self._random = np.random.default_rng(1)
        self.prompts: list[bytes] = []
        while self.manager.snapshot().indexed_blocks + prompt_tokens // BLOCK_TOKENS <= published:
            prompt = self.fresh(prompt_tokens)
            self.cycle(prompt)
            self.prompts.append(prompt)

    def fresh(self, num_tokens: int) -> bytes:
        """A prompt that was never seen."""
        return self._random.integers(0, 50_000, num_tokens, dtype=np.int32).tobytes()

    def acquire(self, tokens: bytes) -> Acquired:
        return self.manager.acquire(
            self.session, tenant=TENANT, root=ROOT, tokens=tokens, request_id="bench", sample=0, now_ns=0
        )

    def cycle(self, tokens: bytes) -> None:
        """Acquire, seal all, release."""
        lease = self.acquire(tokens)
        done = SequenceReport(
            lease.lease_id, sealed_tokens=len(tokens) // 4, copied=lease.copy is not None, release=True
        )
        revision = self.manager.revision
        self.manager.report(self.session, (done,), returned=NOTHING, wanted=0, applied_revision=revision, now_ns=0)


def measure(
    rows: list[list[Cell]], name: str, rounds: int, prepare: Callable[[int], bytes], run: Callable[[bytes], object]
) -> None:
    """Times `run` on what `prepare` gives, `rounds` times after a few to warm up; adds one row: name, p50, p99 (µs)."""
    times = []
    for number in range(rounds + WARM_UPS):
        argument = prepare(number)
        start = time.perf_counter_ns()
        run(argument)
        times.append((time.perf_counter_ns() - start) / 1000)
    rows.append([name, quantile(times[WARM_UPS:], 0.5), quantile(times[WARM_UPS:], 0.99)])


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="tessera bench core",
        description=__doc__.partition("\n")[0] if __doc__ else None,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--blocks", type=positive, default=131_072, metavar="N", help="blocks of the pool")
    parser.add_argument("--published", type=positive, default=100_000, metavar="N", help="blocks in the index")
    parser.add_argument("--rounds", type=positive, default=300, metavar="N", help="times that each operation runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    options = parser.parse_args(list(arguments))
    if not MIN_PUBLISHED <= options.published <= options.blocks:
        parser.error(f"--published is {options.published}; allowed are {MIN_PUBLISHED}..{options.blocks} (--blocks)")
    report = Report("core", {**machine_facts(), "blocks": options.blocks, "block tokens": BLOCK_TOKENS})
    report.begin()
    rows = measure_all(options.blocks, options.published, options.rounds)
    report.table("Operations of the cache manager's core", ("operation", "p50 µs", "p99 µs"), rows)
    report.write_json(options.json)
    return 0


def measure_all(blocks: int, published: int, rounds: int) -> list[list[Cell]]:
    """The rows: each operation at a small index and at a large one, then eviction and a long match."""
    rows: list[list[Cell]] = []
    for size in sorted({1024, published}):
        load = Workload(blocks, size, 8192)
        index, tree = load.manager._state.index, next(iter(load.manager._state.index.forest.trees.values()))
        prompts = load.prompts
        label = f"{size} published:"
        measure(
            rows,
            f"{label} match, 8,192 resident",
            rounds,
            lambda n, prompts=prompts: prompts[n % len(prompts)],
            lambda t, index=index, tree=tree: index.match(tree, t, len(t) // 4 - 1),
        )
        measure(
            rows,
            f"{label} match, a miss",
            rounds,
            lambda n, load=load: load.fresh(8192),
            lambda t, index=index, tree=tree: index.match(tree, t, len(t) // 4 - 1),
        )
        measure(
            rows,
            f"{label} cycle on a hit, 8,192",
            rounds,
            lambda n, prompts=prompts: prompts[n % len(prompts)],
            load.cycle,
        )
        measure(
            rows,
            f"{label} cycle, half resident, 8,192",
            rounds if size > 1024 else 20,
            lambda n, prompts=prompts, load=load: prompts[n % len(prompts)][: 4096 * 4] + load.fresh(4096),
            load.cycle,
        )
    full = Workload(blocks, blocks, 8192)
    name = "pool full: cycle on 8,192 new tokens, with eviction"
    measure(rows, name, rounds, lambda n: full.fresh(8192), full.cycle)
    evictions = min(rounds, published // EVICTED - 10)
    for name, tokens in ((f"evict {EVICTED:,} blocks", 8192), (f"evict {EVICTED:,} blocks of prompts of 4 blocks", 64)):
        load = Workload(blocks, published, tokens)
        measure(rows, name, evictions, lambda n: b"", lambda _, load=load: load.manager.evict(num_blocks=EVICTED))
    long = Workload(blocks, published, 32_768)
    index, tree = long.manager._state.index, next(iter(long.manager._state.index.forest.trees.values()))
    measure(
        rows,
        "match, 32,768 resident",
        rounds,
        lambda n: long.prompts[n % len(long.prompts)],
        lambda t: index.match(tree, t, len(t) // 4 - 1),
    )
    return rows
