"""The CPU form of `write` in `triton.py`: the same call, by the fused step's own row kernel."""

from __future__ import annotations

import numpy as np
import torch

from common.errors import Internal
from decoder.kernels import frame as f
from decoder.kernels.one_layer import OneLayer
from decoder.kernels.paged_arguments import check_paged


def write(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    rotated: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    epsilon: float = 1e-6,
) -> None:
    """Norm and rotate queries into `rotated`, store keys and values; rows whose block is 0 are not stored.

    queries and rotated [tokens, heads, head_dim], `rotated` of the arena's type unless that is quantised; keys and
    values [tokens, kv_heads, head_dim]; arena as in `common/layout.py`, with `scales` when quantised; tables int32
    [batch, width]; sequences and positions int32 [tokens]; cosines and sines float32 [max_position, rotary_dim / 2];
    norms: weights float32 [head_dim] of queries and keys; those of queries also say which errors of e4m3 keys count.
    Raises Internal on shapes or numbers that do not fit; nothing is written then.
    """
    check_paged(rotated, arena, scales, tables, layer)
    tokens, heads, head_dim = queries.shape
    kv_heads, block_tokens, half = arena.shape[3], arena.shape[4], cosines.shape[1]
    kv_shape = (tokens, kv_heads, head_dim)
    if keys.shape != kv_shape or values.shape != kv_shape or rotated.shape != queries.shape:
        raise Internal(f"keys {tuple(keys.shape)} or values {tuple(values.shape)} do not fit {kv_shape}")
    if 2 * half > head_dim or cosines.shape != sines.shape or cosines.dtype != torch.float32:
        raise Internal(f"tables of {2 * half} rotated elements do not fit heads of {head_dim}")
    if not tokens:
        return
    owners, places = sequences.numpy().astype(np.int64), positions.numpy().astype(np.int64)
    room = min(tables.shape[1] * block_tokens, cosines.shape[0])
    if owners.min() < 0 or owners.max() >= tables.shape[0] or places.min() < 0 or places.max() >= room:
        raise Internal("a row names a sequence or a position outside the tables")
    ids = tables.numpy()[owners, places // block_tokens]
    if ids.min() < 0 or ids.max() >= arena.shape[0]:
        raise Internal("a block table names a block outside the arena")
    packed = torch.cat([queries, keys, values], dim=1).float()
    # Rows of empty places are stored too, in a block that nobody has.
    nowhere = torch.empty(arena.stride(0) * arena.itemsize + 64, dtype=torch.uint8)
    for real in (True, False):
        rows = np.flatnonzero((ids != 0) == real)
        if not rows.size:
            continue
        call = OneLayer(arena, scales, layer, tables, heads)
        if not real:
            call.point(f.ARENA, nowhere)
        row = call.layer_row
        row[f.LAYER_COSINES], row[f.LAYER_SINES] = (call.keep(x.contiguous()).data_ptr() for x in (cosines, sines))
        if norms is not None:
            query_norm, key_norm = (call.keep(x.float().contiguous()).data_ptr() for x in norms)
            row[f.LAYER_QUERY_NORM], row[f.LAYER_KEY_NORM] = query_norm, key_norm
        call.hold(f.EPSILON, np.array([epsilon], np.float32))
        call.frame[f.ROTARY_HALF] = half
        call.hold(f.OWNERS, owners[rows].astype(np.int32))
        call.hold(f.POSITIONS, places[rows].astype(np.int32))
        call.point(f.QKV, packed[rows].contiguous())
        planes = call.lay_out_queries(rows.size)
        call.write(rows.size)
        lanes = planes[:, : rows.size * call.group].reshape(kv_heads, rows.size, call.group, head_dim)
        rotated[rows] = lanes.transpose(0, 1).reshape(rows.size, heads, head_dim).to(rotated.dtype)
