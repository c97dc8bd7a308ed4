"""What a model is: sizes, rope and special ids, and the digests that name its hidden states.

Owns the rule that a configuration is either served exactly or refused by name. Read from a Hugging Face
config.json or from GGUF metadata by `decoder/weights/`; no other module interprets those files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from common.errors import InvalidArgument

SUPPORTED_ARCHITECTURES: Final = ("llama",)

# Keys of config.json that change hidden states when set, with the values this build serves.
_SERVED_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1.0),
    "attention_multiplier": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of one decoder-only model. All counts are positive; checked on construction."""

    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    norm_epsilon: float
    rope_theta: float
    max_position: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tie_embeddings: bool

    def __post_init__(self) -> None:
        if self.architecture not in SUPPORTED_ARCHITECTURES:
            raise refuse("architecture", self.architecture, ", ".join(SUPPORTED_ARCHITECTURES))
        for name in (
            "vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "intermediate_size",
            "max_position",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "a positive number")
        if self.num_heads % self.num_kv_heads:
            raise refuse("num_heads", self.num_heads, f"a multiple of num_kv_heads = {self.num_kv_heads}")
        if self.head_dim % 16 or self.head_dim > 256:
            raise refuse("head_dim", self.head_dim, "a multiple of 16 up to 256")
        for name in ("hidden_size", "intermediate_size"):
            # Matmul inputs lie in tiles of 32 columns without padding.
            if getattr(self, name) % 32:
                raise refuse(name, getattr(self, name), "a multiple of 32")
        if not (0.0 < self.norm_epsilon < 1.0):
            raise refuse("norm_epsilon", self.norm_epsilon, "a number between 0 and 1")
        if not self.rope_theta > 0.0:
            raise refuse("rope_theta", self.rope_theta, "a positive number")

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_size(self) -> int:
        """Columns of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class ModelDigests:
    """Content digests that go into the cache key root; equal digests mean equal hidden states.

    weights:   sha256 of the content of the weight file, or of the shards' digests in order of their names
    position:  sha256 of the canonical rope settings
    attention: sha256 of the settings besides weights that change hidden states, the compute type included
    """

    weights: bytes
    position: bytes
    attention: bytes


def refuse(field: str, value: object, allowed: str) -> InvalidArgument:
    """The error for a model this build does not serve."""
    return InvalidArgument(f"model.{field}", f"is {value!r}; this build serves {allowed}")


def digest_config(config: ModelConfig, weights: bytes, dtype: str) -> ModelDigests:
    """Digests of a model whose weight content hash is `weights`, computed in `dtype`."""
    position = f"rope/default/theta={config.rope_theta!r}/dim={config.head_dim}"
    attention = (
        f"{config.architecture}/layers={config.num_layers}/heads={config.num_heads}/kv={config.num_kv_heads}"
        f"/dim={config.head_dim}/eps={config.norm_epsilon!r}/act=silu/window=none/cap=none/compute={dtype}"
    )
    return ModelDigests(
        weights, hashlib.sha256(position.encode()).digest(), hashlib.sha256(attention.encode()).digest()
    )


def config_from_hugging_face(values: Mapping[str, Any]) -> ModelConfig:
    """Interpret a config.json. Raises InvalidArgument naming the key on anything this build does not serve."""
    for key, served in _SERVED_VALUES.items():
        if key in values and values[key] not in served:
            raise refuse(key, values[key], " or ".join(repr(value) for value in served))
    try:
        heads = int(values["num_attention_heads"])
        hidden = int(values["hidden_size"])
        return ModelConfig(
            architecture=str(values["model_type"]),
            vocab_size=int(values["vocab_size"]),
            num_layers=int(values["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or hidden // heads),
            hidden_size=hidden,
            intermediate_size=int(values["intermediate_size"]),
            norm_epsilon=float(values["rms_norm_eps"]),
            rope_theta=_rope_theta(values),
            max_position=int(values["max_position_embeddings"]),
            eos_token_ids=_token_ids(values.get("eos_token_id")),
            bos_token_id=_optional_int(values.get("bos_token_id")),
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise InvalidArgument("model.config", f"config.json lacks {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise InvalidArgument("model.config", f"config.json holds a value of the wrong type: {error}") from error


def config_from_gguf(fields: Mapping[str, Any], vocab_rows: int, tie_embeddings: bool) -> ModelConfig:
    """Interpret GGUF metadata. `vocab_rows` are the rows of the embedding. Raises InvalidArgument as above."""
    architecture = str(fields.get("general.architecture", ""))
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise refuse("architecture", architecture, ", ".join(SUPPORTED_ARCHITECTURES))

    def field(name: str, default: Any = None) -> Any:
        value = fields.get(f"{architecture}.{name}", default)
        if value is None:
            raise InvalidArgument("model.config", f"the GGUF file lacks {architecture}.{name}")
        return value

    scaling = fields.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise refuse("rope.scaling.type", scaling, "'none'")
    for name in ("expert_count", "attention.sliding_window", "attention.layer_norm_epsilon"):
        if fields.get(f"{architecture}.{name}"):
            raise refuse(name, fields[f"{architecture}.{name}"], "none")
    heads = int(field("attention.head_count"))
    hidden = int(field("embedding_length"))
    head_dim = int(field("attention.key_length", hidden // heads))
    if int(field("attention.value_length", head_dim)) != head_dim:
        raise refuse("attention.value_length", field("attention.value_length"), "the key length")
    if int(field("rope.dimension_count", head_dim)) != head_dim:
        raise refuse("rope.dimension_count", field("rope.dimension_count"), "the head dimension")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_rows,
        num_layers=int(field("block_count")),
        num_heads=heads,
        num_kv_heads=int(field("attention.head_count_kv", heads)),
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=int(field("feed_forward_length")),
        norm_epsilon=float(field("attention.layer_norm_rms_epsilon")),
        rope_theta=float(field("rope.freq_base", 10000.0)),
        max_position=int(field("context_length")),
        eos_token_ids=_token_ids(fields.get("tokenizer.ggml.eos_token_id")),
        bos_token_id=_optional_int(fields.get("tokenizer.ggml.bos_token_id")),
        tie_embeddings=tie_embeddings,
    )


def _rope_theta(values: Mapping[str, Any]) -> float:
    # Newer files keep all rope settings in rope_parameters, older ones in rope_theta and rope_scaling.
    rope = values.get("rope_parameters") or {}
    scaling = values.get("rope_scaling") or {}
    for settings in (rope, scaling):
        kind = settings.get("rope_type", settings.get("type", "default"))
        if kind != "default":
            raise refuse("rope_scaling.rope_type", kind, "'default'")
    return float(rope.get("rope_theta", values.get("rope_theta", 10000.0)))


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(int(item) for item in value)
    return (int(str(value)),)


def _optional_int(value: object) -> int | None:
    return None if value is None else int(str(value))
