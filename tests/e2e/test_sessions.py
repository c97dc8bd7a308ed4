"""Conversations that the node keeps: continued, forked, cut and dropped by handle, on two decoders over one cache."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.rpc import bearer_metadata
from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import Result, make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import poll
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node

B = 16
MINUTE = 60.0


@pytest.fixture(scope="module")
def shared_pair(tiny_model: Path) -> Iterator[Node]:
    """Two decoders of two places each on a pool of 64 blocks, slow enough that several requests need both."""
    options = ["--threads", "1", "--max-batch", "2"]
    with Node(tiny_model, pool_blocks=64, decoders=2, options=options, faults=["step_delay=0.01"]) as node:
        node.await_decoders()
        yield node


@pytest.fixture
def pair(shared_pair: Node) -> Iterator[Node]:
    """The two decoders, quiet and empty before the test; after it nothing is kept, and it is quiet."""
    shared_pair.fresh()
    yield shared_pair
    shared_pair.quiet()
    assert shared_pair.admin.branches() == []


def kept(
    prompt: Sequence[int] | str | pb.Chat, *, handle: str = "", base: int | None = None, seconds: float | None = MINUTE,
    **options: Any,
) -> pb.GenerateRequest:  # fmt: skip
    """A request that keeps its conversation, and perhaps continues one."""
    request = make_request(prompt, **options)
    request.session.handle = handle
    if base is not None:
        request.session.num_tokens = base
    if seconds is not None:
        request.session.keep_seconds = seconds
    return request


def handle_of(node: Node, result: Result, index: int = 0) -> str:
    """The handle of a sample; the logs are searched for it at the end."""
    handle = result.samples[index].handle
    assert len(handle) == 22
    node.secrets.add(handle)
    return handle


def call(node: Node, method: str, request: Any, key: str | None = None) -> Any:
    """A unary call of the public service."""
    return getattr(node.inference, method)(request, metadata=bearer_metadata(key or node.key), timeout=30)


def drop(node: Node, *handles: str) -> None:
    for handle in handles:
        call(node, "DropSession", pb.DropSessionRequest(handle=handle))


def code_of(action: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        action()
    error: Any = raised.value
    return error.code(), error.details()


def test_a_conversation_goes_on_as_if_it_had_been_sent_whole(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """Three turns, sampled with penalties: tokens and log-probabilities equal, bit by bit, those of the solo run of
    everything; the kept part is cached."""
    options: dict[str, Any] = {
        "temperature": 0.8, "seed": 7, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logprobs": 0,
    }  # fmt: skip
    whole: list[int] = []
    handles: list[str] = []
    for turn in range(3):
        new = prompts.tokens(B + 3 + turn)
        request = kept(new, handle=handles[-1] if handles else "", new=20, **options)
        result = pair.generate(request)
        whole_request = make_request([*whole, *new], new=20, **options)
        alone = solo(whole_request)
        assert (result.token_ids, result.logprobs) == (alone.token_ids, alone.logprobs) and result.logprobs
        assert result.prompt_tokens == len(whole) + len(new)
        assert result.cached_tokens >= len(whole) - 1, "all that was kept, but the newest token, is served"
        whole += [*new, *result.token_ids]
        assert result.samples[0].session_tokens == len(whole)
        handles.append(handle_of(pair, result))
    (first, *_), branches = handles, pair.admin.branches()
    assert [branch.num_tokens for branch in branches] == [39, 79, 120]
    assert all(branch.references >= 2 and branch.expires_in_seconds <= MINUTE for branch in branches)
    drop(pair, *handles)
    assert code_of(lambda: drop(pair, first))[0] is grpc.StatusCode.NOT_FOUND


def test_either_decoder_goes_on(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """More continuations at once than one decoder has places: both go on from the same blocks, all equal solo."""
    prompt = prompts.tokens(4 * B + 5)
    first = pair.generate(kept(prompt, new=12))
    handle = handle_of(pair, first)
    base = [*prompt, *first.token_ids]
    tails = [prompts.tokens(4) for _ in range(4)]
    running = [pair.background(kept(tail, handle=handle, seconds=None, new=60)) for tail in tails]

    def sharing() -> set[int]:
        leases = pair.admin.leases()
        return {lease.session for lease in leases if list(lease.blocks[:4]) == list(leases[0].blocks[:4])}

    poll(lambda: len(sharing()) == 2, within=20, what="leases of both decoders hold the kept blocks")
    for tail, stream in zip(tails, running, strict=True):
        result = stream.result()
        assert result.token_ids == solo(make_request([*base, *tail], new=60)).token_ids
        assert result.cached_tokens >= len(base) - 1
    drop(pair, handle)


def test_fork_into_three_roll_back_and_drop(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """Each handle goes its own way from the same point, or from where it was cut."""
    prompt = prompts.tokens(2 * B + 4)
    first = pair.generate(kept(prompt, new=9))
    handle = handle_of(pair, first)
    base = [*prompt, *first.token_ids]
    forked = call(pair, "ForkSession", pb.ForkSessionRequest(handle=handle, count=3, keep_seconds=MINUTE))
    pair.secrets |= set(forked.handles)
    assert forked.num_tokens == len(base) and len(set(forked.handles)) == 3
    references = {branch.references for branch in pair.admin.branches()}
    assert min(references) >= 4, "four branches share every block"
    cut = B + 7
    call(pair, "RollbackSession", pb.RollbackSessionRequest(handle=forked.handles[2], num_tokens=cut))
    ways = [(handle, base), (forked.handles[0], base), (forked.handles[1], base), (forked.handles[2], base[:cut])]
    tails = [prompts.tokens(3 + number) for number in range(4)]
    running = [
        pair.background(kept(tail, handle=name, seconds=None, new=14))
        for (name, _), tail in zip(ways, tails, strict=True)
    ]
    for (_, before), tail, stream in zip(ways, tails, running, strict=True):
        result = stream.result()
        assert result.token_ids == solo(make_request([*before, *tail], new=14)).token_ids
        assert result.prompt_tokens == len(before) + len(tail)
    from_earlier = pair.generate(kept(tails[0], handle=handle, base=10, seconds=None, new=6))
    assert from_earlier.token_ids == solo(make_request([*base[:10], *tails[0]], new=6)).token_ids
    drop(pair, handle, *forked.handles)


def test_the_answer_goes_on_without_a_prompt(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """Text and tokens of both parts are those of one longer answer."""
    prompt = prompts.tokens(B)
    whole = solo(make_request(prompt, new=30))
    first = pair.generate(kept(prompt, new=11))
    request = kept([], handle=handle_of(pair, first), new=19, seconds=None)
    request.ClearField("prompt")
    second = pair.generate(request)
    assert [*first.token_ids, *second.token_ids] == whole.token_ids
    if not first.text.endswith("\ufffd"):
        assert first.text + second.text == whole.text
    drop(pair, handle_of(pair, first))


def test_a_chat_sends_its_new_turn_alone(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """A turn that ends by itself: the next one equals the template over the whole conversation."""
    question, more = prompts.text(4), prompts.text(3)

    def chat(*turns: tuple[str, str]) -> pb.Chat:
        return pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])

    first = pair.generate(kept(chat(("system", "Be brief."), ("user", question)), new=8))
    second = pair.generate(kept(chat(("user", more)), handle=handle_of(pair, first), new=12, seconds=None))
    whole = [("system", "Be brief."), ("user", question), ("assistant", first.text), ("user", more)]
    opening = call(pair, "Tokenize", pb.TokenizeRequest(chat=chat(*whole[:2])))
    tail = call(
        pair,
        "Tokenize",
        pb.TokenizeRequest(text=f"<|im_end|>\n<|im_start|>user\n{more}<|im_end|>\n<|im_start|>assistant\n"),
    )
    expected = make_request([*opening.token_ids, *first.token_ids, *tail.token_ids], new=12)
    assert second.token_ids == solo(expected).token_ids
    resent = call(pair, "Tokenize", pb.TokenizeRequest(chat=chat(*whole)))
    if list(resent.token_ids) == list(
        expected.token_ids.ids
    ):  # a random model's text may have other tokens than it said
        assert second.prompt_tokens == len(resent.token_ids)
    drop(pair, handle_of(pair, first))


def test_after_a_stop_string_it_holds_what_the_client_was_given(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """The decoder runs ahead of the gateway; what is kept is cut to the tokens of the stream."""
    prompt = prompts.tokens(B + 2)
    alone = solo(make_request(prompt, new=40))
    stop = alone.text[len(alone.text) // 2 :][:3]
    first = pair.generate(kept(prompt, new=200, stop=[stop]))
    assert first.samples[0].stop == stop
    given = [*prompt, *first.token_ids]
    assert first.samples[0].session_tokens == len(given)
    tail = prompts.tokens(3)
    second = pair.generate(kept(tail, handle=handle_of(pair, first), seconds=None, new=8))
    assert second.prompt_tokens == len(given) + 3
    assert second.token_ids == solo(make_request([*given, *tail], new=8)).token_ids
    drop(pair, handle_of(pair, first))


def test_every_sample_has_a_handle_of_its_own(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """n = 3: each is continued from its own answer."""
    prompt = prompts.tokens(B + 2)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    first = pair.generate(kept(prompt, n=3, new=7, **options))
    expected = solo(make_request(prompt, n=3, new=7, **options))
    handles = [handle_of(pair, first, index) for index in range(3)]
    assert len(set(handles)) == 3
    for index, handle in enumerate(handles):
        said = first.samples[index].token_ids
        assert said == expected.samples[index].token_ids
        going_on = pair.generate(kept([9, 8], handle=handle, seconds=None, new=5))
        assert going_on.token_ids == solo(make_request([*prompt, *said, 9, 8], new=5)).token_ids
    drop(pair, *handles)


def test_time_ends_a_kept_conversation(pair: Node, prompts: Prompts) -> None:
    """A short time to keep: NOT_FOUND within seconds, and nothing is held for it any more; one of a longer time,
    kept before it, is held still and goes on."""
    longer = handle_of(pair, pair.generate(kept(prompts.tokens(B), new=3, seconds=300)))
    handle = handle_of(pair, pair.generate(kept(prompts.tokens(B), new=3, seconds=0.5)))
    poll(lambda: len(pair.admin.branches()) == 1, within=10, what="the conversation is over")
    code, _ = code_of(lambda: pair.generate(kept([5], handle=handle, seconds=None)))
    assert code is grpc.StatusCode.NOT_FOUND
    assert pair.generate(kept([5], handle=longer, seconds=None)).token_ids
    drop(pair, longer)


def test_another_tenants_handle_is_not_found(pair: Node, prompts: Prompts) -> None:
    """In the words of one that never was, for every call. Positive control: the owner's key works."""
    result = pair.generate(kept(prompts.tokens(B), new=3))
    handle = handle_of(pair, result)
    other = pair.new_tenant("stranger")
    never = "A" * 22
    words = {
        code_of(lambda: pair.generate(kept([5], handle=handle, seconds=None), key=other)),
        code_of(lambda: pair.generate(kept([5], handle=never, seconds=None))),
        code_of(lambda: call(pair, "ForkSession", pb.ForkSessionRequest(handle=handle), other)),
        code_of(lambda: call(pair, "RollbackSession", pb.RollbackSessionRequest(handle=handle, num_tokens=1), other)),
        code_of(lambda: call(pair, "DropSession", pb.DropSessionRequest(handle=handle), other)),
        code_of(lambda: call(pair, "DropSession", pb.DropSessionRequest(handle=never))),
        code_of(lambda: call(pair, "DropSession", pb.DropSessionRequest(handle="no handle"))),
    }
    assert len(words) == 1 and next(iter(words))[0] is grpc.StatusCode.NOT_FOUND
    assert pair.generate(kept([5], handle=handle, seconds=None, new=2)).prompt_tokens == B + 4
    drop(pair, handle)


