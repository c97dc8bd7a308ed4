"""`tessera plan`: its figures are the layout's own, and wrong options say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.plan import main
from common.kv_plan import bytes_for_one, sequence_cost, sequences_that_fit, usable_blocks
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


def test_a_fetched_model_is_planned_for_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `tessera up` takes it; a name that nothing is fetched by is told as it was given."""
    folder = tmp_path / "tessera" / "models" / "owner--tiny"
    folder.mkdir(parents=True)
    make_tiny_llama(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plan(capsys, "--model", "owner/tiny") == plan(capsys, "--model", str(folder))
    assert main(["--model", "owner/other"]) == 2
    assert "there is no owner/other" in capsys.readouterr().err


def _make_windowed(path: Path, layers: int) -> None:
    """A tiny model whose layers have windows of 40 keys, but for each sixth."""
    make_tiny_llama(path)
    config = json.loads((path / "config.json").read_text())
    config |= {
        "model_type": "gemma3_text",
        "sliding_window": 40,
        "num_hidden_layers": layers,
        "max_position_embeddings": 4096,
    }
    (path / "config.json").write_text(json.dumps(config))


def test_windows_are_shown_with_what_they_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Windowed layers hold the blocks of their last window alone; the figures are those of both kinds of blocks."""
    _make_windowed(tmp_path, 12)
    answer = plan(capsys, "--model", str(tmp_path), "--context", "1000", "--memory", "1G")
    narrow, whole = answer["windows"]
    assert (narrow["window"], whole["window"], whole["layers"]) == (40, None, [5, 11])
    assert narrow["layers"] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    per_layer = answer["block_bytes"] // 2
    assert answer["window_block_bytes"] == 10 * per_layer
    # Of 40 tokens the first may be the last of its block: four blocks.
    assert (answer["sequence_blocks"], answer["sequence_window_blocks"]) == (63, 4)
    assert narrow["sequence_bytes"] == 10 * 4 * per_layer
    assert narrow["sequence_bytes"] + whole["sequence_bytes"] == answer["sequence_bytes"] == (40 + 126) * per_layer
    assert answer["sequence_bytes_in_one_group"] == 12 * 63 * per_layer
    assert answer["token_bytes"] == 12 * per_layer / 16
    assert answer["layer_groups"] is True
    assert main(["--model", str(tmp_path), "--context", "1000", "--memory", "1G"]) == 0
    text = capsys.readouterr().out
    for words in ("the last 40 keys", "10 (0..4, 6..10)", "63 blocks and 4 window blocks", "and one window block"):
        assert words in text
    assert main([*EIGHT_BILLION, "--context", "1000"]) == 0
    assert "window" not in capsys.readouterr().out


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then blocks hold all layers, and the text says why."""
    _make_windowed(tmp_path, 12)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 4096}))
    answer = plan(capsys, "--model", str(tmp_path), "--context", "1000")
    assert (answer["layer_groups"], answer["sequence_window_blocks"]) == (False, 0)
    assert answer["sequence_bytes"] == answer["sequence_bytes_in_one_group"]
    assert main(["--model", str(tmp_path), "--context", "1000"]) == 0
    assert "No window is shorter" in capsys.readouterr().out


