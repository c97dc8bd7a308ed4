from tessera.inference.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectRequest(_message.Message):
    __slots__ = ("submit", "cancel", "consumed", "vocabulary")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    consumed: Consumed
    vocabulary: Vocabulary
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., consumed: _Optional[_Union[Consumed, _Mapping]] = ..., vocabulary: _Optional[_Union[Vocabulary, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request", "request_id", "grant", "tokens", "sampling", "stopping", "output", "cache", "priority", "request_label", "session_handle", "session_tokens", "keep_seconds", "beam", "speculation", "adapter", "tenant", "tenant_weight")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_LABEL_FIELD_NUMBER: _ClassVar[int]
    SESSION_HANDLE_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BEAM_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    request: int
    request_id: str
    grant: bytes
    tokens: bytes
    sampling: _inference_pb2.Sampling
    stopping: _inference_pb2.Stopping
    output: _inference_pb2.Output
    cache: _inference_pb2.Cache
    priority: int
    request_label: str
    session_handle: bytes
    session_tokens: int
    keep_seconds: float
    beam: _inference_pb2.Beam
    speculation: _inference_pb2.Speculation
    adapter: str
    tenant: str
    tenant_weight: float
    def __init__(self, request: _Optional[int] = ..., request_id: _Optional[str] = ..., grant: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., sampling: _Optional[_Union[_inference_pb2.Sampling, _Mapping]] = ..., stopping: _Optional[_Union[_inference_pb2.Stopping, _Mapping]] = ..., output: _Optional[_Union[_inference_pb2.Output, _Mapping]] = ..., cache: _Optional[_Union[_inference_pb2.Cache, _Mapping]] = ..., priority: _Optional[int] = ..., request_label: _Optional[str] = ..., session_handle: _Optional[bytes] = ..., session_tokens: _Optional[int] = ..., keep_seconds: _Optional[float] = ..., beam: _Optional[_Union[_inference_pb2.Beam, _Mapping]] = ..., speculation: _Optional[_Union[_inference_pb2.Speculation, _Mapping]] = ..., adapter: _Optional[str] = ..., tenant: _Optional[str] = ..., tenant_weight: _Optional[float] = ...) -> None: ...

class Vocabulary(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request", "index", "finish")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    request: int
    index: int
    finish: bool
    def __init__(self, request: _Optional[int] = ..., index: _Optional[int] = ..., finish: _Optional[bool] = ...) -> None: ...

class Consumed(_message.Message):
    __slots__ = ("request", "tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: int
    tokens: int
    def __init__(self, request: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("welcome", "step")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    step: StepOutput
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., step: _Optional[_Union[StepOutput, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("model", "eos_token_ids", "max_batch", "window_tokens", "weights_digest")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    model: _inference_pb2.Model
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_batch: int
    window_tokens: int
    weights_digest: bytes
    def __init__(self, model: _Optional[_Union[_inference_pb2.Model, _Mapping]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_batch: _Optional[int] = ..., window_tokens: _Optional[int] = ..., weights_digest: _Optional[bytes] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("started", "tokens", "finished", "ended", "failed")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    started: _containers.RepeatedCompositeFieldContainer[Started]
    tokens: _containers.RepeatedCompositeFieldContainer[SampleTokens]
    finished: _containers.RepeatedCompositeFieldContainer[SampleFinished]
    ended: _containers.RepeatedCompositeFieldContainer[RequestEnded]
    failed: _containers.RepeatedCompositeFieldContainer[RequestFailed]
    def __init__(self, started: _Optional[_Iterable[_Union[Started, _Mapping]]] = ..., tokens: _Optional[_Iterable[_Union[SampleTokens, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[SampleFinished, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[RequestEnded, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[RequestFailed, _Mapping]]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request", "cached_tokens", "queue_nanoseconds", "base_tokens", "prompt_tokens", "prompt_logprobs", "moments")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    BASE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    request: int
    cached_tokens: int
    queue_nanoseconds: int
    base_tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprob]
    moments: Moments
    def __init__(self, request: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_nanoseconds: _Optional[int] = ..., base_tokens: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprob, _Mapping]]] = ..., moments: _Optional[_Union[Moments, _Mapping]] = ...) -> None: ...

class Moments(_message.Message):
    __slots__ = ("queued_nanoseconds", "asked_nanoseconds", "admitted_nanoseconds", "copied_nanoseconds", "begun_nanoseconds", "computed_nanoseconds")
    QUEUED_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    ASKED_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    COPIED_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    queued_nanoseconds: int
    asked_nanoseconds: int
    admitted_nanoseconds: int
    copied_nanoseconds: int
    begun_nanoseconds: int
    computed_nanoseconds: int
    def __init__(self, queued_nanoseconds: _Optional[int] = ..., asked_nanoseconds: _Optional[int] = ..., admitted_nanoseconds: _Optional[int] = ..., copied_nanoseconds: _Optional[int] = ..., begun_nanoseconds: _Optional[int] = ..., computed_nanoseconds: _Optional[int] = ...) -> None: ...

class SampleTokens(_message.Message):
    __slots__ = ("request", "index", "token_ids", "logprobs")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request: int
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprob]
    def __init__(self, request: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class SampleFinished(_message.Message):
    __slots__ = ("request", "index", "reason", "stop_token_id", "session_handle", "session_tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_HANDLE_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: int
    index: int
    reason: _inference_pb2.FinishReason
    stop_token_id: int
    session_handle: bytes
    session_tokens: int
    def __init__(self, request: _Optional[int] = ..., index: _Optional[int] = ..., reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., session_handle: _Optional[bytes] = ..., session_tokens: _Optional[int] = ...) -> None: ...

class RequestEnded(_message.Message):
    __slots__ = ("request", "completion_tokens", "cow_copies", "drafted_tokens", "accepted_tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COW_COPIES_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: int
    completion_tokens: int
    cow_copies: int
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, request: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cow_copies: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class RequestFailed(_message.Message):
    __slots__ = ("request", "code", "reason", "message", "metadata", "retry_after_nanoseconds")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    request: int
    code: int
    reason: str
    message: str
    metadata: _containers.ScalarMap[str, str]
    retry_after_nanoseconds: int
    def __init__(self, request: _Optional[int] = ..., code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., retry_after_nanoseconds: _Optional[int] = ...) -> None: ...
