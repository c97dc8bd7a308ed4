"""`tessera plan`: what keys and values of a model take, and how many sequences fit in a memory.

Reads a model's configuration and the shapes of its tensors, never the tensors. Sizes come from `common/layout.py`, so
that the plan is what the arena will take.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.arguments import CommandParser, whole
from common.config import DEFAULT_DTYPE, DTYPES, parse_size
from common.errors import InvalidArgument, TesseraError
from common.kv_plan import (
    bytes_for_one,
    sequence_cost,
    sequences_that_fit,
    textbook_bytes,
    textbook_bytes_of_width,
    tokens_that_fit,
    with_kv_heads,
)
from common.layout import KV_DTYPES, MAX_BLOCK_TOKENS, WINDOW_SHARE, KvLayout, default_kv_dtype
from decoder.plan_text import Table, show
from decoder.weights.loader import layer_windows, longest_context
from decoder.weights.source import open_source
from decoder.weights.weight_groups import weight_bytes

_ASSUMED_CONTEXT = 8192
_FLAGS = {"model": "--model", "model.dtype": "--dtype"}
_MAX_SIZE = 1024  # of what `KvLayout` takes
_MAX_CONTEXT, _MAX_BATCH = 10_000_000, 1_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model that its cache depends on. `weight_bytes` is 0 where no model was given.

    context_from: whose `context` it is: "option", "model" or "assumed"
    windows:      keys that a query sees in each layer; None is all
    groups:       `KvLayout.window_tokens`, `window_layers` and `window_share` as a node lays the model out
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    weight_bytes: int
    context_from: str
    windows: tuple[int | None, ...]
    groups: tuple[int, tuple[int, ...], int] = (0, (), WINDOW_SHARE)

    def layout(self, block_tokens: int, kv_dtype: str) -> KvLayout:
        """The layout of the model's arena."""
        return KvLayout.of(
            self.num_layers, self.num_kv_heads, self.head_dim, block_tokens, kv_dtype, *self.groups
        )  # fmt: skip

    def kinds(self) -> dict[str, int]:
        """Kind of attention -> key and value heads: the model's own last, where it is none of the ends."""
        kinds = {"MHA": self.num_heads, "MQA": 1}
        if self.num_kv_heads not in kinds.values():
            kinds["GQA"] = self.num_kv_heads
        return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def _bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tessera plan",
        description="What keys and values take, as the arena lays them out, and how many sequences fit.",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a GGUF file, a Hugging Face directory, or the name of a fetched model",
    )
    for name, text in (
        ("layers", "layers"), ("heads", "query heads"), ("kv-heads", "key and value heads"), ("head-dim", "head size"),
    ):  # fmt: skip
        help_text = f"{text}, where no --model is given"
        parser.add_argument(f"--{name}", type=whole(1, _MAX_SIZE), metavar="N", help=help_text)
    parser.add_argument("--memory", type=_bytes, metavar="SIZE", help="memory for weights and cache, for example 80G")
    parser.add_argument(
        "--context",
        type=whole(1, _MAX_CONTEXT),
        metavar="N",
        help="tokens of a sequence, at most the model's (default: the model's, else 8192)",
    )
    parser.add_argument(
        "--batch", type=whole(1, _MAX_BATCH), default=8, metavar="N", help="sequences at once (default 8)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default=DEFAULT_DTYPE, help="type of the weights")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help="type of keys and values (default: as tessera up)")
    parser.add_argument(
        "--block-tokens",
        type=whole(1, MAX_BLOCK_TOKENS),
        default=16,
        metavar="N",
        help="tokens in a block (default 16)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return parser


def shape_of(options: argparse.Namespace) -> Shape:
    """The shape that the options name. Raises ValueError on a combination that says too little or too much, and
    InvalidArgument on a model that cannot be read or is not served."""
    if options.block_tokens & (options.block_tokens - 1):
        raise ValueError(f"--block-tokens {options.block_tokens} is no power of two")
    named = {name: getattr(options, name) for name in ("layers", "heads", "kv_heads", "head_dim")}
    if options.model is not None:
        if any(value is not None for value in named.values()):
            raise ValueError("--model brings the sizes; leave out --layers, --heads, --kv-heads and --head-dim")
        source = open_source(options.model)
        config = source.config
        longest = longest_context(config)
        if options.context is not None and options.context > longest:
            raise ValueError(f"--context {options.context} is more than the {longest} tokens that this model serves")
        weights = sum(weight_bytes(source, options.dtype).values())
        return Shape(
            config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim,
            options.context or config.max_position, weights, "option" if options.context else "model",
            tuple(layer.window for layer in config.layers), layer_windows(config, in_spans=False),
        )  # fmt: skip
    missing = [f"--{name.replace('_', '-')}" for name, value in named.items() if value is None and name != "kv_heads"]
    if missing:
        given = len(missing) < len(named) - 1
        raise ValueError(f"give --model PATH, or {', '.join(missing)}{' too' if given else ''}")
    kv_heads = options.kv_heads or options.heads
    if options.heads % kv_heads:
        raise ValueError(f"--heads {options.heads} is no multiple of --kv-heads {kv_heads}")
    return Shape(
        options.layers, options.heads, kv_heads, options.head_dim, options.context or _ASSUMED_CONTEXT, 0,
        "option" if options.context else "assumed", (None,) * options.layers,
    )  # fmt: skip


def compute(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the plan says, as one JSON-ready object; sizes are bytes."""
    kv_dtype = options.kv_dtype or default_kv_dtype(options.dtype)
    layout = shape.layout(options.block_tokens, kv_dtype)
    cost = sequence_cost(layout, shape.context)
    window_bytes = layout.window_group.block_bytes if layout.grouped else 0
    itemsize = layout.element_bytes
    batch = options.batch
    weights = shape.weight_bytes
    pool = None if options.memory is None else max(0, options.memory - weights)
    result: dict[str, Any] = {
        "layers": shape.num_layers,
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "kv_dtype": kv_dtype,
        "block_tokens": options.block_tokens,
        "block_bytes": layout.block_bytes,
        "context": shape.context,
        "context_from": shape.context_from,
        "batch": batch,
        "token_bytes": cost.token_bytes,
        "sequence_blocks": cost.blocks,
        "sequence_bytes": cost.sequence_bytes,
        "batch_bytes": batch * cost.sequence_bytes,
        "rounding_bytes_per_sequence": cost.rounding_bytes,
        "textbook_bytes": textbook_bytes(
            batch, shape.num_layers, shape.context, shape.num_kv_heads, shape.head_dim, itemsize
        ),
        "textbook_bytes_of_width": textbook_bytes_of_width(
            batch, shape.num_layers, shape.context, shape.num_heads * shape.head_dim, itemsize
        ),
        "weight_bytes": weights,
        "memory_bytes": options.memory,
        "pool_bytes": pool,
        "null_block_bytes": layout.block_bytes + window_bytes,
        "sequences_that_fit": None if pool is None else sequences_that_fit(layout, shape.context, pool),
        "longest_context_that_fits": None if pool is None else tokens_that_fit(layout, pool),
        "memory_bytes_for_one_sequence": weights + bytes_for_one(layout, shape.context),
        "windows": _windows(layout, shape),
        "layer_groups": layout.grouped,
        "window_block_bytes": window_bytes,
        "sequence_window_blocks": cost.window_blocks,
        "blocks_for_a_window_block": layout.window_share if layout.grouped else 0,
        "sequence_bytes_in_one_group": layout.blocks_for(shape.context) * layout.token_bytes * layout.block_tokens,
        "window_blocks": _window_blocks(layout, shape),
        "kinds": [],
        "dtypes": [],
    }
    for name, heads in shape.kinds().items():
        result["kinds"].append(_row(with_kv_heads(layout, heads), shape, pool) | {"kind": name, "kv_heads": heads})
    for kind in KV_DTYPES:
        row = _row(shape.layout(options.block_tokens, kind), shape, pool)
        result["dtypes"].append(row | {"kv_dtype": kind})
    return result


def _window_blocks(layout: KvLayout, shape: Shape) -> int | None:
    """Blocks that a running sequence holds: those in which a key of the widest window may lie. None where a layer sees
    all keys."""
    widest = [window for window in shape.windows if window is not None]
    if len(widest) < shape.num_layers:
        return None
    size = layout.block_tokens
    return min(layout.blocks_for(shape.context), (max(widest) + size - 2) // size + 1)


def _windows(layout: KvLayout, shape: Shape) -> list[dict[str, Any]]:
    """Layers with equal windows: what their part of a sequence takes."""
    rows = []
    cost = sequence_cost(layout, shape.context)
    for window in sorted(set(shape.windows), key=lambda width: (width is None, width)):
        layers = [layer for layer, width in enumerate(shape.windows) if width == window]
        blocks = cost.blocks if window is None or not layout.grouped else cost.window_blocks
        per_layer = layout.token_bytes * layout.block_tokens // layout.num_layers
        rows.append({
            "window": window,
            "layers": layers,
            "blocks": blocks,
            "sequence_bytes": len(layers) * blocks * per_layer,
        })  # fmt: skip
    return rows


def _row(layout: KvLayout, shape: Shape, pool: int | None) -> dict[str, Any]:
    cost = sequence_cost(layout, shape.context)
    fit = None if pool is None else sequences_that_fit(layout, shape.context, pool)
    return {"token_bytes": cost.token_bytes, "sequence_bytes": cost.sequence_bytes, "sequences_that_fit": fit}


def main(arguments: Sequence[str], table: Table, find_model: Callable[[Path], Path] = Path) -> int:
    """Print the plan; the exit status: 0, or 2 on options or a model that make none. `find_model`: by name or path."""
    options = _parser().parse_args(list(arguments))
    if options.model is not None:
        options.model = find_model(options.model)
    try:
        plan = compute(shape_of(options), options)
    except (ValueError, TesseraError) as error:
        said = str(error)
        if isinstance(error, InvalidArgument) and error.field in _FLAGS:
            said = f"{_FLAGS[error.field]}: {error.description}"
        sys.stderr.write(f"tessera plan: {said} (see `tessera plan --help`)\n")
        return 2
    sys.stdout.write(f"{json.dumps(plan) if options.json else show(plan, table)}\n")
    return 0
