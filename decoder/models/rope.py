"""Rotary embeddings and their scalings: the angles that belong to each position of a model, decided once at load.

Owns the rule that angles depend on the model's settings and on the configured maximum context alone, never on the
length of a sequence: keys stay in the cache and are read by prompts of any length, so a key must not have two
rotations. Where a scaling is defined by the sequence's length (dynamic, longrope), the configured maximum takes its
place. Used by the CPU step, and by any other backend, which must use the same tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROPE_KINDS: Final[tuple[RopeKind, ...]] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary settings of a model, or of those of its layers that have settings of their own.

    theta:             base of the frequencies
    dim:               columns of a head that are rotated, from the first on, half against half; even
    kind:              the scaling
    factor:            linear, dynamic, llama3, yarn: how many times the trained context is stretched
    original_context:  tokens of the trained context: dynamic, llama3, yarn, longrope
    attention_factor:  cosines and sines are multiplied by it (yarn, longrope; else 1)
    low_frequency_factor, high_frequency_factor:  llama3: which wavelengths are kept, and which are stretched
    beta_fast, beta_slow, truncate:               yarn: rotations that bound the ramp, and whether it ends at integers
    short_factors, long_factors:                  longrope: a divisor for each of the dim / 2 frequencies, for maximum
                       contexts of at most `original_context` tokens, and for longer ones
    """

    theta: float
    dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def uses_long_factors(self, max_context: int) -> bool:
        """Whether a node that serves contexts of up to `max_context` tokens rotates by `long_factors`."""
        return self.kind == "longrope" and max_context > self.original_context

    def identity(self, max_context: int) -> str:
        """Everything that the angles depend on, as text for a digest."""
        if self.kind == "default":
            return f"rope/default/theta={self.theta!r}/dim={self.dim}"
        used = self.long_factors if self.uses_long_factors(max_context) else self.short_factors
        stretched = max(max_context, self.original_context) if self.kind == "dynamic" else self.original_context
        return (
            f"rope/{self.kind}/theta={self.theta!r}/dim={self.dim}/factor={self.factor!r}/original={stretched}"
            f"/attention={self.attention_factor!r}/low={self.low_frequency_factor!r}/high={self.high_frequency_factor!r}"
            f"/fast={self.beta_fast!r}/slow={self.beta_slow!r}/truncate={self.truncate}/divisors={used!r}"
        )


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all: float | None = None) -> float:
    """The attention factor where a model names none (YaRN, Peng et al. 2023, section 3.4)."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)


def longrope_attention_factor(factor: float, original_context: int) -> float:
    """The attention factor where a model names none (LongRoPE, Ding et al. 2024, as in Phi-3)."""
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original_context))


def frequencies(rope: RopeConfig, max_context: int) -> NDArray[np.float32]:
    """Radians a token, float32 [dim / 2], of a node that serves contexts of up to `max_context` tokens."""
    theta, dim = rope.theta, rope.dim
    if rope.kind == "dynamic" and max_context > rope.original_context:
        stretch = rope.factor * max_context / rope.original_context - (rope.factor - 1.0)
        theta *= stretch ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    if rope.kind == "longrope":
        factors = rope.long_factors if rope.uses_long_factors(max_context) else rope.short_factors
        result = 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponents)
    else:
        result = 1.0 / theta**exponents
    if rope.kind == "linear":
        result = result / rope.factor
    elif rope.kind == "llama3":
        result = _stretch_long_waves(rope, result)
    elif rope.kind == "yarn":
        kept = _yarn_kept(rope)
        result = 1.0 / (rope.factor * theta**exponents) * (1.0 - kept) + result * kept
    values: NDArray[np.float32] = result.to(torch.float32).numpy()
    return values


def _stretch_long_waves(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: short waves stay, long ones are stretched by the factor, those between by a mix."""
    waves = 2.0 * math.pi / plain
    short = rope.original_context / rope.high_frequency_factor
    long = rope.original_context / rope.low_frequency_factor
    mix = (rope.original_context / waves - rope.low_frequency_factor) / (
        rope.high_frequency_factor - rope.low_frequency_factor
    )
    between = (1.0 - mix) * plain / rope.factor + mix * plain
    return torch.where(waves > long, plain / rope.factor, torch.where(waves < short, plain, between))


def _yarn_kept(rope: RopeConfig) -> torch.Tensor:
    """The share of each frequency that is not stretched (YaRN, section 3.2)."""

    def dimension(rotations: float) -> float:
        wave = rope.original_context / (rotations * 2.0 * math.pi)
        return rope.dim * math.log(wave) / (2.0 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 0.001
    return 1.0 - ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)


def rotary_tables(rope: RopeConfig, max_context: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, both float32 [max_context, dim / 2], times the attention factor.

    RoFormer (Su et al. 2021, section 3.2).
    """
    angles = np.arange(max_context, dtype=np.float32)[:, None] * frequencies(rope, max_context)
    cosines, sines = np.cos(angles), np.sin(angles)
    if rope.attention_factor != 1.0:
        cosines *= np.float32(rope.attention_factor)
        sines *= np.float32(rope.attention_factor)
    return cosines, sines
