"""Rows 13, 14, 35 and 36 of the cases: no value of a request, however odd, harms the node or a neighbour."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from common.rpc import bearer_metadata
from tessera.decode.v1 import decode_pb2
from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import Background, Result, make_request
from tests.e2e.oracle import Solo
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node

B = 16
VOCAB = 512
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def neighbour(node: Node, solo: Solo, prompts: Prompts) -> Iterator[Background]:
    """A stream that runs beside the test and must equal its solo run in the end."""
    request = make_request(prompts.tokens(2 * B), new=300)
    running = node.background(request)
    yield running
    solo.check(request, running.result())
    solo.probe(node)


def refused(node: Node, request: pb.GenerateRequest) -> bool:
    """Whether it is refused with INVALID_ARGUMENT; an answer must be a sane one."""
    try:
        result = node.generate(request)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
        return True
    assert all(0 <= token < VOCAB for token in result.token_ids)
    return False


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (NAN, INF, -INF, -1.0)],
        *[("top_p", value) for value in (0.0, -1.0, 1.1, NAN)],
        *[("min_p", value) for value in (-0.1, 1.1, NAN)],
        *[("repetition_penalty", value) for value in (0.0, -1.0, INF, NAN)],
        *[("presence_penalty", value) for value in (INF, -INF, NAN)],
        *[("frequency_penalty", value) for value in (INF, -INF, NAN)],
        ("top_k", -1),
        *[("n", value) for value in (0, -1, 17, 2**62)],
    ],
)  # fmt: skip
def test_row_35_a_number_out_of_range_is_refused(
    node: Node, solo: Solo, prompts: Prompts, field: str, value: float
) -> None:
    """NaN, infinities and values out of range are INVALID_ARGUMENT, naming the field, and the node serves on."""
    request = make_request(prompts.tokens(8), new=4)
    setattr(request.sampling, field, value)
    with pytest.raises(grpc.RpcError) as caught:
        node.generate(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in str(caught.value.details())
    solo.probe(node)


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-30, 1e-4])
def test_row_35_a_tiny_temperature_is_greedy(node: Node, solo: Solo, prompts: Prompts, temperature: float) -> None:
    """Down to the smallest number above zero the reply is the greedy one."""
    tokens = prompts.tokens(B + 3)
    result = node.generate(make_request(tokens, temperature=temperature, seed=3))
    assert result.token_ids == solo(make_request(tokens)).token_ids


def test_row_35_extreme_but_allowed_values_give_sane_output(
    node: Node, prompts: Prompts, neighbour: Background
) -> None:
    """Huge temperatures and penalties and tight filters give tokens of the vocabulary, beside a running stream."""
    cases: list[dict[str, Any]] = [
        {"temperature": 1e30}, {"temperature": 1.7e308}, {"temperature": 1.0, "top_p": 1e-12},
        {"temperature": 1.0, "min_p": 1.0}, {"temperature": 1.0, "top_k": 1},
        {"frequency_penalty": 100.0}, {"presence_penalty": -100.0}, {"repetition_penalty": 100.0},
        {"repetition_penalty": 1e-30}, {"temperature": 1e-45, "repetition_penalty": 1e-30, "logprobs": 5},
        {"temperature": 1e30, "bias": {5: 100.0, 6: -100.0}},
    ]  # fmt: skip
    for case in cases:
        result = node.generate(make_request(prompts.tokens(8), new=8, **{"seed": 1, "temperature": 0.0, **case}))
        assert len(result.token_ids) == 8, case
        assert all(0 <= token < VOCAB for token in result.token_ids), case


@pytest.mark.parametrize("penalty", [1e-30, 1e-38, 1e-40, 1e-300, 5e-324])
def test_row_35_a_penalty_close_to_zero_harms_no_other_tenant(
    node: Node, solo: Solo, prompts: Prompts, penalty: float
) -> None:
    """Drawing at temperature 1 with the smallest penalties is served, and another tenant's stream equals its solo."""
    streamed = make_request(prompts.tokens(2 * B), new=300, temperature=1.0, seed=11)
    running = node.stream(streamed, key=node.new_tenant(f"neighbour-of-{penalty}"))
    running.read(4)
    result = node.generate(make_request("hello", new=8, temperature=1.0, repetition_penalty=penalty))
    assert len(result.token_ids) == 8
    solo.check(streamed, running.finish())
    solo.probe(node)


