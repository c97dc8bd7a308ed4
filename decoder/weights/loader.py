"""Loads a model: opens the source, checks every tensor's name and shape, and builds the model.

Invariant: a model is loaded completely or not at all. A tensor that is missing, has another shape or is not used
by the model ends the load with an InvalidArgument that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from common.errors import InvalidArgument
from common.layout import KvDtype, KvLayout
from decoder.models.config import ModelConfig, digest_config, refuse
from decoder.models.llama import CausalLM
from decoder.weights.source import open_source

Progress = Callable[[str, float], None]

# Tensors some exporters add; they are functions of the configuration.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Llama model with this configuration."""
    hidden, inner = config.hidden_size, config.intermediate_size
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
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


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


def load_model(
    path: Path,
    dtype: Literal["float32", "bfloat16"],
    block_tokens: int,
    kv_dtype: str | None = None,
    threads: int = 0,
    progress: Progress | None = None,
) -> CausalLM:
    """Load a `.gguf` file or a Hugging Face directory.

    dtype:        type of weights and matmul inputs; sums are float32
    block_tokens: tokens of one KV block
    kv_dtype:     type of stored keys and values; None means `dtype`. "float32" beside bfloat16 weights also keeps
                  queries, attention and matmul inputs from being rounded to bfloat16
    threads:      threads of a step; 0 means every CPU this process may run on
    progress:     called with a stage's name and the fraction done

    Raises InvalidArgument naming what is wrong or not served.
    """
    if dtype not in ("float32", "bfloat16"):
        raise refuse("dtype", dtype, "'float32' or 'bfloat16'")
    kv_dtype = kv_dtype or dtype
    if kv_dtype not in (dtype, "float32"):
        raise refuse("kv_dtype", kv_dtype, " or ".join(repr(name) for name in dict.fromkeys((dtype, "float32"))))
    report = progress or (lambda stage, fraction: None)
    report("open", 0.0)
    source = open_source(path)
    config = source.config
    check_shapes(source.shapes(), config)
    layout = KvLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_tokens, KvDtype(kv_dtype))
    report("digest", 0.0)
    digests = digest_config(config, source.digest(), dtype)
    model = CausalLM(
        config, layout, digests, source.read, threads, lambda done: report("weights", done), dtype=KvDtype(dtype)
    )
    report("weights", 1.0)
    return model
