"""How kept conversations come into the engine and leave it: what a request continues, and what its reader ends well.

Invariant: once a sequence is admitted nothing tells it from one that was sent whole, so that penalties, positions,
seeds, bounds, scope and preemption are the same. Called by the intake, between steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from common.errors import InvalidArgument, TesseraError
from decoder.cache_api import Acquired
from decoder.commit import Committer
from decoder.outputs import EndReason
from decoder.reporting import Reporter
from decoder.requests import ActiveRequest, RequestTable
from decoder.sequence import IntArray, Request, ScopePrefix, Sequence

BASE_TOKENS: Final = 64  # last tokens of a conversation that a gateway is told, to go on with its text


class Conversations:
    """The beginnings and ends of sequences that kept conversations bring about."""

    def __init__(self, requests: RequestTable, reporter: Reporter, committer: Committer) -> None:
        self._requests = requests
        self._reporter = reporter
        self._committer = committer

    def begin(self, sequence: Sequence, answer: Acquired) -> bool:
        """A sequence has a lease: what it continues is the beginning of its prompt. False where it is over already: the
        whole leaves no room for an answer, or its reader ended it meanwhile; then the lease is given up, or kept."""
        if sequence.request.session_handle:
            try:
                self._continue_from(sequence, answer.base_tokens, answer.base_scope)
            except TesseraError as error:
                self._reporter.release_unused(answer.lease)
                self._committer.fail_sequence(sequence, error)
                return False
        sequence.admitted = True
        if sequence.finishing:
            active = self._requests.of(sequence)
            self._committer.keeping.wait(answer.lease, active, sequence.sample, EndReason.STOP)
            self._reporter.release_unused(answer.lease, sequence.request.keep_seconds)
            self._committer.leave(sequence)
        return not sequence.finishing

    def finish_sample(self, active: ActiveRequest, index: int) -> None:
        """A sample was ended well by its reader, who found a stop string: it is kept as its request asks. One that has
        no blocks now is kept when it is admitted again."""
        for sequence in [sequence for sequence in active.sequences if sequence.sample == index]:
            if sequence.lease is None:
                sequence.finishing = True
            else:
                self._committer.keeping.wait(sequence.lease, active, index, EndReason.STOP)
                self._committer.leave(sequence)

    def _continue_from(self, sequence: Sequence, base: IntArray, scope: ScopePrefix | None) -> None:
        active = self._requests.of(sequence)
        active.request = continued(sequence.request, np.concatenate((base, sequence.request.prompt)), scope)
        active.base_tokens = tuple(base[-BASE_TOKENS:].tolist())
        sequence.begin_with(active.request)


def continued(request: Request, prompt: IntArray, scope: ScopePrefix | None) -> Request:
    """`request` with `prompt`, which begins in `scope`, for its own. Raises InvalidArgument where that leaves no room
    for an answer."""
    stopping = request.stopping
    if request.max_context:
        room = request.max_context - len(prompt)
        if room < 1:
            raise InvalidArgument(
                "session.handle",
                f"the conversation and the prompt are {len(prompt)} tokens; allowed are {request.max_context - 1}",
            )
        stopping = replace(stopping, max_tokens=min(stopping.max_tokens, room))
    return replace(request, prompt=prompt, stopping=stopping, scope=scope, session_handle=b"", session_tokens=0)
