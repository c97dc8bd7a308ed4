"""When a child may start again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.restarts import RestartHistory, RestartLimits

LIMITS = RestartLimits(first_delay_seconds=1.0, max_delay_seconds=4.0, max_crashes=3, window_seconds=60.0)


def test_delays_double_up_to_their_bound_and_then_end() -> None:
    """Each crash waits twice as long; one crash too many within the window is the end."""
    history = RestartHistory(RestartLimits(1.0, 4.0, 4, 60.0))
    assert [history.next_delay(float(second)) for second in range(5)] == [1.0, 2.0, 4.0, 4.0, None]


def test_a_long_life_forgives_earlier_crashes() -> None:
    """Crashes older than the window count no longer."""
    history = RestartHistory(LIMITS)
    for second in range(3):
        assert history.next_delay(float(second)) is not None
    assert history.next_delay(100.0) == 1.0


@given(st.lists(st.floats(min_value=0.0, max_value=1000.0), max_size=30))
def test_delays_stay_within_their_limits(gaps: list[float]) -> None:
    """Whatever the times, a delay lies between the first and the longest, and spaced crashes never end a child."""
    history, now = RestartHistory(LIMITS), 0.0
    for gap in gaps:
        now += gap
        delay = history.next_delay(now)
        assert delay is None or LIMITS.first_delay_seconds <= delay <= LIMITS.max_delay_seconds
    spaced = RestartHistory(LIMITS)
    assert all(spaced.next_delay(61.0 * index) == 1.0 for index in range(10))


@pytest.mark.parametrize("values", [(0.0, 1.0, 1, 1.0), (2.0, 1.0, 1, 1.0), (1.0, 2.0, -1, 1.0), (1.0, 2.0, 1, 0.0)])
def test_limits_that_mean_nothing_are_refused(values: tuple[float, float, int, float]) -> None:
    """Zero or shrinking delays, a negative count and an empty window raise."""
    with pytest.raises(ValueError, match="make no sense"):
        RestartLimits(*values)
