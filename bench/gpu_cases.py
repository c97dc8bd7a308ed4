"""The shapes that the GPU kernels are compiled for ahead: targets, compile-time parameters, launch parameters.

`bench/gpu_resources.py` compiles them and prints what they take; `tests/kernels/compiled/test_compiled.py` holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from decoder.kernels.activation.triton import gate_kernel
from decoder.kernels.block_copy.triton import copy_kernel
from decoder.kernels.block_pack.triton import pack_kernel
from decoder.kernels.block_scrub.triton import scrub_kernel
from decoder.kernels.gpu import FLOAT8, FLOAT8_BITS, INT8, NOT_QUANTIZED, power_of_two
from decoder.kernels.kv_write.triton import write_kernel
from decoder.kernels.lora import plan as lora_plan
from decoder.kernels.lora import triton as lora
from decoder.kernels.norm.triton import norm_kernel, num_warps
from decoder.kernels.paged_decode import triton as decode
from decoder.kernels.paged_decode.combine import combine_kernel
from decoder.kernels.paged_decode.plan import plan_kernel
from decoder.kernels.paged_prefill import triton as prefill
from decoder.kernels.sample.triton import RUN, pick_kernel, reduce_kernel
from decoder.kernels.shared_prefix_decode.triton import merge_kernel, slot_members

TARGETS: Final = ("80", "90", "100", "gfx942")
_NAMES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_STORED: Final = {INT8: "i8", FLOAT8: "fp8e4nv", FLOAT8_BITS: "u8"}


@dataclass(frozen=True)
class Case:
    """One kernel with one set of compile-time parameters, for one target."""

    target: str
    operation: str
    label: str
    kernel: Any
    constants: dict[str, Any]
    element: str
    stored: str
    warps: int
    stages: int

    @property
    def name(self) -> str:
        """A name for a test or a row."""
        return f"{self.operation}-{self.label}-{self.target}"


def capability(target: str) -> int:
    """The number that `choose_config` takes."""
    return int(target) if target.isdigit() else 0


def prefill_case(
    target: str,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    *,
    kind: int = NOT_QUANTIZED,
    block_tokens: int = 64,
    windowed: bool = False,
    soft_cap: bool = False,
    packed: bool = False,
) -> Case:
    """Prefill of 32 heads by 8."""
    config = prefill.choose_config(capability(target), head_dim, dtype.itemsize)
    constants = {
        "HEADS": 32, "GROUP": 4, "PACKED": 4 if packed else 1, "ROWS": config.rows, "TILE": config.tile,
        "BLOCK_TOKENS": block_tokens, "HEAD_DIM": head_dim, "COLUMNS": power_of_two(head_dim), "KIND": kind,
        "SOFT_CAP": soft_cap, "WINDOWED": windowed, "LOG_SUMS": False,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
    }  # fmt: skip
    label = _label(head_dim, dtype, kind, block_tokens, windowed, soft_cap) + ("-packed" if packed else "")
    return Case(
        target, "paged_prefill", label, prefill.prefill_kernel, constants, _NAMES[dtype],
        _STORED.get(kind, _NAMES[dtype]), config.warps, config.stages,
    )  # fmt: skip


def decode_case(
    target: str,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    *,
    kind: int = NOT_QUANTIZED,
    block_tokens: int = 64,
    rows: int = 16,
    windowed: bool = False,
    soft_cap: bool = False,
) -> Case:
    """Decode with `rows` rows of a group's heads and positions, by 8 key heads."""
    config = decode.choose_config(capability(target), head_dim, dtype.itemsize, rows)
    constants = {
        "KV_HEADS": 8, "GROUP": rows // 2, "QUERY_LEN": 1 if rows == 16 else 2, "ROWS": rows, "TILE": config.tile,
        "BLOCK_TOKENS": block_tokens, "HEAD_DIM": head_dim, "COLUMNS": power_of_two(head_dim), "KIND": kind,
        "SOFT_CAP": soft_cap, "CAUSAL": True, "WINDOWED": windowed, "LOG_SUMS": False,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
    }  # fmt: skip
    label = _label(head_dim, dtype, kind, block_tokens, windowed, soft_cap) + (f"-rows{rows}" if rows > 16 else "")
    return Case(
        target, "paged_decode", label, decode.decode_kernel, constants, _NAMES[dtype],
        _STORED.get(kind, _NAMES[dtype]), config.warps, config.stages,
    )  # fmt: skip


