"""Loads a model: opens the source, checks every tensor's name and shape, and builds the model.

Invariant: a model is loaded completely or not at all. A tensor that is missing, has another shape or is not used
by the model ends the load with an InvalidArgument that names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from common.errors import InvalidArgument
from common.layout import (
    DENSE_DTYPES,
    GROUPED_DTYPES,
    KV_DTYPES,
    WINDOW_SHARE,
    KvDtype,
    KvLayout,
    default_kv_dtype,
)
from common.logs import get_logger
from decoder.kernels import amx
from decoder.kernels.frame import SPAN
from decoder.models.config import ModelConfig, digest_config, refuse
from decoder.models.llama import CausalLM
from decoder.models.packing import Memory
from decoder.models.select import ON_CPU, ComputeDevice, WeightsOf, build_model
from decoder.weights.file_digests import KnownDigests
from decoder.weights.packed_cache import PackedCache
from decoder.weights.source import open_source
from decoder.weights.weight_groups import groups_of

Progress = Callable[[str, float], None]
WeightsDtype = Literal["float32", "bfloat16", "int8", "file"]

# Tensors some exporters add; they are functions of the configuration.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)


def read_tokens(config: ModelConfig, *, in_spans: bool) -> int:
    """`KvLayout.window_tokens` of a model: how far its layers read back, in whole spans where attention reads those; 0
    where one of them reads everything, as far as the model's context goes."""
    windows = [layer.window for layer in config.layers if layer.window is not None]
    widest = max(windows, default=0) + (SPAN - 1 if in_spans else 0)
    return widest if len(windows) == config.num_layers and widest < config.max_position else 0


