from tessera.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ForkBranchRequest(_message.Message):
    __slots__ = ("grant", "handle", "count", "ttl_seconds")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    grant: bytes
    handle: bytes
    count: int
    ttl_seconds: float
    def __init__(self, grant: _Optional[bytes] = ..., handle: _Optional[bytes] = ..., count: _Optional[int] = ..., ttl_seconds: _Optional[float] = ...) -> None: ...

class ForkBranchResponse(_message.Message):
    __slots__ = ("handles", "num_tokens")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[bytes]
    num_tokens: int
    def __init__(self, handles: _Optional[_Iterable[bytes]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class RollbackBranchRequest(_message.Message):
    __slots__ = ("grant", "handle", "num_tokens")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    grant: bytes
    handle: bytes
    num_tokens: int
    def __init__(self, grant: _Optional[bytes] = ..., handle: _Optional[bytes] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class RollbackBranchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropBranchRequest(_message.Message):
    __slots__ = ("grant", "handle")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    grant: bytes
    handle: bytes
    def __init__(self, grant: _Optional[bytes] = ..., handle: _Optional[bytes] = ...) -> None: ...

class DropBranchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuthenticateRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class AuthenticateResponse(_message.Message):
    __slots__ = ("tenant", "grant", "expires_in_seconds", "weight")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    grant: bytes
    expires_in_seconds: float
    weight: float
    def __init__(self, tenant: _Optional[str] = ..., grant: _Optional[bytes] = ..., expires_in_seconds: _Optional[float] = ..., weight: _Optional[float] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("sequence", "applied_revision", "attach", "acquire", "report", "fork", "credit", "abort_result", "heartbeat", "rollback", "make_writable", "commit")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    APPLIED_REVISION_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_RESULT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    MAKE_WRITABLE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    applied_revision: int
    attach: AttachRequest
    acquire: AcquireRequest
    report: ReportRequest
    fork: ForkRequest
    credit: CreditRequest
    abort_result: AbortResult
    heartbeat: HeartbeatRequest
    rollback: RollbackRequest
    make_writable: MakeWritableRequest
    commit: CommitRequest
    def __init__(self, sequence: _Optional[int] = ..., applied_revision: _Optional[int] = ..., attach: _Optional[_Union[AttachRequest, _Mapping]] = ..., acquire: _Optional[_Union[AcquireRequest, _Mapping]] = ..., report: _Optional[_Union[ReportRequest, _Mapping]] = ..., fork: _Optional[_Union[ForkRequest, _Mapping]] = ..., credit: _Optional[_Union[CreditRequest, _Mapping]] = ..., abort_result: _Optional[_Union[AbortResult, _Mapping]] = ..., heartbeat: _Optional[_Union[HeartbeatRequest, _Mapping]] = ..., rollback: _Optional[_Union[RollbackRequest, _Mapping]] = ..., make_writable: _Optional[_Union[MakeWritableRequest, _Mapping]] = ..., commit: _Optional[_Union[CommitRequest, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("sequence", "revision", "epoch", "credit", "attach", "acquire", "report", "fork", "credit_granted", "failure", "abort", "reclaim", "heartbeat", "rollback", "make_writable", "commit", "prefix_ready", "scrub", "window_blocks", "window_scrub")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    CREDIT_GRANTED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RECLAIM_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    MAKE_WRITABLE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_READY_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_SCRUB_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    revision: int
    epoch: int
    credit: bytes
    attach: AttachResponse
    acquire: AcquireResponse
    report: ReportResponse
    fork: ForkResponse
    credit_granted: CreditResponse
    failure: Failure
    abort: AbortPush
    reclaim: ReclaimPush
    heartbeat: HeartbeatResponse
    rollback: RollbackResponse
    make_writable: MakeWritableResponse
    commit: CommitResponse
    prefix_ready: PrefixReadyPush
    scrub: bytes
    window_blocks: bytes
    window_scrub: bytes
    def __init__(self, sequence: _Optional[int] = ..., revision: _Optional[int] = ..., epoch: _Optional[int] = ..., credit: _Optional[bytes] = ..., attach: _Optional[_Union[AttachResponse, _Mapping]] = ..., acquire: _Optional[_Union[AcquireResponse, _Mapping]] = ..., report: _Optional[_Union[ReportResponse, _Mapping]] = ..., fork: _Optional[_Union[ForkResponse, _Mapping]] = ..., credit_granted: _Optional[_Union[CreditResponse, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., abort: _Optional[_Union[AbortPush, _Mapping]] = ..., reclaim: _Optional[_Union[ReclaimPush, _Mapping]] = ..., heartbeat: _Optional[_Union[HeartbeatResponse, _Mapping]] = ..., rollback: _Optional[_Union[RollbackResponse, _Mapping]] = ..., make_writable: _Optional[_Union[MakeWritableResponse, _Mapping]] = ..., commit: _Optional[_Union[CommitResponse, _Mapping]] = ..., prefix_ready: _Optional[_Union[PrefixReadyPush, _Mapping]] = ..., scrub: _Optional[bytes] = ..., window_blocks: _Optional[bytes] = ..., window_scrub: _Optional[bytes] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "reason", "message", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("protocol_version", "decoder_name", "layout", "process_id", "resume", "sent_ns")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DECODER_NAME_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    decoder_name: str
    layout: _common_pb2.KvLayout
    process_id: int
    resume: SessionResume
    sent_ns: int
    def __init__(self, protocol_version: _Optional[int] = ..., decoder_name: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ..., process_id: _Optional[int] = ..., resume: _Optional[_Union[SessionResume, _Mapping]] = ..., sent_ns: _Optional[int] = ...) -> None: ...

class SessionResume(_message.Message):
    __slots__ = ("session_id", "epoch", "resume_token", "arena_nonce", "sequences", "credit_blocks", "window_blocks")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ARENA_NONCE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    epoch: int
    resume_token: bytes
    arena_nonce: bytes
    sequences: _containers.RepeatedCompositeFieldContainer[HeldSequence]
    credit_blocks: bytes
    window_blocks: bytes
    def __init__(self, session_id: _Optional[int] = ..., epoch: _Optional[int] = ..., resume_token: _Optional[bytes] = ..., arena_nonce: _Optional[bytes] = ..., sequences: _Optional[_Iterable[_Union[HeldSequence, _Mapping]]] = ..., credit_blocks: _Optional[bytes] = ..., window_blocks: _Optional[bytes] = ...) -> None: ...

class HeldSequence(_message.Message):
    __slots__ = ("lease_id", "grant", "key", "prefix", "tokens", "blocks", "sealed_tokens", "copy", "request_id", "sample", "no_store", "priority", "ttl_seconds")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEALED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    NO_STORE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    grant: bytes
    key: _common_pb2.CacheKey
    prefix: _common_pb2.ScopePrefix
    tokens: bytes
    blocks: bytes
    sealed_tokens: int
    copy: CopyPlan
    request_id: str
    sample: int
    no_store: bool
    priority: int
    ttl_seconds: float
    def __init__(self, lease_id: _Optional[int] = ..., grant: _Optional[bytes] = ..., key: _Optional[_Union[_common_pb2.CacheKey, _Mapping]] = ..., prefix: _Optional[_Union[_common_pb2.ScopePrefix, _Mapping]] = ..., tokens: _Optional[bytes] = ..., blocks: _Optional[bytes] = ..., sealed_tokens: _Optional[int] = ..., copy: _Optional[_Union[CopyPlan, _Mapping]] = ..., request_id: _Optional[str] = ..., sample: _Optional[int] = ..., no_store: _Optional[bool] = ..., priority: _Optional[int] = ..., ttl_seconds: _Optional[float] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("session_id", "arena_token", "num_blocks", "layout_fingerprint", "resume_token", "lease_seconds", "grace_seconds", "resumed", "leases", "arena_wanted", "replacements")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    ARENA_WANTED_FIELD_NUMBER: _ClassVar[int]
    REPLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    arena_token: bytes
    num_blocks: int
    layout_fingerprint: bytes
    resume_token: bytes
    lease_seconds: float
    grace_seconds: float
    resumed: bool
    leases: _containers.RepeatedScalarFieldContainer[int]
    arena_wanted: bool
    replacements: _containers.RepeatedCompositeFieldContainer[TableReplacement]
    def __init__(self, session_id: _Optional[int] = ..., arena_token: _Optional[bytes] = ..., num_blocks: _Optional[int] = ..., layout_fingerprint: _Optional[bytes] = ..., resume_token: _Optional[bytes] = ..., lease_seconds: _Optional[float] = ..., grace_seconds: _Optional[float] = ..., resumed: _Optional[bool] = ..., leases: _Optional[_Iterable[int]] = ..., arena_wanted: _Optional[bool] = ..., replacements: _Optional[_Iterable[_Union[TableReplacement, _Mapping]]] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("grant", "key", "tokens", "request_id", "sample", "no_read", "no_store", "resumed", "priority", "prefix", "ttl_seconds", "may_wait", "base_handle", "base_tokens", "will_keep")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    NO_READ_FIELD_NUMBER: _ClassVar[int]
    NO_STORE_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAY_WAIT_FIELD_NUMBER: _ClassVar[int]
    BASE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    BASE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WILL_KEEP_FIELD_NUMBER: _ClassVar[int]
    grant: bytes
    key: _common_pb2.CacheKey
    tokens: bytes
    request_id: str
    sample: int
    no_read: bool
    no_store: bool
    resumed: bool
    priority: int
    prefix: _common_pb2.ScopePrefix
    ttl_seconds: float
    may_wait: bool
    base_handle: bytes
    base_tokens: int
    will_keep: bool
    def __init__(self, grant: _Optional[bytes] = ..., key: _Optional[_Union[_common_pb2.CacheKey, _Mapping]] = ..., tokens: _Optional[bytes] = ..., request_id: _Optional[str] = ..., sample: _Optional[int] = ..., no_read: _Optional[bool] = ..., no_store: _Optional[bool] = ..., resumed: _Optional[bool] = ..., priority: _Optional[int] = ..., prefix: _Optional[_Union[_common_pb2.ScopePrefix, _Mapping]] = ..., ttl_seconds: _Optional[float] = ..., may_wait: _Optional[bool] = ..., base_handle: _Optional[bytes] = ..., base_tokens: _Optional[int] = ..., will_keep: _Optional[bool] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("wait_id", "resident_tokens", "coming_tokens")
    WAIT_ID_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    wait_id: int
    resident_tokens: int
    coming_tokens: int
    def __init__(self, wait_id: _Optional[int] = ..., resident_tokens: _Optional[int] = ..., coming_tokens: _Optional[int] = ...) -> None: ...

class PrefixReadyPush(_message.Message):
    __slots__ = ("wait_id",)
    WAIT_ID_FIELD_NUMBER: _ClassVar[int]
    wait_id: int
    def __init__(self, wait_id: _Optional[int] = ...) -> None: ...

class CopyPlan(_message.Message):
    __slots__ = ("source", "target", "num_tokens")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source: int
    target: int
    num_tokens: int
    def __init__(self, source: _Optional[int] = ..., target: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("lease_id", "blocks", "cached_tokens", "copy", "tenant", "waiting", "base_tokens", "base_prefix")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BASE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BASE_PREFIX_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    blocks: bytes
    cached_tokens: int
    copy: CopyPlan
    tenant: str
    waiting: Waiting
    base_tokens: bytes
    base_prefix: _common_pb2.ScopePrefix
    def __init__(self, lease_id: _Optional[int] = ..., blocks: _Optional[bytes] = ..., cached_tokens: _Optional[int] = ..., copy: _Optional[_Union[CopyPlan, _Mapping]] = ..., tenant: _Optional[str] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., base_tokens: _Optional[bytes] = ..., base_prefix: _Optional[_Union[_common_pb2.ScopePrefix, _Mapping]] = ...) -> None: ...

class SequenceReport(_message.Message):
    __slots__ = ("lease_id", "taken_blocks", "tokens", "sealed_tokens", "copied", "release", "keep_seconds")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TAKEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEALED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    KEEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    taken_blocks: bytes
    tokens: bytes
    sealed_tokens: int
    copied: bool
    release: bool
    keep_seconds: float
    def __init__(self, lease_id: _Optional[int] = ..., taken_blocks: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., sealed_tokens: _Optional[int] = ..., copied: _Optional[bool] = ..., release: _Optional[bool] = ..., keep_seconds: _Optional[float] = ...) -> None: ...

class SealColumns(_message.Message):
    __slots__ = ("lease_ids", "sealed_tokens", "num_tokens", "tokens", "takers", "taken_blocks")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    SEALED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAKERS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: bytes
    sealed_tokens: bytes
    num_tokens: bytes
    tokens: bytes
    takers: bytes
    taken_blocks: bytes
    def __init__(self, lease_ids: _Optional[bytes] = ..., sealed_tokens: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., takers: _Optional[bytes] = ..., taken_blocks: _Optional[bytes] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("sequences", "returned_blocks", "wanted_blocks", "generated_tokens", "preemptions", "queued_requests", "sealed", "lacking_leases")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    RETURNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WANTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    LACKING_LEASES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceReport]
    returned_blocks: bytes
    wanted_blocks: int
    generated_tokens: int
    preemptions: int
    queued_requests: int
    sealed: SealColumns
    lacking_leases: bytes
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceReport, _Mapping]]] = ..., returned_blocks: _Optional[bytes] = ..., wanted_blocks: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., queued_requests: _Optional[int] = ..., sealed: _Optional[_Union[SealColumns, _Mapping]] = ..., lacking_leases: _Optional[bytes] = ...) -> None: ...

class TableReplacement(_message.Message):
    __slots__ = ("lease_id", "first_index", "blocks")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    first_index: int
    blocks: bytes
    def __init__(self, lease_id: _Optional[int] = ..., first_index: _Optional[int] = ..., blocks: _Optional[bytes] = ...) -> None: ...

class SequenceRefusal(_message.Message):
    __slots__ = ("lease_id", "failure")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    failure: Failure
    def __init__(self, lease_id: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("replacements", "refusals", "kept", "growths")
    REPLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    GROWTHS_FIELD_NUMBER: _ClassVar[int]
    replacements: _containers.RepeatedCompositeFieldContainer[TableReplacement]
    refusals: _containers.RepeatedCompositeFieldContainer[SequenceRefusal]
    kept: _containers.RepeatedCompositeFieldContainer[KeptBranch]
    growths: _containers.RepeatedCompositeFieldContainer[Growth]
    def __init__(self, replacements: _Optional[_Iterable[_Union[TableReplacement, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[SequenceRefusal, _Mapping]]] = ..., kept: _Optional[_Iterable[_Union[KeptBranch, _Mapping]]] = ..., growths: _Optional[_Iterable[_Union[Growth, _Mapping]]] = ...) -> None: ...

class Growth(_message.Message):
    __slots__ = ("lease_id", "blocks")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    blocks: bytes
    def __init__(self, lease_id: _Optional[int] = ..., blocks: _Optional[bytes] = ...) -> None: ...

class KeptBranch(_message.Message):
    __slots__ = ("lease_id", "handle", "num_tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    handle: bytes
    num_tokens: int
    def __init__(self, lease_id: _Optional[int] = ..., handle: _Optional[bytes] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("lease_id", "num_tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    num_tokens: int
    def __init__(self, lease_id: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class RollbackResponse(_message.Message):
    __slots__ = ("blocks", "copy")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    copy: CopyPlan
    def __init__(self, blocks: _Optional[bytes] = ..., copy: _Optional[_Union[CopyPlan, _Mapping]] = ...) -> None: ...

class MakeWritableRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class MakeWritableResponse(_message.Message):
    __slots__ = ("blocks", "copy")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    copy: CopyPlan
    def __init__(self, blocks: _Optional[bytes] = ..., copy: _Optional[_Union[CopyPlan, _Mapping]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("lease_id", "num_tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    num_tokens: int
    def __init__(self, lease_id: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("replacements",)
    REPLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    replacements: _containers.RepeatedCompositeFieldContainer[TableReplacement]
    def __init__(self, replacements: _Optional[_Iterable[_Union[TableReplacement, _Mapping]]] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("lease_id", "samples", "num_tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    samples: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    def __init__(self, lease_id: _Optional[int] = ..., samples: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("lease_id", "blocks", "copy")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    blocks: bytes
    copy: CopyPlan
    def __init__(self, lease_id: _Optional[int] = ..., blocks: _Optional[bytes] = ..., copy: _Optional[_Union[CopyPlan, _Mapping]] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ("branches",)
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    def __init__(self, branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ...) -> None: ...

class CreditRequest(_message.Message):
    __slots__ = ("wanted_blocks",)
    WANTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    wanted_blocks: int
    def __init__(self, wanted_blocks: _Optional[int] = ...) -> None: ...

class CreditResponse(_message.Message):
    __slots__ = ("granted_blocks",)
    GRANTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    granted_blocks: int
    def __init__(self, granted_blocks: _Optional[int] = ...) -> None: ...

class AbortPush(_message.Message):
    __slots__ = ("abort_id", "request_id")
    ABORT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    abort_id: int
    request_id: str
    def __init__(self, abort_id: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class AbortResult(_message.Message):
    __slots__ = ("abort_id", "found")
    ABORT_ID_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    abort_id: int
    found: bool
    def __init__(self, abort_id: _Optional[int] = ..., found: _Optional[bool] = ...) -> None: ...

class ReclaimPush(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...
