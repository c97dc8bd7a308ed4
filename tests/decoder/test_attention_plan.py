"""Decodes that share spans of keys: what the plan says, and that no bit of a sequence depends on sharing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray

from decoder.batch import StepBatch
from decoder.kernels import frame as f
from decoder.kernels.attention_plan import AttentionPlan, Planner, plan_attention, shared_spans
from decoder.models.config import LayerConfig
from decoder.models.llama import CausalLM
from tests.decoder.model_rig import Sequence, make_config, make_model, poisoned_arena, random_tensors, run_step

SHAPES = {
    "group3": {"heads": 6, "kv_heads": 2, "head_dim": 32},
    "mha": {"heads": 2, "kv_heads": 2, "head_dim": 64},
    "group24": {"heads": 24, "kv_heads": 1, "head_dim": 32},
}
PREFIX = 512


def _decodes(lengths: list[int], tables: NDArray[np.int32]) -> StepBatch:
    count = len(lengths)
    ends = np.array(lengths, np.int32)
    rows = np.arange(count, dtype=np.int32)
    return StepBatch(rows, ends - 1, np.arange(count + 1, dtype=np.int32), ends, tables, rows, count)


def _plan(batch: StepBatch, group: int = 3) -> AttentionPlan:
    return plan_attention(batch, group=group, kv_heads=2, threads=2, block_tokens=64, tokens_per_item=256 // group)


def _own_tables(count: int, width: int) -> NDArray[np.int32]:
    return np.arange(1, count * width + 1, dtype=np.int32).reshape(count, width)


def test_only_whole_equal_spans_before_the_query_are_shared() -> None:
    """A block that differs, a span that holds the query, and a context that ends sooner keep a span private."""
    tables = np.repeat(_own_tables(1, 12), 5, axis=0)
    tables[1, 7] = 90  # in the second span
    tables[2, 0] = 91  # in the first
    whole = (np.array([769, 769, 769, 768, 300]) - 1) // f.SPAN
    got = [(span, rows.tolist()) for span, rows in shared_spans(tables, whole, 64)]
    assert got == [(0, [0, 1, 3, 4]), (1, [0, 3])]
    assert shared_spans(tables, whole * 0, 64) == []
    assert shared_spans(_own_tables(5, 12), whole, 64) == []


def test_two_groups_share_apart() -> None:
    """Sequences of two prefixes are two tasks a span."""
    tables = _own_tables(4, 4)
    tables[2], tables[3] = tables[0], tables[1]
    got = [rows.tolist() for _, rows in shared_spans(tables, np.ones(4, np.int64), 64)]
    assert sorted(got) == [[0, 2], [1, 3]]


def test_a_plan_that_is_kept_is_the_plan() -> None:
    """Through any history of decodes a planner gives what a fresh plan is, and in most steps without making one."""
    random = np.random.default_rng(5)
    shape = {"group": 3, "kv_heads": 2, "threads": 2, "block_tokens": 64, "tokens_per_item": 85}
    planner, kept, last = Planner(**shape), 0, None
    tables = _own_tables(40, 16)
    tables[:30, :8] = tables[0, :8]
    rows, lengths = np.arange(6), np.array([500, 700, 250, 511, 900, 700])
    for step in range(400):
        if step % 20 == 19:  # sequences come and go, and others change their blocks or their places
            rows = random.permutation(40)[: random.integers(1, 7)]
            lengths = random.choice([1, 300, 490, 600, 1000], rows.size) + random.integers(0, 4, rows.size)
        elif step % 20 == 9:
            tables[random.choice(rows), random.integers(2)] = 1 + step % 2
        elif step % 20 == 4:
            lengths = lengths // 100 * 100 + random.integers(0, 4, rows.size)
        batch = _decodes(lengths.tolist(), tables[rows])
        if step % 50 == 30:  # a chunk beside the decodes
            starts = np.append(batch.query_starts[:-1], batch.query_starts[-1] + 1).astype(np.int32)
            positions = np.append(batch.positions[:-1], batch.positions[-1] - np.array([1, 0]))
            batch = dataclasses.replace(
                batch, num_decodes=rows.size - 1, query_starts=starts, positions=positions.astype(np.int32)
            )
        plan, fresh = planner.plan(batch), plan_attention(batch, **shape)
        assert all(
            np.array_equal(ours, theirs)
            for ours, theirs in zip(map(np.asarray, plan), map(np.asarray, fresh), strict=True)
        ), step
        kept, last = kept + (plan is last), plan
        lengths = lengths + 1
    assert 250 < kept < 380


@pytest.mark.parametrize("group", [1, 3, 16, 24])
def test_every_span_of_every_decode_is_done_once(group: int) -> None:
    """Parts name distinct lanes, and the tasks write exactly their slots."""
    lengths = [700, 513, 2000, 100, 1025, *([600] * 90)]
    tables = _own_tables(len(lengths), 40)
    tables[:, :8] = tables[0, :8]
    plan = _plan(_decodes(lengths, tables), group)
    tiles = [-(-int(t[f.TASK_ROWS]) // max(1, 16 // group)) if t[f.TASK_SHARED] else 1 for t in plan.tasks]
    slots = [
        t[f.TASK_SLOT] + i for t, n in zip(plan.tasks, tiles, strict=True) if t[f.TASK_SPAN] >= 0 for i in range(n)
    ]
    assert sorted(slots) == list(range(plan.num_slots))
    assert len({tuple(part) for part in plan.parts.tolist()}) == len(plan.parts)
    assert (plan.parts[:, 1] + min(group, 16) <= 16).all()
    for row, length in enumerate(lengths):
        parts = plan.parts[plan.part_starts[row] : plan.part_starts[row + 1]]
        alone = (plan.tasks[:, f.TASK_SPAN] < 0) & (plan.tasks[:, f.TASK_ROW] == row)
        assert len(parts) == (0 if alone.any() else -(-length // f.SPAN))
    shared = plan.tasks[plan.tasks[:, f.TASK_SHARED] == 1]
    assert shared[:, f.TASK_ROWS].sum() == plan.members.size == 2 * (len(lengths) - 1)
    for task in shared.tolist():
        rows = plan.members[task[f.TASK_ROW] : task[f.TASK_ROW] + task[f.TASK_ROWS]]
        assert (np.diff(np.array(lengths)[rows]) >= 0).all()


def _conversations(
    model: CausalLM, lengths: list[int], seed: int = 0
) -> tuple[list[Sequence], NDArray[np.float32] | NDArray[np.uint16]]:
    """Sequences over one run of PREFIX shared tokens, all but their last tokens in a poisoned arena."""
    numbers, tokens = np.random.default_rng(seed), model.layout.block_tokens
    prefix = numbers.integers(0, 260, PREFIX).astype(np.int32)
    arena = poisoned_arena(model, 400)
    ids = (numbers.permutation(399) + 1).astype(np.int32)
    used = PREFIX // tokens
    sequences = []
    for length in lengths:
        own = -(-(length - PREFIX) // tokens)
        text = np.concatenate([prefix, numbers.integers(0, 260, length - PREFIX).astype(np.int32)])
        sequences.append(Sequence(text, np.concatenate([ids[: PREFIX // tokens], ids[used : used + own]])))
        used += own
    for sequence in sequences:
        sequence.done = PREFIX if sequence is not sequences[0] else 0
        run_step(model, arena, [(sequence, sequence.token_ids.size - 1 - sequence.done)])
    return sequences, arena


def _check_bits(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [600, 530, 900, 513, 700, 528, 768, 769]
    sequences, arena = _conversations(model, lengths)
    alone = []
    for sequence in sequences:
        run_step(model, arena, [(sequence, 1)])
        alone.append(sequence.logits.pop())
        sequence.done -= 1
    plans: list[AttentionPlan] = []

    def spy(*arguments: object, **named: object) -> AttentionPlan:
        plans.append(plan_attention(*arguments, **named))  # type: ignore[arg-type]
        return plans[-1]

    monkeypatch.setattr("decoder.kernels.attention_plan.plan_attention", spy)
    order = [4, 1, 7, 0, 3, 2, 6, 5]
    run_step(model, arena, [(sequences[index], 1) for index in order])
    assert plans[0].tasks[:, f.TASK_SHARED].sum() >= 2  # control: spans were shared
    for sequence, want in zip(sequences, alone, strict=True):
        assert np.isfinite(want).all()
        assert np.array_equal(sequence.logits[-1], want)


@pytest.mark.parametrize(
    ("shape", "kernels"),
    [("group3", "float32"), ("group3", "auto"), ("group3", "auto-kv-float16"), ("group3", "auto-kv-int8"),
     ("mha", "auto-kv-float16"), ("group24", "auto-kv-float16"), ("group24", "auto")],
)  # fmt: skip
def test_sharing_changes_no_bit(shape: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes over a shared prefix give bit for bit what each gives alone, in a batch of any order."""
    config = make_config(**SHAPES[shape], layers=2)
    _check_bits(make_model(config, random_tensors(config), kernels), monkeypatch)


def test_windows_cut_shared_spans_for_each_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sliding windows of several sizes, of which some begin inside or after a shared span, as well."""
    config = make_config(**SHAPES["group3"], layers=2)
    for window in (40, 300):
        windowed = dataclasses.replace(config, layers=(LayerConfig(window=window), LayerConfig()))
        _check_bits(make_model(windowed, random_tensors(config), "auto-kv-float16"), monkeypatch)