def layer_windows(config: ModelConfig, *, in_spans: bool) -> tuple[int, tuple[int, ...], int]:
    """`KvLayout.window_tokens`, `window_layers` and `window_share` of a model: where some layers have a window and
    others none, those with one are a group of their own, and the widest of their windows counts; see `read_tokens`.

    A context of no more than a few windows needs as many window blocks as blocks, or the former would lack first.
    """
    with_window = [layer for layer, settings in enumerate(config.layers) if settings.window is not None]
    if not with_window or len(with_window) == config.num_layers:
        return read_tokens(config, in_spans=in_spans), (), WINDOW_SHARE
    windowed = dataclasses.replace(
        config, num_layers=len(with_window), layers=tuple(config.layers[layer] for layer in with_window)
    )
    tokens, widest = (read_tokens(windowed, in_spans=spans) for spans in (in_spans, False))
    if not tokens:
        return 0, (), WINDOW_SHARE
    return tokens, tuple(with_window), max(1, min(WINDOW_SHARE, config.max_position // (2 * widest)))


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model with this configuration, in the common form of `names.py`."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (config.query_size, hidden),
            f"{prefix}self_attn.k_proj.weight": (config.kv_size, hidden),
            f"{prefix}self_attn.v_proj.weight": (config.kv_size, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, config.query_size),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
        if config.qkv_bias:
            shapes[f"{prefix}self_attn.q_proj.bias"] = (config.query_size,)
            shapes |= dict.fromkeys((f"{prefix}self_attn.{name}_proj.bias" for name in "kv"), (config.kv_size,))
        if config.output_bias:
            shapes[f"{prefix}self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norms:
            shapes |= dict.fromkeys((f"{prefix}self_attn.{name}_norm.weight" for name in "qk"), (config.head_dim,))
        if config.post_norms:
            shapes |= {
                f"{prefix}pre_feedforward_layernorm.weight": (hidden,),
                f"{prefix}post_feedforward_layernorm.weight": (hidden,),
            }
        shapes |= _mlp_shapes(config, layer, f"{prefix}mlp.")
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _mlp_shapes(config: ModelConfig, layer: int, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, experts = config.hidden_size, config.experts
    if experts is None or not config.layers[layer].experts:
        dense = _gated_shapes(prefix, hidden, config.intermediate_size)
        if config.mlp_bias:
            dense |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in dense.items()}
        return dense
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}gate.weight": (experts.count, hidden)}
    for index in range(experts.count):
        shapes |= _gated_shapes(f"{prefix}experts.{index}.", hidden, experts.inner)
    if experts.shared:
        shapes |= _gated_shapes(f"{prefix}shared_expert.", hidden, experts.shared)
        shapes[f"{prefix}shared_expert_gate.weight"] = (hidden,)
    return shapes


def _gated_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def check_shapes(found: dict[str, tuple[int, ...]], config: ModelConfig) -> None:
    """Raise InvalidArgument naming the first tensor that is missing, misshapen or unknown."""
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise InvalidArgument("model", f"tensor {name} is missing")
        if found[name] != shape:
            raise InvalidArgument("model", f"tensor {name} has shape {found[name]}; expected {shape}")
    for name in sorted(set(found) - set(expected)):
        if name.endswith(_DERIVED_SUFFIXES) or (name == "lm_head.weight" and config.tie_embeddings):
            continue
        raise InvalidArgument("model", f"tensor {name} is not part of a {config.architecture} model this build serves")


def longest_context(config: ModelConfig) -> int:
    """Tokens of the longest context that a model serves: what it was made for, or with dynamic rope scaling up to
    `factor` times as much."""
    rope = config.rope
    scaled = int(rope.factor * rope.original_context) if rope.kind == "dynamic" else 0
    return max(scaled, config.max_position)


def limit_context(config: ModelConfig, max_context: int) -> ModelConfig:
    """The configuration for contexts of at most `max_context` tokens; 0 leaves it as it is.

    Raises InvalidArgument beyond `longest_context`.
    """
    if not max_context:
        return config
    most = longest_context(config)
    if max_context > most:
        raise InvalidArgument("max_context", f"is {max_context}; this model serves contexts of at most {most} tokens")
    return dataclasses.replace(config, max_position=max_context)


def load_model(
    path: Path,
    dtype: WeightsDtype,
    block_tokens: int,
    kv_dtype: str | None = None,
    threads: int = 0,
    progress: Progress | None = None,
    max_context: int = 0,
    weights_cache: Path | None = None,
    *,
    layer_groups: bool = True,
) -> CausalLM:
    """Load a `.gguf` file or a Hugging Face directory for the CPU; see `load_on`."""
    model: CausalLM = load_on(
        ON_CPU, path, dtype, block_tokens, kv_dtype, threads, progress, max_context, weights_cache,
        layer_groups=layer_groups,
    )  # fmt: skip
    return model


def load_on(
    device: ComputeDevice,
    path: Path,
    dtype: WeightsDtype,
    block_tokens: int,
    kv_dtype: str | None = None,
    threads: int = 0,
    progress: Progress | None = None,
    max_context: int = 0,
    weights_cache: Path | None = None,
    weights_of: WeightsOf | None = None,
    *,
    layer_groups: bool = True,
) -> Any:
    """Load a `.gguf` file or a Hugging Face directory; the model is the one of `build_model`.

    device:       where it computes, as `decoder.models.select.resolve_device` gives it
    dtype:        type of weights; sums are float32. "int8" and "file" are whole numbers in groups, on a CPU alone: 8
                  bits of any model, or those of a GGUF file, taken as they are where Q8_0, Q5_0, Q4_0 or Q4_1 hold them
    block_tokens: tokens of one KV block
    kv_dtype:     type of stored keys and values: one of KV_DTYPES; None means float16 beside bfloat16 weights, float32
                  beside float32. On a CPU "bfloat16" beside bfloat16 weights also rounds queries, attention and matmul
                  inputs to bfloat16
    threads:      threads of a step; 0 means every CPU this process may run on
    progress:     called with a stage's name and the fraction done
    max_context:  tokens of the longest context that will be served, which decides the angles of some rope scalings
                  (`decoder/models/rope.py`); 0 means what the model was made for
    weights_cache: folder of packed weights, which decoders on a CPU share, and of known digests of model files; None:
                  each has its own, and reads the files
    weights_of:   where the weights of another device lie; None: each decoder has its own
    layer_groups: layers with a window lie in window blocks where others read all keys; else blocks hold all layers, as
                  where nobody manages window blocks

    Raises InvalidArgument naming what is wrong or not served.
    """
    if dtype not in (*DENSE_DTYPES, *GROUPED_DTYPES):
        raise refuse("dtype", dtype, " or ".join(map(repr, (*DENSE_DTYPES, *GROUPED_DTYPES))))
    if dtype in GROUPED_DTYPES and device.uses_triton:
        raise refuse("dtype", dtype, "'float32' or 'bfloat16' on this device")
    kv_dtype = kv_dtype or default_kv_dtype(dtype)
    if kv_dtype not in KV_DTYPES:
        raise refuse("kv_dtype", kv_dtype, " or ".join(repr(name) for name in KV_DTYPES))
    report = progress or (lambda stage, fraction: None)
    report("open", 0.0)
    source = open_source(path)
    config = limit_context(source.config, max_context)
    check_shapes(source.shapes(), config)
    in_spans = not device.uses_triton and amx.available()
    windows: tuple[Any, ...] = (read_tokens(config, in_spans=in_spans),)
    if layer_groups:
        windows = layer_windows(config, in_spans=in_spans)
    layout = KvLayout.of(
        config.num_layers, config.num_kv_heads, config.head_dim, block_tokens, kv_dtype, *windows
    )  # fmt: skip
    report("digest", 0.0)
    # Another device sums in another order: its keys and values are not those of the CPU, bit by bit.
    known = None if weights_cache is None else KnownDigests(weights_cache)
    digests = digest_config(config, source.digest(known), f"{dtype}/gpu" if device.uses_triton else dtype)
    groups = groups_of(source, dtype) if dtype in GROUPED_DTYPES else None
    cache = None if weights_cache is None or device.uses_triton else PackedCache(weights_cache, digests, dtype)
    with cache.locked() if cache else contextlib.nullcontext():
        model = build_model(
            device,
            config,
            layout,
            digests,
            source.read,
            threads,
            lambda done: report("weights", done),
            KvDtype.FLOAT32 if groups else KvDtype(dtype),
            cache.make_memory if cache else Memory,
            weights_of,
            groups,
        )
    if groups is not None and groups.anew and dtype == "file":
        get_logger().warning("weights_quantised_anew", bits=8, count=len(groups.anew), tensors=groups.anew)
    report("weights", 1.0)
    return model
