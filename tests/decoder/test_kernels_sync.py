"""Phases of tasks, the barrier, and who is let into a step (`decoder/kernels/sync.py`)."""

# mypy: disable-error-code="operator,arg-type,no-untyped-call"

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from decoder.kernels import sync
from decoder.kernels.compiled import entry
from decoder.kernels.frame import COUNTER_BYTES

PATIENCE: Final = 30.0
MOMENT: Final = 0.2  # what waits for something that does not come is seen to wait for so long


@entry
def _take(counter: int, tasks: int, size: int, rank: int) -> Any:
    return sync.take_tasks(counter, tasks, size, rank)


@entry
def _end(control: int, counter: int, mine: int, tasks: int) -> None:
    sync.end_phase(control, counter, mine, tasks)


@entry
def _meet(control: int, size: int) -> None:
    sync.barrier(control, size)


@entry
def _open(control: int) -> None:
    sync.open_step(control)


@entry
def _close(control: int) -> None:
    sync.close_step(control)


@entry
def _enter(control: int, generation: int) -> bool:
    return sync.enter_step(control, generation)


@entry
def _leave(control: int) -> None:
    sync.leave_step(control)


@entry
def _phases(control: int, counters: int, rank: int, numbers: Any) -> None:
    """Each phase makes a row of `numbers` of the row before: what the right neighbour was, and one more."""
    rows, columns = numbers.shape
    for row in range(1, rows):
        mine = 0
        while True:
            begin, end = sync.take_tasks(counters + row * 64, columns, 2, rank)
            if begin == end:
                break
            for task in range(begin, end):
                numbers[row, task] += numbers[row - 1, (task + 1) % columns] + 1
            mine += end - begin
        sync.end_phase(control, counters + row * 64, mine, columns)


@entry
def _steps(control: int, counters: int, rank: int, numbers: Any) -> None:
    """A worker: goes into every step that it can."""
    seen = 0
    while True:
        seen = sync.await_generation(control, seen)
        if seen < 0:
            return
        if sync.enter_step(control, seen):
            _phases(control, counters, rank, numbers)
            sync.leave_step(control)


def lines(count: int) -> tuple[NDArray[np.int64], int]:
    """`count` counters, each on a line, and the address of the first."""
    words = np.zeros(count * COUNTER_BYTES // 8 + 8, np.int64)
    return words, words.ctypes.data + (-words.ctypes.data) % COUNTER_BYTES


def waiting(work: Callable[[], object]) -> threading.Thread:
    """A thread that does `work`."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def team() -> sync.Team:
    """A team of two of which the caller is all that there is."""
    return sync.Team(2)


def test_a_phase_does_not_wait_for_a_thread_that_took_nothing(team: sync.Team) -> None:
    held, counter = lines(1)
    alone = waiting(lambda: (_take(counter, 2, 2, 0), _take(counter, 2, 2, 0), _end(team.control, counter, 2, 2)))
    alone.join(PATIENCE)
    assert not alone.is_alive()
    # A barrier of the same team does wait.
    met = waiting(lambda: _meet(team.control, 2))
    met.join(MOMENT)
    assert met.is_alive()
    _meet(team.control, 2)
    met.join(PATIENCE)
    assert not met.is_alive()
    del held


def test_a_phase_waits_for_a_task_that_was_taken_and_is_not_done(team: sync.Team) -> None:
    held, counter = lines(1)
    assert [_take(counter, 3, 4, rank) for rank in (0, 1, 3, 2, 1)] == [(0, 1), (2, 3), (1, 2), (3, 3), (3, 3)]
    others = [waiting(lambda: _end(team.control, counter, 1, 3)), waiting(lambda: _end(team.control, counter, 0, 3))]
    for thread in others:
        thread.join(MOMENT)
        assert thread.is_alive()
    _end(team.control, counter, 2, 3)
    for thread in others:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    del held


def test_tasks_are_taken_from_both_ends_and_ever_fewer_at_once() -> None:
    held, counter = lines(1)
    taken = [_take(counter, 40, 2, rank) for rank in (0, 1, 0, 0, 1)]
    assert taken == [(0, 10), (33, 40), (10, 15), (15, 19), (30, 33)]
    rest = []
    while (span := _take(counter, 40, 2, 0)) != (40, 40):
        rest += range(*span)
    assert rest == list(range(19, 30))
    del held


def test_a_phase_without_tasks_is_over(team: sync.Team) -> None:
    held, counter = lines(1)
    _end(team.control, counter, 0, 0)
    del held


def test_nobody_enters_a_step_that_is_over(team: sync.Team) -> None:
    _open(team.control)
    assert _enter(team.control, 1)
    _leave(team.control)
    _close(team.control)
    assert not _enter(team.control, 1)
    assert not _enter(team.control, 2)  # an even generation is no step
    _open(team.control)
    assert not _enter(team.control, 1)
    assert _enter(team.control, 3)
    _leave(team.control)
    _close(team.control)


def test_a_step_ends_when_all_who_entered_are_out(team: sync.Team) -> None:
    _open(team.control)
    assert _enter(team.control, 1)
    closing = waiting(lambda: _close(team.control))
    closing.join(MOMENT)
    assert closing.is_alive()
    assert not _enter(team.control, 1)  # another one comes too late, and holds nobody up
    _leave(team.control)
    closing.join(PATIENCE)
    assert not closing.is_alive()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_task_is_done_once_and_after_the_phase_before(size: int) -> None:
    team, (held, counters) = sync.Team(size), lines(400)
    numbers = np.zeros((400, 37), np.int64)
    team.start(lambda rank: _steps(team.control, counters, rank, numbers))
    try:
        for step in range(20):
            held[:] = 0
            numbers[1:] = 0
            numbers[0] = np.arange(37) * 1000 + step
            _open(team.control)
            _phases(team.control, counters, 0, numbers)
            _close(team.control)
            expected = np.stack([np.roll(numbers[0], -row) + row for row in range(400)])
            np.testing.assert_array_equal(numbers, expected)
    finally:
        team.close()
