"""Protobuf of the cache session: commands to requests, responses to events. One conversion each way, and nothing else.

Invariant: every field of a response is looked at here, so that the rest of the decoder sees typed values alone. Called
by the cache client; holds no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack
from typing import Final, Self

import numpy as np

from common.errors import Internal, TesseraError
from common.interceptors import code_of, make_error
from common.layout import TOKEN_BYTES, KvLayout
from common.tokens import pack_tokens, unpack_tokens
from decoder.cache_api import (
    AbortAsked,
    AbortDone,
    Acquire,
    Acquired,
    AcquireRefused,
    AcquireWaiting,
    Branch,
    Command,
    CreditGranted,
    CreditReclaimed,
    Event,
    Fork,
    Forked,
    Growth,
    Heartbeat,
    Kept,
    PrefixReady,
    Replacement,
    Report,
    Reported,
    Scrub,
    SequenceReport,
    WindowBlocksNamed,
)
from decoder.sequence import CopyPlan, IntArray, LeaseId, ScopePrefix, SequenceId
from tessera.cache.v1 import cache_pb2
from tessera.common.v1 import common_pb2

_NO_BLOCKS: Final = np.zeros(0, np.int32)
_NO_BLOCKS.setflags(write=False)


@dataclass(frozen=True, slots=True)
class Pending:
    """What has to be remembered of a command until its answer."""

    kind: type[object]
    sequence_id: SequenceId | None = None
    wanted: int = 0

    @classmethod
    def of(cls, command: Command) -> Self:
        """Of a command that is being sent."""
        match command:
            case Acquire() | Fork():
                return cls(type(command), sequence_id=command.sequence_id)
            case Report():
                return cls(Report, wanted=command.wanted)
            case AbortDone() | Heartbeat():
                return cls(type(command))


def layout_message(layout: KvLayout) -> common_pb2.KvLayout:
    """The layout of an attach."""
    return common_pb2.KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
        dtype=layout.dtype.value,
        quantization=layout.quantization,
        version=layout.version,
        window_tokens=layout.window_tokens,
        window_layers=layout.window_layers,
        window_share=layout.window_share if layout.grouped else 0,
    )


def request_of(
    command: Command, sequence: int, applied_revision: int, key: common_pb2.CacheKey
) -> cache_pb2.SessionRequest:
    """The request of a command."""
    request = cache_pb2.SessionRequest(sequence=sequence, applied_revision=applied_revision)
    match command:
        case Acquire():
            request.acquire.CopyFrom(
                cache_pb2.AcquireRequest(
                    grant=command.grant,
                    key=key_with_adapter(key, command.adapter_digest),
                    tokens=command.tokens,
                    request_id=command.request_id,
                    sample=command.sample,
                    no_read=command.no_read,
                    no_store=command.no_store,
                    resumed=command.resumed,
                    priority=command.priority,
                    ttl_seconds=command.ttl_seconds,
                    prefix=scope_message(command.scope),
                    may_wait=command.may_wait,
                    base_handle=command.base_handle,
                    base_tokens=command.base_tokens,
                    will_keep=command.will_keep,
                )
            )
        case Report():
            _fill_report(request.report, command)
        case Fork():
            request.fork.CopyFrom(
                cache_pb2.ForkRequest(lease_id=command.lease, samples=command.samples, num_tokens=command.num_tokens)
            )
        case Heartbeat():
            request.heartbeat.SetInParent()
        case AbortDone():
            request.abort_result.CopyFrom(cache_pb2.AbortResult(abort_id=command.abort_id, found=command.found))
    return request


def key_with_adapter(key: common_pb2.CacheKey, digest: bytes) -> common_pb2.CacheKey:
    """The key of a model's requests, for those with the adapter of that content; empty: none."""
    if not digest:
        return key
    adapted = common_pb2.CacheKey(adapter_digest=digest)
    adapted.MergeFrom(key)
    return adapted


def scope_message(scope: ScopePrefix | None) -> common_pb2.ScopePrefix | None:
    """The prefix of an acquire or of a held sequence."""
    if scope is None:
        return None
    kind = common_pb2.SCOPE_GROUP if scope.group else common_pb2.SCOPE_PUBLIC
    return common_pb2.ScopePrefix(scope=kind, group=scope.group, num_tokens=scope.num_tokens)


def _scope(prefix: common_pb2.ScopePrefix) -> ScopePrefix:
    return ScopePrefix(prefix.group, prefix.num_tokens)


