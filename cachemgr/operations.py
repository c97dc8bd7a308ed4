"""The operations of a session: protobuf in, one call of the cache manager, protobuf out; no other module converts.

Invariant: an operation is refused alone and changes nothing (a bad sequence of a report: that sequence alone); the
tenant comes from the verified grant and never from a field. Called by the session service on the event loop, one at
a time. It holds no state of its own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from cachemgr.branch_operations import copy_message
from cachemgr.clocks import Clocks
from cachemgr.grants import GrantSigner
from cachemgr.handles import Handles
from cachemgr.ids import BlockArray, LeaseId, SessionId, TenantId
from cachemgr.keys import CacheKey, Scope, derive_root
from cachemgr.manager import CacheManager
from cachemgr.report_messages import lacking_leases, report_message, sequence_reports
from cachemgr.results import NOTHING_TAKEN, ScopeSpan, Waiting
from cachemgr.scopes import check_owner, prefix_naming, resolve_prefix
from cachemgr.session_fields import check_most, check_text, check_ttl, unpack_blocks
from cachemgr.sessions import Sessions
from cachemgr.tenants import Tenants
from common.errors import InvalidArgument, PermissionDenied, ResourceExhausted
from common.tokens import pack_tokens, unpack_tokens
from tessera.cache.v1 import cache_pb2
from tessera.common.v1 import common_pb2

MAX_REQUEST_ID_CHARACTERS: Final = 128
MAX_PRIORITY: Final = 100
MAX_SAMPLE: Final = 2**16
MAX_BRANCHES: Final = 256
MAX_COUNT: Final = 2**40  # per message; keeps every counter within 64 bits for longer than any daemon lives
MAX_WANTED: Final = 2**31 - 2
SEEN_KEYS: Final = 64  # of models and adapters in use
MAX_SEEN_KEY_BYTES: Final = 4096


class Operations:
    """What a decoder may ask of the manager once it is attached."""

    def __init__(
        self, *, tenants: Tenants, signer: GrantSigner, sessions: Sessions, handles: Handles, clocks: Clocks
    ) -> None:
        self._tenants = tenants
        self._handles = handles
        self._signer = signer
        self._sessions = sessions
        self._clocks = clocks

    def acquire(
        self, manager: CacheManager, session: SessionId, request: cache_pb2.AcquireRequest
    ) -> cache_pb2.SessionResponse:
        """Lease the blocks of a prompt; on a full pool other sessions are asked for their unused credit."""
        tenant, key, root = self._tenant_and_root(session, request)
        tokens = request.tokens
        if not tokens and not request.base_handle:
            raise InvalidArgument("acquire.tokens", "is empty; a prompt has at least one token")
        unpack_tokens(tokens, "acquire.tokens")
        check_text("acquire.request_id", request.request_id, MAX_REQUEST_ID_CHARACTERS)
        check_most("acquire.sample", request.sample, MAX_SAMPLE)
        check_most("acquire.priority", request.priority, MAX_PRIORITY)
        ttl_ns = check_ttl("acquire.ttl_seconds", request.ttl_seconds)
        prefix = self._prefix(tenant, key, request)
        base = self._handles.name_of(request.base_handle) if request.base_handle else b""
        if base:
            check_owner(self._tenants, tenant, manager.kept_scope(tenant, base, now_ns=self._clocks.steady_ns()))
        try:
            acquired = manager.acquire(
                session,
                tenant=tenant,
                root=root,
                tokens=tokens,
                request_id=request.request_id,
                sample=request.sample,
                no_read=request.no_read,
                no_store=request.no_store,
                resumed=request.resumed,
                priority=request.priority,
                ttl_ns=ttl_ns,
                prefix=prefix,
                may_wait=request.may_wait,
                base=base,
                base_tokens=request.base_tokens,
                will_keep=request.will_keep,
                now_ns=self._clocks.steady_ns(),
            )
        except ResourceExhausted as error:
            if error.reason == "POOL_FULL":
                self._sessions.reclaim(session, error.needed - error.usable, from_asking=True)
            raise
        if isinstance(acquired, Waiting):
            waiting = cache_pb2.Waiting(
                wait_id=acquired.wait_id,
                resident_tokens=acquired.resident_tokens,
                coming_tokens=acquired.coming_tokens,
            )
            return cache_pb2.SessionResponse(acquire=cache_pb2.AcquireResponse(tenant=tenant, waiting=waiting))
        span, base_prefix = acquired.base_span, None
        if span is not None:
            whole = acquired.base_tokens + tokens
            base_prefix = prefix_naming(self._tenants, span, whole, manager.block_tokens)
        return cache_pb2.SessionResponse(
            acquire=cache_pb2.AcquireResponse(
                lease_id=acquired.lease_id,
                blocks=pack_tokens(acquired.blocks),
                cached_tokens=acquired.cached_tokens,
                copy=copy_message(acquired.copy),
                tenant=tenant,
                base_tokens=acquired.base_tokens,
                base_prefix=base_prefix,
            )
        )

    def report(
        self,
        manager: CacheManager,
        session: SessionId,
        request: cache_pb2.ReportRequest,
        applied_revision: int,
    ) -> cache_pb2.SessionResponse:
        """Take what a step did; sequences that are malformed lose their lease, the others are done."""
        raw = request.returned_blocks
        returned = unpack_blocks(raw, "report.returned_blocks") if raw else NOTHING_TAKEN
        generated, preemptions = request.generated_tokens, request.preemptions
        check_most("report.generated_tokens", generated, MAX_COUNT)
        check_most("report.preemptions", preemptions, MAX_COUNT)
        wanted = min(request.wanted_blocks, MAX_WANTED)
        handles: dict[bytes, bytes] = {}  # by name; most reports keep nothing
        sequences, malformed = sequence_reports(request, self._handles, handles)
        done = manager.report(
            session,
            sequences,
            returned=returned,
            wanted=wanted,
            lacking=lacking_leases(request),
            generated_tokens=generated,
            preemptions=preemptions,
            queued=request.queued_requests,
            applied_revision=applied_revision,
            now_ns=self._clocks.steady_ns(),
        )
        self._sessions.reported(session)
        self._relieve(session, wanted, done.credit)
        return cache_pb2.SessionResponse(
            revision=done.revision, credit=pack_tokens(done.credit), report=report_message(done, malformed, handles)
        )

    def fork(
        self, manager: CacheManager, session: SessionId, request: cache_pb2.ForkRequest
    ) -> cache_pb2.SessionResponse:
        """Make branches of a sequence: all of them, or none where there is no room."""
        if not 1 <= len(request.samples) <= MAX_BRANCHES:
            raise InvalidArgument("fork.samples", f"has {len(request.samples)} entries; allowed are 1..{MAX_BRANCHES}")
        for sample in request.samples:
            check_most("fork.samples", sample, MAX_SAMPLE)
        branches = manager.fork(
            session, LeaseId(request.lease_id), list(request.samples), request.num_tokens, self._clocks.steady_ns()
        )
        return cache_pb2.SessionResponse(
            fork=cache_pb2.ForkResponse(
                branches=[
                    cache_pb2.Branch(
                        lease_id=branch.lease_id, blocks=pack_tokens(branch.blocks), copy=copy_message(branch.copy)
                    )
                    for branch in branches
                ]
            )
        )

    def credit(
        self, manager: CacheManager, session: SessionId, request: cache_pb2.CreditRequest
    ) -> cache_pb2.SessionResponse:
        """Hand blocks out ahead of need, as many of the wanted as can be had."""
        wanted = min(request.wanted_blocks, MAX_WANTED)
        granted = manager.credit(session, wanted, self._clocks.steady_ns())
        self._relieve(session, wanted, granted)
        return cache_pb2.SessionResponse(
            credit=pack_tokens(granted), credit_granted=cache_pb2.CreditResponse(granted_blocks=granted.size)
        )

    def _relieve(self, session: SessionId, wanted: int, granted: BlockArray) -> None:
        """A session that got nothing at all shall not starve on what others hold unused."""
        if wanted and not granted.size:
            self._sessions.reclaim(session, wanted, from_asking=False)

    def _prefix(self, tenant: TenantId, key: CacheKey, request: cache_pb2.AcquireRequest) -> ScopeSpan | None:
        """Where the first tokens lie. A request that was admitted before goes on privately where it may no longer."""
        if not request.HasField("prefix"):
            return None
        if request.base_handle:  # its first tokens are those of the branch, which nothing here has looked at
            raise InvalidArgument(
                "acquire.prefix", "a kept branch goes on in the scope that it was begun in; allowed is none"
            )
        try:
            return resolve_prefix(self._tenants, tenant, key, request.prefix, request.tokens, "acquire.prefix")
        except PermissionDenied:
            if request.resumed:
                return None
            raise

    def _tenant_and_root(
        self, session: SessionId, request: cache_pb2.AcquireRequest
    ) -> tuple[TenantId, CacheKey, bytes]:
        """Who asks, proven by the grant and a key that still counts; the cache key, and the root of the tree to use.

        A request that was admitted before goes on, whatever became of its grant or key since.
        """
        accepted = self._sessions.accepted_grants(session)
        resumed = request.resumed and request.grant in accepted
        grant = self._signer.verify(request.grant, self._clocks.steady_ns(), accepted_before=resumed)
        self._tenants.check_key(grant.tenant, grant.key_id, self._clocks.wall_ns(), admitted=resumed)
        accepted.add(request.grant)
        key = cache_key_of(request.key)
        self._tenants.seen_keys.note(grant.tenant, key)
        return grant.tenant, key, derive_root(self._tenants.secret(grant.tenant), key)


def cache_key_of(message: common_pb2.CacheKey, field: str = "acquire.key") -> CacheKey:
    """The key of a request, in the private scope. Raises InvalidArgument."""
    if message.scope not in (common_pb2.SCOPE_UNSPECIFIED, common_pb2.SCOPE_PRIVATE):
        raise InvalidArgument(f"{field}.scope", "allowed is the private scope; acquire.prefix names a wider one")
    encoded = message.SerializeToString()
    return _seen_key(encoded) if len(encoded) <= MAX_SEEN_KEY_BYTES else _checked_key(encoded)


def _checked_key(encoded: bytes) -> CacheKey:
    message = common_pb2.CacheKey.FromString(encoded)
    return CacheKey(
        weights_digest=message.weights_digest,
        revision=message.revision,
        adapter_digest=message.adapter_digest,
        tokenizer_digest=message.tokenizer_digest,
        position_digest=message.position_digest,
        attention_digest=message.attention_digest,
        kv_dtype=message.kv_dtype,
        kv_quantization=message.kv_quantization,
        layout_version=message.layout_version,
        multimodal_digests=tuple(message.multimodal_digests),
        scope=Scope.PRIVATE,
        scope_name=message.scope_name,
    )


# Every request of a model brings the same key; to find it takes a tenth of checking its fields again.
_seen_key = lru_cache(maxsize=SEEN_KEYS)(_checked_key)
