"""How many tokens a second the node serves, and how evenly, to 1, 8 and 32 clients at once.

Closed loop over the public service: prompts of which half is shared (and cached before the clock starts), greedy
answers of a fixed length. Beside it stands the least time a step could take on this machine, from the work it does and
the rates measured in the same run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from bench.client import BenchClient, Load
from bench.limits import better, describe_limits, measure_limits
from bench.node import add_node_options, open_node
from bench.setting import make_parser, model_shape, positive, positive_list, read_setting, start_report
from bench.table import Cell
from bench.work import MachineLimits, ModelWork, shared_prompts

COLUMNS = (
    "streams", "requests", "tokens/s", "ITL p50 ms", "ITL p99 ms", "TTFT p50 ms", "TTFT p99 ms",
    "cached %", "step ms", "step limit ms", "of limit %", "client CPU %",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = make_parser("serve", __doc__)
    add_node_options(parser)
    add_load_options(parser)
    namespace = parser.parse_args(list(arguments))
    setting = read_setting(namespace)
    work = ModelWork(*model_shape(setting))
    more: dict[str, Cell] = {"prompt tokens": namespace.prompt_tokens, "new tokens": namespace.new_tokens}
    report = start_report("serve", setting, more)
    limits = measure_limits(work, setting.dtype, setting.threads)
    with open_node(namespace, setting, node_flags(namespace)) as endpoint, BenchClient(endpoint) as client:
        warm_up(client, namespace, work.config.vocab_size)
        loads = [
            (count, run_level(client, namespace, count, work.config.vocab_size)) for count in namespace.concurrency
        ]
    limits = better(limits, measure_limits(work, setting.dtype, setting.threads))
    rows = [load_row(count, load, work, limits, namespace.prompt_tokens) for count, load in loads]
    report.table("Serving, closed loop", COLUMNS, rows)
    report.note(describe_limits(limits))
    report.note(
        "ITL: time between messages of one stream. Step: median time of a step, a message of several tokens counting "
        "as so many steps. Step limit: weights and the keys and values of all streams at their mean context, read once "
        "at that rate, or the step's arithmetic if that takes longer. Of limit: step limit over step. Client CPU: "
        "share of all cores that the measuring client itself took."
    )
    report.write_json(setting.json)
    return 0


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Options of the workload that `serve`, `overhead` and `yardstick` share."""
    group = parser.add_argument_group("workload")
    group.add_argument("--concurrency", type=positive_list, default=[1, 8, 32], metavar="N,N", help="streams at once")
    group.add_argument("--prompt-tokens", type=positive, default=256, metavar="N", help="half of them are shared")
    group.add_argument("--new-tokens", type=positive, default=128, metavar="N", help="tokens of each answer")
    group.add_argument("--rounds", type=positive, default=2, metavar="N", help="requests of each stream")
    group.add_argument("--seed", type=positive, default=1, metavar="N", help="of the prompts")


def node_flags(namespace: argparse.Namespace) -> list[str]:
    """Flags of a node that can run every stream at once."""
    return ["--max-batch", str(max(32, *namespace.concurrency))]


def level_prompts(namespace: argparse.Namespace, count: int, vocab_size: int, salt: int = 0) -> list[list[list[int]]]:
    """Prompts of one level: the rounds of each of `count` streams. All share their first half; none comes twice."""
    # A lone stream asks more often, so that its figures rest on more than two answers.
    rounds = namespace.rounds * (2 if count == 1 else 1)
    total, half = namespace.prompt_tokens, namespace.prompt_tokens // 2
    flat = shared_prompts(namespace.seed, count * rounds, total, half, vocab_size, salt=1000 * salt + count)
    return [flat[index * rounds : (index + 1) * rounds] for index in range(count)]


def warm_up(client: BenchClient, namespace: argparse.Namespace, vocab_size: int) -> None:
    """Cache the shared half, and let every process run its code once."""
    for _ in range(2):
        client.ask(level_prompts(namespace, 1, vocab_size, salt=999)[0][0], min(8, namespace.new_tokens))


def run_level(client: BenchClient, namespace: argparse.Namespace, count: int, vocab_size: int, salt: int = 0) -> Load:
    """One closed loop of `count` streams."""
    return client.closed_loop(level_prompts(namespace, count, vocab_size, salt), namespace.new_tokens)


def load_row(count: int, load: Load, work: ModelWork, limits: MachineLimits, prompt_tokens: int) -> list[Cell]:
    """One row of the table."""
    new_tokens = len(load.answers[0].token_ids)
    limit = work.decode_limit_seconds([prompt_tokens + new_tokens / 2] * count, limits)
    step, typical, late = load.step(), load.gap(0.5), load.gap(0.99)
    return [
        count,
        len(load.answers),
        load.tokens_per_second,
        None if typical is None else typical * 1e3,
        None if late is None else late * 1e3,
        load.ttft(0.5) * 1e3,
        load.ttft(0.99) * 1e3,
        100.0 * load.cached_fraction,
        None if step is None else step * 1e3,
        limit * 1e3,
        None if step is None else 100.0 * limit / step,
        100.0 * load.client_cpu_seconds / (load.seconds * len(os.sched_getaffinity(0))),
    ]
