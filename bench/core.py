"""What does the cache manager's core cost? Times its operations in process, at a pool of 131,072 blocks of 16 tokens.

    python -m bench.core [--blocks N] [--published N] [--rounds N]

Prints p50 and p99 in microseconds: match of resident prompts, a whole cycle on a hit, half resident, on new tokens with
eviction, a miss, and eviction of 1,000 blocks. The garbage collector runs as it does in the daemon.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from cachemgr.ids import SessionId, TenantId
from cachemgr.manager import CacheManager
from cachemgr.results import Acquired, SequenceReport

BLOCK_TOKENS = 16
TENANT = TenantId("bench")
ROOT = bytes(range(32))
NOTHING = np.zeros(0, np.int32)


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


def measure(name: str, rounds: int, prepare: Callable[[int], bytes], run: Callable[[bytes], object]) -> None:
    """Times `run` on what `prepare` gives, `rounds` times after a few to warm up; prints one line."""
    times = []
    for number in range(rounds + 5):
        argument = prepare(number)
        start = time.perf_counter_ns()
        run(argument)
        times.append(time.perf_counter_ns() - start)
    p50, p99 = np.percentile(np.array(times[5:]) / 1000, [50, 99])
    print(f"{name:<58} {p50:9.1f} {p99:9.1f}")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=131_072)
    parser.add_argument("--published", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    blocks, rounds = options.blocks, options.rounds
    print(f"{blocks} blocks of {BLOCK_TOKENS} tokens, microseconds {'p50':>20} {'p99':>9}")
    for published in sorted({1024, options.published}):
        load = Workload(blocks, published, 8192)
        index, tree = load.manager._state.index, next(iter(load.manager._state.index.forest.trees.values()))
        prompts = load.prompts
        label = f"{published} published:"
        measure(
            f"{label} match, 8,192 resident",
            rounds,
            lambda n, prompts=prompts: prompts[n % len(prompts)],
            lambda t, index=index, tree=tree: index.match(tree, t, len(t) // 4 - 1),
        )
        measure(
            f"{label} match, a miss",
            rounds,
            lambda n, load=load: load.fresh(8192),
            lambda t, index=index, tree=tree: index.match(tree, t, len(t) // 4 - 1),
        )
        measure(
            f"{label} cycle on a hit, 8,192",
            rounds,
            lambda n, prompts=prompts: prompts[n % len(prompts)],
            load.cycle,
        )
        measure(
            f"{label} cycle, half resident, 8,192",
            rounds if published > 1024 else 20,
            lambda n, prompts=prompts, load=load: prompts[n % len(prompts)][: 4096 * 4] + load.fresh(4096),
            load.cycle,
        )
    full = Workload(blocks, blocks, 8192)
    measure("pool full: cycle on 8,192 new tokens, with eviction", rounds, lambda n: full.fresh(8192), full.cycle)
    load = Workload(blocks, options.published, 8192)
    measure(
        "evict 1,000 blocks",
        min(rounds, options.published // 1000 - 10),
        lambda n: b"",
        lambda _: load.manager.evict(num_blocks=1000),
    )
    short = Workload(blocks, options.published, 64)
    measure(
        "evict 1,000 blocks of prompts of 4 blocks",
        min(rounds, options.published // 1000 - 10),
        lambda n: b"",
        lambda _: short.manager.evict(num_blocks=1000),
    )
    long = Workload(blocks, options.published, 32_768)
    index, tree = long.manager._state.index, next(iter(long.manager._state.index.forest.trees.values()))
    measure(
        "match, 32,768 resident",
        rounds,
        lambda n: long.prompts[n % len(long.prompts)],
        lambda t: index.match(tree, t, len(t) // 4 - 1),
    )


if __name__ == "__main__":
    main()
