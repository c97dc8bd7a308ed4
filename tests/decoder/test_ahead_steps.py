"""Steps that are launched before the tokens of the step before are known, on a device that does nothing until it must.

`AheadNode` checks every report: nothing is sealed that was not written, nothing goes that a launched step still needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.errors import Internal, Unavailable
from decoder.ahead_steps import AheadSteps
from decoder.cache_api import Attached, Lost
from decoder.outputs import EndReason
from decoder.reporting import Reporter
from decoder.sequence import BeamParams, Request, RequestNumber, SpeculationMode, SpeculationParams
from decoder.steps import Steps
from tests.decoder.ahead_rig import AheadNode, LazyRecall
from tests.decoder.rig import Node, greedy_oracle, prompt_of, request, solo


def steps_of(node: Node) -> Steps:
    return node.engine._loop._steps


def reporter_of(node: Node) -> Reporter:
    return node.engine._loop._reporter


def running(node: AheadNode, tokens: int, **options: Any) -> None:
    """Request 1 has so many tokens, and a step of it is under way."""
    node.submit(request(1, prompt_of(9), **{"max_tokens": 60, **options}))
    node.until(lambda: len(node.sink.tokens.get((1, 0), [])) == tokens)
    assert node.model.queue


# ---- order


def test_the_next_step_is_launched_before_the_ids_of_the_last_are_read() -> None:
    """Two steps are under way when the older is waited for; decodes are fed by the device, with the model's tokens."""
    node = AheadNode()
    node.submit(request(1, prompt_of(11), max_tokens=29))
    node.finish(1)
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt_of(11), 29)
    # The last token is known to be the last: no step is launched for what would come after it, though there is room.
    pairs = [[("launch", n + 1), ("wait", n)] for n in range(1, 29)]
    assert node.model.log == [("launch", 1), *(it for pair in pairs for it in pair), ("wait", 29)]
    assert node.model.fed == 28
    assert isinstance(steps_of(node), AheadSteps)
    node.assert_quiet()


def test_a_model_of_the_cpu_computes_step_by_step() -> None:
    """Without `launch` nothing is ever under way."""
    node = Node()
    assert type(steps_of(node)) is Steps
    node.submit(request(1, prompt_of(11)))
    node.step(3)
    assert not steps_of(node).are_under_way


def test_chunks_fly_too() -> None:
    """The chunks of a long prompt follow each other without a wait, beside decodes that are fed."""
    node = AheadNode()
    running(node, 3)
    node.submit(request(2, prompt_of(70, seed=1), max_tokens=5))
    del node.model.log[:]
    node.finish(1, 2)
    assert ("forward", 0) not in node.model.log
    assert max(tokens for _, tokens in node.model.batches) == 16
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt_of(9), 60)
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(70, seed=1), 5)
    node.assert_quiet()


# ---- the same tokens


def test_mixed_requests_equal_their_solo_runs() -> None:
    """Arrivals, stops, shared prefixes, temperatures, fields that the host computes, samples, in one batch."""
    node = AheadNode(num_blocks=800, chunk_tokens=64)
    shared, items = prompt_of(18, seed=99), []
    for number in range(28):
        prompt = (shared if number % 2 else []) + prompt_of(1 + 3 * number, seed=number)
        stops = [greedy_oracle(prompt, 9)[7]] if number % 4 == 0 else []
        host: dict[str, Any] = {"top_k": 20, "repetition_penalty": 1.3} if number in (3, 10) else {}
        items.append(
            request(
                number, prompt, max_tokens=5 + number, stop_ids=stops, min_tokens=3 if number % 8 == 0 else 0,
                temperature=0.9 if number % 3 == 1 else 0.0, seed=number, num_samples=2 if number == 9 else 1, **host,
            )
        )  # fmt: skip
    for item in items:
        node.submit(item)
        node.step(2)
    node.finish(*range(28))
    for item in items:
        for sample, tokens in solo(item).items():
            assert node.sink.tokens[item.number, sample] == tokens, item.number
    assert node.model.fed > 100
    assert any(node.sink.finished[number, 0].reason is EndReason.STOP for number in range(0, 28, 4))
    node.assert_quiet()


