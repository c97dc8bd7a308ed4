"""How well does an eviction policy do on a recorded trace? Replays admissions through the real index, without a model.

    tessera bench replay --trace FILE --blocks N [--policy NAME ...] [--one-pool] [--json FILE]
    tessera bench replay --make-trace FILE [--sessions N] [--seed N]

Prints the hit rate (leading blocks found over blocks asked for) of each policy beside the best that any eviction could
have had (Belady's rule, block by block: an upper bound that drops leaves first) and that of a cache without limit. Each
admission ends before the next one begins. Tenants have equal shares of the pool, as in the daemon, unless --one-pool.
`bench/traces.py` describes the file. It needs no model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.setting import machine_facts, positive
from bench.table import Cell, Report
from bench.traces import Admission, make_sessions, read_trace, write_trace
from cachemgr.belady import best_hit_rate
from cachemgr.blocks import BlockPool
from cachemgr.expiry import expire
from cachemgr.nodes import NEVER
from cachemgr.policies import DEFAULT_POLICY, POLICIES, Policy
from cachemgr.quotas import Quotas
from cachemgr.radix import PrefixIndex
from common.arguments import CommandParser

ROOT = bytes(32)
NS = 1_000_000_000


@dataclass(slots=True)
class Replayed:
    """What came of a replay. `hits` and `asked` are blocks; `refused` admissions were larger than the pool."""

    hits: int = 0
    asked: int = 0
    evicted: int = 0
    expired: int = 0
    refused: int = 0

    @property
    def hit_rate(self) -> float:
        """0..1; 0 where nothing was asked for."""
        return self.hits / self.asked if self.asked else 0.0


class Replay:
    """A pool and an index as the daemon has them, of blocks of one token: each name is one token."""

    def __init__(self, num_blocks: int, policy: Policy, *, one_pool: bool = False) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(num_blocks, 1, self.pool.references, policy)
        self.done = Replayed()
        self._quotas = Quotas(self.pool)
        self._one_pool = one_pool
        self._names: dict[tuple[str, int | str], int] = {}
        self._owners: dict[str, int] = {}

    def admit(self, admission: Admission) -> int:
        """Admits, computes and ends one; returns how many leading blocks were found."""
        count, now_ns = len(admission.blocks), int(admission.time * NS)
        if count > self.pool.num_blocks:
            self.done.refused += 1
            return 0
        if not count:
            return 0
        gone = expire(self.index, now_ns)
        self.pool.unpublish_idle(gone)
        self.done.expired += len(gone)
        owner = self._owners.setdefault("" if self._one_pool else admission.tenant, len(self._owners) + 1)
        tokens = self._tokens(admission)
        expires_ns = now_ns + int(admission.ttl_seconds * NS) if admission.ttl_seconds else NEVER
        tree = self.index.forest.tree(owner, ROOT)
        tree.users = 1  # it stays when all that it held was evicted
        found = self.index.match(tree, tokens, count)
        held = found.blocks
        self.pool.hold_published(held, self.pool.count_idle(held))
        self.index.use(found, admission.priority, expires_ns)
        new = self._allocate(count - len(held), owner)
        table = np.concatenate((held, new))
        if len(new):
            cursor = self.index.cursor(tree, table, len(held))
            self.index.insert(
                cursor, len(held), tokens[4 * len(held) :], new, priority=admission.priority, grow=False,
                expires_ns=expires_ns,
            )  # fmt: skip
            self.pool.publish(new)
        self.pool.unhold_published(table)
        self.index.touch(self.index.cursor(tree, table, count), admission.priority, expires_ns)
        self.done.hits += len(held)
        self.done.asked += count
        return len(held)

    def _allocate(self, count: int, owner: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        for budgets in self._quotas.budgets(owner, count, count - self.pool.num_free):
            missing = count - self.pool.num_free
            if missing <= 0:
                break
            evicted = self.index.evict(budgets, missing)
            self.pool.unpublish_idle(evicted)
            self.done.evicted += len(evicted)
        return self.pool.allocate(count, owner)

    def _tokens(self, admission: Admission) -> bytes:
        names, tenant = self._names, admission.tenant
        numbers = [names.setdefault((tenant, block), len(names)) for block in admission.blocks]
        return np.array(numbers, "<i4").tobytes()


def main(arguments: Sequence[str]) -> int:
    """Replay and print, or make a trace; returns the exit status."""
    parser = CommandParser(
        prog="tessera bench replay",
        description=__doc__.partition("\n")[0] if __doc__ else None,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="admissions, one JSON object a line")
    parser.add_argument("--blocks", type=positive, default=4096, metavar="N", help="blocks of the pool")
    parser.add_argument("--policy", action="append", choices=sorted(POLICIES), help="may be repeated (all of them)")
    parser.add_argument("--one-pool", action="store_true", help="no shares: all tenants as one")
    parser.add_argument("--make-trace", type=Path, metavar="FILE", help="write a made-up trace of conversations")
    parser.add_argument("--sessions", type=positive, default=1000, metavar="N", help="conversations of --make-trace")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of --make-trace")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    options = parser.parse_args(list(arguments))
    if (options.trace is None) == (options.make_trace is None):
        parser.error("one of --trace and --make-trace is needed")
    if options.make_trace is not None:
        write_trace(options.make_trace, make_sessions(options.seed, options.sessions))
        return 0
    try:
        admissions = read_trace(options.trace)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    report = Report("replay", {**machine_facts(), "blocks": options.blocks, "admissions": len(admissions)})
    report.begin()
    rows = compare(admissions, options.blocks, options.policy or list(POLICIES), one_pool=options.one_pool)
    report.table(
        "Hit rate of eviction policies",
        ("policy", "hit rate", "of the best %", "evicted blocks", "expired blocks", "refused"),
        rows,
    )
    report.note(
        f"{DEFAULT_POLICY} is the daemon's. Best: Belady's rule over blocks in the same pool, an upper bound for every "
        "policy. Infinite: nothing is ever dropped. Refused: admissions larger than the pool, left out of all rates."
    )
    report.write_json(options.json)
    return 0


def compare(
    admissions: Sequence[Admission], num_blocks: int, policies: Sequence[str], *, one_pool: bool = False
) -> list[list[Cell]]:
    """One row a policy, then the two limits."""
    chains = [[(item.tenant, block) for block in item.blocks] for item in admissions]
    limits = best_hit_rate(chains, num_blocks)
    rows: list[list[Cell]] = []
    for name in policies:
        replay = Replay(num_blocks, POLICIES[name], one_pool=one_pool)
        for admission in admissions:
            replay.admit(admission)
        done = replay.done
        part = 100.0 * done.hit_rate / limits.best if limits.best else None
        rows.append([name, done.hit_rate, part, done.evicted, done.expired, done.refused])
    rows.append(["best (Belady)", limits.best, 100.0 if limits.best else None, None, None, None])
    rows.append(["infinite", limits.infinite, None, None, None, None])
    return rows
