"""Every field of a request against what its proto comment allows. Pure; the only place that knows these bounds.

Owns the rule that a value is accepted as documented or refused by its proto path: INVALID_ARGUMENT with what is
allowed. Comparisons are written so that NaN fails them. Fields that
this build does not know are ignored and never passed on. Called by `gateway/service.py`; the decoder checks again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.adapter_folder import check_adapter_name
from common.errors import InvalidArgument
from common.labels import check_label
from gateway.sessions import NO_SESSION, SessionPlan, check_session
from tessera.common.v1 import common_pb2
from tessera.inference.v1 import inference_pb2

Ids: TypeAlias = NDArray[np.int64]

MAX_SAMPLES: Final = 16
MAX_STOPS: Final = 16
MAX_STOP_BYTES: Final = 1024
MAX_STOP_TOKENS: Final = 64
MAX_BIASES: Final = 1024
MAX_LOGPROBS: Final = 20
MAX_CONSTRAINT_BYTES: Final = 65_536
MAX_PROMPT_ENTRIES: Final = 32_768
MAX_DRAFT_TOKENS: Final = 16
MAX_BEAMS: Final = 16
MAX_LENGTH_PENALTY: Final = 10
MAX_TTL_SECONDS: Final = 100 * 365.25 * 86_400
MAX_SCOPE_NAME: Final = 64
_PRIVATE_SCOPES: Final = (common_pb2.SCOPE_UNSPECIFIED, common_pb2.SCOPE_PRIVATE)
_WIDER_SCOPES: Final = (common_pb2.SCOPE_GROUP, common_pb2.SCOPE_PUBLIC)


# Optional numbers: whether one is allowed, and what is.
_SAMPLING: Final[Mapping[str, tuple[Callable[[float], bool], str]]] = {
    "temperature": (lambda value: 0 <= value < float("inf"), "a finite number >= 0; 0 is greedy"),
    "top_p": (lambda value: 0 < value <= 1, "a number in (0, 1]"),
    "top_k": (lambda value: value >= 0, "a number >= 0; 0 is all"),
    "min_p": (lambda value: 0 <= value <= 1, "a number in [0, 1]"),
    "repetition_penalty": (lambda value: 0 < value <= 100, "a number in (0, 100]"),
}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model bounds: ids are below `vocab_size`, prompt and answer together fit `max_context_tokens`."""

    name: str
    vocab_size: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What the gateway itself needs of a checked request. `max_tokens` None means as many as the context allows."""

    num_samples: int
    max_tokens: int | None
    min_tokens: int
    stops: tuple[str, ...]
    include_stop: bool
    wants_logprobs: bool
    session: SessionPlan = NO_SESSION


def check_request(request: inference_pb2.GenerateRequest, limits: ModelLimits) -> Plan:
    """Check all fields but the length of the prompt. Raises InvalidArgument at the first bad one."""
    _check_scope(request)
    if request.adapter:
        check_adapter_name(request.adapter)
    _check_cache(request.cache)
    _check_speculation(request.speculation)
    num_samples = _check_sampling(request.sampling, limits)
    _check_stopping(request.stopping, limits)
    _check_beam(request, num_samples)
    wants_logprobs = request.output.HasField("logprobs")
    if wants_logprobs:
        _whole("output.logprobs", request.output.logprobs, 0, MAX_LOGPROBS)
    if request.output.HasField("prompt_logprobs"):
        _whole("output.prompt_logprobs", request.output.prompt_logprobs, 0, MAX_LOGPROBS)
        if request.session.handle:
            raise InvalidArgument(
                "output.prompt_logprobs", "a kept conversation is not computed again; allowed is none"
            )
    _check_constraint(request)
    _whole("priority", request.priority, -100, 100)
    check_label(request.request_label)
    stopping = request.stopping
    return Plan(
        num_samples=num_samples,
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        min_tokens=stopping.min_tokens,
        stops=tuple(dict.fromkeys(stopping.stop)),
        include_stop=stopping.include_stop,
        wants_logprobs=wants_logprobs,
        session=check_session(request),
    )


def check_token_ids(field: str, ids: Sequence[int] | Ids, vocab_size: int) -> None:
    """Refuse the first id outside the vocabulary. No loop over a long prompt: that would hold up every other call."""
    if not len(ids):
        return
    array = np.asarray(ids, np.int64)
    wrong = np.flatnonzero((array < 0) | (array >= vocab_size))
    if wrong.size:
        index = int(wrong[0])
        raise InvalidArgument(f"{field}[{index}]", f"is {array[index]}; allowed are 0..{vocab_size - 1}")


def check_prompt_length(field: str, num_tokens: int, limits: ModelLimits) -> None:
    """Refuse an empty prompt and one that leaves no room for a token in the context."""
    if num_tokens == 0:
        raise InvalidArgument(field, "is empty; allowed is one token or more")
    if num_tokens >= limits.max_context_tokens:
        raise InvalidArgument(
            field,
            f"is {num_tokens} tokens; allowed are 1..{limits.max_context_tokens - 1}, as the context of "
            f"{limits.name} holds {limits.max_context_tokens} tokens, prompt and answer together",
        )


def check_prompt_logprobs(output: inference_pb2.Output, num_tokens: int) -> None:
    """Refuse more log-probabilities of a prompt of `num_tokens` tokens than one message carries."""
    entries = num_tokens * (1 + output.prompt_logprobs)
    if output.HasField("prompt_logprobs") and entries > MAX_PROMPT_ENTRIES:
        raise InvalidArgument(
            "output.prompt_logprobs",
            f"tokens of the prompt times (1 + it) are {entries}; allowed are at most {MAX_PROMPT_ENTRIES}",
        )


def _check_constraint(request: inference_pb2.GenerateRequest) -> None:
    if not request.output.HasField("constraint"):
        return
    constraint, stopping = request.output.constraint, request.stopping
    kind = constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("output.constraint", "is empty; allowed is one of json_schema, regex and grammar")
    size = len(getattr(constraint, kind).encode())
    if not 1 <= size <= MAX_CONSTRAINT_BYTES:
        raise InvalidArgument(f"output.constraint.{kind}", f"has {size} bytes; allowed are 1..{MAX_CONSTRAINT_BYTES}")
    if stopping.min_tokens:
        raise InvalidArgument("stopping.min_tokens", "with output.constraint allowed is 0: it says where the text ends")
    if stopping.ignore_eos:
        raise InvalidArgument("stopping.ignore_eos", "with output.constraint allowed is false: it says where to end")
    if request.beam.width:
        raise InvalidArgument("beam.width", "with output.constraint allowed is 0")


def check_public_tokens(cache: inference_pb2.Cache, num_tokens: int) -> None:
    """Refuse a prefix in a wider scope that is longer than the prompt of `num_tokens` tokens."""
    _whole("cache.public_tokens", cache.public_tokens, 0, num_tokens if cache.scope in _WIDER_SCOPES else 0)


def _check_scope(request: inference_pb2.GenerateRequest) -> None:
    cache = request.cache
    if cache.scope not in (*_PRIVATE_SCOPES, *_WIDER_SCOPES):
        raise InvalidArgument(
            "cache.scope", f"is {cache.scope}; allowed are SCOPE_PRIVATE, SCOPE_GROUP and SCOPE_PUBLIC"
        )
    if cache.scope in _WIDER_SCOPES and request.session.handle:
        raise InvalidArgument(
            "cache.scope", "a kept conversation goes on in the scope that it was begun in; allowed is none"
        )
    if cache.scope == common_pb2.SCOPE_GROUP:
        if not 1 <= len(cache.scope_name) <= MAX_SCOPE_NAME or not cache.scope_name.isprintable():
            length = len(cache.scope_name)
            raise InvalidArgument(
                "cache.scope_name", f"has {length} characters; allowed are 1..{MAX_SCOPE_NAME} printable characters"
            )
    elif cache.scope_name:
        raise InvalidArgument("cache.scope_name", "names the group of a GROUP scope; in any other allowed is none")
    if cache.public_tokens < 0 or (cache.public_tokens and cache.scope in _PRIVATE_SCOPES):
        raise InvalidArgument(
            "cache.public_tokens", f"is {cache.public_tokens}; allowed is 0, or more in a GROUP or PUBLIC scope"
        )


def _check_cache(cache: inference_pb2.Cache) -> None:
    if cache.HasField("priority"):
        _whole("cache.priority", cache.priority, 0, 100)
    if cache.HasField("ttl_seconds"):
        ttl = cache.ttl_seconds
        _fits("cache.ttl_seconds", ttl, 0 < ttl <= MAX_TTL_SECONDS, "a number > 0 and at most 100 years")


def _check_beam(request: inference_pb2.GenerateRequest, num_samples: int) -> None:
    beam, sampling = request.beam, request.sampling
    if beam.width:
        _whole("beam.width", beam.width, 1, MAX_BEAMS)
    penalty, most = beam.length_penalty, MAX_LENGTH_PENALTY
    _fits("beam.length_penalty", penalty, -most <= penalty <= most, f"a number in [-{most}, {most}]")
    if not beam.width:
        _fits("beam.length_penalty", penalty, penalty == 0, "none without beam.width")
        return
    if num_samples > beam.width:
        raise InvalidArgument("sampling.n", f"is {num_samples}; allowed are 1..{beam.width}, the width of the beam")
    others = {
        "sampling.temperature": sampling.temperature > 0,
        "sampling.top_p": sampling.HasField("top_p") and sampling.top_p < 1,
        "sampling.top_k": sampling.top_k > 0,
        "sampling.min_p": sampling.min_p > 0,
        "sampling.repetition_penalty": sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1,
        "sampling.presence_penalty": sampling.presence_penalty != 0,
        "sampling.frequency_penalty": sampling.frequency_penalty != 0,
        "sampling.logit_bias": bool(sampling.logit_bias),
        "stopping.stop": bool(request.stopping.stop),
        "speculation.mode": request.speculation.mode != inference_pb2.SPECULATION_MODE_UNSPECIFIED,
        "session": request.HasField("session"),
    }
    for field, is_set in others.items():
        if is_set:
            raise InvalidArgument(field, "allowed is none with a beam search")


def _check_speculation(speculation: inference_pb2.Speculation) -> None:
    if speculation.mode not in inference_pb2.SpeculationMode.values():
        raise InvalidArgument("speculation.mode", f"is {speculation.mode}; allowed are PROMPT_LOOKUP and DRAFT_MODEL")
    if speculation.HasField("draft_tokens"):
        field, count = "speculation.draft_tokens", speculation.draft_tokens
        _whole(field, count, 1, MAX_DRAFT_TOKENS)
        has_mode = speculation.mode != inference_pb2.SPECULATION_MODE_UNSPECIFIED
        _fits(field, count, has_mode, "none without speculation.mode")


def _check_sampling(sampling: inference_pb2.Sampling, limits: ModelLimits) -> int:
    for name, (fits, allowed) in _SAMPLING.items():
        if sampling.HasField(name):
            value = getattr(sampling, name)
            _fits(f"sampling.{name}", value, fits(value), allowed)
    if sampling.HasField("presence_penalty"):
        _signed("sampling.presence_penalty", sampling.presence_penalty)
    if sampling.HasField("frequency_penalty"):
        _signed("sampling.frequency_penalty", sampling.frequency_penalty)
    _check_biases(sampling.logit_bias, limits.vocab_size)
    if len(sampling.bad_token_ids) > MAX_BIASES:
        count = len(sampling.bad_token_ids)
        raise InvalidArgument("sampling.bad_token_ids", f"holds {count} ids; allowed are at most {MAX_BIASES}")
    check_token_ids("sampling.bad_token_ids", sampling.bad_token_ids, limits.vocab_size)
    if len(set(sampling.bad_token_ids)) == limits.vocab_size:
        raise InvalidArgument("sampling.bad_token_ids", "holds the whole vocabulary; one token must be left")
    if not sampling.HasField("n"):
        return 1
    _whole("sampling.n", sampling.n, 1, MAX_SAMPLES)
    return int(sampling.n)


def _check_biases(biases: Mapping[int, float], vocab_size: int) -> None:
    if len(biases) > MAX_BIASES:
        raise InvalidArgument("sampling.logit_bias", f"holds {len(biases)} ids; allowed are at most {MAX_BIASES}")
    for token_id, value in biases.items():
        field = f"sampling.logit_bias[{token_id}]"
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument(field, f"the id is outside the vocabulary; allowed are 0..{vocab_size - 1}")
        _signed(field, value)


def _check_stopping(stopping: inference_pb2.Stopping, limits: ModelLimits) -> None:
    if stopping.HasField("max_tokens") and stopping.max_tokens < 1:
        raise InvalidArgument("stopping.max_tokens", f"is {stopping.max_tokens}; allowed is a number >= 1")
    if stopping.HasField("min_tokens"):
        if stopping.min_tokens < 0:
            raise InvalidArgument("stopping.min_tokens", f"is {stopping.min_tokens}; allowed is a number >= 0")
        if stopping.HasField("max_tokens") and stopping.min_tokens > stopping.max_tokens:
            _fits("stopping.min_tokens", stopping.min_tokens, False, f"0..{stopping.max_tokens}, as max_tokens says")
        if stopping.min_tokens > limits.max_context_tokens:
            allowed = f"0..{limits.max_context_tokens}, the model's context"
            _fits("stopping.min_tokens", stopping.min_tokens, False, allowed)
    if len(stopping.stop) > MAX_STOPS:
        raise InvalidArgument("stopping.stop", f"holds {len(stopping.stop)} strings; allowed are at most {MAX_STOPS}")
    for index, stop in enumerate(stopping.stop):
        size = len(stop.encode())
        if not 1 <= size <= MAX_STOP_BYTES:
            raise InvalidArgument(f"stopping.stop[{index}]", f"has {size} bytes; allowed are 1..{MAX_STOP_BYTES}")
    if len(stopping.stop_token_ids) > MAX_STOP_TOKENS:
        count = len(stopping.stop_token_ids)
        raise InvalidArgument("stopping.stop_token_ids", f"holds {count} ids; allowed are at most {MAX_STOP_TOKENS}")
    check_token_ids("stopping.stop_token_ids", stopping.stop_token_ids, limits.vocab_size)


def _whole(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(field, f"is {value}; allowed are {low}..{high}")


def _signed(field: str, value: float) -> None:
    _fits(field, value, -100 <= value <= 100, "a number in [-100, 100]")


def _fits(field: str, value: float, fits: bool, allowed: str) -> None:
    if not fits:
        raise InvalidArgument(field, f"is {value}; allowed is {allowed}")
