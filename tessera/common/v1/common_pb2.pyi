from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Scope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCOPE_UNSPECIFIED: _ClassVar[Scope]
    SCOPE_PRIVATE: _ClassVar[Scope]
    SCOPE_GROUP: _ClassVar[Scope]
    SCOPE_PUBLIC: _ClassVar[Scope]
SCOPE_UNSPECIFIED: Scope
SCOPE_PRIVATE: Scope
SCOPE_GROUP: Scope
SCOPE_PUBLIC: Scope

class CacheKey(_message.Message):
    __slots__ = ("weights_digest", "revision", "adapter_digest", "tokenizer_digest", "position_digest", "attention_digest", "kv_dtype", "kv_quantization", "layout_version", "multimodal_digests", "scope", "scope_name")
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POSITION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MULTIMODAL_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_NAME_FIELD_NUMBER: _ClassVar[int]
    weights_digest: bytes
    revision: str
    adapter_digest: bytes
    tokenizer_digest: bytes
    position_digest: bytes
    attention_digest: bytes
    kv_dtype: str
    kv_quantization: str
    layout_version: int
    multimodal_digests: _containers.RepeatedScalarFieldContainer[bytes]
    scope: Scope
    scope_name: str
    def __init__(self, weights_digest: _Optional[bytes] = ..., revision: _Optional[str] = ..., adapter_digest: _Optional[bytes] = ..., tokenizer_digest: _Optional[bytes] = ..., position_digest: _Optional[bytes] = ..., attention_digest: _Optional[bytes] = ..., kv_dtype: _Optional[str] = ..., kv_quantization: _Optional[str] = ..., layout_version: _Optional[int] = ..., multimodal_digests: _Optional[_Iterable[bytes]] = ..., scope: _Optional[_Union[Scope, str]] = ..., scope_name: _Optional[str] = ...) -> None: ...

class ScopePrefix(_message.Message):
    __slots__ = ("scope", "group", "num_tokens")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    scope: Scope
    group: str
    num_tokens: int
    def __init__(self, scope: _Optional[_Union[Scope, str]] = ..., group: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "head_dim", "block_tokens", "dtype", "quantization", "version", "window_tokens", "window_layers", "window_share")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_LAYERS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_SHARE_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    quantization: str
    version: int
    window_tokens: int
    window_layers: _containers.RepeatedScalarFieldContainer[int]
    window_share: int
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_tokens: _Optional[int] = ..., dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., version: _Optional[int] = ..., window_tokens: _Optional[int] = ..., window_layers: _Optional[_Iterable[int]] = ..., window_share: _Optional[int] = ...) -> None: ...