@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + 1, 2**31 - 1, 2**31, 2**63 - 1, -(2**63)])
def test_row_36_an_id_outside_the_vocabulary_is_refused(
    node: Node, prompts: Prompts, neighbour: Background, bad: int
) -> None:
    """In the prompt, as a stop token, in a bias: INVALID_ARGUMENT; the last id of the vocabulary is accepted."""
    tokens = prompts.tokens(8)
    assert refused(node, make_request([*tokens, bad], new=2))
    assert refused(node, make_request([bad, *tokens], new=2))
    assert refused(node, make_request(tokens, new=2, stop_token_ids=[bad]))
    assert refused(node, make_request(tokens, new=2, bias={bad: 1.0}))
    good = VOCAB - 1
    assert not refused(node, make_request([*tokens, good], new=2, stop_token_ids=[good], bias={good: 1.0}))


@pytest.mark.parametrize(
    ("top_k", "allowed"), [(0, True), (-1, False), (VOCAB, True), (VOCAB + 1, True), (10**7, True)]
)
def test_row_36_top_k_has_its_documented_meaning(
    node: Node, solo: Solo, prompts: Prompts, top_k: int, allowed: bool
) -> None:
    """0 and more than the vocabulary mean all; negative is refused."""
    tokens = prompts.tokens(8)
    request = make_request(tokens, temperature=1.0, seed=9, top_k=top_k)
    if not allowed:
        assert refused(node, request)
        return
    everything = solo(make_request(tokens, temperature=1.0, seed=9))
    assert node.generate(request).token_ids == everything.token_ids


def test_row_36_empty_prompts_and_lengths_are_refused(node: Node, prompts: Prompts, neighbour: Background) -> None:
    """An empty prompt of every kind, no prompt, max_tokens below one, and a negative min_tokens are refused."""
    tokens = prompts.tokens(8)
    nothing = pb.GenerateRequest()
    requests = [
        make_request([]), make_request(""), make_request(pb.Chat()), nothing,
        make_request(tokens, new=0), make_request(tokens, new=-1), make_request(tokens, new=-(2**63)),
        make_request(tokens, min_tokens=-1), make_request(tokens, new=2, min_tokens=3), make_request(tokens, stop=[""]),
        make_request(tokens, stop=["x"] * 17), make_request(tokens, stop=["y" * 1025]),
        make_request(tokens, logprobs=-1), make_request(tokens, logprobs=21), make_request(tokens, label="l" * 257),
        make_request(tokens, label="\x1b[2J"), make_request(tokens, label="a\0b"),
        make_request(tokens, bias={5: NAN}), make_request(tokens, bias={5: INF}), make_request(tokens, bias={5: 101.0}),
    ]  # fmt: skip
    for request in requests:
        assert refused(node, request), request
    assert not refused(node, make_request(tokens, new=1)), "positive control"


def test_a_prompt_longer_than_the_pool_is_refused_with_numbers(node: Node, solo: Solo, prompts: Prompts) -> None:
    """A prompt that can never fit is RESOURCE_EXHAUSTED at once, and the node serves on."""
    with pytest.raises(grpc.RpcError) as caught:
        node.generate(make_request(prompts.tokens(33 * B), new=4))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    solo.probe(node)


def test_row_40_prompt_logprobs_are_of_this_computation(node: Node, solo: Solo, prompts: Prompts) -> None:
    """A prompt of a block and a token twice, then one that shares its block: the values of a cold run everywhere,
    and no cached token reported; a plain request after them reads what they stored."""
    first = prompts.tokens(B + 1)
    for tokens in (first, first, first[:B] + prompts.tokens(5)):
        request = make_request(tokens, new=2)
        request.output.prompt_logprobs = 3
        found, want = node.stream(request), solo.node.stream(request)
        for stream in (found, want):
            stream.finish()
        assert found.accepted is not None and want.accepted is not None
        values = found.accepted.prompt_logprobs
        assert found.accepted.cached_tokens == 0
        assert [value.token_id for value in values] == tokens[1:]
        assert values == want.accepted.prompt_logprobs
        assert all(len(value.top) == 3 and value.top[0].logprob >= value.logprob for value in values)
    assert node.generate(make_request(first, new=2)).cached_tokens == B, "positive control: it was there to be hit"


