"""Host arrays on their way to a device: queued behind what runs there, so that the host may go on at once.

An ordinary copy waits until the device has come to it, and with it whoever plans the next step. Used by whatever puts
the batch of a step on a device; it knows no kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of `array` in new memory of `device`; the array may be changed as soon as this returns."""
    tensor = torch.from_numpy(np.array(array, order="C"))
    if not array.size:
        return torch.zeros(array.shape, dtype=tensor.dtype, device=device)  # NumPy's strides of nothing are 0
    # torch keeps pinned memory from being given to others while a copy from it is under way.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
