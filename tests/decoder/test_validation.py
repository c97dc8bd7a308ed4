"""Submissions: documented values pass with their documented meaning, all others are refused by their proto path."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from common.errors import InvalidArgument, Unimplemented
from common.tokens import pack_tokens
from decoder.sequence import BeamParams, Request, ScopePrefix, SpeculationMode, SpeculationParams
from decoder.validation import ServedModel, request_of
from tessera.common.v1 import common_pb2
from tessera.decode.v1 import decode_pb2

VOCAB = 100
MODEL = ServedModel(vocab_size=VOCAB, max_context=32, eos_ids=frozenset({2}))


def submit(**changes: Any) -> decode_pb2.Submit:
    """A good submission with `section__field=value` changes."""
    message = decode_pb2.Submit(request=7, request_id="r-1", grant=b"g", tokens=pack_tokens([1, 2, 3]))
    message.sampling.seed = 5
    for path, value in changes.items():
        target, name = message, path
        if "__" in path:
            section, name = path.split("__")
            target = getattr(message, section)
        if isinstance(value, (list, dict)):
            getattr(target, name).MergeFrom(value) if isinstance(value, list) else getattr(target, name).update(value)
        else:
            setattr(target, name, value)
    return message


def accept(**changes: Any) -> Request:
    return request_of(submit(**changes), MODEL)


def test_unset_fields_have_their_documented_meaning() -> None:
    """Temperature 1, no filter, one sample, the context's end, the model's own stops, cache on."""
    request = accept()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (sampling.num_samples, sampling.seed, sampling.logit_bias) == (1, 5, ())
    assert (request.stopping.max_tokens, request.stopping.min_tokens) == (29, 0)
    assert request.stopping.stop_ids == {2}
    assert (request.no_read, request.no_store, request.num_logprobs) == (False, False, None)
    assert request.prompt.tolist() == [1, 2, 3]


def test_set_fields_arrive() -> None:
    """Every value that is in range comes through as it is; max_tokens is cut to the context."""
    request = accept(
        sampling__temperature=0.0, sampling__top_p=0.5, sampling__top_k=10**12, sampling__min_p=1.0, sampling__n=16,
        sampling__repetition_penalty=100.0, sampling__presence_penalty=-100.0, sampling__frequency_penalty=100.0,
        sampling__seed=2**64 - 1, sampling__logit_bias={0: -100.0, VOCAB - 1: 100.0}, stopping__max_tokens=2**63 - 1,
        stopping__min_tokens=4, stopping__stop_token_ids=[0, VOCAB - 1], stopping__ignore_eos=True,
        output__logprobs=20, priority=-100, cache__no_read=True, cache__no_store=True,
    )  # fmt: skip
    assert (request.sampling.top_k, request.sampling.num_samples, request.sampling.seed) == (VOCAB, 16, 2**64 - 1)
    assert request.sampling.logit_bias == ((0, -100.0), (VOCAB - 1, 100.0))
    assert (request.stopping.max_tokens, request.stopping.min_tokens) == (29, 4)
    assert request.stopping.stop_ids == {0, VOCAB - 1}
    assert (request.num_logprobs, request.priority, request.no_read, request.no_store) == (20, -100, True, True)


def test_a_decoder_without_prefix_cache_reads_and_stores_nothing() -> None:
    """--no-prefix-cache holds for every request."""
    request = request_of(submit(), ServedModel(VOCAB, 32, frozenset(), prefix_cache=False))
    assert request.no_read and request.no_store


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("sampling.temperature", [-1.0, math.nan, math.inf, -math.inf, -5e-324]),
        ("sampling.top_p", [0.0, -1.0, 1.1, math.nan]),
        ("sampling.top_k", [-1, -(2**63)]),
        ("sampling.min_p", [-0.1, 1.1, math.nan]),
        ("sampling.repetition_penalty", [0.0, -1.0, 100.1, math.inf, math.nan]),
        ("sampling.presence_penalty", [-100.1, 101.0, math.inf, math.nan]),
        ("sampling.frequency_penalty", [-100.1, 101.0, -math.inf, math.nan]),
        ("sampling.n", [0, -1, 17, 2**62]),
        ("sampling.logit_bias", [{-1: 0.0}, {VOCAB: 0.0}, {2**63 - 1: 0.0}, {1: math.nan}, {1: 100.5}]),
        ("stopping.max_tokens", [0, -1]),
        ("stopping.min_tokens", [-1]),
        ("stopping.stop", [["stop"]]),
        ("stopping.stop_token_ids", [[-1], [VOCAB], [2**31 - 1], [2**63 - 1], [1] * 65]),
        ("output.logprobs", [-1, 21]),
        ("speculation.draft_tokens", [0, -1, 17, 2**62]),
        ("speculation.mode", [3, 99]),
        ("beam.width", [-1, 17, 2**62]),
        ("priority", [-101, 101]),
        ("request_id", ["", "x" * 129, "a\nb"]),
        ("grant", [b"", b"x" * 5000]),
        ("request_label", ["x" * 257, "é" * 129, "\0", "a\x1b[2J", "a\nb", "\u202e"]),
        (
            "tokens",
            [b"", b"\x01", pack_tokens([VOCAB]), pack_tokens(np.array([-1], np.int32)), pack_tokens([1] * 32)],
        ),
    ],
)
def test_values_out_of_range_are_refused_by_name(path: str, values: list[Any]) -> None:
    """Each bad value is INVALID_ARGUMENT with the field's own path."""
    for value in values:
        with pytest.raises(InvalidArgument) as caught:
            accept(**{path.replace(".", "__"): value})
        assert caught.value.field.startswith(path), value


