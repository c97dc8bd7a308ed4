"""Which rows of a step have which adapter: rows sorted by adapter and cut into tiles. Host arithmetic, no device.

Owns the form of an adapter's table, too: int64 [layers, products, ENTRY_WORDS] in the device's memory. An entry of
zeros is a product that is not adapted. `decoder/models/device_adapters.py` makes tables, `triton.py` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.kernels.uploads import upload

PRODUCTS: Final = 4
QKV, OUTPUT, GATE_UP, DOWN = range(PRODUCTS)
RANK_STEP: Final = 16  # the smallest matrix product of the hardware
SMALL_TILE: Final = 16
LARGE_TILE: Final = 64

# A product's outputs are up to three parts (q, k, v; gate, up). A is [lowered, inputs], and part p of a row's A x is
# `ranks` numbers from p * stride on; B is [outputs, ranks], each row for its part's numbers. The stride is 0 where one
# A serves all parts. Bit p of the mask: part p is adapted.
ENTRY_WORDS: Final = 8
ENTRY_A, ENTRY_B, ENTRY_RANKS, ENTRY_STRIDE, ENTRY_MASK, ENTRY_LOWERED = range(6)

IntArray = NDArray[np.int32]


class Packed(Protocol):
    """An adapter in a device's memory. `address` is its table's; `lowered` the most rows of A of any product, a
    multiple of RANK_STEP; bit p of `products` says that product p is adapted in some layer."""

    @property
    def address(self) -> int: ...
    @property
    def lowered(self) -> int: ...
    @property
    def products(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Rows of a step by adapter, on the host.

    tables int64 [tiles]: address of a tile's adapter's table; tiles int32 [tiles, 2]: first place in `rows` and count,
    up to `tile_rows`; rows int32 [R]: rows that have an adapter. lowered, products: the most, and the union, of all
    adapters.
    """

    tables: NDArray[np.int64]
    tiles: IntArray
    rows: IntArray
    tile_rows: int
    lowered: int
    products: int


def group_rows(adapters: Sequence[Packed | None], query_starts: IntArray) -> RowGroups | None:
    """Groups of the rows `query_starts[s]:query_starts[s + 1]` of each sequence s; None where none has an adapter.

    Adapters are taken in the order in which they occur, rows in their own. Tiles are small unless groups are large.
    """
    index: dict[int, int] = {}
    distinct: list[Packed] = []
    owners = np.full(len(adapters), -1, np.int64)
    for sequence, adapter in enumerate(adapters):
        if adapter is not None:
            owners[sequence] = index.setdefault(id(adapter), len(distinct))
            if owners[sequence] == len(distinct):
                distinct.append(adapter)
    if not distinct:
        return None
    of_rows = np.repeat(owners, np.diff(query_starts))
    order = np.argsort(of_rows, kind="stable")
    rows = order[np.searchsorted(of_rows[order], 0) :]
    counts = np.bincount(of_rows[rows], minlength=len(distinct))
    tile_rows = LARGE_TILE if rows.size >= LARGE_TILE * len(distinct) else SMALL_TILE
    tiles_of = -(-counts // tile_rows)
    of_tile = np.repeat(np.arange(len(distinct)), tiles_of)
    inside = (np.arange(of_tile.size) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)) * tile_rows
    first = np.repeat(np.cumsum(counts) - counts, tiles_of) + inside
    size = np.minimum(tile_rows, counts[of_tile] - inside)
    return RowGroups(
        tables=np.array([adapter.address for adapter in distinct], np.int64)[of_tile],
        tiles=np.stack([first, size], axis=1).astype(np.int32),
        rows=rows.astype(np.int32),
        tile_rows=tile_rows,
        lowered=max(adapter.lowered for adapter in distinct),
        products=int(np.bitwise_or.reduce([adapter.products for adapter in distinct])),
    )


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """`RowGroups` on a device. A tile that is not used has count 0; `rows` may be longer than what tiles name."""

    tables: torch.Tensor
    tiles: torch.Tensor
    rows: torch.Tensor
    tile_rows: int
    lowered: int
    products: int

    @classmethod
    def of(cls, groups: RowGroups, device: torch.device) -> AdapterRows:
        """A copy of `groups` in new memory."""
        arrays = (groups.tables, groups.tiles, groups.rows)
        tables, tiles, rows = (upload(array, device) for array in arrays)
        return cls(tables, tiles, rows, groups.tile_rows, groups.lowered, groups.products)
