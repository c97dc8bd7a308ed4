"""What does it cost that a cache manager may die? The journal beside the core, and the start of the one that adopts.

    tessera bench adoption [--blocks N] [--published N] [--rounds N] [--json FILE]

Prints what the journal adds to publications and evictions (p50 and p99), a whole cycle on new tokens with it and
without, and how long reading a full journal and rebuilding the index take. The journal lies in a file, as the daemon's
does. It needs no model.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.cache_workload import BLOCK_TOKENS, ROOT, TENANT, Workload, time_calls
from bench.setting import machine_facts, make_pool_parser
from bench.table import Cell, Report, quantile
from cachemgr.ids import BlockRun
from cachemgr.journal import IndexJournal
from cachemgr.journal_file import boot_id, create_journal, open_journal
from cachemgr.journal_format import JournalIdentity
from cachemgr.manager import CacheManager
from cachemgr.nodes import Tree
from cachemgr.recovery import recover
from common.layout import WINDOW_SHARE

RUN = 512
SINGLES = 64
EVICTED = 1000
PROMPT_TOKENS = 8192
MIN_BLOCKS = 11_000
WINDOW_TOKENS = 512


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = make_pool_parser("adoption", __doc__, rounds=200)
    options = parser.parse_args(list(arguments))
    if not MIN_BLOCKS <= options.published <= options.blocks:
        parser.error(f"--published is {options.published}; allowed are {MIN_BLOCKS}..{options.blocks} (--blocks)")
    report = Report("adoption", {**machine_facts(), "blocks": options.blocks, "block tokens": BLOCK_TOKENS})
    report.begin()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "index.journal"
        rows = _costs(options.blocks, options.published, options.rounds, place)
        report.table("What the journal costs", ("operation", "p50 µs", "p99 µs"), rows)
        starts = [
            _adoption(options.blocks, options.published, length, place, window_blocks)
            for window_blocks in (0, options.blocks // WINDOW_SHARE)
            for length in (512, 8, 1)
        ]
        columns = (
            "blocks of a path",
            "window blocks",
            "blocks",
            "nodes",
            "open s",
            "read s",
            "rebuild s",
            "all s",
            "file MB",
        )
        report.table("A new daemon adopts", columns, starts)
    report.write_json(options.json)
    return 0


def _journal(num_blocks: int, place: Path, window_blocks: int = 0) -> IndexJournal:
    identity = JournalIdentity(num_blocks, BLOCK_TOKENS, 4096, bytes(16), bytes(32), boot_id())
    if window_blocks:
        identity = replace(identity, num_window_blocks=window_blocks, window_block_bytes=4096)
    return create_journal(place, identity, 1)


def _costs(num_blocks: int, published: int, rounds: int, place: Path) -> list[list[Cell]]:
    journal, tree = _journal(num_blocks, place), Tree(1, ROOT)
    rng = np.random.default_rng(1)
    order = rng.permutation(num_blocks) + 1
    tokens = rng.integers(0, 50_000, RUN * BLOCK_TOKENS, dtype=np.int32).tobytes()

    texts = [tokens[: BLOCK_TOKENS * 4]] * SINGLES

    def some(count: int, number: int) -> BlockRun:
        first = number * count % (num_blocks - count)
        return order[first : first + count]

    def publish(blocks: BlockRun) -> None:
        journal.publish(TENANT, tree, 0, tokens[: len(blocks) * BLOCK_TOKENS * 4], blocks, 0)

    def publish_each(blocks: BlockRun) -> None:
        journal.publish_each(
            ["", TENANT], [tree] * SINGLES, np.zeros(SINGLES, np.int32), texts, blocks, [0] * SINGLES,
            priorities=[50] * SINGLES, expiries=[0] * SINGLES,
        )  # fmt: skip

    rows: list[list[Cell]] = []
    for name, count, run in (
        (f"publish {RUN} blocks of one sequence", RUN, publish),
        (f"publish one block each of {SINGLES} sequences", SINGLES, publish_each),
        (f"unpublish {EVICTED} blocks", EVICTED, journal.unpublish),
    ):
        times = time_calls(rounds, partial(some, count), run)
        rows.append([name, quantile(times, 0.5), quantile(times, 0.99)])
    for name, recorder in (("without", None), ("with", _journal(num_blocks, place))):
        work = Workload(num_blocks, published, PROMPT_TOKENS, recorder)
        times = time_calls(rounds, partial(_fresh, work), work.cycle)
        rows.append(
            [f"cycle on {PROMPT_TOKENS} new tokens {name} a journal", quantile(times, 0.5), quantile(times, 0.99)]
        )
    return rows


def _fresh(work: Workload, _number: int) -> bytes:
    return work.fresh(PROMPT_TOKENS)


def _adoption(num_blocks: int, published: int, length: int, place: Path, window_blocks: int) -> list[Cell]:
    """Seconds that a new daemon takes for `published` blocks in paths of `length` blocks, so many of them with window
    blocks."""
    journal, tree = _journal(num_blocks, place, window_blocks), Tree(1, ROOT)
    rng = np.random.default_rng(2)
    order = rng.permutation(num_blocks) + 1
    for first in range(0, published - published % length, length):
        tokens = rng.integers(0, 50_000, length * BLOCK_TOKENS, dtype=np.int32).tobytes()
        journal.publish(TENANT, tree, 0, tokens, order[first : first + length], 0, priority=50)
    journal.flush()
    if window_blocks:
        journal.has_windows(order[:window_blocks], np.arange(1, window_blocks + 1, dtype=np.int32))
    moments = [time.monotonic()]
    again = open_journal(place, boot_id())
    if again is None:
        raise RuntimeError("the journal that was just written does not open")
    moments.append(time.monotonic())
    found = recover(again)
    moments.append(time.monotonic())
    manager = CacheManager(
        num_blocks=num_blocks,
        block_tokens=BLOCK_TOKENS,
        window_tokens=WINDOW_TOKENS if window_blocks else 0,
        num_window_blocks=window_blocks,
        epoch=2,
        journal=again,
    )
    gc.disable()  # as the daemon does
    listed = manager.adopt(found, 0)
    gc.enable()
    again.keep_only(listed)
    moments.append(time.monotonic())
    spans = [float(later - earlier) for earlier, later in pairwise(moments)]
    file_mb = place.stat().st_size / 1e6
    return [length, window_blocks, len(listed), found.num_nodes, *spans, moments[-1] - moments[0], file_mb]
