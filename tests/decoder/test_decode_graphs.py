"""Which recorded steps there are: one a shape, a stated most, none for another arena, none dropped while it may run."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from decoder.models.decode_graphs import MOST, DecodeGraphs, Step


class Inputs:
    """The fixed memory of a shape."""

    def __init__(self, shape: int) -> None:
        self.shape = shape


class LazyDevice:
    """A recorder whose replays are over when somebody waits for them; `log` has what was done, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self._marks = 0

    def record(self, step: Step) -> Step:
        self.log.append(("record", int(step())))
        return step

    def mark(self) -> Callable[[], None]:
        self._marks += 1
        mark = self._marks
        return lambda: self.log.append(("wait", mark))


class Rig:
    """Graphs over a `LazyDevice`, and the inputs that are still in memory."""

    def __init__(self, most: int = MOST) -> None:
        self.device = LazyDevice()
        self.alive: weakref.WeakSet[Inputs] = weakref.WeakSet()
        self.graphs = DecodeGraphs(self.device, self._make, most)
        self.arena = torch.zeros(4)

    def _make(self, shape: int) -> Inputs:
        inputs = Inputs(shape)
        self.alive.add(inputs)
        self.device.log.append(("make", shape))
        return inputs

    def run(self, shape: int, arena: torch.Tensor | None = None) -> None:
        """One step."""
        inputs = self.graphs.inputs(shape)
        assert inputs.shape == shape
        where = self.arena if arena is None else arena
        assert int(self.graphs.run(shape, where, lambda: torch.tensor(shape))) == shape

    def kept(self) -> list[int]:
        """Shapes whose inputs are in memory."""
        return sorted(inputs.shape for inputs in self.alive)


def test_a_shape_is_recorded_once_for_an_arena() -> None:
    """Replays record nothing; another arena makes all recordings void, once their last use is over, and no inputs."""
    rig = Rig()
    for shape in (1, 2, 1, 2, 2):
        rig.run(shape)
    assert rig.device.log == [("make", 1), ("record", 1), ("make", 2), ("record", 2)]
    del rig.device.log[:]
    other = torch.zeros(4)
    rig.run(2, other)
    rig.run(1, other)
    assert rig.device.log == [("wait", 3), ("wait", 5), ("record", 2), ("record", 1)]
    assert len(rig.graphs) == 2


def test_there_are_at_most_so_many_and_the_one_unused_longest_goes() -> None:
    """A third of two drives out the one that was used least recently, not the one that was made first; what went is
    made and recorded anew."""
    rig = Rig(most=2)
    for shape in (1, 2, 1, 3):
        rig.run(shape)
    assert (len(rig.graphs), rig.kept()) == (2, [1, 3])
    del rig.device.log[:]
    rig.run(1)
    assert rig.device.log == []
    rig.run(2)
    assert rig.device.log == [("wait", 4), ("make", 2), ("record", 2)]  # the use of 3
    assert rig.kept() == [1, 2]


def test_memory_goes_only_after_its_last_use() -> None:
    """The wait for the use that is to be over comes before anything is let go; without a use nothing is waited for."""
    rig = Rig(most=1)
    rig.run(1)
    waited: list[list[int]] = []
    kept = rig.graphs._shapes[1]
    over = kept.wait

    def wait() -> None:
        over()
        waited.append(rig.kept())

    kept.wait = wait
    del kept
    rig.run(2)
    assert waited == [[1]]
    assert rig.kept() == [2]
    rig.graphs.inputs(3)
    del rig.device.log[:]
    rig.graphs.inputs(4)  # 3 was never run
    assert rig.device.log == [("make", 4)]


def test_a_long_run_of_new_shapes_stays_bounded() -> None:
    """A thousand shapes, by default."""
    rig = Rig()
    for shape in range(1000):
        rig.run(shape)
    assert len(rig.graphs) == MOST == len(rig.kept())
    rig.graphs.clear()
    assert (len(rig.graphs), rig.kept()) == (0, [])
    assert rig.device.log[-1] == ("wait", 1000)
