"""What is asked and how far it is: requests, their parameters, and the sequences that run for them.

Owns the bookkeeping of one sequence: its tokens, its block table and what the daemon has been told of it. Invariant:
`num_computed <= num_tokens`, the table covers every computed token, and `reported_tokens <= num_tokens`; what launched
steps bring is counted apart until it is known to be there. Changed by the scheduler and the engine alone; knows no
clock, socket, model or other sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NewType

import numpy as np
from numpy.typing import NDArray

from common.layout import NULL_BLOCK
from decoder.draft_pace import DraftPace

if TYPE_CHECKING:
    from decoder.adapter_pool import AdapterUse
    from decoder.prompt_logprobs import PromptScores
    from decoder.structure import Constraint, SampleStructure

SequenceId = NewType("SequenceId", int)
LeaseId = NewType("LeaseId", int)
RequestNumber = NewType("RequestNumber", int)

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; ranges as in `inference.proto`, already checked. `temperature` 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_samples: int = 1

    bad_ids: frozenset[int] = frozenset()

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When a sample ends. `stop_ids` hold the model's end-of-sequence ids too, unless they are ignored."""

    max_tokens: int
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()


class SpeculationMode(Enum):
    """A way of guessing tokens ahead."""

    PROMPT_LOOKUP = "prompt_lookup"
    DRAFT_MODEL = "draft_model"


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """How tokens are guessed ahead, and at most how many in a step (>= 1)."""

    mode: SpeculationMode
    draft_tokens: int


@dataclass(frozen=True, slots=True)
class BeamParams:
    """A search of `width` (>= 1) hypotheses; a score is a sum of log-probabilities / length ** `length_penalty`."""

    width: int
    length_penalty: float = 0.0


@dataclass(frozen=True, slots=True)
class ScopePrefix:
    """The first `num_tokens` tokens of a prompt lie in the scope of `group`, or, where that is empty, in the public
    one; there 0 is the longest approved prefix."""

    group: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to answer it. `number` is unique for its sink; `request_id` is unique on the node.

    max_context:    bounds prompt and answer together; 0 is no bound
    cache_ttl_seconds: after whose last use its blocks expire; 0: never
    session_handle: of the kept conversation that comes before `prompt`, whose tokens are not known yet; empty: none
    session_tokens: of that conversation to go on from; 0: all
    keep_seconds:   that each sample is kept after its end; 0: not at all
    adapter:        that its tokens are computed with; None: the base
    tenant:         whose turn in the queue it takes, and nothing else; "" is a tenant like any other
    tenant_weight:  its part of the decoder where tenants compete, finite and > 0
    """

    number: RequestNumber
    request_id: str
    grant: bytes = field(repr=False)
    prompt: IntArray = field(repr=False)
    sampling: SamplingParams
    stopping: StoppingParams
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    constraint: Constraint | None = field(default=None, repr=False, compare=False)
    no_read: bool = False
    no_store: bool = False
    priority: int = 0
    cache_priority: int = 50
    cache_ttl_seconds: float = 0.0
    scope: ScopePrefix | None = None
    max_context: int = 0
    session_handle: bytes = field(default=b"", repr=False)
    session_tokens: int = 0
    keep_seconds: float = 0.0
    speculation: SpeculationParams | None = None
    beam: BeamParams | None = None
    adapter: AdapterUse | None = field(default=None, repr=False, compare=False)
    tenant: str = ""
    tenant_weight: float = 1.0

    @property
    def adapter_digest(self) -> bytes:
        """Of its adapter's content; empty for the base."""
        return b"" if self.adapter is None else self.adapter.digest


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """One copy-on-write: the first `num_tokens` tokens of block `source` go to block `target`."""

    source: int
    target: int
    num_tokens: int


