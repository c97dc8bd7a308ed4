"""A cache session without a process: the `CacheClient` protocol straight over a cache manager object.

Invariant: the same operations in the same order as over the wire; answers are posted before `send` returns. Used by
benches and tests to run an engine in one process. `manager` is any object with the operations of
`cachemgr.manager.CacheManager` (this package imports none). Not safe for more than one thread.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from common.errors import TesseraError, Unavailable, Unimplemented
from decoder.cache_api import (
    AbortDone,
    Acquire,
    Acquired,
    AcquireRefused,
    AcquireWaiting,
    Attached,
    Branch,
    Command,
    Event,
    Fork,
    Forked,
    Growth,
    Kept,
    Lost,
    PrefixReady,
    Replacement,
    Report,
    Reported,
    Scrub,
    SequenceReport,
    WindowBlocksNamed,
)
from decoder.holdings import Holdings
from decoder.sequence import CopyPlan, IntArray, LeaseId, ScopePrefix


class InProcessClient:
    """One tenant's session on `manager`: `session` is from its `attach`, `root` is the tenant's tree root, 32 bytes.

    Clients of one manager that shall hear of each other's prefixes share `peers`, by session.
    """

    def __init__(
        self,
        manager: Any,
        session: Any,
        *,
        tenant: str,
        root: bytes,
        clock_ns: Callable[[], int] = lambda: 0,
        peers: dict[Any, InProcessClient] | None = None,
    ) -> None:
        self._peers = {} if peers is None else peers
        self._peers[session] = self
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
                self._answer(self._acquire(command))
            case Report():
                self._answer(self._report(command))
            case Fork():
                self._answer(self._fork(command))
            case AbortDone():
                self.aborts_answered.append(command)
        self._tell_ready()

    def _answer(self, event: Event) -> None:
        manager = self._manager
        if manager.num_window_blocks:
            self._post(WindowBlocksNamed(manager.window_pairs(_named(event))))
        scrub, window_scrub = manager.take_scrub(), manager.take_window_scrub()
        if len(scrub) or len(window_scrub):
            self._post(Scrub(scrub, window_scrub))
        self._post(event)

    def abandon(self, session: int) -> None:
        """End the session on the manager."""
        self._manager.detach(self._session, process_dead=True, now_ns=self._clock_ns())
        self._tell_ready()
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
        self._peers[session] = self
        self._post(attached)

    def _tell_ready(self) -> None:
        for session, wait_id in self._manager.take_ready_waits():
            if session in self._peers:
                self._peers[session]._post(PrefixReady(wait_id))

    def _root_of(self, command: Acquire) -> bytes:
        digest = command.adapter_digest
        return hashlib.blake2b(digest, key=self._root, digest_size=32).digest() if digest else self._root

    def _span_of(self, scope: ScopePrefix) -> Any:
        """The manager's `ScopeSpan` of a scope. Tests that have wider scopes say which."""
        raise Unimplemented("a session without a process is one tenant's: it has no wider scope")

    def _scope_of(self, span: Any) -> ScopePrefix:
        """The other way round."""
        raise Unimplemented("a session without a process is one tenant's: it has no wider scope")

    def _acquire(self, command: Acquire) -> Event:
        try:
            lease = self._manager.acquire(
                self._session,
                tenant=self._tenant,
                root=self._root_of(command),
                tokens=command.tokens,
                request_id=command.request_id,
                sample=command.sample,
                no_read=command.no_read,
                no_store=command.no_store,
                resumed=command.resumed,
                priority=command.priority,
                ttl_ns=int(command.ttl_seconds * 1e9),
                may_wait=command.may_wait,
                base=command.base_handle,
                base_tokens=command.base_tokens,
                will_keep=command.will_keep,
                prefix=None if command.scope is None else self._span_of(command.scope),
                now_ns=self._clock_ns(),
            )
        except TesseraError as error:
            return AcquireRefused(command.sequence_id, error)
        if wait_id := getattr(lease, "wait_id", 0):
            return AcquireWaiting(command.sequence_id, wait_id, lease.resident_tokens)
        return Acquired(
            command.sequence_id,
            LeaseId(lease.lease_id),
            lease.blocks,
            lease.cached_tokens,
            _plan(lease.copy),
            np.frombuffer(lease.base_tokens, "<i4"),
            None if lease.base_span is None else self._scope_of(lease.base_span),
        )

    def _report(self, command: Report) -> Event:
        self.num_reports += 1
        done = self._manager.report(
            self._session,
            [_core_report(item) for item in command.sequences],
            returned=command.returned,
            wanted=command.wanted,
            lacking=command.lacking,
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
            tuple(Kept(LeaseId(item.lease_id), item.name, item.num_tokens) for item in done.kept),
            tuple(Growth(LeaseId(item.lease_id), item.blocks) for item in done.grown),
        )

    def _fork(self, command: Fork) -> Event:
        branches = self._manager.fork(
            self._session, command.lease, list(command.samples), command.num_tokens, self._clock_ns()
        )
        return Forked(
            command.sequence_id,
            tuple(Branch(LeaseId(branch.lease_id), branch.blocks, _plan(branch.copy)) for branch in branches),
        )


@dataclass(frozen=True, slots=True)
class _Keep:
    name: bytes
    ttl_ns: int


class _CoreReport(NamedTuple):
    """A `SequenceReport` as the manager reads it."""

    lease_id: LeaseId
    taken_blocks: IntArray
    tokens: bytes
    sealed_tokens: int
    copied: bool
    release: bool
    keep: _Keep | None


def _core_report(item: SequenceReport) -> _CoreReport:
    keep = _Keep(secrets.token_bytes(16), int(item.keep_seconds * 1e9)) if item.keep_seconds else None
    return _CoreReport(
        item.lease_id, item.taken_blocks, item.tokens, item.sealed_tokens, item.copied, item.release, keep
    )


def _named(event: Event) -> IntArray:
    """The blocks that an answer names."""
    match event:
        case Acquired():
            runs = [event.blocks, *_copied(event.copy)]
        case Reported():
            runs = [
                event.granted,
                *(item.blocks for item in event.replacements),
                *(item.blocks for item in event.grown),
            ]
        case Forked():
            runs = [run for branch in event.branches for run in (branch.blocks, *_copied(branch.copy))]
        case _:
            runs = []
    return np.unique(np.concatenate([np.empty(0, np.int32), *runs])).astype(np.int32)


def _copied(copy: CopyPlan | None) -> list[IntArray]:
    return [] if copy is None else [np.array((copy.source, copy.target), np.int32)]


def _plan(copy: Any) -> CopyPlan | None:
    return None if copy is None else CopyPlan(copy.source, copy.target, copy.num_tokens)
