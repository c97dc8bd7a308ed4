"""Every field of a `Submit` against what its proto comment allows, once more behind the gateway.

Invariant: a request comes out of here as documented or is refused by its proto path, alone. Comparisons are written so
that NaN fails them. Pure; called by the service. The conversion from protobuf to `Request` is here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.adapter_folder import check_adapter_name
from common.errors import InvalidArgument, Unimplemented
from common.labels import check_label
from common.tokens import unpack_tokens
from decoder.prompt_logprobs import MAX_ENTRIES
from decoder.sequence import (
    BeamParams,
    IntArray,
    Request,
    RequestNumber,
    SamplingParams,
    ScopePrefix,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from tessera.common.v1 import common_pb2
from tessera.decode.v1 import decode_pb2
from tessera.inference.v1 import inference_pb2

MAX_SAMPLES: Final = 16
MAX_CONSTRAINT_BYTES: Final = 65_536
MAX_STOP_IDS: Final = 64
MAX_BIASES: Final = 1024
MAX_LOGPROBS: Final = 20
MAX_DRAFT_TOKENS: Final = 16
MAX_BEAMS: Final = 16
MAX_BEAM_ENTRIES: Final = 500_000
MAX_LENGTH_PENALTY: Final = 10
DRAFT_TOKENS: Final = 8
MAX_ID_CHARACTERS: Final = 128
MAX_GRANT_BYTES: Final = 4096
HANDLE_BYTES: Final = 16
MAX_SCOPE_NAME: Final = 64
CACHE_PRIORITY: Final = 50
LEAST_WEIGHT: Final = 1e-6
MAX_TTL_SECONDS: Final = 100 * 365.25 * 86_400
_PRIVATE_SCOPES: Final = (common_pb2.SCOPE_UNSPECIFIED, common_pb2.SCOPE_PRIVATE)
_MODES: Final = {
    inference_pb2.SPECULATION_MODE_PROMPT_LOOKUP: SpeculationMode.PROMPT_LOOKUP,
    inference_pb2.SPECULATION_MODE_DRAFT_MODEL: SpeculationMode.DRAFT_MODEL,
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What bounds a request: ids below `vocab_size`, prompt and answer within `max_context` tokens."""

    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]
    prefix_cache: bool = True
    has_draft_model: bool = False


def request_of(submit: decode_pb2.Submit, model: ServedModel) -> Request:
    """The request of a submission. Raises InvalidArgument or Unimplemented at the first bad field."""
    if not 1 <= len(submit.request_id) <= MAX_ID_CHARACTERS or not submit.request_id.isprintable():
        raise InvalidArgument("request_id", f"allowed are 1..{MAX_ID_CHARACTERS} printable characters")
    if not 1 <= len(submit.grant) <= MAX_GRANT_BYTES:
        raise InvalidArgument("grant", f"has {len(submit.grant)} bytes; allowed are 1..{MAX_GRANT_BYTES}")
    prompt = _prompt(submit, model)
    _check_session(submit)
    _whole("priority", submit.priority, -100, 100)
    check_label(submit.request_label)
    if submit.adapter:
        check_adapter_name(submit.adapter)
    num_prompt_logprobs = _prompt_logprobs(submit, len(prompt))
    constrained = _check_constraint(submit)
    no_cache = not model.prefix_cache
    num_logprobs = None
    if submit.output.HasField("logprobs"):
        num_logprobs = _whole("output.logprobs", submit.output.logprobs, 0, MAX_LOGPROBS)
    return Request(
        number=RequestNumber(submit.request),
        request_id=submit.request_id,
        grant=submit.grant,
        prompt=prompt,
        sampling=_sampling(submit.sampling, model),
        stopping=_stopping(submit.stopping, model, len(prompt)),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        no_read=submit.cache.no_read or no_cache or num_prompt_logprobs is not None,
        no_store=submit.cache.no_store or no_cache,
        priority=submit.priority,
        cache_priority=_cache_priority(submit.cache),
        cache_ttl_seconds=_cache_ttl(submit.cache),
        scope=_scope(submit.cache, len(prompt)),
        max_context=model.max_context,
        session_handle=submit.session_handle,
        session_tokens=submit.session_tokens,
        keep_seconds=submit.keep_seconds,
        speculation=None if constrained else _speculation(submit.speculation, model),
        beam=_beam(submit, model, len(prompt)),
        tenant=submit.tenant,
        tenant_weight=_weight(submit),
    )


