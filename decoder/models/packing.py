"""Weights in the order the kernels read them, in one arena of huge pages.

A matrix [out, in] is cut into column blocks of sixteen outputs. In float32 a block is [in, 16]; in bfloat16 it is
[in / 32, 16 pairs of k, 16, 2], which one AMX tile load or one pair-wise dot product takes as it is. Blocks come in
pairs; outputs are padded with zero weights to a multiple of 32, inputs to a multiple of 32.
"""

from __future__ import annotations

import mmap
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from common.memory import check_available

FloatArray = NDArray[np.float32]

HUGE_PAGE: Final = 1 << 21


PACKING_VERSION: Final = 1
"""Of everything that decides which bytes packed weights are. One more makes files of packed weights void."""


class Memory:
    """One zeroed, page-aligned mapping cut into 64-byte-aligned arrays. Arrays live as long as this object.

    filled: what is taken holds its weights already and cannot be written (`decoder/weights/packed_file.py`)

    Raises ResourceExhausted (NO_MEMORY) where the machine has not so much left: the mapping itself would be made, and
    the process killed while it fills it.
    """

    filled = False

    def __init__(self, num_bytes: int) -> None:
        if not self.filled:
            check_available(num_bytes, "model", "its weights")
        # Private: shared anonymous memory is a file of tmpfs to the kernel, and mostly gets no huge pages.
        self._map = mmap.mmap(-1, num_bytes + 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        # Products prefetch past the end of a weight; the slack keeps that inside the mapping.
        self._offset = self._start = -self._bytes.ctypes.data % HUGE_PAGE

    @property
    def used_bytes(self) -> int:
        """Bytes taken so far."""
        return self._offset - self._start

    def finish(self) -> None:
        """All arrays are taken and filled; they are not written from now on."""

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A zeroed array. Raises ValueError when the mapping was sized too small."""
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if self._offset + num_bytes > self._bytes.size:
            raise ValueError(f"{num_bytes} bytes do not fit the weight memory")
        array: NDArray[Any] = self._bytes[self._offset : self._offset + num_bytes].view(dtype).reshape(shape)
        self._offset += -(-num_bytes // 64) * 64
        return array


class CountingMemory:
    """Takes the place of a `Memory` to find how large that must be. What is taken is never touched."""

    filled = True

    def __init__(self) -> None:
        self.used_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An array whose content means nothing."""
        array: NDArray[Any] = np.empty(shape, dtype)
        self.used_bytes += -(-array.nbytes // 64) * 64
        return array


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step


def to_bfloat16(values: FloatArray) -> NDArray[np.uint16]:
    """Bits of bfloat16, rounded to nearest even."""
    rounded = torch.from_numpy(np.require(values, requirements=["C", "W"])).to(torch.bfloat16)
    bits: NDArray[np.uint16] = rounded.view(torch.uint16).numpy()
    return bits


def packed_elements(outputs: int, inputs: int) -> int:
    """Elements of a packed matrix."""
    return round_up(outputs, 32) * round_up(inputs, 32)


def take_packed(memory: Memory | CountingMemory, outputs: int, inputs: int, bfloat16: bool) -> NDArray[Any]:
    """Room for a packed matrix [out, in]."""
    rows, columns = round_up(outputs, 32), round_up(inputs, 32)
    if bfloat16:
        return memory.take((rows // 16, columns // 32, 16, 16, 2), np.uint16)
    return memory.take((rows // 16, columns, 16), np.float32)


def pack(memory: Memory | CountingMemory, matrix: FloatArray, bfloat16: bool) -> NDArray[Any]:
    """Pack one matrix [out, in] into `memory`."""
    outputs, inputs = matrix.shape
    rows, columns = round_up(outputs, 32), round_up(inputs, 32)
    if (rows, columns) != matrix.shape:
        padded = np.zeros((rows, columns), np.float32)
        padded[:outputs, :inputs] = matrix
        matrix = padded
    packed = take_packed(memory, outputs, inputs, bfloat16)
    # torch copies between strides with all cores; numpy does not.
    if bfloat16:
        # One word is a pair of k.
        words = torch.from_numpy(to_bfloat16(matrix).view(np.int32))
        target = torch.from_numpy(packed.view(np.int32).reshape(rows // 16, columns // 32, 16, 16))
        target.copy_(words.view(rows // 16, 16, columns // 32, 16).permute(0, 2, 3, 1))
    else:
        floats = torch.from_numpy(np.require(matrix, requirements=["C", "W"]))
        torch.from_numpy(packed).copy_(floats.view(rows // 16, 16, columns).permute(0, 2, 1))
    return packed


def interleave_blocks(gate: FloatArray, up: FloatArray) -> FloatArray:
    """Alternate column blocks of two matrices of equal shape, so that one pair holds a block of each."""
    rows, columns = gate.shape
    both = np.stack([gate.reshape(rows // 16, 16, columns), up.reshape(rows // 16, 16, columns)], axis=1)
    return both.reshape(2 * rows, columns)
