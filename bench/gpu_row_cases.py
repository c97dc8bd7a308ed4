"""The cases of `gpu_cases.py` besides attention: plans, rows, whole blocks, low-rank products and experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from bench.gpu_case import NAMES, Case, capability
from decoder.kernels.activation.triton import gate_kernel
from decoder.kernels.block_copy.triton import copy_kernel
from decoder.kernels.block_pack.triton import pack_kernel
from decoder.kernels.block_scrub.triton import scrub_kernel
from decoder.kernels.gpu import power_of_two
from decoder.kernels.lora import plan as lora_plan
from decoder.kernels.lora import triton as lora
from decoder.kernels.mixture import routing
from decoder.kernels.mixture import triton as mixture
from decoder.kernels.norm.triton import norm_kernel, num_warps
from decoder.kernels.paged_decode.combine import combine_kernel
from decoder.kernels.paged_decode.plan import plan_kernel
from decoder.kernels.sample.triton import PICK_WARPS, RUN, pick_kernel, reduce_kernel
from decoder.kernels.shared_prefix_decode.triton import merge_kernel

_EXPERTS: Final = 128


def product_cases(target: str, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """Both products of 128 experts, for decodes and for chunks."""
    wide = "tf32x3" if target.isdigit() else "ieee"
    name = NAMES[dtype]
    for choices, kind in ((_EXPERTS, "decode"), (_EXPERTS * 256, "chunk")):
        config = mixture.choose_config(capability(target), choices, _EXPERTS, dtype.itemsize)
        for gated in (True, False):
            constants = {
                "USED": 8, "ROWS": config.rows, "COLUMNS": config.columns, "DEPTH": config.depth, "GATED": gated,
                "GELU": False, "PRECISION": wide if dtype == torch.float32 else "tf32",
            }  # fmt: skip
            label = f"{'gated' if gated else 'down'}-{kind}-{name}"
            yield Case(
                target, "expert_product", label, mixture.product_kernel, constants, name, name, config.warps,
                config.stages,
            )  # fmt: skip


def routing_cases(target: str) -> Iterator[Case]:
    """The choice of 8 of 128 experts, their slots, and the sum of what they put out."""
    experts = {"EXPERTS": _EXPERTS, "WIDTH": power_of_two(_EXPERTS)}
    route = {**experts, "USED": 8, "NORMALIZE": True}
    yield Case(target, "expert_route", "e128", routing.route_kernel, route, "fp32", "fp32", 1, 1)
    yield Case(target, "expert_count", "chunk", routing.count_kernel, {"CHUNK": 1024}, "fp32", "fp32", 4, 1)
    place = {**experts, "ROWS": 16, "CHUNK": 1024}
    yield Case(target, "expert_place", "e128", routing.place_kernel, place, "fp32", "fp32", 4, 1)
    total = {"USED": 8, "WIDTH": 1024, "BRANCH": True}
    yield Case(target, "expert_sum", "shared", mixture.sum_kernel, total, "bf16", "bf16", 4, 1)


def lora_cases(target: str, dtype: torch.dtype = torch.bfloat16, rows: int = lora_plan.SMALL_TILE) -> Iterator[Case]:
    """Both low-rank products of a tile of rows, inputs cut in four."""
    wide = "ieee" if not target.isdigit() else "tf32x3" if dtype == torch.float32 else "tf32"
    name, label = NAMES[dtype], f"rows{rows}-{NAMES[dtype]}"
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
    pick = {"RUN": RUN, "RUNS": 64}
    yield Case(target, "sample_pick", "vocab128k", pick_kernel, pick, "fp32", "fp32", PICK_WARPS, 1)
    yield from lora_cases(target)
    yield from product_cases(target)
    yield from routing_cases(target)
    merge = {"HEADS": 32, "QUERY_LEN": 1, "HEAD_DIM": 128, "COLUMNS": 128, "LOG_SUMS": False}
    yield Case(target, "shared_merge", "d128", merge_kernel, merge, "bf16", "bf16", 1, 1)


def norm_case(target: str, width: int) -> Case:
    """The norm with both of its additions."""
    constants = {"WIDTH": width, "COLUMNS": power_of_two(width), "ADD": True, "POST": True}
    return Case(target, "norm", f"w{width}", norm_kernel, constants, "bf16", "bf16", num_warps(width), 1)