def _check_constraint(submit: decode_pb2.Submit) -> bool:
    if not submit.output.HasField("constraint"):
        return False
    kind = submit.output.constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("output.constraint", "is empty; allowed is one of json_schema, regex and grammar")
    size = len(getattr(submit.output.constraint, kind).encode())
    if not 1 <= size <= MAX_CONSTRAINT_BYTES:
        raise InvalidArgument(f"output.constraint.{kind}", f"has {size} bytes; allowed are 1..{MAX_CONSTRAINT_BYTES}")
    if submit.stopping.min_tokens or submit.stopping.ignore_eos:
        field = "stopping.min_tokens" if submit.stopping.min_tokens else "stopping.ignore_eos"
        raise InvalidArgument(field, "is not allowed with output.constraint: that says where the text ends")
    if submit.beam.width:
        raise InvalidArgument("beam.width", "with output.constraint allowed is 0")
    return True


def _prompt_logprobs(submit: decode_pb2.Submit, num_prompt: int) -> int | None:
    if not submit.output.HasField("prompt_logprobs"):
        return None
    count = _whole("output.prompt_logprobs", submit.output.prompt_logprobs, 0, MAX_LOGPROBS)
    if submit.session_handle:
        raise InvalidArgument("output.prompt_logprobs", "a kept conversation is not computed again; allowed is none")
    if num_prompt * (1 + count) > MAX_ENTRIES:
        raise InvalidArgument(
            "output.prompt_logprobs", f"tokens of the prompt times (1 + it) may be {MAX_ENTRIES}; these are "
            f"{num_prompt * (1 + count)}",
        )  # fmt: skip
    return count


def _weight(submit: decode_pb2.Submit) -> float:
    if len(submit.tenant) > MAX_ID_CHARACTERS:
        raise InvalidArgument("tenant", f"has {len(submit.tenant)} characters; allowed are 0..{MAX_ID_CHARACTERS}")
    if not 0 <= submit.tenant_weight < float("inf"):
        raise InvalidArgument("tenant_weight", "allowed is a finite number >= 0; 0 is 1")
    return min(max(submit.tenant_weight or 1.0, LEAST_WEIGHT), 1 / LEAST_WEIGHT)


def _prompt(submit: decode_pb2.Submit, model: ServedModel) -> IntArray:
    prompt = unpack_tokens(submit.tokens)
    if not len(prompt) and submit.session_handle:
        return prompt
    if not 1 <= len(prompt) < model.max_context:
        raise InvalidArgument("tokens", f"the prompt has {len(prompt)} tokens; allowed are 1..{model.max_context - 1}")
    highest = int(prompt.max())
    if highest >= model.vocab_size:
        raise InvalidArgument("tokens", f"holds {highest}; allowed are 0..{model.vocab_size - 1}")
    return prompt


def _check_session(submit: decode_pb2.Submit) -> None:
    if submit.session_handle:
        if len(submit.session_handle) != HANDLE_BYTES:
            raise InvalidArgument("session_handle", f"allowed are {HANDLE_BYTES} bytes")
        if submit.sampling.HasField("n") and submit.sampling.n != 1:
            raise InvalidArgument("sampling.n", "allowed is 1 where a kept conversation is continued")
        if submit.cache.scope not in _PRIVATE_SCOPES:
            raise InvalidArgument("cache.scope", "allowed is none where a kept conversation is continued")
    elif submit.session_tokens:
        raise InvalidArgument("session_tokens", "allowed is none without session_handle")
    if not 0 <= submit.keep_seconds < float("inf"):
        raise InvalidArgument("keep_seconds", "allowed is a finite number >= 0")


