"""How keys and values are stored: each storage writes rows and reads them back, alone, without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.layout import KvLayout
from decoder.grouped_arena import private_arena
from decoder.kernels import blocks, quantized, sets, simd
from decoder.kernels.compiled import entry
from decoder.kernels.kv_write.cpu import write
from decoder.kernels.row_scales import lay_out_rates
from decoder.kernels.stored_rows import load_rows, load_scales, store_row
from tests.kernels import oracles

HEAD_DIM = 32
HALF_MAX = 65504.0
SMALLEST = 2.0**-126
QUANTIZED = {sets.Int8Storage: 127.0, sets.Float8Storage: 448.0}
QUANTIZED_TYPES = {sets.Int8Storage: torch.int8, sets.Float8Storage: torch.float8_e4m3fn}


@entry
def _round_trip(
    kernels: Any, source: int, stored: int, scales: int, rows: int, target: int, factors: int, rates: int
) -> None:
    for row in range(rows):
        store_row(kernels, stored + row * HEAD_DIM, scales + row * 2, source + row * HEAD_DIM * 4, HEAD_DIM, rates)
    load_rows(kernels, stored, rows, HEAD_DIM, target)
    for row in range(0, rows if factors else 0, 16):
        simd.store_floats(factors + row * 4, load_scales(kernels, scales + row * 2))


@entry
def _rates(norm: int, head_dim: int, half: int, target: int) -> None:
    lay_out_rates(norm, head_dim, half, target)


def half_round_trip(values: NDArray[np.float32]) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """A row of HEAD_DIM as stored in float16, and read back."""
    stored, back = np.zeros(HEAD_DIM, np.float16), np.zeros(HEAD_DIM, np.float32)
    kernels = sets.WideKernels(sets.Float16Storage())
    _round_trip(kernels, values.ctypes.data, stored.ctypes.data, 0, 1, back.ctypes.data, 0, 0)
    return stored, back


def quantized_round_trip(
    storage: sets.Storage, values: NDArray[np.float32], *, keys: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """Elements, scales and what is read back of rows [n, HEAD_DIM]."""
    values = np.ascontiguousarray(values, np.float32)
    rows, places = values.shape[0], -(-values.shape[0] // 16) * 16
    stored, bits = np.zeros(values.shape, np.uint8), np.zeros(places, np.uint16)
    back, factors = np.zeros(values.shape, np.float32), np.zeros(places, np.float32)
    kernels = sets.WideKernels(storage)
    rates = np.ones(HEAD_DIM, np.float32)
    source, target, elements, scales, found = (x.ctypes.data for x in (values, back, stored, bits, factors))
    _round_trip(kernels, source, elements, scales, rows, target, found, rates.ctypes.data if keys else 0)
    return stored, (bits[:rows].astype(np.uint32) << 16).view(np.float32), back * factors[:rows, None]


@pytest.mark.parametrize("scale", [1e-9, 1e-7, 1e-5, 1e-3, 1.0, 1e3])
def test_float16_rounds_as_numpy(scale: float) -> None:
    """A stored row has the bits numpy's float16 has, subnormal numbers too, and is read back as those."""
    values = (np.random.default_rng(1).standard_normal(HEAD_DIM) * scale).astype(np.float32)
    stored, back = half_round_trip(values)
    want = values.astype(np.float16)
    assert np.array_equal(stored.view(np.uint16), want.view(np.uint16))
    assert np.array_equal(back, want.astype(np.float32))


