"""What a model is: sizes, settings of its layers and special ids, and the digests that name its hidden states.

Owns the rule that a configuration is either described exactly or refused by name. Built from a Hugging Face
config.json or from GGUF metadata by `decoder/weights/`, which also brings every family's tensors to one form (see
`docs/models.md`): so nothing behind it asks for the family's name. A backend that does not compute one of the
settings refuses it by name as well.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from common.errors import InvalidArgument
from common.families import SUPPORTED_ARCHITECTURES
from decoder.models.rope import ROPE_KINDS, RopeConfig

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer.

    window:  keys that a query sees, the last ones, its own included; None means all
    local:   rotates by `ModelConfig.local_rope` in place of `ModelConfig.rope`
    experts: its feed-forward part is a mixture of experts
    """

    window: int | None = None
    local: bool = False
    experts: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: a softmax over `count` router products, of which the largest `per_token` are used.

    inner:     intermediate size of one expert
    normalize: the used probabilities are divided by their sum
    shared:    intermediate size of an expert that every token uses, its output times the sigmoid of one product more;
               0 is none
    """

    count: int
    per_token: int
    inner: int
    normalize: bool = True
    shared: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of one decoder-only model. All counts are positive; checked on construction.

    The residual stream r starts as `embedding_scale` times the token's embedding. A layer is, with
    `norm(x) = w * x / sqrt(mean(x * x) + norm_epsilon)`:

        a = attention(input_layernorm(r));  r += post_attention_norm(a) if post_norms else a
        m = mlp(post_attention_layernorm(r)); r += post_mlp_norm(m) if post_norms else m

    attention: o(softmax(cap(q k * query_scale)) v) with biases on q, k and v where `qkv_bias`, and on o where
               `output_bias`; q and k normalised over each head where `qk_norms`, then rotated;
               cap(x) = attention_cap * tanh(x / attention_cap), or x
    mlp:       down(activation(gate(x)) * up(x)), with biases on all three where `mlp_bias`; or `experts` of it
    logits:    head(norm(r)), capped by `logit_cap` likewise; the head is the embedding where `tie_embeddings`

    max_position: tokens of the longest context that is served; `rope` and `local_rope` may depend on it
    layers:       settings per layer; empty means those of a plain layer for all
    """

    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    norm_epsilon: float
    rope: RopeConfig
    max_position: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tie_embeddings: bool
    layers: tuple[LayerConfig, ...] = ()
    local_rope: RopeConfig | None = None
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norms: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    query_scale: float = 0.0
    attention_cap: float | None = None
    logit_cap: float | None = None
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        if self.architecture not in SUPPORTED_ARCHITECTURES:
            raise refuse("architecture", self.architecture, ", ".join(SUPPORTED_ARCHITECTURES))
        for name in (
            "vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "intermediate_size",
            "max_position",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "a positive number")
        if not self.layers:
            object.__setattr__(self, "layers", (LayerConfig(),) * self.num_layers)
        if not self.query_scale:
            object.__setattr__(self, "query_scale", self.head_dim**-0.5)
        if self.num_heads % self.num_kv_heads:
            raise refuse("num_heads", self.num_heads, f"a multiple of num_kv_heads = {self.num_kv_heads}")
        if self.head_dim % 16 or self.head_dim > 256:
            raise refuse("head_dim", self.head_dim, "a multiple of 16 up to 256")
        if not (0.0 < self.norm_epsilon < 1.0):
            raise refuse("norm_epsilon", self.norm_epsilon, "a number between 0 and 1")
        for name in ("query_scale", "embedding_scale"):
            if not getattr(self, name) > 0.0:
                raise refuse(name, getattr(self, name), "a positive number")
        for name in ("attention_cap", "logit_cap"):
            if getattr(self, name) is not None and not getattr(self, name) > 0.0:
                raise refuse(name, getattr(self, name), "a positive number or none")
        self._check_layers()
        for rope in (self.rope, self.local_rope):
            if rope is not None:
                _check_rope(rope, self.head_dim)
        if self.local_rope is not None and self.local_rope.dim != self.rope.dim:
            raise refuse("local_rope.dim", self.local_rope.dim, f"the {self.rope.dim} columns of the other layers")

    def _check_layers(self) -> None:
        if len(self.layers) != self.num_layers:
            raise refuse("layers", len(self.layers), f"one entry for each of the {self.num_layers} layers")
        for layer in self.layers:
            if layer.window is not None and layer.window < 1:
                raise refuse("window", layer.window, "a positive number or none")
            if layer.local and self.local_rope is None:
                raise refuse("local_rope", None, "settings for the layers that rotate by it")
            if layer.experts and self.experts is None:
                raise refuse("experts", None, "settings for the layers that have them")
        experts = self.experts
        if experts is not None:
            if self.mlp_bias:
                raise refuse("mlp_bias", True, "no biases beside experts")
            if min(experts.count, experts.inner) < 1 or experts.shared < 0:
                raise refuse("experts", experts, "positive sizes")
            if not 1 <= experts.per_token <= experts.count:
                raise refuse("experts.per_token", experts.per_token, f"1..{experts.count}")

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

    def layer_rope(self, layer: int) -> RopeConfig:
        """The rotary settings of one layer."""
        local = self.local_rope if self.layers[layer].local else None
        return local or self.rope


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