def _beam(submit: decode_pb2.Submit, model: ServedModel, num_prompt: int) -> BeamParams | None:
    if not submit.beam.width:
        return None
    width = _whole("beam.width", submit.beam.width, 1, MAX_BEAMS)
    never = set(submit.stopping.stop_token_ids) | set(submit.sampling.bad_token_ids) | model.eos_ids
    if model.vocab_size - len(never) < width:
        raise InvalidArgument("beam.width", f"is {width}; allowed is at most the number of tokens that go on")
    if not -MAX_LENGTH_PENALTY <= submit.beam.length_penalty <= MAX_LENGTH_PENALTY:
        raise InvalidArgument("beam.length_penalty", f"allowed are -{MAX_LENGTH_PENALTY}..{MAX_LENGTH_PENALTY}")
    sampling = submit.sampling
    if sampling.n > width:
        raise InvalidArgument("sampling.n", f"is {sampling.n}; allowed are 1..{width}, the width of the beam")
    others = {
        "sampling.temperature": sampling.temperature > 0,
        "sampling.top_p": sampling.HasField("top_p") and sampling.top_p < 1,
        "sampling.top_k": sampling.top_k > 0,
        "sampling.min_p": sampling.min_p > 0,
        "sampling.repetition_penalty": sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1,
        "sampling.presence_penalty": sampling.presence_penalty != 0,
        "sampling.frequency_penalty": sampling.frequency_penalty != 0,
        "sampling.logit_bias": bool(sampling.logit_bias),
        "speculation.mode": submit.speculation.mode != inference_pb2.SPECULATION_MODE_UNSPECIFIED,
        "session_handle": bool(submit.session_handle),
        "keep_seconds": submit.keep_seconds > 0,
    }
    for field, is_set in others.items():
        if is_set:
            raise InvalidArgument(field, "allowed is none with a beam search")
    if submit.output.HasField("logprobs"):  # all answers come in one message
        room = model.max_context - num_prompt
        num_tokens = min(submit.stopping.max_tokens, room) if submit.stopping.HasField("max_tokens") else room
        entries = max(1, sampling.n) * num_tokens * (1 + submit.output.logprobs)
        if entries > MAX_BEAM_ENTRIES:
            raise InvalidArgument(
                "output.logprobs",
                f"answers times stopping.max_tokens times (1 + it) are {entries}; allowed are {MAX_BEAM_ENTRIES}",
            )
    return BeamParams(width, submit.beam.length_penalty)


def _speculation(speculation: inference_pb2.Speculation, model: ServedModel) -> SpeculationParams | None:
    count = DRAFT_TOKENS
    if speculation.HasField("draft_tokens"):
        count = _whole("speculation.draft_tokens", speculation.draft_tokens, 1, MAX_DRAFT_TOKENS)
    if speculation.mode == inference_pb2.SPECULATION_MODE_UNSPECIFIED:
        return None
    if speculation.mode not in _MODES:
        raise InvalidArgument("speculation.mode", "allowed are PROMPT_LOOKUP and DRAFT_MODEL")
    if speculation.mode == inference_pb2.SPECULATION_MODE_DRAFT_MODEL and not model.has_draft_model:
        raise Unimplemented(
            "speculation.mode: the server has no draft model; it is started with --draft-model",
            reason="NO_DRAFT_MODEL", metadata={"field": "speculation.mode"},
        )  # fmt: skip
    return SpeculationParams(_MODES[speculation.mode], count)


def _cache_priority(cache: inference_pb2.Cache) -> int:
    return _whole("cache.priority", cache.priority, 0, 100) if cache.HasField("priority") else CACHE_PRIORITY


def _cache_ttl(cache: inference_pb2.Cache) -> float:
    """0 where the blocks never expire."""
    if not cache.HasField("ttl_seconds"):
        return 0.0
    if not 0 < cache.ttl_seconds <= MAX_TTL_SECONDS:
        raise InvalidArgument("cache.ttl_seconds", "allowed is a number > 0 and at most 100 years")
    return cache.ttl_seconds


def _scope(cache: inference_pb2.Cache, num_prompt: int) -> ScopePrefix | None:
    """Where the first tokens of the prompt lie. A group's are counted here: what is generated is none of them."""
    if cache.scope == common_pb2.SCOPE_GROUP:
        if not 1 <= len(cache.scope_name) <= MAX_SCOPE_NAME or not cache.scope_name.isprintable():
            raise InvalidArgument("cache.scope_name", f"allowed are 1..{MAX_SCOPE_NAME} printable characters")
        _whole("cache.public_tokens", cache.public_tokens, 0, num_prompt)
        return ScopePrefix(cache.scope_name, cache.public_tokens or num_prompt)
    if cache.scope_name:
        raise InvalidArgument("cache.scope_name", "is only allowed in the group scope")
    if cache.scope == common_pb2.SCOPE_PUBLIC:
        _whole("cache.public_tokens", cache.public_tokens, 0, num_prompt)
        return ScopePrefix("", cache.public_tokens)
    if cache.scope not in _PRIVATE_SCOPES:
        raise InvalidArgument("cache.scope", "allowed are the private, the group and the public scope")
    _whole("cache.public_tokens", cache.public_tokens, 0, 0)
    return None


