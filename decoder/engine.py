"""An engine: a step loop in a thread of its own, and the ways in for everybody else.

Invariant: every method but `step` and `run` may be called from any thread and only leaves word; one thread steps.
Called by the service, the process and benches; it decides nothing (`step_loop.py` does).
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Mapping

from common.errors import TesseraError, Unavailable
from common.scheduling import prefer_throughput
from decoder.cache_api import Arena, Attached, CacheClient, Event
from decoder.grouped_arena import usable_blocks
from decoder.inbox import Cancel, Consumed, Disconnect, Drain, Inbox, Message, Stop, Submit
from decoder.outputs import Sink
from decoder.runner import StepModel
from decoder.sequence import Request, RequestNumber, SpeculationMode
from decoder.speculation import Drafter
from decoder.step_loop import EngineOptions, StepLoop


class Engine:
    """Runs requests on a model and an arena. With `arena` given the session is attached at once, as session 1."""

    def __init__(
        self,
        model: StepModel,
        arena: Arena | None,
        client: CacheClient,
        options: EngineOptions | None = None,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        pause: Callable[[float], None] = time.sleep,
        drafters: Mapping[SpeculationMode, Drafter] | None = None,
    ) -> None:
        self.options = options if options is not None else EngineOptions()
        self._clock_ns = clock_ns
        self._inbox: Inbox[Message | Event] = Inbox()
        self._loop = StepLoop(
            model, client, self.options, self._inbox, clock_ns=clock_ns, pause=pause, drafters=drafters
        )
        self._thread: threading.Thread | None = None
        if arena is not None:
            self._loop.intake.handle(Attached(1, usable_blocks(arena), arena))
        client.start(self._inbox.put)

    # ---- from any thread

    def submit(self, request: Request, sink: Sink) -> None:
        """Take a request in; its results go to `sink`. The request's numbers are checked already."""
        self._inbox.put(Submit(request, sink, self._clock_ns()))

    def cancel(self, sink: Sink, number: RequestNumber, sample: int | None = None, *, finish: bool = False) -> None:
        """End a request, or one of its samples, with `finish` one that ended well. Harmless where it has ended."""
        self._inbox.put(Cancel(sink, number, sample, finish))

    def consumed(self, sink: Sink, number: RequestNumber, tokens: int) -> None:
        """The client has read `tokens` tokens of a request, over all samples."""
        self._inbox.put(Consumed(sink, number, tokens))

    def disconnect(self, sink: Sink) -> None:
        """A sink is gone: its requests end, and it is told nothing more."""
        self._inbox.put(Disconnect(sink))

    def drain(self) -> None:
        """Refuse new requests from now on; those that are in go on."""
        self._loop.intake.is_draining = True
        self._inbox.put(Drain())

    def stop(self, error: TesseraError | None = None) -> None:
        """End every request (UNAVAILABLE by default), release every lease, and end the loop."""
        self._inbox.put(Stop(error or Unavailable("the decoder is shutting down", reason="DRAINING")))

    @property
    def is_serving(self) -> bool:
        """Whether a request that comes now would be served."""
        alive = self._thread is None or self._thread.is_alive()
        return alive and self._loop.is_serving

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, as far as the loop has seen them."""
        return len(self._loop.requests)

    # ---- the loop

    def start(self) -> None:
        """Run the loop in a thread of its own until `stop`."""
        context = contextvars.copy_context()  # what is bound to the process's log lines
        self._thread = threading.Thread(target=context.run, args=(self.run,), name="engine", daemon=True)
        self._thread.start()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the loop to end after `stop`; False if it has not."""
        if self._thread is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def run(self) -> None:
        """Step until stopped; waits passively while there is nothing to do."""
        prefer_throughput()
        while not self._loop.intake.is_stopped:
            if not self.step():
                self._inbox.wait(self._loop.idle_seconds)
        self._loop.hand_back()

    def step(self) -> bool:
        """One step. False where nothing happened and only word from outside can change that."""
        return self._loop.step()


__all__ = ["Engine", "EngineOptions"]