def test_kept_conversations_do_not_keep_others_out(pair: Node, solo: Solo, prompts: Prompts) -> None:
    """A pool full of kept blocks still serves; the oldest conversation goes on after it has lost its blocks."""
    talks = []
    for _ in range(5):
        prompt = prompts.tokens(11 * B)
        result = pair.generate(kept(prompt, new=B))
        talks.append(([*prompt, *result.token_ids], handle_of(pair, result)))
    assert pair.admin.snapshot().usable_blocks < 12
    big = make_request(prompts.tokens(30 * B), new=4)
    solo.check(big, pair.generate(big))
    branches = pair.admin.branches()
    assert branches[0].num_blocks == 0 and branches[-1].num_blocks > 0, "the oldest gave way"
    tail = prompts.tokens(3)
    for base, handle in (talks[0], talks[-1]):
        result = pair.generate(kept(tail, handle=handle, seconds=None, new=6))
        assert result.token_ids == solo(make_request([*base, *tail], new=6)).token_ids
    drop(pair, *(handle for _, handle in talks))


def test_tessera_chat_sends_each_turn_alone_and_leaves_nothing(pair: Node) -> None:
    """Three turns typed into the command: the prompt counts grow by one turn, what was said before is cached."""
    lines = subprocess.run(
        [sys.executable, "-m", "cli", "chat", "--endpoint", pair.target, "--state-dir", str(pair.state_dir),
         "--max-tokens", "6"],
        input="one\ntwo\nthree\n", capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    counts = [(int(prompt), int(cached)) for prompt, cached in re.findall(r"(\d+) prompt tokens, (\d+) of them", lines)]
    assert len(counts) == 3
    for (before, _), (prompt, cached) in itertools.pairwise(counts):
        assert prompt > before and before <= cached < prompt
