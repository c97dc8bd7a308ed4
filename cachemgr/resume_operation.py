"""Attach with a resume: whose session it is, what its decoder holds, and the answer. Protobuf in, protobuf out.

Invariant: a session is gone on with only by the process that proves it by its token and by the arena's nonce, as read
through its mapping, and only in the epoch that it began in or, until its decoder has reported, as the older one that it
was claimed for; a refusal changes nothing. Called by `service.py`.
"""

from __future__ import annotations

import hmac
from typing import Final

from cachemgr.clocks import Clocks
from cachemgr.ids import LeaseId, SessionId
from cachemgr.links import Connection, Link
from cachemgr.pool_owner import PoolOwner, draining_error
from cachemgr.results import CopyPlan
from cachemgr.resuming import Held, Resumed, renamed
from cachemgr.session_fields import check_most, unpack_blocks
from cachemgr.sessions import Sessions
from cachemgr.window_messages import name_all
from common.errors import FailedPrecondition
from common.layout import KvLayout
from common.tokens import pack_tokens, unpack_tokens
from tessera.cache.v1 import cache_pb2

MAX_HELD: Final = 65_536


def resume(
    owner: PoolOwner,
    sessions: Sessions,
    clocks: Clocks,
    connection: Connection,
    request: cache_pb2.AttachRequest,
    layout: KvLayout,
) -> cache_pb2.SessionResponse:
    """Go on with a session on another stream. Raises FailedPrecondition, PermissionDenied, InvalidArgument, and
    Unavailable while the daemon is on its way out."""
    if owner.draining:
        raise draining_error()
    wanted = request.resume
    link = sessions.claim(
        SessionId(wanted.session_id), wanted.epoch, wanted.resume_token, request.decoder_name, request.process_id
    )
    manager = owner.settle(request.protocol_version, layout)
    if not hmac.compare_digest(owner.arena_nonce, wanted.arena_nonce):
        sessions.count_fenced()
        raise FailedPrecondition("the decoder maps another arena than this daemon's", reason="ARENA_NONCE")
    check_size(wanted)
    held = [held_of(message, f"resume.sequences[{number}]", layout) for number, message in enumerate(wanted.sequences)]
    if link.origin is not None and wanted.epoch != owner.epoch:
        held = renamed(held, link.origin.leases)
    credit = unpack_blocks(wanted.credit_blocks, "resume.credit_blocks")
    done = manager.resume(link.session, held, credit, clocks.steady_ns())
    sessions.reconnect(link, connection)
    return resumed_message(owner, link, layout, done)


def check_size(resume: cache_pb2.SessionResume) -> None:
    """Raises InvalidArgument where a decoder lists more sequences than any could hold."""
    check_most("resume.sequences", len(resume.sequences), MAX_HELD)


def resumed_message(owner: PoolOwner, link: Link, layout: KvLayout, done: Resumed) -> cache_pb2.SessionResponse:
    """The answer that a session goes on, with the window blocks of all that it holds."""
    response = cache_pb2.SessionResponse(
        revision=done.revision,
        attach=cache_pb2.AttachResponse(
            session_id=link.session,
            num_blocks=owner.num_blocks,
            layout_fingerprint=layout.fingerprint(),
            resume_token=link.resume_token,
            lease_seconds=owner.lease_seconds,
            grace_seconds=owner.grace_seconds,
            resumed=True,
            leases=done.leases,
            replacements=[
                cache_pb2.TableReplacement(
                    lease_id=item.lease_id, first_index=item.first_index, blocks=pack_tokens(item.blocks)
                )
                for item in done.replacements
            ],
        ),
    )
    name_all(owner.require(), response, link.session)
    return response


def held_of(message: cache_pb2.HeldSequence, field: str, layout: KvLayout) -> Held:
    """A held sequence. Raises InvalidArgument, naming the field. Where layers have windows its table may have null
    blocks: the manager knows where."""
    unpack_tokens(message.tokens, f"{field}.tokens")
    unpack = unpack_tokens if layout.window_tokens else unpack_blocks
    plan = message.copy
    return Held(
        lease_id=LeaseId(message.lease_id),
        tokens=message.tokens,
        blocks=unpack(message.blocks, f"{field}.blocks"),
        sealed_tokens=message.sealed_tokens,
        copy=CopyPlan(plan.source, plan.target, plan.num_tokens) if message.HasField("copy") else None,
    )
