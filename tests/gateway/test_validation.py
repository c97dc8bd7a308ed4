"""Every field of a request, inside and outside of what its comment allows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from common.errors import InvalidArgument
from gateway.validation import (
    ModelLimits,
    check_prompt_length,
    check_public_tokens,
    check_request,
    check_token_ids,
)
from tessera.common.v1 import common_pb2
from tessera.inference.v1 import inference_pb2 as pb

VOCABULARY = 1000
LIMITS = ModelLimits("tiny", VOCABULARY, 4096)
NAN, INF = math.nan, math.inf


def sampling(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", sampling=pb.Sampling(**fields))


def stopping(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", stopping=pb.Stopping(**fields))


def cache(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", cache=pb.Cache(**fields))


def constrained(stopping: pb.Stopping | None = None, **kind: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(stopping=stopping, output=pb.Output(constraint=pb.Constraint(**kind)))


def session(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", session=pb.Session(**fields))


def beam(
    request: pb.GenerateRequest | None = None, *, width: int = 4, length_penalty: float = 0.0, **fields: Any
) -> pb.GenerateRequest:
    made = pb.GenerateRequest(beam=pb.Beam(width=width, length_penalty=length_penalty), **fields)
    made.MergeFrom(request or pb.GenerateRequest(text="x"))
    return made


def speculation(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", speculation=pb.Speculation(mode="SPECULATION_MODE_PROMPT_LOOKUP", **fields))


HANDLE = "AAECAwQFBgcICQoLDA0ODw"  # the bytes 0..15
OUT_OF_VOCABULARY = [-1, VOCABULARY, VOCABULARY + 1, 2**31 - 1, 2**63 - 1]
REFUSED: list[tuple[Callable[[], pb.GenerateRequest], str]] = [
    *((lambda v=v: sampling(temperature=v), "sampling.temperature") for v in (NAN, INF, -INF, -1, -1e-45)),
    *((lambda v=v: sampling(top_p=v), "sampling.top_p") for v in (0, -1, 1.1, NAN, INF)),
    *((lambda v=v: sampling(top_k=v), "sampling.top_k") for v in (-1, -(2**63))),
    *((lambda v=v: sampling(min_p=v), "sampling.min_p") for v in (-0.1, 1.1, NAN)),
    *((lambda v=v: sampling(repetition_penalty=v), "sampling.repetition_penalty") for v in (0, -1, 100.1, INF, NAN)),
    *((lambda v=v: sampling(presence_penalty=v), "sampling.presence_penalty") for v in (-101, 101, INF, NAN)),
    *((lambda v=v: sampling(frequency_penalty=v), "sampling.frequency_penalty") for v in (-101, 101, -INF, NAN)),
    *((lambda v=v: sampling(n=v), "sampling.n") for v in (0, -1, 17, 2**63 - 1)),
    *((lambda v=v: sampling(logit_bias={v: 1.0}), f"sampling.logit_bias[{v}]") for v in OUT_OF_VOCABULARY),
    *((lambda v=v: sampling(logit_bias={5: v}), "sampling.logit_bias[5]") for v in (101, -101, NAN, INF)),
    (lambda: sampling(logit_bias=dict.fromkeys(range(1025), 0.0)), "sampling.logit_bias"),
    *((lambda v=v: stopping(max_tokens=v), "stopping.max_tokens") for v in (0, -1, -(2**63))),
    *((lambda v=v: stopping(min_tokens=v), "stopping.min_tokens") for v in (-1, 5000, 2**63 - 1)),
    (lambda: stopping(min_tokens=6, max_tokens=5), "stopping.min_tokens"),
    (lambda: stopping(stop=["x"] * 17), "stopping.stop"),
    (lambda: stopping(stop=["ok", ""]), "stopping.stop[1]"),
    (lambda: stopping(stop=["é" * 513]), "stopping.stop[0]"),
    *((lambda v=v: stopping(stop_token_ids=[1, v]), "stopping.stop_token_ids[1]") for v in OUT_OF_VOCABULARY),
    (lambda: stopping(stop_token_ids=[1] * 65), "stopping.stop_token_ids"),
    *((lambda v=v: pb.GenerateRequest(output=pb.Output(logprobs=v)), "output.logprobs") for v in (-1, 21)),
    *((lambda v=v: pb.GenerateRequest(priority=v), "priority") for v in (-101, 101)),
    (lambda: pb.GenerateRequest(request_label="é" * 129), "request_label"),
    *(
        (lambda v=v: pb.GenerateRequest(request_label=f"a{v}b"), "request_label")
        for v in ("\0", "\x1b[2J", "\n", "\t", "\x7f", "\x9b", "\u2028", "\u202e")
    ),
    *((lambda v=v: cache(priority=v), "cache.priority") for v in (-1, 101)),
    *((lambda v=v: cache(ttl_seconds=v), "cache.ttl_seconds") for v in (0, -1, math.nan, math.inf, 3.2e9)),
    *((lambda v=v: cache(scope=v), "cache.scope") for v in (4, 99, -1)),
    *(
        (lambda v=v: cache(scope=common_pb2.SCOPE_GROUP, scope_name=v), "cache.scope_name")
        for v in ("", "g" * 65, "a\nb", "\0")
    ),
    (lambda: cache(scope_name="g"), "cache.scope_name"),
    (lambda: cache(scope=common_pb2.SCOPE_PUBLIC, scope_name="g"), "cache.scope_name"),
    (lambda: cache(public_tokens=1), "cache.public_tokens"),
    (lambda: cache(scope=common_pb2.SCOPE_PUBLIC, public_tokens=-1), "cache.public_tokens"),
    (lambda: cache(scope=common_pb2.SCOPE_GROUP, scope_name="g", public_tokens=-(2**63)), "cache.public_tokens"),
    (
        lambda: pb.GenerateRequest(cache=pb.Cache(scope=common_pb2.SCOPE_PUBLIC), session=pb.Session(handle="00" * 16)),
        "cache.scope",
    ),
    (lambda: session(num_tokens=3), "session.num_tokens"),
    *((lambda v=v: session(handle=HANDLE, num_tokens=v), "session.num_tokens") for v in (0, -1, 2**31)),
    *((lambda v=v: session(keep_seconds=v), "session.keep_seconds") for v in (0.0, -1.0, math.nan)),
    (lambda: pb.GenerateRequest(session=pb.Session(handle=HANDLE), sampling=pb.Sampling(n=2)), "sampling.n"),
    *(
        (lambda v=v: pb.GenerateRequest(output=pb.Output(prompt_logprobs=v)), "output.prompt_logprobs")
        for v in (-1, 21, 2**63 - 1)
    ),
    (
        lambda: pb.GenerateRequest(output=pb.Output(prompt_logprobs=0), session=pb.Session(handle=HANDLE)),
        "output.prompt_logprobs",
    ),
    (lambda: constrained(), "output.constraint"),
    (lambda: constrained(regex=""), "output.constraint.regex"),
    (lambda: constrained(grammar="\u00e9" * 32_769), "output.constraint.grammar"),
    (lambda: constrained(pb.Stopping(min_tokens=1), json_schema="{}"), "stopping.min_tokens"),
    (lambda: constrained(pb.Stopping(ignore_eos=True), json_schema="{}"), "stopping.ignore_eos"),
    (lambda: sampling(bad_token_ids=[5, -1]), "sampling.bad_token_ids[1]"),
    (lambda: sampling(bad_token_ids=[2**40]), "sampling.bad_token_ids[0]"),
    (lambda: sampling(bad_token_ids=[5] * 1025), "sampling.bad_token_ids"),
    (lambda: pb.GenerateRequest(speculation=pb.Speculation(mode=7)), "speculation.mode"),  # type: ignore[arg-type]
    *((lambda v=v: beam(width=v), "beam.width") for v in (-1, 17, 2**62)),
    *((lambda v=v: beam(length_penalty=v), "beam.length_penalty") for v in (-10.1, 11.0, math.nan, math.inf)),
    (lambda: beam(pb.GenerateRequest(sampling=pb.Sampling(n=5))), "sampling.n"),
    (lambda: beam(sampling(temperature=0.1)), "sampling.temperature"),
    (lambda: beam(sampling(top_p=0.9)), "sampling.top_p"),
    (lambda: beam(sampling(top_k=1)), "sampling.top_k"),
    (lambda: beam(sampling(min_p=0.1)), "sampling.min_p"),
    (lambda: beam(sampling(repetition_penalty=1.1)), "sampling.repetition_penalty"),
    (lambda: beam(sampling(presence_penalty=-1)), "sampling.presence_penalty"),
    (lambda: beam(sampling(frequency_penalty=1)), "sampling.frequency_penalty"),
    (lambda: beam(sampling(logit_bias={1: 1.0})), "sampling.logit_bias"),
    (lambda: beam(stopping(stop=["x"])), "stopping.stop"),
    (lambda: beam(speculation()), "speculation.mode"),
    (lambda: beam(session(keep_seconds=1)), "session"),
    *((lambda v=v: pb.GenerateRequest(adapter=v), "adapter") for v in (".a", "..", "a/b", "a b", "x" * 65, "\0", "é")),
    *((lambda v=v: speculation(draft_tokens=v), "speculation.draft_tokens") for v in (0, -1, 17, 2**63 - 1)),
    (lambda: pb.GenerateRequest(speculation=pb.Speculation(draft_tokens=4)), "speculation.draft_tokens"),
    (lambda: beam(width=0, length_penalty=0.5), "beam.length_penalty"),
]
ACCEPTED: list[pb.GenerateRequest] = [
    pb.GenerateRequest(),
    *(sampling(temperature=v) for v in (0, 1e-45, 1e-4, 1, 1e30)),
    *(sampling(top_p=v) for v in (1e-9, 1)),
    *(sampling(top_k=v) for v in (0, 1, VOCABULARY, VOCABULARY + 1, 10**7)),
    sampling(min_p=1, repetition_penalty=100, presence_penalty=-100, frequency_penalty=100, seed=2**64 - 1, n=16),
    sampling(logit_bias={0: -100.0, VOCABULARY - 1: 100.0}),
    stopping(max_tokens=2**63 - 1, min_tokens=0, stop=["é" * 512] * 16, stop_token_ids=[0, VOCABULARY - 1]),
    pb.GenerateRequest(output=pb.Output(logprobs=20), priority=-100, request_label="é" * 128),
    pb.GenerateRequest(request_label="job 7 / \u00a0Zürich 東京 \U0001f469\u200d\U0001f680"),
    cache(scope=common_pb2.SCOPE_PRIVATE, priority=50, no_read=True, no_store=True),
    *(cache(priority=v) for v in (0, 51, 100)),
    *(cache(ttl_seconds=v) for v in (1e-9, 1, 3.1e9)),
    pb.GenerateRequest(speculation=pb.Speculation()),
    *(pb.GenerateRequest(adapter=v) for v in ("a", "sql-v2.1", "_", "x" * 64)),
    pb.GenerateRequest(speculation=pb.Speculation(mode="SPECULATION_MODE_DRAFT_MODEL")),
    *(speculation(draft_tokens=v) for v in (1, 16)),
    *(beam(width=v) for v in (0, 1, 16)),
    *(beam(length_penalty=v) for v in (-10, 10)),
    beam(sampling(n=4, temperature=0, top_p=1, repetition_penalty=1, seed=3)),
    beam(stopping(min_tokens=2, stop_token_ids=[1]), output=pb.Output(logprobs=1)),
    beam(sampling(temperature=1), width=0),
    cache(scope=common_pb2.SCOPE_PUBLIC, public_tokens=2**40),
    cache(scope=common_pb2.SCOPE_GROUP, scope_name="g" * 64),
    session(),
    session(handle=HANDLE, num_tokens=1, keep_seconds=1e-9),
    session(keep_seconds=math.inf),
    pb.GenerateRequest(session=pb.Session(keep_seconds=1), sampling=pb.Sampling(n=16)),
]


@pytest.mark.parametrize(("make", "field"), REFUSED)
def test_a_value_outside_its_comment_is_refused_by_its_path(make: Callable[[], pb.GenerateRequest], field: str) -> None:
    """Rows 35 and 36: INVALID_ARGUMENT names the field and says what is allowed."""
    with pytest.raises(InvalidArgument, match="allowed") as caught:
        check_request(make(), LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (sampling(temperature=-0.25), "is -0.25; allowed is a finite number >= 0"),
        (sampling(top_p=1.5), "is 1.5; allowed is a number in (0, 1]"),
        (sampling(top_k=-3), "is -3; allowed is a number >= 0"),
        (sampling(presence_penalty=NAN), "is nan; allowed is a number in [-100, 100]"),
        (sampling(bad_token_ids=[5] * 1025), "holds 1025 ids; allowed are at most 1024"),
        (stopping(min_tokens=6, max_tokens=5), "is 6; allowed is 0..5, as max_tokens says"),
        (stopping(stop=["secret" * 200]), "has 1200 bytes; allowed are 1..1024"),
        (cache(ttl_seconds=-2), "is -2.0; allowed is a number > 0"),
        (cache(scope=common_pb2.SCOPE_GROUP, scope_name="g" * 65), "has 65 characters; allowed are 1..64"),
        (beam(width=17), "is 17; allowed are 1..16"),
        (beam(length_penalty=11), "is 11.0; allowed is a number in [-10, 10]"),
        (beam(width=0, length_penalty=0.5), "is 0.5; allowed is none without beam.width"),
        (
            pb.GenerateRequest(speculation=pb.Speculation(draft_tokens=4)),
            "is 4; allowed is none without speculation.mode",
        ),
    ],
)
def test_a_refusal_tells_the_number_that_came(request_: pb.GenerateRequest, told: str) -> None:
    """A message has what came beside what is allowed: numbers and lengths, never a text of the client's."""
    with pytest.raises(InvalidArgument) as caught:
        check_request(request_, LIMITS)
    assert told in caught.value.description
    assert "secret" not in caught.value.message and "ggg" not in caught.value.message


