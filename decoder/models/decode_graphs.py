"""Recorded decode steps, one for each shape that occurs: a CUDA graph is recorded at first use and replayed then.

Owns which shapes have fixed inputs and recordings, and when these are void: a recording holds addresses, those of its
inputs and of the arena. Invariant: there are at most `MOST` of them, and none goes before its last use is over. What
records is passed in (`CudaRecorder`, or none, which runs the step each time), so the rules are tested without a GPU.
"""

# Classes of torch.cuda without annotations.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, Protocol, TypeVar

import torch

MOST: Final = 64
"""Shapes that are kept: the 39 batch sizes of `device_inputs.py`, and others with shared runs or adapters."""

Step = Callable[[], torch.Tensor]
Inputs = TypeVar("Inputs")


class Recorder(Protocol):
    """Turns a step into something that replays it into the same output memory."""

    def record(self, step: Step) -> Step:
        """A callable that computes what `step` would, from what lies in the step's input memory when it is called."""

    def mark(self) -> Callable[[], None]:
        """What waits until everything that was queued so far is over."""


class DirectRecorder:
    """Records nothing: each replay runs the step."""

    def record(self, step: Step) -> Step:
        """The step itself."""
        return step

    def mark(self) -> Callable[[], None]:
        """Nothing: memory that such a step used is given to nobody before it is over (torch's allocators see to it)."""
        return _no_wait


class CudaRecorder:
    """CUDA graphs in one memory pool: they are replayed one after another, never at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> Step:
        """Run once on another stream, so that everything is compiled and allocated, then capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the driver meanwhile: the arena's mapping does.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    def mark(self) -> Callable[[], None]:
        """An event of the current stream."""
        event = torch.cuda.Event()
        event.record()
        return event.synchronize


class _Shape(Generic[Inputs]):
    """What is kept of one shape. `wait` returns when the last use of it is over."""

    __slots__ = ("inputs", "recording", "wait")

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.recording: Step | None = None
        self.wait: Callable[[], None] = _no_wait


def _no_wait() -> None:
    return None


class DecodeGraphs(Generic[Inputs]):
    """Fixed inputs, and a recording for one arena, of each of the `most` shapes that were used last. A shape is a batch
    size, and what else decides which kernels run; `make_inputs` makes the inputs of one."""

    def __init__(self, recorder: Recorder, make_inputs: Callable[[Any], Inputs], most: int = MOST) -> None:
        self._recorder = recorder
        self._make_inputs = make_inputs
        self._most = most
        self._arena = 0
        self._shapes: dict[Hashable, _Shape[Inputs]] = {}  # the one that was used last is the last

    def __len__(self) -> int:
        return len(self._shapes)

    def clear(self) -> None:
        """Forget everything, once its last use is over."""
        while self._shapes:
            self._drop_oldest()

    def inputs(self, shape: Hashable) -> Inputs:
        """The inputs of a shape; where they are new and there are too many, those unused longest go."""
        kept = self._shapes.pop(shape, None)
        while kept is None and len(self._shapes) >= self._most:
            self._drop_oldest()
        self._shapes[shape] = kept or _Shape(self._make_inputs(shape))
        return self._shapes[shape].inputs

    def run(self, shape: Hashable, arena: torch.Tensor, step: Step) -> torch.Tensor:
        """Replay the step of `shape`, whose `inputs` were asked for just now, or record `step` first. Another arena
        makes all recordings void."""
        if arena.data_ptr() != self._arena:
            for other in self._shapes.values():
                other.wait()
                other.recording = None
            self._arena = arena.data_ptr()
        kept = self._shapes[shape]
        if kept.recording is None:
            kept.recording = self._recorder.record(step)
        output = kept.recording()
        kept.wait = self._recorder.mark()
        return output

    def _drop_oldest(self) -> None:
        # Waited for before it is forgotten: a device may still read the inputs, and run the recording.
        oldest = next(iter(self._shapes))
        self._shapes[oldest].wait()
        del self._shapes[oldest]
