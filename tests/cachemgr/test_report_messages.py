"""A report on its way: what a decoder says is what the core is told, and what does not fit is refused alone."""

from __future__ import annotations

import random
from struct import pack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cachemgr.handles import Handles
from cachemgr.ids import LeaseId as CoreLease
from cachemgr.report_messages import lacking_leases, report_message, sequence_reports
from cachemgr.results import Growth, Reported
from cachemgr.results import SequenceReport as Told
from common.errors import InvalidArgument
from common.tokens import pack_tokens
from decoder.cache_api import Report, SequenceReport
from decoder.cache_api import Reported as DecoderReported
from decoder.cache_messages import Pending, event_of, request_of
from decoder.sequence import LeaseId
from tessera.cache.v1 import cache_pb2
from tessera.common.v1 import common_pb2

NOTHING = np.zeros(0, np.int32)


def read(message: cache_pb2.ReportRequest) -> tuple[list[Any], dict[Any, Any]]:
    handles: Handles = SimpleNamespace(draw=lambda: (b"handle", b"name"))  # type: ignore[assignment]
    told, malformed = sequence_reports(message, handles, {})
    return [Told._make(fields) for fields in told], malformed


def columns(**changes: Any) -> cache_pb2.ReportRequest:
    """A report of two sequences; lists of numbers are packed as the column of that name is."""
    values = {"lease_ids": [3, 4], "sealed_tokens": [5, 6], "num_tokens": [1, 2], "tokens": pack_tokens([7, 8, 9])}
    changes = {
        name: pack(f"<{len(value)}{'Q' if name == 'lease_ids' else 'I'}", *value) if isinstance(value, list) else value
        for name, value in {**values, **changes}.items()
    }
    return cache_pb2.ReportRequest(sealed=cache_pb2.SealColumns(**changes))


@pytest.mark.parametrize("seed", range(20))
def test_the_core_is_told_what_the_decoder_said(seed: int) -> None:
    """Whichever form a sequence takes on the wire, each of its fields arrives."""
    rng = random.Random(seed)
    said = [
        SequenceReport(
            LeaseId(number + 1),
            np.array([rng.randrange(1, 99) for _ in range(rng.choice((0, 0, 1, 3)))], np.int32),
            pack_tokens([rng.randrange(99) for _ in range(rng.randrange(4))]),
            rng.randrange(2**32),
            copied=rng.random() < 0.2,
            release=rng.random() < 0.2,
        )
        for number in range(rng.randrange(12))
    ]
    report = Report(tuple(said), NOTHING, 0, 0, 0, 0, applied_revision=0)
    message = request_of(report, 1, 0, common_pb2.CacheKey()).report
    told, malformed = read(message)
    assert not malformed
    assert len(message.sequences) == sum(item.copied or item.release for item in said)

    def fields(item: Any) -> tuple[Any, ...]:
        return (
            item.lease_id, item.taken_blocks.tolist(), item.tokens, item.sealed_tokens, item.copied, item.release
        )  # fmt: skip

    assert sorted(map(fields, told)) == sorted(map(fields, said))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lease_ids": b"\3"}, "report.sealed.lease_ids"),
        ({"sealed_tokens": [5]}, "report.sealed.sealed_tokens"),
        ({"sealed_tokens": b"\5\0\0\0\6"}, "report.sealed.sealed_tokens"),
        ({"num_tokens": [1, 2, 0]}, "report.sealed.num_tokens"),
        ({"num_tokens": [1, 1]}, "report.sealed.tokens"),
        ({"num_tokens": [1, 2**32 - 1]}, "report.sealed.tokens"),
        ({"num_tokens": []}, "report.sealed.tokens"),
        ({"num_tokens": [], "tokens": b""}, "report.sealed.tokens"),
        ({"tokens": b"\1"}, "report.sealed.tokens"),
        ({"takers": [1]}, "report.sealed.takers"),
        ({"takers": [1], "taken_blocks": b"\1"}, "report.sealed.taken_blocks"),
        ({"takers": [1], "taken_blocks": pack_tokens([1]) + b"\1"}, "report.sealed.taken_blocks"),
        ({"takers": [2], "taken_blocks": pack_tokens([1])}, "report.sealed.takers"),
        ({"takers": [1, 0], "taken_blocks": pack_tokens([1, 2])}, "report.sealed.takers"),
        ({"takers": [0, 1, 0], "taken_blocks": pack_tokens([1, 2, 3])}, "report.sealed.takers"),
        ({"taken_blocks": pack_tokens([1])}, "report.sealed.takers"),
    ],
)
def test_columns_that_do_not_fit_refuse_the_report(changes: dict[str, Any], field: str) -> None:
    """Nobody could say which sequence was meant, so nothing is done, and the field is named."""
    assert len(read(columns())[0]) == 2
    with pytest.raises(InvalidArgument) as refused:
        read(columns(**changes))
    assert refused.value.field == field


@pytest.mark.parametrize(
    "changes",
    [{"tokens": pack_tokens([7, -1, 9])}, {"takers": [0, 1, 1], "taken_blocks": pack_tokens([1, 0, 2])}],
)
def test_a_garbled_sequence_in_columns_loses_its_own_lease_alone(changes: dict[str, Any]) -> None:
    """A token or block that is none releases that sequence; its neighbour is told as it is."""
    told, malformed = read(columns(**changes))
    assert list(malformed) == [4]
    assert [(item.lease_id, item.release, item.sealed_tokens) for item in told] == [(3, False, 5), (4, True, 0)]


def test_one_token_each_needs_no_column() -> None:
    """No entry of num_tokens says one token of each, as entries of 1 do; a step of decoding sequences sends none."""
    said = tuple(SequenceReport(LeaseId(number), tokens=pack_tokens([number]), sealed_tokens=9) for number in (1, 2, 3))
    message = request_of(Report(said, NOTHING, 0, 0, 0, 0, applied_revision=0), 1, 0, common_pb2.CacheKey()).report
    assert not message.sealed.num_tokens
    told, malformed = read(message)
    assert [(item.lease_id, item.tokens) for item in told] == [(item.lease_id, item.tokens) for item in said]
    message.sealed.num_tokens = pack("<3I", 1, 1, 1)
    assert read(message) == (told, malformed)


def test_leases_that_lack_blocks_are_named_as_often_as_they_lack_one() -> None:
    """And what they are lent arrives under their leases; garbage in the list is refused by its name."""
    report = Report((), NOTHING, 3, 0, 0, 0, applied_revision=0, lacking=(LeaseId(7), LeaseId(7), LeaseId(2**40)))
    message = request_of(report, 1, 0, common_pb2.CacheKey()).report
    assert lacking_leases(message) == (7, 7, 2**40)
    assert lacking_leases(cache_pb2.ReportRequest()) == ()
    with pytest.raises(InvalidArgument) as refused:
        lacking_leases(cache_pb2.ReportRequest(lacking_leases=b"\7"))
    assert refused.value.field == "report.lacking_leases"
    grown = [Growth(CoreLease(7), np.array([3, 5], np.int32))]
    answer = report_message(Reported([], [], NOTHING, 4, grown=grown), {}, {})
    (told,) = event_of(cache_pb2.SessionResponse(revision=4, report=answer), Pending(type(report), wanted=3))
    assert isinstance(told, DecoderReported)
    assert [(item.lease, item.blocks.tolist()) for item in told.grown] == [(7, [3, 5])]
