"""`bench/yardstick.py`: equal weights, an agreement check that can fail, a clear answer where nothing is installed."""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from bench import _openvino_worker, yardstick
from bench.gguf_rewrite import rewrite_gguf, round_to_bfloat16
from cli.errors import EXIT_USAGE, CommandError
from decoder.weights.source import open_source

SMALL = ["--prompt-tokens", "32", "--new-tokens", "4", "--concurrency", "1,2", "--rounds", "1", "--lengths", "16,33"]
FAKE = [sys.executable, "-m", "tests.bench.fake_engine"]


def test_rounding_is_that_of_torch() -> None:
    """Every float32 rounds to the bfloat16 that torch rounds it to, halves to even."""
    values = np.random.default_rng(1).standard_normal(20_000).astype(np.float32)
    values = np.concatenate([values, np.array([0.0, -0.0, 1.00390625, 1.01171875, 3e38], np.float32)])
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    assert np.array_equal(round_to_bfloat16(values), expected)


def test_rewritten_weights_are_those_of_the_file(tiny_gguf: Path, tmp_path: Path) -> None:
    """Each tensor of the new file is that of the old one once both are bfloat16; metadata and tokenizer stay."""
    rewrite_gguf(tiny_gguf, tmp_path / "new.gguf")
    old, new = open_source(tiny_gguf), open_source(tmp_path / "new.gguf")
    assert old.config == new.config
    assert old.shapes() == new.shapes()
    for name in old.shapes():
        before, after = (torch.from_numpy(source.read(name).copy()).to(torch.bfloat16) for source in (old, new))
        assert torch.allclose(before, after, rtol=0.0, atol=2.0**-24), name
    fields = [gguf.GGUFReader(path).fields for path in (tiny_gguf, tmp_path / "new.gguf")]
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "llama.rope.freq_base"):
        assert fields[0][name].contents() == fields[1][name].contents()


def test_both_engines_stand_in_the_tables(
    common_options: list[str], node_options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an engine that runs the same weights, the tokens agree, and every row has both sides and a ratio."""
    assert yardstick.main([*common_options, *node_options, *SMALL, "--repeats", "2"], FAKE) == 0
    tables = json.loads((tmp_path / "rows.json").read_text())["tables"]
    assert [[row[0] for row in table["rows"]] for table in tables] == [[16, 33], [1, 2]]
    # A tiny model's whole answer may come in one message; then there is no time between two.
    assert all(cell is None or cell > 0.0 for table in tables for row in table["rows"] for cell in row)
    assert all(cell is not None for table in tables for row in table["rows"] for cell in row[:4])
    first = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Greedy tokens alike"))
    assert "first 24 of 24" in first


def test_an_engine_with_other_tokens_is_not_timed(common_options: list[str], node_options: list[str]) -> None:
    """Where the engines do not continue a text alike there is no table, but an error."""
    with pytest.raises(CommandError, match="agree in 0 of 24"):
        yardstick.main([*common_options, *node_options, *SMALL], [*FAKE, "wrong"])


def test_an_absent_engine_ends_with_status_3(common_options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Without openvino-genai the bench says so and how to get it, and starts no node."""
    hello = 'print(\'{"missing": "No module"}\', flush=True)'
    assert yardstick.main([*common_options, *SMALL], [sys.executable, "-c", hello]) == yardstick.EXIT_ABSENT
    said = capsys.readouterr()
    assert "pip install openvino-genai" in said.err
    assert not said.out


def test_a_dead_engine_and_a_wrong_model_are_errors(common_options: list[str], tmp_path: Path) -> None:
    """A process that ends, a Python that is not there, and a model in another format are refused by name."""
    with pytest.raises(CommandError, match="has ended"):
        yardstick.main([*common_options, *SMALL], [sys.executable, "-c", ""])
    with pytest.raises(CommandError, match="cannot run"):
        yardstick.main([*common_options, *SMALL, "--yardstick-python", str(tmp_path / "python")])
    for wrong, word in ((["--model", str(tmp_path)], "GGUF"), ([*common_options, "--dtype", "float32"], "bfloat16")):
        with pytest.raises(CommandError, match=word) as refused:
            yardstick.main(wrong)
        assert refused.value.status == EXIT_USAGE


class _Handle:
    """One request of the fake library: it counts up from its prompt's last token."""

    def __init__(self, prompt: list[int], max_new_tokens: int) -> None:
        self.last, self.left, self.unread = prompt[-1], max_new_tokens, []

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, Any]:
        unread, self.unread = self.unread, []
        return {0: types.SimpleNamespace(generated_ids=unread)}


