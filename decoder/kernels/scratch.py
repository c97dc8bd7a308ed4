"""Where attention's parts lie in the scratch memory of one thread; the frame says so to the kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from decoder.kernels import frame as f

_LINE = 64


def tokens_per_item(group: int) -> int:
    """Query tokens of one prefill task of attention, for heads in groups of `group`."""
    return max(1, f.ITEM_LANES // group)


def lay_out_attention(frame: NDArray[np.int64], group: int, head_dim: int, offset: int) -> None:
    """Set the frame's offsets from `offset` on, and SCRATCH_BYTES, the bytes of one thread."""
    lanes = -(-tokens_per_item(group) * group // 16) * 16
    frame[f.STATE_BYTES] = (head_dim + 2) * 64
    for index, num_bytes in (
        (f.AT_QUERIES, lanes * head_dim * 4), (f.AT_LIMITS, lanes * 4), (f.AT_SCORES, f.SPAN * f.LANES_BYTES),
        (f.AT_WEIGHTS, f.SPAN * f.LANES_BYTES), (f.AT_KEYS, f.SPAN * head_dim * 4),
        (f.AT_VALUES, f.SPAN * head_dim * 4), (f.AT_ROWS, 32 * head_dim * 4),
        (f.AT_STATE, lanes // 16 * int(frame[f.STATE_BYTES])), (f.AT_STATISTICS, 256),
        (f.AT_OUTPUT, head_dim * f.LANES_BYTES), (f.AT_RUNS, f.RUNS_BYTES),
    ):  # fmt: skip
        frame[index] = offset
        offset += -(-num_bytes // _LINE) * _LINE
    frame[f.SCRATCH_BYTES] = -(-offset // 4096) * 4096 + _LINE
