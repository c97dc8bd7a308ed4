"""`tessera plan`: its figures are the layout's own, and wrong options say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.plan import main
from common.kv_plan import sequence_cost, sequences_that_fit
from common.layout import KvDtype, KvLayout
from tests.tiny_models import make_tiny_llama

EIGHT_BILLION = ("--layers", "32", "--heads", "32", "--kv-heads", "8", "--head-dim", "128", "--kv-dtype", "bfloat16")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The plan as JSON."""
    assert main([*arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_textbook_example_is_eight_gibibytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Batch 8, 32 layers, 8192 positions, 8 key heads of 128, bf16; four times that where every head has its own."""
    answer = plan(capsys, *EIGHT_BILLION, "--context", "8192", "--batch", "8", "--memory", "80G")
    assert answer["textbook_bytes"] == answer["batch_bytes"] == 8 * 1024**3
    assert answer["textbook_bytes_of_width"] == 32 * 1024**3
    assert answer["block_bytes"] == 2 * 1024**2
    # 40,960 blocks of 2 MiB, one of them the null block; a sequence takes 512.
    assert answer["sequences_that_fit"] == (40_960 - 1) // 512
    by_kind = {row["kind"]: row["sequence_bytes"] for row in answer["kinds"]}
    assert by_kind == {"MHA": 4 * 1024**3, "GQA": 1024**3, "MQA": 128 * 1024**2}


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "float16"), ("float32", "float32")])
def test_the_default_is_that_of_a_node(dtype: str, kv_dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --kv-dtype the plan is for what `tessera up` stores beside such weights."""
    assert plan(capsys, *EIGHT_BILLION[:-2], "--dtype", dtype)["kv_dtype"] == kv_dtype


def test_a_context_is_rounded_up_to_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    """17 tokens take two blocks of 16; the textbook does not know that."""
    answer = plan(capsys, *EIGHT_BILLION, "--context", "17", "--batch", "1")
    assert answer["sequence_blocks"] == 2
    assert answer["sequence_bytes"] == 2 * answer["block_bytes"]
    assert answer["rounding_bytes_per_sequence"] == answer["sequence_bytes"] - answer["textbook_bytes"] > 0


@pytest.mark.parametrize("kind", list(KvDtype))
@pytest.mark.parametrize("context", [1, 15, 16, 17, 1000])
def test_the_cost_is_what_the_arena_takes(kind: KvDtype, context: int) -> None:
    """Blocks counted one by one: the arena of exactly that many blocks fits once, and a byte less does not."""
    layout = KvLayout(3, 2, 64, 16, kind)
    cost = sequence_cost(layout, context)
    arena = layout.arena_bytes(cost.blocks)
    assert arena == cost.sequence_bytes + layout.block_bytes
    assert cost.token_bytes * context <= cost.sequence_bytes < cost.token_bytes * (context + 16)
    assert sequences_that_fit(layout, context, arena) == 1
    assert sequences_that_fit(layout, context, arena - 1) == 0


def test_a_model_brings_its_sizes_and_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes come from config.json, weights from the tensors' shapes, and the memory for them is not the pool's."""
    make_tiny_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    answer = plan(capsys, "--model", str(tmp_path), "--memory", "64M", "--dtype", "float32", "--context", "64")
    assert answer["layers"] == config["num_hidden_layers"]
    assert answer["kv_heads"] == config["num_key_value_heads"]
    weights = (tmp_path / "model.safetensors").stat().st_size
    assert 0.9 * weights < answer["weight_bytes"] <= weights
    assert answer["pool_bytes"] == 64 * 1024**2 - answer["weight_bytes"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--layers"),
        (("--layers", "2", "--heads", "4"), "--head-dim"),
        (("--layers", "2", "--heads", "4", "--kv-heads", "3", "--head-dim", "64"), "--kv-heads 3"),
        ((*EIGHT_BILLION, "--block-tokens", "24"), "power of two"),
        (("--model", "nothing-here.gguf"), "nothing-here.gguf"),
        ((*EIGHT_BILLION, "--model", "x"), "leave out"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, status 2, no table."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert named in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_wrong_numbers_are_named(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """argparse says which option and what is allowed."""
    with pytest.raises(SystemExit) as ended:
        main([*EIGHT_BILLION, "--context", value])
    assert ended.value.code == 2
    assert "1 or more" in capsys.readouterr().err
