"""How much work a step is: bytes it must read, operations it must do, and the prompts the benches send.

Pure arithmetic over a model's sizes; the fraction of the machine's limit that a bench prints is this work over the
rates of `bench/limits.py`, over the time that was measured. It never measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.layout import KvLayout
from decoder.models.config import ModelConfig

# Ids below this are special tokens in the models we serve; ordinary text begins above.
FIRST_ORDINARY_ID = 300


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The two rates that bound a step, measured by `bench/limits.py` in the same run.

    step_bytes_per_second: bytes a second from a working set as large as the model's weights
    operations_per_second: multiplications and additions a second of the model's own matrices
    """

    step_bytes_per_second: float
    operations_per_second: float


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Work of one model in one dtype."""

    config: ModelConfig
    layout: KvLayout

    @property
    def layer_parameters(self) -> int:
        """Numbers in the matrices of all layers."""
        config = self.config
        attention = config.hidden_size * (2 * config.query_size + 2 * config.kv_size)
        return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)

    @property
    def head_parameters(self) -> int:
        """Numbers in the output matrix (the embedding itself where the two are tied)."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that every step reads once, whatever its batch: all layers and the output matrix."""
        return (self.layer_parameters + self.head_parameters) * self.layout.dtype.itemsize

    def kv_bytes(self, contexts: Sequence[float]) -> float:
        """Bytes of keys and values that one step reads for sequences of these lengths (tokens)."""
        return sum(contexts) * self.layout.token_bytes

    def operations(self, num_tokens: int, cached_tokens: int, num_logits: int = 1) -> float:
        """Multiplications and additions to compute `num_tokens` tokens that follow `cached_tokens` others."""
        config = self.config
        linear = 2.0 * num_tokens * self.layer_parameters + 2.0 * num_logits * self.head_parameters
        # Token i sees cached + i + 1 others: one product for the scores and one for the mix, over every layer.
        seen = num_tokens * cached_tokens + num_tokens * (num_tokens + 1) / 2.0
        return linear + 4.0 * config.num_layers * config.query_size * seen

    def decode_limit_seconds(self, contexts: Sequence[float], limits: MachineLimits) -> float:
        """Least time of a step that adds one token to each sequence: the slower of its reads and its arithmetic."""
        reads = (self.weight_bytes + self.kv_bytes(contexts)) / limits.step_bytes_per_second
        operations = sum(self.operations(1, int(context)) for context in contexts)
        return max(reads, operations / limits.operations_per_second)

    def prefill_limit_seconds(self, num_tokens: int, cached_tokens: int, limits: MachineLimits) -> float:
        """Least time to the first token of a prompt of which `cached_tokens` are cached."""
        fresh = num_tokens - cached_tokens
        reads = (self.weight_bytes + self.kv_bytes([num_tokens])) / limits.step_bytes_per_second
        return max(reads, self.operations(fresh, cached_tokens) / limits.operations_per_second)


def random_prompt(seed: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """Token ids that look like text to an engine: few ids are common and most are rare; equal seeds, equal prompts."""
    generator = np.random.default_rng(list(seed))
    ordinary = vocab_size - FIRST_ORDINARY_ID
    if ordinary < 1:
        raise ValueError(f"vocab_size is {vocab_size}; allowed is more than {FIRST_ORDINARY_ID}")
    ranks = np.minimum(generator.zipf(1.3, num_tokens) - 1, 2**40) % ordinary
    order = np.random.default_rng(seed=1).permutation(ordinary)
    ids = order[ranks]
    ids[:1] = generator.integers(ordinary)  # so that two prompts hardly ever begin alike
    return [int(token) for token in ids + FIRST_ORDINARY_ID]


def shared_prompts(
    seed: int, count: int, num_tokens: int, shared_tokens: int, vocab_size: int, salt: int = 0
) -> list[list[int]]:
    """`count` prompts that agree in their first `shared_tokens` tokens (of `seed` alone) and differ after them."""
    shared = random_prompt([seed, 0], shared_tokens, vocab_size)
    own = num_tokens - shared_tokens
    return [shared + random_prompt([seed, 1, salt, index], own, vocab_size) for index in range(count)]
