"""A cache session without a process: the `CacheClient` protocol straight over a cache manager object.

Invariant: the same operations in the same order as over the wire; answers are posted before `send` returns. Used by
benches and tests to run an engine in one process. `manager` is any object with the operations of
`cachemgr.manager.CacheManager` (this package imports none). Not safe for more than one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.errors import TesseraError, Unavailable
from decoder.cache_api import (
    AbortDone,
    Acquire,
    Acquired,
    AcquireRefused,
    Attached,
    Branch,
    Command,
    Event,
    Fork,
    Forked,
    Lost,
    Replacement,
    Report,
    Reported,
)
from decoder.holdings import Holdings
from decoder.sequence import CopyPlan, LeaseId


class InProcessClient:
    """One tenant's session on `manager`: `session` is from its `attach`, `root` is the tenant's tree root, 32 bytes."""

    def __init__(
        self, manager: Any, session: Any, *, tenant: str, root: bytes, clock_ns: Callable[[], int] = lambda: 0
    ) -> None:
        self._manager = manager
        self._session = session
        self._tenant = tenant
        self._root = root
        self._clock_ns = clock_ns
        self._post: Callable[[Event], None] = lambda event: None
        self.num_reports = 0
        self.aborts_answered: list[AbortDone] = []

    def start(self, post: Callable[[Event], None]) -> None:
        """Post events to `post`; the engine was given its arena already."""
        self._post = post

    def send(self, session: int, command: Command) -> None:
        """Run a command and post its answer."""
        match command:
            case Acquire():
                self._post(self._acquire(command))
            case Report():
                self._post(self._report(command))
            case Fork():
                self._post(self._fork(command))
            case AbortDone():
                self.aborts_answered.append(command)

    def abandon(self, session: int) -> None:
        """End the session on the manager."""
        self._manager.detach(self._session, process_dead=True, now_ns=self._clock_ns())
        self._post(Lost(session, Unavailable("the session was given up")))

    def present(self, session: int, holdings: Holdings) -> None:
        """Never asked for here: there is no stream that could break."""

    def is_fenced(self, session: int) -> bool:
        """Never: there is no stream that could fall silent."""
        return False

    def resume(self) -> None:
        """Attach anew; the engine must be told by `attach_anew`."""

    def attach_anew(self, session: Any, attached: Attached) -> None:
        """Go on with another session of the manager."""
        self._session = session
        self._post(attached)

    def _acquire(self, command: Acquire) -> Event:
        try:
            lease = self._manager.acquire(
                self._session,
                tenant=self._tenant,
                root=self._root,
                tokens=command.tokens,
                request_id=command.request_id,
                sample=command.sample,
                no_read=command.no_read,
                no_store=command.no_store,
                resumed=command.resumed,
                priority=command.priority,
                now_ns=self._clock_ns(),
            )
        except TesseraError as error:
            return AcquireRefused(command.sequence_id, error)
        return Acquired(
            command.sequence_id, LeaseId(lease.lease_id), lease.blocks, lease.cached_tokens, _plan(lease.copy)
        )

    def _report(self, command: Report) -> Event:
        self.num_reports += 1
        done = self._manager.report(
            self._session,
            command.sequences,
            returned=command.returned,
            wanted=command.wanted,
            generated_tokens=command.generated_tokens,
            preemptions=command.preemptions,
            queued=command.queued,
            applied_revision=command.applied_revision,
            now_ns=self._clock_ns(),
        )
        return Reported(
            command.wanted,
            done.credit,
            tuple(Replacement(LeaseId(item.lease_id), item.first_index, item.blocks) for item in done.replacements),
            tuple((LeaseId(item.lease_id), item.error) for item in done.refusals),
            done.revision,
        )

    def _fork(self, command: Fork) -> Event:
        branches = self._manager.fork(
            self._session, command.lease, list(command.samples), command.num_tokens, self._clock_ns()
        )
        return Forked(
            command.sequence_id,
            tuple(Branch(LeaseId(branch.lease_id), branch.blocks, _plan(branch.copy)) for branch in branches),
        )


def _plan(copy: Any) -> CopyPlan | None:
    return None if copy is None else CopyPlan(copy.source, copy.target, copy.num_tokens)
