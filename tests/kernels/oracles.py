"""Plain torch oracles of the paged operations, float64 on gathered rows. They share no code with the kernels."""

from __future__ import annotations

import math

import torch


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [tokens, heads, dim] are the last of the context [length, kv_heads, dim]; also log2 of the weights' sums."""
    tokens, heads, _ = queries.shape
    length, kv_heads, _ = keys.shape
    group = heads // kv_heads
    k = keys.double().repeat_interleave(group, dim=1)
    v = values.double().repeat_interleave(group, dim=1)
    logits = torch.einsum("qhd,khd->hqk", queries.double(), k) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    row = torch.arange(length - tokens, length, device=queries.device)[:, None]
    column = torch.arange(length, device=queries.device)[None, :]
    hidden = (column > row) if causal else torch.zeros_like(column > row)
    if window:
        hidden |= column <= row - window
    logits = logits.masked_fill(hidden, -math.inf)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), v), logits.logsumexp(-1).T / math.log(2)


def norm_rotate(
    x: torch.Tensor, positions: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, norm: torch.Tensor | None
) -> torch.Tensor:
    """x [tokens, heads, dim]: root mean square norm, then rotation of the first 2 * cosines.shape[1] elements."""
    x = x.double()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm.double()
    half = cosines.shape[1]
    c, s = cosines.double()[positions.long()][:, None], sines.double()[positions.long()][:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * c - second * s, second * c + first * s, rest], dim=-1)


def error_rates(norm: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """What the error of each column [dim] of a key is multiplied with, by the weights of the queries' norm [dim]."""
    size, half = norm.double().abs(), rotary_dim // 2
    pairs = torch.maximum(size[:half], size[half : 2 * half])
    size = torch.cat([pairs, pairs, size[2 * half :]])
    exponent = torch.log2(size.clamp_min(2.0**-126)).round()
    return torch.exp2((exponent - exponent.max()).clamp_min(-8))


def quantize(
    x: torch.Tensor, kind: torch.dtype, *, keys: bool = False, rates: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x [..., dim] as int8 or e4m3 elements and the scale of each row; in e4m3 that of keys is the one of
    sixteen with the least squared error, times columns' rates counted in quarters of the power of two below the
    least."""
    peak = 127.0 if kind == torch.int8 else 448.0
    exact = (x.float().abs().amax(-1) / peak).clamp_min(torch.finfo(torch.bfloat16).tiny)
    scale = _bfloat16_up(exact)
    if keys and kind != torch.int8:
        unit = (4 / 2.0 ** torch.floor(torch.log2(scale.double()))).clamp_max(2.0**127)
        tried = [_bfloat16_up(scale.float() * (1 + sixteenths / 16)) for sixteenths in range(16)]
        errors = []
        for one in tried:
            y = (x.float() * (1 / one.float())[..., None]).clamp(-448, 448).to(kind).double()
            error = (x.double() - y * one.double()[..., None]) * unit[..., None] * rates
            errors.append(error.round().square().sum(-1))
        best = torch.stack(errors).argmin(0)
        scale = torch.stack(tried).gather(0, best[None])[0]
    y = x.float() / scale.float()[..., None]
    return (y.round() if kind == torch.int8 else y).to(kind), scale


def _bfloat16_up(exact: torch.Tensor) -> torch.Tensor:
    """Rounded up."""
    near = exact.bfloat16()
    return torch.where(near.float() < exact, torch.nextafter(near, torch.full_like(near, torch.inf)), near)


def keys_of_exact_norms(tokens: int, norm: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [tokens, heads = 8, 64] whose root mean square is 8, and what they are with weights `norm` [64] of few bits:
    exact in float32, in whatever order squares are summed (epsilon 0)."""
    sizes = torch.tensor([40.0, 30.0, 20.0, *[5.0] * 40, *[3.0] * 20, 4.0])
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (tokens * 8, 64), generator=generator) * 2.0 - 1
    order = torch.rand(signs.shape, generator=generator).argsort(1)
    rows = (sizes[order] * signs).reshape(tokens, 8, 64)
    return rows, rows / 8 * norm


def held(
    rows: torch.Tensor, stored: torch.dtype | None, *, keys: bool = False, rates: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """Rows [..., dim] as a cache of type `stored` gives them back, float64; None keeps them as they are."""
    if stored is None:
        return rows
    if stored.itemsize > 1:
        return rows.to(stored).double()
    elements, scales = quantize(rows, stored, keys=keys, rates=rates)
    return elements.double() * scales.double()[..., None]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 error; NaN anywhere counts as infinite."""
    error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
    return math.inf if not torch.isfinite(error) else float(error)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Root mean square norm of rows, float64, epsilon 1e-6."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()


def low_rank(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """B (A x) of rows x [rows, inputs] for A [ranks, inputs] and B [outputs, ranks], float64."""
    return x.double() @ down.double().T @ up.double().T


def mixture(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    used: int,
    normalize: bool,
    activation: str = "silu",
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows x [rows, width] through `used` of the experts, float64, row by row; see `decoder.kernels.mixture.mix`."""
    experts = gate_up.shape[0]
    shares = logits[:, :experts].double().softmax(-1)
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
    result = torch.zeros(x.shape, dtype=torch.float64)
    for row, share in enumerate(shares):
        # Of equal shares the lower numbers.
        chosen = sorted(range(experts), key=lambda expert: (-float(share[expert]), expert))[:used]
        total = share[chosen].sum() if normalize else 1.0
        for expert in chosen:
            first, second = (gate_up[expert].double() @ x[row].double()).chunk(2)
            first = silu(first) if activation == "silu" else gelu(first, approximate="tanh")
            result[row] += share[expert] / total * (down[expert].double() @ (first * second))
        if shared is not None:
            result[row] += torch.sigmoid(logits[row, experts].double()) * shared[row].double()
    return result
