"""Protobuf of attaching and of coming back: the attach request with what is held, and what its answer says.

Invariant: a resume names the session that broke, proves it by its token, and lists every sequence whole. Called by the
cache client; holds no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.errors import Internal
from common.tokens import pack_tokens, unpack_tokens
from decoder.arena_view import MappedArena
from decoder.cache_api import Replacement, Resumed
from decoder.cache_messages import key_with_adapter, scope_message
from decoder.holdings import Held, Holdings
from decoder.sequence import LeaseId
from tessera.cache.v1 import cache_pb2
from tessera.common.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class SessionProof:
    """What a later stream needs to go on with a session; `memory` is its arena."""

    session: int
    epoch: int
    resume_token: bytes
    memory: MappedArena


def resume_message(proof: SessionProof, holdings: Holdings, key: common_pb2.CacheKey) -> cache_pb2.SessionResume:
    """The `resume` of an attach. Raises FailedPrecondition where the memory cannot be read any more."""
    return cache_pb2.SessionResume(
        session_id=proof.session,
        epoch=proof.epoch,
        resume_token=proof.resume_token,
        arena_nonce=proof.memory.read_nonce(),
        sequences=[_held_message(held, key) for held in holdings.sequences],
        credit_blocks=pack_tokens(holdings.credit),
        window_blocks=pack_tokens(holdings.window_blocks.reshape(-1)),
    )


def resumed_event(answer: cache_pb2.AttachResponse, revision: int, holdings: Holdings) -> Resumed:
    """The event of an answer that says that the session goes on. Raises Internal where it does not fit the request."""
    if len(answer.leases) != len(holdings.sequences):
        raise Internal("the cache manager did not answer for every held sequence", reason="ANSWER_KIND")
    return Resumed(
        session=answer.session_id,
        leases={
            held.lease_id: LeaseId(lease)
            for held, lease in zip(holdings.sequences, answer.leases, strict=True)
            if lease
        },
        replacements=tuple(
            Replacement(LeaseId(item.lease_id), item.first_index, unpack_tokens(item.blocks, "blocks").astype(np.int32))
            for item in answer.replacements
        ),
        revision=revision,
    )


def _held_message(held: Held, key: common_pb2.CacheKey) -> cache_pb2.HeldSequence:
    message = cache_pb2.HeldSequence(
        lease_id=held.lease_id,
        grant=held.grant,
        key=key_with_adapter(key, held.adapter_digest),
        tokens=held.tokens,
        blocks=pack_tokens(held.blocks),
        sealed_tokens=held.sealed_tokens,
        request_id=held.request_id,
        sample=held.sample,
        no_store=held.no_store,
        priority=held.priority,
        ttl_seconds=held.ttl_seconds,
        prefix=scope_message(held.scope),
    )
    if held.copy is not None:
        plan = held.copy
        message.copy.CopyFrom(cache_pb2.CopyPlan(source=plan.source, target=plan.target, num_tokens=plan.num_tokens))
    return message
