"""Decode with a shared prefix: the choice of groups against brute force, the result against the oracle."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from common.errors import Internal
from decoder.kernels.frame import SPAN
from decoder.kernels.gpu import power_of_two
from decoder.kernels.paged_decode.plan import MAX_ROWS
from decoder.kernels.paged_decode.triton import choose_config
from decoder.kernels.shared_prefix_decode.plan import Group, SharedPlan, SlotLayout, find_groups, lay_out
from decoder.kernels.shared_prefix_decode.triton import SharedWorkspace, attend, prepare, slot_members
from tests.kernels import oracles
from tests.kernels.rig import DEVICE, LAYER, TOLERANCE, paged, random

RUN = 16  # blocks of 16 tokens: one span


def run(
    lengths: list[int],
    shared_blocks: int = RUN,
    *,
    heads: int = 2,
    query_len: int = 1,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    soft_cap: float = 0.0,
    spare_slots: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, SlotLayout]:
    """Checks every sequence against the oracle; output, log sums and slots."""
    p = paged(lengths, kv_heads=1, head_dim=64, dtype=stored or dtype, shared_blocks=shared_blocks)
    queries = random(len(lengths), query_len, heads, 64, seed=5, dtype=dtype)
    workspace = SharedWorkspace.allocate(
        max_batch=len(lengths), heads=heads, kv_heads=1, head_dim=64, multiprocessors=3, device=DEVICE,
        dtype=dtype, query_len=query_len,
    )  # fmt: skip
    for half in (workspace.shared_plan, workspace.rest_plan):
        half.partial.fill_(torch.nan)
        half.statistics.fill_(torch.inf)
    tables = p.tables.cpu().numpy()
    groups = groups_of(tables, p.lengths.cpu().numpy(), 16, workspace.members, query_len)
    layout = lay_out(groups, tables, block_tokens=16, members=workspace.members)
    plan = SharedPlan.of(with_spare(layout, spare_slots), DEVICE)
    rest = prepare(plan, workspace, p.tables, p.lengths, 16)
    output = torch.full_like(queries, torch.nan)
    log_sums = torch.full(queries.shape[:3], torch.nan, device=DEVICE)
    attend(
        queries, p.arena, LAYER, plan, rest, workspace, output, scale=0.125, scales=p.scales, soft_cap=soft_cap,
        log_sums=log_sums,
    )  # fmt: skip
    for i in range(len(lengths)):
        want, sums = oracles.attention(queries[i], p.keys[i], p.values[i], 0.125, soft_cap=soft_cap)
        assert oracles.relative_error(output[i], want) < TOLERANCE[dtype]
        assert float((log_sums[i] - sums).abs().max()) < 2e-2
    return output, log_sums, layout


def groups_of(tables: np.ndarray, lengths: np.ndarray, block_tokens: int, members: int, query_len: int) -> list[Group]:
    """Groups of three and more."""
    return find_groups(
        tables, lengths, block_tokens=block_tokens, members=members, query_len=query_len, min_sequences=3
    )  # fmt: skip


def with_spare(layout: SlotLayout, spare: int) -> SlotLayout:
    """The same with empty slots after the others, as fixed memory has them."""
    wider = [np.pad(a, ((0, spare), *[(0, 0)] * (a.ndim - 1))) for a in dataclasses.astuple(layout)[:3]]
    return SlotLayout(*wider, layout.shared_blocks, layout.places)


LENGTHS = [257, 272, 321]


@pytest.mark.parametrize("spare", [0, 1])
def test_a_shared_run_is_read_once(spare: int) -> None:
    """Sequences over one shared span, one of which has but one token after it: one slot, the oracle's result, beside
    a slot that nobody uses too."""
    _, _, layout = run(LENGTHS, spare_slots=spare)
    assert layout.slot_lengths.tolist() == [256]
    assert layout.places.tolist() == [0, 1, 2]
    assert layout.shared_blocks.tolist() == [16, 16, 16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_and_caps(dtype: torch.dtype) -> None:
    """Other types, packed heads, and a soft cap; the parts are merged before they are rounded."""
    run(LENGTHS, dtype=dtype, heads=4, soft_cap=3.0)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_quantised_blocks(stored: torch.dtype) -> None:
    """Both parts read quantised blocks with their scales."""
    assert run(LENGTHS, dtype=torch.bfloat16, stored=stored)[2].slot_lengths.size == 1


def test_several_query_positions() -> None:
    """A span that the first query position lies in is not shared."""
    _, _, layout = run([514, 513, 512], 2 * RUN, query_len=3)
    assert layout.slot_lengths.tolist() == [256]
    _, _, layout = run([515, 516, 517], 2 * RUN, query_len=3)
    assert layout.slot_lengths.tolist() == [512]


def test_more_sequences_than_a_slot_has_places() -> None:
    """Five sequences of sixteen heads each make three slots of thirty-two rows over one run; the sixth is apart."""
    _, _, layout = run([257] * 5 + [256], heads=16)
    assert layout.slot_lengths.tolist() == [256, 256, 256]
    assert layout.places.tolist() == [0, 1, 2, 3, 4, -1]


def test_nothing_shared_is_no_group() -> None:
    """Where sequences are too few, the run is no whole span, or blocks do not make spans; no slots are made then."""
    tables = np.ones((3, 40), np.int32)
    lengths = np.array(LENGTHS, np.int32)
    assert groups_of(tables, lengths, 16, 8, 1)[0].num_blocks == RUN  # control
    assert groups_of(tables[:2], lengths[:2], 16, 8, 1) == []
    assert groups_of(tables, lengths - np.int32(1), 16, 8, 1) == []
    assert groups_of(tables, lengths, 512, 8, 1) == []
    with pytest.raises(Internal, match="for 0 groups"):
        lay_out([], tables, block_tokens=16, members=8)


def test_a_plan_of_another_batch_is_refused() -> None:
    """Places for more sequences than there are lengths, and slots of another size."""
    tables = np.ones((3, 40), np.int32)
    lengths = np.array(LENGTHS, np.int32)
    workspace = SharedWorkspace.allocate(
        max_batch=3, heads=2, kv_heads=1, head_dim=64, multiprocessors=1, device=DEVICE, dtype=torch.float32
    )
    groups = groups_of(tables, lengths, 16, workspace.members, 1)
    for members, count in ((workspace.members, 2), (2, 3)):
        plan = SharedPlan.of(lay_out(groups, tables, block_tokens=16, members=members), DEVICE)
        with pytest.raises(Internal, match="does not fit"):
            prepare(plan, workspace, torch.from_numpy(tables)[:count], torch.from_numpy(lengths)[:count], 16)


def test_twice_the_same_bits() -> None:
    """Two runs agree bit for bit."""
    first, sums, _ = run(LENGTHS, dtype=torch.bfloat16)
    second, again, _ = run(LENGTHS, dtype=torch.bfloat16)
    assert torch.equal(first, second)
    assert torch.equal(sums, again)


def of_spans(tables: np.ndarray, spans: np.ndarray, min_sequences: int) -> list[Group]:
    """Groups of sequences with so many whole spans, where a block is a span."""
    lengths = (spans * SPAN + 1).astype(np.int32)
    return find_groups(tables, lengths, block_tokens=SPAN, members=1024, min_sequences=min_sequences)


def test_groups_are_valid_and_never_worse_than_one() -> None:
    """On small random tables groups are disjoint, share what they say, and save at least what any single one would."""
    numbers = np.random.default_rng(2)
    better = 0
    for _ in range(60):
        tables = numbers.integers(1, 3, (6, 4)).astype(np.int32)
        usable = numbers.integers(0, 5, 6).astype(np.int32)
        groups = of_spans(tables, usable, 2)
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


def test_rows_that_meet_again_share_no_prefix() -> None:
    """Two pairs part in the first span and name the same blocks in the second: each pair is a group of its own."""
    tables = np.array([[1, 9, 9], [1, 9, 9], [2, 9, 9], [2, 9, 9]], np.int32)
    groups = of_spans(tables, np.full(4, 3), 2)
    assert [(group.sequences, group.num_blocks) for group in groups] == [((0, 1), 3), ((2, 3), 3)]
    crossed = np.array([[1, 5, 9], [1, 6, 9], [2, 5, 9], [2, 6, 9]], np.int32)  # partners change, and all meet
    groups = of_spans(crossed, np.full(4, 3), 2)
    assert [(group.sequences, group.num_blocks) for group in groups] == [((0, 1), 1), ((2, 3), 1)]


def test_long_runs_win_over_a_common_start() -> None:
    """Two families of eight share one span among all and eight more each: two groups, and the rest may join none."""
    tables = np.zeros((17, 12), np.int32)
    tables[:, 0] = 1
    for row in range(16):
        tables[row, 1:9] = 10 * (1 + row // 8) + np.arange(8)
        tables[row, 9:] = 100 + 3 * row + np.arange(3)
    usable = np.full(17, 11, np.int32)
    usable[16] = 1
    groups = of_spans(tables, usable, 8)
    assert [(group.sequences, group.num_blocks) for group in groups] == [
        (tuple(range(8)), 9), (tuple(range(8, 16)), 9),
    ]  # fmt: skip
    usable[:16] = 1
    assert of_spans(tables, usable, 8)[0].sequences == tuple(range(17))


def test_slots_that_read_the_run_again_save_nothing() -> None:
    """A slot of one place spares no read, one of four spares three of four."""
    group = Group(tuple(range(8)), 5)
    assert [group.saved_blocks(members) for members in (1, 4, 8)] == [0, 6 * 5, 7 * 5]


def test_slots_fit_the_row_block_of_a_decode() -> None:
    """For every head size and type there is a decode with the rows of a full slot; one more sequence would not fit."""
    for head_dim in (16, 64, 80, 96, 128, 256):
        for itemsize in (2, 4):
            for group in (1, 2, 4, 5, 8):
                rows = slot_members(group, head_dim, itemsize) * group
                assert MAX_ROWS >= rows > 16 - group
                for chip in (0, 80, 90, 100):
                    choose_config(chip, head_dim, itemsize, max(16, power_of_two(rows)))
    assert slot_members(16, 256, 4) == 1
    with pytest.raises(Internal, match="do not fit a slot of 16"):
        slot_members(17, 256, 4)