@pytest.mark.parametrize("request_", ACCEPTED)
def test_the_edges_of_what_is_allowed_are_accepted(request_: pb.GenerateRequest) -> None:
    """The positive control: each bound itself is accepted."""
    check_request(request_, LIMITS)


@pytest.mark.parametrize("scope", [common_pb2.SCOPE_GROUP, common_pb2.SCOPE_PUBLIC])
def test_a_public_prefix_is_at_most_the_prompt(scope: common_pb2.Scope) -> None:
    """All of the prompt may lie in a wider scope, and no token more."""
    for count in (0, 1, 7):
        check_public_tokens(pb.Cache(scope=scope, public_tokens=count), 7)
    with pytest.raises(InvalidArgument, match=r"allowed are 0\.\.7") as caught:
        check_public_tokens(pb.Cache(scope=scope, public_tokens=8), 7)
    assert caught.value.field == "cache.public_tokens"


def test_a_plan_says_what_the_gateway_needs() -> None:
    """Defaults are those of the comments; equal stop strings count once."""
    plain = check_request(pb.GenerateRequest(), LIMITS)
    assert (plain.num_samples, plain.max_tokens, plain.min_tokens, plain.stops) == (1, None, 0, ())
    full = check_request(stopping(max_tokens=7, min_tokens=3, stop=["a", "b", "a"], include_stop=True), LIMITS)
    assert (full.max_tokens, full.min_tokens, full.stops, full.include_stop) == (7, 3, ("a", "b"), True)


