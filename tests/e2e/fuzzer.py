"""A fuzzer of timed traces against the real processes. The oracle is the solo run.

    python -m tests.e2e.fuzzer [--seconds 600] [--seed N] [--faults kill_decoder,evict]

Each round is one trace (`traces.py`) on one long-lived node of two decoders under `tessera up`. A call that ends well
equals its solo run, one that goes on with a kept conversation that of the whole; one that does not may only say what
its own leaving or a fault of the round (`upheavals.py`) explains; after each round the node serves a probe, becomes
quiet and its books add up. A failing round prints its seed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from common.rpc import open_sync_channel
from tessera.admin.v1 import admin_pb2
from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import Result, make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import poll
from tests.e2e.rig import START_SECONDS, Node, SupervisedNode
from tests.e2e.talks import Talks
from tests.e2e.traces import FAULTS, GROUP, Call, Fault, Trace, make_trace
from tests.e2e.upheavals import BEFORE, BEGUN, Upheavals
from tests.tiny_models import make_tiny_llama

AT_ONCE: Final = 12
TENANTS: Final = 3
DECODERS: Final = 2
CALL_SECONDS: Final = 60.0
SETTLE_SECONDS: Final = 60.0
PROBE: Final = list(range(40, 61))
AT_ANY_TIME: Final = {grpc.StatusCode.RESOURCE_EXHAUSTED}  # a full queue or pool; other errors: `upheavals.py`
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


@dataclass(frozen=True, slots=True)
class MayEnd:
    """What a call may end with, before its first message and after it."""

    before: set[grpc.StatusCode]
    begun: set[grpc.StatusCode]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A call that ended well: its result, and the request that says all that it was about."""

    whole: pb.GenerateRequest
    result: Result


class Fuzzer:
    """Runs traces on one node. Raises AssertionError, with the seed in it, at the first round that goes wrong."""

    def __init__(self, node: Node, solo: Solo, model: Path, faults: tuple[str, ...]) -> None:
        self._node = node
        self.solo = solo
        self._model = model
        self._faults = faults
        names = [f"fuzz-{number}" for number in range(1, TENANTS)]
        self._keys = [node.key, *(node.new_tenant(name) for name in names)]
        self._upheavals = Upheavals(node, ["default", *names], self._keys)
        self._talks = Talks(node, self._keys)
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
        self._upheavals.approve(trace.approved)
        begun = time.monotonic()
        kinds = {fault.kind for fault in trace.faults}
        may_end = MayEnd(
            AT_ANY_TIME.union(*(BEFORE[kind] for kind in kinds & set(BEFORE))),
            AT_ANY_TIME.union(*(BEGUN[kind] for kind in kinds & set(BEGUN))),
        )
        with ThreadPoolExecutor(AT_ONCE) as pool, ThreadPoolExecutor(2) as others:
            faults = [others.submit(self._befall, fault, begun) for fault in trace.faults]
            futures: list[Future[Outcome | None]] = []
            for place, call in enumerate(trace.calls):  # first in, first out: what a call waits for runs before it
                before = None if call.after is None else futures[call.after]
                futures.append(pool.submit(self._call, place, call, begun, may_end, before))
            outcomes = [future.result() for future in futures]
            for fault in faults:
                fault.result()
        for outcome in outcomes:
            if outcome is not None:
                self.solo.check(outcome.whole, outcome.result)

    def _call(
        self, place: int, call: Call, begun: float, may_end: MayEnd, before: Future[Outcome | None] | None
    ) -> Outcome | None:
        _wait_until(begun + call.at)
        request, key = call.request, self._keys[call.tenant]
        whole = request
        if before is not None:
            before.result()
            if call.after not in self._talks:
                return None
            try:
                request, whole = self._talks.go_on(call, key)
            except grpc.RpcError as error:
                self._expect(error, may_end.before | {grpc.StatusCode.NOT_FOUND}, "going on")
                return None
        with contextlib.ExitStack() as stack:
            channel = self._node.channel
            if call.leave_after is not None and call.leave == "close":
                channel = stack.enter_context(open_sync_channel(self._node.target))
            stream = self._node.stream(request, key=key, channel=channel, timeout=CALL_SECONDS)
            try:
                if call.leave_after is None:
                    result = stream.finish()
                    self.outcomes["equal to solo" if before is None else "went on"] += 1
                    self._talks.remember(place, call, whole, result)
                    return Outcome(whole, result)
                while stream.num_tokens < call.leave_after and stream.step():
                    pass
                if call.leave == "cancel":
                    stream.cancel()
                self.outcomes["left"] += 1
            except grpc.RpcError as error:
                if stream.accepted is not None:
                    self._expect(error, may_end.begun, f"after {stream.num_tokens} tokens of its answer")
                else:  # a conversation may have expired, or ended with its daemon or its tenant's secret
                    over = set() if before is None else {grpc.StatusCode.NOT_FOUND}
                    self._expect(error, may_end.before | over, "before its answer")
        return None

    def _expect(self, error: grpc.RpcError, codes: set[grpc.StatusCode], when: str) -> None:
        if error.code() not in codes:
            raise AssertionError(f"{when}: {error.code()}: {error.details()}") from None
        self.outcomes[error.code().name] += 1

    def _befall(self, fault: Fault, begun: float) -> None:
        _wait_until(begun + fault.at)
        self._upheavals.befall(fault)

    def _settle(self) -> None:
        node = self._node
        self._talks.drop_all()
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