class _Pipeline:
    """The fake library's pipeline: a step adds one token to each request."""

    def __init__(self, model: str, scheduler: Any, device: str, properties: dict[str, str]) -> None:
        if not Path(model).exists():
            raise RuntimeError("no such model")
        self.open: list[_Handle] = []
        self.most = 0

    def add_request(self, number: int, tensor: Any, config: Any) -> _Handle:
        assert config.ignore_eos
        assert not config.do_sample
        handle = _Handle(tensor[0].tolist(), config.max_new_tokens)
        self.open.append(handle)
        return handle

    def step(self) -> None:
        self.most = max(self.most, len(self.open))
        for handle in self.open:
            handle.last, handle.left = handle.last + 1, handle.left - 1
            handle.unread.append(handle.last)
        self.open = [handle for handle in self.open if handle.left]

    def has_non_finished_requests(self) -> bool:
        return bool(self.open)

    def get_tokenizer(self) -> Any:
        return types.SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))


@pytest.fixture
def fake_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """`openvino_genai` and `openvino` as far as the worker uses them."""
    genai, openvino = types.ModuleType("openvino_genai"), types.ModuleType("openvino")
    values: dict[str, Any] = {
        "SchedulerConfig": lambda: types.SimpleNamespace(max_num_batched_tokens=256),
        "GenerationConfig": types.SimpleNamespace,
        "ContinuousBatchingPipeline": _Pipeline,
        "__version__": "fake",
    }
    for name, value in values.items():
        setattr(genai, name, value)
    core = types.SimpleNamespace(get_property=lambda device, name: 0)
    openvino.Core, openvino.Tensor = (lambda: core), (lambda array: array)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", openvino)


def test_the_worker_answers_line_by_line(fake_library: None, tmp_path: Path) -> None:
    """A stream asks its next prompt when its last answer has ended; tokens, times and errors come back."""
    (tmp_path / "model.gguf").write_bytes(b"")
    load = {"op": "load", "precision": "bf16", "cache_gigabytes": 1, "batch_tokens": 0}
    lines = [
        {**load, "model": str(tmp_path / "none.gguf")},
        {**load, "model": str(tmp_path / "model.gguf")},
        {"op": "closed_loop", "streams": [[[1, 10], [2, 20]], [[3, 30]]], "max_tokens": 3},
        {"op": "text", "ids": [4, 5]},
    ]
    out = io.StringIO()
    assert _openvino_worker.serve(io.StringIO("".join(json.dumps(line) + "\n" for line in lines)), out) == 0
    ready, refused, loaded, done, text = map(json.loads, out.getvalue().splitlines())
    assert (ready, refused, text) == ({"ready": True}, {"error": "no such model"}, {"text": "4 5"})
    assert (loaded["version"], loaded["batch_tokens"]) == ("fake", 256)
    assert [answer["ids"] for answer in done["answers"]] == [[11, 12, 13], [31, 32, 33], [21, 22, 23]]
    assert all(
        len(answer["gaps"]) == 2 and answer["counts"] == [1, 1, 1] and answer["ttft"] > 0.0
        for answer in done["answers"]
    )
    assert done["seconds"] >= max(answer["ttft"] for answer in done["answers"])


def test_the_worker_says_that_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library the first line tells, and the status is 3."""
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    out = io.StringIO()
    assert _openvino_worker.serve(io.StringIO(""), out) == 3
    assert "missing" in json.loads(out.getvalue())