def test_constrained_answers_match_and_bad_constraints_are_refused(
    node: Node, neighbour: Background, prompts: Prompts
) -> None:
    """A schema, an expression, a grammar on a model that knows nothing of them: what ended by itself matches; without
    them, the positive control, nothing does. What is no constraint is INVALID_ARGUMENT by field."""
    pytest.importorskip("llguidance", reason="a run-time dependency: install it with constraints.txt")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    cases = [
        ({"json_schema": json.dumps(schema)}, r'\{"a":"(x|yz)"\}'),
        ({"regex": "[0-9]{2,4}-[a-f]+!"}, "[0-9]{2,4}-[a-f]+!"),
        ({"grammar": 'root ::= ("ab" | "cd")+ "."'}, r"(ab|cd)+\."),
    ]
    for kind, form in cases:
        request = make_request(prompts.tokens(B + 3), new=200, temperature=1.0, n=3, seed=4, ignore_eos=False)
        free = node.generate(request)
        request.output.constraint.CopyFrom(pb.Constraint(**kind))
        found = node.generate(request)
        ended = [sample for sample in found.samples.values() if sample.reason == pb.FINISH_REASON_STOP]
        assert ended
        assert all(re.fullmatch(form, sample.text) for sample in ended), [sample.text for sample in ended]
        assert not any(re.fullmatch(form, sample.text) for sample in free.samples.values())
    for kind in ({"json_schema": '{"type": "objec"}'}, {"regex": "(a"}, {"grammar": "start: missing"}):
        request = make_request(prompts.tokens(8), new=2, ignore_eos=False)
        request.output.constraint.CopyFrom(pb.Constraint(**kind))
        with pytest.raises(grpc.RpcError) as caught:
            node.generate(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"output.constraint.{next(iter(kind))}" in str(caught.value.details())


@pytest.mark.parametrize(
    "value",
    ["", " ", "Bearer", "Bearer ", "Bearer \x01", "Bearer ../../default.key", "Bearer %00", "Bearer " + "k" * 129],
)
def test_row_13_odd_credentials_are_refused_and_harm_nobody(
    node: Node, neighbour: Background, prompts: Prompts, value: str
) -> None:
    """Empty, malformed, long and path-like credentials are UNAUTHENTICATED while another stream runs."""
    call = node.inference.ListModels
    with pytest.raises(grpc.RpcError) as caught:
        call(pb.ListModelsRequest(), metadata=(("authorization", value),), timeout=10)
    assert caught.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL), caught.value
    if caught.value.code() is grpc.StatusCode.INTERNAL:
        assert "metadata" in str(caught.value.details()), "only the client's own library may refuse it as no header"


def test_row_14_internal_fields_mean_nothing_in_public(
    node: Node, solo: Solo, prompts: Prompts, neighbour: Background
) -> None:
    """An internal message, and unknown fields with magic values, sent as a public request change nothing."""
    tokens = prompts.tokens(10 * B)
    request = make_request(tokens, new=4)
    unknown = b"".join(bytes([(n << 3 | 0) & 0x7F | 0x80, (n << 3) >> 7, 1]) for n in range(100, 130))
    odd = pb.GenerateRequest.FromString(request.SerializeToString() + unknown)
    assert len(odd.SerializeToString()) > len(request.SerializeToString()), "positive control: they are sent"
    # Blocks that were held before, by the neighbour and by what ends just now, may enter the index meanwhile.
    before = node.admin.snapshot()
    result: Result = node.generate(odd)
    solo.check(request, result)
    grown = node.admin.snapshot().indexed_blocks - before.indexed_blocks - before.active_blocks
    assert grown <= 11 + 20  # the neighbour grows as well
    submit = decode_pb2.Submit(request=1, request_id="x", grant=b"magic", tokens=b"\x01\0\0\0" * 500, priority=7)
    call: Any = node.channel.unary_stream(
        "/tessera.inference.v1.InferenceService/Generate",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=pb.GenerateResponse.FromString,
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(call(submit, metadata=bearer_metadata(node.key), timeout=20))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "magic" not in str(caught.value.details())
