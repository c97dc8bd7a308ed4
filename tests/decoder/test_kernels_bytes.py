"""Attention over int8 and fp8 keys and values by dot products, on any CPU: against an oracle, on poisoned memory, bit
for bit alike.

One layer by itself (`layer_rig.py`), as `test_kernels_dots.py`: in one piece, in chunks, token by token and in batches.
What lies outside a sequence or before a window has NaN for a scale.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decoder.kernels import amx, byte_dots, byte_pairs, dots, sets, simd
from decoder.kernels.attention_bytes_softmax import query_digits, scaled_weights, weight_digits
from decoder.kernels.compiled import entry
from decoder.models.kernel_choice import choose_kernels
from tests.decoder.layer_rig import Case, in_pieces, layer_case, same

KERNELS = sets.Float32Kernels(sets.Int8DotStorage())
KERNELS = {
    "int8": sets.Float32Kernels(sets.Int8DotStorage()), "fp8": sets.Float32Kernels(sets.Float8DotStorage()),
}  # fmt: skip
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Of queries and weights that are numbers of 16 bits of their rows' units, and of those that are rounded to bfloat16.
TOLERANCE = {"int8": 2e-4, "fp8": 1e-2}
BOTH = pytest.mark.parametrize("stored", ["int8", "fp8"])
HEAD_DIMS = (16, 64, 80, 96, 128, 192, 256)


def make_case(stored: str, lengths: list[int], **shape: Any) -> Case:
    """A case of keys and values of a stored type and float32 queries."""
    return layer_case(lengths, KERNELS[stored], TYPES[stored], torch.float32, **shape)


def _check(stored: str, got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=TOLERANCE[stored], rtol=TOLERANCE[stored])


@BOTH
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("length", [1, 2, 15, 17, 63, 64, 65, 257])
def test_a_context_equals_the_oracle(stored: str, head_dim: int, length: int) -> None:
    """Every head size, in one piece and token by token, gives the oracle's outputs, both with the same bits."""
    case = make_case(stored, [length], head_dim=head_dim)
    (whole,) = case.attend([(0, 0, length)])
    _check(stored, whole, case.expected(0))
    assert same(in_pieces(case, 0, [1]), whole)


@BOTH
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (8, 2), (16, 2), (10, 2), (8, 1), (40, 1)])
@pytest.mark.parametrize("block_tokens", [1, 2, 8, 16, 64, 256])
def test_groups_and_block_sizes(stored: str, heads: int, kv_heads: int, block_tokens: int) -> None:
    """Groups of 1 to all heads in blocks of any size give the oracle's outputs; pieces of any size the same bits."""
    case = make_case(stored, [300], heads=heads, kv_heads=kv_heads, block_tokens=block_tokens)
    (whole,) = case.attend([(0, 0, 300)])
    _check(stored, whole, case.expected(0))
    assert same(in_pieces(case, 0, [1, 2, 7, 64, 3]), whole)


@BOTH
@pytest.mark.parametrize("window", [1, 2, 7, 16, 37, 270])
@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_before_a_window_all_may_be_poison(stored: str, window: int, block_tokens: int) -> None:
    """Single tokens and short chunks read nothing that lies before their windows, where all is NaN by then."""
    case = make_case(stored, [600], window=window, block_tokens=block_tokens, head_dim=80)
    scales = case.held.scales
    assert scales is not None
    (whole,) = case.attend([(0, 0, 600)])
    _check(stored, whole, case.expected(0))
    first, passed = 0, 0
    for size in itertools.cycle([1, 1, 2, 1, 5, 30]):
        if first + size > 600:
            break
        for token in range(passed, first - window + 1):
            block = case.held.tables[0, token // block_tokens]
            case.held.arena.view(torch.uint8)[block, :, :, :, token % block_tokens] = 0x7F
            scales[block, :, :, :, token % block_tokens] = math.nan
        passed = max(passed, first - window + 1)
        (piece,) = case.attend([(0, first, first + size)])
        assert same(piece, whole[first : first + size]), (first, size)
        first += size
    assert passed > 0 or window >= 600
    with_poison = case.attend([(0, 0, 600)])[0]
    assert with_poison.isnan().any(), "the poison is seen by what looks at it"


@BOTH
@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_soft_cap_is_kept(stored: str, head_dim: int) -> None:
    """Scores that a soft cap bounds give the oracle's outputs, which without the cap are others."""
    case = make_case(stored, [280], head_dim=head_dim, soft_cap=1.0)
    (whole,) = case.attend([(0, 0, 280)])
    _check(stored, whole, case.expected(0))
    (free,) = dataclasses.replace(case, soft_cap=0.0).attend([(0, 0, 280)])
    assert (free - whole).abs().max() > 10 * TOLERANCE[stored]
    assert same(in_pieces(case, 0, [1, 40]), whole)


@BOTH
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (20, 1)])
def test_a_batch_over_a_shared_prefix_changes_no_bit(stored: str, heads: int, kv_heads: int) -> None:
    """Decodes that share spans, beside chunks, have the bits that each has alone."""
    lengths = [700, 513, 640, 514, 900, 545]
    case = make_case(stored, lengths, heads=heads, kv_heads=kv_heads, head_dim=96, shared_blocks=32)
    alone = [case.attend([(index, length - 1, length)])[0] for index, length in enumerate(lengths)]
    together = case.attend([(index, length - 1, length) for index, length in enumerate(lengths)])
    mixed = case.attend([(0, 699, 700), (1, 512, 513), (2, 639, 640), (3, 513, 514), (4, 800, 900), (5, 510, 545)])
    for index, length in enumerate(lengths):
        _check(stored, alone[index], case.expected(index, length - 1))
        assert same(together[index], alone[index]), length
        assert same(mixed[index][-1:], alone[index]), length


