"""A fuzzer of timed traces against the real processes. The oracle is the solo run.

    python -m tests.e2e.fuzzer [--seconds 600] [--seed N] [--faults kill_decoder,evict]

Each round is one trace (`traces.py`) on one long-lived node of two decoders under `tessera up`. A call that ends well
equals its solo run; one that does not may only say what its own leaving or a fault of the round explains; after each
round the node serves a probe, becomes quiet and its books add up. A failing round prints its seed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import grpc

from common.rpc import open_sync_channel
from tessera.admin.v1 import admin_pb2
from tests.e2e.client import Result, make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import children_of, poll
from tests.e2e.rig import START_SECONDS, Node, SupervisedNode
from tests.e2e.traces import FAULTS, GROUP, Call, Fault, Trace, make_trace
from tests.tiny_models import make_tiny_llama

AT_ONCE: Final = 12
TENANTS: Final = 3
DECODERS: Final = 2
CALL_SECONDS: Final = 60.0
SETTLE_SECONDS: Final = 60.0
PROBE: Final = list(range(40, 61))
# What a call may end with where it did not leave by itself: a full queue or pool at any time, a lost process in a round
# with a fault. The death of the cache manager ends no stream that has begun.
AT_ANY_TIME: Final = {grpc.StatusCode.RESOURCE_EXHAUSTED}
WITH_FAULTS: Final = AT_ANY_TIME | {grpc.StatusCode.UNAVAILABLE}
OPTIONS: Final = (
    "--threads",
    "1",
    "--max-batch",
    "6",
    "--chunk-tokens",
    "64",
    "--lease-seconds",
    "2",
    "--grace-seconds",
    "1",
)


class Fuzzer:
    """Runs traces on one node. Raises AssertionError, with the seed in it, at the first round that goes wrong."""

    def __init__(self, node: Node, solo: Solo, model: Path, faults: tuple[str, ...]) -> None:
        self._node = node
        self.solo = solo
        self._model = model
        self._faults = faults
        names = [f"fuzz-{number}" for number in range(1, TENANTS)]
        self._keys = [node.key, *(node.new_tenant(name) for name in names)]
        node.admin.call("CreateGroup", admin_pb2.CreateGroupRequest(group=GROUP, tenants=["default", *names]))
        self.outcomes: Counter[str] = Counter()

    def round(self, seed: int) -> None:
        """One trace, its checks, and a quiet node afterwards."""
        trace = make_trace(seed, self._model, num_tenants=TENANTS, num_decoders=DECODERS, faults=self._faults)
        try:
            self._play(trace)
            self._settle()
        except AssertionError as error:
            happened = ", ".join(f"{fault.kind}@{fault.at:.2f}" for fault in trace.faults) or "no fault"
            raise AssertionError(f"seed {seed} ({happened}): {error}") from error

    def _play(self, trace: Trace) -> None:
        begun = time.monotonic()
        kinds = {fault.kind for fault in trace.faults}
        allowed = WITH_FAULTS if kinds - {"evict"} else AT_ANY_TIME
        begun_allowed = WITH_FAULTS if kinds - {"evict", "kill_cachemgr"} else AT_ANY_TIME
        faults = [threading.Thread(target=self._befall, args=(fault, begun)) for fault in trace.faults]
        for thread in faults:
            thread.start()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            futures = [pool.submit(self._call, call, begun, allowed, begun_allowed) for call in trace.calls]
            results = [future.result() for future in futures]
        for thread in faults:
            thread.join()
        for call, result in zip(trace.calls, results, strict=True):
            if result is not None:
                self.solo.check(call.request, result)

    def _call(
        self, call: Call, begun: float, allowed: set[grpc.StatusCode], begun_allowed: set[grpc.StatusCode]
    ) -> Result | None:
        _wait_until(begun + call.at)
        with contextlib.ExitStack() as stack:
            channel = self._node.channel
            if call.leave_after is not None and call.leave == "close":
                channel = stack.enter_context(open_sync_channel(self._node.target))
            stream = self._node.stream(call.request, key=self._keys[call.tenant], channel=channel, timeout=CALL_SECONDS)
            try:
                if call.leave_after is None:
                    result = stream.finish()
                    self.outcomes["equal to solo"] += 1
                    return result
                while stream.num_tokens < call.leave_after and stream.step():
                    pass
                if call.leave == "cancel":
                    stream.cancel()
                self.outcomes["left"] += 1
            except grpc.RpcError as error:
                if error.code() not in (allowed if stream.accepted is None else begun_allowed):
                    when = "before" if stream.accepted is None else f"after {stream.num_tokens} tokens of"
                    raise AssertionError(f"{when} its answer: {error.code()}: {error.details()}") from None
                self.outcomes[error.code().name] += 1
        return None

    def _befall(self, fault: Fault, begun: float) -> None:
        _wait_until(begun + fault.at)
        node = self._node
        if fault.kind == "evict":
            with contextlib.suppress(grpc.RpcError):  # in use, or the daemon is away
                node.admin.evict_all()
            return
        name = {"kill_gateway": "gateway", "kill_cachemgr": "cachemgr"}.get(fault.kind, "decoder")
        victim = self._find(name, fault.victim)
        if victim is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if fault.kind != "stop_decoder":
                os.kill(victim, signal.SIGKILL)
                return
            os.kill(victim, signal.SIGSTOP)
            _wait_until(time.monotonic() + fault.seconds)
            os.kill(victim, signal.SIGCONT)

    def _find(self, name: str, index: int) -> int | None:
        found = sorted(pid for pid, line in children_of(self._node.processes["up"].pid).items() if name in line.split())
        return found[index % len(found)] if found else None

    def _settle(self) -> None:
        node = self._node
        probe = make_request(PROBE, new=4)
        self.solo.check(probe, node.again(probe))
        poll(lambda: len(node.admin.sessions()) == DECODERS, within=START_SECONDS, what="every decoder is attached")
        poll(self._is_idle, within=SETTLE_SECONDS, what="nothing is held any more")
        node.quiet()

    def _is_idle(self) -> bool:
        return not self._node.busy() and not self._node.admin.snapshot().kept_branches


def _wait_until(moment: float) -> None:
    delay = moment - time.monotonic()
    if delay > 0:
        threading.Event().wait(delay)


@contextlib.contextmanager
def fuzzing(model: Path, faults: tuple[str, ...]) -> Iterator[Fuzzer]:
    """A fuzzer on a node and a solo node of its own."""
    with (
        Node(model, pool_blocks=96, options=["--no-prefix-cache", "--threads", "1"]) as alone,
        SupervisedNode(model, pool_blocks=48, decoders=DECODERS, options=OPTIONS) as node,
    ):
        poll(lambda: len(node.admin.sessions()) == DECODERS, within=START_SECONDS, what="every decoder is attached")
        yield Fuzzer(node, Solo(alone), model, faults)


def main() -> int:
    """Run rounds until the time is up; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.fuzzer", description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--seconds", type=float, default=600.0, metavar="N", help="how long to go on")
    parser.add_argument("--seed", type=int, metavar="N", help="run this one round alone")
    parser.add_argument("--faults", default=",".join(FAULTS), metavar="NAMES", help="kinds of faults, or empty")
    options = parser.parse_args()
    faults = tuple(name for name in options.faults.split(",") if name)
    if unknown := set(faults) - set(FAULTS):
        parser.error(f"--faults: {', '.join(sorted(unknown))}; allowed are {', '.join(FAULTS)}")
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_llama(Path(folder) / "tiny")
        with fuzzing(model, faults) as fuzzer:
            end, rounds = time.monotonic() + options.seconds, 0
            while (options.seed is None and time.monotonic() < end) or rounds == 0:
                seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**31)
                fuzzer.round(seed)
                rounds += 1
                print(f"round {rounds}, seed {seed}: {dict(fuzzer.outcomes)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
