"""What does each type of weights cost in quality? Perplexity and greedy agreement, against float32 of the same file.

Text, windows and measures are those of `kv_quality`; keys and values are float32 in every row. "file" is left out where
the model is no GGUF file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.kv_quality import REFERENCE, IntArray, Score, add_text_options, read_windows, score_windows
from bench.setting import BLOCK_TOKENS, make_parser, read_setting, start_report
from bench.table import Cell
from common.config import DTYPES
from decoder.weights import load_model

COLUMNS = ("weights", "MiB read a step", "perplexity", "change %", "± %", "greedy agreement %")


def measure(
    path: Path, threads: int, windows: Sequence[IntArray], dtypes: Sequence[str]
) -> tuple[dict[str, Score], dict[str, int]]:
    """The scores of the reference and of `dtypes`, and the bytes of weights that a step of each reads."""
    scores, sizes = {}, {}
    for name in dict.fromkeys([REFERENCE, *dtypes]):
        model = load_model(path, name, BLOCK_TOKENS, "float32", threads)  # type: ignore[arg-type,unused-ignore]
        scores[name], sizes[name] = score_windows(model, windows), model.weight_bytes
        model.close()
    return scores, sizes


def rows_of(scores: dict[str, Score], sizes: dict[str, int]) -> list[list[Cell]]:
    """One row for each type, the reference first."""
    want, rows = scores[REFERENCE], []
    for name, score in scores.items():
        found: list[Cell] = [name, round(sizes[name] / 2**20, 1), round(score.perplexity, 4)]
        compared: list[Cell] = [*score.change(want), round(score.agreement(want), 2)]
        rows.append(found + (compared if name != REFERENCE else [None, None, None]))
    return rows


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = make_parser("weight_quality", __doc__)
    add_text_options(parser, 8, 512)
    others = [name for name in DTYPES if name != REFERENCE]
    parser.add_argument("--types", nargs="+", choices=others, default=others, help="types of weights to judge")
    namespace = parser.parse_args(list(arguments))
    setting = read_setting(namespace)
    dtypes = [name for name in namespace.types if name != "file" or setting.model.suffix == ".gguf"]
    windows, source = read_windows(setting.model, namespace.text, namespace.windows, namespace.tokens)
    report = start_report("weight_quality", setting, {"text": source})
    scores, sizes = measure(setting.model, setting.threads, windows, dtypes)
    predicted = int(np.size(scores[REFERENCE].losses))
    report.table(f"{len(windows)} windows, {predicted} predicted tokens", COLUMNS, rows_of(scores, sizes))
    report.note("± is one standard error of the change, over tokens: a change smaller than it is none that was seen.")
    report.write_json(setting.json)
    return 0
