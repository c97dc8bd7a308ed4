"""Paged decode and its plan against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels import oracles
from tests.kernels.rig import DEVICE, LAYER, ON_CPU, TOLERANCE, Paged, form, int32, paged, random

decode, prefill = form("paged_decode"), form("paged_prefill")


def make_plan(p: Paged, queries: torch.Tensor, programs: int, tile: int, window: int = 0) -> Any:
    """A plan in poisoned memory."""
    plan = decode.DecodePlan.allocate(
        max_batch=len(p.lengths) + 3,
        heads=queries.shape[2],
        kv_heads=p.arena.shape[3],
        head_dim=queries.shape[3],
        programs=programs,
        tile=tile,
        device=DEVICE,
        query_len=queries.shape[1],
    )
    if not ON_CPU:
        plan.partial.fill_(torch.nan)
        plan.statistics.fill_(torch.inf)  # a maximum passes NaN over
        plan.starts.fill_(-(10**8))
        plan.ranges.fill_(-(10**8))
    plan.build(p.lengths, window)
    return plan


def run(
    p: Paged,
    queries: torch.Tensor,
    *,
    programs: int = 5,
    tile: int = 32,
    window: int = 0,
    soft_cap: float = 0.0,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log sums, poisoned before."""
    output = torch.full_like(queries, torch.nan)
    log_sums = torch.full(queries.shape[:3], torch.nan, device=DEVICE)
    decode.attend(
        queries,
        p.arena,
        LAYER,
        p.tables,
        p.lengths,
        make_plan(p, queries, programs, tile, window),
        output,
        scale=queries.shape[3] ** -0.5,
        scales=p.scales,
        soft_cap=soft_cap,
        causal=causal,
        log_sums=log_sums,
        config=None if ON_CPU else decode.DecodeConfig(tile, 4, 2, 1),
    )
    return output, log_sums


