"""One form of tensors for every family and both formats: names, shapes, and where in the file each tensor lies.

The form is that of Hugging Face with one tensor per matrix: fused projections are cut, stacked experts are single
ones, and the weights of a norm are what the normalised row is multiplied with. `TensorView` says how a tensor of that
form is made from a tensor of a file; `source.py` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from decoder.models.config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor of the common form: `stored[first:first + rows]` plus `offset`, or entry `first` of a stack of them.

    stored:  name in the file
    shape:   shape of this tensor
    first:   its first row in the stored tensor, or its place in a stack
    stacked: whether the stored tensor has one more dimension in front
    offset:  added to every element
    heads:   rows of this many heads are stored with rotary pairs next to each other; 0 means they are not
    """

    stored: str
    shape: Shape
    first: int = 0
    stacked: bool = False
    offset: float = 0.0
    heads: int = 0


_GGUF_LAYER: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Two norms around each half of a layer: the format has other names for those that follow.
_GGUF_POST_NORMS: Final[Mapping[str, str]] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GGUF_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_MIXTRAL: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERT: Final = re.compile(r"(model\.layers\.\d+)\.block_sparse_moe\.(gate|experts\.(\d+)\.(w[123]))\.weight")


def gguf_name(name: str, config: ModelConfig) -> str:
    """The name that a tensor of a GGUF file has in the common form; an unknown one keeps its own."""
    stem, _, suffix = name.rpartition(".")
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) != 3 or parts[0] != "blk":
        return name
    known = {**_GGUF_LAYER, **_GGUF_POST_NORMS} if config.post_norms else dict(_GGUF_LAYER)
    if config.architecture == "phi3":
        known["ffn_up"] = "mlp.gate_up_proj"
    return f"model.layers.{parts[1]}.{known[parts[2]]}.{suffix}" if parts[2] in known else name


def hugging_face_name(name: str) -> str:
    """The name that a tensor of a Hugging Face file has in the common form."""
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return name
    layer, rest, index, which = expert.groups()
    return f"{layer}.mlp.gate.weight" if rest == "gate" else f"{layer}.mlp.experts.{index}.{_MIXTRAL[which]}.weight"


def views(config: ModelConfig, stored: Mapping[str, tuple[str, Shape]], *, gguf: bool) -> dict[str, TensorView]:
    """Every tensor of the common form that a file holds.

    stored: for each name of the common form, or of a fused or stacked tensor, its name and shape in the file

    A fused or stacked tensor of an unexpected shape stays whole under its name, which the check of shapes refuses.
    """
    found: dict[str, TensorView] = {}
    for name, (file_name, shape) in stored.items():
        found |= _cut(config, name, file_name, shape)
    plus_one = config.architecture.startswith("gemma") and not gguf
    permuted = gguf and config.architecture in ("llama", "mixtral")
    for name, view in list(found.items()):
        if plus_one and name.endswith("norm.weight"):
            found[name] = TensorView(view.stored, view.shape, offset=1.0)
        elif permuted and (projection := name.rpartition(".")[0]).endswith(("q_proj", "k_proj")):
            heads = config.num_heads if projection.endswith("q_proj") else config.num_kv_heads
            found[name] = TensorView(view.stored, view.shape, heads=heads)
    return found


def _cut(config: ModelConfig, name: str, stored: str, shape: Shape) -> dict[str, TensorView]:
    stem, _, last = name.removesuffix(".weight").rpartition(".")
    if last == "qkv_proj":
        return _rows(
            name, stored, shape, stem, {"q_proj": config.query_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        )
    if stem.endswith("mlp") and last == "gate_up_proj":
        inner = config.intermediate_size
        return _rows(name, stored, shape, stem, {"gate_proj": inner, "up_proj": inner})
    if last == "shared_expert_gate" and len(shape) == 2 and shape[0] == 1:
        return {name: TensorView(stored, shape[1:], stacked=True)}  # one product: a vector in the common form
    experts = config.experts
    if experts is not None and stem.endswith("mlp.experts") and len(shape) == 3 and shape[0] == experts.count:
        if last == "gate_up_proj" and shape[1] == 2 * experts.inner:
            half = (experts.inner, shape[2])
            return {
                f"{stem}.{index}.{part}.weight": TensorView(stored, half, 2 * index + place, stacked=True)
                for index in range(experts.count)
                for place, part in enumerate(("gate_proj", "up_proj"))
            }
        return {
            f"{stem}.{index}.{last}.weight": TensorView(stored, shape[1:], index, stacked=True)
            for index in range(experts.count)
        }
    return {name: TensorView(stored, shape)}


def _rows(name: str, stored: str, shape: Shape, stem: str, parts: Mapping[str, int]) -> dict[str, TensorView]:
    if len(shape) != 2 or shape[0] != sum(parts.values()):
        return {name: TensorView(stored, shape)}
    found, first = {}, 0
    for part, rows in parts.items():
        found[f"{stem}.{part}.weight"] = TensorView(stored, (rows, shape[1]), first)
        first += rows
    return found
