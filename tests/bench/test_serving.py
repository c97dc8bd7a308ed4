"""`serve`, `prefix` and `overhead` on a tiny model: what they print is what the node did. No timing is judged."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import overhead, prefix, serve
from bench.client import BenchClient
from bench.local_engine import LocalEngine
from bench.node import Endpoint, started_node
from bench.setting import Setting
from bench.work import shared_prompts
from cli.errors import EXIT_USAGE, CommandError

SMALL_LOAD = ["--prompt-tokens", "64", "--new-tokens", "4", "--concurrency", "1,3", "--rounds", "1"]


def rows_of(tmp_path: Path, table: int = 0) -> list[dict[str, Any]]:
    """Rows of one table of the JSON file, by column."""
    document = json.loads((tmp_path / "rows.json").read_text())["tables"][table]
    return [dict(zip(document["columns"], row, strict=True)) for row in document["rows"]]


def test_serve_counts_every_stream(
    common_options: list[str], node_options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row a level, every request answered, at least the shared half cached, and a fraction of the limit."""
    assert serve.main([*common_options, *node_options, *SMALL_LOAD]) == 0
    rows = rows_of(tmp_path)
    assert [(row["streams"], row["requests"]) for row in rows] == [(1, 2), (3, 3)]
    for row in rows:
        assert 50.0 <= row["cached %"] < 100.0
        assert min(row["tokens/s"], row["TTFT p50 ms"], row["step limit ms"]) > 0.0
        assert all(row[name] is None or row[name] > 0.0 for name in ("ITL p50 ms", "step ms", "of limit %"))
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("# bench serve", "Serving", "Limits measured in this run"))


def test_prefix_is_cold_first_and_then_cached(
    common_options: list[str], node_options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warm prompt comes from the cache to its last token but one; admission is told in two ways."""
    small = ["--lengths", "32,65", "--repeats", "2", "--step-tokens", "3"]
    assert prefix.main([*common_options, *node_options, *small]) == 0
    rows = rows_of(tmp_path)
    assert [(row["prompt"], row["cached"]) for row in rows] == [(32, 31), (65, 64)]
    assert all(row["cold ms"] > 0.0 and row["warm ms"] > 0.0 for row in rows)
    admission = rows_of(tmp_path, 1)
    assert all(row["acquire in the core ms"] > 0.0 for row in admission)
    # A tiny model's whole answer may come in one message; then there is no step to tell.
    assert all(row["step ms"] is None or row["step ms"] > 0.0 for row in admission)
    assert "Admission of a cached prompt" in capsys.readouterr().out


def test_overhead_compares_both_sides_and_leaves_nothing(
    common_options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates of one process and of three stand beside each other; afterwards nothing answers any more."""
    monkeypatch.setenv("TESSERA_MAX_CONTEXT", "2")  # a variable of the shell must not reach the node
    seen: list[str] = []

    @contextmanager
    def remember(setting: Setting, flags: Sequence[str]) -> Iterator[Endpoint]:
        with started_node(setting, flags) as endpoint:
            seen.append(endpoint.target)
            yield endpoint

    monkeypatch.setattr(overhead, "started_node", remember)
    assert overhead.main([*common_options, *SMALL_LOAD, "--repeats", "2", "--pool-mb", "8"]) == 0
    rows = rows_of(tmp_path)
    assert [row["streams"] for row in rows] == [1, 3]
    assert all(row["one process tokens/s"] > 0.0 and row["three processes tokens/s"] > 0.0 for row in rows)
    assert "One process and three" in capsys.readouterr().out
    host, _, port = seen[0].rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5.0)


def test_both_sides_answer_with_the_same_tokens(tiny_gguf: Path, node_options: list[str]) -> None:
    """The engine in this process and the node continue a prompt alike, so they do the same work."""
    prompt = shared_prompts(77, 1, 40, 20, 512)[0]
    local = LocalEngine(Setting(tiny_gguf, "bfloat16", 1, None), 1 << 22, 4)
    with BenchClient(endpoint_of(node_options)) as client:
        theirs = client.closed_loop([[prompt]], 12)
    ours = local.closed_loop([[prompt]], 12)
    for load in (ours, theirs):
        answer = load.answers[0]
        assert sum(answer.message_tokens) == len(answer.token_ids) == 12
        assert sum(answer.steps_seconds) == pytest.approx(sum(answer.gaps_seconds))
    assert ours.answers[0].token_ids == theirs.answers[0].token_ids
    assert local.manager.check_integrity() == []
    assert local.manager.snapshot().leases == 0


def test_a_failed_request_ends_the_run_with_its_reason(tiny_gguf: Path, node_options: list[str]) -> None:
    """What the node or the engine refuses is an error of the bench, with the number that was wrong."""
    beyond = shared_prompts(5, 1, 5000, 10, 512)
    with BenchClient(endpoint_of(node_options)) as client:
        with pytest.raises(CommandError, match=r"INVALID_ARGUMENT|RESOURCE_EXHAUSTED"):
            client.closed_loop([beyond, shared_prompts(6, 1, 20, 10, 512)], 4)
        assert len(client.ask(beyond[0][:20], 2).token_ids) == 2
    local = LocalEngine(Setting(tiny_gguf, "bfloat16", 1, None), 1 << 16, 4)
    with pytest.raises(CommandError, match="blocks"):
        local.closed_loop([beyond], 4)


def test_a_node_that_is_not_there_is_named(common_options: list[str], tmp_path: Path, node_options: list[str]) -> None:
    """A wrong endpoint, a missing key file and a key file without an endpoint are told apart."""
    away = ["--endpoint", "127.0.0.1:1", *node_options[2:]]
    with pytest.raises(CommandError, match=r"127\.0\.0\.1:1"):
        prefix.main([*common_options, *away, "--lengths", "16", "--repeats", "1"])
    with pytest.raises(CommandError, match="--key-file") as missing:
        prefix.main([*common_options, *node_options[:2], "--key-file", str(tmp_path / "none")])
    assert missing.value.status == EXIT_USAGE
    with pytest.raises(CommandError, match="--endpoint"):
        prefix.main([*common_options, *node_options[2:]])


def test_a_node_that_cannot_start_says_why(tiny_gguf: Path) -> None:
    """A process that refuses its options ends the start, with its own words."""
    with (
        pytest.raises(CommandError, match=r"(?s)pool"),
        started_node(Setting(tiny_gguf, "bfloat16", 1, None), ["--pool-blocks", "4", "--pool-bytes", "1M"]),
    ):
        pass


def endpoint_of(node_options: list[str]) -> Endpoint:
    """The running node as a client sees it."""
    return Endpoint(node_options[1], Path(node_options[3]).read_text().strip(), started=False)
