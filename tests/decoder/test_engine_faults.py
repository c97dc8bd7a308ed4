"""Faults inside the loop: they end what they touched, with an error, and nothing else; the loop goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.errors import Internal, PermissionDenied, ResourceExhausted, Unavailable
from decoder.cache_api import Acquire, AcquireRefused, Attached, Command, Lost, Reported
from decoder.inprocess import InProcessClient
from decoder.sequence import LeaseId
from decoder.step_loop import MAX_FAILED_STEPS
from tests.decoder.rig import Node, RecallModel, greedy_oracle, prompt_of, request, solo


def test_a_failing_step_fails_its_requests_alone() -> None:
    """The requests of the step get INTERNAL without the cause's text; the next request is served."""
    node = Node()

    def explode(batch: Any) -> None:
        raise RuntimeError("secret detail")

    node.submit(request(1, prompt_of(6)))
    node.step(2)
    node.model.on_forward = explode
    node.submit(request(2, prompt_of(7)))
    node.until(lambda: node.sink.done(1))
    node.model.on_forward = lambda batch: None
    node.submit(request(3, prompt_of(8)))
    node.finish(3)
    assert isinstance(node.sink.failed[1], Internal)
    assert "secret" not in str(node.sink.failed[1])
    assert node.sink.tokens[3, 0] == greedy_oracle(prompt_of(8), 8)
    assert node.engine.is_serving
    node.assert_quiet()


def test_what_a_failed_step_wrote_is_never_published() -> None:
    """The blocks of a failed step are no hit for the next request; those of the steps before are."""
    node = Node()

    def explode(batch: Any) -> None:
        if batch.positions[0] >= 16:
            raise ValueError("broken")

    node.model.on_forward = explode
    node.submit(request(1, prompt_of(40)))
    node.finish(1)
    node.model.on_forward = lambda batch: None
    node.submit(request(2, prompt_of(40)))
    node.finish(2)
    assert node.sink.cached[2] == 16
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(40), 8)


def test_repeated_failures_end_serving_and_one_success_begins_it_again() -> None:
    """After so many failed steps in a row the engine says that it does not serve; a step that works says it does."""
    node = Node()

    def explode(batch: Any) -> None:
        raise FloatingPointError("broken")

    node.model.on_forward = explode
    for number in range(MAX_FAILED_STEPS):
        assert node.engine.is_serving
        node.submit(request(number, prompt_of(6)))
        node.finish(number)
    assert not node.engine.is_serving
    node.model.on_forward = lambda batch: None
    node.submit(request(9, prompt_of(6)))
    node.finish(9)
    assert node.engine.is_serving


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    """One row of NaN ends one request; its neighbour in the same step goes on."""

    class Poisoned(RecallModel):
        def forward(self, batch: Any, arena: np.ndarray) -> np.ndarray:
            logits = super().forward(batch, arena)
            for row in range(len(logits)):
                if batch.token_ids[batch.logit_rows[row]] == 96:
                    logits[row, 5] = np.nan
            return logits

    node = Node(model=Poisoned())
    node.submit(request(1, [*prompt_of(5), 96]))
    node.submit(request(2, prompt_of(5), max_tokens=1))
    node.finish(1, 2)
    assert isinstance(node.sink.failed[1], Internal)
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(5), 1)
    node.assert_quiet()


@pytest.mark.parametrize(
    "broken",
    [
        {"seed": -1, "temperature": 1.0},
        {"logit_bias": ((5000, 1.0),)},
        {"frequency_penalty": "much"},
        {"seed": -1, "temperature": 1.0, "num_samples": 3},
    ],
)
def test_a_draw_that_breaks_fails_its_request_alone(broken: dict[str, Any]) -> None:
    """Whatever goes wrong over one sequence's parameters, its neighbours in every step say what they say alone."""
    node = Node()
    neighbours = [
        request(2, prompt_of(7), max_tokens=20, temperature=1.1, seed=5, frequency_penalty=0.4),
        request(3, prompt_of(9), max_tokens=20, num_samples=2, temperature=0.9, seed=6),
    ]
    for neighbour in neighbours:
        node.submit(neighbour)
    node.step(3)
    node.submit(request(1, prompt_of(6), **broken))
    node.finish(1, 2, 3)
    assert isinstance(node.sink.failed[1], Internal)
    assert set(node.sink.failed) == {1}
    for neighbour in neighbours:
        for index, tokens in solo(neighbour).items():
            assert node.sink.tokens[neighbour.number, index] == tokens
    assert node.engine.is_serving
    node.assert_quiet()


@pytest.mark.parametrize("penalty", [1e-38, 1e-40, 1e-300, 5e-324])
def test_a_penalty_close_to_zero_harms_nobody(penalty: float) -> None:
    """The smallest penalties are served, and the neighbour says what it says alone."""
    node = Node()
    neighbour = request(2, prompt_of(7), max_tokens=20, temperature=1.1, seed=5)
    node.submit(neighbour)
    node.step(3)
    node.submit(request(1, prompt_of(6), temperature=1.0, repetition_penalty=penalty))
    node.finish(1, 2)
    assert not node.sink.failed
    assert len(node.sink.tokens[1, 0]) == 8
    assert node.sink.tokens[2, 0] == solo(neighbour)[0]
    node.assert_quiet()


