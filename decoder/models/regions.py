"""Where each layer's keys and values lie, for the compiled step of a model whose layers lie in two groups.

Owns the rows behind the frame's REGIONS. Invariant: with a row's words in the frame, what kernels compute from `layer`
is the place of that layer in the memory of its group, whose blocks the row's table names. Called by `workspace.py` once
a step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.layout import KvLayout
from decoder.grouped_arena import GroupedArena
from decoder.kernels import frame as f


class Regions:
    """The rows of one model with a grouped layout."""

    def __init__(self, layout: KvLayout, frame: NDArray[np.int64]) -> None:
        places = [layout.place_of(layer) for layer in range(layout.num_layers)]
        self._windowed = np.array([windowed for windowed, _ in places])
        layer_bytes = int(frame[f.LAYER_BYTES])
        # Kernels add layer * LAYER_BYTES, and for scales that many elements of two bytes.
        shift = (np.array([place for _, place in places]) - np.arange(layout.num_layers)) * layer_bytes
        self._shift = shift
        groups = layout.full_group, layout.window_group
        self._rows = np.zeros((layout.num_layers, f.REGION_WORDS), np.int64)
        self._rows[:, f.REGION_BLOCK_BYTES] = self._chosen(*(group.block_bytes for group in groups))
        scales = self._chosen(*(group.scales_offset for group in groups))
        self._rows[:, f.REGION_SCALES] = scales - shift + shift // layout.head_dim * 2
        self._tables: tuple[NDArray[np.int32], NDArray[np.int32]]
        frame[f.REGIONS] = self._rows.ctypes.data

    def _chosen(self, full: int, windowed: int) -> NDArray[np.int64]:
        return np.where(self._windowed, windowed, full)

    def point(self, arena: GroupedArena, tables: NDArray[np.int32]) -> None:
        """Point the rows at an arena and at the tables of a checked batch."""
        # Held, since the rows have their addresses.
        self._tables = np.ascontiguousarray(tables, np.int32), np.ascontiguousarray(arena.of[tables])
        self._rows[:, f.REGION_TABLES] = self._chosen(*(table.ctypes.data for table in self._tables))
        bases = self._chosen(arena.blocks.ctypes.data, arena.window_blocks.ctypes.data)
        self._rows[:, f.REGION_ARENA] = bases + self._shift
