"""What the three processes cost against the same engine called in one process.

The same prompts, the same weights and threads, in turn: the node over its public service, and the engine over the pure
cache manager in this process. The difference is gateway, sockets, messages, detokenizing and the measuring client.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.client import BenchClient, Load
from bench.local_engine import LocalEngine
from bench.node import started_node
from bench.serve import add_load_options, level_prompts, node_flags
from bench.setting import make_parser, model_shape, positive, read_setting, start_report
from bench.table import Cell, median
from common.logs import configure_logs

COLUMNS = (
    "streams", "one process tokens/s", "three processes tokens/s", "cost %", "one ITL p50 ms", "three ITL p50 ms",
    "one TTFT p50 ms", "three TTFT p50 ms",
)  # fmt: skip
MEGABYTE = 1 << 20


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = make_parser("overhead", __doc__)
    add_load_options(parser)
    parser.add_argument("--repeats", type=positive, default=2, metavar="N", help="runs of each side at each level")
    parser.add_argument("--pool-mb", type=positive, default=1024, metavar="N", help="pool of each side, MiB")
    namespace = parser.parse_args(list(arguments))
    setting = read_setting(namespace)
    config, _ = model_shape(setting)
    configure_logs("bench", "warning")  # the engine in this process would tell of its session
    facts: dict[str, Cell] = {
        "prompt tokens": namespace.prompt_tokens,
        "new tokens": namespace.new_tokens,
        "repeats": namespace.repeats,
    }
    report = start_report("overhead", setting, facts)
    flags = ["--pool-bytes", f"{namespace.pool_mb}M", *node_flags(namespace)]
    local = LocalEngine(setting, namespace.pool_mb * MEGABYTE, max(32, *namespace.concurrency))
    rows: list[list[Cell]] = []
    with started_node(setting, flags) as endpoint, BenchClient(endpoint) as client:
        warm = level_prompts(namespace, 1, config.vocab_size, salt=999)
        for side in (client, local):
            for _ in range(2):
                side.closed_loop(warm, min(8, namespace.new_tokens))
        for count in namespace.concurrency:
            one: list[Load] = []
            three: list[Load] = []
            for repeat in range(namespace.repeats):
                prompts = level_prompts(namespace, count, config.vocab_size, salt=repeat + 1)
                # A B B A: a machine that slows down or speeds up in the meantime favours neither side.
                for side in (client, local) if repeat % 2 == 0 else (local, client):
                    (three if side is client else one).append(side.closed_loop(prompts, namespace.new_tokens))
            rows.append(overhead_row(count, one, three))
    report.table("One process and three", COLUMNS, rows)
    report.note(
        "Medians over the repeats, which take turns. Cost: what the three processes lose of the one process's rate. "
        "Both sides get the same prompts, half of each cached; the client's own work is part of the cost."
    )
    report.write_json(setting.json)
    return 0


def overhead_row(count: int, one: Sequence[Load], three: Sequence[Load]) -> list[Cell]:
    """One row of the table."""
    alone, apart = (median([load.tokens_per_second for load in loads]) for loads in (one, three))
    return [
        count,
        alone,
        apart,
        100.0 * (1.0 - apart / alone),
        _gap(one),
        _gap(three),
        median([load.ttft(0.5) * 1e3 for load in one]),
        median([load.ttft(0.5) * 1e3 for load in three]),
    ]


def _gap(loads: Sequence[Load]) -> float | None:
    gaps = [gap * 1e3 for load in loads if (gap := load.gap(0.5)) is not None]
    return median(gaps) if gaps else None
