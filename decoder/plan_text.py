"""The plan of `decoder/plan.py` as text for a terminal: tables, and sentences for what a table cannot say.

Reads the plan's one JSON-ready object and computes nothing: every figure is there already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

Table = Callable[[Sequence[str], Sequence[Sequence[object]]], str]
_GIB: Final = 1024**3
_WINDOW_COLUMNS: Final = ("a query sees", "layers", "their part of a sequence", "with layer groups (not built)")
_CONTEXT_FROM: Final = {
    "model": "that is the longest context of the model; --context N plans for another",
    "assumed": "that is assumed, as no model says how long its context is; --context N plans for another",
}


def show(plan: dict[str, Any], table: Table) -> str:
    """The plan as text; `table(header, rows)` lays a table out."""
    exact = [
        ("one token", plan["token_bytes"], _readable(plan["token_bytes"])),
        (f"one block of {plan['block_tokens']} tokens", plan["block_bytes"], _readable(plan["block_bytes"])),
        (f"one sequence of {plan['context']} tokens, {plan['sequence_blocks']} blocks", plan["sequence_bytes"],
         _readable(plan["sequence_bytes"])),
        (f"{plan['batch']} sequences", plan["batch_bytes"], _readable(plan["batch_bytes"])),
        ("textbook: 2 x batch x layers x positions x kv heads x head size x bytes", plan["textbook_bytes"],
         _readable(plan["textbook_bytes"])),
        ("textbook: 2 x batch x layers x positions x width x bytes", plan["textbook_bytes_of_width"],
         _readable(plan["textbook_bytes_of_width"])),
    ]  # fmt: skip
    lines = [table(("keys and values", "bytes", "is"), [(name, int(size), text) for name, size, text in exact])]
    if plan["context_from"] in _CONTEXT_FROM:
        lines.append(f"A sequence has {plan['context']} tokens: {_CONTEXT_FROM[plan['context_from']]}.")
    if any(row["window"] is not None for row in plan["windows"]):
        lines += _show_windows(plan, table)
    fits = "sequences that fit" if plan["pool_bytes"] is not None else "sequences (give --memory)"
    for key, title in (("kinds", "attention"), ("dtypes", "type")):
        rows = [
            (
                f"{row['kind']}, {row['kv_heads']} heads" if key == "kinds" else row["kv_dtype"],
                _readable(row["token_bytes"]),
                _readable(row["sequence_bytes"]),
                row["sequences_that_fit"] if row["sequences_that_fit"] is not None else "-",
            )
            for row in plan[key]
        ]
        lines.append(table((title, "a token", "a sequence", fits), rows))
    if plan["pool_bytes"] is not None:
        lines.append(
            f"{_readable(plan['memory_bytes'])} of memory, less {_readable(plan['weight_bytes'])} of weights, leave a "
            f"pool of {_readable(plan['pool_bytes'])}: {plan['sequences_that_fit']} sequences of {plan['context']} "
            f"tokens (more where prefixes are shared). One block of the pool, {_readable(plan['null_block_bytes'])}, "
            f"is the null block: unused places of block tables point at it, and no sequence holds it."
        )
    return "\n\n".join(lines)


def _show_windows(plan: dict[str, Any], table: Table) -> list[str]:
    rows = [
        (
            "all keys" if row["window"] is None else f"the last {row['window']} keys",
            f"{len(row['layers'])} ({_ranges(row['layers'])})",
            f"{_readable(row['sequence_bytes'])}, {row['blocks']} blocks",
            f"{_readable(row['sequence_bytes_with_layer_groups'])}, {row['blocks_with_layer_groups']} blocks",
        )
        for row in plan["windows"]
    ]
    if plan["window_blocks"] is not None:
        least = plan["window_blocks"]
        text = (
            f"Every layer has a window. A sequence keeps all of its blocks, for prompts to come, as long as there is "
            f"room; where blocks lack, a running one comes down to those of the widest window: {least} blocks, "
            f"{_readable(least * plan['block_bytes'])}."
        )
        return [table(_WINDOW_COLUMNS, rows), text]
    return [
        table(_WINDOW_COLUMNS, rows),
        f"Layers with a window keep all blocks of their sequence, since others see all keys: a block holds every "
        f"layer, and layer groups with tables of their own are not built. With them a sequence would take "
        f"{_readable(plan['sequence_bytes_with_layer_groups'])} in place of {_readable(plan['sequence_bytes'])}.",
    ]


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
    for unit, scale in (("GiB", _GIB), ("MiB", 1024**2), ("KiB", 1024)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size:.4g} B"
