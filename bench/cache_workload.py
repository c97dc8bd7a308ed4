"""What the core's benches run: a manager filled with prompts, and the timing of one operation.

Invariant: prompts are the same in each run (a fixed seed), and what is timed is the call alone. `bench/core.py` and
`bench/cache_comparison.py` use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from cachemgr.ids import SessionId, TenantId
from cachemgr.manager import CacheManager
from cachemgr.recorder import Recorder
from cachemgr.results import Acquired, SequenceReport

BLOCK_TOKENS = 16
TENANT = TenantId("bench")
ROOT = bytes(range(32))
NOTHING = np.zeros(0, np.int32)
WARM_UPS = 5
CYCLES_A_TICK = 16  # of 8,192 tokens; the core names the blocks of the 32 newest prompts no sooner than at a tick

Argument = TypeVar("Argument")


class Workload:
    """A manager whose index is filled with prompts of one length; `journal` is told of them as the daemon's is."""

    def __init__(self, num_blocks: int, published: int, prompt_tokens: int, journal: Recorder | None = None) -> None:
        self.manager = CacheManager(num_blocks=num_blocks, block_tokens=BLOCK_TOKENS, epoch=1, journal=journal)
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

    def tick(self, number: int) -> None:
        """The clock of the core at every `CYCLES_A_TICK`th number, to be called outside of what is timed: the daemon's
        ticks once a second at least, beside its operations."""
        if number % CYCLES_A_TICK == 0:
            self.manager.tick(0)

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


def time_calls(
    rounds: int,
    prepare: Callable[[int], Argument],
    run: Callable[[Argument], object],
    own_times: list[float] | None = None,
) -> list[float]:
    """Microseconds of each `run` on what `prepare` gives, `rounds` times after a few to warm up. `own_times` gets the
    same by this thread's own clock, which stands still while others have the core (and costs some 0.3 µs to read)."""
    times, own = [], []
    for number in range(rounds + WARM_UPS):
        argument = prepare(number)
        own_start = time.thread_time_ns()
        start = time.perf_counter_ns()
        run(argument)
        times.append((time.perf_counter_ns() - start) / 1000)
        own.append((time.thread_time_ns() - own_start) / 1000)
    if own_times is not None:
        own_times += own[WARM_UPS:]
    return times[WARM_UPS:]