@pytest.mark.parametrize("group_window", [0, 9])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_and_goes_tokens_are_those_of_solo_runs(seed: int, group_window: int) -> None:
    """Arrivals, cancels, slow readers and a pool that is too small, by chance: what ended is whole, what was cancelled
    is a beginning, and nothing is held or told too early. So too where a layer with a window lies in window blocks,
    which go, and are poison, while steps are under way."""
    numbers = np.random.default_rng(seed)
    num_blocks = int(numbers.integers(20, 60))
    model = LazyRecall(group_window=group_window)
    node = AheadNode(num_blocks, model=model, window_tokens=12, max_batch=8)
    items: dict[int, Request] = {}
    for number in range(20):
        prompt = prompt_of(int(numbers.integers(1, 30)), seed=int(numbers.integers(4)))
        stops = numbers.integers(4, 97, 6).tolist() if number % 3 == 0 else []
        host = {"presence_penalty": 0.5} if numbers.random() < 0.1 else {}
        items[number] = request(
            number, prompt, max_tokens=int(numbers.integers(1, 30)), stop_ids=stops, seed=number,
            temperature=float(numbers.random() < 0.5), priority=int(numbers.integers(3)), **host,
        )  # fmt: skip
        node.submit(items[number])
        for _ in range(int(numbers.integers(0, 6))):
            node.step()
            for (other, _), tokens in node.sink.tokens.items():
                node.engine.consumed(node.sink, other, len(tokens))
        if numbers.random() < 0.3:
            node.engine.cancel(node.sink, int(numbers.integers(number + 1)))

    def done() -> bool:
        for (other, _), tokens in node.sink.tokens.items():
            node.engine.consumed(node.sink, other, len(tokens))
        return not node.engine.num_requests

    node.until(done)
    assert not node.sink.failed
    for number, item in items.items():
        tokens, want = node.sink.tokens.get((number, 0), []), solo(item)[0]
        assert tokens == want[: len(tokens)], number
        assert tokens == want or (number, 0) not in node.sink.finished
    node.assert_quiet()


def noted_preemptions(node: AheadNode) -> list[int]:
    """How much is queued at each preemption to come."""
    preempt, under_way = node.engine._loop._scheduler._preempt, []

    def noted(*arguments: Any) -> None:
        under_way.append(len(node.model.queue))
        preempt(*arguments)

    node.engine._loop._scheduler._preempt = noted  # type: ignore[method-assign]
    return under_way


def test_a_paused_sequence_gives_way_with_nothing_under_way() -> None:
    """A reader that stopped keeps nobody out, while another sequence decodes on."""
    node = AheadNode(num_blocks=16, window_tokens=4)
    under_way = noted_preemptions(node)
    node.submit(request(1, prompt_of(30), max_tokens=10))
    node.step(20)
    node.submit(request(2, prompt_of(4, seed=1), max_tokens=30))
    node.step(3)
    node.submit(request(3, prompt_of(30, seed=2), max_tokens=4))

    def done() -> bool:
        for number in (2, 3):
            node.engine.consumed(node.sink, RequestNumber(number), len(node.sink.tokens.get((number, 0), [])))
        return node.sink.done(2) and node.sink.done(3)

    node.until(done)
    assert under_way == [0]
    node.engine.consumed(node.sink, RequestNumber(1), 1000)
    node.finish(1)
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt_of(30), 10)
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(4, seed=1), 30)
    node.assert_quiet()


def test_who_waits_for_blocks_is_served_when_they_are_fenced() -> None:
    """A request that found the pool full asks again when the lease of one that stopped goes, without time passing."""
    tokens = greedy_oracle(prompt_of(20), 9)
    node = AheadNode(num_blocks=9, clock_ns=lambda: 0)
    node.submit(request(1, prompt_of(20), max_tokens=12, stop_ids=[tokens[7]], no_store=True))
    node.step(3)
    node.submit(request(2, prompt_of(20, seed=1), max_tokens=6))
    node.finish(1, 2)
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(20, seed=1), 6)
    node.assert_quiet()


def test_blocks_that_are_about_to_be_fenced_keep_others_from_giving_way() -> None:
    """One stops where the other has just been refused a block: with the fence that is asked for again, and is there."""
    stop = greedy_oracle(prompt_of(8), 9)[8]
    node = AheadNode(num_blocks=9, clock_ns=lambda: 0)
    node.submit(request(1, prompt_of(8), max_tokens=30, stop_ids=[stop], no_store=True))
    node.submit(request(2, prompt_of(8, seed=1), max_tokens=28, no_store=True))
    node.finish(1, 2)
    assert node.manager.snapshot().preemptions == 0
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(8, seed=1), 28)
    node.assert_quiet()


