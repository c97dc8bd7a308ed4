"""What `bench/operations.py` times: one layer's tensors in the shapes of three models, and the calls on them.

A work says how many bytes it must move (keys and values read once; rows read and written) or how many operations it
does. Keys and values lie in blocks as an arena has them, and tables name the blocks in random order. Nothing is zero.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from common.layout import KV_DTYPES, KvLayout
from decoder.batch import StepBatch
from decoder.kernels import frame as f
from decoder.kernels import quantized, sets
from decoder.kernels.one_layer import OneLayer
from decoder.kernels.row_forms import KERNELS, gate_rows, normalize_rows
from decoder.kernels.select import operation

# Query heads, key heads, head size, hidden size, inner size of one layer.
MODELS = {
    "SmolLM2": (9, 3, 64, 576, 1536),
    "Gemma-3": (4, 1, 256, 640, 2048),
    "8B-like": (32, 8, 128, 4096, 14336),
}
BLOCK_TOKENS = 16
ROWS = 1024
MOVED_BLOCKS = 512
DOTS = "-dots"  # all products are dot products, beside int8 of bytes, else of pairs of bfloat16
ALL_STORAGES = (*KV_DTYPES, "bfloat16" + DOTS, "int8" + DOTS, "fp8_e4m3" + DOTS)
_TORCH = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class Work:
    """One thing to time; `amount` is bytes, or operations where it multiplies. torch's attention needs a gather."""

    operation: str
    model: str
    storage: str
    case: str
    amount: float
    multiplies: bool
    run: Callable[[], object]
    torch: Callable[[], object] | None = None
    gather: Callable[[], object] | None = None


def kv_dtype(storage: str) -> str:
    """The type of keys and values of a name of ALL_STORAGES."""
    return storage.removesuffix(DOTS)


def kernels_of(storage: str) -> sets.DotKernels | sets.Float32Kernels | None:
    """The kernel set that a name of ALL_STORAGES asks for; None is that of float32 inputs."""
    if kv_dtype(storage) in _TORCH and storage.endswith(DOTS):
        return sets.Float32Kernels(sets.Int8DotStorage() if storage == "int8" + DOTS else sets.Float8DotStorage())
    return sets.DotKernels() if storage.endswith(DOTS) else None


@functools.cache
def fastest_type(stored: torch.dtype, chunk: int) -> torch.dtype:
    """What torch's attention is fastest with on this CPU: the stored type or float32, often by a factor of ten."""
    times = {}
    for kind in (stored, torch.float32) if stored.itemsize == 2 else (torch.float32,):
        queries, keys = torch.randn(1, 8, chunk, 64).to(kind), torch.randn(1, 8, 1024, 64).to(kind)
        runs = []
        for _ in range(4):
            began = time.perf_counter()
            scaled_dot_product_attention(queries, keys, keys)
            runs.append(time.perf_counter() - began)
        times[kind] = min(runs)
    return min(times, key=times.__getitem__)


def token_bytes(model: str, storage: str) -> int:
    """Bytes of one token's keys and values in one layer."""
    _, kv_heads, head_dim, _, _ = MODELS[model]
    return KvLayout.of(1, kv_heads, head_dim, BLOCK_TOKENS, kv_dtype(storage)).token_bytes


