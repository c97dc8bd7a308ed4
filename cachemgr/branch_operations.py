"""The operations of a session on one running sequence: rollback, make_writable, commit. Protobuf in, protobuf out.

Invariant: an operation that is refused changed nothing. Called by the session service on the event loop; it holds no
state of its own.
"""

from __future__ import annotations

from cachemgr.ids import LeaseId, SessionId
from cachemgr.manager import CacheManager
from cachemgr.results import CopyPlan
from common.tokens import pack_tokens
from tessera.cache.v1 import cache_pb2


def rollback(
    manager: CacheManager, session: SessionId, request: cache_pb2.RollbackRequest, now_ns: int
) -> cache_pb2.SessionResponse:
    """Cut a sequence back to its first tokens."""
    lease = LeaseId(request.lease_id)
    plan = manager.rollback(session, lease, request.num_tokens, now_ns)
    return cache_pb2.SessionResponse(
        rollback=cache_pb2.RollbackResponse(
            blocks=pack_tokens(manager.block_table(session, lease)), copy=copy_message(plan)
        )
    )


def make_writable(
    manager: CacheManager, session: SessionId, request: cache_pb2.MakeWritableRequest, now_ns: int
) -> cache_pb2.SessionResponse:
    """Give the next token of a sequence a block of its own."""
    lease = LeaseId(request.lease_id)
    plan = manager.make_writable(session, lease, now_ns)
    return cache_pb2.SessionResponse(
        make_writable=cache_pb2.MakeWritableResponse(
            blocks=pack_tokens(manager.block_table(session, lease)), copy=copy_message(plan)
        )
    )


def commit(
    manager: CacheManager, session: SessionId, request: cache_pb2.CommitRequest, now_ns: int
) -> cache_pb2.SessionResponse:
    """Publish the first tokens of a sequence that goes on. Whole blocks were published as they were sealed; a partly
    filled one stays in the table, so that there is nothing to replace."""
    manager.commit(session, LeaseId(request.lease_id), request.num_tokens, now_ns)
    return cache_pb2.SessionResponse(commit=cache_pb2.CommitResponse())


def copy_message(plan: CopyPlan | None) -> cache_pb2.CopyPlan | None:
    """The message of a copy plan; None for none."""
    if plan is None:
        return None
    return cache_pb2.CopyPlan(source=plan.source, target=plan.target, num_tokens=plan.num_tokens)