def test_a_launched_step_brings_nothing_to_another_lease() -> None:
    """A sequence that lost its lease and got one meanwhile has nothing under way, and keeps what it has computed."""
    node = AheadNode()
    running(node, 3)
    sequence = node.engine._loop._scheduler.running[0]
    flight = steps_of(node)._flights[0]  # type: ignore[attr-defined]
    table, lease = sequence.table.copy(), sequence.lease
    sequence.drop_lease()
    assert (sequence.in_flight, sequence.promised) == (0, 0)
    sequence.hold(lease, table, 4, 4, None)
    work = flight.end()
    assert not work.parts and not work.sampled
    assert (sequence.num_computed, sequence.in_flight, sequence.promised) == (4, 0, 0)


def test_preempted_sequences_go_on_with_the_same_tokens() -> None:
    """Where blocks lack somebody gives way, and only when nothing is under way."""
    node = AheadNode(num_blocks=14)
    under_way = noted_preemptions(node)
    for number in range(3):
        node.submit(request(number, prompt_of(8, seed=number), max_tokens=30))
    node.finish(0, 1, 2)
    for number in range(3):
        assert node.sink.tokens[number, 0] == greedy_oracle(prompt_of(8, seed=number), 30)
    assert under_way and not any(under_way)
    assert node.model.fed > 30
    node.assert_quiet()


# ---- the plain way


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.2}, {"presence_penalty": 0.2}, {"frequency_penalty": 0.2},
        {"logit_bias": ((5, 4.0),)}, {"bad_ids": frozenset({7})}, {"num_logprobs": 2}, {"num_samples": 3},
        {"top_k": 5, "temperature": 1.0}, {"top_p": 0.8, "temperature": 1.0}, {"min_p": 0.1, "temperature": 1.0},
        {"speculation": SpeculationParams(SpeculationMode.PROMPT_LOOKUP, 4)}, {"beam": BeamParams(2)},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_what_the_host_has_to_draw_is_computed_with_nothing_under_way(fields: dict[str, Any]) -> None:
    """Each such request has the tokens of an engine without launches, and so has the plain one beside it."""
    nodes = (AheadNode(num_blocks=200), Node(num_blocks=200))
    for node in nodes:
        node.submit(request(1, prompt_of(9), max_tokens=40))
        node.step(5)
        node.submit(request(2, prompt_of(12, seed=1), max_tokens=10, **fields))
        node.finish(1, 2)
        node.assert_quiet()
    ahead, plain = nodes
    assert ahead.sink.tokens == plain.sink.tokens
    assert ahead.sink.logprobs == plain.sink.logprobs
    assert ("forward", 0) in ahead.model.log
    assert ahead.model.fed > 5, "the plain one flew before and after it"


def test_masked_stops_are_the_hosts_until_min_tokens() -> None:
    """Before `min_tokens` stop tokens are masked on the host; from then on steps fly."""
    stops = sorted(set(greedy_oracle(prompt_of(9), 3)))
    item = request(1, prompt_of(9), max_tokens=25, min_tokens=6, stop_ids=stops)
    node = AheadNode()
    node.submit(item)
    node.finish(1)
    assert node.sink.tokens[1, 0] == solo(item)[0]
    flown = [what for what, _ in node.model.log if what != "wait"]
    assert flown[:6] == ["forward"] * 6 and set(flown[6:]) == {"launch"}
    node.assert_quiet()


# ---- ends


def test_a_token_after_a_stop_is_thrown_away() -> None:
    """A stop is found when the step after it is under way: what that brings is never told, counted or published."""
    tokens = greedy_oracle(prompt_of(9), 20)
    node = AheadNode()
    node.submit(request(1, prompt_of(9), max_tokens=20, stop_ids=[tokens[6]]))
    node.finish(1)
    first = tokens.index(tokens[6])
    assert node.sink.tokens[1, 0] == tokens[: first + 1]
    assert (node.sink.finished[1, 0].reason, node.sink.finished[1, 0].stop_id) == (EndReason.STOP, tokens[6])
    assert node.sink.ended[1][0] == first + 1 == node.manager.snapshot().generated_tokens
    # Of the launched steps one is more than there are tokens: the control that there was something to throw away.
    assert sum(what == "launch" for what, _ in node.model.log) == first + 2
    assert sum(prefix.num_tokens for prefix in node.manager.list_prefixes().items) == 9 + first
    node.assert_quiet()
    node.submit(request(2, [*prompt_of(9), *tokens[: first + 3]], max_tokens=1))
    node.finish(2)
    assert node.sink.cached[2] == 9 + first


