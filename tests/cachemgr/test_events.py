"""The event log: gap-free, bounded, resumable; the core tells it what changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.events import EventLog
from common.errors import OutOfRange


def kinds(log, after=0):
    return [event.kind for _, event in log.since(after)]


@given(
    max_events=st.integers(1, 8),
    max_blocks=st.integers(1, 20),
    sizes=st.lists(st.integers(0, 12), max_size=40),
    limit=st.integers(1, 50),
)
def test_log_is_the_newest_run_of_a_gap_free_sequence(max_events, max_blocks, sizes, limit):
    """Against a plain list: what is known is its newest run; every place in it can be resumed from, no other one."""
    log, naive = EventLog(max_events, max_blocks), []
    for number, size in enumerate(sizes, start=1):
        if size == 1 and number % 2:
            log.add_each(f"kind_{number}", number, 1, [2], [3], [4], [5])
        else:
            log.add(f"kind_{number}", number, blocks=np.arange(size))
        naive.append((number, f"kind_{number}", size))
        kept = naive[-max_events:]
        while sum(item[2] for item in kept) > max_blocks and len(kept) > 1:
            kept = kept[1:]
        naive = kept
        assert log.last_sequence == number
        assert log.oldest_sequence == naive[0][0]
    for after in range(-1, len(sizes) + 2):
        expected = [item for item in naive if item[0] > after][:limit]
        if after < log.oldest_sequence - 1 or after > log.last_sequence:
            with pytest.raises(OutOfRange) as caught:
                log.since(after, limit)
            assert caught.value.metadata["oldest_sequence"] == str(log.oldest_sequence)
            assert caught.value.metadata["last_sequence"] == str(log.last_sequence)
        else:
            assert [(number, event.kind, len(event.blocks)) for number, event in log.since(after, limit)] == expected


def test_event_holds_what_it_was_given():
    """Every field comes back as it was passed."""
    log = EventLog()
    log.add("lease_granted", 9, owner=1, session=2, lease=3, blocks=np.array([7, 8]), generation=4, num_tokens=5)
    ((number, event),) = log.since(0)
    assert number == 1
    assert (event.kind, event.now_ns, event.owner, event.session, event.lease) == ("lease_granted", 9, 1, 2, 3)
    assert (event.blocks.tolist(), event.generation, event.detail) == ([7, 8], 4, {"num_tokens": 5})


def test_events_of_many_leases_are_those_of_each():
    """A column of each field makes the same events, in the same order, as one call each; no more stay than fit."""
    many, single = EventLog(max_events=9), EventLog(max_events=9)
    for first in (0, 6):
        numbers = range(first, first + 6)
        columns = ([n + 10 for n in numbers], [n + 20 for n in numbers], [n + 30 for n in numbers], list(numbers))
        many.add_each("blocks_published", 7, 5, *columns)
        for owner, lease, block, generation in zip(*columns, strict=True):
            single.add("blocks_published", 7, owner, 5, lease, np.array([block]), generation)
    assert many.oldest_sequence == 4
    assert [(*it[:5], it.blocks.tolist(), *it[6:]) for _, it in many.since(3)] == [
        (*it[:5], it.blocks.tolist(), *it[6:]) for _, it in single.since(3)
    ]


def test_event_keeps_its_blocks_and_nothing_beside_them():
    """A few numbers of a long table do not keep the table in memory; what is whole is not copied."""
    log = EventLog()
    table = np.arange(1000)
    log.add("blocks_evicted", 1, blocks=table[-2:])
    log.add("blocks_evicted", 1, blocks=table)
    (_, part), (_, whole) = log.since(0)
    assert part.blocks.tolist() == [998, 999]
    assert part.blocks.base is None
    assert whole.blocks is table
