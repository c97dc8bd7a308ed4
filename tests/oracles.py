"""Plain torch oracles: what the kernels and the model must compute, written for reading and not for speed.

No cache, no paging tricks, float32 throughout. Product code never imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.models.config import ModelConfig


def rotary(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of x [tokens, heads, head_dim], first half of a head against the second."""
    dim = x.shape[-1]
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = positions[:, None].float() * frequencies
    cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [tokens, heads, dim], k and v [tokens, kv_heads, dim]; every token sees itself and what is before it."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: NDArray[np.int32], length: int
) -> torch.Tensor:
    """One query token [heads, dim] over the first `length` tokens of blocks [blocks, kv_heads, tokens, dim]."""
    chosen = torch.from_numpy(table.astype(np.int64))
    k = keys[chosen].transpose(1, 2).flatten(0, 1)[:length]
    v = values[chosen].transpose(1, 2).flatten(0, 1)[:length]
    group = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    weights = (torch.einsum("hd,khd->hk", q, k) / q.shape[-1] ** 0.5).softmax(dim=-1)
    return torch.einsum("hk,khd->hd", weights, v)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root mean square norm over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def llama_logits(
    config: ModelConfig, tensors: Mapping[str, NDArray[np.float32]], token_ids: NDArray[np.int32]
) -> NDArray[np.float32]:
    """Logits [tokens, vocab] of a Llama model at every position of one prompt."""
    get = {name: torch.from_numpy(np.asarray(array)) for name, array in tensors.items()}
    positions = torch.arange(token_ids.size)
    x = get["model.embed_tokens.weight"][torch.from_numpy(token_ids).long()]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        h = rms_norm(x, get[f"{prefix}input_layernorm.weight"], config.norm_epsilon)
        q, k, v = (
            (h @ get[f"{prefix}self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, config.head_dim)) for name in "qkv"
        )
        q, k = rotary(q, positions, config.rope.theta), rotary(k, positions, config.rope.theta)
        x = x + causal_attention(q, k, v).flatten(1) @ get[f"{prefix}self_attn.o_proj.weight"].T
        h = rms_norm(x, get[f"{prefix}post_attention_layernorm.weight"], config.norm_epsilon)
        gate, up = h @ get[f"{prefix}mlp.gate_proj.weight"].T, h @ get[f"{prefix}mlp.up_proj.weight"].T
        x = x + (torch.nn.functional.silu(gate) * up) @ get[f"{prefix}mlp.down_proj.weight"].T
    x = rms_norm(x, get["model.norm.weight"], config.norm_epsilon)
    head = get["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    result: NDArray[np.float32] = (x @ head.T).numpy()
    return result
