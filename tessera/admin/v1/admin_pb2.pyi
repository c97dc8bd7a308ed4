from tessera.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATE_UNSPECIFIED: _ClassVar[BlockState]
    BLOCK_STATE_FREE: _ClassVar[BlockState]
    BLOCK_STATE_ACTIVE: _ClassVar[BlockState]
    BLOCK_STATE_CACHED: _ClassVar[BlockState]
    BLOCK_STATE_QUARANTINED: _ClassVar[BlockState]

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_REASON_UNSPECIFIED: _ClassVar[MissReason]
    MISS_REASON_RESIDENT: _ClassVar[MissReason]
    MISS_REASON_DIVERGED: _ClassVar[MissReason]
    MISS_REASON_NEVER_SEEN: _ClassVar[MissReason]
    MISS_REASON_KEY_DIFFERS: _ClassVar[MissReason]
    MISS_REASON_EVICTED: _ClassVar[MissReason]
    MISS_REASON_COMPUTING: _ClassVar[MissReason]
    MISS_REASON_OTHER_SCOPE: _ClassVar[MissReason]
BLOCK_STATE_UNSPECIFIED: BlockState
BLOCK_STATE_FREE: BlockState
BLOCK_STATE_ACTIVE: BlockState
BLOCK_STATE_CACHED: BlockState
BLOCK_STATE_QUARANTINED: BlockState
MISS_REASON_UNSPECIFIED: MissReason
MISS_REASON_RESIDENT: MissReason
MISS_REASON_DIVERGED: MissReason
MISS_REASON_NEVER_SEEN: MissReason
MISS_REASON_KEY_DIFFERS: MissReason
MISS_REASON_EVICTED: MissReason
MISS_REASON_COMPUTING: MissReason
MISS_REASON_OTHER_SCOPE: MissReason

class GetSnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant", "cached_blocks", "active_blocks", "hits", "misses", "hit_tokens", "indexed_blocks", "used_blocks", "floor_blocks", "ceiling_blocks", "weight", "pinned_blocks", "evictions", "kept_branches")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INDEXED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CEILING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    KEPT_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    cached_blocks: int
    active_blocks: int
    hits: int
    misses: int
    hit_tokens: int
    indexed_blocks: int
    used_blocks: int
    floor_blocks: int
    ceiling_blocks: int
    weight: float
    pinned_blocks: int
    evictions: int
    kept_branches: int
    def __init__(self, tenant: _Optional[str] = ..., cached_blocks: _Optional[int] = ..., active_blocks: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., indexed_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., floor_blocks: _Optional[int] = ..., ceiling_blocks: _Optional[int] = ..., weight: _Optional[float] = ..., pinned_blocks: _Optional[int] = ..., evictions: _Optional[int] = ..., kept_branches: _Optional[int] = ...) -> None: ...

class GetSnapshotResponse(_message.Message):
    __slots__ = ("total_blocks", "usable_blocks", "free_blocks", "cached_blocks", "active_blocks", "quarantined_blocks", "leases", "sessions", "hits", "misses", "hit_tokens", "cow_copies", "evictions", "preemptions", "generated_tokens", "epoch", "revision", "tenants", "indexed_blocks", "credit_blocks", "block_tokens", "block_bytes", "hash_collisions", "queued_requests", "pinned_blocks", "kept_branches", "scrubbed_blocks", "waits", "prompt_tokens", "adopted_blocks", "fenced_operations", "windows")
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COW_COPIES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    INDEXED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    HASH_COLLISIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    SCRUBBED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FENCED_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    total_blocks: int
    usable_blocks: int
    free_blocks: int
    cached_blocks: int
    active_blocks: int
    quarantined_blocks: int
    leases: int
    sessions: int
    hits: int
    misses: int
    hit_tokens: int
    cow_copies: int
    evictions: int
    preemptions: int
    generated_tokens: int
    epoch: int
    revision: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    indexed_blocks: int
    credit_blocks: int
    block_tokens: int
    block_bytes: int
    hash_collisions: int
    queued_requests: int
    pinned_blocks: int
    kept_branches: int
    scrubbed_blocks: int
    waits: int
    prompt_tokens: int
    adopted_blocks: int
    fenced_operations: int
    windows: WindowPool
    def __init__(self, total_blocks: _Optional[int] = ..., usable_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., active_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., leases: _Optional[int] = ..., sessions: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., cow_copies: _Optional[int] = ..., evictions: _Optional[int] = ..., preemptions: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., epoch: _Optional[int] = ..., revision: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ..., indexed_blocks: _Optional[int] = ..., credit_blocks: _Optional[int] = ..., block_tokens: _Optional[int] = ..., block_bytes: _Optional[int] = ..., hash_collisions: _Optional[int] = ..., queued_requests: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., kept_branches: _Optional[int] = ..., scrubbed_blocks: _Optional[int] = ..., waits: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., adopted_blocks: _Optional[int] = ..., fenced_operations: _Optional[int] = ..., windows: _Optional[_Union[WindowPool, _Mapping]] = ...) -> None: ...

