"""Matrices as whole numbers in groups of 32 inputs: what they are, how they are made of float32, how they are packed.

A weight is `scale * (number - zero)` with 8 bits and `scale * number + offset` with 4; scales and offsets are float16.
Packed as `decoder/kernels/grouped_weights.py` reads them. Called by `matrices.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.kernels.grouped_inputs import GROUP
from decoder.kernels.grouped_weights import INT8, LINE_STEP, UINT4, GroupedForm
from decoder.models.packing import CountingMemory, FloatArray, Memory, round_up

_MOST: Final = 127  # largest magnitude of a number with its sign
_QUANTIZE_VALUES: Final = 1 << 20  # values at a time: they stay in the last-level cache


class Grouped(NamedTuple):
    """A matrix [out, in], `in` a multiple of 32.

    numbers: uint8 [out, in]
    scales:  float16 [out, in / 32]
    offsets: the same, or None where the form has none
    """

    form: GroupedForm
    numbers: NDArray[np.uint8]
    scales: NDArray[np.float16]
    offsets: NDArray[np.float16] | None = None

    def with_rows(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Grouped:
        """The matrix whose rows are what `change` makes of these: it orders or picks rows of an array."""
        offsets = None if self.offsets is None else change(self.offsets)
        return Grouped(self.form, change(self.numbers), change(self.scales), offsets)

    def values(self) -> FloatArray:
        """The weights, float32 [out, in]; each is rounded once, from the exact sum."""
        grouped = self.numbers.reshape(*self.scales.shape, GROUP).astype(np.float32) - np.float32(self.form.zero)
        grouped *= self.scales[..., None].astype(np.float32)
        if self.offsets is not None:
            grouped += self.offsets[..., None].astype(np.float32)
        return grouped.reshape(self.numbers.shape)


def join(parts: Sequence[Grouped], arrange: Callable[[Sequence[NDArray[Any]]], NDArray[Any]]) -> Grouped:
    """One matrix of parts of one form, whose rows `arrange` puts together."""
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return Grouped(
        parts[0].form, arrange([part.numbers for part in parts]), arrange([part.scales for part in parts]),
        arrange(offsets) if offsets else None,
    )  # fmt: skip


def quantize(matrix: FloatArray) -> Grouped:
    """8 bits for each weight of a matrix [out, in]; inputs are padded with zeros to a multiple of 32.

    The scale is the group's largest magnitude over 127, rounded up to float16, and numbers are rounded to nearest: an
    error is at most half a scale. This is Q8_0 of ggml but for the direction in which a scale is rounded.
    """
    outputs, inputs = matrix.shape
    columns = round_up(inputs, GROUP)
    numbers = np.empty((outputs, columns), np.uint8)
    scales = np.empty((outputs, columns // GROUP), np.float16)
    step = max(1, _QUANTIZE_VALUES // columns)
    for first in range(0, outputs, step):
        rows = matrix[first : first + step]
        if columns != inputs:
            rows = np.pad(rows, ((0, 0), (0, columns - inputs)))
        groups = rows.reshape(len(rows), -1, GROUP)
        exact = np.abs(groups).max(2) / np.float32(_MOST)
        scale = exact.astype(np.float16)
        scale = np.where(scale.astype(np.float32) < exact, np.nextafter(scale, np.float16(np.inf)), scale)
        wide = scale.astype(np.float32)[..., None]
        whole = np.rint(np.divide(groups, wide, out=np.zeros_like(groups), where=wide > 0))
        numbers[first : first + step] = (whole + INT8.zero).astype(np.uint8).reshape(rows.shape)
        scales[first : first + step] = scale
    return Grouped(INT8, numbers, scales)


def take_groups(memory: Memory | CountingMemory, form: GroupedForm, outputs: int, inputs: int) -> NDArray[np.uint8]:
    """Room for a packed matrix [out, in]: [pairs of column blocks, groups, bytes of a record]."""
    shape = round_up(outputs, 32) // 32, round_up(inputs, GROUP) // GROUP, form.record_bytes
    return memory.take(shape, np.uint8)


def pack_groups(memory: Memory | CountingMemory, matrix: Grouped) -> NDArray[np.uint8]:
    """Pack one matrix into `memory`; rows that fill the last pair of column blocks are zeros."""
    form, (outputs, inputs) = matrix.form, matrix.numbers.shape
    packed = take_groups(memory, form, outputs, inputs)
    missing = len(packed) * 32 - outputs
    if missing:
        matrix = matrix.with_rows(lambda array: np.pad(array, ((0, missing), (0, 0))))
    pairs, groups, _ = packed.shape
    words = _words(matrix.numbers, form).reshape(pairs, 2, 16, groups, form.lines).transpose(0, 3, 4, 1, 2)
    target = packed[:, :, form.numbers_at :].view(np.uint32).reshape(pairs, groups, form.lines, LINE_STEP // 4)
    target.reshape(pairs, groups, form.lines, 2, 16)[...] = words
    parameters = [matrix.scales] if matrix.offsets is None else [matrix.scales, matrix.offsets]
    for place, array in enumerate(parameters):
        halves = np.ascontiguousarray(array.reshape(pairs, 2, 16, groups).transpose(0, 3, 1, 2))
        packed[:, :, place * 64 : (place + 1) * 64] = halves.reshape(pairs, groups, -1).view(np.uint8)
    return packed


def _words(numbers: NDArray[np.uint8], form: GroupedForm) -> NDArray[np.uint32]:
    """Numbers [out, in] as words [out, in / inputs of a line]."""
    if form is UINT4:
        halves = numbers.reshape(len(numbers), -1, 2, 4)
        numbers = np.bitwise_or(halves[:, :, 0], np.left_shift(halves[:, :, 1], np.uint8(4)), dtype=np.uint8)
    return np.ascontiguousarray(numbers).reshape(len(numbers), -1).view(np.uint32)