def test_float16_saturates_and_keeps_nan() -> None:
    """What float16 cannot hold becomes its largest number and never an infinity; a NaN stays one."""
    values = np.zeros(HEAD_DIM, np.float32)
    values[:8] = [65503.9, 65519.9, 65520.0, 1e6, -65520.0, -3e38, np.inf, -np.inf]
    values[8:10] = [np.nan, -np.nan]
    _, back = half_round_trip(values)
    assert np.array_equal(back[:8], np.sign(values[:8]) * HALF_MAX)
    assert np.isnan(back[8:10]).all()
    assert not back[10:].any()


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("gain", [1e-37, 1e-30, 1e-6, 1.0, 1e6, 1e37])
def test_quantised_rows_lie_within_half_a_step(kind: type[sets.Storage], gain: float) -> None:
    """A scale is the largest magnitude over the peak, rounded up to bfloat16; an element is off by half a step.

    Bit for bit as the oracle to which the GPU's form is held too.
    """
    values = (np.random.default_rng(2).standard_normal((40, HEAD_DIM)) * gain).astype(np.float32)
    stored, scales, back = quantized_round_trip(kind(), values)
    exact = np.maximum(np.abs(values).max(1) / np.float32(QUANTIZED[kind]), SMALLEST)
    assert (scales >= exact).all()
    assert (scales <= exact * (1 + 2**-7)).all()
    step = np.broadcast_to(scales[:, None], values.shape)
    if kind is sets.Float8Storage:
        elements = torch.from_numpy(stored).view(torch.float8_e4m3fn).float().numpy()
        step = np.maximum(np.abs(values) / 8, scales[:, None] * 2**-9)
    else:
        elements = stored.view(np.int8).astype(np.float32)
    bits, bfloat16 = oracles.quantize(torch.from_numpy(values), QUANTIZED_TYPES[kind])
    assert np.array_equal(stored, bits.view(torch.uint8).numpy())
    assert np.array_equal(scales, bfloat16.float().numpy())
    assert np.array_equal(back, elements * scales[:, None])
    assert (np.abs(back.astype(np.float64) - values) <= step.astype(np.float64) * 0.5001).all()


