"""The daemon of a simulated node: the thin service around the real `CacheManager`, as `cachemgr/service.py` keeps it.

Invariants: operations of a stream run one after the other, each whole; a session that is over is refused whatever it
says; its blocks are free only when its process cannot write them any more. Called by links, decoders and the operator.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cachemgr.adoption import LIMBO
from cachemgr.attach_order import AttachOrder
from cachemgr.ids import LeaseId, SessionId, TenantId
from cachemgr.manager import CacheManager
from cachemgr.recovery import recover
from cachemgr.results import Acquired, CopyPlan, Reported, Waiting
from cachemgr.resuming import renamed
from common.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, TesseraError
from common.tokens import pack_tokens
from tests.simulation import messages
from tests.simulation.decoder import GRACE, LEASE
from tests.simulation.kernel import MILLISECOND, Violation
from tests.simulation.network import End, Link
from tests.simulation.scenario import DUPLICATE, REORDER
from tests.simulation.workload import SCOPE_NAMES, span_of

if TYPE_CHECKING:
    from tests.simulation.workload import Conversation, Request
    from tests.simulation.world import World


@dataclass(eq=False, slots=True)
class Stream:
    """One stream that is open, or whose session may come back."""

    link: Link
    session: SessionId | None = None
    decoder: str = ""
    process_id: int = 0
    last_sequence: int = 0
    is_broken: bool = False
    is_superseded: bool = False
    is_reclaiming: bool = False
    last_operation: Any = None
    claimed_for: tuple[int, SessionId] = (0, SessionId(0))  # epoch and session, until the decoder has reported
    renamed: dict[LeaseId, LeaseId] = field(default_factory=dict)


class SimDaemon:
    """One life of the daemon."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world = world
        self.epoch = epoch
        self.is_dead = False
        self.dies_unanswered = False
        self.kernel = world.kernel
        scenario = world.scenario
        self.manager = CacheManager(
            num_blocks=scenario.num_blocks,
            block_tokens=scenario.block_tokens,
            window_tokens=scenario.group_window or scenario.window_tokens,
            epoch=epoch,
            journal=world.journal,
            name_bits=scenario.name_bits,
            fail_allocation=scenario.fail_allocation,
            lease_ns=LEASE * 1000,
            grace_ns=GRACE * 1000,
            on_free=world.invariants.freed,
            num_window_blocks=scenario.num_window_blocks,
            on_window_free=world.invariants.windows_freed,
        )
        for number, quota in enumerate(scenario.quotas, 1):
            self.manager.set_quota(TenantId(f"tenant-{number}"), quota)
        self.streams: dict[int, Stream] = {}
        self.order = AttachOrder()
        self.dead = world.dead
        self.absent: dict[tuple[int, SessionId], int] = {}  # processes that may hold what nobody has claimed
        self.adopted_until = 0
        self.claimed: dict[int, SessionId] = {}  # of processes that held something under the daemon before
        self.quarantined: dict[SessionId, tuple[str, int]] = {}
        self.admitted = 0
        self._pinner = random.Random(epoch)  # of its own, so that pins draw nothing from the others
        self.not_stored: set[LeaseId] = set()
        self.kernel.after(MILLISECOND, self._tick)

    def receive(self, link: Link, message: Any) -> None:
        """Something came on a stream."""
        if self.is_dead:
            link.down.close(0, lose=False)
            link.up.silence()
            return
        stream = self.streams.setdefault(link.number, Stream(link))
        if stream.is_broken:
            return
        if isinstance(message, End):
            self._broken(stream)
            return
        if message.sequence <= stream.last_sequence:
            self._say(f"refuses a repeated message of session {stream.session}")
            self._close(stream)
            return
        stream.last_sequence = message.sequence
        try:
            result = self._run(stream, message.operation)
        except TesseraError as error:
            result = error
            self._say(f"refuses: {error.reason}")
        if self.dies_unanswered:
            self._say("dies before its answer")
            self.world.kill_daemon()
            return
        self.world.check()
        scrub = tuple(self.manager.take_scrub().tolist())
        if scrub:
            self._say(f"has {list(scrub)} scrubbed")
        self._tell_ready()
        pairs, window_scrub = self._window_blocks(stream, message.operation, result)
        answer = messages.Answer(message.sequence, result, self.manager.revision, scrub, pairs, window_scrub)
        stream.link.down.send(answer)
        if self.kernel.chance(self.world.duplicates):
            self._say(f"hears a message of session {stream.session} twice")
            self.kernel.after(self.kernel.between(1, 500), self.receive, link, message)

    def _window_blocks(
        self, stream: Stream, operation: Any, result: Any
    ) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """What goes with every answer: the window blocks of the blocks that it names, and which of them to zero."""
        windows = self.manager._state.window_blocks
        if windows is None:
            return (), ()
        named = self._named(stream, operation, result)
        pairs = windows.pairs_of(np.array(sorted(named), np.intp)).tolist()
        scrub = tuple(windows.take_scrub().tolist())
        if scrub:
            self._say(f"has window blocks {list(scrub)} scrubbed")
        return tuple((block, window) for block, window in pairs), scrub

    def _named(self, stream: Stream, operation: Any, result: Any) -> set[int]:
        """The blocks that an answer names: of a lease that was cut all, of a session that goes on everything."""
        leases = self.manager._state.book.leases
        match operation, result:
            case _, Acquired(blocks=blocks, copy=copy):
                return {*blocks.tolist(), *_of_copy(copy)}
            case _, Reported(replacements=replacements, credit=credit, grown=grown):
                return {
                    *credit.tolist(),
                    *(block for item in (*replacements, *grown) for block in item.blocks.tolist()),
                }
            case messages.Fork(), list():
                return {block for branch in result for block in (*branch.blocks.tolist(), *_of_copy(branch.copy))}
            case ((messages.Rollback(lease=lease) | messages.MakeWritable(lease=lease)), _) if lease in leases:
                return {*leases[lease].blocks.tolist(), *_of_copy(leases[lease].copy)}
            case messages.Attach(), messages.Attached() if result.resumed is not None:
                session = self.manager._state.book.sessions[result.session]
                held = {block for lease in session.leases.values() for block in lease.blocks.tolist()}
                copies = {block for lease in session.leases.values() for block in _of_copy(lease.copy)}
                return held | copies | session.credit
        return set()

    def _tell_ready(self) -> None:
        for session, wait_id in self.manager.take_ready_waits():
            for stream in self.streams.values():
                if stream.session == session and not stream.is_broken:
                    stream.link.down.send(messages.PrefixReady(wait_id))

    def _say(self, what: str) -> None:
        self.kernel.say(f"daemon {what}")

    def _run(self, stream: Stream, operation: Any) -> Any:
        if isinstance(operation, messages.Attach):
            return self._attach_in_order(stream, operation)
        if stream.session is None:
            raise FailedPrecondition("the first operation of a stream is attach", reason="NOT_ATTACHED")
        stream.last_operation = operation
        return self.perform(stream.session, operation, stream)

    def perform(self, session: SessionId, operation: Any, stream: Stream | None) -> Any:
        """One operation of a session, straight on the manager."""
        manager, now_ns = self.manager, self.kernel.now_ns
        match operation:
            case messages.Acquire():
                return self._acquire(session, operation)
            case messages.Report(sequences, returned, wanted, applied, lacking):
                self._say(f"session {session} reports {self._described(operation)}")
                hidden = [item.lease_id for item in sequences if item.lease_id in self.not_stored]
                unlisted = self.world.invariants.unpublished(hidden)
                done = manager.report(
                    session, sequences, returned=np.array(returned, np.int32), wanted=wanted, lacking=lacking,
                    applied_revision=applied, now_ns=now_ns,
                )  # fmt: skip
                self.world.invariants.stayed_unpublished(unlisted)
                if stream is not None:
                    stream.is_reclaiming = False
                    stream.claimed_for = (0, SessionId(0))
                self._say(
                    f"grants {done.credit.tolist()}"
                    + "".join(
                        f", replaces {r.lease_id}@{r.first_index}: {r.blocks.tolist()}" for r in done.replacements
                    )
                    + "".join(f", lends {g.lease_id}: {g.blocks.tolist()}" for g in done.grown)
                    + "".join(f", refuses {r.lease_id}: {r.error.reason}" for r in done.refusals)
                )
                if len(done.credit) < wanted:
                    self._reclaim(session, wanted - len(done.credit), from_asking=False)
                return done
            case messages.Fork(lease, samples, num_tokens):
                made = manager.fork(session, lease, samples, num_tokens, now_ns)
                if lease in self.not_stored:
                    self.not_stored.update(branch.lease_id for branch in made)
                self._say(f"forks {lease} at {num_tokens}: {[(b.lease_id, b.blocks.tolist()) for b in made]}")
                return made
            case messages.Rollback(lease, num_tokens):
                plan = manager.rollback(session, lease, num_tokens, now_ns)
                self._say(f"rolls {lease} back to {num_tokens}: {plan}")
                return plan
            case messages.Commit(lease, num_tokens):
                try:
                    manager.commit(session, lease, num_tokens, now_ns)
                except FailedPrecondition as error:
                    if error.reason != "NO_STORE":  # purged meanwhile
                        raise
                self._say(f"commits {lease} at {num_tokens}")
                return None
            case messages.Heartbeat():
                return manager.heartbeat(session, now_ns)
            case messages.MakeWritable(lease):
                return manager.make_writable(session, lease, now_ns)
            case _:
                return None

    def _acquire(self, session: SessionId, asked: messages.Acquire) -> Any:
        request, tokens, judge = asked.request, asked.tokens, self.world.invariants
        base = asked.base
        given = tokens[len(self.world.base_tokens(base)) :] if base else tokens
        prefix = None if base else span_of(request.scope, request.root, request.prefix_tokens)
        before = judge.kept_of_floors()
        try:
            answer = self.manager.acquire(
                session, tenant=request.tenant, root=request.root, tokens=pack_tokens(np.array(given, np.int32)),
                request_id=f"r{request.number}", sample=asked.sample, no_read=request.no_read,
                no_store=request.no_store, resumed=asked.resumed, priority=request.cache_priority,
                ttl_ns=request.ttl_ns, base=base, prefix=prefix, may_wait=asked.may_wait, now_ns=self.kernel.now_ns,
            )  # fmt: skip
        except ResourceExhausted as error:
            if error.reason == "POOL_FULL":
                if error.subject == "window_blocks":
                    judge.may_lack_window_blocks(error.needed)
                elif not (self.world.scenario.fail_allocation or self.world.scenario.quotas or self.manager.adopting):
                    judge.may_be_refused(-(-len(tokens) // self.world.scenario.block_tokens))
                self._reclaim(session, error.needed - error.usable, from_asking=True)
            elif error.reason == "EXCEEDS_USABLE":
                judge.may_be_refused_for_good(-(-len(tokens) // self.world.scenario.block_tokens), request.owner)
            raise
        judge.kept_floors(before, request.owner)
        if isinstance(answer, Waiting):
            self._say(f"session {session}: r{request.number}.{asked.sample} waits: {answer}")
            return answer
        self.admitted += not asked.resumed
        if request.no_read and answer.cached_tokens:
            raise Violation(f"r{request.number} must read nothing and has {answer.cached_tokens} tokens cached")
        if request.no_store:
            self.not_stored.add(answer.lease_id)
        self._note_prefix(request, answer.lease_id, len(answer.blocks), continues=bool(base))
        self._say(
            f"session {session} leases {answer.lease_id} for r{request.number}.{asked.sample} of {request.tenant}: "
            f"{answer.blocks.tolist()}, {answer.cached_tokens} of {len(tokens)} cached, copy {answer.copy}"
            + (f", continues {base.decode()}" if base else "")
        )
        return answer

    def _note_prefix(self, request: Request, number: LeaseId, num_blocks: int, *, continues: bool) -> None:
        """What of a new lease lies in a wider scope: as its decoder has to know."""
        lease, size = self.manager._state.book.leases[number], self.world.scenario.block_tokens
        expected = request.prefix_tokens // size
        fits = expected <= num_blocks or self.world.scenario.group_window  # a table with groups grows into its scope
        if not continues and lease.prefix_blocks != (expected if fits else 0):
            raise Violation(f"r{request.number} has {lease.prefix_blocks} blocks in its scope")
        scope = 0 if lease.prefix_tree is None else request.scope
        if lease.prefix_tree is not None:
            owner = self.manager._state.tenant_names[lease.prefix_tree.owner]
            if owner != SCOPE_NAMES.get(request.scope):
                raise Violation(f"r{request.number} lies in {owner}")
            self._say(f"has {lease.prefix_blocks} blocks of {number} in {owner}")
        self.world.prefixes[self.epoch, number] = (scope, lease.prefix_blocks * size)

    def _described(self, report: messages.Report) -> str:
        parts = [
            f"{item.lease_id}:{item.sealed_tokens}{'c' * item.copied}{'r' * item.release}+{item.taken_blocks.tolist()}"
            for item in report.sequences
        ]
        return f"{' '.join(parts)} back {list(report.returned)} wants {report.wanted} has {report.applied_revision}"

    def _reclaim(self, asking: SessionId, missing: int, *, from_asking: bool) -> None:
        views = self.manager.list_sessions(limit=100).items
        by_session = {stream.session: stream for stream in self.streams.values()}
        for view in sorted(views, key=lambda item: (item.session == asking, -item.credit_blocks)):
            stream = by_session.get(view.session)
            if missing <= 0 or (view.session == asking and not from_asking):
                return
            if stream is None or not view.credit_blocks:
                continue
            if not stream.is_reclaiming and not stream.is_broken:
                stream.is_reclaiming = True
                stream.link.down.send(messages.Reclaim(min(missing, view.credit_blocks)))
            missing -= view.credit_blocks

    # ---- sessions

    def _attach_in_order(self, stream: Stream, operation: messages.Attach) -> messages.Attached:
        whose = (operation.process_id, operation.decoder, operation.sent_ns)
        if self.order.is_overtaken(*whose):
            self._say(f"hears {operation.decoder} after a later attach of it")
            raise FailedPrecondition("a later attach of this decoder was heard before", reason="ATTACH_OVERTAKEN")
        attached = self._attach(stream, operation)
        self.order.heard(*whose)
        return attached

    def _attach(self, stream: Stream, operation: messages.Attach) -> messages.Attached:
        if operation.resume is not None:
            return self._resume(stream, operation, operation.resume)
        for session, (decoder, process_id) in list(self.quarantined.items()):
            if (decoder, process_id) == (operation.decoder, operation.process_id):
                self._release_quarantine(session)
        for other in list(self.streams.values()):
            if other.session is not None and other.process_id == operation.process_id:
                other.is_superseded = True
                if other.is_broken:
                    self._end(other)
        stream.session = self.manager.attach(
            decoder_name=operation.decoder, process_id=operation.process_id, now_ns=self.kernel.now_ns
        )
        stream.decoder, stream.process_id = operation.decoder, operation.process_id
        self._say(f"attaches {operation.decoder} as session {stream.session}")
        self._returned(operation.process_id)
        return messages.Attached(stream.session, self.epoch)

    def _resume(self, stream: Stream, operation: messages.Attach, wanted: messages.Resume) -> messages.Attached:
        held = [item.held for item in wanted.held]
        if wanted.epoch != self.epoch:
            origin = (wanted.epoch, wanted.session)
            old = next((item for item in self.streams.values() if item.claimed_for == origin), None)
            if old is None:
                return self._claim(stream, operation, wanted)
            held = renamed(held, old.renamed)
            self._say(f"claimed session {old.session} for {operation.decoder} before")
        else:
            old = next((item for item in self.streams.values() if item.session == wanted.session), None)
        if old is None or old.session is None:
            raise FailedPrecondition("the session is over", reason="SESSION_OVER")
        if not old.is_broken:
            self._silence(old)
        self._say(f"hears what is held of session {old.session}: {[item.lease_id for item in held]}")
        credit = np.array(wanted.credit, np.int32)
        done = self.manager.resume(old.session, held, credit, self.kernel.now_ns)
        del self.streams[old.link.number]
        stream.session, stream.decoder, stream.process_id = old.session, operation.decoder, operation.process_id
        stream.claimed_for, stream.renamed = old.claimed_for, old.renamed
        self._say(f"goes on with session {stream.session}: leases {done.leases}, {len(done.replacements)} replaced")
        return messages.Attached(old.session, self.epoch, done)

    # ---- life and death

    def die(self) -> None:
        """kill -9: nothing is left but the journal and the arena."""
        self._say("dies")
        self.is_dead = True
        for stream in self.streams.values():
            stream.link.up.silence()
            stream.link.down.close(self.kernel.between(0, 2000), lose=True)

    def survivors(self) -> dict[tuple[int, SessionId], int]:
        """The process behind each (epoch, session) that may hold, or write, something."""
        found = dict(self.absent)
        for stream in self.streams.values():
            if stream.session is not None:
                found[self.epoch, stream.session] = stream.process_id
        for session, (_, process_id) in self.quarantined.items():
            found[self.epoch, session] = process_id
        return found

    def adopt(self, absent: dict[tuple[int, SessionId], int]) -> None:
        """Goes on with what the daemon before this one had; `absent` may hold some of it."""
        self.absent = dict(absent)
        listed = self.manager.adopt(recover(self.world.journal), self.kernel.now_ns)
        self.world.journal.keep_only(listed)
        self.adopted_until = self.kernel.now + LEASE
        self._say(f"adopts {len(listed)} blocks and waits for {sorted(absent.values())}")
        self._returned(0)

    def _claim(self, stream: Stream, operation: messages.Attach, wanted: messages.Resume) -> messages.Attached:
        if not self.manager.adopting:
            raise FailedPrecondition("the session is over", reason="SESSION_OVER")
        now_ns = self.kernel.now_ns
        session = self.manager.attach(decoder_name=operation.decoder, process_id=operation.process_id, now_ns=now_ns)
        pairs = np.array(wanted.window_blocks, np.int32).reshape(-1, 2)
        done = self.manager.claim(session, wanted.held, np.array(wanted.credit, np.int32), now_ns, pairs)
        self.world.invariants.claimed()
        self._say(f"leases what {operation.decoder} claims: {done.leases}, as session {session}")
        stream.session, stream.decoder, stream.process_id = session, operation.decoder, operation.process_id
        self.claimed[operation.process_id] = session
        stream.claimed_for = (wanted.epoch, wanted.session)
        stream.renamed = {item.held.lease_id: lease for item, lease in zip(wanted.held, done.leases, strict=True)}
        for item, lease in zip(wanted.held, done.leases, strict=True):
            if item.no_store and lease:
                self.not_stored.add(lease)
        self._returned(operation.process_id)
        return messages.Attached(session, self.epoch, done)

    def _returned(self, process_id: int) -> None:
        """A process has attached to this daemon, or is dead: it writes nothing of what nobody has claimed."""
        gone = {process_id, *self.dead}
        self.absent = {session: process for session, process in self.absent.items() if process not in gone}
        if self.manager.adopting and (not self.absent or self.kernel.now >= self.adopted_until):
            freed = self.manager.finish_adoption(
                writers={session for _, session in self.absent}, now_ns=self.kernel.now_ns
            )
            self._say(f"has adopted: {freed} blocks that nobody claims are free, {len(self.absent)} writers left")
        elif not self.absent:
            self.manager.process_gone(LIMBO)

    def _close(self, stream: Stream) -> None:
        """The daemon ends a stream."""
        self._silence(stream)
        self._broken(stream)

    @staticmethod
    def _silence(stream: Stream) -> None:
        stream.is_broken = True
        stream.link.down.close(0, lose=False)
        stream.link.up.silence()

    def _broken(self, stream: Stream) -> None:
        stream.is_broken = True
        if stream.session is None:
            del self.streams[stream.link.number]
        elif stream.is_superseded or stream.process_id in self.dead:
            self._end(stream)
        else:
            self.manager.away(stream.session, self.kernel.now_ns)
            self._say(f"has no stream for session {stream.session}")
            self.world.check()

    def _end(self, stream: Stream) -> None:
        """The session of a stream is over."""
        session = stream.session
        assert session is not None
        del self.streams[stream.link.number]
        safe = stream.is_superseded or stream.process_id in self.dead
        outcome = self.manager.detach(session, process_dead=safe, now_ns=self.kernel.now_ns)
        self._say(f"ends session {session}, {'safe' if safe else 'not safe'}: {outcome}")
        if not safe:
            self.quarantined[session] = (stream.decoder, stream.process_id)
        self.world.check()
        if stream.last_operation is not None and self.world.scenario.faults & {DUPLICATE, REORDER}:
            self.kernel.after(self.kernel.between(10, 5000), self._late, session, stream.last_operation)

    def _late(self, session: SessionId, operation: Any) -> None:
        """An operation of a session that is over comes out of nowhere: it is refused and changes nothing."""
        if self.is_dead:
            return
        before = self.manager.snapshot()
        try:
            self.perform(session, operation, None)
        except (FailedPrecondition, InvalidArgument):
            after = replace(self.manager.snapshot(), fenced_operations=before.fenced_operations)
            if after != before:
                raise Violation("a refused operation changed something") from None
            self._say(f"refuses a late message of session {session}")
        else:
            raise Violation(f"session {session} is over, and an operation of it was taken")
        self.world.check()

    def process_ended(self, process_id: int) -> None:
        """A decoder's process is known to be dead."""
        self.order.forget(process_id)
        self._returned(process_id)
        for stream in [item for item in self.streams.values() if item.process_id == process_id]:
            stream.is_broken = True
            stream.link.up.silence()
            self._end(stream)
        for session, (_, owner) in list(self.quarantined.items()):
            if owner == process_id:
                self._release_quarantine(session)

    def _release_quarantine(self, session: SessionId) -> None:
        del self.quarantined[session]
        self._say(f"ends the quarantine of session {session}: {self.manager.process_gone(session)} blocks")
        self.world.check()

    def _tick(self) -> None:
        if self.is_dead:
            return
        self.kernel.after(MILLISECOND, self._tick)
        before = self.manager.revision
        self._returned(0)
        for session in self.manager.tick(self.kernel.now_ns):
            self._say(f"has not heard of session {session} for too long")
            for stream in [item for item in self.streams.values() if item.session == session]:
                if not stream.is_broken:
                    self._silence(stream)
                self._end(stream)
        self.world.invariants.has_lapsed_nobody()
        self._tell_ready()
        if self.manager.revision != before:
            self.world.check()

    def operate(self) -> None:
        """An operator does something."""
        if self.manager.adopting:
            return
        kernel, manager = self.kernel, self.manager
        tenant = TenantId(f"tenant-{kernel.between(1, self.world.scenario.num_tenants)}")
        for _ in range(3 if self.world.scenario.quotas else 0):
            owner = self._pinner.randint(1, self.world.scenario.num_tenants)
            self._pin(TenantId(f"tenant-{owner}"), self._pinner)
        if self.world.scenario.scopes and kernel.chance(0.4):
            self._operate_scope()
            self.world.check()
            return
        which = kernel.between(0, 4)
        if which == 0:
            self._say(f"drops {manager.evict(num_blocks=kernel.between(1, 6))} cached blocks")
        elif which == 1:
            self._say(f"drops {manager.evict(tenant=tenant)} cached blocks of {tenant}")
        elif which == 2:
            self._say(f"purges {manager.purge(tenant)} blocks of {tenant}")
            if manager.list_prefixes(tenant=tenant).items:
                raise Violation("a purged tenant has prefixes")
        elif which == 3:
            self._pin(tenant, kernel.random)
        else:
            try:
                self._say(f"drops everything: {manager.evict(everything=True)}")
            except FailedPrecondition:
                self._say("refuses to drop everything while blocks are in use")
        self.world.check()

    def _operate_scope(self) -> None:
        """Drops what is cached of a scope, purges it, or withdraws some of what may be named in it."""
        kernel, manager = self.kernel, self.manager
        scope = kernel.random.choice(list(SCOPE_NAMES.values()))
        which = kernel.between(0, 2)
        if which == 0:
            self._say(f"drops {manager.evict(tenant=scope)} cached blocks of {scope}")
        elif which == 1:
            self._say(f"purges {manager.purge(scope)} blocks of {scope}")
            if manager.list_prefixes(tenant=scope).items:
                raise Violation("a purged scope has prefixes")
        else:
            left = self.world.workload.approved(self.world.scenario.block_tokens)
            self._say(f"prunes {manager.prune(scope, left)} blocks of {scope}")
            if manager.prune(scope, left):
                raise Violation("what was pruned once was pruned again")

    def _pin(self, tenant: TenantId, source: random.Random) -> None:
        """Pins as much of a prompt as the tenant's budget has, or ends a pin; either may be refused."""
        pins, scenario = self.manager.list_pins().items, self.world.scenario
        if pins and source.random() < 0.5:
            self.manager.unpin(pins[0].pin)
            return
        asked = [request for request in self.world.workload.requests if request.tenant == tenant]
        if not asked:
            return
        request = source.choice(asked)
        ttl_ns = (1 + int(source.random() * 20)) * 1_000_000
        budget = self.manager.quota_usage(tenant).quota.pin_blocks * scenario.block_tokens
        tokens = request.prompt[: budget or None]
        prefix = span_of(request.scope, request.root, min(request.prefix_tokens, len(tokens)))
        try:
            pin = self.manager.pin(
                tenant, root=request.root, tokens=pack_tokens(np.array(tokens, np.int32)),
                now_ns=self.kernel.now_ns, ttl_ns=ttl_ns, prefix=prefix,
            )  # fmt: skip
            self._say(f"pins {pin.num_blocks} blocks of {tenant}")
        except (NotFound, ResourceExhausted) as error:
            self._say(f"refuses to pin: {error.reason}")

    def converse(self, talk: Conversation) -> None:
        """A client does something to a kept branch of its own."""
        which, name = self.kernel.between(0, 2), b"k%d" % self.kernel.between(10_000, 99_999)
        now_ns = self.kernel.now_ns
        try:
            if which == 0:
                self.manager.fork_kept(talk.tenant, talk.name, [name], ttl_ns=20_000_000, now_ns=now_ns)
                self.world.workload.kept.append(replace(talk, name=name, tokens=list(talk.tokens)))
            elif which == 1:
                count = self.kernel.between(1, len(talk.tokens))
                self.manager.rollback_kept(talk.tenant, talk.name, count, now_ns=now_ns)
                del talk.tokens[count:]
                talk.prefix_tokens = min(talk.prefix_tokens, count - count % self.world.scenario.block_tokens)
            else:
                self.manager.drop_kept(talk.tenant, talk.name, now_ns=now_ns)
            self._say(f"{('forks', 'cuts', 'drops')[which]} {talk.name.decode()}")
        except NotFound:
            self._say(f"knows no {talk.name.decode()}")
        stranger = TenantId("tenant-9")
        try:
            self.manager.drop_kept(stranger, talk.name, now_ns=now_ns)
        except NotFound:
            pass
        else:
            raise Violation("a tenant ended the kept branch of another")
        self.world.check()


def _of_copy(copy: CopyPlan | None) -> tuple[int, ...]:
    """The blocks that a copy plan names."""
    return () if copy is None else (copy.source, copy.target)