class WindowPool(_message.Message):
    __slots__ = ("total_blocks", "free_blocks", "needed_blocks", "reclaimed_blocks", "block_bytes", "shortened_hits", "shortened_tokens")
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEEDED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RECLAIMED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHORTENED_HITS_FIELD_NUMBER: _ClassVar[int]
    SHORTENED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    total_blocks: int
    free_blocks: int
    needed_blocks: int
    reclaimed_blocks: int
    block_bytes: int
    shortened_hits: int
    shortened_tokens: int
    def __init__(self, total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., needed_blocks: _Optional[int] = ..., reclaimed_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., shortened_hits: _Optional[int] = ..., shortened_tokens: _Optional[int] = ...) -> None: ...

class CheckIntegrityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckIntegrityResponse(_message.Message):
    __slots__ = ("ok", "violations", "checked_blocks")
    OK_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    violations: _containers.RepeatedScalarFieldContainer[str]
    checked_blocks: int
    def __init__(self, ok: _Optional[bool] = ..., violations: _Optional[_Iterable[str]] = ..., checked_blocks: _Optional[int] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "state")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    state: BlockState
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., state: _Optional[_Union[BlockState, str]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("block", "generation", "state", "references", "published", "tenant", "evictable", "num_tokens", "pinned", "window_block")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BLOCK_FIELD_NUMBER: _ClassVar[int]
    block: int
    generation: int
    state: BlockState
    references: int
    published: bool
    tenant: str
    evictable: bool
    num_tokens: int
    pinned: bool
    window_block: int
    def __init__(self, block: _Optional[int] = ..., generation: _Optional[int] = ..., state: _Optional[_Union[BlockState, str]] = ..., references: _Optional[int] = ..., published: _Optional[bool] = ..., tenant: _Optional[str] = ..., evictable: _Optional[bool] = ..., num_tokens: _Optional[int] = ..., pinned: _Optional[bool] = ..., window_block: _Optional[int] = ...) -> None: ...

class ListBlocksResponse(_message.Message):
    __slots__ = ("blocks", "next_page_token")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    next_page_token: str
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListPrefixesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "tenant")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    tenant: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class Prefix(_message.Message):
    __slots__ = ("node", "parent", "tenant", "start_token", "num_tokens", "blocks", "references", "name", "children", "priority", "pinned", "expires_in_seconds", "scope", "group")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    node: int
    parent: int
    tenant: str
    start_token: int
    num_tokens: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    references: int
    name: str
    children: int
    priority: int
    pinned: bool
    expires_in_seconds: float
    scope: _common_pb2.Scope
    group: str
    def __init__(self, node: _Optional[int] = ..., parent: _Optional[int] = ..., tenant: _Optional[str] = ..., start_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., references: _Optional[int] = ..., name: _Optional[str] = ..., children: _Optional[int] = ..., priority: _Optional[int] = ..., pinned: _Optional[bool] = ..., expires_in_seconds: _Optional[float] = ..., scope: _Optional[_Union[_common_pb2.Scope, str]] = ..., group: _Optional[str] = ...) -> None: ...