def shared_case(
    target: str, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, *, kind: int = NOT_QUANTIZED
) -> Case:
    """The decode of a slot of sequences over their shared run: 32 heads by 8, no mask, sums for the merge."""
    members = slot_members(4, head_dim, dtype.itemsize)
    case = decode_case(target, head_dim, dtype, kind=kind, rows=4 * members)
    constants = {**case.constants, "GROUP": 4, "QUERY_LEN": members, "CAUSAL": False, "LOG_SUMS": True}
    label = f"shared-{_label(head_dim, dtype, kind, 64, False, False)}"
    return replace(case, label=label, constants=constants)


def write_case(
    target: str, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, *, kind: int = NOT_QUANTIZED
) -> Case:
    """The fused write with norms."""
    constants = {
        "HEADS": 32, "KV_HEADS": 8, "AT_ONCE": 8, "BLOCK_TOKENS": 64, "HEAD_DIM": head_dim,
        "COLUMNS": power_of_two(head_dim), "ROTARY_DIM": head_dim, "KIND": kind, "NORM": True,
    }  # fmt: skip
    label = _label(head_dim, dtype, kind, 64, False, False)
    stored = _STORED.get(kind, _NAMES[dtype])
    return Case(target, "kv_write", label, write_kernel, constants, _NAMES[dtype], stored, 4, 1)


def lora_cases(target: str, dtype: torch.dtype = torch.bfloat16, rows: int = lora_plan.SMALL_TILE) -> Iterator[Case]:
    """Both low-rank products of a tile of rows, inputs cut in four."""
    wide = "ieee" if not target.isdigit() else "tf32x3" if dtype == torch.float32 else "tf32"
    name, label = _NAMES[dtype], f"rows{rows}-{_NAMES[dtype]}"
    constants = {"ROWS": rows, "RANKS": lora_plan.RANK_STEP, "PRECISION": wide}
    shrink = {**constants, "DEPTH": lora.depth_of(dtype.itemsize, rows)}
    yield Case(target, "lora_shrink", label, lora.shrink_kernel, shrink, name, name, 4, 3)
    expand = {**constants, "COLUMNS": lora.COLUMNS, "CUTS": 4}
    yield Case(target, "lora_expand", label, lora.expand_kernel, expand, name, name, 4, 2)


def small_cases(target: str) -> Iterator[Case]:
    """Plan, combine, and the operations on whole blocks."""
    plan = {"KV_HEADS": 8, "TILE": 64, "CHUNK": 256}
    yield Case(target, "decode_plan", "b256", plan_kernel, plan, "bf16", "bf16", 4, 1)
    combine = {"KV_HEADS": 8, "GROUP": 8, "QUERY_LEN": 1, "ROWS": 16, "HEAD_DIM": 128, "COLUMNS": 128, "LOG_SUMS": True}
    yield Case(target, "decode_combine", "d128", combine_kernel, combine, "bf16", "bf16", 1, 1)
    copy = {"PLANE": 8192, "TOKEN": 128, "WIDTH": 1024}
    yield Case(target, "block_copy", "d128", copy_kernel, copy, "bf16", "bf16", 4, 1)
    for name, unpack in (("block_pack", False), ("block_unpack", True)):
        yield Case(target, name, "words", pack_kernel, {"WIDTH": 4096, "UNPACK": unpack}, "bf16", "bf16", 8, 1)
    yield Case(target, "block_scrub", "words", scrub_kernel, {"WIDTH": 4096}, "bf16", "bf16", 8, 1)
    yield norm_case(target, 4096)
    yield Case(target, "activation", "gelu", gate_kernel, {"WIDTH": 1024, "GELU": True}, "bf16", "bf16", 4, 1)
    yield Case(target, "sample_reduce", "vocab", reduce_kernel, {"RUN": RUN}, "fp32", "fp32", 4, 1)
    yield Case(target, "sample_pick", "vocab128k", pick_kernel, {"RUN": RUN, "RUNS": 64}, "fp32", "fp32", 4, 1)
    yield from lora_cases(target)
    merge = {"HEADS": 32, "QUERY_LEN": 1, "HEAD_DIM": 128, "COLUMNS": 128, "LOG_SUMS": False}
    yield Case(target, "shared_merge", "d128", merge_kernel, merge, "bf16", "bf16", 1, 1)


def norm_case(target: str, width: int) -> Case:
    """The norm with both of its additions."""
    constants = {"WIDTH": width, "COLUMNS": power_of_two(width), "ADD": True, "POST": True}
    return Case(target, "norm", f"w{width}", norm_kernel, constants, "bf16", "bf16", num_warps(width), 1)


