"""Protobuf of a report: what a decoder's step did, to the core's values, and the core's answer back.

Invariant: a sequence that is malformed loses its lease alone; columns that do not fit one another refuse the report
whole, before anything is changed. Called by `operations.py`; holds no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from struct import Struct, calcsize, unpack
from typing import Final, cast

import numpy as np

from cachemgr.handles import Handles, keep_ns
from cachemgr.ids import BlockArray, LeaseId
from cachemgr.results import NOTHING_TAKEN, Keep, Reported, SequenceFields, SequenceReport
from cachemgr.session_fields import unpack_blocks
from common.errors import InvalidArgument, TesseraError
from common.interceptors import failure_fields
from common.layout import TOKEN_BYTES
from common.tokens import check_tokens, pack_tokens
from tessera.cache.v1 import cache_pb2

Malformed = dict[LeaseId, TesseraError]
_NONE_TAKEN: Final = repeat(NOTHING_TAKEN)
_NO, _NO_KEEP = repeat(False), repeat(None)
_LEASE_BYTES: Final = 8
_SIGN: Final = slice(TOKEN_BYTES - 1, None, TOKEN_BYTES)  # of packed tokens: the bytes that have the sign


def sequence_reports(
    request: cache_pb2.ReportRequest, handles: Handles, drawn: dict[bytes, bytes]
) -> tuple[Iterable[SequenceFields], Malformed]:
    """What the manager is told, to be gone through once, and the leases whose report was malformed: those are released.
    A handle is drawn for each sequence to keep, into `drawn` by its name. Raises InvalidArgument."""
    malformed: Malformed = {}
    columns = _from_columns(request.sealed, malformed) if request.HasField("sealed") else ()
    if not request.sequences:
        return columns, malformed
    sequences = list(columns)
    for number, message in enumerate(request.sequences):
        lease, tokens, taken = LeaseId(message.lease_id), message.tokens, NOTHING_TAKEN
        field = f"report.sequences[{number}]"
        try:
            if message.taken_blocks:
                taken = unpack_blocks(message.taken_blocks, f"{field}.taken_blocks")
            if tokens:
                check_tokens(tokens, f"{field}.tokens")
            keep = None
            if message.keep_seconds and message.release:
                ttl_ns = keep_ns(f"{field}.keep_seconds", message.keep_seconds)
                handle, name = handles.draw()
                drawn[name], keep = handle, Keep(name, ttl_ns)
        except InvalidArgument as error:
            malformed[lease] = error
            sequences.append(SequenceReport(lease, release=True))
            continue
        sequences.append(
            SequenceReport(lease, taken, tokens, message.sealed_tokens, message.copied, message.release, keep)
        )
    return sequences, malformed


def lacking_leases(request: cache_pb2.ReportRequest) -> tuple[LeaseId, ...]:
    """The leases of a report that stand still, each as often as it lacks a block. Raises InvalidArgument."""
    data = request.lacking_leases
    if not data:
        return ()
    leases = _numbers(f"<{len(data) // _LEASE_BYTES}Q", data, "report.lacking_leases")
    return cast("tuple[LeaseId, ...]", leases)


def _from_columns(columns: cache_pb2.SealColumns, malformed: Malformed) -> Iterable[SequenceFields]:
    """The sequences of columns; those with a token or block that is none go to `malformed` and are released."""
    num = len(columns.lease_ids) // _LEASE_BYTES
    leases = _numbers(f"<{num}Q", columns.lease_ids, "report.sealed.lease_ids")
    sealed, counts = _column(columns.sealed_tokens, num, "sealed_tokens"), columns.num_tokens
    tokens, taken = columns.tokens, columns.taken_blocks
    if counts:
        pieces = _pieces(tokens, _column(counts, num, "num_tokens"))
    elif len(tokens) == num * TOKEN_BYTES:
        pieces = _single_tokens(num).unpack(tokens)
    else:
        raise InvalidArgument("report.sealed.tokens", f"has {len(tokens)} bytes; there are {num} tokens, one of each")
    runs: Iterable[BlockArray] = _NONE_TAKEN
    if taken or columns.takers:
        if len(taken) % TOKEN_BYTES:
            raise InvalidArgument("report.sealed.taken_blocks", f"{len(taken)} bytes are no whole number of blocks")
        runs = _runs(num, _column(columns.takers, len(taken) // TOKEN_BYTES, "takers"), np.frombuffer(taken, np.int32))
    # Plain tuples, each made as it is taken apart again: named ones cost three times as much.
    sequences = zip(cast("tuple[LeaseId, ...]", leases), runs, pieces, sealed, _NO, _NO, _NO_KEEP, strict=False)
    if tokens[_SIGN].isascii() and (not taken or min(memoryview(taken).cast("i")) >= 1):
        return sequences
    return [_checked(number, fields, malformed) for number, fields in enumerate(sequences)]


def _numbers(form: str, data: bytes, name: str) -> tuple[int, ...]:
    """A packed column. Raises InvalidArgument where it is of another length than `form`."""
    if len(data) != calcsize(form):
        raise InvalidArgument(name, f"has {len(data)} bytes; allowed is one entry each, {form}")
    return unpack(form, data)


def _column(data: bytes, num: int, name: str) -> tuple[int, ...]:
    return _numbers(f"<{num}I", data, f"report.sealed.{name}")


def _pieces(tokens: bytes, counts: Sequence[int]) -> Sequence[bytes]:
    """The tokens of each sequence. Raises InvalidArgument where they are not so many."""
    ends = [count * TOKEN_BYTES for count in accumulate(counts)]
    if (ends[-1] if ends else 0) != len(tokens):
        raise InvalidArgument("report.sealed.tokens", f"has {len(tokens)} bytes; num_tokens says {sum(counts)} tokens")
    return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@lru_cache(maxsize=128)
def _single_tokens(count: int) -> Struct:
    """Takes `count` packed tokens apart, as bytes: a third of the cost of slicing them."""
    return Struct(f"{TOKEN_BYTES}s" * count)


def _runs(num: int, takers: Sequence[int], taken: BlockArray) -> list[BlockArray]:
    """The blocks that each of `num` sequences took. Raises InvalidArgument where a taker is none of them, or comes
    twice."""
    runs, first, last = [NOTHING_TAKEN] * num, 0, -1
    for end in range(1, len(takers) + 1):
        taker = takers[first]
        if end < len(takers) and takers[end] == taker:
            continue
        if not last < taker < num:
            raise InvalidArgument(
                "report.sealed.takers", f"has {taker} after {last}; allowed are {last + 1}..{num - 1}"
            )
        runs[taker] = taken[first:end]
        first, last = end, taker
    return runs


def _checked(number: int, fields: SequenceFields, malformed: Malformed) -> SequenceReport:
    sequence = SequenceReport._make(fields)
    try:
        check_tokens(sequence.tokens, f"report.sealed[{number}].tokens")
        unpack_blocks(sequence.taken_blocks.tobytes(), f"report.sealed[{number}].taken_blocks")
    except InvalidArgument as error:
        malformed[sequence.lease_id] = error
        return SequenceReport(sequence.lease_id, release=True)
    return sequence


def failure_of(error: TesseraError) -> cache_pb2.Failure:
    """The message of an error."""
    return cache_pb2.Failure(**failure_fields(error))


def report_message(done: Reported, malformed: Malformed, handles: dict[bytes, bytes]) -> cache_pb2.ReportResponse:
    """The answer; `handles` are those of what was kept, by name."""
    if not (done.replacements or done.refusals or done.kept or done.grown or malformed):
        return cache_pb2.ReportResponse()
    refused = {**{refusal.lease_id: refusal.error for refusal in done.refusals}, **malformed}
    return cache_pb2.ReportResponse(
        replacements=[
            cache_pb2.TableReplacement(
                lease_id=item.lease_id, first_index=item.first_index, blocks=pack_tokens(item.blocks)
            )
            for item in done.replacements
        ],
        refusals=[
            cache_pb2.SequenceRefusal(lease_id=lease, failure=failure_of(error)) for lease, error in refused.items()
        ],
        kept=[
            cache_pb2.KeptBranch(lease_id=item.lease_id, handle=handles.get(item.name, b""), num_tokens=item.num_tokens)
            for item in done.kept
        ],
        growths=[cache_pb2.Growth(lease_id=item.lease_id, blocks=pack_tokens(item.blocks)) for item in done.grown],
    )
