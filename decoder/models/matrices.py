"""How the matrices of a model become packed weights: as float32, as bfloat16, or as whole numbers in groups.

`PackedWeights` names the tensors of each matrix and how their rows are put together; which bytes they become, and how a
kernel finds them, is decided here. Nothing is read where the memory is filled already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from decoder.kernels.grouped_weights import INT8, UINT4, GroupedForm
from decoder.models.grouping import Grouped, join, pack_groups, quantize, take_groups
from decoder.models.packing import CountingMemory, FloatArray, Memory, interleave_blocks, pack, round_up, take_packed

Read = Callable[[str], FloatArray]
AnyMemory = Memory | CountingMemory
Arrange = Callable[[Sequence[NDArray[Any]]], NDArray[Any]]


class Packed(NamedTuple):
    """A packed matrix: its bytes, and the address by which kernels know it."""

    array: NDArray[Any]
    address: int

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return int(self.array.nbytes)


class Matrices(Protocol):
    """A way to pack matrices."""

    def pack(self, memory: AnyMemory, outputs: int, inputs: int, names: Sequence[str], arrange: Arrange) -> Packed:
        """The matrix [outputs, inputs] of tensors whose rows `arrange` puts together."""


class DenseMatrices:
    """float32 or bfloat16."""

    def __init__(self, read: Read, bfloat16: bool) -> None:
        self._read, self._bfloat16 = read, bfloat16

    def pack(self, memory: AnyMemory, outputs: int, inputs: int, names: Sequence[str], arrange: Arrange) -> Packed:
        if memory.filled:
            array = take_packed(memory, outputs, inputs, self._bfloat16)
        else:
            array = pack(memory, arrange([_as_rows(self._read(name)) for name in names]), self._bfloat16)
        return Packed(array, array.ctypes.data)


class GroupSource(Protocol):
    """Tensors that a model file holds as whole numbers in groups."""

    def form(self, name: str) -> GroupedForm | None:
        """The form in which a tensor can be taken as it is, from the file's header alone; None: in none."""

    def groups(self, name: str) -> Grouped:
        """A tensor that has a form, in that form."""


class GroupedMatrices:
    """Whole numbers in groups: 4 bits where `source` has all tensors of a matrix so, else 8.

    source: tensors that are taken as they are; others, and those of a matrix of several forms, are quantised anew.
            None: all of them
    widest: whether 4 bits are not served, so that only tensors of 8 bits are taken as they are
    anew:   names of the tensors that were not taken as they are, or would not have been
    """

    def __init__(self, read: Read, source: GroupSource | None = None, *, widest: bool = False) -> None:
        self._read, self._source, self._widest = read, source, widest
        self.anew: list[str] = []

    def _form(self, names: Sequence[str]) -> GroupedForm:
        return UINT4 if all(self.taken(name) is UINT4 for name in names) else INT8

    def taken(self, name: str) -> GroupedForm | None:
        """The form in which a tensor is taken as it is, if its matrix has that form."""
        form = None if self._source is None else self._source.form(name)
        return None if form is UINT4 and self._widest else form

    def pack(self, memory: AnyMemory, outputs: int, inputs: int, names: Sequence[str], arrange: Arrange) -> Packed:
        form = self._form(names)
        self.anew += [name for name in names if self.taken(name) is not form]
        if memory.filled:
            array = take_groups(memory, form, outputs, inputs)
        else:
            array = pack_groups(memory, join([self._tensor(name, form) for name in names], arrange))
        return Packed(array, array.ctypes.data | form.tag)

    def _tensor(self, name: str, form: GroupedForm) -> Grouped:
        if self._source is not None and self.taken(name) is form:
            return self._source.groups(name)
        return quantize(_as_rows(self._read(name)))


def below(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Matrices below each other."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def alternating(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Two matrices of equal shape in alternating column blocks, each filled up to whole pairs of them with zeros."""
    gate, up = (_padded_rows(part) for part in parts)
    return interleave_blocks(gate, up)


def _padded_rows(matrix: NDArray[Any]) -> NDArray[Any]:
    missing: Final = round_up(matrix.shape[0], 32) - matrix.shape[0]
    return np.pad(matrix, ((0, missing), (0, 0))) if missing else matrix


def _as_rows(tensor: FloatArray) -> FloatArray:
    return tensor[None] if tensor.ndim == 1 else tensor