def cancel(node: AheadNode) -> None:
    node.engine.cancel(node.sink, 1)


def disconnect(node: AheadNode) -> None:
    node.engine.disconnect(node.sink)


@pytest.mark.parametrize("leave", [cancel, disconnect])
def test_a_cancelled_lease_goes_after_its_launched_step(leave: Callable[[AheadNode], None]) -> None:
    """The request ends at once; its lease is the daemon's again only when the step that writes there is over."""
    node = AheadNode()
    running(node, 5)
    leave(node)
    steps_of(node).settle, settle = (lambda: None), steps_of(node).settle  # type: ignore[method-assign,assignment]
    node.step(3)
    assert node.engine.num_requests == 0
    assert node.model.queue and node.manager.snapshot().leases == 1
    steps_of(node).settle = settle  # type: ignore[method-assign]
    node.step(2)
    assert node.manager.snapshot().leases == 0
    assert len(node.sink.tokens[1, 0]) == 5
    node.assert_quiet()


def test_the_checks_find_a_lease_that_goes_too_early() -> None:
    """The control of the two tests before: a reporter that takes every step for fenced is found out."""
    node = AheadNode()
    running(node, 5)
    reporter_of(node)._fenced_step = 1 << 40
    cancel(node)
    node.submit(request(2, prompt_of(5), max_tokens=2))
    node.finish(2)
    assert "a lease goes whose blocks a launched step writes" in node.violations


def test_the_checks_find_a_seal_before_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of every test here: tokens that count as computed when they are launched are found out."""
    node = AheadNode()
    begin = LazyRecall.launch

    def told(self: LazyRecall, batch: Any, arena: Any, draws: Any) -> Any:
        for sequence in node.engine._loop._scheduler.running:
            if sequence.lease is not None and sequence.num_computed + 16 <= sequence.num_prompt:
                sequence.num_computed += 16
                sequence.in_flight -= 16
        return begin(self, batch, arena, draws)

    monkeypatch.setattr(LazyRecall, "launch", told)
    node.submit(request(1, prompt_of(60), max_tokens=3))
    node.step(4)
    assert "a token is sealed that was not written" in node.violations


def test_copies_are_done_before_they_are_told() -> None:
    """A copy-on-write behind a step under way: the daemon unpins its source when it is told, so it has run by then.
    Without the wait for it the checks find it."""
    for waits in (True, False):
        node = AheadNode()
        running(node, 12)
        if not waits:
            node.model.quiesce = lambda: None
        node.submit(request(2, prompt_of(7), max_tokens=2))  # a part of a published block
        node.step(4)
        assert node.sink.cached[2] == 6
        assert ("a copy is told that waits" in node.violations) is not waits


# ---- faults


def test_a_step_that_fails_late_fails_its_requests_alone() -> None:
    """The error comes with the wait. What was launched after it is void, and computed again for those that were not in
    the step that failed."""
    node = AheadNode()
    running(node, 4)

    def explode(batch: Any) -> None:
        if 13 in batch.positions.tolist() and batch.num_decodes == 1:
            raise RuntimeError("secret detail")

    node.model.on_forward = explode
    node.submit(request(2, prompt_of(30, seed=1), max_tokens=6))
    node.until(lambda: node.sink.done(1))
    assert not steps_of(node).are_under_way
    node.finish(2)
    assert set(node.sink.failed) == {1}
    assert isinstance(node.sink.failed[1], Internal) and "secret" not in str(node.sink.failed[1])
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(30, seed=1), 6)
    assert node.engine.is_serving
    node.assert_quiet()


@pytest.mark.parametrize("queued", [False, True])
def test_a_step_that_cannot_be_launched_fails_its_requests_alone(queued: bool) -> None:
    """The step before it is committed; the engine goes on. What was queued of it is over before its leases go."""
    node = AheadNode()
    running(node, 4)

    def explode(*batch: Any) -> None:
        raise MemoryError

    if queued:
        node.model.on_queued = explode
    else:
        node.model.on_launch = explode
    node.finish(1)
    assert isinstance(node.sink.failed[1], Internal)
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt_of(9), 5)
    node.model.on_launch, node.model.on_queued = (lambda batch: None), (lambda: None)
    node.submit(request(2, prompt_of(9), max_tokens=6))
    node.finish(2)
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(9), 6)
    node.assert_quiet()


def test_a_row_that_is_not_finite_fails_its_request_alone() -> None:
    """No token was drawn, so what the next step was fed is nobody's; the neighbour in both steps goes on."""

    class Poisoned(LazyRecall):
        def _run(self, step: Any, batch: Any, arena: np.ndarray, draws: Any) -> None:
            super()._run(step, batch, arena, draws)
            for row, position in enumerate(draws.positions.tolist()):
                if position == 15 and draws.seeds[row] == 1:
                    step.ids[row] = -1

    node = AheadNode(model=Poisoned())
    node.submit(request(1, prompt_of(9), max_tokens=20, seed=1))
    node.submit(request(2, prompt_of(9, seed=5), max_tokens=20))
    node.finish(1, 2)
    assert isinstance(node.sink.failed[1], Internal)
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt_of(9), 6)
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(9, seed=5), 20)
    node.assert_quiet()


