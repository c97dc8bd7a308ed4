"""Which weights of a model are whole numbers in groups, and what weights of each type take, from headers alone.

Called by the loader, and by `tessera plan`, which reads no tensor.
"""

from __future__ import annotations

import math

from common.layout import GROUPED_DTYPES
from decoder.kernels.grouped_inputs import GROUP
from decoder.kernels.grouped_weights import INT8
from decoder.kernels.simd import LANES
from decoder.models.config import refuse
from decoder.models.matrices import GroupedMatrices
from decoder.weights.source import GgufSource, TensorSource


def groups_of(source: TensorSource, dtype: str) -> GroupedMatrices:
    """How matrices become whole numbers in groups. Raises InvalidArgument for "file" where the source has none."""
    if not isinstance(source, GgufSource):
        if dtype == "file":
            raise refuse("dtype", dtype, "'int8', 'bfloat16' or 'float32' for a Hugging Face directory")
        return GroupedMatrices(source.read)
    return GroupedMatrices(source.read, source, widest=dtype == "int8")


def weight_bytes(source: TensorSource, dtype: str) -> dict[str, int]:
    """Bytes of each tensor by its name, in memory, padding left out. Raises InvalidArgument as loading does."""
    groups = groups_of(source, dtype) if dtype in GROUPED_DTYPES else None
    element = 4 if dtype == "float32" else 2
    found = {}
    for name, shape in source.shapes().items():
        if groups is None or len(shape) < 2:
            found[name] = math.prod(shape) * (element if groups is None else 4)
        else:
            form = groups.taken(name) or INT8
            found[name] = math.prod(shape) * form.record_bytes // (2 * LANES * GROUP)
    return found