def test_a_failing_copy_fails_its_request_alone() -> None:
    """A copy-on-write that breaks ends the request that needed it; nothing of it is published."""
    node = Node()
    node.submit(request(1, prompt_of(18)))
    node.finish(1)

    def explode(*arguments: Any) -> None:
        raise MemoryError("broken")

    copy, node.model.copy_blocks = node.model.copy_blocks, explode  # type: ignore[method-assign]
    node.submit(request(2, prompt_of(18)))
    node.finish(2)
    assert isinstance(node.sink.failed[2], Internal)
    node.model.copy_blocks = copy  # type: ignore[method-assign]
    node.submit(request(3, prompt_of(18)))
    node.finish(3)
    assert node.sink.tokens[3, 0] == greedy_oracle(prompt_of(18), 8)
    node.assert_quiet()


def test_a_broken_book_ends_the_session_and_a_new_one_serves() -> None:
    """A defect in the loop itself fails all requests with INTERNAL, gives the session up, and a new one works."""
    node = Node()
    node.submit(request(1, prompt_of(6), max_tokens=50))
    node.step(3)
    node.engine._inbox.put(AcquireRefused(999, Internal("no such acquire")))  # type: ignore[arg-type]
    node.step(3)
    assert isinstance(node.sink.failed[1], Internal)
    assert not node.engine.is_serving
    node.submit(request(2, prompt_of(6)))
    node.step()
    assert isinstance(node.sink.failed[2], Unavailable)
    session = node.manager.attach(decoder_name="decoder-0", process_id=1, now_ns=0)
    node.client.attach_anew(session, Attached(2, 64, node.arena))
    node.submit(request(3, prompt_of(6)))
    node.finish(3)
    assert node.sink.tokens[3, 0] == greedy_oracle(prompt_of(6), 8)
    node.assert_quiet()


def test_a_lost_session_fails_what_runs_and_what_waits() -> None:
    """UNAVAILABLE for running and queued requests; late answers of the lost session change nothing."""

    class Watched(InProcessClient):
        resumed = 0

        def resume(self) -> None:
            self.resumed += 1

    node = Node(max_batch=1)
    client = Watched(node.manager, node.session, tenant="acme", root=bytes(32))
    client.start(node.engine._inbox.put)
    node.engine._loop._client = node.engine._loop.intake._client = client
    for number in range(3):
        node.submit(request(number, prompt_of(6, seed=number), max_tokens=50))
    node.step(4)
    node.engine._inbox.put(Lost(1, Unavailable("gone")))
    node.engine._inbox.put(Reported(0, np.array([3, 4], np.int32), (), (), 7))
    node.step(2)
    assert all(isinstance(node.sink.failed[number], Unavailable) for number in range(3))
    assert client.resumed == 1
    assert not node.engine.is_serving
    node.manager.detach(node.session, process_dead=True, now_ns=0)
    client.attach_anew(
        node.manager.attach(decoder_name="decoder-0", process_id=1, now_ns=0), Attached(2, 64, node.arena)
    )
    node.submit(request(5, prompt_of(6)))
    node.finish(5)
    assert node.sink.tokens[5, 0] == greedy_oracle(prompt_of(6), 8)
    assert node.engine.is_serving
    node.assert_quiet()


def test_a_refused_lease_fails_its_request_alone() -> None:
    """Where the daemon ends a lease, its request gets INTERNAL, and the answer is acknowledged."""
    node = Node()
    node.submit(request(1, prompt_of(6), max_tokens=60))
    node.submit(request(2, prompt_of(7), max_tokens=30))
    node.step(6)
    lease = next(item for item in node.manager.list_leases().items if item.request_id == "request-1")
    revision = node.manager.revision
    node.engine._inbox.put(
        Reported(0, np.empty(0, np.int32), (), ((LeaseId(lease.lease), Internal("refused")),), revision)
    )
    node.finish(1, 2)
    assert isinstance(node.sink.failed[1], Internal)
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(7), 30)


@pytest.mark.parametrize(
    "error", [PermissionDenied("no"), ResourceExhausted("never", subject="blocks", needed=9, usable=8, reason="OTHER")]
)
def test_a_refused_acquire_fails_its_request_and_the_queue_moves(error: Any) -> None:
    """Any refusal but a full pool ends the request with the daemon's own error."""

    class Refusing(InProcessClient):
        def send(self, session: int, command: Command) -> None:
            if isinstance(command, Acquire) and command.request_id == "request-1":
                self._post(AcquireRefused(command.sequence_id, error))
            else:
                super().send(session, command)

    node = Node()
    client = Refusing(node.manager, node.session, tenant="acme", root=bytes(32))
    client.start(node.engine._inbox.put)
    node.engine._loop._client = node.engine._loop.intake._client = client
    node.submit(request(1, prompt_of(6), num_samples=2, temperature=1.0))
    node.submit(request(2, prompt_of(7)))
    node.finish(1, 2)
    assert node.sink.failed[1] is error
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(7), 8)
    node.assert_quiet()


def test_the_step_delay_is_inside_every_step() -> None:
    """The knob waits once for each step that computes, and nowhere else."""
    waits: list[float] = []
    node = Node(step_delay_seconds=0.25)
    node.engine._loop._pause = waits.append
    node.submit(request(1, prompt_of(6), max_tokens=5))
    node.finish(1)
    assert waits == [0.25] * 5
