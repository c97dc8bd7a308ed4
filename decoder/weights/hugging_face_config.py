"""Interprets a Hugging Face config.json: each family's keys, its defaults, and what of it is not served.

Owns the rule that a key which changes hidden states is either understood or refused by its name. Defaults are those
of the family's configuration class in `transformers`, since files leave keys out that equal them. Called by
`source.py` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from common.errors import InvalidArgument
from common.families import SUPPORTED_ARCHITECTURES
from decoder.models.config import Activation, ExpertsConfig, LayerConfig, ModelConfig, refuse
from decoder.weights.hugging_face_rope import read_ropes

# Keys that change hidden states when set, with the values served by every family.
_SERVED_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "quantization_config": (None,),
    "attention_multiplier": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "use_bidirectional_attention": (None, False),
}
_QWEN_MOE: Final = ("qwen2_moe", "qwen3_moe")
# Families whose projections of attention, or of the MLP, may have biases; elsewhere the keys must be unset.
_BIASED: Final[Mapping[str, tuple[str, ...]]] = {
    "attention_bias": ("llama", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    "mlp_bias": ("llama",),
    "qkv_bias": ("qwen2_moe",),
}
_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}

_PLAIN: Final[Mapping[str, Any]] = {
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
}  # fmt: skip
_GEMMA: Final[Mapping[str, Any]] = {
    **_PLAIN, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "head_dim": 256, "max_position_embeddings": 8192, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
_QWEN: Final[Mapping[str, Any]] = {
    **_PLAIN, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip
_TYPED_LAYERS: Final = ("qwen2", "qwen2_moe", "qwen3", "gemma2", "gemma3_text")
# What a file means that leaves a key out.
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": _PLAIN,
    "mistral": {**_PLAIN, "max_position_embeddings": 131072, "sliding_window": 4096},
    "mixtral": {
        **_PLAIN, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6,
        "num_experts_per_tok": 2,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen2_moe": {
        **_QWEN, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "norm_topk_prob": False,
        "decoder_sparse_step": 1, "mlp_only_layers": None, "shared_expert_intermediate_size": 5632, "qkv_bias": True,
    },
    "qwen3_moe": {
        **_QWEN, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
        "decoder_sparse_step": 1, "mlp_only_layers": None,
    },
    "gemma": _GEMMA,
    "gemma2": {
        **_GEMMA, "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **_GEMMA, "query_pre_attn_scalar": 256, "sliding_window": 4096, "max_position_embeddings": 131072,
        "rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
    },
    "phi3": {**_PLAIN, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
}  # fmt: skip


def config_from_hugging_face(values: Mapping[str, Any]) -> ModelConfig:
    """Interpret a config.json. Raises InvalidArgument naming the key on anything this build does not serve."""
    family = str(values.get("model_type"))
    if family == "gemma3":
        raise refuse("architecture", family, "its text model alone: 'gemma3_text'; images need a vision encoder")
    if family not in SUPPORTED_ARCHITECTURES:
        raise refuse("architecture", family, ", ".join(SUPPORTED_ARCHITECTURES))
    for key, served in _SERVED_VALUES.items():
        if key in values and values[key] not in served:
            raise refuse(key, values[key], " or ".join(repr(value) for value in served))
    for key, families in _BIASED.items():
        if values.get(key) and family not in families:
            raise refuse(key, values[key], f"it in {', '.join(families)}")
    try:
        return _read(family, {**_DEFAULTS[family], **values})
    except KeyError as error:
        raise InvalidArgument("model.config", f"config.json lacks {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise InvalidArgument("model.config", f"config.json holds a value of the wrong type: {error}") from error


def _read(family: str, values: Mapping[str, Any]) -> ModelConfig:
    heads, hidden = int(values["num_attention_heads"]), int(values["hidden_size"])
    head_dim = int(values.get("head_dim") or hidden // heads)
    layers = int(values["num_hidden_layers"])
    gemma = family.startswith("gemma")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if values.get(key) is not None and family not in ("gemma2", "gemma3_text"):
            raise refuse(key, values[key], "none in this family")
    kinds = _layers(family, values, layers)
    rope, local_rope = read_ropes(family, values, head_dim, any(layer.local for layer in kinds))
    return ModelConfig(
        architecture=family,
        vocab_size=int(values["vocab_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=int(values["intermediate_size"]),
        norm_epsilon=float(values["rms_norm_eps"]),
        rope=rope,
        max_position=int(values["max_position_embeddings"]),
        eos_token_ids=_token_ids(values.get("eos_token_id")),
        bos_token_id=_optional_int(values.get("bos_token_id")),
        tie_embeddings=bool(values["tie_word_embeddings"]),
        layers=kinds,
        local_rope=local_rope,
        activation=_activation(family, values),
        qkv_bias=family == "qwen2" or bool(values.get("attention_bias") or values.get("qkv_bias")),
        output_bias=bool(values.get("attention_bias")),
        mlp_bias=bool(values.get("mlp_bias")),
        qk_norms=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        post_norms=family in ("gemma2", "gemma3_text"),
        embedding_scale=hidden**0.5 if gemma else 1.0,
        query_scale=float(values.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        attention_cap=_optional_float(values.get("attn_logit_softcapping")),
        logit_cap=_optional_float(values.get("final_logit_softcapping")),
        experts=_experts(family, values),
    )


def _activation(family: str, values: Mapping[str, Any]) -> Activation:
    key = "hidden_activation" if family in ("gemma2", "gemma3_text") else "hidden_act"
    name = values[key]
    # Gemma's first files say "gelu" and mean the approximation that the model was trained with.
    if family == "gemma" and name == "gelu":
        return "gelu_tanh"
    if name not in _ACTIVATIONS:
        raise refuse(key, name, ", ".join(repr(known) for known in _ACTIVATIONS))
    return _ACTIVATIONS[name]


def _layers(family: str, values: Mapping[str, Any], count: int) -> tuple[LayerConfig, ...]:
    window = values.get("sliding_window")
    if "use_sliding_window" in values and not values["use_sliding_window"]:
        window = None
    if window is not None and family in ("llama", "gemma"):
        raise refuse("sliding_window", window, "none in this family")
    kinds = values.get("layer_types") if family in _TYPED_LAYERS else None
    if kinds is not None:
        allowed = ("full_attention", "sliding_attention")
        if len(kinds) != count or any(kind not in allowed for kind in kinds):
            raise refuse("layer_types", kinds, f"{count} of {' or '.join(repr(kind) for kind in allowed)}")
        sliding = [kind == "sliding_attention" for kind in kinds]
    elif family == "gemma2":
        sliding = [layer % 2 == 0 for layer in range(count)]
    elif family == "gemma3_text":
        pattern = int(values["sliding_window_pattern"])
        sliding = [bool((layer + 1) % pattern) for layer in range(count)]
    elif family in ("qwen2", "qwen3"):
        sliding = [window is not None and layer >= int(values["max_window_layers"]) for layer in range(count)]
    elif family == "qwen2_moe":
        last = int(values["max_window_layers"])
        sliding = [window is not None and layer % 2 == 0 and layer < last for layer in range(count)]
    else:
        sliding = [window is not None] * count
    if window is None and any(sliding):
        raise refuse("sliding_window", None, "a number where layers are of type 'sliding_attention'")
    local = family == "gemma3_text"
    sparse = _sparse_layers(family, values, count)
    return tuple(
        LayerConfig(int(window) if slides and window is not None else None, local and slides, experts)
        for slides, experts in zip(sliding, sparse, strict=True)
    )


def _sparse_layers(family: str, values: Mapping[str, Any], count: int) -> list[bool]:
    if family == "mixtral":
        return [True] * count
    if family not in _QWEN_MOE or not _expert_count(values, _DEFAULT_EXPERTS[family]):
        return [False] * count
    dense, step = values["mlp_only_layers"] or (), int(values["decoder_sparse_step"])
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(count)]


_DEFAULT_EXPERTS: Final[Mapping[str, int]] = {"mixtral": 8, "qwen2_moe": 60, "qwen3_moe": 128}


def _expert_count(values: Mapping[str, Any], default: int) -> int:
    # Older files and newer ones name it differently.
    return int(values.get("num_experts", values.get("num_local_experts", default)) or 0)


def _experts(family: str, values: Mapping[str, Any]) -> ExpertsConfig | None:
    count = _expert_count(values, _DEFAULT_EXPERTS.get(family, 0)) if family in _DEFAULT_EXPERTS else 0
    if family == "mixtral":
        inner, normalize = values["intermediate_size"], True
    elif count:
        inner, normalize = values["moe_intermediate_size"], bool(values["norm_topk_prob"])
    else:
        return None
    shared = int(values["shared_expert_intermediate_size"]) if family == "qwen2_moe" else 0
    return ExpertsConfig(count, int(values["num_experts_per_tok"]), int(inner), normalize, shared)


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(int(item) for item in value)
    return (int(str(value)),)


def _optional_int(value: object) -> int | None:
    return None if value is None else int(str(value))


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)
