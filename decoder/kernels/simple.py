"""First, plain CPU kernels: one numba loop per operation."""

from __future__ import annotations

import numpy as np
from numba import njit, prange


@njit(nogil=True, cache=True)
def to_bits(value):
    bits = np.uint32(np.float32(value).view(np.uint32))
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(nogil=True, cache=True)
def load(value):
    return value


@njit(nogil=True, cache=True)
def from_bits(bits):
    return np.float32(np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32))


@njit(nogil=True, cache=True)
def rms_norm(x, weight, epsilon, out):
    for row in range(x.shape[0]):
        total = np.float32(0.0)
        for i in range(x.shape[1]):
            total += x[row, i] * x[row, i]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(x.shape[1]) + epsilon)
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] * scale * weight[i]


@njit(nogil=True, cache=True)
def silu_mul(gate_up, out):
    n = out.shape[1]
    for row in range(out.shape[0]):
        for i in range(n):
            g = gate_up[row, i]
            out[row, i] = g / (np.float32(1.0) + np.exp(-g)) * gate_up[row, n + i]


@njit(nogil=True, cache=True)
def rope_write(qkv, cos, sin, positions, query_starts, tables, layer, arena, heads, kv_heads, head_dim, bf16):
    half = head_dim // 2
    block_tokens = arena.shape[4]
    for s in range(query_starts.shape[0] - 1):
        for row in range(query_starts[s], query_starts[s + 1]):
            p = positions[row]
            for h in range(heads + kv_heads):
                base = h * head_dim
                for i in range(half):
                    a = qkv[row, base + i]
                    b = qkv[row, base + half + i]
                    qkv[row, base + i] = a * cos[p, i] - b * sin[p, i]
                    qkv[row, base + half + i] = b * cos[p, i] + a * sin[p, i]
            block = tables[s, p // block_tokens]
            for h in range(kv_heads):
                for i in range(head_dim):
                    k = qkv[row, (heads + h) * head_dim + i]
                    v = qkv[row, (heads + kv_heads + h) * head_dim + i]
                    if bf16:
                        arena[block, layer, 0, h, p % block_tokens, i] = to_bits(k)
                        arena[block, layer, 1, h, p % block_tokens, i] = to_bits(v)
                    else:
                        arena[block, layer, 0, h, p % block_tokens, i] = k
                        arena[block, layer, 1, h, p % block_tokens, i] = v


@njit(nogil=True, cache=True, parallel=True)
def attention(qkv, positions, query_starts, tables, layer, arena, heads, kv_heads, head_dim, bf16, out):
    block_tokens = arena.shape[4]
    group = heads // kv_heads
    rows = qkv.shape[0]
    owner = np.empty(rows, np.int32)
    for s in range(query_starts.shape[0] - 1):
        owner[query_starts[s] : query_starts[s + 1]] = s
    scale = np.float32(1.0 / np.sqrt(head_dim))
    for item in prange(rows * heads):
        row = item // heads
        h = item % heads
        s = owner[row]
        kv = h // group
        n = positions[row] + 1
        scores = np.empty(n, np.float32)
        top = np.float32(-np.inf)
        for t in range(n):
            b = tables[s, t // block_tokens]
            total = np.float32(0.0)
            for i in range(head_dim):
                k = arena[b, layer, 0, kv, t % block_tokens, i]
                total += qkv[row, h * head_dim + i] * (from_bits(k) if bf16 else k)
            scores[t] = total * scale
            top = max(top, scores[t])
        acc = np.zeros(head_dim, np.float32)
        total = np.float32(0.0)
        for t in range(n):
            w = np.exp(scores[t] - top)
            total += w
            b = tables[s, t // block_tokens]
            for i in range(head_dim):
                v = arena[b, layer, 1, kv, t % block_tokens, i]
                acc[i] += w * (from_bits(v) if bf16 else v)
        for i in range(head_dim):
            out[row, h * head_dim + i] = acc[i] / total