def _check_rope(rope: RopeConfig, head_dim: int) -> None:
    if rope.kind not in ROPE_KINDS:
        raise refuse("rope_scaling.rope_type", rope.kind, ", ".join(ROPE_KINDS))
    if not rope.theta > 0.0:
        raise refuse("rope_theta", rope.theta, "a positive number")
    if rope.dim % 2 or not 2 <= rope.dim <= head_dim:
        raise refuse("rope.dim", rope.dim, f"an even number up to the head dimension {head_dim}")
    if not rope.factor > 0.0 or not rope.attention_factor > 0.0:
        raise refuse("rope_scaling.factor", rope.factor, "a positive number")
    if rope.kind in ("dynamic", "llama3", "yarn", "longrope") and rope.original_context < 2:
        raise refuse("rope_scaling.original_max_position_embeddings", rope.original_context, "a length of context")
    if rope.kind == "llama3" and not 0.0 < rope.low_frequency_factor < rope.high_frequency_factor:
        raise refuse("rope_scaling.low_freq_factor", rope.low_frequency_factor, "a number below high_freq_factor")
    if rope.kind == "dynamic" and rope.dim < 4:
        raise refuse("rope.dim", rope.dim, "at least 4 columns for dynamic scaling")
    if rope.kind == "longrope":
        for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
            if len(factors) != rope.dim // 2 or min(factors, default=0.0) <= 0.0:
                raise refuse(f"rope_scaling.{name}", f"{len(factors)} numbers", f"{rope.dim // 2} positive numbers")


def digest_config(config: ModelConfig, weights: bytes, dtype: str) -> ModelDigests:
    """Digests of a model whose weight content hash is `weights`, computed in `dtype`."""
    ropes = [rope.identity(config.max_position) for rope in (config.rope, config.local_rope) if rope is not None]
    layers = ",".join(f"{layer.window}:{layer.local}:{layer.experts}" for layer in config.layers)
    attention = (
        f"{config.architecture}/layers={config.num_layers}/heads={config.num_heads}/kv={config.num_kv_heads}"
        f"/dim={config.head_dim}/eps={config.norm_epsilon!r}/act={config.activation}/per-layer={layers}"
        f"/bias={config.qkv_bias},{config.output_bias},{config.mlp_bias}/qk-norms={config.qk_norms}/post-norms={config.post_norms}"
        f"/embedding={config.embedding_scale!r}/query={config.query_scale!r}/cap={config.attention_cap!r}"
        f"/experts={config.experts!r}/compute={dtype}"
    )
    return ModelDigests(
        weights, hashlib.sha256("|".join(ropes).encode()).digest(), hashlib.sha256(attention.encode()).digest()
    )
