"""A simulated decoder process: its life, its stream to the daemon, its clock and its inbox.

It may crash, be stopped and continue in mid-step, lose its stream, attach anew. Invariants: the inbox is read between
steps alone; a token is given out only if the daemon has answered something that was sent less than the lease time ago,
for until then the daemon cannot have ended the session. Called by the kernel; the work is in `engine.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cachemgr.ids import SessionId
from common.errors import TesseraError
from tests.simulation import messages
from tests.simulation.engine import Engine
from tests.simulation.kernel import MILLISECOND
from tests.simulation.network import End, Link
from tests.simulation.workload import Request

if TYPE_CHECKING:
    from tests.simulation.world import World

LEASE = 20 * MILLISECOND
BEAT = LEASE // 3
GRACE = LEASE // 2
RETRY = 3 * MILLISECOND


class SimDecoder:
    """One decoder, over all lives of its process. `session` is what it believes to be attached as."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.kernel = world.kernel
        self.name = f"decoder-{number}"
        self.alive = False
        self.stopped = False
        self.arrivals = 0
        self.apart_until = 0  # it is in another partition than the daemon
        self.life = 0
        self.start()

    def say(self, what: str) -> None:
        """A line of the trace."""
        self.kernel.say(f"{self.name} {what}")

    # ---- life

    def start(self) -> None:
        """A new process."""
        self.life += 1
        self.alive, self.stopped = True, False
        self.process_id = self.world.new_process()
        self.engine = Engine(self)
        self.session: SessionId | None = None
        self.epoch = 0
        self.is_away = False  # the session's stream is broken
        self.link: Link | None = None
        self.inbox: deque[tuple[Link | None, Any]] = deque()
        self.pending: deque[tuple[int, int, Any, Any]] = deque()
        self.windows_of: dict[int, int] = {}  # the window block of each block, as this process was told
        self.sequence = 0
        self.good_until = 0
        self.busy = self.woken = False
        self.held: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.say(f"starts as process {self.process_id}")
        self.connect()
        self.later(BEAT, self._beat)
        self.later(RETRY, self._retry)

    def crash(self) -> list[Request]:
        """The process dies at once; returns the requests that were with it."""
        self.say("dies")
        self.alive = False
        self.life += 1
        if self.link is not None:
            self.link.down.silence()
            self.link.up.close(self.kernel.between(0, 3000), lose=True)
        self.kernel.after(self.kernel.between(0, 5000), self.world.process_ended, self.process_id)
        lost = [request for request in self.world.open_requests if request.decoder is self]
        for request in lost:
            request.decoder = None
        return lost

    def stop(self) -> None:
        """SIGSTOP."""
        self.say("is stopped")
        self.stopped = True

    def go_on(self) -> None:
        """SIGCONT: whatever it was about to do, it does now."""
        self.say("goes on")
        self.stopped = False
        held, self.held = self.held, []
        for action, arguments in held:
            if self.stopped:
                self.held.append((action, arguments))
            else:
                action(*arguments)

    def later(self, delay: int, action: Callable[..., object], *arguments: Any) -> None:
        """Runs `action` in this life of the process, when it is not stopped."""
        self.kernel.after(delay, self._enter, self.life, action, arguments)

    def _enter(self, life: int, action: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if life != self.life:
            return
        if self.stopped:
            self.held.append((action, arguments))
        else:
            action(*arguments)

    # ---- the stream

    def connect(self) -> None:
        """Opens a stream and attaches, unless that was done meanwhile."""
        if self.link is not None:
            return
        self.link = self.world.open_link(self)
        self.pending.clear()
        self.sequence = 0
        resume = None
        if self.session is not None:
            resume = messages.Resume(self.session, self.epoch, *self.engine.holdings())
            self.say(f"presents {len(resume.held)} sequences")
        self.ask(messages.Attach(self.name, self.process_id, self.kernel.now_ns, resume), None)

    def ask(self, operation: Any, about: Any) -> None:
        """Sends an operation; `about` comes back with its answer."""
        if self.link is None:
            return
        self.sequence += 1
        self.pending.append((self.sequence, self.kernel.now, operation, about))
        self.link.up.send(messages.Asked(self.sequence, operation))

    def receive(self, link: Link | None, message: Any) -> None:
        """Something came from a stream, or from a gateway (no link)."""
        self.inbox.append((link, message))
        self.wake()

    def wake(self) -> None:
        """Makes sure that a step begins soon."""
        if self.alive and not self.busy and not self.woken:
            self.woken = True
            self.later(20, self._begin)

    @property
    def is_good(self) -> bool:
        """Whether the daemon cannot have ended the session yet, by this process's own clock."""
        return self.session is not None and self.kernel.now < self.good_until

    def lose(self, why: str) -> None:
        """The session is over for this process: nothing is written under it any more."""
        self.say(f"loses session {self.session}: {why}")
        if self.link is not None:
            self.link.down.silence()
            self.link.up.close(self.kernel.between(0, 3000), lose=False)
        self.link = self.session = None
        self.is_away = False
        self.engine.requeue_all()
        self.later(self.kernel.between(100, 2000), self.connect)

    def _leave(self) -> None:
        """The stream broke: go on with what is held, and come back."""
        if not self.is_good or self.kernel.chance(0.2):
            self.lose("its stream ended")
            return
        self.say(f"has no stream for session {self.session}")
        self.link, self.is_away = None, True
        self.engine.leave_stream()
        self.later(self.kernel.between(100, 2000), self.connect)

    def _beat(self) -> None:
        self.later(BEAT, self._beat)
        if self.session is not None and not self.is_away:
            self.ask(messages.Heartbeat(), None)

    def _retry(self) -> None:
        self.later(RETRY, self._retry)
        engine = self.engine
        if engine.is_full or engine.refused:
            engine.is_full = engine.refused = False
        if engine.sequences or engine.credit:
            self.wake()

    # ---- steps

    def _begin(self) -> None:
        self.woken = False
        while self.inbox:
            self._handle(*self.inbox.popleft())
        if self.session is None:
            return
        if self.is_away and not self.is_good:
            self.lose("its own clock says that the session may be over")
            return
        self.engine.run_copies()
        work = self.engine.plan()
        if work:
            self.busy = True
            self.later(self.kernel.between(200, 1500), self._finish, work)

    def _finish(self, work: Any) -> None:
        self.busy = False
        self.engine.finish(work)
        self.wake()

    def _handle(self, link: Link | None, message: Any) -> None:
        if link is None:
            kind, request = message
            if kind == "submit":
                self.engine.submit(request)
            elif not request.ended:
                self.engine.end_request(request, "cancelled")
        elif link is not self.link:
            return
        elif isinstance(message, End):
            self._leave()
        elif isinstance(message, messages.PrefixReady):
            self.engine.prefix_ready(message.wait_id)
        elif isinstance(message, messages.Reclaim):
            self.engine.reclaim += message.num_blocks
        else:
            self._answered(message)

    def _answered(self, answer: messages.Answer) -> None:
        number, sent, operation, about = self.pending.popleft()
        if number != answer.sequence:
            raise AssertionError("the simulated daemon left an operation unanswered")
        self.good_until = max(self.good_until, sent + LEASE)
        result = answer.result
        self.windows_of.update(answer.window_blocks)
        self.world.memory.scrub(answer.scrub)
        self.world.windows.scrub(answer.window_scrub)
        match operation:
            case messages.Attach():
                if isinstance(result, TesseraError):
                    self.lose(result.message)
                    return
                if result.resumed is not None:
                    self.is_away = False
                    self.engine.resumed(result.resumed, result.epoch)
                    self.session, self.epoch = result.session, result.epoch
                    self.say(f"goes on with session {self.session}")
                    return
                self.session, self.epoch = result.session, result.epoch
                self.say(f"is attached as session {self.session}")
            case messages.Acquire():
                self.engine.acquired(result)
            case messages.Report():
                self.engine.reported(about, result)
            case messages.Fork():
                self.engine.forked(operation.lease, about, result)
            case messages.Rollback() | messages.MakeWritable():
                self.engine.rolled_back(*about, result)