@pytest.mark.parametrize("context", [1, 16, 40, 41, 57, 1000])
@pytest.mark.parametrize("windowed", [(0,), (0, 1, 3, 4)])
def test_both_kinds_of_blocks_are_counted(context: int, windowed: tuple[int, ...]) -> None:
    """With groups too: the arena of exactly so many blocks fits once, a byte less does not; a running sequence holds as
    many window blocks as a window touches at most; a pool serves no more sequences than either kind has room for."""
    layout = KvLayout(5, 2, 64, 16, KvDtype.FLOAT32, window_tokens=40, window_layers=windowed)
    cost = sequence_cost(layout, context)
    touched = {len({place // 16 for place in range(max(0, end - 40), end)}) for end in range(1, context + 1)}
    assert cost.window_blocks == max(touched)
    assert (
        cost.sequence_bytes == cost.blocks * layout.block_bytes + cost.window_blocks * layout.window_group.block_bytes
    )
    assert 0 <= cost.rounding_bytes < layout.block_bytes + 2 * layout.window_group.block_bytes
    arena = bytes_for_one(layout, context)
    assert arena == layout.arena_bytes(cost.blocks)
    assert sequences_that_fit(layout, context, arena) == 1
    assert sequences_that_fit(layout, context, arena - 1) == 0
    for blocks in (100, 1000, 5000):
        found = usable_blocks(layout, layout.arena_bytes(blocks))
        assert found == blocks
        assert usable_blocks(layout, layout.arena_bytes(blocks) - 1) == blocks - 1
        fit = sequences_that_fit(layout, context, layout.arena_bytes(blocks))
        assert fit == min(blocks // cost.blocks, layout.num_window_blocks(blocks) // cost.window_blocks)


def test_a_model_of_windows_alone_says_what_a_running_sequence_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where every layer has a window, the blocks that it may touch; nothing of that where one layer sees all."""
    make_tiny_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 40}
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = plan(capsys, "--model", str(tmp_path), "--context", "500")
    touched = {len({place // 16 for place in range(end - 40, end)}) for end in range(40, 500)}
    assert answer["window_blocks"] == max(touched)
    assert plan(capsys, "--model", str(tmp_path), "--context", "20")["window_blocks"] == 2
    assert main(["--model", str(tmp_path), "--context", "500"]) == 0
    assert f"widest window alone, at most {max(touched)} blocks, " in capsys.readouterr().out
    _make_windowed(tmp_path / "mixed", 12)
    assert plan(capsys, "--model", str(tmp_path / "mixed"), "--context", "500")["window_blocks"] is None


def test_a_context_beyond_the_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As by `tessera up`, with what the model serves: its own context is planned, a token more is not; with dynamic
    scaling of positions that is `factor` times as much. Sizes without a model have no such bound."""
    make_tiny_llama(tmp_path / "plain", max_position=512)
    config = make_tiny_llama(tmp_path / "scaled", max_position=512) / "config.json"
    scaling = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    config.write_text(json.dumps(json.loads(config.read_text()) | scaling))
    for name, longest in (("plain", 512), ("scaled", 1024)):
        model = ("--model", str(tmp_path / name))
        assert plan(capsys, *model, "--context", str(longest))["context"] == longest
        assert main([*model, "--context", str(longest + 1)]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert f"--context {longest + 1} is more than the {longest} tokens that this model serves" in shown.err
    assert plan(capsys, *EIGHT_BILLION, "--context", "1000000")["context"] == 1_000_000


def test_a_context_that_nobody_named_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose context the plan is for: an option's, the model's, or assumed; the text says so unless it was named."""
    make_tiny_llama(tmp_path)
    for arguments, source, words in (
        (("--model", str(tmp_path)), "model", "the longest context of the model"),
        (EIGHT_BILLION, "assumed", "8192 tokens: that is assumed"),
        ((*EIGHT_BILLION, "--context", "64"), "option", ""),
    ):
        assert plan(capsys, *arguments)["context_from"] == source
        assert main(list(arguments)) == 0
        text = capsys.readouterr().out
        assert words in text and ("--context N" in text) is bool(words)


def test_a_type_that_a_model_cannot_have_is_told_by_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--dtype file` beside a directory: the option is named as it was typed, with what is allowed."""
    model = str(make_tiny_llama(tmp_path / "model"))
    assert main(["--model", model, "--dtype", "file"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tessera plan: --dtype: is 'file'; this build serves 'int8', 'bfloat16' or 'float32'")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "give --model PATH, or --layers, --heads, --head-dim (see"),
        (("--layers", "2", "--heads", "4"), "give --model PATH, or --head-dim too (see"),
        (("--layers", "2", "--heads", "4", "--kv-heads", "3", "--head-dim", "64"), "--kv-heads 3"),
        ((*EIGHT_BILLION, "--block-tokens", "24"), "power of two"),
        (("--model", "nothing-here.gguf"), "--model: there is no nothing-here.gguf"),
        (("--model", "/no/such/nope"), "--model: there is no /no/such/nope"),
        (("--model", "/dev/null"), "--model: /dev/null is neither"),
        ((*EIGHT_BILLION, "--model", "x"), "leave out"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, status 2, no table."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert named in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--context", "0", "0 is outside 1..10000000"),
        ("--context", "-1", "-1 is outside 1..10000000"),
        ("--context", "many", "'many' is no whole number in 1..10000000"),
        ("--context", "10000001", "10000001 is outside 1..10000000"),
        ("--layers", "1025", "1025 is outside 1..1024"),
        ("--heads", "1025", "1025 is outside 1..1024"),
        ("--kv-heads", "1025", "1025 is outside 1..1024"),
        ("--head-dim", "1025", "1025 is outside 1..1024"),
        ("--batch", "1000001", "1000001 is outside 1..1000000"),
        ("--block-tokens", "512", "512 is outside 1..256"),
        ("--memory", "1025T", "'1025T' is too large; allowed are sizes up to 1024T"),
    ],
)
def test_wrong_numbers_are_named(option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says which option and what is allowed; no number is so absurd that it is planned for."""
    with pytest.raises(SystemExit) as ended:
        main([*EIGHT_BILLION, option, value])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"tessera plan: {option}: {said} (see `tessera plan --help`)\n"


def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No sequence fits: the text says so, what is needed, and how long the longest one may be; with exactly what is
    needed one fits. Where the weights alone do not fit it says that."""
    sizes = ("--layers", "1", "--heads", "1", "--head-dim", "8", "--context", "8192")
    assert main([*sizes, "--memory", "1k"]) == 0
    said = capsys.readouterr().out
    assert "It does not fit: 1 KiB of memory" in said and "takes 256 KiB" in said
    assert "needs --memory 257K; the longest one that fits has 16 tokens (--context 16)" in said
    answer = plan(capsys, *sizes, "--memory", "257K")
    assert answer["sequences_that_fit"] == 1 and 256 * 1024 < answer["memory_bytes_for_one_sequence"] <= 257 * 1024
    assert plan(capsys, *sizes, "--memory", str(answer["memory_bytes_for_one_sequence"] - 1))["sequences_that_fit"] == 0
    assert plan(capsys, *sizes[:-1], "16", "--memory", "1k")["sequences_that_fit"] == 1
    assert plan(capsys, *sizes[:-1], "17", "--memory", "1k")["sequences_that_fit"] == 0
    assert main([*sizes, "--memory", "600"]) == 0
    said = capsys.readouterr().out
    assert "It does not fit" in said and "longest" not in said
    assert main([*sizes, "--memory", "257K"]) == 0
    assert "does not fit" not in capsys.readouterr().out
    make_tiny_llama(tmp_path)
    assert main(["--model", str(tmp_path), "--memory", "64K"]) == 0
    assert "It does not fit: the weights take " in capsys.readouterr().out


def test_one_of_a_thing_is_no_plural(capsys: pytest.CaptureFixture[str]) -> None:
    """One head, one sequence, one block of one token; and two of each are."""
    sizes = ("--layers", "1", "--head-dim", "64", "--memory", "1G")
    one = ("--heads", "1", "--context", "1", "--batch", "1", "--block-tokens", "1")
    two = ("--heads", "2", "--context", "2", "--batch", "2", "--block-tokens", "1")
    assert main([*sizes, *one]) == 0
    said = capsys.readouterr().out
    for words in ("MHA, 1 head ", "\n1 sequence ", "one sequence of 1 token, 1 block ", "one block of 1 token "):
        assert words in said
    assert main([*sizes, *two]) == 0
    said = capsys.readouterr().out
    for words in ("MHA, 2 heads ", "\n2 sequences ", "one sequence of 2 tokens, 2 blocks "):
        assert words in said