def test_what_was_launched_under_a_lease_that_ran_out_is_not_told() -> None:
    """Nothing comes while the lease may be over, and no step stays under way; when it turns out to be alive the same
    tokens are computed again."""
    node = AheadNode()
    running(node, 5)
    node.client.is_silent = True
    node.step(3)
    assert len(node.sink.tokens[1, 0]) == 5
    assert not node.model.queue and not steps_of(node).are_under_way
    node.client.is_silent = False
    node.finish(1)
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt_of(9), 60)
    node.assert_quiet()


def test_a_lease_that_runs_out_while_a_step_is_waited_for() -> None:
    """What is read then is not told, and what was fed by it is void too."""
    node = AheadNode()
    running(node, 5)
    node.model.on_launch = lambda batch: setattr(node.client, "is_silent", True)
    node.step()
    node.model.on_launch = lambda batch: None
    assert len(node.sink.tokens[1, 0]) == 5
    assert not steps_of(node).are_under_way
    node.client.is_silent = False
    node.finish(1)
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt_of(9), 60)
    node.assert_quiet()


@pytest.mark.parametrize("ended", ["lost", "stopped", "broken"])
def test_a_session_ends_after_what_was_launched_in_it(ended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost, stopped, or given up over a fault of the loop: the device is done with the arena before the daemon may
    take it for free."""
    node = AheadNode()
    running(node, 5)
    error = Unavailable("gone")
    if ended == "lost":
        node.manager.detach(node.session, process_dead=False, now_ns=0)
        node.engine._inbox.put(Lost(1, error))
    elif ended == "stopped":
        node.engine.stop(error)
    else:
        abandon = node.client.abandon

        def checked(session: int) -> None:
            node.expect(not node.model.queue, "the session is given up before what it launched")
            abandon(session)

        monkeypatch.setattr(node.client, "abandon", checked)
        monkeypatch.setattr(node.engine._loop._scheduler, "schedule", lambda **_: 1 / 0)
    node.step(2)
    assert 1 in node.sink.failed
    assert not node.model.queue and not node.violations
    if ended == "stopped":
        node.engine._loop.hand_back()
        node.assert_quiet()
        return
    monkeypatch.undo()
    session = node.manager.attach(decoder_name="decoder-0", process_id=1, now_ns=0)
    node.client.attach_anew(session, Attached(2, 64, node.arena))
    node.submit(replace(request(2, prompt_of(9), max_tokens=6)))
    node.finish(2)
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(9), 6)


@pytest.mark.parametrize("settles", [True, False])
def test_blocks_that_were_replaced_go_after_the_step_that_reads_them(settles: bool) -> None:
    """Several that computed the same prompt at once: all but one get other blocks, and theirs are free when no launched
    step reads them any more. Without the settling before such an answer the checks find it."""
    node = AheadNode(num_blocks=100, chunk_tokens=64)
    if not settles:
        steps_of(node).settle_for = lambda message: None  # type: ignore[method-assign]
    for number in range(4):
        node.submit(request(number, prompt_of(21), max_tokens=30, no_read=True))
    node.finish(*range(4))
    assert node.model.fed > 30
    assert ("a block is freed that a launched step needs" in node.violations) is not settles
    if settles:
        for number in range(4):
            assert node.sink.tokens[number, 0] == greedy_oracle(prompt_of(21), 30)
        node.assert_quiet()
