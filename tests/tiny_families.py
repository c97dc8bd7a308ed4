"""Tiny random models of every family, made with `transformers` and saved as it saves them. Never used by product code.

Weights are scaled so that logits depend on the whole context; norms and biases are random too, so that a forgotten one
shows. Windows, scaling boundaries and sizes are chosen so that a prompt of PROMPT_TOKENS crosses each of them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

VOCABULARY: Final = 300
PROMPT_TOKENS: Final = 340

_BASE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family's configuration and model class in `transformers`, and what differs from the common sizes."""

    config: str
    model: str
    values: dict[str, Any] = field(default_factory=dict)
    # Norm weights are stored as differences from one.
    norms_from_one: bool = False


_LONGROPE: Final = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [2.0 + 0.5 * index for index in range(8)],
}
_GEMMA3_ROPES: Final = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

FAMILIES: Final[dict[str, Family]] = {
    # Sizes that are no multiples of a tile, and a head of 80 columns: five vectors, no two halves of whole ones.
    "llama-odd-sizes": Family(
        "LlamaConfig", "LlamaForCausalLM", {"hidden_size": 72, "intermediate_size": 90, "head_dim": 80}
    ),
    # As many key heads as query heads.
    "llama2": Family(
        "LlamaConfig", "LlamaForCausalLM",
        {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-biases": Family(
        "LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 90}
    ),
    "llama3": Family(
        "LlamaConfig", "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
         "tie_word_embeddings": True},
    ),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": 40}),
    "qwen2": Family(
        "Qwen2Config", "Qwen2ForCausalLM",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                             "original_max_position_embeddings": 256}},
    ),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    "gemma": Family(
        "GemmaConfig", "GemmaForCausalLM", {"head_dim": 32, "num_key_value_heads": 1}, norms_from_one=True
    ),
    "gemma2": Family(
        "Gemma2Config", "Gemma2ForCausalLM",
        {"head_dim": 32, "sliding_window": 270, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
         "final_logit_softcapping": 3.0},
        norms_from_one=True,
    ),
    "gemma3": Family(
        "Gemma3TextConfig", "Gemma3ForCausalLM",
        {"head_dim": 32, "sliding_window": 40, "query_pre_attn_scalar": 24, "num_key_value_heads": 1,
         "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": _GEMMA3_ROPES},
        norms_from_one=True,
    ),
    # Longrope that stays at its short factors for the whole context, and only half of each head is rotated.
    "phi3-short": Family(
        "Phi3Config", "Phi3ForCausalLM",
        {"head_dim": 32, "hidden_size": 128, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 1024,
         "rope_parameters": _LONGROPE, "pad_token_id": 0},
    ),
    "phi3-long": Family(
        "Phi3Config", "Phi3ForCausalLM",
        {"sliding_window": 300, "original_max_position_embeddings": 256, "rope_parameters": _LONGROPE},
    ),
    "mixtral": Family(
        "MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 40}
    ),
    # Three layers: the second has experts, beside them a shared one that is wider than the dense layers' own.
    "qwen2-moe": Family(
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM",
        {"num_hidden_layers": 3, "num_experts": 32, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
         "shared_expert_intermediate_size": 130, "decoder_sparse_step": 2},
    ),
    # One layer is dense, the other has experts; probabilities are not made to sum to one.
    "qwen3-moe": Family(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {"head_dim": 32, "num_experts": 40, "num_experts_per_tok": 4, "moe_intermediate_size": 48,
         "norm_topk_prob": False, "mlp_only_layers": [0]},
    ),
}  # fmt: skip


def make_family(directory: Path, name: str, **changes: Any) -> Any:
    """Save a tiny model of the family into `directory`; the model itself, in float32, with plain attention."""
    import transformers

    family = FAMILIES[name]
    # The library writes into the settings that it is given.
    values = copy.deepcopy({**_BASE, **family.values, **changes})
    config = getattr(transformers, family.config)(**values)
    # Soft caps are computed by the plain attention alone.
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(7)
    model = getattr(transformers, family.model)(config).eval()
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            if tensor.ndim == 1:
                middle = 0.0 if tensor_name.endswith("bias") or family.norms_from_one else 1.0
                tensor.normal_(middle, 0.3, generator=generator)
            elif "embed_tokens" in tensor_name:
                # An embedding scale of sqrt(hidden size) is part of those families.
                tensor.normal_(0.0, 0.125 if family.norms_from_one else 1.0, generator=generator)
            else:
                tensor.normal_(0.0, 2.0 / tensor.shape[-1] ** 0.5, generator=generator)
    model.save_pretrained(directory)
    return model