def main_cases(target: str) -> Iterator[Case]:
    """The shapes that serving is about: 128 elements a head, bfloat16."""
    yield prefill_case(target)
    yield decode_case(target)
    yield shared_case(target)
    yield write_case(target)


def quantised_cases(target: str) -> Iterator[Case]:
    """The same on quantised blocks: the kernels that know of them, one storage for each NVIDIA target."""
    kind = {"80": FLOAT8_BITS, "90": FLOAT8, "100": INT8}[target]
    for make in (prefill_case, decode_case, shared_case, write_case):
        yield make(target, kind=kind)


def all_cases(target: str) -> Iterator[Case]:
    """Every head size, element type, stored type and block size, each varied alone from the main shape."""
    float8 = FLOAT8 if target in ("90", "100") else FLOAT8_BITS
    for make in (prefill_case, decode_case):
        for head_dim in (64, 80, 96, 128, 256):
            for dtype in _NAMES:
                yield make(target, head_dim, dtype)
            for kind in (INT8, float8):
                yield make(target, head_dim, kind=kind)
        for block_tokens in (16, 32, 128):
            yield make(target, block_tokens=block_tokens)
        for head_dim in (128, 256):
            yield make(target, head_dim, windowed=True)
            yield make(target, head_dim, windowed=True, soft_cap=True)
    yield prefill_case(target, packed=True)
    for rows in (32, 64, 128):
        for head_dim in (64, 128, 256) if rows == 32 else (64, 128):
            yield decode_case(target, head_dim, rows=rows)
            yield decode_case(target, head_dim, rows=rows, kind=INT8)
    for head_dim in (64, 80, 96, 128, 256):
        for dtype in _NAMES:
            yield shared_case(target, head_dim, dtype)
        for kind in (INT8, float8):
            yield shared_case(target, head_dim, kind=kind)
    for head_dim in (64, 80, 256):
        yield write_case(target, head_dim)
    for kind in (INT8, float8):
        yield write_case(target, kind=kind)
    yield write_case(target, dtype=torch.float32)
    yield write_case(target, dtype=torch.float16)
    yield write_case(target)
    for rows in (lora_plan.SMALL_TILE, lora_plan.LARGE_TILE):
        for dtype in _NAMES:
            yield from lora_cases(target, dtype, rows)
    yield from small_cases(target)


def wide_cases(target: str) -> Iterator[Case]:
    """Of `all_cases` those that differ in code, not in size alone: what a test can compile in minutes."""
    float8 = FLOAT8 if target in ("90", "100") else FLOAT8_BITS
    for make in (prefill_case, decode_case):
        for head_dim in (64, 80, 256):
            yield make(target, head_dim)
        for head_dim in (128, 256):
            yield make(target, head_dim, torch.float32)
            yield make(target, head_dim, kind=INT8)
            yield make(target, head_dim, windowed=True, soft_cap=True)
        yield make(target, dtype=torch.float16)
        yield make(target, kind=float8)
        yield make(target, block_tokens=16)
    yield prefill_case(target, packed=True)
    for rows in (32, 64, 128):
        yield decode_case(target, rows=rows)
    for head_dim in (64, 128, 256):
        yield shared_case(target, head_dim)
        yield shared_case(target, head_dim, torch.float32)
        yield shared_case(target, head_dim, kind=INT8)
    yield shared_case(target, kind=float8)
    yield decode_case(target, 256, rows=32, kind=INT8)
    for head_dim in (80, 256):
        yield write_case(target, head_dim)
    for kind in (INT8, float8):
        yield write_case(target, kind=kind)
    yield write_case(target, dtype=torch.float32)
    yield norm_case(target, 16384)
    yield from lora_cases(target, rows=lora_plan.LARGE_TILE)
    for rows in (lora_plan.SMALL_TILE, lora_plan.LARGE_TILE):
        yield from lora_cases(target, torch.float32, rows)
    yield from small_cases(target)


def _label(head_dim: int, dtype: torch.dtype, kind: int, block_tokens: int, windowed: bool, soft_cap: bool) -> str:
    words = [f"d{head_dim}", _NAMES[dtype]]
    words += [_STORED[kind]] if kind in _STORED else []
    words += [f"block{block_tokens}"] if block_tokens != 64 else []
    words += ["window"] if windowed else []
    words += ["cap"] if soft_cap else []
    return "-".join(words)
