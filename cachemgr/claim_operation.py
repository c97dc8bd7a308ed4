"""Attach with a resume of a session of the daemon before this one: its memory is asked for, then what it holds claimed.

Invariant: only a decoder that the journal names, that proves its session by the resume token and the arena by its nonce
is heard; the tenant of each sequence comes from its grant, whose expiry does not matter here; what was purged by
a rotation of its tenant's secret is not published again. Protobuf in, protobuf out. Called by `service.py`.
"""

from __future__ import annotations

import contextlib
import hmac
from dataclasses import dataclass

from cachemgr.arena.handoff import Handoff
from cachemgr.claim_plans import Claim
from cachemgr.clocks import Clocks
from cachemgr.grants import GrantSigner
from cachemgr.ids import TenantId
from cachemgr.keys import derive_root
from cachemgr.links import Connection, Origin
from cachemgr.operations import MAX_PRIORITY, MAX_REQUEST_ID_CHARACTERS, MAX_SAMPLE, cache_key_of
from cachemgr.pool_owner import PoolOwner, draining_error
from cachemgr.results import ScopeSpan
from cachemgr.resume_operation import check_size, held_of, resumed_message
from cachemgr.scopes import resolve_prefix
from cachemgr.session_fields import (
    check_decoder,
    check_most,
    check_text,
    check_ttl,
    layout_of,
    pairs_of,
    unpack_blocks,
)
from cachemgr.sessions import Sessions
from cachemgr.succession import Orphan
from cachemgr.tenants import Tenants
from common.errors import FailedPrecondition, PermissionDenied, TesseraError
from common.layout import KvLayout
from tessera.cache.v1 import cache_pb2


@dataclass(frozen=True, slots=True)
class _Identity:
    """Whose a held sequence is; `may_store`: its tenant has the secret still that it had when it was admitted."""

    tenant: TenantId
    root: bytes
    prefix: ScopeSpan | None
    may_store: bool


@dataclass(frozen=True, slots=True)
class Proofs:
    """What shows whose a held sequence is."""

    tenants: Tenants
    signer: GrantSigner
    clocks: Clocks

    def identity_of(self, held: cache_pb2.HeldSequence, field: str) -> _Identity:
        """Whatever became of the grant or its key since. Raises Unauthenticated for a grant that was never one, or of a
        tenant that is gone; InvalidArgument."""
        grant = self.signer.verify(held.grant, self.clocks.steady_ns(), accepted_before=True)
        self.tenants.check_key(grant.tenant, grant.key_id, self.clocks.wall_ns(), admitted=True)
        key = cache_key_of(held.key, f"{field}.key")
        prefix = None
        if held.HasField("prefix"):
            with contextlib.suppress(PermissionDenied):
                prefix = resolve_prefix(self.tenants, grant.tenant, key, held.prefix, held.tokens, f"{field}.prefix")
        secret = self.tenants.secret(grant.tenant)
        return _Identity(grant.tenant, derive_root(secret, key), prefix, grant.mark == self.tenants.mark(grant.tenant))


def claim(
    owner: PoolOwner,
    sessions: Sessions,
    proofs: Proofs,
    handoff: Handoff,
    connection: Connection,
    request: cache_pb2.AttachRequest,
) -> cache_pb2.SessionResponse:
    """Answer a decoder of an orphaned arena. Raises FailedPrecondition, PermissionDenied, InvalidArgument, and
    Unavailable while the daemon is on its way out; then nothing has changed."""
    if owner.draining:
        raise draining_error()
    check_decoder(request)
    orphan = _orphan_of(owner, request)
    layout = layout_of(request.layout)
    owner.check_protocol(request.protocol_version)
    if layout.fingerprint() != orphan.journal.identity.layout_fingerprint:
        raise FailedPrecondition("the decoder's KV layout is not that of the arena it had", reason="LAYOUT_MISMATCH")
    if not orphan.adopted:
        orphan.layout = layout
        token = handoff.ask(request.process_id)
        return cache_pb2.SessionResponse(attach=cache_pb2.AttachResponse(arena_wanted=True, arena_token=token))
    wanted = request.resume
    check_size(wanted)
    claims = [_claim_of(proofs, message, number, layout) for number, message in enumerate(wanted.sequences)]
    credit = unpack_blocks(wanted.credit_blocks, "resume.credit_blocks")
    window_blocks = pairs_of(wanted.window_blocks, "resume.window_blocks")
    manager = owner.require()
    link = sessions.attach(connection, manager, request.decoder_name, request.process_id)
    sessions.holds_arena(link)
    try:
        done = manager.claim(link.session, claims, credit, proofs.clocks.steady_ns(), window_blocks)
    except TesseraError:
        sessions.take_back(link, connection)
        raise
    leases = {item.held.lease_id: lease for item, lease in zip(claims, done.leases, strict=True)}
    link.origin = Origin(wanted.epoch, wanted.session_id, wanted.resume_token, leases)
    for message in wanted.sequences:
        link.accepted_grants.add(message.grant)
    owner.heard(request.process_id, request.decoder_name)
    return resumed_message(owner, link, layout, done)


def _orphan_of(owner: PoolOwner, request: cache_pb2.AttachRequest) -> Orphan:
    orphan = owner.succession.orphan
    wanted = request.resume
    holder = None if orphan is None else orphan.holders.get((request.process_id, request.decoder_name))
    if orphan is None or holder is None or (request.process_id, request.decoder_name) not in orphan.waiting:
        raise FailedPrecondition("the session is over", reason="SESSION_OVER")
    if not holder.is_session(wanted.session_id, wanted.resume_token):
        raise PermissionDenied("the session is another decoder's, or the resume token is wrong")
    if not hmac.compare_digest(orphan.journal.identity.nonce, wanted.arena_nonce):
        raise FailedPrecondition("the decoder maps another arena than the one that is wanted", reason="ARENA_NONCE")
    return orphan


def _claim_of(proofs: Proofs, message: cache_pb2.HeldSequence, number: int, layout: KvLayout) -> Claim:
    """One held sequence; one whose grant proves nothing is to be refused, and its blocks are let go with care."""
    field = f"resume.sequences[{number}]"
    held = held_of(message, field, layout)
    check_text(f"{field}.request_id", message.request_id, MAX_REQUEST_ID_CHARACTERS)
    check_most(f"{field}.sample", message.sample, MAX_SAMPLE)
    check_most(f"{field}.priority", message.priority, MAX_PRIORITY)
    ttl_ns = check_ttl(f"{field}.ttl_seconds", message.ttl_seconds)
    try:
        found = proofs.identity_of(message, field)
    except TesseraError:
        return Claim(held, TenantId(""), b"", message.request_id, message.sample, valid=False)
    return Claim(
        held,
        found.tenant,
        found.root,
        message.request_id,
        message.sample,
        no_store=message.no_store or not found.may_store,
        priority=message.priority,
        ttl_ns=ttl_ns,
        prefix=found.prefix,
    )
