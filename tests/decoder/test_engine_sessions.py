"""Kept conversations in the engine: what goes on equals what was sent whole, whoever goes on, whatever happens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cachemgr.ids import TenantId
from cachemgr.results import ScopeSpan
from common.errors import InvalidArgument, NotFound, ResourceExhausted
from decoder.cache_api import Acquire, Command, Kept
from decoder.inprocess import InProcessClient
from decoder.outputs import EndReason, SampleEnded
from decoder.sequence import Request, ScopePrefix
from tests.decoder.rig import BLOCK_TOKENS, EOS, Node, RecordingSink, greedy_oracle, prompt_of, request, solo
from tests.decoder.test_engine_speculation import LOOKUP, telling


def kept(
    number: int, prompt: list[int], *, handle: bytes = b"", base: int = 0, seconds: float = 60.0, **options: Any
) -> Request:
    """A request that keeps its conversation, and perhaps continues one."""
    item = request(number, prompt, **options)
    return replace(item, keep_seconds=seconds, session_handle=handle, session_tokens=base)


def run(node: Node, item: Request, sink: RecordingSink | None = None) -> list[int]:
    """The tokens of sample 0."""
    sink = sink or node.sink
    node.engine.submit(item, sink)
    node.until(lambda: sink.done(item.number))
    assert item.number in sink.ended, sink.failed
    return sink.tokens[item.number, 0]


def handle_of(node: Node, number: int, sample: int = 0) -> SampleEnded:
    return node.sink.finished[number, sample]


class TeamClient(InProcessClient):
    """A tenant of a group, whose scope is the only wider one; it remembers what was asked for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[Acquire] = []

    def send(self, session: int, command: Command) -> None:
        """See CacheClient."""
        if isinstance(command, Acquire):
            self.asked.append(command)
        super().send(session, command)

    def _span_of(self, scope: ScopePrefix) -> ScopeSpan:
        return ScopeSpan(TenantId(f"@group:{scope.group}:1"), b"t" * 32, scope.num_tokens)

    def _scope_of(self, span: ScopeSpan) -> ScopePrefix:
        return ScopePrefix(span.owner.split(":")[1], span.num_tokens)


def drop_all(node: Node, *numbers: tuple[int, int]) -> None:
    for key in numbers:
        ended = node.sink.finished[key]
        assert ended.handle is not None
        node.manager.drop_kept("acme", ended.handle.handle, now_ns=0)
    node.assert_quiet()
    assert node.manager.list_branches().items == []


def test_a_turn_goes_on_as_if_the_whole_conversation_had_been_sent() -> None:
    """Three turns, each only its own tokens: tokens, prompt and cached counts are those of resending everything."""
    node = Node()
    conversation: list[int] = []
    handle = b""
    for number in range(1, 4):
        turn = prompt_of(5 + number, seed=number)
        answer = run(node, kept(number, turn, handle=handle, max_tokens=6))
        assert answer == greedy_oracle([*conversation, *turn], 6)
        before = len(conversation)
        conversation += [*turn, *answer]
        ended = handle_of(node, number)
        assert ended.reason is EndReason.LENGTH and ended.handle is not None
        assert ended.handle.num_tokens == len(conversation), "the last token too, which was never computed"
        handle = ended.handle.handle
        assert node.sink.cached[number] >= before - 1
        started = node.sink.starts[number]
        assert started.prompt_tokens == before + len(turn)
        assert list(started.base_tokens) == conversation[:before][-64:]
    drop_all(node, (1, 0), (2, 0), (3, 0))


