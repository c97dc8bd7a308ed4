"""`bench/operations.py`: what it times is torch's attention on real data, and every operation has a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import operations
from bench.operations_work import attention_work, block_work, write_work


@pytest.mark.parametrize(("storage", "tolerance"), [("float16", 2e-3), ("bfloat16-dots", 5e-3), ("int8-dots", 2e-3)])
@pytest.mark.parametrize(
    ("name", "batch", "chunk"), [("paged_decode", 2, 1), ("shared_prefix_decode", 3, 1), ("paged_prefill", 1, 24)]
)
def test_both_compute_the_same_attention(name: str, batch: int, chunk: int, storage: str, tolerance: float) -> None:
    """What is timed on the blocks equals torch's attention on the gathered keys and values, for each operation."""
    work = attention_work(name, "SmolLM2", storage, 1030, batch, chunk)
    assert work.torch is not None
    ours, theirs = work.run(), work.torch()
    assert isinstance(ours, torch.Tensor)
    assert isinstance(theirs, torch.Tensor)
    torch.testing.assert_close(ours.float(), theirs.float(), atol=tolerance, rtol=0.0)
    assert ours.abs().mean() > 0.01


def test_bytes_are_counted_once() -> None:
    """A shared prefix counts once, a decode's keys and values each once, and a copy what it reads and writes."""
    token = 2 * 3 * 64 * 2
    assert attention_work("paged_decode", "SmolLM2", "float16", 1024, 4, 1).amount == 4 * 1024 * token
    shared = attention_work("shared_prefix_decode", "SmolLM2", "float16", 1024, 4, 1)
    assert shared.amount == (768 + 4 * 256) * token
    amounts = {work.operation: work.amount for work in block_work("SmolLM2")}
    assert amounts["block_copy"] == 2 * amounts["block_scrub"] == 2 * 512 * 16 * token
    assert write_work("SmolLM2", "float16").amount == 1024 * ((9 + 6) * 64 * 4 + 9 * 64 * 4 + token)
    # Queries of two bytes.
    assert write_work("SmolLM2", "bfloat16-dots").amount == 1024 * ((9 + 6) * 64 * 4 + 9 * 64 * 2 + token)


def test_the_bench_prints_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operation has a row with a rate and a fraction of a limit; those of attention have torch's time beside."""
    monkeypatch.setattr(operations, "MODELS", ("SmolLM2",))
    monkeypatch.setattr(operations, "SECONDS", 0.0)
    path = tmp_path / "rows.json"
    options = ["--threads", "1", "--storages", "float16", "--contexts", "64,128", "--batches", "1,2"]
    assert operations.main([*options, "--json", str(path)]) == 0
    assert "Matmul" in capsys.readouterr().out
    (table,) = json.loads(path.read_text())["tables"]
    names = [row[0] for row in table["rows"]]
    assert {*names} == {
        "norm", "activation", "kv_write", "block_copy", "block_pack", "block_unpack", "block_scrub",
        "paged_decode", "shared_prefix_decode", "paged_prefill",
    }  # fmt: skip
    assert names.count("paged_prefill") == 2
    for row in table["rows"]:
        assert row[4] > 0.0
        assert row[6] > 0.0
        assert (row[7] is not None) == (row[0].startswith("paged") or row[0] == "shared_prefix_decode")


def test_what_is_too_large_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case with more keys and values than the bound is not made, and the others are."""
    monkeypatch.setattr(operations, "MODELS", ("SmolLM2",))
    monkeypatch.setattr(operations, "MOST_BYTES", 128 * 768)
    cases = [work.case for work in operations.works(["float16"], [64], [1, 2, 3], "paged_decode")]
    assert cases == ["1 x 64", "2 x 64"]
