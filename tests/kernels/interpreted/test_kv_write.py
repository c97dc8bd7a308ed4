"""The fused norm, rotation, quantisation and store against the oracle."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.rig import DEVICE, LAYER, TOLERANCE, empty_arena, form, int32, random

kv_write = form("kv_write")

POSITIONS = [0, 15, 16, 17, 40, 63, 3, 0]
SEQUENCES = [0, 0, 0, 0, 1, 1, 2, 3]
TABLES = [[5, 2, 0, 0], [4, 7, 3, 1], [6, 0, 0, 0], [0, 0, 0, 0]]  # the last is an empty place


def check(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    block_tokens: int = 16,
    rotary_dim: int | None = None,
    norm: bool = False,
    gain: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, keys and values equal the oracle; nothing else of the arena is touched. Returns stored and true keys."""
    tokens = len(POSITIONS)
    packed = random(tokens, heads + 2 * kv_heads, head_dim, seed=1, dtype=dtype) * gain
    q, k, v = packed.split([heads, kv_heads, kv_heads], dim=1)
    angles = torch.arange(64)[:, None] * torch.logspace(0, -3, (rotary_dim or head_dim) // 2)[None]
    cosines, sines = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    norms = (random(head_dim, seed=2), random(head_dim, seed=3)) if norm else None
    arena, scales = empty_arena(8, kv_heads, block_tokens, head_dim, stored or dtype)
    before = arena.clone()
    rotated = torch.full((tokens, heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    positions = int32(POSITIONS)
    kv_write.write(
        q, k, v, arena, LAYER, int32(TABLES), int32(SEQUENCES), positions, cosines, sines, rotated,
        scales=scales, norms=norms,
    )  # fmt: skip
    want_q = oracles.norm_rotate(q, positions, cosines, sines, norms[0] if norms else None)
    want_k = oracles.norm_rotate(k, positions, cosines, sines, norms[1] if norms else None)
    assert oracles.relative_error(rotated, want_q) < TOLERANCE[dtype]
    real = [i for i in range(tokens) if SEQUENCES[i] != 3]
    blocks = torch.tensor([TABLES[SEQUENCES[i]][POSITIONS[i] // block_tokens] for i in real], device=DEVICE)
    slots = torch.tensor([POSITIONS[i] % block_tokens for i in real], device=DEVICE)
    held = []
    for plane, want in ((0, want_k[real]), (1, v[real])):
        got = arena[blocks, LAYER, plane, :, slots].float()
        if scales is not None:
            rates = oracles.error_rates(norms[0].cpu(), rotary_dim or head_dim).to(DEVICE) if norms else 1.0
            _, scale = oracles.quantize(want, arena.dtype, keys=plane == 0, rates=rates)
            stored_scale = scales[blocks, LAYER, plane, :, slots].float()
            # The next number up where the true maximum is computed a bit higher; never lower than needed.
            assert torch.allclose(stored_scale, scale.float(), rtol=2**-7)
            assert bool(
                (want.abs().amax(-1) <= stored_scale * (127 if arena.dtype == torch.int8 else 448) * 1.0001).all()
            )
            scale = stored_scale
            got = got * scale[..., None]
            step = scale[..., None] if arena.dtype == torch.int8 else want.abs() / 8 + scale[..., None] * 2**-9
            assert float(((got - want).abs() / step.clamp_min(1e-30)).max()) < 0.51
        else:
            assert oracles.relative_error(got, want) < TOLERANCE[dtype]
        held.append(got)
    untouched = torch.ones(arena.shape[:5], dtype=torch.bool, device=DEVICE)
    for plane in range(2):
        untouched[blocks, LAYER, plane, :, slots] = False
    same = arena.contiguous().view(torch.uint8) == before.contiguous().view(torch.uint8)
    assert bool(same.unflatten(-1, (head_dim, -1)).all(-1).all(-1)[untouched].all())
    return held[0], want_k[real]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 64), (6, 2, 80), (16, 1, 96), (8, 2, 128), (2, 1, 256)]
)
def test_equals_oracle(heads: int, kv_heads: int, head_dim: int, norm: bool) -> None:
    """Every head size, more heads than one program takes, with and without norms."""
    check(heads, kv_heads, head_dim, norm=norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    """bfloat16 and float16 are computed in float32 and rounded once."""
    check(8, 2, 64, dtype=dtype, norm=True)


@pytest.mark.parametrize("block_tokens", [16, 32, 64])
def test_block_sizes(block_tokens: int) -> None:
    """A slot is found in blocks of every size."""
    check(2, 1, 64, block_tokens=block_tokens)


def test_partly_rotated_heads() -> None:
    """Elements past the rotary dimension pass as they are."""
    check(4, 2, 64, rotary_dim=32)


@pytest.mark.parametrize("gain", [1.0, 1e-4, 1e4, 0.0])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_quantised(stored: torch.dtype, gain: float) -> None:
    """Elements lie within half a step of the truth, whatever their size; rows of zeros too."""
    check(4, 2, 64, dtype=torch.bfloat16 if gain == 1.0 else torch.float32, stored=stored, gain=gain)


def awkward_rows() -> torch.Tensor:
    """Rows [n, 8, 64], float32: of every size, ties between two stored numbers, peaks that a scale just fits, zeros."""
    rows = [random(9, 64, seed=6) * gain for gain in (1e-38, 1e-20, 1.0, 1e20, 1e37)]
    halves = (torch.arange(64) - 32) / 2  # ties of int8, of a scale of one
    for peak in (127.0, 448.0):
        rows.append(torch.cat([halves[1:], torch.tensor([peak])])[None].to(DEVICE))
        rows.append(torch.nextafter(torch.full((4, 64), peak), torch.tensor([0.0, 1e9, 1e9, 0.0])[:, None]).to(DEVICE))
    return torch.cat([*rows, torch.zeros((1, 64), device=DEVICE)]).reshape(-1, 8, 64)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_quantised_bytes_are_those_of_the_definition(stored: torch.dtype) -> None:
    """Each scale is the largest magnitude over the peak rounded up to bfloat16, or of e4m3 keys the best of sixteen;
    elements are rounded half to even."""
    rows = awkward_rows()
    tokens = rows.shape[0]
    arena, scales = empty_arena(tokens, 8, 16, 64, stored)
    assert scales is not None
    numbers = torch.arange(1, tokens + 1, dtype=torch.int32, device=DEVICE)
    one = torch.ones((1, 32), device=DEVICE)
    kv_write.write(
        rows, rows, rows, arena, LAYER, numbers[:, None].contiguous(), numbers - 1, numbers * 0, one, one * 0,
        torch.empty_like(rows), scales=scales,
    )  # fmt: skip
    for plane in range(2):
        kind = torch.int8 if stored == torch.int8 else torch.float8_e4m3fn
        elements, want = oracles.quantize(rows, kind, keys=plane == 0)
        assert torch.equal(scales[1:, LAYER, plane, :, 0].view(torch.int16), want.view(torch.int16))
        got = arena[1:, LAYER, plane, :, 0].contiguous().view(torch.uint8)
        assert torch.equal(got, elements.view(torch.uint8))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.uint8])
def test_errors_of_keys_count_by_the_norm_of_queries(stored: torch.dtype) -> None:
    """Where queries have a norm, an e4m3 scale is that with the least error times its weights, bit for bit; what is
    rotated together counts alike. A quarter of the scales at least are others than without
    it: the control."""
    query_norm, key_norm = random(64, seed=8).exp2() * 0.1, (random(64, seed=9).abs() * 16).round() / 16 + 0.25
    rows, keys = oracles.keys_of_exact_norms(12, key_norm.cpu(), seed=10)
    arena, scales = empty_arena(12, 8, 16, 64, stored)
    assert scales is not None
    numbers = torch.arange(1, 13, dtype=torch.int32, device=DEVICE)
    ones = torch.ones((1, 16), device=DEVICE)
    rows = rows.to(DEVICE)
    kv_write.write(
        rows, rows, rows, arena, LAYER, numbers[:, None].contiguous(), numbers - 1, numbers * 0, ones, ones * 0,
        torch.empty_like(rows), scales=scales, norms=(query_norm, key_norm), epsilon=0.0,
    )  # fmt: skip
    rates = oracles.error_rates(query_norm.cpu(), 32)
    assert torch.equal(rates[:16], rates[16:32]) and not torch.equal(rates[32:48], rates[48:])
    elements, want = oracles.quantize(keys, torch.float8_e4m3fn, keys=True, rates=rates)
    got = scales[1:, LAYER, 0, :, 0].cpu()
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    assert torch.equal(arena[1:, LAYER, 0, :, 0].cpu().contiguous().view(torch.uint8), elements.view(torch.uint8))
    assert (got != oracles.quantize(keys, torch.float8_e4m3fn, keys=True)[1]).float().mean() > 0.25


def test_a_quantised_row_that_is_not_finite_is_nan() -> None:
    """One NaN or infinity makes the scale of its row NaN, and of no other."""
    rows = torch.ones((4, 1, 64), device=DEVICE)
    rows[0, 0, 5], rows[1, 0, 63], rows[2, 0, 0] = torch.nan, torch.inf, -torch.inf
    arena, scales = empty_arena(4, 1, 16, 64, torch.int8)
    assert scales is not None
    scales.zero_()
    numbers = torch.arange(1, 5, dtype=torch.int32, device=DEVICE)
    one = torch.ones((1, 32), device=DEVICE)
    kv_write.write(
        rows, rows, rows, arena, LAYER, numbers[:, None].contiguous(), numbers - 1, numbers * 0, one, one * 0,
        torch.empty_like(rows), scales=scales,
    )  # fmt: skip
    assert scales[1:, LAYER, :, 0, 0].isnan().tolist() == [[True, True]] * 3 + [[False, False]]


def test_narrow_keys_beside_wide_queries() -> None:
    """Queries of bfloat16 come out in the arena's float16, rounded once; what it cannot hold becomes its largest."""
    rows = random(3, 2, 64, seed=7, dtype=torch.bfloat16) * 1e3
    rows[0, :, 0], rows[1, :, 1] = 1e30, -torch.inf
    arena, _ = empty_arena(3, 2, 16, 64, torch.float16)
    rotated = torch.full((3, 2, 64), torch.nan, dtype=torch.float16, device=DEVICE)
    numbers = torch.arange(1, 4, dtype=torch.int32, device=DEVICE)
    angles = torch.zeros((1, 32), device=DEVICE)
    kv_write.write(
        rows, rows, rows, arena, LAYER, numbers[:, None].contiguous(), numbers - 1, numbers * 0, angles.cos(), angles,
        rotated,
    )  # fmt: skip
    want = rows.float().clamp(-65504.0, 65504.0).half()
    for got in (rotated, *arena[1:, LAYER, :, :, 0].unbind(1)):
        # -inf times a sine of zero is NaN: such a row is no number in any form.
        assert torch.equal(got[[0, 2]], want[[0, 2]])
    assert torch.equal(arena[1:, LAYER, 1, :, 0], want)


def test_e4m3_equals_the_conversion() -> None:
    """Stored bytes are those of torch's conversion, subnormal ones and ties too."""
    patterns = torch.arange(256, dtype=torch.uint8)
    numbers = patterns.view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    upper = numbers.sort().values
    ties = (upper[1:] + upper[:-1]) / 2
    rows = torch.cat([numbers, ties, ties * 1.0001, ties * 0.9999])
    rows = torch.cat([rows, torch.zeros(-rows.numel() % 63)]).reshape(-1, 1, 63)
    rows = torch.cat([rows, torch.full((rows.shape[0], 1, 1), 448.0)], dim=2).to(DEVICE)  # the scale is 1
    tokens = rows.shape[0]
    arena, scales = empty_arena(tokens, 1, 16, 64, torch.uint8)
    tables = torch.arange(1, tokens + 1, dtype=torch.int32, device=DEVICE)[:, None].contiguous()
    positions = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
    one = torch.ones((1, 32), device=DEVICE)
    kv_write.write(
        rows, rows, rows, arena, LAYER, tables, torch.arange(tokens, dtype=torch.int32, device=DEVICE), positions,
        one, one * 0, torch.empty_like(rows), scales=scales,
    )  # fmt: skip
    want = rows[:, 0].to(torch.float8_e4m3fn).float()
    got = arena[1:, LAYER, 1, 0, 0].contiguous().view(torch.float8_e4m3fn).float()
    assert torch.equal(got, want)
