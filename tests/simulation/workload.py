"""Requests: who asks what, and what the answer must be.

Prompts are cut from a few documents that all tenants share, over a tiny vocabulary, so that prefixes meet, diverge and
meet again all the time. The right answer is a function of the prompt alone; whatever the cache does must not show.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cachemgr.ids import TenantId
from cachemgr.results import ScopeSpan
from common.tokens import pack_tokens
from tests.simulation.kernel import Kernel
from tests.simulation.memory import PUBLIC, TEAM, TEAM_MEMBERS, cells_of, extend, root_cell

if TYPE_CHECKING:
    from tests.simulation.decoder import SimDecoder
    from tests.simulation.scenario import Scenario

VOCABULARY = 3
SCOPE_NAMES = {PUBLIC: TenantId("@public"), TEAM: TenantId("@group:team")}


def span_of(scope: int, root: bytes, num_tokens: int) -> ScopeSpan | None:
    """The prefix of a request, for the manager. Its root begins like its tenants: equal content looks equal."""
    if not num_tokens:
        return None
    return ScopeSpan(SCOPE_NAMES[scope], (root[:8] + SCOPE_NAMES[scope].encode()).ljust(32, b"."), num_tokens)


def next_token(cell: int, sample: int) -> int:
    """What the model says after the content `cell`, for a sample."""
    return (((cell >> 6) * 2654435761 + sample * 40503) >> 16) % VOCABULARY


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and what became of it. `ended` says how; `outputs` are what its client saw, by sample."""

    number: int
    tenant: TenantId
    owner: int
    root: bytes
    prompt: tuple[int, ...]
    max_tokens: int
    samples: int
    no_read: bool
    no_store: bool
    priority: int
    cache_priority: int
    drafts: bool
    keep: bool = False
    base: bytes = b""  # the kept branch that it continues
    ttl_ns: int = 0
    scope: int = 0  # that its first tokens lie in, 0: none
    prefix_tokens: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)
    decoder: SimDecoder | None = None
    counted: bool = False
    ended: str = ""

    @property
    def cell(self) -> int:
        """What stands before its first token."""
        return root_cell(self.owner, self.root)

    def solo(self, sample: int) -> list[int]:
        """The answer of a node that serves nothing else."""
        cell = cells_of(self.cell, self.prompt)[-1]
        tokens: list[int] = []
        while len(tokens) < self.max_tokens:
            tokens.append(next_token(cell, sample))
            cell = extend(cell, tokens[-1])
        return tokens


@dataclass(eq=False, slots=True)
class Conversation:
    """A kept branch as its client knows it. `tokens` are those of the branch."""

    name: bytes
    owner: int
    root: bytes
    tokens: list[int]
    scope: int = 0
    prefix_tokens: int = 0  # whole blocks

    @property
    def tenant(self) -> TenantId:
        """Whose it is."""
        return TenantId(f"tenant-{self.owner}")


class Workload:
    """Draws requests."""

    def __init__(self, kernel: Kernel, scenario: Scenario) -> None:
        self._kernel = kernel
        self._scenario = scenario
        size = scenario.block_tokens
        self._documents = [
            [self._token() for _ in range(kernel.between(2, scenario.document_blocks) * size)] for _ in range(2)
        ]
        self.requests: list[Request] = []
        self.kept: list[Conversation] = []

    def _token(self) -> int:
        return self._kernel.between(0, VOCABULARY - 1)

    def _scope_of(self, prompt: list[int], owner: int, twin: Request | None) -> tuple[int, int]:
        """Which scope a request names, and for how many tokens; mostly that of its twin."""
        kernel = self._kernel
        if twin is not None and kernel.chance(0.7):
            return twin.scope, min(twin.prefix_tokens, len(prompt))
        if kernel.chance(0.3):
            return 0, 0
        scope = TEAM if owner in TEAM_MEMBERS and kernel.chance(0.5) else PUBLIC
        whole = kernel.between(1, 3) * self._scenario.block_tokens + kernel.between(0, 1)
        return scope, min(len(prompt), whole)

    def draw(self) -> Request:
        """The next request."""
        kernel, scenario = self._kernel, self._scenario
        twin = self.requests[-1] if self.requests and kernel.chance(0.4) else None
        if twin is not None and kernel.chance(0.7):
            prompt = list(twin.prompt)
        else:
            document = kernel.random.choice(self._documents)
            prompt = document[: kernel.between(1, len(document))]
            prompt += [self._token() for _ in range(kernel.between(0, scenario.block_tokens + 1))]
        kept = kernel.random.choice(self.kept) if self.kept and kernel.chance(0.5) else None
        if kept is not None:
            prompt = [*kept.tokens, *(self._token() for _ in range(kernel.between(0, scenario.block_tokens + 1)))]
        elif kernel.chance(0.02):
            prompt += [0] * (scenario.num_blocks * scenario.block_tokens)
        owner = twin.owner if twin is not None else kernel.between(1, scenario.num_tenants)
        key = kernel.between(0, 7) == 0
        scope, prefix_tokens = self._scope_of(prompt, owner, twin) if scenario.scopes else (0, 0)
        # The roots of two tenants never meet in truth; here they do, and the owner alone must keep them apart.
        root = b"key-%d" % key if scenario.shared_roots else b"key-%d-%d" % (owner, key)
        if kept is not None:
            owner, root = kept.owner, kept.root
            scope, prefix_tokens = kept.scope, kept.prefix_tokens
        request = Request(
            number=len(self.requests) + 1,
            tenant=TenantId(f"tenant-{owner}"),
            owner=owner,
            root=root.ljust(32, b"."),
            keep=scenario.keeps and kernel.chance(0.5),
            scope=scope,
            prefix_tokens=prefix_tokens,
            base=kept.name if kept is not None else b"",
            ttl_ns=kernel.between(1, 30) * 1_000_000 if not scenario.quotas and kernel.chance(0.15) else 0,
            prompt=tuple(prompt),
            max_tokens=kernel.between(1, scenario.max_tokens),
            samples=kernel.between(2, 3) if kernel.chance(0.2) else 1,
            no_read=kernel.chance(0.07),
            no_store=kernel.chance(0.07),
            priority=kernel.between(0, 1),
            cache_priority=kernel.random.choice((0, 50, 50, 100)),
            drafts=kernel.chance(0.25),
        )
        self.requests.append(request)
        return request

    def approved(self, block_tokens: int) -> Approved:
        """Some beginnings of the documents: what may still be named of a scope."""
        kernel = self._kernel
        lengths = [kernel.between(0, len(document)) // block_tokens * block_tokens for document in self._documents]
        pairs = zip(self._documents, lengths, strict=True)
        return Approved([pack_tokens(np.array(document[:length], np.int32)) for document, length in pairs])


class Approved:
    """What may be named of a scope: whole blocks, packed."""

    def __init__(self, prefixes: list[bytes]) -> None:
        self._prefixes = prefixes

    def covers(self, tokens: bytes) -> bool:
        """Whether one of them begins so."""
        return any(prefix.startswith(tokens) for prefix in self._prefixes)

    def ends(self, tokens: bytes) -> bool:
        """Whether these are one of them."""
        return tokens in self._prefixes
