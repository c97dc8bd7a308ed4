"""One request between a handler and its decoder, and what waits to be sent."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import Internal, Unavailable
from gateway.decode_stream import DecodeStream, RequestEnd, Update
from gateway.outbox import Outbox
from tessera.decode.v1 import decode_pb2
from tests.gateway.support import async_test


async def drain(outbox: Outbox) -> list[tuple[str, int]]:
    """Everything that waits to be sent."""
    found: list[tuple[str, int]] = []
    while True:
        try:
            message = await asyncio.wait_for(outbox.next(), 0.01)
        except TimeoutError:
            return found
        kind = message.WhichOneof("message") or ""
        value = message.consumed.tokens if kind == "consumed" else getattr(message, kind).request
        found.append((kind, value))


def tokens(count: int) -> Update:
    update = Update()
    update.add_tokens(0, range(count))
    return update


def stream(outbox: Outbox, window: int = 64, samples: int = 1) -> DecodeStream:
    return DecodeStream(7, samples, window, outbox, lambda number: None)


@async_test
async def test_closing_a_running_request_cancels_it_once() -> None:
    """However often it is closed, the decoder hears one cancel."""
    outbox = Outbox()
    one = stream(outbox)
    for _ in range(3):
        one.close()
    one.cancel_sample(0)
    one.consumed(1000)
    assert await drain(outbox) == [("cancel", 7)]


@pytest.mark.parametrize("last", [Update(end=RequestEnd(0)), Update(failure=Unavailable("away"))])
def test_closing_an_ended_request_says_nothing(last: Update) -> None:
    """After the decoder's last word there is nothing to cancel."""

    @async_test
    async def scenario() -> None:
        outbox = Outbox()
        one = stream(outbox)
        one.push(last)
        one.close()
        assert await drain(outbox) == []

    scenario()


@async_test
async def test_what_waits_is_bounded_by_the_window() -> None:
    """A decoder that runs past the window loses the request: its reader gets an error and the decoder a cancel."""
    outbox = Outbox()
    one = stream(outbox, window=8)
    one.push(tokens(8 + 64))
    assert (await one.next()).num_tokens == 72
    one.push(tokens(72))
    one.push(tokens(1))
    one.push(tokens(1))
    assert (await one.next()).num_tokens == 72
    with pytest.raises(Internal):
        await one.next()
    assert await drain(outbox) == [("cancel", 7)]


@async_test
async def test_an_abandoned_request_ends_on_both_sides() -> None:
    """At the end of a drain the client gets the error and the decoder a cancel, and a later close adds nothing."""
    outbox = Outbox()
    one = stream(outbox)
    one.abandon(Unavailable("shutting down"))
    with pytest.raises(Unavailable):
        await one.next()
    one.close()
    assert await drain(outbox) == [("cancel", 7)]


@async_test
async def test_reports_of_reading_merge_while_they_wait() -> None:
    """However much is read before the next message is sent, one report of the newest number waits."""
    outbox = Outbox()
    one = stream(outbox, window=64)
    for _ in range(10):
        one.consumed(31)
    assert await drain(outbox) == [("consumed", 310)]
    one.consumed(31)
    assert await drain(outbox) == []


@async_test
async def test_a_request_that_was_not_sent_yet_is_forgotten_instead_of_cancelled() -> None:
    """A cancel takes its own submit out of the queue, and no other's."""
    outbox = Outbox()
    for number in (1, 2, 3):
        outbox.submit(decode_pb2.Submit(request=number))
    outbox.consumed(2, 5)
    outbox.cancel(2)
    outbox.cancel(9)
    assert await drain(outbox) == [("submit", 1), ("submit", 3), ("cancel", 9)]


def test_tokens_of_one_sample_join_in_an_update() -> None:
    """Several entries for a sample make one gain, in order; samples stay apart."""
    update = Update()
    for index, ids in ((0, [1]), (1, [2, 3]), (0, [4])):
        update.add_tokens(index, ids)
    assert [(gain.index, gain.token_ids) for gain in update.gains] == [(0, [1, 4]), (1, [2, 3])]
    assert update.num_tokens == 4


@async_test
async def test_what_is_read_is_reported_now_and_then() -> None:
    """The decoder hears of every 64 tokens that were read, with a small window of every half of it, and of no fewer."""
    for window, every in ((256, 64), (64, 32), (8, 4)):
        outbox = Outbox()
        one = stream(outbox, window=window)
        for reported in (every, 2 * every):
            for _ in range(every - 1):
                one.consumed(1)
            assert await drain(outbox) == []
            one.consumed(1)
            assert await drain(outbox) == [("consumed", reported)]


@async_test
async def test_a_reader_waits_for_what_comes_and_a_cancelled_one_loses_nothing() -> None:
    """Updates come in order, whether the reader was there first or was cancelled before or just after one came."""
    one = stream(Outbox())
    reading = asyncio.create_task(one.next())
    await asyncio.sleep(0)
    assert not reading.done()
    one.push(tokens(1))
    one.push(tokens(2))
    assert (await reading).num_tokens == 1
    assert (await one.next()).num_tokens == 2
    for comes_first in (False, True):
        reading = asyncio.create_task(one.next())
        await asyncio.sleep(0)
        if comes_first:
            one.push(tokens(3))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert reading.cancelled()
        if not comes_first:
            one.push(tokens(3))
        assert (await one.next()).num_tokens == 3
