"""Decode with a shared prefix: the choice of groups against brute force, the result against the oracle."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from decoder.kernels.shared_prefix_decode.plan import SharedPlan, find_groups
from decoder.kernels.shared_prefix_decode.triton import SharedWorkspace, attend, prepare
from tests.kernels import oracles
from tests.kernels.rig import DEVICE, LAYER, TOLERANCE, paged, random


def run(
    lengths: list[int],
    shared_blocks: int,
    *,
    heads: int = 2,
    query_len: int = 1,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    min_tokens: int = 16,
    min_sequences: int = 3,
    soft_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, SharedPlan]:
    """Checks every sequence against the oracle; output, log sums and plan."""
    p = paged(lengths, kv_heads=1, head_dim=64, dtype=stored or dtype, shared_blocks=shared_blocks)
    queries = random(len(lengths), query_len, heads, 64, seed=5, dtype=dtype)
    workspace = SharedWorkspace.allocate(
        max_batch=len(lengths), heads=heads, kv_heads=1, head_dim=64, programs=5, tile=32, device=DEVICE,
        dtype=dtype, query_len=query_len,
    )  # fmt: skip
    for half in (workspace.shared_plan, workspace.rest_plan):
        half.partial.fill_(torch.nan)
        half.statistics.fill_(torch.inf)
    plan = SharedPlan.build(
        p.tables.cpu().numpy(), p.lengths.cpu().numpy(), block_tokens=16, members=workspace.members, device=DEVICE,
        query_len=query_len, min_tokens=min_tokens, min_sequences=min_sequences,
    )  # fmt: skip
    prepare(plan, workspace)
    output = torch.full_like(queries, torch.nan)
    log_sums = torch.full(queries.shape[:3], torch.nan, device=DEVICE)
    attend(
        queries, p.arena, LAYER, plan, workspace, output, scale=0.125, scales=p.scales, soft_cap=soft_cap,
        log_sums=log_sums,
    )  # fmt: skip
    for i in range(len(lengths)):
        want, sums = oracles.attention(queries[i], p.keys[i], p.values[i], 0.125, soft_cap=soft_cap)
        assert oracles.relative_error(output[i], want) < TOLERANCE[dtype]
        assert float((log_sums[i] - sums).abs().max()) < 2e-2
    return output, log_sums, plan


LENGTHS = [65, 80, 129]


def test_a_shared_run_is_read_once() -> None:
    """Sequences over four shared blocks, one of which has but one token after them: one slot, oracle's result."""
    _, _, plan = run(LENGTHS, 4)
    assert plan.slot_lengths.tolist() == [64]
    assert plan.places.tolist() == [0, 1, 2]
    assert plan.rest_lengths.tolist() == [length - 64 for length in LENGTHS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_and_caps(dtype: torch.dtype) -> None:
    """Other types, packed heads, and a soft cap; the parts are merged before they are rounded."""
    run(LENGTHS, 4, dtype=dtype, heads=4, soft_cap=3.0)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_quantised_blocks(stored: torch.dtype) -> None:
    """Both parts read quantised blocks with their scales."""
    assert run(LENGTHS, 4, dtype=torch.bfloat16, stored=stored)[2].num_slots == 1


def test_several_query_positions() -> None:
    """Blocks that the first query position lies in are not shared."""
    _, _, plan = run(LENGTHS, 4, query_len=3)
    assert plan.slot_lengths.tolist() == [48]


def test_more_sequences_than_a_slot_has_places() -> None:
    """Six sequences of sixteen heads each make two slots of sixty-four rows over one run; one sequence is apart."""
    _, _, plan = run([33] * 6, 2, heads=16)
    assert plan.slot_lengths.tolist() == [32, 32]


def test_nothing_shared_is_a_plain_decode() -> None:
    """Where sequences are too few, or the run is too short, the rest is everything."""
    for min_sequences, min_tokens in ((4, 16), (3, 65)):
        _, _, plan = run(LENGTHS, 4, min_sequences=min_sequences, min_tokens=min_tokens)
        assert plan.num_slots == 0
        assert plan.rest_lengths.tolist() == LENGTHS


def test_twice_the_same_bits() -> None:
    """Two runs agree bit for bit."""
    first, sums, _ = run(LENGTHS, 4, dtype=torch.bfloat16)
    second, again, _ = run(LENGTHS, 4, dtype=torch.bfloat16)
    assert torch.equal(first, second)
    assert torch.equal(sums, again)


def test_groups_are_valid_and_never_worse_than_one() -> None:
    """On small random tables groups are disjoint, share what they say, and save at least what any single one would."""
    numbers = np.random.default_rng(2)
    better = 0
    for _ in range(60):
        tables = numbers.integers(1, 3, (6, 4)).astype(np.int32)
        usable = numbers.integers(0, 5, 6).astype(np.int32)
        groups = find_groups(tables, usable, min_sequences=2)
        members = [row for group in groups for row in group.sequences]
        assert len(set(members)) == len(members)
        for group in groups:
            assert len(group.sequences) >= 2
            assert shared_run(tables, usable, list(group.sequences)) >= group.num_blocks > 0
        saved = sum((len(group.sequences) - 1) * group.num_blocks for group in groups)
        subsets = [s for size in range(2, 7) for s in itertools.combinations(range(6), size)]
        best = max((len(s) - 1) * shared_run(tables, usable, list(s)) for s in subsets)
        assert saved >= best
        better += saved > best
    assert better  # control: several groups are found too


def shared_run(tables: np.ndarray, usable: np.ndarray, rows: list[int]) -> int:
    """Leading blocks that rows have in common."""
    limit = int(usable[rows].min())
    same = (tables[rows, :limit] == tables[rows[0], :limit]).all(axis=0)
    return limit if same.all() else int(same.argmin())


def test_long_runs_win_over_a_common_start() -> None:
    """Two families of eight share one block among all and eight more each: two groups, and the rest may join none."""
    tables = np.zeros((17, 12), np.int32)
    tables[:, 0] = 1
    for row in range(16):
        tables[row, 1:9] = 10 * (1 + row // 8) + np.arange(8)
        tables[row, 9:] = 100 + 3 * row + np.arange(3)
    usable = np.full(17, 11, np.int32)
    usable[16] = 1
    groups = find_groups(tables, usable)
    assert [(group.sequences, group.num_blocks) for group in groups] == [
        (tuple(range(8)), 9), (tuple(range(8, 16)), 9),
    ]  # fmt: skip
    usable[:16] = 1
    assert find_groups(tables, usable)[0].sequences == tuple(range(17))
