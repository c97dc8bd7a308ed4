"""Attention at real sizes against the oracle on the device, and the same bits from run to run and in a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device; torch finds none", allow_module_level=True)

from decoder.kernels.paged_decode import triton as decode
from decoder.kernels.paged_decode.plan import DecodePlan
from decoder.kernels.paged_prefill import triton as prefill
from tests.kernels import oracles
from tests.kernels.rig import DEVICE, LAYER, int32, paged, random

BOUND = 4e-3  # relative L2 error of bfloat16
LENGTHS = [1, 63, 64, 65, 1000, 4097]


def decode_call(stored: torch.dtype, programs: int) -> tuple[Any, Any, torch.Tensor]:
    """A decode of 32 heads by 8 over LENGTHS: the paged memory, the call, and its poisoned output."""
    p = paged(LENGTHS, kv_heads=8, head_dim=128, block_tokens=64, dtype=stored)
    queries = random(len(LENGTHS), 1, 32, 128, seed=5, dtype=torch.bfloat16)
    config = decode.choose_config(90, 128, 2)
    plan = DecodePlan.allocate(
        max_batch=len(LENGTHS), heads=32, kv_heads=8, head_dim=128, programs=programs, tile=config.tile, device=DEVICE
    )
    plan.partial.fill_(torch.nan)
    output = torch.full_like(queries, torch.nan)

    def call() -> None:
        plan.build(p.lengths)
        decode.attend(
            queries, p.arena, LAYER, p.tables, p.lengths, plan, output, scale=128**-0.5, scales=p.scales
        )  # fmt: skip

    return (p, queries), call, output


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("programs", [1, 264])
def test_decode_equals_the_oracle(stored: torch.dtype, programs: int) -> None:
    """Real lengths, in one part and in many, plain and quantised."""
    (p, queries), call, output = decode_call(stored, programs)
    call()
    for i in range(len(LENGTHS)):
        want, _ = oracles.attention(queries[i], p.keys[i], p.values[i], 128**-0.5)
        assert oracles.relative_error(output[i], want) < BOUND


def test_decode_gives_the_same_bits_again_and_in_a_graph() -> None:
    """Twenty runs, and a replay after the lengths have changed in place."""
    (p, queries), call, output = decode_call(torch.bfloat16, 264)
    call()
    first = output.clone()
    for _ in range(20):
        output.fill_(torch.nan)
        call()
        assert torch.equal(output, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    output.fill_(torch.nan)
    graph.replay()
    assert torch.equal(output, first)
    p.lengths[5] = 700
    graph.replay()
    want, _ = oracles.attention(queries[5], p.keys[5][:700], p.values[5][:700], 128**-0.5)
    assert oracles.relative_error(output[5], want) < BOUND


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_prefill_equals_the_oracle_and_itself_in_another_batch(stored: torch.dtype) -> None:
    """A chunk over a long prefix: within rounding of float64, and the same bits beside other chunks."""
    p = paged([2000, 300], kv_heads=8, head_dim=128, block_tokens=64, dtype=stored)
    queries = random(500 + 300, 32, 128, seed=3, dtype=torch.bfloat16)
    rows = prefill.choose_config(90, 128, 2, quantized=False).rows

    def run(starts: list[int], batch: slice, rows_of: slice) -> torch.Tensor:
        lengths = p.lengths[batch]
        plan = prefill.plan(np.array(starts, np.int32), lengths.cpu().numpy(), 4, rows, DEVICE)
        output = torch.full_like(queries[rows_of], torch.nan)
        prefill.attend(
            queries[rows_of], p.arena, LAYER, p.tables[batch], int32(starts), lengths, plan, output, scale=128**-0.5,
            scales=p.scales,
        )  # fmt: skip
        return output

    both = run([0, 500, 800], slice(0, 2), slice(0, 800))
    alone = run([0, 500], slice(0, 1), slice(0, 500))
    assert torch.equal(both[:500], alone)
    for i, part in enumerate((slice(0, 500), slice(500, 800))):
        want, _ = oracles.attention(queries[part], p.keys[i], p.values[i], 128**-0.5)
        assert oracles.relative_error(both[part], want) < BOUND
