"""Attention by dot products of bfloat16 pairs, on any CPU: against an oracle, on poisoned memory, bit for bit alike.

One layer by itself (`one_layer.py`). A context is computed in one piece, in chunks, token by token and in batches; what
lies outside a sequence or before a window is NaN.
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

from decoder.kernels import sets
from decoder.kernels.attention_dots_softmax import row_maximum, row_weights
from decoder.kernels.compiled import entry
from tests.decoder.layer_rig import Case, in_pieces, layer_case, same

TOLERANCE = 8e-3  # of weights that are rounded to bfloat16, and of an output that is
HEAD_DIMS = (16, 64, 80, 96, 128, 256)


def make_case(lengths: list[int], **shape: Any) -> Case:
    """A case of bfloat16 keys, values and queries."""
    return layer_case(lengths, sets.DotKernels(), torch.bfloat16, torch.bfloat16, **shape)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("length", [1, 2, 15, 17, 63, 64, 65, 257])
def test_a_context_equals_the_oracle(head_dim: int, length: int) -> None:
    """Every head size, in one piece and token by token, gives the oracle's outputs, both with the same bits."""
    case = make_case([length], head_dim=head_dim)
    (whole,) = case.attend([(0, 0, length)])
    torch.testing.assert_close(whole.double(), case.expected(0), atol=TOLERANCE, rtol=TOLERANCE)
    assert same(in_pieces(case, 0, [1]), whole)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (8, 2), (16, 2), (10, 2), (8, 1), (40, 1)])
@pytest.mark.parametrize("block_tokens", [1, 2, 8, 16, 64, 256])
def test_groups_and_block_sizes(heads: int, kv_heads: int, block_tokens: int) -> None:
    """Groups of 1 to all heads in blocks of any size give the oracle's outputs; pieces of any size the same bits."""
    case = make_case([300], heads=heads, kv_heads=kv_heads, block_tokens=block_tokens)
    (whole,) = case.attend([(0, 0, 300)])
    torch.testing.assert_close(whole.double(), case.expected(0), atol=TOLERANCE, rtol=TOLERANCE)
    assert same(in_pieces(case, 0, [1, 2, 7, 64, 3]), whole)


@pytest.mark.parametrize("window", [1, 2, 7, 16, 37, 270])
@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_before_a_window_all_may_be_poison(window: int, block_tokens: int) -> None:
    """Single tokens and short chunks read nothing that lies before their windows, where all is NaN by then."""
    case = make_case([600], window=window, block_tokens=block_tokens, head_dim=80)
    (whole,) = case.attend([(0, 0, 600)])
    torch.testing.assert_close(whole.double(), case.expected(0), atol=TOLERANCE, rtol=TOLERANCE)
    first, passed = 0, 0
    for size in itertools.cycle([1, 1, 2, 1, 5, 30]):
        if first + size > 600:
            break
        for token in range(passed, first - window + 1):
            block = case.held.tables[0, token // block_tokens]
            case.held.arena[block, :, :, :, token % block_tokens] = math.nan
        passed = max(passed, first - window + 1)
        (piece,) = case.attend([(0, first, first + size)])
        assert same(piece, whole[first : first + size]), (first, size)
        first += size
    assert passed > 0 or window >= 600
    with_poison = case.attend([(0, 0, 600)])[0]
    assert with_poison.isnan().any(), "the poison is seen by what looks at it"


@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_soft_cap_is_kept(head_dim: int) -> None:
    """Scores that a soft cap bounds give the oracle's outputs, which without the cap are others."""
    case = make_case([280], head_dim=head_dim, soft_cap=1.0)
    (whole,) = case.attend([(0, 0, 280)])
    torch.testing.assert_close(whole.double(), case.expected(0), atol=TOLERANCE, rtol=TOLERANCE)
    (free,) = dataclasses.replace(case, soft_cap=0.0).attend([(0, 0, 280)])
    assert (free - whole).abs().max() > 10 * TOLERANCE
    assert same(in_pieces(case, 0, [1, 40]), whole)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (20, 1)])
def test_a_batch_over_a_shared_prefix_changes_no_bit(heads: int, kv_heads: int) -> None:
    """Decodes that share spans, beside chunks, have the bits that each has alone."""
    lengths = [700, 513, 640, 514, 900, 545]
    case = make_case(lengths, heads=heads, kv_heads=kv_heads, head_dim=96, shared_blocks=32)
    alone = [case.attend([(index, length - 1, length)])[0] for index, length in enumerate(lengths)]
    together = case.attend([(index, length - 1, length) for index, length in enumerate(lengths)])
    mixed = case.attend([(0, 699, 700), (1, 512, 513), (2, 639, 640), (3, 513, 514), (4, 800, 900), (5, 510, 545)])
    for index, length in enumerate(lengths):
        want = case.expected(index, length - 1)
        torch.testing.assert_close(alone[index].double(), want, atol=TOLERANCE, rtol=TOLERANCE)
        assert same(together[index], alone[index]), length
        assert same(mixed[index][-1:], alone[index]), length


@entry
def _weights(
    row: int, begin: int, keys: int, floor: int, bound: int, scale: float, weights: int
) -> tuple[float, float]:
    top = row_maximum(row, begin, keys, floor, bound) * np.float32(scale)
    return top, row_weights(row, begin, keys, floor, bound, scale, top, weights)


def _softmax(
    scores: NDArray[np.float32], begin: int, keys: int, floor: int, bound: int
) -> tuple[NDArray[np.float32], np.float32, np.float32]:
    """Weights of 256 keys, their maximum and their sum."""
    weights = np.full(256, 0x7FC0, np.uint16)
    maximum, total = _weights(scores.ctypes.data, begin, keys, floor, bound, 0.5, weights.ctypes.data)
    return (weights.astype(np.uint32) << 16).view(np.float32), np.float32(maximum), np.float32(total)


def test_weights_add_up_to_their_sum() -> None:
    """Weights are powers of two rounded to bfloat16, zero outside a row's keys; the sum is that of the rounded ones."""
    scores = np.random.default_rng(1).normal(0, 8, 256).astype(np.float32)
    for begin, keys, floor, bound in ((0, 256, 0, 256), (0, 77, 0, 60), (37, 201, 41, 199), (96, 97, 96, 97)):
        held = scores.copy()
        held[: begin & ~15] = held[(keys + 15) & ~15 :] = np.nan
        weights, maximum, total = _softmax(held, begin, keys, floor, bound)
        assert maximum == scores[floor:bound].max() * np.float32(0.5)
        want = np.exp2(scores.astype(np.float64) * 0.5 - maximum)
        assert np.allclose(weights[floor:bound], want[floor:bound], rtol=2**-8, atol=1e-30)
        assert not weights[begin & ~31 : floor].any()
        assert not weights[bound : (keys + 31) & ~31].any()
        assert total == pytest.approx(weights[floor:bound].sum(dtype=np.float64), rel=1e-6)


def test_a_value_of_all_keys_comes_out_as_it_is() -> None:
    """Where all values agree, rounded weights that are divided by their own sum give that value, to the last bit."""
    case = make_case([500])
    case.held.arena[:, :, 1] = torch.where(case.held.arena[:, :, 1].isnan(), torch.nan, 1.0)
    (whole,) = case.attend([(0, 0, 500)])
    assert (whole == 1.0).all()
