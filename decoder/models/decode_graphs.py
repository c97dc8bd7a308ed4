"""Recorded decode steps, one for each shape that occurs: a CUDA graph is recorded at first use and replayed then.

Owns which recordings exist and when they are void: a recording holds addresses, those of the arena among them. What
records is passed in (`CudaRecorder`, or none, which runs the step each time), so the rules are tested without a GPU.
"""

# Classes of torch.cuda without annotations.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

Step = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Turns a step into something that replays it into the same output memory."""

    def record(self, step: Step) -> Step:
        """A callable that computes what `step` would, from what lies in the step's input memory when it is called."""


class DirectRecorder:
    """Records nothing: each replay runs the step."""

    def record(self, step: Step) -> Step:
        """The step itself."""
        return step


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


class DecodeGraphs:
    """Recordings by shape (batch size, and what else decides which kernels run) for one arena."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._arena = 0
        self._recordings: dict[Hashable, Step] = {}

    def __len__(self) -> int:
        return len(self._recordings)

    def clear(self) -> None:
        """Forget all recordings."""
        self._recordings.clear()

    def run(self, shape: Hashable, arena: torch.Tensor, step: Step) -> torch.Tensor:
        """Replay the step of `shape`, or record `step` first. Another arena makes all recordings void."""
        if arena.data_ptr() != self._arena:
            self._recordings.clear()
            self._arena = arena.data_ptr()
        if shape not in self._recordings:
            self._recordings[shape] = self._recorder.record(step)
        return self._recordings[shape]()