def test_a_bound_on_biases() -> None:
    """More than 1024 biases are refused."""
    model = ServedModel(5000, 32, frozenset())
    message = submit(sampling__logit_bias=dict.fromkeys(range(1025), 0.0))
    with pytest.raises(InvalidArgument):
        request_of(message, model)


def test_a_sampled_request_brings_its_seed() -> None:
    """Without a seed nothing could be repeated: refused, unless it is greedy."""
    message = submit()
    message.sampling.ClearField("seed")
    with pytest.raises(InvalidArgument):
        request_of(message, MODEL)
    message.sampling.temperature = 0
    assert request_of(message, MODEL).sampling.temperature == 0


def test_a_scope_covers_the_prompt_and_never_what_is_generated() -> None:
    """Without a number a group's scope is exactly the prompt, also when the request resumes with more tokens; the
    public one is the daemon's to tell."""
    group = accept(cache__scope=common_pb2.SCOPE_GROUP, cache__scope_name="team")
    assert group.scope == ScopePrefix("team", len(group.prompt))
    part = accept(cache__scope=common_pb2.SCOPE_GROUP, cache__scope_name="team", cache__public_tokens=2)
    assert part.scope == ScopePrefix("team", 2)
    assert accept(cache__scope=common_pb2.SCOPE_PUBLIC).scope == ScopePrefix("", 0)
    assert accept(cache__scope=common_pb2.SCOPE_PUBLIC, cache__public_tokens=3).scope == ScopePrefix("", 3)
    assert accept(cache__scope=common_pb2.SCOPE_PRIVATE).scope is None
    assert accept().scope is None


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"cache__scope": 9}, "cache.scope"),
        ({"cache__scope_name": "team"}, "cache.scope_name"),
        ({"cache__scope": common_pb2.SCOPE_PUBLIC, "cache__scope_name": "team"}, "cache.scope_name"),
        ({"cache__scope": common_pb2.SCOPE_GROUP}, "cache.scope_name"),
        ({"cache__scope": common_pb2.SCOPE_GROUP, "cache__scope_name": "x" * 65}, "cache.scope_name"),
        ({"cache__public_tokens": 1}, "cache.public_tokens"),
        ({"cache__scope": common_pb2.SCOPE_PUBLIC, "cache__public_tokens": 4}, "cache.public_tokens"),
        ({"cache__scope": common_pb2.SCOPE_PUBLIC, "cache__public_tokens": -1}, "cache.public_tokens"),
    ],
)
def test_a_scope_outside_its_comment_is_refused_by_its_path(fields: dict[str, Any], path: str) -> None:
    """A prompt of three tokens has at most three in a wider scope, and only a group has a name."""
    with pytest.raises(InvalidArgument, match="allowed") as caught:
        accept(**fields)
    assert caught.value.field == path