def _sampling(sampling: inference_pb2.Sampling, model: ServedModel) -> SamplingParams:
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    if not 0 <= temperature < float("inf"):
        raise InvalidArgument("sampling.temperature", "allowed is a finite number >= 0; 0 is greedy")
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise InvalidArgument("sampling.top_p", "allowed is a number in (0, 1]")
    if sampling.top_k < 0:
        raise InvalidArgument("sampling.top_k", "allowed is a number >= 0; 0 is all")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidArgument("sampling.min_p", "allowed is a number in [0, 1]")
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    if not 0 < repetition <= 100:
        raise InvalidArgument("sampling.repetition_penalty", "allowed is a number in (0, 100]")
    if temperature > 0 and not sampling.HasField("seed"):
        raise InvalidArgument("sampling.seed", "is not set; a submission brings one")
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=min(sampling.top_k, model.vocab_size),
        min_p=sampling.min_p,
        repetition_penalty=repetition,
        presence_penalty=_signed("sampling.presence_penalty", sampling.presence_penalty),
        frequency_penalty=_signed("sampling.frequency_penalty", sampling.frequency_penalty),
        seed=sampling.seed,
        logit_bias=_biases(sampling, model),
        bad_ids=_bad_ids(sampling, model),
        num_samples=_whole("sampling.n", sampling.n, 1, MAX_SAMPLES) if sampling.HasField("n") else 1,
    )


def _bad_ids(sampling: inference_pb2.Sampling, model: ServedModel) -> frozenset[int]:
    if len(sampling.bad_token_ids) > MAX_BIASES:
        raise InvalidArgument("sampling.bad_token_ids", f"allowed are at most {MAX_BIASES} ids")
    for index, token in enumerate(sampling.bad_token_ids):
        _whole(f"sampling.bad_token_ids[{index}]", token, 0, model.vocab_size - 1)
    bad = frozenset(sampling.bad_token_ids)
    if len(bad) == model.vocab_size:
        raise InvalidArgument("sampling.bad_token_ids", "holds the whole vocabulary; one token must be left")
    return bad


def _biases(sampling: inference_pb2.Sampling, model: ServedModel) -> tuple[tuple[int, float], ...]:
    if len(sampling.logit_bias) > MAX_BIASES:
        raise InvalidArgument("sampling.logit_bias", f"allowed are at most {MAX_BIASES} ids")
    for token, value in sampling.logit_bias.items():
        field = f"sampling.logit_bias[{token}]"
        _whole(field, token, 0, model.vocab_size - 1)
        _signed(field, value)
    return tuple(sorted(sampling.logit_bias.items()))


def _stopping(stopping: inference_pb2.Stopping, model: ServedModel, num_prompt: int) -> StoppingParams:
    room = model.max_context - num_prompt
    max_tokens = room
    if stopping.HasField("max_tokens"):
        if stopping.max_tokens < 1:
            raise InvalidArgument("stopping.max_tokens", f"is {stopping.max_tokens}; allowed is a number >= 1")
        max_tokens = min(stopping.max_tokens, room)
    if stopping.min_tokens < 0:
        raise InvalidArgument("stopping.min_tokens", f"is {stopping.min_tokens}; allowed is a number >= 0")
    if stopping.stop:
        raise InvalidArgument("stopping.stop", "stop strings are the gateway's work; allowed is none")
    if len(stopping.stop_token_ids) > MAX_STOP_IDS:
        raise InvalidArgument("stopping.stop_token_ids", f"allowed are at most {MAX_STOP_IDS}")
    for index, token in enumerate(stopping.stop_token_ids):
        _whole(f"stopping.stop_token_ids[{index}]", token, 0, model.vocab_size - 1)
    stop_ids = frozenset(stopping.stop_token_ids)
    return StoppingParams(
        max_tokens=max_tokens,
        min_tokens=stopping.min_tokens,
        stop_ids=stop_ids if stopping.ignore_eos else stop_ids | model.eos_ids,
    )


def _whole(field: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise InvalidArgument(field, f"is {value}; allowed are {low}..{high}")
    return value


def _signed(field: str, value: float) -> float:
    if not -100 <= value <= 100:
        raise InvalidArgument(field, "allowed is a number in [-100, 100]")
    return value
