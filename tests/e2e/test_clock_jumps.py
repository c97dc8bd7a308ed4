"""The clock of the machine jumps while streams run: only the validity of keys, which is a date, depends on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from tessera.admin.v1 import admin_pb2
from tests.e2e.client import make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import ROOT, Process, poll
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node

B = 16
DAY = 86_400
KEPT_SECONDS = 3.0  # a gateway believes an answer about a key for one
JUMPS = [3600, -3600, 3650 * DAY, -3650 * DAY]


class JumpingNode(Node):
    """A node whose wall clock the test sets."""

    def jump(self, seconds: int) -> None:
        """The wall clock is off by so much from now on."""
        following = self.state_dir / "offset.new"
        following.write_text(str(seconds))
        following.rename(self.state_dir / "offset")

    def start(self) -> None:
        """Start with a right clock."""
        self.jump(0)
        super().start()

    def add(self, name: str, arguments: Sequence[str]) -> Process:
        """Start one more process of the node, its clock under control."""
        path = f"{ROOT / 'tests/e2e/wall_clock'}:{ROOT}"
        environment = {"WALL_CLOCK_OFFSET": str(self.state_dir / "offset"), "PYTHONPATH": path}
        process = Process(name, arguments, self.state_dir / f"{name}.log", environment)
        self.processes[name] = process
        process.start()
        return process


@pytest.fixture(scope="module")
def jumping(tiny_model: Path) -> Iterator[JumpingNode]:
    """A slow node with short leases."""
    options = ["--threads", "1", "--lease-seconds", "3", "--grace-seconds", "2"]
    with JumpingNode(tiny_model, faults=["step_delay=0.02"], options=options) as node:
        yield node


def key_works(node: Node, key: str) -> bool:
    """Whether a request with this key is served; otherwise it must be UNAUTHENTICATED."""
    try:
        node.generate(make_request([5, 6, 7], new=1, no_store=True), key=key)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED, error
        return False
    return True


def test_clock_jumps_end_nothing_that_runs(jumping: JumpingNode, solo: Solo, prompts: Prompts) -> None:
    """An hour and ten years to and fro in mid-stream: streams, sessions, leases, what is cached with a time to live and
    keys without an end live on; a key that ends in two hours is refused exactly while the clock is past that."""
    create = admin_pb2.CreateKeyRequest(tenant="default", ttl_seconds=7200)
    short = str(jumping.admin.call("CreateKey", create).key)
    jumping.secrets.add(short)
    warm = make_request(prompts.tokens(4 * B), new=1)
    warm.cache.ttl_seconds = 7200
    jumping.generate(warm)
    jumping.quiet()
    sessions = [session.session for session in jumping.admin.sessions()]
    pids = {name: process.pid for name, process in jumping.processes.items()}
    for seconds in [*JUMPS, 0]:
        request = make_request(prompts.tokens(B), new=30)
        stream = jumping.stream(request)
        stream.read(4)
        jumping.jump(seconds)
        another = make_request([*warm.token_ids.ids, *prompts.tokens(3)], new=4)
        result = jumping.generate(another)
        solo.check(another, result)
        assert result.cached_tokens == 4 * B, f"a time to live ended at a jump of {seconds} s"
        solo.check(request, stream.finish())
        poll(
            lambda: key_works(jumping, short) == (seconds < 7200), within=KEPT_SECONDS,  # noqa: B023
            what=f"a key of two hours is good or not, at {seconds} s",
        )  # fmt: skip
        assert [session.session for session in jumping.admin.sessions()] == sessions
        assert jumping.admin.violations() == []
    assert {name: process.pid for name, process in jumping.processes.items() if process.status() is None} == pids
    jumping.quiet()
