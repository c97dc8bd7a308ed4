"""Requests: who asks what, and what the answer must be.

Prompts are cut from a few documents that all tenants share, over a tiny vocabulary, so that prefixes meet, diverge and
meet again all the time. The right answer is a function of the prompt alone; whatever the cache does must not show.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cachemgr.ids import TenantId
from tests.simulation.kernel import Kernel
from tests.simulation.memory import cells_of, extend, root_cell

if TYPE_CHECKING:
    from tests.simulation.decoder import SimDecoder
    from tests.simulation.scenario import Scenario

VOCABULARY = 3


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
        # The roots of two tenants never meet in truth; here they do, and the owner alone must keep them apart.
        root = b"key-%d" % key if scenario.shared_roots else b"key-%d-%d" % (owner, key)
        if kept is not None:
            owner, root = kept.owner, kept.root
        request = Request(
            number=len(self.requests) + 1,
            tenant=TenantId(f"tenant-{owner}"),
            owner=owner,
            root=root.ljust(32, b"."),
            keep=scenario.keeps and kernel.chance(0.5),
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