class ListPrefixesResponse(_message.Message):
    __slots__ = ("prefixes", "next_page_token")
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[Prefix]
    next_page_token: str
    def __init__(self, prefixes: _Optional[_Iterable[_Union[Prefix, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListLeasesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease", "session", "tenant", "request_id", "sample", "num_blocks", "num_tokens", "sealed_tokens", "age_seconds", "blocks", "parent")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEALED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    lease: int
    session: int
    tenant: str
    request_id: str
    sample: int
    num_blocks: int
    num_tokens: int
    sealed_tokens: int
    age_seconds: float
    blocks: _containers.RepeatedScalarFieldContainer[int]
    parent: int
    def __init__(self, lease: _Optional[int] = ..., session: _Optional[int] = ..., tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., sample: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_tokens: _Optional[int] = ..., sealed_tokens: _Optional[int] = ..., age_seconds: _Optional[float] = ..., blocks: _Optional[_Iterable[int]] = ..., parent: _Optional[int] = ...) -> None: ...

class ListLeasesResponse(_message.Message):
    __slots__ = ("leases", "next_page_token")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    next_page_token: str
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session", "decoder_name", "process_id", "leases", "credit_blocks", "age_seconds", "mapped", "queued_requests", "lease_seconds_left", "away")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DECODER_NAME_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    session: int
    decoder_name: str
    process_id: int
    leases: int
    credit_blocks: int
    age_seconds: float
    mapped: bool
    queued_requests: int
    lease_seconds_left: float
    away: bool
    def __init__(self, session: _Optional[int] = ..., decoder_name: _Optional[str] = ..., process_id: _Optional[int] = ..., leases: _Optional[int] = ..., credit_blocks: _Optional[int] = ..., age_seconds: _Optional[float] = ..., mapped: _Optional[bool] = ..., queued_requests: _Optional[int] = ..., lease_seconds_left: _Optional[float] = ..., away: _Optional[bool] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ExplainPrefixRequest(_message.Message):
    __slots__ = ("tenant", "token_ids", "key", "prefix")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    key: _common_pb2.CacheKey
    prefix: _common_pb2.ScopePrefix
    def __init__(self, tenant: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., key: _Optional[_Union[_common_pb2.CacheKey, _Mapping]] = ..., prefix: _Optional[_Union[_common_pb2.ScopePrefix, _Mapping]] = ...) -> None: ...

class ExplainPrefixResponse(_message.Message):
    __slots__ = ("resident_tokens", "reason", "miss_reason", "other_token_ids", "differing_key_parts", "evicted_seconds_ago", "evicted_for", "other_scope", "scope_tokens", "private_reason")
    RESIDENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    OTHER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_KEY_PARTS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FOR_FIELD_NUMBER: _ClassVar[int]
    OTHER_SCOPE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_REASON_FIELD_NUMBER: _ClassVar[int]
    resident_tokens: int
    reason: str
    miss_reason: MissReason
    other_token_ids: _containers.RepeatedScalarFieldContainer[int]
    differing_key_parts: _containers.RepeatedScalarFieldContainer[str]
    evicted_seconds_ago: float
    evicted_for: str
    other_scope: _common_pb2.Scope
    scope_tokens: int
    private_reason: str
    def __init__(self, resident_tokens: _Optional[int] = ..., reason: _Optional[str] = ..., miss_reason: _Optional[_Union[MissReason, str]] = ..., other_token_ids: _Optional[_Iterable[int]] = ..., differing_key_parts: _Optional[_Iterable[str]] = ..., evicted_seconds_ago: _Optional[float] = ..., evicted_for: _Optional[str] = ..., other_scope: _Optional[_Union[_common_pb2.Scope, str]] = ..., scope_tokens: _Optional[int] = ..., private_reason: _Optional[str] = ...) -> None: ...

class EvictBlocksRequest(_message.Message):
    __slots__ = ("all", "tenant", "num_blocks")
    ALL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    all: bool
    tenant: str
    num_blocks: int
    def __init__(self, all: _Optional[bool] = ..., tenant: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class EvictBlocksResponse(_message.Message):
    __slots__ = ("evicted_blocks", "remaining_blocks")
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    evicted_blocks: int
    remaining_blocks: int
    def __init__(self, evicted_blocks: _Optional[int] = ..., remaining_blocks: _Optional[int] = ...) -> None: ...

class PinPrefixRequest(_message.Message):
    __slots__ = ("tenant", "token_ids", "key", "ttl_seconds", "prefix")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    key: _common_pb2.CacheKey
    ttl_seconds: float
    prefix: _common_pb2.ScopePrefix
    def __init__(self, tenant: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., key: _Optional[_Union[_common_pb2.CacheKey, _Mapping]] = ..., ttl_seconds: _Optional[float] = ..., prefix: _Optional[_Union[_common_pb2.ScopePrefix, _Mapping]] = ...) -> None: ...

class PinPrefixResponse(_message.Message):
    __slots__ = ("pin", "pinned_tokens", "pinned_blocks")
    PIN_FIELD_NUMBER: _ClassVar[int]
    PINNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pin: int
    pinned_tokens: int
    pinned_blocks: int
    def __init__(self, pin: _Optional[int] = ..., pinned_tokens: _Optional[int] = ..., pinned_blocks: _Optional[int] = ...) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("pin", "tenant", "num_tokens", "num_blocks", "expires_in_seconds")
    PIN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    pin: int
    tenant: str
    num_tokens: int
    num_blocks: int
    expires_in_seconds: float
    def __init__(self, pin: _Optional[int] = ..., tenant: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., expires_in_seconds: _Optional[float] = ...) -> None: ...

class ListPinsResponse(_message.Message):
    __slots__ = ("pins", "next_page_token")
    PINS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[Pin]
    next_page_token: str
    def __init__(self, pins: _Optional[_Iterable[_Union[Pin, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class SetPriorityRequest(_message.Message):
    __slots__ = ("tenant", "token_ids", "key", "priority", "prefix")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    key: _common_pb2.CacheKey
    priority: int
    prefix: _common_pb2.ScopePrefix
    def __init__(self, tenant: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., key: _Optional[_Union[_common_pb2.CacheKey, _Mapping]] = ..., priority: _Optional[int] = ..., prefix: _Optional[_Union[_common_pb2.ScopePrefix, _Mapping]] = ...) -> None: ...

class SetPriorityResponse(_message.Message):
    __slots__ = ("changed_tokens",)
    CHANGED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    changed_tokens: int
    def __init__(self, changed_tokens: _Optional[int] = ...) -> None: ...

class UnpinPrefixRequest(_message.Message):
    __slots__ = ("pin",)
    PIN_FIELD_NUMBER: _ClassVar[int]
    pin: int
    def __init__(self, pin: _Optional[int] = ...) -> None: ...

class UnpinPrefixResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortRequestResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateTenantRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class CreateTenantResponse(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class UpdateTenantRequest(_message.Message):
    __slots__ = ("tenant", "floor_blocks", "ceiling_blocks", "weight", "pin_blocks")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CEILING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PIN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    floor_blocks: int
    ceiling_blocks: int
    weight: float
    pin_blocks: int
    def __init__(self, tenant: _Optional[str] = ..., floor_blocks: _Optional[int] = ..., ceiling_blocks: _Optional[int] = ..., weight: _Optional[float] = ..., pin_blocks: _Optional[int] = ...) -> None: ...

class UpdateTenantResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteTenantRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class DeleteTenantResponse(_message.Message):
    __slots__ = ("evicted_blocks",)
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    evicted_blocks: int
    def __init__(self, evicted_blocks: _Optional[int] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("tenant", "created_unix_seconds", "keys", "floor_blocks", "ceiling_blocks", "weight", "pin_blocks", "groups")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CEILING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PIN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    created_unix_seconds: float
    keys: _containers.RepeatedCompositeFieldContainer[Key]
    floor_blocks: int
    ceiling_blocks: int
    weight: float
    pin_blocks: int
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant: _Optional[str] = ..., created_unix_seconds: _Optional[float] = ..., keys: _Optional[_Iterable[_Union[Key, _Mapping]]] = ..., floor_blocks: _Optional[int] = ..., ceiling_blocks: _Optional[int] = ..., weight: _Optional[float] = ..., pin_blocks: _Optional[int] = ..., groups: _Optional[_Iterable[str]] = ...) -> None: ...

class Key(_message.Message):
    __slots__ = ("key_id", "name", "created_unix_seconds", "expires_unix_seconds", "last_used_unix_seconds", "revoked")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    name: str
    created_unix_seconds: float
    expires_unix_seconds: float
    last_used_unix_seconds: float
    revoked: bool
    def __init__(self, key_id: _Optional[str] = ..., name: _Optional[str] = ..., created_unix_seconds: _Optional[float] = ..., expires_unix_seconds: _Optional[float] = ..., last_used_unix_seconds: _Optional[float] = ..., revoked: _Optional[bool] = ...) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants", "next_page_token")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    next_page_token: str
    def __init__(self, tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CreateKeyRequest(_message.Message):
    __slots__ = ("tenant", "name", "ttl_seconds")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    name: str
    ttl_seconds: float
    def __init__(self, tenant: _Optional[str] = ..., name: _Optional[str] = ..., ttl_seconds: _Optional[float] = ...) -> None: ...

class CreateKeyResponse(_message.Message):
    __slots__ = ("key_id", "key")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    key: str
    def __init__(self, key_id: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("key_id",)
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    def __init__(self, key_id: _Optional[str] = ...) -> None: ...

class RevokeKeyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RotateTenantSecretRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class RotateTenantSecretResponse(_message.Message):
    __slots__ = ("evicted_blocks",)
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    evicted_blocks: int
    def __init__(self, evicted_blocks: _Optional[int] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("after_sequence", "epoch", "with_tokens")
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WITH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    after_sequence: int
    epoch: int
    with_tokens: bool
    def __init__(self, after_sequence: _Optional[int] = ..., epoch: _Optional[int] = ..., with_tokens: _Optional[bool] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("sequence", "kind", "epoch", "unix_seconds", "tenant", "session", "lease", "blocks", "name", "token_ids", "detail")
    class DetailEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: str
    epoch: int
    unix_seconds: float
    tenant: str
    session: int
    lease: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    name: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    detail: _containers.ScalarMap[str, str]
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[str] = ..., epoch: _Optional[int] = ..., unix_seconds: _Optional[float] = ..., tenant: _Optional[str] = ..., session: _Optional[int] = ..., lease: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., name: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., detail: _Optional[_Mapping[str, str]] = ...) -> None: ...

class DrainPoolRequest(_message.Message):
    __slots__ = ("timeout_seconds", "resume")
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    timeout_seconds: float
    resume: bool
    def __init__(self, timeout_seconds: _Optional[float] = ..., resume: _Optional[bool] = ...) -> None: ...

class DrainPoolResponse(_message.Message):
    __slots__ = ("drained", "leases")
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    leases: int
    def __init__(self, drained: _Optional[bool] = ..., leases: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("group", "tenants", "created_unix_seconds")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    group: str
    tenants: _containers.RepeatedScalarFieldContainer[str]
    created_unix_seconds: float
    def __init__(self, group: _Optional[str] = ..., tenants: _Optional[_Iterable[str]] = ..., created_unix_seconds: _Optional[float] = ...) -> None: ...

class CreateGroupRequest(_message.Message):
    __slots__ = ("group", "tenants")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    group: str
    tenants: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, group: _Optional[str] = ..., tenants: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UpdateGroupRequest(_message.Message):
    __slots__ = ("group", "add_tenants", "remove_tenants")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ADD_TENANTS_FIELD_NUMBER: _ClassVar[int]
    REMOVE_TENANTS_FIELD_NUMBER: _ClassVar[int]
    group: str
    add_tenants: _containers.RepeatedScalarFieldContainer[str]
    remove_tenants: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, group: _Optional[str] = ..., add_tenants: _Optional[_Iterable[str]] = ..., remove_tenants: _Optional[_Iterable[str]] = ...) -> None: ...

class UpdateGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteGroupRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class DeleteGroupResponse(_message.Message):
    __slots__ = ("evicted_blocks",)
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    evicted_blocks: int
    def __init__(self, evicted_blocks: _Optional[int] = ...) -> None: ...

class ListGroupsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListGroupsResponse(_message.Message):
    __slots__ = ("groups", "next_page_token")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    next_page_token: str
    def __init__(self, groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ApprovePrefixRequest(_message.Message):
    __slots__ = ("name", "token_ids")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ApprovePrefixResponse(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...

class WithdrawPrefixRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class WithdrawPrefixResponse(_message.Message):
    __slots__ = ("evicted_blocks",)
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    evicted_blocks: int
    def __init__(self, evicted_blocks: _Optional[int] = ...) -> None: ...

class ListApprovedPrefixesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ApprovedPrefix(_message.Message):
    __slots__ = ("name", "num_tokens", "created_unix_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_tokens: int
    created_unix_seconds: float
    def __init__(self, name: _Optional[str] = ..., num_tokens: _Optional[int] = ..., created_unix_seconds: _Optional[float] = ...) -> None: ...

class ListApprovedPrefixesResponse(_message.Message):
    __slots__ = ("prefixes", "next_page_token")
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[ApprovedPrefix]
    next_page_token: str
    def __init__(self, prefixes: _Optional[_Iterable[_Union[ApprovedPrefix, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListBranchesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("branch", "tenant", "num_tokens", "num_blocks", "references", "expires_in_seconds")
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    branch: int
    tenant: str
    num_tokens: int
    num_blocks: int
    references: int
    expires_in_seconds: float
    def __init__(self, branch: _Optional[int] = ..., tenant: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., references: _Optional[int] = ..., expires_in_seconds: _Optional[float] = ...) -> None: ...

class ListBranchesResponse(_message.Message):
    __slots__ = ("branches", "next_page_token")
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    next_page_token: str
    def __init__(self, branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DropBranchRequest(_message.Message):
    __slots__ = ("branch",)
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    branch: int
    def __init__(self, branch: _Optional[int] = ...) -> None: ...

class DropBranchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetHitRateLimitsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetHitRateLimitsResponse(_message.Message):
    __slots__ = ("admissions", "hit_rate", "best_hit_rate", "infinite_hit_rate")
    ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    BEST_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    INFINITE_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    admissions: int
    hit_rate: float
    best_hit_rate: float
    infinite_hit_rate: float
    def __init__(self, admissions: _Optional[int] = ..., hit_rate: _Optional[float] = ..., best_hit_rate: _Optional[float] = ..., infinite_hit_rate: _Optional[float] = ...) -> None: ...