@pytest.mark.parametrize("scope", [ScopePrefix("team", 2 * BLOCK_TOKENS), None])
def test_a_preempted_conversation_goes_on_in_the_scope_that_it_was_begun_in(scope: ScopePrefix | None) -> None:
    """Under pressure a continued conversation loses its blocks; it asks again in its group's scope, with the same
    tokens, and nothing of it is published privately. The control: a tenant's own is."""
    node = Node(num_blocks=24, client_class=TeamClient)
    client = node.client
    assert isinstance(client, TeamClient)
    prompt, turn = prompt_of(3 * BLOCK_TOKENS, seed=9), prompt_of(5, seed=10)
    answer = run(node, replace(kept(1, prompt, max_tokens=4), scope=scope))
    handle = handle_of(node, 1).handle
    assert handle is not None
    for number in range(3, 7):
        node.submit(request(number, prompt_of(2 * BLOCK_TOKENS, seed=number), max_tokens=40))
    node.submit(kept(2, turn, handle=handle.handle, seconds=0.0, max_tokens=30))
    node.finish(*range(2, 7))
    assert node.sink.tokens[2, 0] == greedy_oracle([*prompt, *answer, *turn], 30)
    again = [command for command in client.asked if command.request_id == "request-2" and command.resumed]
    assert again, "positive control: it was preempted"
    assert all(command.scope == scope and not command.base_handle for command in again)
    node.manager.drop_kept("acme", handle.handle, now_ns=0)
    whole = [*prompt, *answer, *turn, *node.sink.tokens[2, 0]]
    run(node, request(7, whole, max_tokens=1))
    assert (node.sink.cached[7] > 0) == (scope is None)
    run(node, replace(request(8, whole, max_tokens=1), scope=scope, no_store=True))
    assert node.sink.cached[8] > 0
    node.assert_quiet()