class SequenceState(Enum):
    """Where a sequence is. Blocks are held in RUNNING alone; in ACQUIRING and FORKING they are on their way."""

    WAITING = "waiting"
    ACQUIRING = "acquiring"
    FORKING = "forking"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One sample of a request on its way: tokens, table and state.

    A *trunk* is the one sequence that computes the prompt of a request with several samples; it stops being one
    when the first tokens of all samples have been drawn from its logits.
    """

    __slots__ = (
        "_table", "_tokens", "admitted", "cached_tokens", "copied", "copy", "finishing", "group", "in_flight",
        "is_trunk", "last_step", "lease", "num_blocks", "num_computed", "num_tokens", "pace", "paused", "penalties",
        "places", "promised", "rank", "reported_sealed", "reported_tokens", "request", "sample", "scores",
        "sequence_id", "shared", "state", "structure", "taken", "tenure",
    )  # fmt: skip

    def __init__(self, sequence_id: SequenceId, request: Request, sample: int, arrival: int, *, is_trunk: bool) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.sample = sample
        self.rank = (-request.priority, arrival, sample)  # smaller is served first and preempted last
        self.is_trunk = is_trunk
        self.state = SequenceState.WAITING
        self.paused = False
        self.admitted = False
        self.finishing = False  # its reader ended it while it had no blocks; it is kept when it has some
        self.cached_tokens = 0
        self.num_tokens = len(request.prompt)
        self.num_computed = 0
        self._tokens: IntArray = np.empty(self.num_tokens + 64, np.int32)
        self._tokens[: self.num_tokens] = request.prompt
        self._table: IntArray = np.full(8, NULL_BLOCK, np.int32)
        self.penalties: object | None = None
        self.pace: DraftPace | None = None
        self.structure: SampleStructure | None = None  # how far it is in its constraint
        self.scores: PromptScores | None = None  # the request's, where the prompt's tokens are to be scored
        self.group: object | None = None  # the beam group that it is a member of
        self.places = 1  # in the batch that it takes, those of branches to come included
        self.shared = self.num_tokens  # tokens that a branch shares with what it is forked from
        self.last_step = 0  # the newest launched step that writes its blocks, by number
        self.tenure = 0  # changes with each lease
        self._forget_lease()

    def _forget_lease(self) -> None:
        self.lease: LeaseId | None = None
        self.copy: CopyPlan | None = None
        self.copied = False
        self.taken: list[int] = []
        self.num_blocks = 0
        self.num_computed = 0
        self.in_flight = 0  # tokens after the computed ones that launched steps compute
        self.promised = 0  # tokens after the known ones that launched steps draw
        self.tenure += 1
        self.reported_tokens = 0
        self.reported_sealed = 0

    @property
    def tokens(self) -> IntArray:
        """int32 [num_tokens], the prompt and what was generated; a view."""
        return self._tokens[: self.num_tokens]

    @property
    def table(self) -> IntArray:
        """int32 [num_blocks], the block table; a view."""
        return self._table[: self.num_blocks]

    @property
    def adapter(self) -> Any:
        """The adapter as a batch holds it; None: the base."""
        use = self.request.adapter
        return None if use is None else use.weights

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        """Tokens that this sample has gained."""
        return self.num_tokens - len(self.request.prompt)

    @property
    def length(self) -> int:
        """Tokens, those included that launched steps draw."""
        return self.num_tokens + self.promised

    @property
    def launched(self) -> int:
        """Tokens that are computed, or will be by launched steps."""
        return self.num_computed + self.in_flight

    @property
    def remaining(self) -> int:
        """Tokens that no step computes yet; 1 in plain decoding."""
        return self.num_tokens + self.promised - self.num_computed - self.in_flight

    @property
    def is_last_promised(self) -> bool:
        """Whether a launched step draws the last token that it may have."""
        return self.promised > 0 and self.length - self.num_prompt >= self.request.stopping.max_tokens

    @property
    def next_token(self) -> int | None:
        """The first token that no step computes yet; None while it is only promised."""
        place = self.num_computed + self.in_flight
        return int(self._tokens[place]) if place < self.num_tokens else None

    @property
    def last_kv_tokens(self) -> int:
        """Tokens whose keys and values will ever be written: the last sampled one is never computed."""
        return len(self.request.prompt) + self.request.stopping.max_tokens - 1

    def begin_with(self, request: Request) -> None:
        """The tokens before the prompt are known now: `request` has all of them as its prompt. None was generated."""
        self.request = request
        self.num_tokens = len(request.prompt)
        self._tokens = np.empty(self.num_tokens + 64, np.int32)
        self._tokens[: self.num_tokens] = request.prompt

    def begin_as(self, parent: Sequence) -> None:
        """Become a branch of `parent`, all of whose tokens are computed; its lease is on its way."""
        self.shared = self.num_tokens = parent.num_tokens
        self._tokens = np.empty(self.num_tokens + 64, np.int32)
        self._tokens[: self.num_tokens] = parent.tokens
        self.admitted = True
        self.state = SequenceState.FORKING

    def append_token(self, token: int) -> None:
        """Add one sampled token."""
        if self.num_tokens == len(self._tokens):
            grown = np.empty(2 * self.num_tokens, np.int32)
            grown[: self.num_tokens] = self._tokens
            self._tokens = grown
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1

    def hold(self, lease: LeaseId, blocks: IntArray, computed: int, known: int, copy: CopyPlan | None) -> None:
        """Take a lease: `blocks` is its table, `computed` tokens need no computing, the daemon knows `known` tokens."""
        self._forget_lease()
        self.lease = lease
        self.num_computed = computed
        self.reported_sealed = computed
        self.reported_tokens = known
        self.copy = copy
        self.num_blocks = len(blocks)
        if len(blocks) > len(self._table):
            self._table = np.full(2 * len(blocks), NULL_BLOCK, np.int32)
        self._table[: len(blocks)] = blocks
        self.state = SequenceState.RUNNING

    def drop_lease(self) -> None:
        """Forget lease and table; the tokens stay, all of them to be computed again."""
        self._forget_lease()

    def append_block(self, block: int) -> None:
        """Put a block of the session's credit at the end of the table; the next report tells the daemon."""
        if self.num_blocks == len(self._table):
            grown = np.full(2 * self.num_blocks, NULL_BLOCK, np.int32)
            grown[: self.num_blocks] = self._table
            self._table = grown
        self._table[self.num_blocks] = block
        self.num_blocks += 1
        self.taken.append(block)

    def replace_blocks(self, first_index: int, blocks: IntArray) -> None:
        """Use published `blocks` from `first_index` of the table on. Raises ValueError outside the table."""
        if first_index < 0 or first_index + len(blocks) > self.num_blocks:
            raise ValueError(f"replacement {first_index}+{len(blocks)} lies outside a table of {self.num_blocks}")
        self._table[first_index : first_index + len(blocks)] = blocks
