"""When the step loop reports: at once what anybody may wait for, and what decodes alone bring once in some steps."""

from __future__ import annotations

import pytest

from decoder.cache_api import Acquire, Command, CreditReclaimed, Report
from decoder.steps import Steps
from tests.decoder.rig import BLOCK_TOKENS, Node, greedy_oracle, prompt_of, request


class Recorded:
    """The commands that a node's engine sends, in order."""

    def __init__(self, node: Node) -> None:
        self.commands: list[Command] = []
        send = node.client.send

        def record(session: int, command: Command) -> None:
            self.commands.append(command)
            send(session, command)

        node.client.send = record  # type: ignore[method-assign]

    def num_reports(self) -> int:
        """Reports since the last call."""
        count = sum(isinstance(command, Report) for command in self.commands)
        self.commands.clear()
        return count


def decoding(num_requests: int, max_tokens: int = 200) -> Node:
    """A node whose requests, of prompts of different lengths, all decode: most steps complete a block, or take one."""
    node = Node(num_blocks=512)
    for number in range(num_requests):
        node.submit(request(number, prompt_of(12 + number, seed=number), max_tokens=max_tokens))
    node.until(lambda: all(len(node.sink.tokens.get((number, 0), [])) > 1 for number in range(num_requests)))
    return node


def test_decodes_alone_are_reported_once_in_some_steps() -> None:
    """With blocks completed in most steps no more than every fourth tells of them, and in the end all are cached."""
    node = decoding(BLOCK_TOKENS, max_tokens=60)
    sent = Recorded(node)
    node.step(40)
    assert 40 // Steps.report_steps - 1 <= sent.num_reports() <= 40 // Steps.report_steps + 1
    node.finish(*range(BLOCK_TOKENS))
    node.assert_quiet()
    for number in range(BLOCK_TOKENS):
        prompt = prompt_of(12 + number, seed=number)
        whole = prompt + node.sink.tokens[number, 0]
        node.submit(request(10 + number, whole))
        node.finish(10 + number)
        assert node.sink.cached[10 + number] >= len(whole) - BLOCK_TOKENS
        assert node.sink.tokens[number, 0] == greedy_oracle(prompt, 60)


def test_with_a_step_for_each_report_there_are_as_many_as_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: there is something to tell after most of these steps."""
    monkeypatch.setattr(Steps, "report_steps", 1)
    node = decoding(BLOCK_TOKENS)
    sent = Recorded(node)
    node.step(40)
    assert sent.num_reports() >= 25


def test_a_prompts_blocks_are_told_after_each_of_its_chunks() -> None:
    """While others decode, a long prompt is reported chunk by chunk: somebody may wait for it."""
    node = decoding(2)
    node.submit(request(9, prompt_of(100, seed=9), max_tokens=2))
    node.until(lambda: any(len(sequence.tokens) > 90 for sequence in node.engine._loop._scheduler.running))
    sent = Recorded(node)
    node.until(lambda: 9 in node.sink.cached)
    chunks = len([tokens for single, tokens in node.model.batches if tokens > single])
    assert chunks >= 6 and sent.num_reports() >= 6


def test_what_was_computed_is_told_before_a_prompt_is_acquired() -> None:
    """A request that goes on from a running answer reads every block of it that was complete two steps before."""
    for extra in range(2 * Steps.report_steps):
        node = decoding(1)
        node.step(extra)
        prompt = prompt_of(12, seed=0)
        known = prompt + node.sink.tokens[0, 0]
        node.submit(request(1, known + prompt_of(3, seed=5)))
        node.until(lambda node=node: 1 in node.sink.cached)  # type: ignore[misc]
        assert node.sink.cached[1] >= (len(known) - 2) // BLOCK_TOKENS * BLOCK_TOKENS


def test_credit_that_is_asked_back_is_returned_with_the_next_step() -> None:
    """The daemon's wish for blocks is not put off, and after it nothing is for a while."""
    node = decoding(BLOCK_TOKENS)
    sent = Recorded(node)
    node.engine._inbox.put(CreditReclaimed(1))
    node.step()
    assert any(isinstance(command, Report) and len(command.returned) for command in sent.commands)
    sent.commands.clear()
    node.step(8)
    assert sent.num_reports() > 8 // Steps.report_steps + 1


def test_an_end_is_told_with_the_next_step() -> None:
    """A release never waits for the pace of decodes."""
    node = decoding(3)
    node.engine.cancel(node.sink, 1)
    sent = Recorded(node)
    node.step()
    assert any(
        isinstance(command, Report) and any(sequence.release for sequence in command.sequences)
        for command in sent.commands
    )
    assert not any(isinstance(command, Acquire) for command in sent.commands)
