"""The way in of one gateway while constraints are compiled: nothing waits that need not, and nothing is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from common.adapter_folder import adapter_not_found
from common.errors import InvalidArgument
from common.tokens import pack_tokens
from decoder import submissions
from decoder.adapter_pool import AdapterUse
from decoder.outputs import StepResult
from decoder.submissions import MAX_COMPILING, Submissions
from decoder.validation import ServedModel
from tessera.decode.v1 import decode_pb2
from tests.decoder.rig import EOS, VOCAB

pytest.importorskip("llguidance", reason="a run-time dependency: install it with constraints.txt")


class RecordingEngine:
    """Remembers in which order it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.adapters: dict[int, bytes] = {}

    def submit(self, request: Any, sink: Any) -> None:
        self.adapters[request.number] = request.adapter_digest
        self.calls.append(("submit", request.number, request.constraint is not None))

    def cancel(self, sink: Any, number: int, sample: int | None = None, *, finish: bool = False) -> None:
        self.calls.append(("cancel", number, sample, finish))


class Failures:
    """A sink that remembers what failed."""

    def __init__(self) -> None:
        self.failed: dict[int, str] = {}

    def deliver(self, result: StepResult) -> None:
        for item in result.failed:
            self.failed[item.number] = item.error.reason


def submission(number: int, regex: str | None = None, **stopping: Any) -> decode_pb2.Submit:
    message = decode_pb2.Submit(request=number, request_id=f"r{number}", grant=b"g", tokens=pack_tokens([5, 6]))
    message.sampling.temperature = 0.0
    message.stopping.max_tokens = 4
    for name, value in stopping.items():
        setattr(message.stopping, name, value)
    if regex is not None:
        message.output.constraint.regex = regex
    return message


class GatedPool:
    """A pool in which `ready` adapters are in memory, and others come, or fail, when the gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.ready = {"there": AdapterUse(None, b"there")}

    def find(self, name: str) -> AdapterUse | None:
        if name == "never":
            raise adapter_not_found(name)
        return self.ready.get(name)

    def load(self, name: str) -> AdapterUse:
        self.gate.wait(20)
        if name == "broken":
            raise InvalidArgument("adapter", "is broken")
        return AdapterUse(None, name.encode())


def run(
    body: Callable[[Submissions, RecordingEngine, Failures], Awaitable[None]], pool: GatedPool | None = None
) -> None:
    async def inside() -> None:
        engine, sink = RecordingEngine(), Failures()
        model = ServedModel(VOCAB, 64, frozenset({EOS}))
        entry = Submissions(engine, model, sink, pool)  # type: ignore[arg-type]
        await body(entry, engine, sink)
        entry.close()

    asyncio.run(asyncio.wait_for(inside(), 30))


def told() -> decode_pb2.Vocabulary:
    return decode_pb2.Vocabulary(tokens=[b"", b"a", b"b"])


async def settled(entry: Submissions) -> None:
    while entry._compiling:
        await asyncio.sleep(0)


def test_others_pass_and_what_comes_meanwhile_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is compiled plain requests go by; a cancel of a sample follows it, a cancel of it all ends it."""
    gate, found = threading.Event(), submissions.compile_constraint

    def slow(*arguments: Any) -> Any:
        gate.wait(20)
        return found(*arguments)

    monkeypatch.setattr(submissions, "compile_constraint", slow)

    async def body(entry: Submissions, engine: RecordingEngine, sink: Failures) -> None:
        entry.tell_vocabulary(told())
        entry.submit(submission(1, "a+"))
        entry.submit(submission(2, "b+"))
        entry.submit(submission(3))
        entry.cancel(decode_pb2.Cancel(request=1, index=0, finish=True))
        entry.cancel(decode_pb2.Cancel(request=2))
        entry.cancel(decode_pb2.Cancel(request=3))
        gate.set()
        await settled(entry)
        assert engine.calls == [
            ("submit", 3, False), ("cancel", 3, None, False), ("submit", 1, True), ("cancel", 1, 0, True),
        ]  # fmt: skip
        assert not sink.failed

    run(body)


def test_bad_ones_fail_alone() -> None:
    """Before the vocabulary, no constraint, one in conflict, too many at once: each fails, the others are served."""

    async def body(entry: Submissions, engine: RecordingEngine, sink: Failures) -> None:
        entry.submit(submission(1, "a"))
        entry.tell_vocabulary(told())
        entry.submit(submission(2, "(a"))
        entry.submit(submission(3, "a", min_tokens=1))
        entry.submit(submission(4, "a", ignore_eos=True))
        entry.submit(submission(5, ""))
        for number in range(100, 102 + MAX_COMPILING):
            entry.submit(submission(number, "a|b"))
        await settled(entry)
        last = 101 + MAX_COMPILING
        assert sink.failed == {
            1: "NO_VOCABULARY", 2: "INVALID_ARGUMENT", 3: "INVALID_ARGUMENT", 4: "INVALID_ARGUMENT",
            5: "INVALID_ARGUMENT", last: "QUEUE_FULL", last - 1: "QUEUE_FULL", last - 2: "QUEUE_FULL",
        }  # fmt: skip
        assert [call[1] for call in engine.calls] == list(range(100, 99 + MAX_COMPILING))

    run(body)


def test_adapters_that_are_read_hold_up_nobody() -> None:
    """One in memory goes on at once; those that are read come after the others, with a constraint too; one that is
    cancelled meanwhile never comes, and one that is unknown, broken or no name fails alone."""
    pool = GatedPool()

    async def body(entry: Submissions, engine: RecordingEngine, sink: Failures) -> None:
        entry.tell_vocabulary(told())
        named = {1: "slow", 2: "there", 3: "", 4: "slow", 5: "broken", 6: "never", 7: ".a", 8: "slow"}
        for number, name in named.items():
            message = submission(number, "a+" if number == 8 else None)
            message.adapter = name
            entry.submit(message)
        entry.cancel(decode_pb2.Cancel(request=4))
        assert [call[1] for call in engine.calls] == [2, 3]
        pool.gate.set()
        await settled(entry)
        assert engine.calls[2:] == [("submit", 1, False), ("submit", 8, True)]
        assert engine.adapters == {1: b"slow", 2: b"there", 3: b"", 8: b"slow"}
        assert sink.failed == {5: "INVALID_ARGUMENT", 6: "ADAPTER_NOT_FOUND", 7: "INVALID_ARGUMENT"}

    run(body, pool)


def test_without_a_pool_an_adapter_is_refused_by_name() -> None:
    """A decoder that serves no adapters says so, and does not answer with the base."""

    async def body(entry: Submissions, engine: RecordingEngine, sink: Failures) -> None:
        message = submission(1)
        message.adapter = "a"
        entry.submit(message)
        assert (engine.calls, sink.failed) == ([], {1: "FIELD_UNIMPLEMENTED"})

    run(body)
