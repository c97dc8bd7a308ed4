"""Whose turn it is: deficit round robin over tenants, by tokens (Shreedhar & Varghese, "Efficient Fair Queuing Using
Deficit Round Robin", SIGCOMM 1995, section 3).

Owns one account a tenant. A round brings every tenant that waits one quantum of tokens times its weight; who has at
least the cost of its first request may be served, and within a round tenants take turns, a request each. A new round
begins when nobody who waits can pay, and not before.

Invariant: what a waiting tenant has is below a quantum (by weight) and its first request's cost, or paid for by an
earlier `refund`; a tenant that waits for nothing has no more than 0. So two tenants that both wait throughout gain
tokens by their weights, up to one quantum and one largest request each, however many requests either has. What is
charged after the service (tokens of an answer, as they come) makes debts: each round pays for them whether or not the
debtor waits, and a debt is never above `DEBT_ROUNDS` rounds, so that nobody pays for long for an hour alone.
Rounds that serve nobody are skipped at once, so a small quantum costs nothing.

Used by the admission queue. Pure: no clock, and nothing about what is cached.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

DEBT_ROUNDS: Final = 128


@dataclass(frozen=True, slots=True)
class Head:
    """The first request of a tenant that waits: what it costs in tokens, and the tenant's weight (finite, > 0)."""

    cost: int
    weight: float


@dataclass(slots=True)
class _Account:
    tokens: float
    weight: float
    last_turn: int


class FairShares:
    """The accounts of all tenants. `quantum` is the tokens of weight 1 in a round."""

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._accounts: dict[str, _Account] = {}
        self._turns = 0

    def choose(self, heads: Mapping[str, Head]) -> str | None:
        """The tenant to serve, of those that wait; charges nothing. None where nobody waits."""
        if not heads:
            return None
        self._enter(heads)
        while True:
            ready = [name for name, head in heads.items() if self._accounts[name].tokens >= head.cost]
            if ready:
                return min(ready, key=lambda name: (self._accounts[name].last_turn, name))
            self._advance(min(self._rounds_until(name, head) for name, head in heads.items()), heads)

    def serve(self, tenant: str, tokens: int) -> None:
        """A chosen tenant's request of that cost goes; its next one comes after everybody else's of this round."""
        self._turns += 1
        account = self._accounts.get(tenant)
        if account is not None:
            account.last_turn = self._turns
        self.charge(tenant, tokens)

    def charge(self, tenant: str, tokens: int, weight: float = 1.0) -> None:
        """A tenant was given so many tokens of work. `weight` is for one that has no account yet."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(0.0, weight, 0)
        account.tokens = max(account.tokens - tokens, -DEBT_ROUNDS * self._quantum * account.weight)

    def refund(self, tenant: str, tokens: int) -> None:
        """So much of what a tenant was charged for was no work after all."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.tokens += tokens

    def clear(self) -> None:
        """Forget everyone."""
        self._accounts.clear()

    def __len__(self) -> int:
        return len(self._accounts)

    def _enter(self, heads: Mapping[str, Head]) -> None:
        for name, head in heads.items():
            account = self._accounts.get(name)
            if account is None:  # its first quantum comes with the next round: leaving and coming back gains nothing
                self._accounts[name] = _Account(0.0, head.weight, self._turns)
            else:
                account.weight = head.weight
        for name in [name for name, account in self._accounts.items() if name not in heads and account.tokens >= 0]:
            del self._accounts[name]

    def _rounds_until(self, name: str, head: Head) -> int:
        account = self._accounts[name]
        return max(1, math.ceil((head.cost - account.tokens) / (self._quantum * account.weight)))

    def _advance(self, rounds: int, heads: Mapping[str, Head]) -> None:
        for name, account in list(self._accounts.items()):
            account.tokens += rounds * self._quantum * account.weight
            if name not in heads and account.tokens >= 0:
                del self._accounts[name]
