"""The plan of `decoder/plan.py` as text for a terminal: tables, and sentences for what a table cannot say.

Reads the plan's one JSON-ready object and computes nothing: every figure is there already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from common.words import count

Table = Callable[[Sequence[str], Sequence[Sequence[object]]], str]
_WINDOW_COLUMNS: Final = ("a query sees", "layers", "their part of a sequence")
_CONTEXT_FROM: Final = {
    "model": "that is the longest context of the model; --context N plans for another",
    "assumed": "that is assumed, as no model says how long its context is; --context N plans for another",
}


def show(plan: dict[str, Any], table: Table) -> str:
    """The plan as text; `table(header, rows)` lays a table out."""
    exact = [
        ("one token", plan["token_bytes"], _readable(plan["token_bytes"])),
        (f"one block of {count(plan['block_tokens'], 'token')}", plan["block_bytes"], _readable(plan["block_bytes"])),
        *_window_block(plan),
        (f"one sequence of {count(plan['context'], 'token')}, {_blocks(plan)}",
         plan["sequence_bytes"], _readable(plan["sequence_bytes"])),
        (count(plan["batch"], "sequence"), plan["batch_bytes"], _readable(plan["batch_bytes"])),
        ("textbook: 2 x batch x layers x positions x kv heads x head size x bytes", plan["textbook_bytes"],
         _readable(plan["textbook_bytes"])),
        ("textbook: 2 x batch x layers x positions x width x bytes", plan["textbook_bytes_of_width"],
         _readable(plan["textbook_bytes_of_width"])),
    ]  # fmt: skip
    lines = [table(("keys and values", "bytes", "is"), [(name, int(size), text) for name, size, text in exact])]
    if plan["context_from"] in _CONTEXT_FROM:
        lines.append(f"A sequence has {count(plan['context'], 'token')}: {_CONTEXT_FROM[plan['context_from']]}.")
    if any(row["window"] is not None for row in plan["windows"]):
        lines += _show_windows(plan, table)
    fits = "sequences that fit" if plan["pool_bytes"] is not None else "sequences (give --memory)"
    for key, title in (("kinds", "attention"), ("dtypes", "type")):
        rows = [
            (
                f"{row['kind']}, {count(row['kv_heads'], 'head')}" if key == "kinds" else row["kv_dtype"],
                _readable(row["token_bytes"]),
                _readable(row["sequence_bytes"]),
                row["sequences_that_fit"] if row["sequences_that_fit"] is not None else "-",
            )
            for row in plan[key]
        ]
        lines.append(table((title, "a token", "a sequence", fits), rows))
    if plan["pool_bytes"] is not None:
        lines.append(_say_what_fits(plan))
    return "\n\n".join(lines)


def _say_what_fits(plan: dict[str, Any]) -> str:
    """What the memory holds; where that is no sequence at all, what would help."""
    memory, weights, pool = (_readable(plan[f"{name}_bytes"]) for name in ("memory", "weight", "pool"))
    tokens = count(plan["context"], "token")
    null_bytes = _readable(plan["null_block_bytes"])
    null_block = (
        f"One block of the pool, {null_bytes}, is the null block: unused places of block tables point at it, and no "
        f"sequence holds it."
    )
    if plan["layer_groups"]:
        null_block = (
            f"One block of the pool and one window block, {null_bytes}, are null: unused places of tables point at "
            f"them, and no sequence holds them."
        )
    if plan["sequences_that_fit"]:
        return (
            f"{memory} of memory, less {weights} of weights, leave a pool of {pool}: "
            f"{count(plan['sequences_that_fit'], 'sequence')} of {tokens} (more where prefixes are shared). "
            f"{null_block}"
        )
    enough = f"One sequence of {tokens} needs --memory {_size_option(plan['memory_bytes_for_one_sequence'])}"
    if plan["memory_bytes"] <= plan["weight_bytes"]:
        return f"It does not fit: the weights take {weights}, and there are {memory} of memory. {enough}."
    shorter = plan["longest_context_that_fits"]
    if shorter:
        enough += f"; the longest one that fits has {count(shorter, 'token')} (--context {shorter})"
    return (
        f"It does not fit: {memory} of memory, less {weights} of weights, leave a pool of {pool}, and one sequence of "
        f"{tokens} takes {_readable(plan['sequence_bytes'])}. {enough}. {null_block}"
    )


def _show_windows(plan: dict[str, Any], table: Table) -> list[str]:
    rows = [
        (
            "all keys" if row["window"] is None else f"the last {count(row['window'], 'key')}",
            f"{len(row['layers'])} ({_ranges(row['layers'])})",
            f"{_readable(row['sequence_bytes'])}, {count(row['blocks'], 'block')}",
        )
        for row in plan["windows"]
    ]
    if plan["window_blocks"] is not None:
        least = plan["window_blocks"]
        text = (
            f"Every layer has a window: a running sequence holds the blocks of the widest window alone, at most "
            f"{count(least, 'block')}, {_readable(least * plan['block_bytes'])}. What it has passed is cached, for "
            f"prompts to come, while there is room."
        )
        return [table(_WINDOW_COLUMNS, rows), text]
    if not plan["layer_groups"]:
        text = "No window is shorter than the longest context of the model: a block holds every layer."
        return [table(_WINDOW_COLUMNS, rows), text]
    return [
        table(_WINDOW_COLUMNS, rows),
        f"Layers with a window lie in window blocks, which a running sequence holds of its last window alone, at most "
        f"{count(plan['sequence_window_blocks'], 'block')}; the others lie in blocks. With all layers in one block it "
        f"would take {_readable(plan['sequence_bytes_in_one_group'])}. The pool has one window block for "
        f"{count(plan['blocks_for_a_window_block'], 'block')}, or enough for two sequences; those that a window has "
        f"passed are cached while there is room.",
    ]


def _window_block(plan: dict[str, Any]) -> list[tuple[str, int, str]]:
    size = plan["window_block_bytes"]
    return [(f"one window block of {count(plan['block_tokens'], 'token')}", size, _readable(size))] if size else []


def _blocks(plan: dict[str, Any]) -> str:
    """The blocks of a sequence in words, of both kinds."""
    held = plan["sequence_window_blocks"]
    return count(plan["sequence_blocks"], "block") + (f" and {count(held, 'window block')}" if held else "")


def _ranges(numbers: Sequence[int]) -> str:
    """`0..4, 6, 8..9` of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("..".join(str(end) for end in run) for run in runs)


def _readable(size: float) -> str:
    for unit, scale in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size:.4g} B"


def _size_option(size: int) -> str:
    """A size as options take it, in whole units, not below `size`."""
    unit, scale = next(((u, s) for u, s in (("G", 1024**3), ("M", 1024**2), ("K", 1024)) if size >= 16 * s), ("", 1))
    return f"{-(-size // scale)}{unit}"