@pytest.mark.parametrize("token_id", OUT_OF_VOCABULARY)
def test_an_id_outside_the_vocabulary_is_named_with_its_place(token_id: int) -> None:
    """Row 36: the first bad id of a prompt is named."""
    with pytest.raises(InvalidArgument, match=r"0\.\.999") as caught:
        check_token_ids("token_ids.ids", [0, 999, token_id], VOCABULARY)
    assert caught.value.field == "token_ids.ids[2]"


def test_the_first_of_many_bad_ids_is_named() -> None:
    """In a long prompt, as it comes off the wire, the bad id that comes first is the one named; edges are accepted."""
    ids = [0, VOCABULARY - 1] * 2000
    check_token_ids("token_ids.ids", np.asarray(pb.TokenIds(ids=ids).ids, np.int64), VOCABULARY)
    ids[3001], ids[77] = -1, VOCABULARY
    with pytest.raises(InvalidArgument, match=rf"is {VOCABULARY};") as caught:
        check_token_ids("token_ids.ids", np.asarray(pb.TokenIds(ids=ids).ids, np.int64), VOCABULARY)
    assert caught.value.field == "token_ids.ids[77]"


def test_a_prompt_must_leave_room_for_one_token() -> None:
    """Empty and too long prompts are refused with the numbers; the longest that fits is accepted."""
    check_prompt_length("text", 4095, LIMITS)
    for length in (0, 4096, 10**6):
        with pytest.raises(InvalidArgument):
            check_prompt_length("text", length, LIMITS)
    with pytest.raises(InvalidArgument, match=r"5000 tokens.*4095.*4096"):
        check_prompt_length("text", 5000, LIMITS)
