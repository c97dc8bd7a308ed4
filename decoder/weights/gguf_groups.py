"""Tensors of a GGUF file that are whole numbers in groups of 32 already: taken bit by bit, and rounded nowhere.

Block layouts are those of ggml (`ggml-common.h`): Q8_0 and Q5_0 become 8 bits, Q4_0 and Q4_1 4 bits with an offset.
Other types have scales of their own kind, which float16 does not hold. Called by `source.py`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.kernels.grouped_inputs import GROUP
from decoder.kernels.grouped_weights import INT8, UINT4, GroupedForm
from decoder.models.grouping import Grouped

Bytes = NDArray[np.uint8]

_FORMS: Final[dict[str, GroupedForm]] = {"Q8_0": INT8, "Q5_0": INT8, "Q4_0": UINT4, "Q4_1": UINT4}
_BLOCK_BYTES: Final = {"Q8_0": 34, "Q5_0": 22, "Q4_0": 18, "Q4_1": 20}
_Q4_0_ZERO: Final = np.float16(8)
_Q5_0_ZERO: Final = 16


def form_of(type_name: str) -> GroupedForm | None:
    """The form that holds a tensor of this type exactly, or None."""
    return _FORMS.get(type_name)


def unpack(data: Bytes, type_name: str) -> Grouped:
    """A tensor [out, bytes of a row] of a type that has a form."""
    rows = len(data)
    blocks = np.ascontiguousarray(data).reshape(rows, -1, _BLOCK_BYTES[type_name])
    scales = _halves(blocks, 0)
    numbers: Bytes
    if type_name == "Q8_0":
        numbers = blocks[..., 2:] ^ np.uint8(INT8.zero)  # from a number with its sign to one without
        return Grouped(INT8, numbers.reshape(rows, -1), scales)
    if type_name == "Q5_0":
        high = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
        numbers = _halves_of_bytes(blocks[..., 6:]) + high * np.uint8(16) + np.uint8(INT8.zero - _Q5_0_ZERO)
        return Grouped(INT8, numbers.reshape(rows, -1), scales)
    offsets = _halves(blocks, 2) if type_name == "Q4_1" else -_Q4_0_ZERO * scales
    numbers = _halves_of_bytes(blocks[..., _BLOCK_BYTES[type_name] - GROUP // 2 :])
    return Grouped(UINT4, numbers.reshape(rows, -1), scales, offsets)


def _halves(blocks: Bytes, at: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _halves_of_bytes(packed: Any) -> Bytes:
    """Sixteen lower halves of bytes, then the sixteen upper ones."""
    numbers: Bytes = np.concatenate([packed & 15, packed >> 4], axis=-1)
    return numbers
