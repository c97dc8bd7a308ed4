"""How results of device steps come to the host: copied beside the steps, on a stream of their own, with an event each.

Owns the order of a copy against the steps: it begins when what was queued before it is done, and what is queued after
`hold` begins when it is made. `CudaSideStream` is a GPU's; `NoSideStream` is for a device that is done when a call
returns; tests have one whose copies are made when they are asked for. Used by `device_model.py` and `device_draws.py`.
"""

# Classes of torch.cuda without annotations.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any, Protocol

import torch
from numpy.typing import NDArray


class Arrival(Protocol):
    """A result on its way to the host."""

    def wait(self) -> NDArray[Any]:
        """The result, when it is there. Everything that was queued before its copy has then finished."""


class SideStream(Protocol):
    """Copies results to the host beside the steps."""

    def bring(self, result: torch.Tensor) -> Arrival:
        """Queue the copy of `result`. Its memory is written by nobody before the copy is made, or `hold` is called."""

    def hold(self, arrival: Arrival) -> None:
        """What is queued from now on begins when the copy is made. The host waits for nothing."""

    def drain(self) -> None:
        """Returns when nothing that was queued runs any more, steps and copies. Never raises."""


class _CudaArrival:
    """A copy in pinned memory."""

    def __init__(self, host: torch.Tensor, event: torch.cuda.Event) -> None:
        self.host, self.event = host, event

    def wait(self) -> NDArray[Any]:
        self.event.synchronize()
        array: NDArray[Any] = self.host.numpy()
        return array


class CudaSideStream:
    """A stream of a GPU beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def bring(self, result: torch.Tensor) -> Arrival:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(result, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return _CudaArrival(host, event)

    def hold(self, arrival: Arrival) -> None:
        if isinstance(arrival, _CudaArrival):
            torch.cuda.current_stream(self._device).wait_event(arrival.event)

    def drain(self) -> None:
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            return  # the context is broken: it runs nothing any more, and the next call says so


class _Arrived:
    """A result that is there, and is copied when its memory may be written again."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result = result

    def wait(self) -> NDArray[Any]:
        array: NDArray[Any] = self.result.numpy()
        return array


class NoSideStream:
    """For results in the host's memory."""

    def bring(self, result: torch.Tensor) -> Arrival:
        return _Arrived(result)

    def hold(self, arrival: Arrival) -> None:
        if isinstance(arrival, _Arrived):
            arrival.result = arrival.result.clone()

    def drain(self) -> None:
        return None