def event_of(response: cache_pb2.SessionResponse, pending: Pending | None) -> list[Event]:
    """The events of a response; `pending` is the command that it answers, None for a push.

    Raises Internal where the answer is of another kind than the command, or names half a pair.
    """
    result = response.WhichOneof("result")
    events: list[Event] = window_events(response)
    if response.scrub or response.window_scrub:
        events.append(Scrub(_blocks(response.scrub), _blocks(response.window_scrub)))
    if pending is not None and pending.kind is Report and result == "report":
        return [*events, _reported(response, pending)]
    if response.credit:
        events.append(CreditGranted(_blocks(response.credit)))
    if pending is None:
        if result == "abort":
            events.append(AbortAsked(response.abort.abort_id, response.abort.request_id))
        elif result == "reclaim":
            events.append(CreditReclaimed(response.reclaim.num_blocks))
        elif result == "prefix_ready":
            events.append(PrefixReady(response.prefix_ready.wait_id))
        return events
    sequence_id = pending.sequence_id
    if sequence_id is None:
        return events  # an abort's result and a heartbeat are answered with nothing to tell
    if pending.kind is Acquire and result == "acquire":
        answer = response.acquire
        if answer.HasField("waiting"):
            return [*events, AcquireWaiting(sequence_id, answer.waiting.wait_id, answer.waiting.resident_tokens)]
        plan = _plan(answer.copy) if answer.HasField("copy") else None
        lease = LeaseId(answer.lease_id)
        base, blocks = _blocks(answer.base_tokens), _blocks(answer.blocks)
        scope = _scope(answer.base_prefix) if answer.HasField("base_prefix") else None
        events.append(Acquired(sequence_id, lease, blocks, answer.cached_tokens, plan, base, scope))
    elif pending.kind is Fork and result == "fork":
        branches = tuple(_branch(branch) for branch in response.fork.branches)
        events.append(Forked(sequence_id, branches))
    elif result == "failure":
        error = failure_error(response.failure)
        events.append(AcquireRefused(sequence_id, error) if pending.kind is Acquire else Forked(sequence_id, ()))
    else:
        raise Internal("the cache manager's answer is of another kind than the operation", reason="ANSWER_KIND")
    return events


def window_events(response: cache_pb2.SessionResponse) -> list[Event]:
    """What a response says of window blocks, to be heard before the rest. Raises Internal on half a pair."""
    if not response.window_blocks:
        return []
    numbers = _blocks(response.window_blocks)
    if len(numbers) % 2:
        raise Internal("the cache manager's answer names half a pair of blocks", reason="ANSWER_KIND")
    return [WindowBlocksNamed(numbers.reshape(-1, 2))]


def failure_error(failure: cache_pb2.Failure) -> TesseraError:
    """The typed error of a failure."""
    return make_error(code_of(failure.code), failure.message, reason=failure.reason, metadata=dict(failure.metadata))


def _fill_report(message: cache_pb2.ReportRequest, command: Report) -> None:
    """What is only sealed goes into columns. The daemon takes those first, whatever the order was: a report names each
    lease once."""
    sealed: Sequence[SequenceReport] = command.sequences
    more = [item for item in sealed if item.copied or item.release or item.keep_seconds]
    if more:
        message.sequences.extend([_sequence_report(item) for item in more])
        sealed = [item for item in sealed if not (item.copied or item.release or item.keep_seconds)]
    if sealed:
        _fill_columns(message.sealed, sealed)
    if len(command.returned):
        message.returned_blocks = pack_tokens(command.returned)
    message.wanted_blocks = command.wanted
    message.generated_tokens = command.generated_tokens
    message.preemptions = command.preemptions
    message.queued_requests = command.queued
    if command.lacking:
        message.lacking_leases = pack(f"<{len(command.lacking)}Q", *command.lacking)


def _fill_columns(columns: cache_pb2.SealColumns, sealed: Sequence[SequenceReport]) -> None:
    num, tokens, counts = len(sealed), [item.tokens for item in sealed], [len(item.taken_blocks) for item in sealed]
    columns.lease_ids = pack(f"<{num}Q", *[item.lease_id for item in sealed])
    columns.sealed_tokens = pack(f"<{num}I", *[item.sealed_tokens for item in sealed])
    columns.tokens = b"".join(tokens)
    num_bytes = list(map(len, tokens))
    if num_bytes.count(TOKEN_BYTES) != num:  # no entry says one token each
        columns.num_tokens = pack(f"<{num}I", *[size // TOKEN_BYTES for size in num_bytes])
    takers = [place for place, count in enumerate(counts) if count]
    if takers:
        columns.taken_blocks = b"".join([pack_tokens(sealed[place].taken_blocks) for place in takers])
        if sum(counts) > len(takers):
            takers = [place for place in takers for _ in range(counts[place])]
        columns.takers = pack(f"<{len(takers)}I", *takers)


def _sequence_report(item: SequenceReport) -> cache_pb2.SequenceReport:
    return cache_pb2.SequenceReport(
        lease_id=item.lease_id,
        taken_blocks=pack_tokens(item.taken_blocks),
        tokens=item.tokens,
        sealed_tokens=item.sealed_tokens,
        copied=item.copied,
        release=item.release,
        keep_seconds=item.keep_seconds,
    )


def _reported(response: cache_pb2.SessionResponse, pending: Pending) -> Reported:
    answer = response.report
    return Reported(
        wanted=pending.wanted,
        granted=_blocks(response.credit),
        replacements=tuple(
            Replacement(LeaseId(item.lease_id), item.first_index, _blocks(item.blocks)) for item in answer.replacements
        ),
        refused=tuple((LeaseId(item.lease_id), failure_error(item.failure)) for item in answer.refusals),
        revision=response.revision,
        kept=tuple(Kept(LeaseId(item.lease_id), item.handle, item.num_tokens) for item in answer.kept),
        grown=tuple(Growth(LeaseId(item.lease_id), _blocks(item.blocks)) for item in answer.growths),
    )


def _branch(branch: cache_pb2.Branch) -> Branch:
    plan = _plan(branch.copy) if branch.HasField("copy") else None
    return Branch(LeaseId(branch.lease_id), _blocks(branch.blocks), plan)


def _plan(plan: cache_pb2.CopyPlan) -> CopyPlan:
    return CopyPlan(plan.source, plan.target, plan.num_tokens)


def _blocks(data: bytes) -> IntArray:
    if not data:
        return _NO_BLOCKS
    return unpack_tokens(data, "blocks").astype(np.int32)
