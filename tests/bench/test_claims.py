"""`bench/claims.py` and its engine: the rows say what an engine of known costs does; no time is judged."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from bench import claims
from bench.claim_engine import Ask, Batch, ClaimEngine, Timed, in_waves, mixed_lengths
from bench.kv_quality import Score
from bench.setting import Setting, model_shape
from common.layout import KvLayout
from decoder.models.config import ModelConfig


@dataclass
class FakeEngine:
    """Continuous batching on a clock of its own: a step costs what `cost` says of the contexts that are in it, and a
    token of a prompt that is not cached costs 1."""

    cost: Callable[[list[int]], float]
    max_batch: int = 4
    cached: list[tuple[int, ...]] = field(default_factory=list)

    def _hit(self, prompt: tuple[int, ...]) -> int:
        def same(other: tuple[int, ...]) -> int:
            return next((n for n, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), len(other))

        return min(max(map(same, self.cached), default=0), len(prompt) - 1)

    def run(self, asks: Sequence[Ask]) -> Batch:
        """See Asker."""
        now, steps, waiting = 0.0, 0, list(asks)
        timed, running = [], []
        while waiting or running:
            while waiting and len(running) < self.max_batch:
                ask = waiting.pop(0)
                hit = self._hit(ask.prompt)
                now += len(ask.prompt) - hit
                self.cached.append(ask.prompt)
                timed.append(Timed(0.0, hit))
                running.append((ask, timed[-1]))
            steps += 1
            now += self.cost([len(ask.prompt) + len(one.arrivals) for ask, one in running])
            for _, one in running:
                one.arrivals.append(now)
            running = [(ask, one) for ask, one in running if len(one.arrivals) < ask.new_tokens]
        peak = max(len(ask.prompt) // 16 + 2 * ask.samples for ask in asks)
        return Batch(tuple(timed), now, steps, peak)

    def forget(self) -> None:
        """See Asker."""
        self.cached.clear()


def linear(contexts: list[int]) -> float:
    """One table row a context token, and a floor."""
    return 10.0 + sum(contexts) / 100.0


@pytest.mark.parametrize(
    ("cost", "holds"),
    [(linear, "yes"), (lambda contexts: sum(c * c for c in contexts) / 100.0, "no")],
    ids=["linear", "quadratic"],
)
def test_quadratic_steps_do_not_pass_for_linear_ones(cost: Callable[[list[int]], float], holds: str) -> None:
    """Over 16 times the context a linear step is at most 16 times as slow; a quadratic one, the control, is not."""
    rows = claims.decode_rows(FakeEngine(cost), 1000, (256, 512, 4096))
    assert rows[0][3] == rows[1][3] == holds
    assert rows[0][1] == "at most 16 x over 16 x the context"
    assert rows[1][1] == "1 x (quadratic: 6.00 x)"
    if cost is linear:
        # All 4,096 tokens were computed once, in three parts that each took one step too; then a step at 4,112 or so.
        whole = 4096 + 30 + (256 + 512 + 4096) / 100
        assert rows[2][2] == f"{whole / (10 + (4096 + 16.5) / 100):.3g} x"
    else:
        assert float(str(rows[1][2]).split()[0]) == pytest.approx(6, rel=0.1)


def test_growth_is_told_from_a_floor() -> None:
    """A large floor hides a square from the ratio of times, and not from their growth; two contexts are enough."""
    contexts = (256, 512, 1024, 2048, 4096)
    late, early, curved = claims.growth(contexts, [10 + c / 1e5 for c in contexts])
    assert late == pytest.approx(early) and curved == (4096 + 2048) / (2048 + 256)
    square = [10 + c * c / 1e7 for c in contexts]
    assert square[-1] / square[0] < 16
    late, early, curved = claims.growth(contexts, square)
    assert late / early == pytest.approx(curved)
    assert claims.growth((64, 128), [1.0, 2.0]) == (1 / 64, 1 / 64, 3.0)


def test_a_shared_prefix_counts_its_hit() -> None:
    """Saved is what was not computed; an engine that never hits is an error and no saving."""
    row = claims.prefix_row(FakeEngine(linear), 1000, length=1000, own=50)
    step = linear([1000])
    assert row[2] == f"{100 * (1 - (50 + step) / (1000 + step)):.1f} %"
    engine = FakeEngine(linear)
    engine._hit = lambda prompt: 0  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no hit"):
        claims.prefix_row(engine, 1000, length=1000, own=50)


def test_waves_wait_for_their_longest() -> None:
    """Static batching takes the longest of each wave and computes all its rows till then; equal lengths gain nothing by
    continuous batching."""
    asks = [Ask((1,), new) for new in (9, 1, 1, 1, 1, 9, 1, 1)]
    engine = FakeEngine(lambda contexts: float(len(contexts)))
    seconds, steps = in_waves(engine, asks, 4)
    assert (seconds, steps) == (18 * 4 + 8, 18), "the last token of each prompt is always computed"
    assert engine.run(asks).steps == 10
    even = [Ask((1,), 5)] * 8
    assert in_waves(engine, even, 4)[1] == engine.run(even).steps == 10


def test_batching_is_compared_with_equal_places_and_in_equal_memory() -> None:
    """Continuous batching gains with as many places, and more where it has those that the reservations would take."""
    flat = FakeEngine(lambda contexts: 1.0), FakeEngine(lambda contexts: 1.0, max_batch=16)
    rows = claims.batching_rows(*flat, 1000, 200, 4)
    gains = [float(str(row[2]).split()[0]) for row in rows]
    assert [row[3] for row in rows] == ["yes" if gain >= 5 else "no" for gain in gains]
    assert gains[1] > 1.5 and gains[3] > 3 * gains[1]
    same = FakeEngine(lambda contexts: 1.0), FakeEngine(lambda contexts: 1.0)
    rows = claims.batching_rows(*same, 1000, 200, 4)
    assert rows[1][2] == rows[3][2], "control: with no more places it gains no more"


def test_mixed_lengths_have_their_mean_and_a_long_tail() -> None:
    """Equal seeds give equal lengths; the mean is about the one asked for, and the longest many times it."""
    lengths = mixed_lengths(3, 4000, 338.0, 10_000)
    assert lengths == mixed_lengths(3, 4000, 338.0, 10_000)
    assert np.mean(lengths) == pytest.approx(338, rel=0.05)
    assert min(lengths) >= 1 and max(lengths) > 10 * 338
    assert max(mixed_lengths(3, 4000, 338.0, 1024)) == 1024


def test_memory_rows_are_the_layouts(tiny_gguf: Path) -> None:
    """MHA, GQA and MQA by their heads; waste by whole blocks: large blocks fail the claim, the control."""
    config, layout = model_shape(Setting(tiny_gguf, "bfloat16", 1, None))
    assert isinstance(config, ModelConfig)
    rows = claims.head_rows(config, layout)
    assert [row[2] for row in rows] == ["2 x", "1 x", "0.5 x"]
    paged, reserved = claims.waste_rows(layout, 300)
    assert (paged[3], reserved[3]) == ("yes", "yes")
    coarse = claims.waste_rows(KvLayout.of(1, 1, 16, 256, "float32"), 300)[0]
    assert coarse[3] == "no"
    assert claims.sampling_row(FakeEngine(linear), 1000)[2] == f"{(256 + 32) / (256 + 2):.3f} x"


def test_accuracy_rows_compare_with_float32() -> None:
    """A change of perplexity beyond half a percent does not hold."""
    losses = np.array([1.0, 2.0, 3.0])
    reference = Score(losses, np.array([1, 2, 3]))
    worse = Score(losses + 0.01, np.array([1, 2, 4]))
    rows = claims.quality_rows({"float32": reference, "int8": reference, "fp8_e4m3": worse})
    assert [(row[2], row[3]) for row in rows] == [("+0.000 %", "yes"), ("+1.005 %", "no")]
    assert "66.7 %" in str(rows[1][4])


def test_the_bench_prints_one_table(common_options: list[str], tmp_path: Path, tiny_gguf: Path) -> None:
    """The real engine on a tiny model: each claim has a line with a measurement; a text brings those of accuracy."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    options = ["--contexts", "64", "128", "--requests", "20", "--text", str(text), "--windows", "2", "--tokens", "48"]
    assert claims.main([*common_options, *options]) == 0
    (table,) = json.loads((tmp_path / "rows.json").read_text())["tables"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert len(rows) == 16
    assert all(row["measured"] and row["holds"] in ("yes", "no") and row["claimed"] for row in rows)
    by_name = {row["claim"]: row for row in rows}
    assert by_name["16 samples of a prompt of 128 tokens take little more memory than one"]["holds"] == "no"
    assert by_name["paged memory wastes little (blocks of 16)"]["holds"] == "yes"


def test_growth_needs_two_contexts(common_options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One context alone, named once or twice, is refused before anything is measured."""
    for same in (["64"], ["64", "64"]):
        with pytest.raises(SystemExit):
            claims.main([*common_options, "--contexts", *same])
        assert "--contexts takes two different lengths at least" in capsys.readouterr().err


def test_the_engine_counts_blocks_and_hits(tiny_gguf: Path) -> None:
    """One request of 8 blocks holds 8 and those of its answer; asked again it is a hit, and after `forget` none."""
    engine = ClaimEngine(Setting(tiny_gguf, "bfloat16", 1, None), 1 << 22, 4)
    ask = Ask(tuple(range(10, 138)), 3)
    first = engine.run([ask])
    assert 8 <= first.peak_blocks <= 10
    assert len(first.answers[0].arrivals) == 3 and first.steps >= 3
    assert engine.run([ask]).answers[0].cached_tokens == 127
    engine.forget()
    assert engine.run([ask]).answers[0].cached_tokens == 0