def make_arena(kv_heads: int, head_dim: int, blocks: int, storage: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Elements [blocks, 1, 2, kv_heads, BLOCK_TOKENS, head_dim] and scales of one layer, random."""
    generator, storage = torch.Generator().manual_seed(1), kv_dtype(storage)
    if storage in _TORCH:
        layout = KvLayout.of(1, kv_heads, head_dim, BLOCK_TOKENS, storage)
        shape = (blocks, layout.block_bytes)
        raw = torch.randint(1, 100, shape, dtype=torch.uint8, generator=generator)
        raw += 128 * torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator)  # the sign
        elements, scales = quantized.views(raw, 1, kv_heads, head_dim, BLOCK_TOKENS, _TORCH[storage])
        scales.fill_(0.01)
        return elements, scales
    block = (1, 2, kv_heads, BLOCK_TOKENS, head_dim)
    some = torch.randn((min(blocks, 64), *block), generator=generator).to(getattr(torch, storage))
    return some.repeat(-(-blocks // some.shape[0]), 1, 1, 1, 1, 1)[:blocks].contiguous(), None


def attention_work(name: str, model: str, storage: str, context: int, batch: int, chunk: int) -> Work:
    """Attention of the last `chunk` tokens of `batch` contexts, three quarters shared in a shared_prefix_decode."""
    heads, kv_heads, head_dim, _, _ = MODELS[model]
    width = -(-context // BLOCK_TOKENS)
    arena, scales = make_arena(kv_heads, head_dim, batch * width + 1, storage)
    tables = (np.random.default_rng(0).permutation(batch * width) + 1).astype(np.int32).reshape(batch, width)
    shared = context * 3 // 4 if name == "shared_prefix_decode" else 0
    tables[:, : shared // BLOCK_TOKENS] = tables[0, : shared // BLOCK_TOKENS]
    nothing, tokens = np.zeros(0, np.int32), batch * chunk
    positions = np.tile(np.arange(context - chunk, context, dtype=np.int32), batch)
    edges, lengths = np.arange(batch + 1, dtype=np.int32) * chunk, np.full(batch, context, np.int32)
    queries = torch.randn((batch, heads, chunk, head_dim), generator=torch.Generator().manual_seed(2))
    call = OneLayer(arena, scales, 0, torch.from_numpy(tables), heads, kernels_of(storage))
    rows = queries.transpose(1, 2).reshape(tokens, call.kv_heads, call.group, head_dim).transpose(0, 1)
    call.lay_out_queries(tokens)[:, : tokens * call.group] = rows.reshape(call.kv_heads, -1, head_dim)
    mixed = call.point(f.MIXED, torch.empty((tokens, heads, head_dim), dtype=call.inputs))
    decodes = batch if chunk == 1 else 0
    call.lay_out(StepBatch(nothing, positions, edges, lengths, tables, nothing, decodes), head_dim**-0.5, 0, 0.0)
    ids, kind = torch.from_numpy(tables).long(), fastest_type(arena.dtype, chunk)

    def ours() -> torch.Tensor:
        call.attend()
        return mixed.view(batch, chunk, heads, head_dim).transpose(1, 2)

    def gather() -> tuple[torch.Tensor, torch.Tensor]:
        # [batch, width, 2, kv_heads, BLOCK_TOKENS, head_dim] to [batch, kv_heads, context, head_dim] each.
        found = arena[:, 0][ids]
        if scales is not None:
            found = found.float() * scales[:, 0][ids].float()[..., None]
        keys, values = (found[:, :, part].transpose(1, 2).flatten(2, 3).to(kind) for part in (0, 1))
        return keys[:, :, :context].contiguous(), values[:, :, :context].contiguous()

    keys, values = gather()
    asked, whole = queries.to(kind), chunk == context
    seen = torch.arange(context)[None] <= torch.arange(context - chunk, context)[:, None]
    mask = seen if 1 < chunk < context else None

    def theirs() -> torch.Tensor:
        return scaled_dot_product_attention(asked, keys, values, mask, is_causal=whole, enable_gqa=True)

    case = f"{batch} x {context}" if chunk == 1 else f"{chunk} at {context}"
    pairs = chunk * (context - chunk) + chunk * (chunk + 1) / 2
    read = (batch * (context - shared) + shared) * token_bytes(model, storage)
    amount = 4.0 * heads * head_dim * pairs if chunk > 1 else float(read)
    return Work(name, model, storage, case, amount, chunk > 1, ours, theirs, gather)


def write_work(model: str, storage: str) -> Work:
    """Rotation and store of ROWS rows of queries, keys and values by the kernel that a step runs."""
    heads, kv_heads, head_dim, _, _ = MODELS[model]
    arena, scales = make_arena(kv_heads, head_dim, ROWS // BLOCK_TOKENS + 1, storage)
    order = np.random.default_rng(0).permutation(ROWS // BLOCK_TOKENS) + 1
    call = OneLayer(arena, scales, 0, torch.from_numpy(order.astype(np.int32)[None]), heads, kernels_of(storage))
    turns = call.keep(torch.rand(ROWS, head_dim // 2)).data_ptr()
    call.layer_row[f.LAYER_COSINES] = call.layer_row[f.LAYER_SINES] = turns
    call.hold(f.EPSILON, np.array([1e-6], np.float32))
    call.frame[f.ROTARY_HALF] = head_dim // 2
    call.hold(f.OWNERS, np.zeros(ROWS, np.int32))
    call.hold(f.POSITIONS, np.arange(ROWS, dtype=np.int32))
    packed = call.point(f.QKV, torch.randn(ROWS, (heads + 2 * kv_heads) * head_dim))
    call.lay_out_queries(ROWS)
    size = call.inputs.itemsize
    amount = float(packed.nbytes + ROWS * (heads * head_dim * size + token_bytes(model, storage)))
    return Work("kv_write", model, storage, f"{ROWS} rows", amount, False, lambda: call.write(ROWS))


def row_work(model: str) -> list[Work]:
    """Norm and activation as a step runs them, on ROWS rows of float32."""
    _, _, _, hidden, inner = MODELS[model]
    rows, weight, normed = torch.randn(ROWS, hidden), torch.randn(hidden), torch.empty(ROWS, hidden)
    gate, up, gated = torch.randn(ROWS, inner), torch.randn(ROWS, inner), torch.empty(ROWS, inner)

    def norm() -> None:
        source, target = rows.data_ptr(), normed.data_ptr()
        normalize_rows(KERNELS, source, weight.data_ptr(), ROWS, hidden, hidden, 1e-6, target)

    def activation() -> None:
        gate_rows(gate.data_ptr(), up.data_ptr(), gate.numel(), False, gated.data_ptr())

    case = f"{ROWS} rows"
    return [
        Work("norm", model, "float32", case, 8.0 * rows.numel(), False, norm),
        Work("activation", model, "float32", case, 12.0 * gate.numel(), False, activation),
    ]


def block_work(model: str) -> list[Work]:
    """Copy, pack, unpack and scrub of MOVED_BLOCKS blocks of one layer."""
    _, kv_heads, head_dim, _, _ = MODELS[model]
    arena, _ = make_arena(kv_heads, head_dim, 2 * MOVED_BLOCKS + 1, "float16")
    order = torch.randperm(2 * MOVED_BLOCKS, generator=torch.Generator().manual_seed(3)).int() + 1
    sources, targets = order[:MOVED_BLOCKS].contiguous(), order[MOVED_BLOCKS:].contiguous()
    whole = torch.full_like(sources, BLOCK_TOKENS)
    num_bytes = arena[0].numel() * arena.itemsize
    buffer = torch.ones((MOVED_BLOCKS, num_bytes), dtype=torch.uint8)
    names = ("block_copy", "block_pack", "block_scrub")
    copy, pack, scrub = (operation(name, torch.device("cpu")) for name in names)
    moved, case = 2.0 * MOVED_BLOCKS * num_bytes, f"{MOVED_BLOCKS} blocks of {num_bytes} bytes"
    return [
        Work("block_copy", model, "float16", case, moved, False, lambda: copy.copy(arena, sources, targets, whole)),
        Work("block_pack", model, "float16", case, moved, False, lambda: pack.pack(arena, sources, buffer)),
        Work("block_unpack", model, "float16", case, moved, False, lambda: pack.unpack(arena, targets, buffer)),
        Work("block_scrub", model, "float16", case, moved / 2, False, lambda: scrub.scrub(arena, targets)),
    ]
