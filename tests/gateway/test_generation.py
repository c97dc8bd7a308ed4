"""The order of a stream, whatever a decoder sends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from common.errors import Aborted, Internal
from gateway import generation
from gateway.decode_stream import DecodeStream, RequestEnd, SampleEnd, Start, Update
from gateway.detokenizer import ByteDetokenizer
from gateway.generation import Arrival, Generation
from gateway.outbox import Outbox
from gateway.validation import Plan
from tessera.inference.v1 import inference_pb2 as pb
from tests.gateway.support import async_test

STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH


def update(
    *gains: tuple[int, Sequence[int]],
    start: bool = False,
    ends: Sequence[SampleEnd] = (),
    end: bool = False,
    failure: Any = None,
) -> Update:
    made = Update(
        start=Start(2, 0.5) if start else None,
        sample_ends=list(ends),
        end=RequestEnd(4) if end else None,
        failure=failure,
    )
    for index, ids in gains:
        made.add_tokens(index, ids)
    return made


def plan(samples: int = 1, stops: Sequence[str] = (), **fields: Any) -> Plan:
    values = {"max_tokens": None, "min_tokens": 0, "include_stop": False, "wants_logprobs": False} | fields
    return Plan(num_samples=samples, stops=tuple(stops), **values)


async def play(how: Plan, updates: Sequence[Update]) -> tuple[list[Any], Outbox]:
    """What a client sees of these updates. A token's text is its letter: 1 is "a"."""
    outbox = Outbox()
    stream = DecodeStream(1, how.num_samples, 1000, outbox, lambda number: None)
    for one in updates:
        stream.push(one)
    made = Generation(
        stream,
        how,
        request_id="r",
        tenant="t",
        prompt_tokens=3,
        new_detokenizer=lambda: ByteDetokenizer(lambda index: bytes([96 + index])),
        arrival=Arrival(1.0, 1.25),
        clock=iter(range(2, 100)).__next__,
    )
    seen: list[Any] = []

    async def write(one: pb.GenerateResponse) -> None:
        seen.append(getattr(one, one.WhichOneof("event") or ""))

    await made.run(write)
    return seen, outbox


@async_test
async def test_one_message_may_hold_a_whole_request() -> None:
    """Start, tokens of several steps, and both ends in one update: all come out, in order."""
    events, _ = await play(plan(), [update((0, [1, 2, 3]), start=True, ends=[SampleEnd(0, LENGTH, None)], end=True)])
    assert events[0] == pb.Accepted(request_id="r", prompt_tokens=3, cached_tokens=2)
    assert events[1] == pb.Delta(index=0, text="abc", token_ids=[1, 2, 3])
    assert events[2] == pb.Finished(index=0, reason=LENGTH)
    assert events[3].usage == pb.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=3, cow_copies=4)
    assert events[3].timing == pb.Timing(
        queue_seconds=0.75, prefill_seconds=0.25, ttft_seconds=1.0, decode_seconds=1.0, total_seconds=2.0
    )


@async_test
async def test_the_end_of_a_sample_may_come_after_its_tokens() -> None:
    """Text that was held back comes in a delta of its own before finished."""
    updates = [update((0, [1, 2]), start=True), update(ends=[SampleEnd(0, LENGTH, None)], end=True)]
    events, _ = await play(plan(stops=["bcd"]), updates)
    assert [type(event).__name__ for event in events] == ["Accepted", "Delta", "Delta", "Finished", "Summary"]
    assert (events[1].text, events[2].text) == ("a", "b")


@async_test
async def test_tokens_past_a_stop_string_are_dropped_and_not_counted() -> None:
    """What a decoder made before it heard of the cancel is neither shown nor counted."""
    updates = [
        update((0, [1, 2, 3, 4]), start=True),
        update((0, [5, 6])),
        update((0, [7]), ends=[SampleEnd(0, LENGTH, None)], end=True),
    ]
    events, _ = await play(plan(stops=["bc"]), updates)
    assert events[1] == pb.Delta(index=0, text="a", token_ids=[1, 2, 3])
    assert events[2] == pb.Finished(index=0, reason=STOP, stop="bc")
    assert events[3].usage.completion_tokens == 3
    assert len(events) == 4


@async_test
async def test_a_stop_string_wins_over_a_later_end_in_the_same_message() -> None:
    """With the decoder's own end behind it in one message, the stop string still decides, and nothing is cancelled."""
    updates = [update((0, [1, 2, 3, 4]), start=True, ends=[SampleEnd(0, LENGTH, None)], end=True)]
    events, outbox = await play(plan(stops=["bc"]), updates)
    assert events[2] == pb.Finished(index=0, reason=STOP, stop="bc")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(outbox.next(), 0.01)


@pytest.mark.parametrize(
    "last",
    [update(failure=Aborted("gone")), update(failure=Internal("odd")), update(end=True), None],
)
def test_a_stream_whose_samples_all_stopped_ends_well(last: Update | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last stop string the summary comes, whether the decoder confirms, fails or says nothing in time."""
    monkeypatch.setattr(generation, "CONFIRM_SECONDS", 0.05)

    @async_test
    async def scenario() -> None:
        updates = [update((0, [1, 2]), start=True)] + ([] if last is None else [last])
        events, _ = await play(plan(stops=["b"]), updates)
        assert type(events[-1]) is pb.Summary
        assert events[-1].usage.completion_tokens == 2

    scenario()


@pytest.mark.parametrize(
    "updates",
    [
        [update((0, [1]))],
        [update((5, [1]), start=True)],
        [update((0, [1]), start=True), update(ends=[SampleEnd(3, LENGTH, None)])],
        [update((0, [1]), start=True), update(ends=[SampleEnd(0, 0, None)])],
        [update((0, [1]), start=True), update(ends=[SampleEnd(0, 77, None)])],
        [update((0, [1]), start=True), update(end=True)],
    ],
)
def test_a_decoder_that_breaks_the_contract_is_an_internal_error(updates: list[Update]) -> None:
    """Tokens before the start, unknown samples or reasons and a missing end never become a stream that looks whole."""

    @async_test
    async def scenario() -> None:
        with pytest.raises(Internal):
            await play(plan(), updates)

    scenario()


@async_test
async def test_a_failure_in_mid_stream_is_raised() -> None:
    """What failed at the decoder is what the client gets."""
    with pytest.raises(Aborted, match="operator"):
        await play(plan(), [update((0, [1]), start=True), update(failure=Aborted("by the operator"))])
