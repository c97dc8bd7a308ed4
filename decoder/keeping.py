"""Samples that have ended and wait for the handle of the conversation that they have become.

Invariant: such a sample is told of its last token and as finished exactly once: with its handle when the report that
released its lease is answered, or without one where that answer says that nothing is kept, or is lost with the stream.
Nothing waits for it: its place and its blocks went with its end. Called by the engine's thread; it holds no lease.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import TesseraError
from decoder.cache_api import Kept
from decoder.outputs import EndReason, Handle
from decoder.requests import ActiveRequest, RequestTable
from decoder.sampler import Drawn
from decoder.sequence import LeaseId


@dataclass(frozen=True, slots=True)
class _End:
    active: ActiveRequest
    sample: int
    reason: EndReason
    drawn: Drawn | None


class Keeping:
    """The ends that wait, by lease."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self._ends: dict[LeaseId, _End] = {}

    def __contains__(self, lease: LeaseId | None) -> bool:
        return lease in self._ends

    def wait(
        self, lease: LeaseId, active: ActiveRequest, sample: int, reason: EndReason, drawn: Drawn | None = None
    ) -> None:
        """A sample has ended; the release of its lease asks for a handle. `drawn` is the token that ended it, if one
        did: it is told together with the end, since only the end says whether it is part of the text."""
        self._ends[lease] = _End(active, sample, reason, drawn)

    def answered(self, kept: Iterable[Kept]) -> None:
        """Handles have come."""
        for item in kept:
            handle = Handle(item.handle, item.num_tokens) if item.handle else None
            self._finish(self._ends.pop(item.lease, None), handle)

    def refused(self, lease: LeaseId, error: TesseraError) -> bool:
        """A lease that was to be kept was not: its request fails with the reason. False where it waits for nothing."""
        end = self._ends.pop(lease, None)
        if end is None:
            return False
        self._requests.fail(end.active, error)
        return True

    def rename(self, leases: dict[LeaseId, LeaseId]) -> None:
        """The session goes on: `leases` has new ids. Handles of leases that are in none of them were lost."""
        ends, self._ends = self._ends, {}
        for lease, end in ends.items():
            new = leases.get(lease)
            if new is None:
                self._finish(end, None)
            else:
                self._ends[new] = end

    def clear(self) -> None:
        """The session is gone, and every request with it."""
        self._ends.clear()

    def _finish(self, end: _End | None, handle: Handle | None) -> None:
        if end is None or not end.active.is_open or end.sample not in end.active.open_samples:
            return
        token = None
        if end.drawn is not None and end.drawn.token is not None:
            token = end.drawn.token
            self._requests.gain(end.active, end.sample, token, end.drawn.logprobs)
        stop_id = token if end.reason is EndReason.STOP else None
        self._requests.end_sample(end.active, end.sample, end.reason, stop_id, handle)
