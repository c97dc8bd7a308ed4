"""What one seed is about: sizes of the node, how much is asked, and which faults strike.

Every fault kind has seeds of its own, so that it is shown one by one; other seeds mix them, some have none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cachemgr.quotas import Quota
from cachemgr.window_blocks import reach_of
from tests.simulation.kernel import MILLISECOND, Kernel

DROP, DELAY, DUPLICATE, REORDER, CRASH, STOP, PARTITION = (
    "drop", "delay", "duplicate", "reorder", "crash", "stop", "partition",
)  # fmt: skip
ALLOCATION, OPERATOR, CANCEL, LIE, DAEMON = "allocation", "operator", "cancel", "lie", "daemon"
KINDS = (DROP, DELAY, DUPLICATE, REORDER, CRASH, STOP, PARTITION, ALLOCATION, OPERATOR, CANCEL, LIE, DAEMON)


@dataclass(frozen=True)
class Scenario:
    """The numbers of one run; times in microseconds."""

    seed: int
    faults: frozenset[str]
    num_blocks: int
    block_tokens: int
    num_decoders: int
    num_tenants: int
    shared_roots: bool
    document_blocks: int
    num_requests: int
    max_tokens: int
    max_batch: int
    chunk_tokens: int
    latency: int
    fault_every: int
    name_bits: int
    fail_allocation: int
    quotas: tuple[Quota, ...]  # of tenant-1 and on; none: nobody has one
    waits: bool
    commits: bool
    keeps: bool
    scopes: bool = False  # whether prompts begin in scopes that tenants share
    window_tokens: int = 0  # that the decoders' layers read back at most; 0: all
    group_window: int = 0  # that some of the layers read back, others all; 0: there are no layer groups
    num_window_blocks: int = 0  # for those layers

    @property
    def faults_until(self) -> int:
        """When faults and new requests stop."""
        return 80 * MILLISECOND

    def describe(self) -> str:
        """One line for the trace."""
        faults = ", ".join(sorted(self.faults)) or "none"
        return (
            f"seed {self.seed}: {self.num_blocks} blocks of {self.block_tokens}, {self.num_decoders} decoders, "
            f"{self.num_tenants} tenants, {self.num_requests} requests, {'scopes, ' * self.scopes}"
            f"{f'window {self.window_tokens}, ' * (self.window_tokens > 0)}"
            f"{f'groups: window {self.group_window} in {self.num_window_blocks} blocks, ' * (self.group_window > 0)}"
            f"faults: {faults}"
        )


def scenario_of(kernel: Kernel, seed: int, only: frozenset[str] | None = None) -> Scenario:
    """The scenario of a seed. `only` replaces its faults."""
    which = seed % (len(KINDS) + 7)
    if which < len(KINDS):
        faults = frozenset((KINDS[which],))
    elif which == len(KINDS):
        faults = frozenset()
    else:
        faults = frozenset(kind for kind in KINDS if kernel.chance(0.5))
    if only is not None:
        faults = only
    block_tokens = kernel.random.choice((1, 2, 4, 4))
    num_blocks = kernel.between(8, 28)
    num_tenants = kernel.between(1, 3)
    scopes = seed % 5 in (1, 3)
    scenario = Scenario(
        seed=seed,
        faults=faults,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        num_decoders=kernel.between(1, 3),
        num_tenants=num_tenants,
        shared_roots=kernel.chance(0.5),
        document_blocks=kernel.between(2, 5),
        num_requests=kernel.between(12, 20),
        max_tokens=kernel.between(2, 3 * block_tokens + 2),
        max_batch=kernel.between(2, 5),
        chunk_tokens=kernel.between(1, 3) * max(2, block_tokens),
        latency=kernel.random.choice((50, 300, 2000)),
        fault_every=kernel.between(2, 8) * MILLISECOND,
        name_bits=kernel.random.choice((128, 128, 1)),
        fail_allocation=kernel.between(1, 30) if ALLOCATION in faults else 0,
        quotas=_quotas(kernel, num_blocks, num_tenants) if kernel.chance(0.35) else (),
        waits=kernel.chance(0.5),
        commits=kernel.chance(0.3),
        keeps=kernel.chance(0.4),
    )
    if seed % 7 in (1, 3, 6):  # nothing is drawn: the other seeds stay what they were
        scenario = replace(scenario, window_tokens=1 + seed // 7 % (3 * block_tokens))
    if seed % 7 in (2, 5):
        window = 1 + seed // 7 % (3 * block_tokens)
        count = min(num_blocks, 2 * reach_of(window, block_tokens) + seed // 35 % 4)
        scenario = replace(scenario, group_window=window, num_window_blocks=count)
    if scenario.quotas and seed % 3 == 2:
        scenario = replace(scenario, quotas=_filled(scenario.quotas, num_blocks))
    return replace(scenario, scopes=True, shared_roots=True) if scopes else scenario


def _quotas(kernel: Kernel, num_blocks: int, num_tenants: int) -> tuple[Quota, ...]:
    quotas = []
    for _ in range(num_tenants):
        floor = kernel.between(0, num_blocks // (num_tenants + 1))
        ceiling = kernel.between(max(floor, num_blocks // 3), num_blocks) if kernel.chance(0.6) else 0
        weight = kernel.random.choice((0.5, 1.0, 4.0))
        quotas.append(Quota(floor_blocks=floor, ceiling_blocks=ceiling, weight=weight, pin_blocks=num_blocks // 8))
    return tuple(quotas)


def _filled(quotas: tuple[Quota, ...], num_blocks: int) -> tuple[Quota, ...]:
    """The same with floors that take the whole pool: what the others leave is the first tenant's."""
    floor = num_blocks - sum(quota.floor_blocks for quota in quotas[1:])
    return (replace(quotas[0], floor_blocks=floor, ceiling_blocks=0), *quotas[1:])
