"""`tessera bench replay`: recorded admissions through the real index, beside what could have been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.replay import Replay, compare, main
from bench.traces import Admission, make_sessions, read_trace, write_trace
from cachemgr.belady import best_hit_rate
from cachemgr.policies import POLICIES

# Chains are paths of a small tree, so that they share beginnings, split and extend each other.
CHAINS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(
    lambda steps: tuple("/".join(map(str, steps[: depth + 1])) for depth in range(len(steps)))
)
TRACES = st.lists(st.tuples(CHAINS, st.integers(0, 2)), min_size=1, max_size=40)


def trace_of(rows: list[tuple[tuple[str, ...], int]]) -> list[Admission]:
    return [Admission(float(number), f"t{tenant}", chain) for number, (chain, tenant) in enumerate(rows)]


@settings(max_examples=150, deadline=None)
@given(TRACES, st.integers(2, 12))
def test_lru_over_the_index_is_lru_over_blocks(rows: list[tuple[tuple[str, ...], int]], num_blocks: int) -> None:
    """Nodes, splits and trims lose nothing: the index drops exactly the blocks that plain LRU, leaves first, drops.

    But where a prompt ends inside a node: recency is one number a node, so what goes on there grows younger with it.
    """
    chains = {(chain, tenant) for chain, tenant in rows}
    longest = [(chain, tenant) for chain, tenant in rows if not any(
        other != chain and other[: len(chain)] == chain and tenant == of for other, of in chains
    )]  # fmt: skip
    trace = trace_of(longest)
    replay = Replay(num_blocks, POLICIES["lru"], one_pool=True)
    for admission in trace:
        replay.admit(admission)
    names = [[(item.tenant, block) for block in item.blocks] for item in trace]
    assert replay.done.hit_rate == best_hit_rate(names, num_blocks).hit


@settings(max_examples=60, deadline=None)
@given(TRACES, st.integers(2, 12), st.booleans())
def test_no_policy_is_above_the_best(rows: list[tuple[tuple[str, ...], int]], num_blocks: int, one_pool: bool) -> None:
    """Every policy stays at or below Belady's bound, and drops no more than it must."""
    found = compare(trace_of(rows), num_blocks, list(POLICIES), one_pool=one_pool)
    rates = {str(row[0]): row[1] for row in found}
    best, infinite = rates.pop("best (Belady)"), rates.pop("infinite")
    assert isinstance(best, float) and isinstance(infinite, float) and best <= infinite
    assert len(rates) == len(POLICIES)
    for rate in rates.values():
        assert isinstance(rate, float) and rate <= best


def test_a_policy_matters() -> None:
    """A system prompt that all use between scans stays with the policies that count uses, and goes with plain LRU."""
    common = ("s0", "s1")
    rows: list[Admission] = []
    for number in range(30):
        rows.append(Admission(number, "a", common))
        rows.append(Admission(number, "a", common))
        rows += [Admission(number, "a", (f"scan {number} {part}",)) for part in range(4)]
    rates = {str(row[0]): row[1] for row in compare(rows, 4, ["lru", "lfu", "sieve"])}
    lru, lfu, sieve = (float(rates[name] or 0) for name in ("lru", "lfu", "sieve"))
    assert lru < lfu
    assert lru < sieve


def test_priority_and_expiry_count() -> None:
    """What has a higher priority outlives a scan; what has expired is not found, even where there is room."""
    kept = Admission(0, "a", ("k",), priority=90)
    scan = [Admission(1, "a", (f"s{number}",)) for number in range(5)]
    for name, hits in (("priority-lru", 1), ("lru", 0)):
        replay = Replay(3, POLICIES[name])
        for admission in [kept, *scan, kept]:
            found = replay.admit(admission)
        assert found == hits, name
    for seconds, hits in ((5.0, 1), (15.0, 0)):
        replay = Replay(3, POLICIES["lru"])
        replay.admit(Admission(0, "a", ("k",), ttl_seconds=10.0))
        assert replay.admit(Admission(seconds, "a", ("k",))) == hits


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Written, read, the same; and equal seeds make the same conversations, which share beginnings."""
    path = tmp_path / "trace.jsonl"
    made = make_sessions(3, 40)
    write_trace(path, made)
    assert read_trace(path) == made == make_sessions(3, 40)
    assert made != make_sessions(4, 40)
    assert best_hit_rate([item.blocks for item in made], 10_000).infinite > 0.5


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{",
        '{"time": 1}',
        '{"time": 1, "blocks": [1, 1]}',
        '{"time": 1, "blocks": [null]}',
        '{"time": 1, "blocks": [1], "priority": 101}',
        '{"time": 1, "blocks": [1], "ttl_seconds": -1}',
        '{"time": -1, "blocks": [1]}',
        '{"format": "tessera-admissions", "version": 2}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    """A line that is no admission is refused with its number."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 0, "tenant": "a", "blocks": ["x"]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2"):
        read_trace(path)


def test_the_command_makes_and_replays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--make-trace writes what --trace reads; the table has a row for each policy and both limits."""
    path, rows = tmp_path / "trace.jsonl", tmp_path / "rows.json"
    assert main(["--make-trace", str(path), "--sessions", "30"]) == 0
    assert main(["--trace", str(path), "--blocks", "300", "--json", str(rows)]) == 0
    (table,) = json.loads(rows.read_text(encoding="utf-8"))["tables"]
    assert [row[0] for row in table["rows"]] == [*POLICIES, "best (Belady)", "infinite"]
    assert "Belady" in capsys.readouterr().out
    for arguments in ([], ["--trace", str(tmp_path / "none")], ["--trace", str(path), "--policy", "magic"]):
        with pytest.raises(SystemExit):
            main(arguments)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    """Which field is missing, and what a line may have."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="blocks: is missing; needed are time and blocks"):
        read_trace(path)
