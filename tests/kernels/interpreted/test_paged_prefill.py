"""Paged prefill against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels import oracles
from tests.kernels.rig import DEVICE, LAYER, ON_CPU, TOLERANCE, Paged, form, paged, random

prefill = form("paged_prefill")


def run(
    p: Paged,
    queries: torch.Tensor,
    chunks: list[int],
    *,
    lengths: list[int] | None = None,
    rows: int = 64,
    tile: int = 64,
    window: int = 0,
    soft_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill of the last `chunks[i]` tokens of each context; output and log sums, poisoned before."""
    heads, head_dim = queries.shape[1:]
    ends = [int(x) for x in p.lengths] if lengths is None else lengths
    starts = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32)
    group = heads // p.arena.shape[3]
    rows_plan = prefill.plan(starts, np.array(ends, np.int32), group, rows, DEVICE)
    output = torch.full_like(queries, torch.nan)
    log_sums = torch.full(queries.shape[:2], torch.nan, device=DEVICE)
    prefill.attend(
        queries,
        p.arena,
        LAYER,
        p.tables,
        torch.from_numpy(starts).to(DEVICE),
        torch.tensor(ends, dtype=torch.int32, device=DEVICE),
        rows_plan,
        output,
        scale=head_dim**-0.5,
        scales=p.scales,
        window=window,
        soft_cap=soft_cap,
        log_sums=log_sums,
        config=None if ON_CPU else prefill.PrefillConfig(rows, tile, 4, 2),
    )
    return output, log_sums