def test_a_conversation_with_guesses_is_kept_without_them() -> None:
    """What is kept after an answer with right and wrong guesses is the answer, in as many blocks as it needs; the next
    turn goes on from it."""
    node = Node()
    first = kept(1, prompt_of(9), max_tokens=22, speculation=LOOKUP)
    telling(node, [replace(first, keep_seconds=0.0)], 0.4)
    answer = run(node, first)
    assert answer == greedy_oracle(prompt_of(9), 22)
    assert 0 < node.sink.drafts[1][1] < node.sink.drafts[1][0]
    handle = handle_of(node, 1).handle
    assert handle is not None and handle.num_tokens == 9 + 22
    node.settle()
    assert node.manager.snapshot().active_blocks == -(-(9 + 22 - 1) // BLOCK_TOKENS)
    turn = prompt_of(5, seed=2)
    assert run(node, kept(2, turn, handle=handle.handle, max_tokens=6)) == greedy_oracle(
        [*prompt_of(9), *answer, *turn], 6
    )
    drop_all(node, (1, 0), (2, 0))


@pytest.mark.parametrize("no_store", [False, True])
def test_penalties_sampling_and_positions_are_those_of_the_whole(no_store: bool) -> None:
    """Sampled with every penalty: equal to the solo run of all tokens."""
    node = Node()
    options: dict[str, Any] = {
        "temperature": 0.9, "seed": 11, "top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    }  # fmt: skip
    first = prompt_of(9, seed=1)
    answer = run(node, kept(1, first, max_tokens=7, no_store=no_store, **options))
    ended = handle_of(node, 1)
    assert ended.handle is not None
    second = prompt_of(4, seed=2)
    going_on = run(node, kept(2, second, handle=ended.handle.handle, max_tokens=9, no_store=no_store, **options))
    assert going_on == solo(request(3, [*first, *answer, *second], max_tokens=9, **options))[0]
    assert going_on != solo(request(3, second, max_tokens=9, **options))[0], "positive control: the base matters"
    drop_all(node, (1, 0), (2, 0))


def test_a_stop_token_is_not_part_of_the_conversation() -> None:
    """What ended the answer is not what was said; the next turn comes after the last word."""
    node = Node()
    prompt = prompt_of(10)
    said = greedy_oracle(prompt, 4)
    assert said.index(said[3]) == 3
    assert run(node, kept(1, prompt, max_tokens=20, stop_ids=[said[3]])) == said
    ended = handle_of(node, 1)
    assert ended.reason is EndReason.STOP and ended.stop_id == said[3]
    assert ended.handle is not None and ended.handle.num_tokens == len(prompt) + 3
    assert run(node, kept(2, [EOS, 9], handle=ended.handle.handle, max_tokens=3)) == greedy_oracle(
        [*prompt, *said[:3], EOS, 9], 3
    )
    drop_all(node, (1, 0), (2, 0))


def test_an_answer_goes_on_without_a_new_prompt() -> None:
    """No tokens of its own: what comes is what would have come."""
    node = Node()
    prompt = prompt_of(10)
    whole = greedy_oracle(prompt, 12)
    assert run(node, kept(1, prompt, max_tokens=5)) == whole[:5]
    ended = handle_of(node, 1)
    assert ended.handle is not None
    assert run(node, kept(2, [], handle=ended.handle.handle, max_tokens=7)) == whole[5:]
    assert node.sink.cached[2] == len(prompt) + 4
    drop_all(node, (1, 0), (2, 0))


def test_from_an_earlier_token_on() -> None:
    """`session_tokens` cuts the conversation for this request alone."""
    node = Node()
    prompt = prompt_of(11)
    answer = run(node, kept(1, prompt, max_tokens=6))
    ended = handle_of(node, 1)
    assert ended.handle is not None
    base = [*prompt, *answer][:13]
    assert run(node, kept(2, [7], handle=ended.handle.handle, base=13, max_tokens=5)) == greedy_oracle([*base, 7], 5)
    drop_all(node, (1, 0), (2, 0))


def test_each_sample_is_kept_also_one_that_ends_with_its_first_token() -> None:
    """Three samples of one prompt: three handles, each equal to its solo run and continued on its own."""
    node = Node()
    prompt = prompt_of(13)
    options = {"temperature": 1.0, "seed": 5}
    expected = solo(request(9, prompt, max_tokens=1, num_samples=3, **options))
    node.submit(kept(1, prompt, max_tokens=1, num_samples=3, **options))
    node.finish(1)
    for sample in range(3):
        assert node.sink.tokens[1, sample] == expected[sample]
        ended = handle_of(node, 1, sample)
        assert ended.handle is not None and ended.handle.num_tokens == 14
        going_on = run(node, kept(2 + sample, [8], handle=ended.handle.handle, max_tokens=4))
        assert going_on == greedy_oracle([*prompt, *expected[sample], 8], 4)
    handles = {node.sink.finished[key].handle for key in node.sink.finished}
    assert len(handles) == 6
    drop_all(node, *node.sink.finished)


def test_another_decoder_goes_on() -> None:
    """Two engines on one arena and one manager: what one keeps, the other continues, from the same blocks."""
    first = Node()
    second = Node(manager=first.manager, arena=first.arena, model=first.model)
    prompt = prompt_of(18)
    answer = run(first, kept(1, prompt, max_tokens=6))
    ended = handle_of(first, 1)
    assert ended.handle is not None
    turn = prompt_of(3, seed=4)
    assert run(second, kept(1, turn, handle=ended.handle.handle, max_tokens=6)) == greedy_oracle(
        [*prompt, *answer, *turn], 6
    )
    assert second.sink.cached[1] == len(prompt) + 5
    second.settle()
    for node in (first, second):
        done = handle_of(node, 1).handle
        assert done is not None
        first.manager.drop_kept("acme", done.handle, now_ns=0)
    first.assert_quiet()


def test_a_continued_request_survives_preemption() -> None:
    """A small pool: requests give way to each other, and still say what they say alone."""
    node = Node(num_blocks=16, max_batch=4)
    prompts = {number: prompt_of(9, seed=number) for number in range(1, 4)}
    answers = {number: run(node, kept(number, prompts[number], max_tokens=3)) for number in prompts}
    for number in prompts:
        ended = handle_of(node, number)
        assert ended.handle is not None
        node.submit(kept(10 + number, [7, number], handle=ended.handle.handle, max_tokens=20))
    node.finish(11, 12, 13)
    assert node.manager.snapshot().preemptions > 0, "positive control: there was not room for all"
    for number in prompts:
        expected = greedy_oracle([*prompts[number], *answers[number], 7, number], 20)
        assert node.sink.tokens[10 + number, 0] == expected
    drop_all(node, *node.sink.finished)


def test_no_such_conversation_and_no_room_in_the_context() -> None:
    """A handle that is not known is NOT_FOUND, one that fills the context INVALID_ARGUMENT; nothing is left behind."""
    node = Node()
    node.submit(kept(1, [5, 6], handle=bytes(16)))
    node.until(lambda: node.sink.done(1))
    assert isinstance(node.sink.failed[1], NotFound)
    run(node, kept(2, prompt_of(12), max_tokens=4))
    ended = handle_of(node, 2)
    assert ended.handle is not None
    handle = ended.handle.handle
    node.submit(replace(kept(3, prompt_of(4), handle=handle, max_tokens=9), max_context=20))
    node.until(lambda: node.sink.done(3))
    assert isinstance(node.sink.failed[3], InvalidArgument)
    run(node, replace(kept(4, prompt_of(2), handle=handle, max_tokens=9), max_context=20))
    assert len(node.sink.tokens[4, 0]) == 2, "cut to the room there is"
    drop_all(node, (2, 0), (4, 0))


def test_too_many_kept_conversations_are_refused_before_work() -> None:
    """At the limit, a request that wants to be kept is RESOURCE_EXHAUSTED; one that does not runs."""
    node = Node()
    node.manager._state.kept.limit = 1
    run(node, kept(1, prompt_of(5)))
    node.submit(kept(2, prompt_of(5, seed=2)))
    node.until(lambda: node.sink.done(2))
    error = node.sink.failed[2]
    assert isinstance(error, ResourceExhausted) and error.reason == "TOO_MANY_KEPT"
    assert (2, 0) not in node.sink.tokens and 2 not in node.sink.cached
    run(node, request(3, prompt_of(5, seed=3)))
    drop_all(node, (1, 0))


def test_a_sample_whose_reader_found_a_stop_string_is_kept_as_far_as_it_is() -> None:
    """`finish`: the sample ends well, with a handle, though the engine has gone on."""
    node = Node()
    prompt = prompt_of(10)
    node.submit(kept(1, prompt, max_tokens=50))
    node.until(lambda: len(node.sink.tokens.get((1, 0), [])) >= 6)
    node.engine.cancel(node.sink, 1, 0, finish=True)  # type: ignore[arg-type]
    node.until(lambda: node.sink.done(1))
    ended = handle_of(node, 1)
    said = node.sink.tokens[1, 0]
    assert ended.reason is EndReason.STOP and ended.handle is not None
    assert ended.handle.num_tokens == len(prompt) + len(said) < len(prompt) + 50
    drop_all(node, (1, 0))


def test_finish_keeps_what_waits_in_the_queue_too() -> None:
    """A sample that was preempted when its reader ended it is kept once it has blocks again."""
    node = Node(num_blocks=8, max_batch=2)
    prompts = [prompt_of(6, seed=1), prompt_of(6, seed=2)]
    for number, prompt in enumerate(prompts, start=1):
        node.submit(kept(number, prompt, max_tokens=18))
    node.until(lambda: node.manager.snapshot().preemptions > 0)
    said = len(node.sink.tokens[2, 0])
    node.engine.cancel(node.sink, 2, 0, finish=True)  # type: ignore[arg-type]
    node.finish(1, 2)
    ended = handle_of(node, 2)
    assert ended.handle is not None and ended.handle.num_tokens == 6 + said
    base = [*prompts[1], *node.sink.tokens[2, 0]]
    node.manager.drop_kept("acme", handle_of(node, 1).handle.handle, now_ns=0)  # type: ignore[union-attr]
    assert run(node, request_from(3, ended)) == greedy_oracle([*base, 4], 3)
    drop_all(node, (2, 0))


def request_from(number: int, ended: SampleEnded) -> Request:
    """One more token after a kept conversation, three to come; it is not kept itself."""
    assert ended.handle is not None
    return replace(request(number, [4], max_tokens=3), session_handle=ended.handle.handle)


def test_waiting_for_a_handle_blocks_nobody() -> None:
    """Answers that come late: others decode on, and the end comes with its handle when it is there."""
    late = 0
    node = Node(lateness=lambda: late)
    other = prompt_of(8, seed=2)
    node.submit(kept(1, prompt_of(8), max_tokens=4))
    node.submit(request(2, other, max_tokens=60))
    node.until(lambda: (2, 0) in node.sink.tokens and len(node.sink.tokens[1, 0]) == 3)
    late = 12
    node.step(2)
    before = len(node.sink.tokens[2, 0])
    assert (1, 0) not in node.sink.finished
    node.step(4)
    assert len(node.sink.tokens[2, 0]) >= before + 3 and (1, 0) not in node.sink.finished
    node.finish(1, 2)
    assert node.sink.tokens[2, 0] == greedy_oracle(other, 60)
    assert handle_of(node, 1).handle is not None
    drop_all(node, (1, 0))


def test_a_handle_whose_answer_was_lost_ends_the_sample_without_one() -> None:
    """The stream broke between release and answer: the sample is finished all the same, once."""
    node = Node()
    node.submit(kept(1, prompt_of(8), max_tokens=2))
    node.until(lambda: (1, 0) in node.sink.tokens)
    keeping = node.engine._loop._committer.keeping
    answered = keeping.answered
    lost: list[Kept] = []
    keeping.answered = lost.extend  # type: ignore[method-assign]
    node.until(lambda: bool(lost))
    keeping.answered = answered  # type: ignore[method-assign]
    keeping.rename({})
    node.engine._loop.requests.deliver()
    assert handle_of(node, 1).handle is None and 1 in node.sink.ended
    keeping.answered(lost)
    node.settle()
    node.manager.tick(10**18)
    node.assert_quiet()


@pytest.mark.parametrize("purged", ["acme", "other"])
def test_a_sample_whose_tenant_was_purged_meanwhile_ends_without_a_handle(purged: str) -> None:
    """It is told whole and ends as it would have; the handle alone is missing, and nothing stays held. Another tenant's
    purge costs it nothing."""
    node = Node()
    prompt = prompt_of(8)
    node.submit(kept(1, prompt, max_tokens=6))
    node.until(lambda: len(node.sink.tokens.get((1, 0), [])) == 3)
    node.manager.purge(purged)
    node.finish(1)
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt, 6)
    ended = handle_of(node, 1)
    assert ended.reason is EndReason.LENGTH and (ended.handle is None) == (purged == "acme")
    if ended.handle is None:
        node.settle()
        node.assert_quiet()
    else:
        drop_all(node, (1, 0))


def test_what_is_kept_while_the_stream_is_away_has_its_newest_token() -> None:
    """The reporter presents what ended while away whole, and says the rest with the release."""
    node = Node()
    node.submit(kept(1, prompt_of(8), max_tokens=5))
    node.until(lambda: len(node.sink.tokens.get((1, 0), [])) == 4)
    reporter = node.engine._loop._reporter
    running = node.engine._loop._scheduler.running
    (sequence,) = running
    reporter.leave()
    reporter.present(running)
    sequence.append_token(9)
    lease = sequence.lease
    assert lease is not None
    held_tokens = sequence.num_computed
    reporter.release(sequence, 60.0)
    (held,) = reporter.present([])
    assert len(held.tokens) // 4 == held_tokens
    reporter.come_back({lease: lease}, 0)
    (report,) = reporter._released
    rest = np.frombuffer(report.tokens, "<i4").tolist()
    assert report.keep_seconds == 60.0 and rest == sequence.tokens[held_tokens:].tolist() and len(rest) == 2
