"""Protobuf of a report: what a decoder's step did, to the core's values, and the core's answer back.

Invariant: a sequence that is malformed loses its lease alone; columns that do not fit one another refuse the report
whole, before anything is changed. Called by `operations.py`; holds no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from struct import Struct
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
_SIGN: Final = slice(TOKEN_BYTES - 1, None, TOKEN_BYTES)  # of packed tokens: the bytes that have the sign


def sequence_reports(
    request: cache_pb2.ReportRequest, handles: Handles, drawn: dict[bytes, bytes]
) -> tuple[list[SequenceFields], Malformed]:
    """What the manager is told, and the leases whose report was malformed: those are released. A handle is drawn for
    each sequence to keep, into `drawn` by its name. Raises InvalidArgument."""
    malformed: Malformed = {}
    sequences = _from_columns(request.sealed, malformed) if request.HasField("sealed") else []
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


def _from_columns(columns: cache_pb2.SealColumns, malformed: Malformed) -> list[SequenceFields]:
    """The sequences of columns; those with a token or block that is none go to `malformed` and are released."""
    # A slice is a list, at a fifth of what `list` costs.
    leases, sealed, counts = columns.lease_ids[:], columns.sealed_tokens[:], columns.num_tokens[:]
    num_taken = columns.num_taken_blocks[:]
    tokens = columns.tokens
    if not len(leases) == len(sealed) == len(counts) or len(num_taken) not in (0, len(leases)):
        raise InvalidArgument("report.sealed", "its columns differ in length; allowed is one entry a sequence in each")
    if sum(counts) * TOKEN_BYTES != len(tokens):
        raise InvalidArgument("report.sealed.tokens", f"has {len(tokens)} bytes; num_tokens says {sum(counts)} tokens")
    taken, num_blocks = columns.taken_blocks, sum(num_taken)
    if num_blocks * TOKEN_BYTES != len(taken):
        raise InvalidArgument("report.sealed.taken_blocks", f"allowed is what num_taken_blocks says: {num_blocks}")
    if counts.count(1) == len(counts):
        pieces: Sequence[bytes] = _single_tokens(len(counts)).unpack(tokens)
    else:
        ends = [count * TOKEN_BYTES for count in accumulate(counts)]
        pieces = [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    nothing, no = repeat(NOTHING_TAKEN), repeat(False)
    # Plain tuples: named ones cost three times as much to make.
    sequences = list(zip(cast(list[LeaseId], leases), nothing, pieces, sealed, no, no, repeat(None), strict=False))
    if num_blocks:
        _give(sequences, num_taken, np.frombuffer(taken, np.int32))
    if not tokens[_SIGN].isascii() or (num_blocks and int(np.frombuffer(taken, np.int32).min()) < 1):
        _release_malformed(sequences, malformed)
    return sequences


@lru_cache(maxsize=128)
def _single_tokens(count: int) -> Struct:
    """Takes `count` packed tokens apart, as bytes: a third of the cost of slicing them."""
    return Struct(f"{TOKEN_BYTES}s" * count)


def _give(sequences: list[SequenceFields], num_taken: list[int], taken: BlockArray) -> None:
    place = 0
    for number, count in enumerate(num_taken):
        if count:
            lease, _, tokens, sealed, copied, release, keep = sequences[number]
            sequences[number] = (lease, taken[place : place + count], tokens, sealed, copied, release, keep)
            place += count


def _release_malformed(sequences: list[SequenceFields], malformed: Malformed) -> None:
    for number, fields in enumerate(sequences):
        sequence = SequenceReport._make(fields)
        try:
            check_tokens(sequence.tokens, f"report.sealed[{number}].tokens")
            unpack_blocks(sequence.taken_blocks.tobytes(), f"report.sealed[{number}].taken_blocks")
        except InvalidArgument as error:
            malformed[sequence.lease_id] = error
            sequences[number] = SequenceReport(sequence.lease_id, release=True)


def failure_of(error: TesseraError) -> cache_pb2.Failure:
    """The message of an error."""
    return cache_pb2.Failure(**failure_fields(error))


def report_message(done: Reported, malformed: Malformed, handles: dict[bytes, bytes]) -> cache_pb2.ReportResponse:
    """The answer; `handles` are those of what was kept, by name."""
    if not (done.replacements or done.refusals or done.kept or malformed):
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
            cache_pb2.KeptBranch(lease_id=item.lease_id, handle=handles[item.name], num_tokens=item.num_tokens)
            for item in done.kept
        ],
    )
