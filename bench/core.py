"""What does the cache manager's core cost? Times its operations in process, at a pool of 131,072 blocks of 16 tokens.

    tessera bench core [--blocks N] [--published N] [--rounds N] [--json FILE]

Prints p50 and p99 in microseconds: match of resident prompts, a whole cycle on a hit, half resident, on new tokens with
eviction, a miss, and eviction of 1,000 blocks; then the same beside two plain managers (`bench/cache_yardsticks.py`).
The p99 by the thread's own clock has no time slices of other programs in it. The garbage collector runs as it does in
the daemon. The core's clock ticks once in 16 cycles and is not timed: the daemon's ticks once a second, and so names
the blocks of up to 32 such prompts a second beside its operations; of more, each cycle would pay for one (about 15 µs
for 8,192 tokens). It needs no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.cache_comparison import compare
from bench.cache_workload import BLOCK_TOKENS, Workload, time_calls
from bench.setting import machine_facts, make_pool_parser
from bench.table import Cell, Report, quantile

EVICTED = 1000
MIN_PUBLISHED = 11_000
COMPARED_ROUNDS = 60


def measure(
    rows: list[list[Cell]], name: str, rounds: int, prepare: Callable[[int], bytes], run: Callable[[bytes], object]
) -> None:
    """Times `run` on what `prepare` gives, `rounds` times after a few to warm up; adds one row: name, p50 and p99 (µs),
    p99 by the thread's own clock, and that as a multiple of p50."""
    own: list[float] = []
    times = time_calls(rounds, prepare, run, own)
    middle, own_tail = quantile(times, 0.5), quantile(own, 0.99)
    rows.append([name, middle, quantile(times, 0.99), own_tail, own_tail / middle])


def ticking(load: Workload, prepare: Callable[[Workload, int], bytes]) -> Callable[[int], bytes]:
    """What `prepare` gives of `load`, whose clock goes on beside what is timed."""

    def prepared(number: int) -> bytes:
        load.tick(number)
        return prepare(load, number)

    return prepared


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = make_pool_parser("core", __doc__)
    options = parser.parse_args(list(arguments))
    if not MIN_PUBLISHED <= options.published <= options.blocks:
        parser.error(f"--published is {options.published}; allowed are {MIN_PUBLISHED}..{options.blocks} (--blocks)")
    report = Report("core", {**machine_facts(), "blocks": options.blocks, "block tokens": BLOCK_TOKENS})
    report.begin()
    rows = measure_all(options.blocks, options.published, options.rounds)
    report.table(
        "Operations of the cache manager's core", ("operation", "p50 µs", "p99 µs", "p99 CPU µs", "p99 CPU / p50"), rows
    )
    report.table(
        "Beside two plain managers, p50 µs",
        ("operation", "ours", "radix of pages", "hash chain", "radix / ours", "chain / ours"),
        compare(options.blocks, options.published, min(options.rounds, COMPARED_ROUNDS)),
    )
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
            ticking(load, lambda load, n: load.prompts[n % len(load.prompts)]),
            load.cycle,
        )
        measure(
            rows,
            f"{label} cycle, half resident, 8,192",
            rounds if size > 1024 else 20,
            ticking(load, lambda load, n: load.prompts[n % len(load.prompts)][: 4096 * 4] + load.fresh(4096)),
            load.cycle,
        )
    full = Workload(blocks, blocks, 8192)
    name = "pool full: cycle on 8,192 new tokens, with eviction"
    measure(rows, name, rounds, ticking(full, lambda load, _: load.fresh(8192)), full.cycle)
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