def test_a_beam_search_arrives_and_what_does_not_go_with_it_is_refused() -> None:
    """Width and penalty as they are, 0 is off; what would sample, change logits or keep is refused by its name."""
    assert accept(beam__width=4, beam__length_penalty=0.5, sampling__n=3).beam == BeamParams(4, 0.5)
    assert accept(beam__width=0).beam is None
    refused: dict[str, Any] = {
        "sampling__n": 5, "sampling__temperature": 0.5, "sampling__top_p": 0.5, "sampling__top_k": 3,
        "sampling__min_p": 0.5, "sampling__repetition_penalty": 2.0, "sampling__presence_penalty": 1.0,
        "sampling__frequency_penalty": 1.0, "sampling__logit_bias": {1: 1.0}, "speculation__mode": 1,
        "keep_seconds": 1.0, "beam__length_penalty": math.nan,
    }  # fmt: skip
    wide = ServedModel(VOCAB, 20_000, frozenset())
    many = {"beam__width": 16, "sampling__n": 16, "output__logprobs": 20}
    with pytest.raises(InvalidArgument, match=r"stopping.max_tokens.*allowed") as caught:
        request_of(submit(**many), wide)
    assert caught.value.field == "output.logprobs"
    assert request_of(submit(**many, stopping__max_tokens=500_000 // 16 // 21), wide).beam is not None
    for path, value in refused.items():
        with pytest.raises(InvalidArgument, match="allowed") as caught:
            accept(**{"beam__width": 4, path: value})
        assert caught.value.field == path.replace("__", ".")


def test_a_draft_model_is_used_where_there_is_one() -> None:
    """Speculation arrives as asked; a decoder without a draft model refuses that mode by name."""
    message = submit(speculation__mode=2, speculation__draft_tokens=3)
    request = request_of(message, ServedModel(VOCAB, 32, frozenset(), has_draft_model=True))
    assert request.speculation == SpeculationParams(SpeculationMode.DRAFT_MODEL, 3)
    assert accept(speculation__mode=1).speculation == SpeculationParams(SpeculationMode.PROMPT_LOOKUP, 8)
    assert accept(speculation__draft_tokens=3).speculation is None
    with pytest.raises(Unimplemented, match=r"speculation\.mode.*--draft-model") as caught:
        request_of(message, MODEL)
    assert caught.value.metadata == {"field": "speculation.mode"}


def test_a_kept_conversation_goes_on_in_its_own_scope() -> None:
    """With a handle no wider scope may be named, whichever; the private one may, and without a handle each may."""
    handle = {"session_handle": bytes(16)}
    group = {"cache__scope": common_pb2.SCOPE_GROUP, "cache__scope_name": "team"}
    public = {"cache__scope": common_pb2.SCOPE_PUBLIC}
    for wider in (group, public):
        with pytest.raises(InvalidArgument) as caught:
            accept(**handle, **wider)
        assert caught.value.field == "cache.scope"
        assert accept(**wider).scope is not None
    assert accept(**handle, cache__scope=common_pb2.SCOPE_PRIVATE).scope is None


def test_prompt_logprobs_read_nothing_from_the_cache_and_have_bounds() -> None:
    """They are computed anew; so many as no message would carry, or of a kept conversation, are refused by name."""
    found = accept(output__prompt_logprobs=0)
    assert (found.num_prompt_logprobs, found.no_read, found.no_store) == (0, True, False)
    for fields in ({"output__prompt_logprobs": 21}, {"output__prompt_logprobs": 0, "session_handle": bytes(16)}):
        with pytest.raises(InvalidArgument) as caught:
            accept(**fields)
        assert caught.value.field == "output.prompt_logprobs"


def test_bad_token_ids_are_of_the_vocabulary_and_leave_a_token() -> None:
    """Each is checked, and the whole vocabulary is refused."""
    assert accept(sampling__bad_token_ids=[3, 3, 5]).sampling.bad_ids == {3, 5}
    for value in ([-1], list(range(VOCAB)), [VOCAB]):
        with pytest.raises(InvalidArgument, match="bad_token_ids"):
            accept(sampling__bad_token_ids=value)
