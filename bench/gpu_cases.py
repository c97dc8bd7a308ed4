"""The shapes that the GPU kernels are compiled for ahead: targets, compile-time parameters, launch parameters.

`bench/gpu_resources.py` compiles them and prints what they take; `tests/kernels/compiled/test_compiled.py` holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch

from bench.gpu_case import NAMES, Case, capability
from bench.gpu_row_cases import lora_cases, norm_case, product_cases, small_cases
from decoder.kernels.gpu import FLOAT8, FLOAT8_BITS, INT8, NOT_QUANTIZED, power_of_two
from decoder.kernels.kv_write.triton import warps_for, write_kernel
from decoder.kernels.lora import plan as lora_plan
from decoder.kernels.paged_decode import triton as decode
from decoder.kernels.paged_prefill import triton as prefill
from decoder.kernels.shared_prefix_decode.triton import slot_members

_STORED: Final = {INT8: "i8", FLOAT8: "fp8e4nv", FLOAT8_BITS: "u8"}


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
    config = prefill.choose_config(capability(target), head_dim, dtype.itemsize, quantized=kind != NOT_QUANTIZED)
    constants = {
        "HEADS": 32, "GROUP": 4, "PACKED": 4 if packed else 1, "ROWS": config.rows, "TILE": config.tile,
        "BLOCK_TOKENS": block_tokens, "HEAD_DIM": head_dim, "COLUMNS": power_of_two(head_dim), "KIND": kind,
        "SOFT_CAP": soft_cap, "WINDOWED": windowed, "LOG_SUMS": False,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
    }  # fmt: skip
    label = _label(head_dim, dtype, kind, block_tokens, windowed, soft_cap) + ("-packed" if packed else "")
    return Case(
        target, "paged_prefill", label, prefill.prefill_kernel, constants, NAMES[dtype],
        _STORED.get(kind, NAMES[dtype]), config.warps, config.stages,
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
        target, "paged_decode", label, decode.decode_kernel, constants, NAMES[dtype],
        _STORED.get(kind, NAMES[dtype]), config.warps, config.stages, config.registers,
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
    stored = _STORED.get(kind, NAMES[dtype])
    return Case(target, "kv_write", label, write_kernel, constants, NAMES[dtype], stored, warps_for(kind), 1)


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
            for dtype in NAMES:
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
        for dtype in NAMES:
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
        for dtype in NAMES:
            yield from lora_cases(target, dtype, rows)
    for dtype in (torch.float32, torch.float16):
        yield from product_cases(target, dtype)
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
    yield from product_cases(target, torch.float32)
    yield from lora_cases(target, rows=lora_plan.LARGE_TILE)
    for rows in (lora_plan.SMALL_TILE, lora_plan.LARGE_TILE):
        yield from lora_cases(target, torch.float32, rows)
    yield from small_cases(target)


def _label(head_dim: int, dtype: torch.dtype, kind: int, block_tokens: int, windowed: bool, soft_cap: bool) -> str:
    words = [f"d{head_dim}", NAMES[dtype]]
    words += [_STORED[kind]] if kind in _STORED else []
    words += [f"block{block_tokens}"] if block_tokens != 64 else []
    words += ["window"] if windowed else []
    words += ["cap"] if soft_cap else []
    return "-".join(words)