@BOTH
def test_values_that_are_nan_are_seen_by_those_that_look_at_them(stored: str) -> None:
    """A row of values with NaN for a scale makes NaN of the queries that look at it, and changes no bit of others."""
    case = make_case(stored, [300])
    assert case.held.scales is not None
    (before,) = case.attend([(0, 0, 300)])
    case.held.scales[case.held.tables[0, 120 // 16], :, 1, 0, 120 % 16] = math.nan
    for after in (case.attend([(0, 0, 300)])[0], in_pieces(case, 0, [1])):
        assert same(after[:120], before[:120]) and same(after[:, 3:], before[:, 3:])
        assert after[120:, :3].isnan().all()


@BOTH
def test_the_largest_sums_fit(stored: str) -> None:
    """Where all elements are the largest, of either sign, whole spans of wide heads give the value they agree on."""
    for sign in (1.0, -1.0):
        case = make_case(stored, [512], head_dim=256, heads=2)
        assert case.held.scales is not None
        peak, rounded = {"int8": (127.0, 2e-5), "fp8": (448.0, 2**-8)}[stored]
        case.held.arena[...] = torch.tensor(peak * sign).to(case.held.arena.dtype)
        case.held.scales[...] = torch.where(case.held.scales.isnan(), torch.nan, 0.5)
        case.queries[0][...] = 3.0
        (whole,) = case.attend([(0, 0, 512)])
        torch.testing.assert_close(whole, torch.full_like(whole, 0.5 * peak * sign), atol=0.0, rtol=rounded)


def _of_digits(digits: NDArray[Any]) -> NDArray[np.float64]:
    """The whole numbers that rows of digits stand for."""
    places = 256.0 ** np.arange(len(digits))
    return (digits.astype(np.float64) * places[:, None]).sum(0)


@entry
def _query(source: int, columns: int, target: int, first: int) -> float:
    return query_digits(source, columns, target, first)


@entry
def _weights(
    row: int, begin: int, keys: int, floor: int, bound: int, maximum: float, scales: int, total: int, digits: int
) -> float:
    unit = scaled_weights(row, begin, keys, floor, bound, np.float32(0.5), maximum, scales, total)
    weight_digits(row, begin, keys, unit, digits, 256)
    return unit


@pytest.mark.parametrize("gain", [1e-30, 1e-3, 1.0, 1e30])
def test_queries_are_digits_of_a_unit(gain: float) -> None:
    """Digits times the unit are off by half a unit at most, which is below 2**-14 of the largest element."""
    row = (np.random.default_rng(3).normal(0, 1, 80) * gain).astype(np.float32)
    digits, first = np.zeros((byte_dots.DIGITS, 80), np.int8), np.zeros(4, np.int32)
    unit = _query(row.ctypes.data, 80, digits.ctypes.data, first.ctypes.data)
    assert np.abs(_of_digits(digits) * unit - row).max() <= unit * 0.501
    assert unit <= np.abs(row).max() * 2**-14
    assert np.array_equal(first[: byte_dots.DIGITS], -128 * digits.astype(np.int32).sum(1))
    for special, want in ((0.0, 0.0), (np.nan, np.nan), (np.inf, np.nan)):
        row[:] = special
        unit = _query(row.ctypes.data, 80, digits.ctypes.data, first.ctypes.data)
        assert np.isnan(unit) if np.isnan(want) else not digits.any()


@pytest.mark.parametrize(("begin", "keys", "floor", "bound"), [(0, 256, 0, 256), (0, 77, 3, 60), (37, 201, 41, 199)])
def test_weights_are_digits_of_a_unit(begin: int, keys: int, floor: int, bound: int) -> None:
    """Weights times scales are off by half a unit; those of others' keys are zero, whatever scores and scales are."""
    generator = np.random.default_rng(4)
    scores, scales = generator.normal(0, 8, 256).astype(np.float32), generator.uniform(0.5, 2, 256).astype(np.float32)
    maximum = scores[floor:bound].max() * np.float32(0.5)
    want = np.exp2(scores.astype(np.float64) * 0.5 - maximum)[floor:bound]
    exact = want * scales[floor:bound]
    for array in (scores, scales):
        array[:floor] = array[bound:] = np.nan
    digits, total = np.full((byte_dots.DIGITS, 256), 0xAA, np.uint8), np.zeros(1, np.float32)
    unit = _weights(
        scores.ctypes.data, begin, keys, floor, bound, maximum, scales.ctypes.data, total.ctypes.data,
        digits.ctypes.data,
    )  # fmt: skip
    assert np.abs(_of_digits(digits)[floor:bound] * unit - exact).max() <= unit * 0.51
    assert unit <= exact.max() * 2**-15
    assert total[0] == pytest.approx(want.sum(), rel=1e-6)
    assert not digits[:, begin & ~15 : floor].any() and not digits[:, bound : (keys + 15) & ~15].any()


@pytest.mark.parametrize("instruction", [True, False])
def test_a_dot_product_is_that_of_bytes_with_and_without_a_sign(
    instruction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's instruction and what stands for it give the sums of products of four bytes, for all pairs of bytes."""
    if instruction and not byte_dots.HAS_BYTE_DOTS:
        pytest.skip("this CPU has no such instruction")
    monkeypatch.setattr(byte_dots, "HAS_BYTE_DOTS", instruction)
    dot = simd._operation(simd.INTS, (simd.INTS,) * 3, byte_dots.emit_dot)

    @entry
    def add_dots(unsigned: int, signed: int, totals: int, count: int) -> None:
        for offset in range(0, count * 4, 64):
            total = dot(
                simd.load_ints(unsigned + offset), simd.load_ints(signed + offset), simd.load_ints(totals + offset)
            )
            simd.store_ints(totals + offset, total)

    pairs = np.stack(np.meshgrid(np.arange(256), np.arange(-128, 128)), -1).reshape(-1, 2)
    pairs = np.random.default_rng(5).permutation(pairs)
    unsigned, signed = pairs[:, 0].astype(np.uint8), pairs[:, 1].astype(np.int8)
    totals = np.arange(len(pairs) // 4, dtype=np.int32)
    want = totals + (unsigned.astype(np.int32) * signed).reshape(-1, 4).sum(1)
    add_dots(unsigned.ctypes.data, signed.ctypes.data, totals.ctypes.data, len(totals))
    assert np.array_equal(totals, want)


@pytest.mark.parametrize("tables", [True, False])
def test_every_e4m3_number_becomes_one_of_a_pair(tables: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, and what stands for them, give 2**-8 of each finite number exactly, and a number for NaN."""
    if tables and not byte_pairs.HAS_TABLES:
        pytest.skip("this CPU has no such instruction")
    monkeypatch.setattr(byte_pairs, "HAS_TABLES", tables)
    evens, odds = (
        simd._operation(simd.INTS, (simd.INTS,), lambda b, words, part=part: byte_pairs.emit_pairs(b, words)[part])
        for part in range(2)
    )

    @entry
    def convert(source: int, target: int) -> None:
        for offset in range(0, 256, 64):
            words = simd.load_ints(source + offset)
            simd.store_ints(target + 2 * offset, evens(words))
            simd.store_ints(target + 2 * offset + 64, odds(words))

    codes = np.random.default_rng(6).permutation(256).astype(np.uint8)
    pairs = np.zeros((4, 2, 16, 2), np.uint16)
    convert(codes.ctypes.data, pairs.ctypes.data)
    found = (pairs.astype(np.uint32) << 16).view(np.float32).transpose(0, 2, 3, 1).reshape(256)
    want = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy() / 256
    finite = np.isfinite(want)
    assert np.array_equal(found[finite], want[finite])
    assert np.array_equal(np.abs(found[~finite]), [480 / 256] * 2)


def test_where_dot_products_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are for stored bytes where the CPU can, unless weights are float32 or sets portable."""
    monkeypatch.setattr(amx, "available", lambda: False)
    both = {"int8": (sets.Int8Storage, sets.Int8DotStorage), "fp8_e4m3": (sets.Float8Storage, sets.Float8DotStorage)}
    for has, kernels, kv_dtype in itertools.product((True, False), ("auto", "portable"), both):
        for module, name in ((byte_dots, "HAS_BYTE_DOTS"), (byte_pairs, "HAS_TABLES"), (dots, "HAS_DOTS")):
            monkeypatch.setattr(module, name, has)
        wanted = both[kv_dtype][has and kernels == "auto"]
        found = choose_kernels(kv_dtype, bfloat16=True, head_dim=64, kernels=kernels)
        assert isinstance(found, sets.WideKernels) and type(found.storage) is wanted
        found = choose_kernels(kv_dtype, bfloat16=False, grouped=True, head_dim=64, kernels=kernels)
        assert isinstance(found, sets.GroupedKernels) and type(found.storage) is wanted
        found = choose_kernels(kv_dtype, bfloat16=False, head_dim=64, kernels=kernels)
        assert isinstance(found, sets.Float32Kernels) and type(found.storage) is both[kv_dtype][0]