def check(
    lengths: list[int],
    chunks: list[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    block_tokens: int = 16,
    shared_blocks: int = 0,
    tolerance: float | None = None,
    rows: int = 64,
    tile: int = 64,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Every chunk equals the oracle, and the log sums do."""
    p = paged(
        lengths,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        dtype=stored or dtype,
        shared_blocks=shared_blocks,
    )
    queries = random(sum(chunks), heads, head_dim, seed=5, dtype=dtype)
    got, log_sums = run(p, queries, chunks, rows=rows, tile=tile, window=window, soft_cap=soft_cap)
    at = 0
    for i, chunk in enumerate(chunks):
        part = slice(at, at + chunk)
        want, sums = oracles.attention(
            queries[part], p.keys[i], p.values[i], head_dim**-0.5, window=window, soft_cap=soft_cap
        )
        assert oracles.relative_error(got[part], want) < (tolerance or TOLERANCE[dtype])
        assert float((log_sums[part] - sums).abs().max()) < 2e-2
        at += chunk


@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_ragged_batch_equals_oracle(group: int) -> None:
    """Chunks of lengths 1, 63, 64, 65 after prefixes of several lengths, on scattered blocks of poisoned memory."""
    kv_heads = 2 if group == 1 else 1
    check([1, 70, 64, 65, 40], [1, 63, 64, 65, 1], heads=kv_heads * group, kv_heads=kv_heads, tile=64)


def test_all_heads_to_one_key_head() -> None:
    """Multi-query attention, heads packed into the rows."""
    check([50, 20], [5, 20], heads=16, kv_heads=1)


def test_long_context() -> None:
    """A thousand tokens at once, and a chunk at the end of a thousand."""
    check([1000, 1000], [1000, 40], heads=1, kv_heads=1, rows=256, tile=128, block_tokens=64)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes(head_dim: int) -> None:
    """Head sizes that are powers of two, and others."""
    check([45], [33], heads=2, kv_heads=1, head_dim=head_dim)


@pytest.mark.parametrize(("block_tokens", "tile"), [(16, 16), (16, 64), (32, 64), (64, 64), (64, 32), (128, 32)])
def test_block_sizes(block_tokens: int, tile: int) -> None:
    """Tiles of one page, of several and of a part."""
    check([130, 63], [100, 63], heads=2, kv_heads=2, block_tokens=block_tokens, tile=tile)


@pytest.mark.skipif(ON_CPU, reason="launch parameters of Triton's programs")
@pytest.mark.parametrize(
    ("chip", "head_dim", "dtype", "stored"),
    [
        (90, 128, torch.float32, None),
        (80, 256, torch.float32, None),
        (90, 256, torch.bfloat16, torch.int8),
        (100, 256, torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_row_blocks_and_tiles_of_chips(
    chip: int, head_dim: int, dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    """Few rows by many keys, and many rows by few, as chips get them where others would spill."""
    config = prefill.choose_config(chip, head_dim, dtype.itemsize, quantized=stored is not None)
    sizes = {"rows": config.rows, "tile": config.tile}
    check([150, 70], [140, 40], heads=2, kv_heads=1, head_dim=head_dim, dtype=dtype, stored=stored, **sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    """bfloat16 and float16 within their rounding."""
    check([130, 65], [70, 65], heads=4, kv_heads=2, dtype=dtype, head_dim=128)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_quantised_contexts(dtype: torch.dtype, stored: torch.dtype) -> None:
    """Quantised keys and values give what their dequantised selves give."""
    tolerance = max(TOLERANCE[dtype], 4e-3 if dtype != torch.float32 else 0)
    check([90, 33], [50, 33], heads=4, kv_heads=2, dtype=dtype, stored=stored, tolerance=tolerance)


@pytest.mark.parametrize(
    ("group", "stored"),
    [
        (1, torch.int8), (3, torch.float8_e4m3fn), (4, torch.int8),
        pytest.param(8, torch.float8_e4m3fn, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_quantised_ragged_batch_equals_oracle(group: int, stored: torch.dtype) -> None:
    """Chunks of lengths 1, 63 and 65 after prefixes, on scattered blocks; what nobody owns is NaN, scales too."""
    check([1, 70, 65], [1, 63, 65], heads=group, kv_heads=1, stored=stored)


def test_quantised_long_context() -> None:
    """A chunk at the end of a thousand tokens, all heads to one key head."""
    check([1000], [40], heads=16, kv_heads=1, rows=256, tile=128, block_tokens=64, stored=torch.int8)


def test_quantised_chunks_equal_one_shot() -> None:
    """A prompt in chunks gives what one prefill gives, and twice the same bits."""
    p = paged([100], kv_heads=1, head_dim=64, dtype=torch.float8_e4m3fn)
    queries = random(100, 2, 64, seed=5)
    want, _ = run(p, queries, [100])
    assert torch.equal(run(p, queries, [100])[0], want)
    parts = [run(p, queries[:63].contiguous(), [63], lengths=[63])[0], run(p, queries[63:].contiguous(), [37])[0]]
    assert oracles.relative_error(torch.cat(parts), want) < 1e-6


@pytest.mark.parametrize("window", [1, 40, 500])
def test_sliding_window(window: int) -> None:
    """A row sees the last `window` keys, itself among them."""
    check([150, 64], [90, 64], heads=3, kv_heads=1, window=window)


def test_blocks_before_the_window_are_not_read() -> None:
    """Pages that no row of the chunk sees may be the null block, which is poisoned, also in the tile at the edge."""
    p = paged([150], kv_heads=1, head_dim=64)
    queries = random(10, 2, 64, seed=5)
    p.tables[0, : (140 - 50 + 1) // 16] = 0
    got, _ = run(p, queries, [10], window=50, tile=64)
    want, _ = oracles.attention(queries, p.keys[0], p.values[0], 64**-0.5, window=50)
    assert oracles.relative_error(got, want) < TOLERANCE[torch.float32]


def test_soft_cap() -> None:
    """Logits are capped by the hyperbolic tangent, with and without a window."""
    check([100], [60], heads=2, kv_heads=1, soft_cap=2.0)
    check([100], [60], heads=2, kv_heads=1, soft_cap=2.0, window=20)


def test_shared_blocks() -> None:
    """Two contexts whose tables share their first pages."""
    check([80, 60], [16, 28], heads=2, kv_heads=1, shared_blocks=2)


def test_chunks_equal_one_shot() -> None:
    """A prompt in chunks gives what one prefill gives, and twice the same bits."""
    p = paged([150], kv_heads=1, head_dim=64)
    queries = random(150, 2, 64, seed=5)
    want, _ = run(p, queries, [150])
    again, _ = run(p, queries, [150])
    assert torch.equal(want, again)
    parts, at = [], 0
    for chunk in (1, 63, 64, 22):
        parts.append(run(p, queries[at : at + chunk].contiguous(), [chunk], lengths=[at + chunk])[0])
        at += chunk
    assert oracles.relative_error(torch.cat(parts), want) < 1e-6


def test_the_batch_does_not_matter() -> None:
    """A chunk gives the same bits alone and beside others."""
    p = paged([70, 90], kv_heads=1, head_dim=64)
    queries = random(110, 2, 64, seed=5)
    both, _ = run(p, queries, [50, 60])
    p.tables, p.lengths = p.tables[1:], p.lengths[1:]
    assert torch.equal(run(p, queries[50:].contiguous(), [60])[0], both[50:])
