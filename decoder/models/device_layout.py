"""Where each tensor of a model lies in the memory of a device: names, shapes, types and offsets, from the config alone.

Invariant: two processes with the same config and type have the same places, so that one may read what the other laid
down; whatever changes them changes `digest`. Offsets are multiples of `ALIGNMENT`, and the first bytes are nobody's: a
header may stand there. Used by `device_weights.py`; it holds no memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from decoder.models.config import ExpertsConfig, ModelConfig, refuse
from decoder.models.rope import RopeConfig

ALIGNMENT: Final = 256
FIRST_OFFSET: Final = 4096
MAX_EXPERTS: Final = 1024


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor. `sources` are those of the common form that it joins, by rows; a rotary table has none."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """All tensors of a model, in the order in which they lie.

    num_bytes: end of the last one
    ropes:     settings of the rotary tables `rope.<index>.cosines` and `.sines`
    """

    places: dict[str, Place]
    num_bytes: int
    ropes: tuple[RopeConfig, ...]

    def digest(self) -> bytes:
        """32 bytes that follow from every name, source, shape, type and offset."""
        lines = [f"{it.name}|{it.sources}|{it.shape}|{it.dtype}|{it.offset}" for it in self.places.values()]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=32, person=b"tessera-places").digest()


def device_layout(config: ModelConfig, dtype: torch.dtype) -> DeviceLayout:
    """The layout of a model whose matrices are of `dtype`. Raises InvalidArgument, by name, on a setting that the
    device step does not compute."""
    if config.experts is not None and config.experts.count > MAX_EXPERTS:
        raise refuse("experts.count", config.experts.count, f"at most {MAX_EXPERTS} experts on a GPU")
    ropes = tuple(dict.fromkeys(config.layer_rope(layer) for layer in range(config.num_layers)))
    places, offset = {}, FIRST_OFFSET
    for it in _tensors(config, dtype, ropes):
        places[it.name] = Place(it.name, it.sources, it.shape, it.dtype, offset)
        offset += -(-it.num_bytes // ALIGNMENT) * ALIGNMENT
    return DeviceLayout(places, offset, ropes)


def _tensors(config: ModelConfig, dtype: torch.dtype, ropes: tuple[RopeConfig, ...]) -> Iterator[Place]:
    hidden, queries, keys = config.hidden_size, config.query_size, config.kv_size
    inner, float32 = config.intermediate_size, torch.float32
    for index, rope in enumerate(ropes):
        for part in ("cosines", "sines"):
            yield Place(f"rope.{index}.{part}", (), (config.max_position, rope.dim // 2), float32)
    for index in range(config.num_layers):
        prefix, own = f"model.layers.{index}.", f"layer.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        after, before = f"{prefix}post_attention_layernorm.weight", f"{prefix}pre_feedforward_layernorm.weight"
        projections = [f"{attention}{name}_proj" for name in "qkv"]
        yield Place(f"{own}input_norm", (f"{prefix}input_layernorm.weight",), (hidden,), float32)
        yield Place(f"{own}qkv", tuple(f"{it}.weight" for it in projections), (queries + 2 * keys, hidden), dtype)
        if config.qkv_bias:
            yield Place(f"{own}qkv_bias", tuple(f"{it}.bias" for it in projections), (queries + 2 * keys,), dtype)
        if config.qk_norms:
            for part, name in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
                yield Place(f"{own}{part}", (f"{attention}{name}.weight",), (config.head_dim,), float32)
        yield Place(f"{own}output", (f"{attention}o_proj.weight",), (hidden, queries), dtype)
        if config.output_bias:
            yield Place(f"{own}output_bias", (f"{attention}o_proj.bias",), (hidden,), dtype)
        if config.post_norms:
            yield Place(f"{own}attention_post_norm", (after,), (hidden,), float32)
        yield Place(f"{own}mlp_norm", (before if config.post_norms else after,), (hidden,), float32)
        if config.experts is not None and config.layers[index].experts:
            yield from _experts(config.experts, own, mlp, hidden, dtype)
        else:
            yield from _gated(own, mlp, inner, hidden, dtype)
            if config.mlp_bias:
                biases = tuple(f"{mlp}{it}_proj.bias" for it in ("gate", "up"))
                yield Place(f"{own}gate_up_bias", biases, (2 * inner,), dtype)
                yield Place(f"{own}down_bias", (f"{mlp}down_proj.bias",), (hidden,), dtype)
        if config.post_norms:
            yield Place(f"{own}mlp_post_norm", (f"{prefix}post_feedforward_layernorm.weight",), (hidden,), float32)
    yield Place("embedding", ("model.embed_tokens.weight",), (config.vocab_size, hidden), dtype)
    yield Place("final_norm", ("model.norm.weight",), (hidden,), float32)
    if not config.tie_embeddings:
        yield Place("head", ("lm_head.weight",), (config.vocab_size, hidden), dtype)


def _gated(own: str, source: str, inner: int, hidden: int, dtype: torch.dtype) -> Iterator[Place]:
    both = tuple(f"{source}{it}_proj.weight" for it in ("gate", "up"))
    yield Place(f"{own}gate_up", both, (2 * inner, hidden), dtype)
    yield Place(f"{own}down", (f"{source}down_proj.weight",), (hidden, inner), dtype)


def _experts(experts: ExpertsConfig, own: str, source: str, hidden: int, dtype: torch.dtype) -> Iterator[Place]:
    """The router in float32, with the gate of the shared expert as one row more; matrices of all experts, by rows."""
    count, inner = experts.count, experts.inner
    router = [f"{source}gate.weight"]
    if experts.shared:
        router.append(f"{source}shared_expert_gate.weight")
        yield from _gated(f"{own}shared_", f"{source}shared_expert.", experts.shared, hidden, dtype)
    yield Place(f"{own}router", tuple(router), (count + len(router) - 1, hidden), torch.float32)
    each = [f"{source}experts.{index}." for index in range(count)]
    both = tuple(f"{expert}{it}_proj.weight" for expert in each for it in ("gate", "up"))
    yield Place(f"{own}expert_gate_up", both, (count * 2 * inner, hidden), dtype)
    yield Place(f"{own}expert_down", tuple(f"{it}down_proj.weight" for it in each), (count * hidden, inner), dtype)
