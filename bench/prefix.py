"""How long the first token takes, with the prompt cached and not, and what admission costs outside the model.

For each length, several times: a prompt the node has never seen (cold), then the same one again (warm). The warm one
computes one token, as every prompt does, so its time less one decode step at that context is what admission costs
outside the model: gateway, queue, lease, copy-on-write, the way back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.client import Answer, BenchClient
from bench.limits import better, describe_limits, measure_limits
from bench.node import add_node_options, open_node
from bench.setting import BLOCK_TOKENS, make_parser, model_shape, positive, positive_list, read_setting, start_report
from bench.table import Cell, median, spread
from bench.work import MachineLimits, ModelWork, random_prompt
from cachemgr.ids import TenantId
from cachemgr.manager import CacheManager
from cachemgr.results import SequenceReport
from common.tokens import pack_tokens

COLUMNS = (
    "prompt", "cold ms", "cold spread", "cold limit ms", "of limit %", "warm ms", "warm spread", "warm/cold %",
    "warm limit ms", "cached",
)  # fmt: skip
ADMISSION_COLUMNS = ("prompt", "warm ms", "step ms", "outside the model ms", "acquire in the core ms")


@dataclass(frozen=True, slots=True)
class Length:
    """Answers to prompts of one length."""

    num_tokens: int
    cold: tuple[Answer, ...]
    warm: tuple[Answer, ...]

    def times(self, answers: Sequence[Answer]) -> list[float]:
        """Times to first token in milliseconds."""
        return [answer.ttft_seconds * 1e3 for answer in answers]

    def step_ms(self) -> float | None:
        """Median time of one decode step right after the prompt; None if only one token was asked for."""
        steps = [median(answer.steps_seconds) * 1e3 for answer in self.warm if answer.steps_seconds]
        return median(steps) if steps else None

    def outside_ms(self) -> float | None:
        """Median of each warm time to first token less the steps of that same answer; None as above."""
        outside = [a.ttft_seconds - median(a.steps_seconds) for a in self.warm if a.steps_seconds]
        return median(outside) * 1e3 if outside else None


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = make_parser("prefix", __doc__)
    add_node_options(parser)
    parser.add_argument("--lengths", type=positive_list, default=[128, 1024, 4000], metavar="N,N", help="prompt tokens")
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help="cold and warm pairs of each length")
    parser.add_argument("--step-tokens", type=positive, default=9, metavar="N", help="tokens of a warm answer")
    parser.add_argument("--seed", type=positive, default=1, metavar="N", help="of the prompts")
    namespace = parser.parse_args(list(arguments))
    setting = read_setting(namespace)
    work = ModelWork(*model_shape(setting))
    report = start_report("prefix", setting, {"repeats": namespace.repeats})
    limits = measure_limits(work, setting.dtype, setting.threads)
    with open_node(namespace, setting) as endpoint, BenchClient(endpoint) as client:
        # The first request of a process pays for what is made once; it is no part of either time.
        client.ask(random_prompt([namespace.seed, 10**6], min(namespace.lengths), work.config.vocab_size), 2)
        lengths = [
            measure_length(client, count, namespace.repeats, namespace.step_tokens, namespace.seed, work)
            for count in namespace.lengths
        ]
    limits = better(limits, measure_limits(work, setting.dtype, setting.threads))
    report.table("Time to first token", COLUMNS, [length_row(length, work, limits) for length in lengths])
    report.note(describe_limits(limits))
    report.note(
        "Cold limit: the prompt's arithmetic at that rate. Warm limit: weights and the prompt's keys and values, read "
        "once. Of limit: cold limit over cold. Cached: fewest tokens of a warm prompt that came from the cache."
    )
    report.table("Admission of a cached prompt", ADMISSION_COLUMNS, [admission_row(length, work) for length in lengths])
    report.note(
        "Step: median time between the tokens that follow the warm prompt: one decode step at that context and the "
        "stream's own cost. Outside the model: warm less the steps of the same answer: what a first token alone pays "
        "for. Acquire in the core: the pure cache manager alone, called in this process with the same prompt cached."
    )
    report.write_json(setting.json)
    return 0


def measure_length(
    client: BenchClient, num_tokens: int, repeats: int, step_tokens: int, seed: int, work: ModelWork
) -> Length:
    """Cold and warm answers to `repeats` fresh prompts of `num_tokens` tokens."""
    cold, warm = [], []
    for index in range(repeats):
        prompt = random_prompt([seed, num_tokens, index], num_tokens, work.config.vocab_size)
        cold.append(client.ask(prompt, 1))
        warm.append(client.ask(prompt, step_tokens))
    return Length(num_tokens, tuple(cold), tuple(warm))


def length_row(length: Length, work: ModelWork, limits: MachineLimits) -> list[Cell]:
    """One row of the first table."""
    cold, warm = length.times(length.cold), length.times(length.warm)
    cold_limit = work.prefill_limit_seconds(length.num_tokens, 0, limits) * 1e3
    warm_limit = work.prefill_limit_seconds(length.num_tokens, length.num_tokens - 1, limits) * 1e3
    return [
        length.num_tokens,
        median(cold),
        spread(cold),
        cold_limit,
        100.0 * cold_limit / median(cold),
        median(warm),
        spread(warm),
        100.0 * median(warm) / median(cold),
        warm_limit,
        min(answer.cached_tokens for answer in length.warm),
    ]


def admission_row(length: Length, work: ModelWork) -> list[Cell]:
    """One row of the second table."""
    warm = median(length.times(length.warm))
    acquire = measure_acquire(length.num_tokens, work) * 1e3
    return [length.num_tokens, warm, length.step_ms(), length.outside_ms(), acquire]


def measure_acquire(num_tokens: int, work: ModelWork, repeats: int = 50) -> float:
    """Median seconds in which the pure cache manager leases a prompt that is cached to its last token but one."""
    blocks = 4 * (num_tokens // BLOCK_TOKENS + 2)
    manager = CacheManager(num_blocks=blocks, block_tokens=BLOCK_TOKENS, epoch=1)
    session = manager.attach(decoder_name="bench", process_id=1, now_ns=0)
    tokens = pack_tokens(random_prompt([1, num_tokens], num_tokens, work.config.vocab_size))
    seconds = []
    nothing = np.empty(0, np.int32)
    for index in range(repeats + 1):
        began = time.perf_counter()
        lease = manager.acquire(
            session, tenant=TenantId("bench"), root=bytes(32), tokens=tokens, request_id="bench", sample=0, now_ns=0
        )
        if index:
            seconds.append(time.perf_counter() - began)
        done = SequenceReport(lease.lease_id, sealed_tokens=num_tokens, copied=lease.copy is not None, release=True)
        manager.report(session, [done], returned=nothing, wanted=0, applied_revision=manager.revision, now_ns=0)
    return median(seconds)
