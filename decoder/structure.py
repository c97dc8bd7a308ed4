"""Answers that must match a JSON schema, a regular expression or a grammar: which tokens may come next.

Owns the state of each constrained sample and the threads that move it on. Invariant: what is allowed is a function of
the constraint and of the sample's own tokens; a token of end may come exactly where the grammar may end; no step waits
longer than `PATIENCE_SECONDS` for all of them. The work is done beside the model step: `Structures.begin` hands it to
the threads, `ready` waits, without spinning, and leaves out who is not ready: that one's token is computed once more by
the next step. The grammars are llguidance's; its limits bound the time of a step and the memory of a state.
Vocabularies come from the gateway, as the decoder knows no text. Called by the submissions (compiling), the step loop
and the drawing.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from common.errors import FailedPrecondition, InvalidArgument
from decoder.sequence import IntArray, Sequence
from decoder.vocabulary import Vocabulary, library

if TYPE_CHECKING:
    from decoder.runner import Work

BoolArray = NDArray[np.bool_]

THREADS: Final = 2
PATIENCE_SECONDS: Final = 0.005  # of a step, after its forward
MAX_MESSAGE: Final = 300  # characters of the library's word on a grammar
# Of one compile: some seconds at most. Of one step: some tens of milliseconds. Of one state: some 20 MB.
LIMITS: Final = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
}


class Constraint:
    """One compiled constraint; it has no state. Made by `compile_constraint`."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary, stop_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocabulary.size
        self._stop_ids = np.array(sorted(stop_ids), np.int64)

    def new_matcher(self) -> Any:
        """A matcher at the beginning."""
        return self._matcher.deep_copy()

    def forbidden(self, matcher: Any) -> BoolArray:
        """bool [vocab]: what must not come next. Raises InvalidArgument where a limit was met."""
        packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise _too_complex()
        allowed = np.unpackbits(packed, bitorder="little")[: self._vocab_size].astype(bool)
        allowed[self._stop_ids] = matcher.is_accepting()
        return ~allowed


def compile_constraint(kind: str, text: str, vocabulary: Vocabulary, stop_ids: frozenset[int]) -> Constraint:
    """The constraint `text`, of a kind of `Constraint` in inference.proto; `stop_ids` may come where it may end.

    May take seconds.

    Raises InvalidArgument, with the library's word on it, for what is no constraint, or too complex a one.
    """
    guidance = library()
    field = f"output.constraint.{kind}"
    try:
        grammar = guidance.grammar_from(kind, text)
        limits = guidance.LLParserLimits(**LIMITS)
        matcher = guidance.LLMatcher(vocabulary.tokenizer(), grammar, log_level=0, limits=limits)
    except ValueError as error:
        raise InvalidArgument(field, f"is not served: {str(error)[:MAX_MESSAGE]}") from None
    if not matcher.is_error():
        matcher.compute_bitmask()  # what cannot begin is refused here
    if matcher.is_error():
        raise InvalidArgument(field, f"is not served: {matcher.get_error()[:MAX_MESSAGE]}")
    return Constraint(matcher, vocabulary, stop_ids)


class SampleStructure:
    """How far one sample is in its constraint."""

    __slots__ = ("_constraint", "_future", "_matcher", "_num_seen")

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._matcher: Any = None
        self._num_seen = -1
        self._future: concurrent.futures.Future[BoolArray] | None = None

    def begin(self, executor: concurrent.futures.Executor, answer: IntArray) -> None:
        """Have the thread find what may come after `answer`, the tokens of the sample so far; once for each length."""
        if self._future is None or self._num_seen != len(answer):
            new = answer[max(0, self._num_seen) :].tolist()
            self._num_seen = len(answer)
            self._future = executor.submit(self._advance, new)

    @property
    def future(self) -> concurrent.futures.Future[BoolArray]:
        """What is begun. Raises RuntimeError before `begin`."""
        if self._future is None:
            raise RuntimeError("a constrained sample is drawn before its constraint was asked")
        return self._future

    def forbidden(self) -> BoolArray:
        """bool [vocab]: what must not come next. Raises InvalidArgument for a limit met."""
        return self.future.result()

    def _advance(self, tokens: list[int]) -> BoolArray:
        if self._matcher is None:
            self._matcher = self._constraint.new_matcher()
        if tokens and not self._matcher.consume_tokens(tokens):
            raise _too_complex()
        return self._constraint.forbidden(self._matcher)


class Structures:
    """The threads of one step loop, started with the first constrained sequence."""

    def __init__(self) -> None:
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None

    def begin(self, sampled: Rows[tuple[Sequence, int]]) -> None:
        """Begin what the draws of this step will ask for."""
        for sequence, _ in sampled:
            constraint = sequence.request.constraint
            if constraint is None:
                continue
            if self._executor is None:
                self._executor = concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="structure")
            if sequence.structure is None:
                sequence.structure = SampleStructure(constraint)
            sequence.structure.begin(self._executor, sequence.tokens[sequence.num_prompt :])

    def ready(self, work: Work) -> Work:
        """The work of a step without the sequences that cannot be drawn yet."""
        if self._executor is None:  # there was no constrained sequence yet
            return work
        futures = {sequence: sequence.structure.future for sequence, _ in work.sampled if sequence.structure}
        if not futures:
            return work
        late = concurrent.futures.wait(futures.values(), PATIENCE_SECONDS).not_done
        if not late:
            return work
        left_out = {sequence for sequence, future in futures.items() if future in late}
        return replace(
            work,
            parts=[part for part in work.parts if part[0] not in left_out],
            sampled=[part for part in work.sampled if part[0] not in left_out],
        )


def dead_end() -> FailedPrecondition:
    """The error of a sample that has no token left to draw."""
    return FailedPrecondition(
        "no token is left that the constraint and the other fields allow, or the model's numbers are not finite",
        reason="CONSTRAINT_DEAD_END",
    )


def _too_complex() -> InvalidArgument:
    # The library's word on it may hold text of the answer.
    return InvalidArgument("output.constraint", "became too complex in the course of the answer")