@pytest.mark.parametrize("gain", [1e-37, 1e-30, 1e-6, 1.0, 1e6, 1e37])
def test_keys_in_e4m3_have_the_best_of_sixteen_scales(gain: float) -> None:
    """Bit for bit as the oracle's; the error that is left is well below that of the least scale, which values keep."""
    values = (np.random.default_rng(4).standard_normal((400, HEAD_DIM)) * gain).astype(np.float32)
    stored, scales, back = quantized_round_trip(sets.Float8Storage(), values, keys=True)
    bits, bfloat16 = oracles.quantize(torch.from_numpy(values), torch.float8_e4m3fn, keys=True)
    assert np.array_equal(scales, bfloat16.float().numpy())
    assert np.array_equal(stored, bits.view(torch.uint8).numpy())
    _, least, plain = quantized_round_trip(sets.Float8Storage(), values)
    assert ((scales >= least) & (scales <= least * 1.96)).all() and (scales > least).mean() > 0.5
    exact = values.astype(np.float64) / gain
    error, before = (np.square(rows.astype(np.float64) / gain - exact).sum() for rows in (back, plain))
    if gain > 1e-37:  # there the least normal scale is too coarse for a choice
        assert error < 0.85 * before


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 32), (80, 80), (96, 24), (256, 256)])
def test_rates_of_errors_are_powers_of_two_by_the_weights_of_a_norm(head_dim: int, rotary_dim: int) -> None:
    """Bit for bit as the oracle's, at most 1, alike for what is rotated together; all 1 without a norm."""
    norm = (np.exp2(3 * np.random.default_rng(6).standard_normal(head_dim))).astype(np.float32)
    norm[[1, 5, head_dim - 1]] = -norm[1], 0, 1e-30
    found = np.full(head_dim + 16, np.nan, np.float32)
    _rates(norm.ctypes.data, head_dim, rotary_dim // 2, found.ctypes.data)
    want = oracles.error_rates(torch.from_numpy(norm), rotary_dim).numpy()
    assert np.array_equal(found[:head_dim], want) and np.isnan(found[head_dim:]).all()
    assert want.max() == 1 and len(set(want)) > 4 and (want >= 2.0**-8).all()
    _rates(0, head_dim, rotary_dim // 2, found.ctypes.data)
    assert (found[:head_dim] == 1).all() and np.isnan(found[head_dim:]).all()


@pytest.mark.parametrize("rotary_dim", [64, 32, 24])
def test_errors_of_keys_count_by_the_norm_of_queries(rotary_dim: int) -> None:
    """Where queries have a norm, an e4m3 scale is that with the least error times its weights, bit for bit as the
    oracle to which the GPU's form is held too. A quarter of the scales at least are others than without
    it: the control."""
    generator = torch.Generator().manual_seed(11)
    query_norm = torch.randn(64, generator=generator).exp2() * 0.1
    key_norm = (torch.randn(64, generator=generator).abs() * 16).round() / 16 + 0.25
    rows, keys = oracles.keys_of_exact_norms(12, key_norm, seed=12)
    layout = KvLayout.of(1, 8, 64, 16, "fp8_e4m3")
    storage = torch.zeros((13, layout.block_bytes), dtype=torch.uint8)
    arena, scales = quantized.views(storage, 1, 8, 64, 16, torch.float8_e4m3fn)
    numbers, ones = torch.arange(1, 13, dtype=torch.int32), torch.ones((1, rotary_dim // 2))
    write(
        rows, rows, rows, arena, 0, numbers[:, None].contiguous(), numbers - 1, numbers * 0, ones, ones * 0,
        torch.empty_like(rows), scales=scales, norms=(query_norm, key_norm), epsilon=0.0,
    )  # fmt: skip
    rates = oracles.error_rates(query_norm, rotary_dim)
    elements, want = oracles.quantize(keys, torch.float8_e4m3fn, keys=True, rates=rates)
    got = scales[1:, 0, 0, :, 0]
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    assert torch.equal(arena[1:, 0, 0, :, 0].contiguous().view(torch.uint8), elements.view(torch.uint8))
    assert (got != oracles.quantize(keys, torch.float8_e4m3fn, keys=True)[1]).float().mean() > 0.25


@pytest.mark.parametrize("kind", QUANTIZED)
def test_keys_that_are_not_finite_or_zero_are_stored_as_values_are(kind: type[sets.Storage]) -> None:
    """NaN rows stay NaN, rows of zeros zeros, and int8 knows no difference."""
    values = np.random.default_rng(5).standard_normal((4, HEAD_DIM)).astype(np.float32)
    values[0, 3], values[1, 5], values[2] = np.nan, -np.inf, 0
    stored, scales, back = quantized_round_trip(kind(), values, keys=True)
    others = quantized_round_trip(kind(), values)
    rows = slice(0, 4 if kind is sets.Int8Storage else 3)
    assert np.array_equal(stored[rows], others[0][rows])
    assert np.array_equal(scales[rows].view(np.uint32), others[1][rows].view(np.uint32))
    assert np.isnan(back[:2]).all() and not back[2].any()


def test_e4m3_rounds_as_torch() -> None:
    """Every finite e4m3 number, every tie between two and its neighbours are stored as torch converts them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    flat = torch.cat([numbers, ties, ties * 1.0001, ties * 0.9999])
    rows = torch.cat([flat, torch.zeros(-flat.numel() % (HEAD_DIM - 1))]).reshape(-1, HEAD_DIM - 1)
    rows = torch.cat([rows, torch.full((rows.shape[0], 1), 448.0)], 1)  # the scale is 1
    stored, scales, back = quantized_round_trip(sets.Float8Storage(), rows.numpy())
    want = rows.to(torch.float8_e4m3fn)
    assert (scales == 1).all()
    assert np.array_equal(back, want.float().numpy())
    assert np.array_equal(stored & 0x7F, want.view(torch.uint8).numpy() & 0x7F)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_row_that_is_not_finite_is_read_as_nan(kind: type[sets.Storage]) -> None:
    """One NaN or infinity, wherever it stands, makes its whole row NaN, and no other; zeros stay zeros."""
    values = np.ones((6, HEAD_DIM), np.float32)
    values[0, 0] = values[1, HEAD_DIM - 1] = np.nan
    values[2, 5], values[3, 6] = np.inf, -np.inf
    values[5] = 0
    _, _, back = quantized_round_trip(kind(), values)
    assert np.isnan(back[:4]).all()
    assert np.allclose(back[4], 1, rtol=0.01)
    assert not back[5].any()


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_copy_and_scrub_take_scales_along(kv_dtype: str) -> None:
    """Elements and scales of exactly the named tokens are copied; poison makes every scale NaN; other blocks stay."""
    layout = KvLayout.of(2, 3, 16, 4, kv_dtype)
    arena = private_arena(layout, 3)
    arena[:] = np.random.default_rng(0).integers(0, 256, arena.shape)
    before = arena.copy()
    one = np.ones(1, np.int32)
    blocks.copy_tokens(blocks.planes(arena, layout), one, 3 * one, 3 * one)
    for view, old in zip(blocks.planes(arena, layout), blocks.planes(before, layout), strict=True):
        assert np.array_equal(view[3, :, :, :, :3], old[1, :, :, :, :3])
        assert np.array_equal(view[3, :, :, :, 3:], old[3, :, :, :, 3:])
    assert np.array_equal(arena[:3], before[:3])
    assert not np.array_equal(arena[3], before[3])
    blocks.fill(arena, one, True)
    assert ((blocks.planes(arena, layout)[1][1] & 0x7FFF) > 0x7F80).all()
    assert np.array_equal(arena[2], before[2])
    blocks.fill(arena, one, False)
    assert not arena[1].any()