def check(
    lengths: list[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int = 64,
    query_len: int = 1,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    block_tokens: int = 16,
    shared_blocks: int = 0,
    tolerance: float | None = None,
    programs: int = 5,
    tile: int = 32,
    window: int = 0,
    soft_cap: float = 0.0,
    causal: bool = True,
) -> None:
    """Every sequence equals the oracle, and the log sums do."""
    p = paged(
        lengths,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        dtype=stored or dtype,
        shared_blocks=shared_blocks,
    )
    queries = random(len(lengths), query_len, heads, head_dim, seed=5, dtype=dtype)
    got, log_sums = run(p, queries, programs=programs, tile=tile, window=window, soft_cap=soft_cap, causal=causal)
    for i in range(len(lengths)):
        want, sums = oracles.attention(
            queries[i], p.keys[i], p.values[i], head_dim**-0.5, window=window, soft_cap=soft_cap, causal=causal
        )
        assert oracles.relative_error(got[i], want) < (tolerance or TOLERANCE[dtype])
        assert float((log_sums[i] - sums).abs().max()) < 2e-2


@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_lengths_equal_oracle(group: int) -> None:
    """Lengths 1, 63, 64, 65 and more in one batch, on scattered blocks of poisoned memory."""
    check([1, 63, 64, 65, 130, 16], heads=2 * group, kv_heads=2, tile=64)


def test_all_heads_to_one_key_head() -> None:
    """Multi-query attention with more heads than the smallest row block."""
    check([50, 20], heads=32, kv_heads=1)


def test_long_context() -> None:
    """A thousand tokens beside a short one, over many programs."""
    check([1000, 3], heads=2, kv_heads=1, programs=7, tile=64, block_tokens=64)


@pytest.mark.parametrize("programs", [1, 3, 40])
def test_splits_do_not_matter(programs: int) -> None:
    """One program, some, and more than there are tiles."""
    check([1, 70, 200, 33], heads=4, kv_heads=2, programs=programs)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes(head_dim: int) -> None:
    """Head sizes that are powers of two, and others."""
    check([45, 64], heads=2, kv_heads=1, head_dim=head_dim)


@pytest.mark.parametrize(("block_tokens", "tile"), [(16, 16), (16, 64), (32, 64), (64, 64), (64, 32), (128, 32)])
def test_block_sizes(block_tokens: int, tile: int) -> None:
    """Tiles of one page, of several and of a part."""
    check([130, 63, 65], heads=2, kv_heads=2, block_tokens=block_tokens, tile=tile)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    """bfloat16 and float16 within their rounding."""
    check([130, 65], heads=4, kv_heads=2, dtype=dtype, head_dim=128)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantised_contexts(dtype: torch.dtype, stored: torch.dtype) -> None:
    """Quantised keys and values give what their dequantised selves give."""
    tolerance = max(TOLERANCE[dtype], 4e-3 if dtype != torch.float32 else 0)
    check([90, 33], heads=4, kv_heads=2, dtype=dtype, stored=stored, tolerance=tolerance)


@pytest.mark.parametrize(
    ("group", "stored"),
    [
        (1, torch.int8), (3, torch.float8_e4m3fn), (8, torch.int8),
        pytest.param(4, torch.float8_e4m3fn, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_quantised_lengths_equal_oracle(group: int, stored: torch.dtype) -> None:
    """Lengths 1, 63, 64 and 65 on scattered blocks; what nobody owns is NaN, scales too."""
    check([1, 63, 64, 65], heads=group, kv_heads=1, tile=64, stored=stored)


def test_quantised_heads_to_one_key_head_over_a_long_context() -> None:
    """A thousand tokens beside a short context, over many programs, with more heads than the smallest row block."""
    check([1000, 3], heads=32, kv_heads=1, programs=7, tile=64, block_tokens=64, stored=torch.int8)


def test_quantised_splits_do_not_matter() -> None:
    """One program and many give the same within rounding, and two runs of each the same bits."""
    p = paged([1, 150], kv_heads=2, head_dim=64, dtype=torch.int8)
    queries = random(2, 1, 4, 64, seed=5)
    one, many = (run(p, queries, programs=programs)[0] for programs in (1, 20))
    assert oracles.relative_error(one, many) < 1e-6
    assert torch.equal(run(p, queries, programs=20)[0], many)


def test_e4m3_as_bytes() -> None:
    """On chips that cannot convert e4m3 its bytes are decoded by hand, to the same numbers."""
    p = paged([90, 33], kv_heads=2, head_dim=64, dtype=torch.float8_e4m3fn)
    queries = random(2, 1, 4, 64, seed=5)
    want, _ = run(p, queries)
    p.arena = p.arena.view(torch.uint8)
    assert torch.equal(run(p, queries)[0], want)


@pytest.mark.parametrize("query_len", [2, 5, 8])
def test_several_query_positions(query_len: int) -> None:
    """Speculated positions see what is before each of them; the first may be the context's first token."""
    check([query_len, 33, 64, 67, 130], heads=6, kv_heads=2, query_len=query_len)


@pytest.mark.parametrize("window", [1, 40, 500])
@pytest.mark.parametrize("query_len", [1, 3])
def test_sliding_window(window: int, query_len: int) -> None:
    """A position sees the last `window` keys, itself among them."""
    check([150, 64, 33], heads=3, kv_heads=1, window=window, query_len=query_len)


def test_blocks_before_the_window_are_not_read() -> None:
    """Pages that no query sees may be the null block, which is poisoned, also in the tile at the edge."""
    p = paged([150], kv_heads=1, head_dim=64)
    queries = random(1, 1, 2, 64, seed=5)
    p.tables[0, : (150 - 50) // 16] = 0
    got, _ = run(p, queries, window=50, tile=64)
    want, _ = oracles.attention(queries[0], p.keys[0], p.values[0], 64**-0.5, window=50)
    assert oracles.relative_error(got[0], want) < TOLERANCE[torch.float32]


def test_soft_cap() -> None:
    """Logits are capped by the hyperbolic tangent."""
    check([100, 31], heads=2, kv_heads=1, soft_cap=2.0)


def test_without_causal_mask() -> None:
    """Every position sees the whole context."""
    check([100, 31], heads=2, kv_heads=1, query_len=4, causal=False)


def test_shared_blocks() -> None:
    """Contexts whose tables share their first pages."""
    check([80, 60, 41], heads=2, kv_heads=1, shared_blocks=2)


@pytest.mark.parametrize("programs", [1, 20])
def test_empty_places(programs: int) -> None:
    """Places of length 0, with tables of null blocks, give zeros; their neighbours do not notice."""
    p = paged([70, 33], kv_heads=2, head_dim=64)
    queries = random(5, 1, 4, 64, seed=5)
    places = [1, 3]
    tables = torch.zeros((5, p.tables.shape[1]), dtype=torch.int32, device=DEVICE)
    tables[places] = p.tables
    p.tables, p.lengths = tables, int32([0, 70, 0, 33, 0])
    got, log_sums = run(p, queries, programs=programs)
    for place, k, v in zip(places, p.keys, p.values, strict=True):
        want, _ = oracles.attention(queries[place], k, v, 64**-0.5)
        assert oracles.relative_error(got[place], want) < TOLERANCE[torch.float32]
    assert not got[[0, 2, 4]].any()
    assert torch.isneginf(log_sums[[0, 2, 4]]).all()


def test_no_work_at_all() -> None:
    """A batch of empty places gives zeros."""
    p = paged([16], kv_heads=1, head_dim=64)
    p.lengths = int32([0])
    assert not run(p, random(1, 1, 2, 64, seed=5))[0].any()


def test_twice_the_same_bits() -> None:
    """Two runs of one plan agree bit for bit."""
    dtype = torch.float32 if ON_CPU else torch.bfloat16  # a CPU's form is compiled for each type
    p = paged([150, 40], kv_heads=2, head_dim=64, dtype=dtype)
    queries = random(2, 1, 8, 64, seed=5, dtype=dtype)
    first, sums = run(p, queries)
    second, again = run(p, queries)
    assert torch.equal(first, second)
    assert torch.equal(sums, again)


def test_decode_equals_longer_prefill() -> None:
    """The last position decoded gives what it gives in a prefill of the whole context."""
    p = paged([99], kv_heads=2, head_dim=64)
    queries = random(99, 4, 64, seed=5)
    output = torch.full_like(queries, torch.nan)
    starts, lengths = np.array([0, 99], np.int32), np.array([99], np.int32)
    rows_plan = prefill.plan(starts, lengths, 2, 32, DEVICE)
    prefill.attend(
        queries, p.arena, LAYER, p.tables, int32([0, 99]), p.lengths, rows_plan, output, scale=0.125,
        config=None if ON_CPU else prefill.PrefillConfig(32, 32, 4, 1),
    )  # fmt: skip
    got, _ = run(p, queries[None, -1:].contiguous())
    assert oracles.relative_error(got[0, 0], output[-1]) < 1e-6


@pytest.mark.skipif(ON_CPU, reason="launch parameters of Triton's programs")
@pytest.mark.parametrize("registers", [0, 255])
def test_a_limit_of_registers_is_handed_on(registers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch has the limit of its parameters, and none where they leave it to the assembler."""
    launches: list[dict[str, Any]] = []
    kernel = decode.decode_kernel

    class Recording:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: (launches.append(options), kernel[grid](*arguments, **options))

    monkeypatch.setattr(decode, "decode_kernel", Recording())
    p = paged([33], kv_heads=1, head_dim=64)
    queries = random(1, 1, 2, 64, seed=5)
    output = torch.full_like(queries, torch.nan)
    decode.attend(
        queries, p.arena, LAYER, p.tables, p.lengths, make_plan(p, queries, 2, 32), output, scale=0.125,
        config=decode.DecodeConfig(32, 4, 2, 1, registers),
    )  # fmt: skip
    assert [options.get("maxnreg", 0) for options in launches] == [registers]
    assert oracles.relative_error(output[0], oracles.attention(queries[0], p.keys[0], p.values[0], 0.125)[0]) < 1e-5


@pytest.mark.skipif(ON_CPU, reason="a plan of Triton's programs")
@pytest.mark.parametrize("programs", [1, 9])
@pytest.mark.parametrize("window", [0, 50])
def test_the_plan_covers_every_tile_once(programs: int, window: int) -> None:
    """Ranges are equal within one tile, and together they are the list of all (sequence, head, tile)."""
    lengths = np.random.default_rng(3).integers(0, 200, 300)
    lengths[:3] = lengths[-2:] = 0
    p = paged([1], kv_heads=2, head_dim=64)
    p.lengths = int32(lengths.tolist())
    plan = make_plan(p, random(300, 1, 2, 64, seed=1), programs, 32, window)
    tiles = [-(-n // 32) - (max(0, n - window) // 32 if window else 0) for n in lengths.tolist()]
    work = [(i, h, t) for i, n in enumerate(tiles) for h in range(2) for t in range(n)]
    ranges = plan.ranges.cpu().numpy()
    counts = ranges[:, 3]
    assert counts.sum() == len(work)
    assert counts.max() - counts.min() <= 1
    firsts = np.cumsum(counts) - counts
    assert [tuple(r[:3]) for r in ranges if r[3]] == [work[f] for f, c in zip(firsts, counts, strict=True) if c]
    assert plan.starts[:301].tolist() == [0, *np.cumsum(tiles).tolist()]
