"""Interprets the metadata of a GGUF file, and what the format leaves to its readers.

Owns the same rule as `hugging_face_config.py`: understood or refused by name. Rotary divisors are tensors in this
format and are handed in. Called by `source.py` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from common.errors import InvalidArgument
from common.families import GGUF_ARCHITECTURES
from decoder.models.config import ExpertsConfig, LayerConfig, ModelConfig, refuse
from decoder.models.rope import RopeConfig, longrope_attention_factor, yarn_attention_factor

# The largest models of two families scale queries by the width of a head of hidden_size / num_heads columns.
_WIDE_QUERY_SCALE: Final = {("gemma2", 46), ("gemma3_text", 62)}
_REFUSED: Final = ("attention.layer_norm_epsilon", "expert_shared_count", "expert_group_count", "rope.scaling.alpha")

Field = Callable[..., Any]


def config_from_gguf(
    fields: Mapping[str, Any],
    vocab_rows: int,
    tie_embeddings: bool,
    divisors: Mapping[str, tuple[float, ...]],
    biases: Collection[str],
) -> ModelConfig:
    """Interpret GGUF metadata.

    `vocab_rows` are the rows of the embedding. `divisors` has the content of the tensors `rope_freqs`,
    `rope_factors_short` and `rope_factors_long` that the file holds; `biases` are the names of the first layer's
    matrices that have one, which the metadata do not say. Raises InvalidArgument naming the field.
    """
    name = str(fields.get("general.architecture", ""))
    if name not in GGUF_ARCHITECTURES:
        raise refuse("architecture", name, ", ".join(GGUF_ARCHITECTURES))

    def field(key: str, default: Any = None) -> Any:
        value = fields.get(f"{name}.{key}", default)
        if value is None:
            raise InvalidArgument("model.config", f"the GGUF file lacks {name}.{key}")
        return value

    for key in _REFUSED:
        if fields.get(f"{name}.{key}"):
            raise refuse(key, fields[f"{name}.{key}"], "none")
    try:
        return _read(name, field, fields, vocab_rows, tie_embeddings, divisors, biases)
    except (TypeError, ValueError) as error:
        raise InvalidArgument("model.config", f"the GGUF file holds a value of the wrong type: {error}") from error


def _read(
    name: str,
    field: Field,
    fields: Mapping[str, Any],
    vocab_rows: int,
    tie_embeddings: bool,
    divisors: Mapping[str, tuple[float, ...]],
    biases: Collection[str],
) -> ModelConfig:
    family = GGUF_ARCHITECTURES[name]
    heads, hidden, layers = (
        int(field("attention.head_count")),
        int(field("embedding_length")),
        int(field("block_count")),
    )
    head_dim = int(field("attention.key_length", hidden // heads))
    if int(field("attention.value_length", head_dim)) != head_dim:
        raise refuse("attention.value_length", field("attention.value_length"), "the key length")
    count = int(field("expert_count", 0))
    if count and family not in ("llama", "qwen2_moe", "qwen3_moe"):
        raise refuse("expert_count", count, "no experts in this family")
    if family == "llama" and count:
        family = "mixtral"
    experts = None
    if count:
        inner = int(field("expert_feed_forward_length", field("feed_forward_length")))
        # Of the family with a shared expert every reader of the format leaves probabilities as they are.
        has_shared = family == "qwen2_moe"
        shared = int(field("expert_shared_feed_forward_length", field("feed_forward_length"))) if has_shared else 0
        experts = ExpertsConfig(count, int(field("expert_used_count")), inner, not has_shared, shared)
    kinds = _layers(family, field, layers, bool(count))
    gemma = family.startswith("gemma")
    wide = hidden / heads if (family, layers) in _WIDE_QUERY_SCALE else head_dim
    local = any(layer.local for layer in kinds)
    return ModelConfig(
        architecture=family,
        vocab_size=vocab_rows,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(field("attention.head_count_kv", heads)),
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=int(field("feed_forward_length", experts.inner if experts else None)),
        norm_epsilon=float(field("attention.layer_norm_rms_epsilon")),
        rope=_rope(family, field, head_dim, divisors),
        max_position=int(field("context_length")),
        eos_token_ids=_token_ids(fields),
        bos_token_id=_optional_int(fields.get("tokenizer.ggml.bos_token_id")),
        tie_embeddings=tie_embeddings,
        layers=kinds,
        local_rope=RopeConfig(float(field("rope.freq_base_swa", 10000.0)), head_dim) if local else None,
        activation="gelu_tanh" if gemma else "silu",
        qkv_bias=family in ("qwen2", "qwen2_moe") or "attn_q" in biases,
        output_bias="attn_output" in biases,
        mlp_bias="ffn_gate" in biases,
        qk_norms=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        post_norms=family in ("gemma2", "gemma3_text"),
        embedding_scale=hidden**0.5 if gemma else 1.0,
        query_scale=float(field("attention.scale", 0.0)) or wide**-0.5,
        attention_cap=float(field("attn_logit_softcapping", 50.0)) if family == "gemma2" else None,
        logit_cap=_logit_cap(family, field),
        experts=experts,
    )


def _logit_cap(family: str, field: Field) -> float | None:
    cap = float(field("final_logit_softcapping", 30.0 if family == "gemma2" else 0.0))
    return cap or None


def _layers(family: str, field: Field, count: int, experts: bool) -> tuple[LayerConfig, ...]:
    window = int(field("attention.sliding_window", 4096 if family == "gemma2" else 0)) or None
    pattern = field("attention.sliding_window_pattern", {"gemma2": 2, "gemma3_text": 6}.get(family, 0))
    if isinstance(pattern, (list, tuple)):
        if len(pattern) != count:
            raise refuse("attention.sliding_window_pattern", pattern, f"{count} entries")
        sliding = [bool(item) for item in pattern]
    elif pattern:
        sliding = [bool((layer + 1) % int(pattern)) for layer in range(count)]
    else:
        sliding = [True] * count
    if window is None:
        sliding = [False] * count
    local = family == "gemma3_text"
    return tuple(LayerConfig(window if slides else None, local and slides, experts) for slides in sliding)


def _rope(family: str, field: Field, head_dim: int, divisors: Mapping[str, tuple[float, ...]]) -> RopeConfig:
    theta = float(field("rope.freq_base", 10000.0))
    dim = int(field("rope.dimension_count", head_dim))
    kind = str(field("rope.scaling.type", "none"))
    factor = float(field("rope.scaling.factor", 1.0))
    context = int(field("context_length"))
    original = int(field("rope.scaling.original_context_length", context))
    attention = float(field("rope.scaling.attn_factor", 0.0))
    if "rope_factors_long" in divisors or "rope_factors_short" in divisors:
        if kind not in ("none", "longrope"):
            raise refuse("rope.scaling.type", kind, "'longrope' beside rope_factors tensors")
        short, long = divisors.get("rope_factors_short", ()), divisors.get("rope_factors_long", ())
        attention = attention or longrope_attention_factor(context / original, original)
        return RopeConfig(
            theta, dim, "longrope", original_context=original, attention_factor=attention, short_factors=short,
            long_factors=long,
        )  # fmt: skip
    if "rope_freqs" in divisors:
        # Llama 3 in this format: the scaling is already a divisor for each frequency, whatever the context.
        if kind not in ("none", "llama3"):
            raise refuse("rope.scaling.type", kind, "none beside a rope_freqs tensor")
        fixed = divisors["rope_freqs"]
        return RopeConfig(theta, dim, "longrope", original_context=context, short_factors=fixed, long_factors=fixed)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta, dim)
    if kind == "linear":
        return RopeConfig(theta, dim, "linear", factor=factor)
    if kind == "yarn":
        return RopeConfig(
            theta, dim, "yarn", factor=factor, original_context=original,
            attention_factor=attention or yarn_attention_factor(factor),
            beta_fast=float(field("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(field("rope.scaling.yarn_beta_slow", 1.0)),
        )  # fmt: skip
    if kind == "longrope":
        raise refuse("rope.scaling.type", kind, "it with the tensors rope_factors_long and rope_factors_short")
    raise refuse("rope.scaling.type", kind, "'none', 'linear', 'yarn' or 'longrope'")


def _token_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    ids = [fields.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(int(index) for index in ids if index is not None))


def _optional_int(value: object) -> int | None:
    return None if value is None else int(str(value))
