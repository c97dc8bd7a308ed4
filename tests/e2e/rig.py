"""A whole node for a test: real processes on a fresh state directory, its clients, and the checks of a quiet node.

`Node` starts `python -m cachemgr|decoder|gateway` (`SupervisedNode`: `tessera up`), waits for health, and at exit kills
everything and reads the logs for secrets and canaries. Only the public Generate and Admin RPCs are used to look inside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.credentials import read_secret
from common.paths import StatePaths
from common.rpc import bearer_metadata, open_sync_channel, unix_target
from tessera.admin.v1 import admin_pb2, admin_pb2_grpc
from tessera.inference.v1 import inference_pb2 as pb
from tessera.inference.v1 import inference_pb2_grpc
from tests.e2e.client import CALL_SECONDS, Background, Result, Stream
from tests.e2e.processes import Process, children_of, patience, poll
from tests.e2e.prompts import CANARIES

START_SECONDS = 180.0  # a first start compiles kernels
QUIET_SECONDS = 2.0  # cases.md
ADMIN_SECONDS = 20.0


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serves(target: str, within: float = 2.0) -> bool:
    """Whether `grpc.health.v1` says SERVING there."""
    with open_sync_channel(target) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=within)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class Admin:
    """The Admin RPC with the node's own credential."""

    def __init__(self, target: str, key: str) -> None:
        self.channel = open_sync_channel(target)
        self._stub: Any = admin_pb2_grpc.AdminServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self._metadata = bearer_metadata(key)

    def call(self, method: str, request: Message) -> Any:
        """One call by name."""
        options = {"metadata": self._metadata, "timeout": patience(ADMIN_SECONDS)}
        return getattr(self._stub, method)(request, wait_for_ready=True, **options)

    def snapshot(self) -> admin_pb2.GetSnapshotResponse:
        """All counters."""
        answer: admin_pb2.GetSnapshotResponse = self.call("GetSnapshot", admin_pb2.GetSnapshotRequest())
        return answer

    def _pages(self, method: str, request: Any, field: str) -> list[Any]:
        rows: list[Any] = []
        while True:
            answer = self.call(method, request)
            rows.extend(getattr(answer, field))
            if not answer.next_page_token:
                return rows
            request.page_token = answer.next_page_token

    def blocks(self) -> list[admin_pb2.Block]:
        """Every block."""
        return self._pages("ListBlocks", admin_pb2.ListBlocksRequest(page_size=1000), "blocks")

    def prefixes(self) -> list[admin_pb2.Prefix]:
        """Every node of the index."""
        return self._pages("ListPrefixes", admin_pb2.ListPrefixesRequest(page_size=1000), "prefixes")

    def leases(self) -> list[admin_pb2.Lease]:
        """Every lease."""
        return self._pages("ListLeases", admin_pb2.ListLeasesRequest(page_size=1000), "leases")

    def sessions(self) -> list[admin_pb2.Session]:
        """Every attached decoder."""
        return self._pages("ListSessions", admin_pb2.ListSessionsRequest(page_size=1000), "sessions")

    def branches(self) -> list[admin_pb2.Branch]:
        """Every kept conversation."""
        return self._pages("ListBranches", admin_pb2.ListBranchesRequest(page_size=1000), "branches")

    def violations(self) -> list[str]:
        """What CheckIntegrity finds broken."""
        answer = self.call("CheckIntegrity", admin_pb2.CheckIntegrityRequest())
        return [] if answer.ok else [*answer.violations, "not ok"]

    def evict_all(self) -> admin_pb2.EvictBlocksResponse:
        """Drop every cached block."""
        answer: admin_pb2.EvictBlocksResponse = self.call("EvictBlocks", admin_pb2.EvictBlocksRequest(all=True))
        return answer


class Node:
    """One node; `options` and `faults` go to every process. The defaults are R32: 32 blocks of 16 tokens, fp32."""

    def __init__(
        self,
        model: Path,
        *,
        pool_blocks: int = 32,
        decoders: int = 1,
        options: Sequence[str] = (),
        faults: Sequence[str] = (),
        dtype: str = "float32",
    ) -> None:
        self.state_dir = Path(tempfile.mkdtemp(prefix="tsr"))
        self.paths = StatePaths(self.state_dir)
        self.target = f"127.0.0.1:{free_port()}"
        self.num_decoders = decoders
        self.options = [
            "--state-dir", str(self.state_dir), "--model", str(model), "--dtype", dtype, "--block-tokens", "16",
            "--pool-blocks", str(pool_blocks), "--listen", self.target, "--decoders", str(decoders),
            "--log-level", "debug", *options,
        ]  # fmt: skip
        if faults:
            self.options += ["--test-faults", *(part for fault in faults for part in ("--fault", fault))]
        self.processes: dict[str, Process] = {}
        self.secrets: set[str] = set()
        self._stack = contextlib.ExitStack()

    # -- life

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            shutil.rmtree(self.state_dir, ignore_errors=True)  # the failure has shown the logs
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                print(self.tails())
            self._stack.close()
            self.stop()
            leaks = self.leaks()
        finally:
            self.kill()
            shutil.rmtree(self.state_dir, ignore_errors=True)
        if leaks and kind is None:
            raise AssertionError(f"logs hold what they must not: {leaks}")

    def command(self, process: str, *extra: str) -> list[str]:
        """Arguments of one process of the node."""
        return ["-m", process, *self.options, *extra]

    def add(self, name: str, arguments: Sequence[str]) -> Process:
        """Start one more process of the node."""
        process = Process(name, arguments, self.state_dir / f"{name}.log")
        self.processes[name] = process
        process.start()
        return process

    def start(self) -> None:
        """Start every process and wait until the gateway serves."""
        self.add("cachemgr", self.command("cachemgr"))
        self.await_health(unix_target(self.paths.admin_socket), "cachemgr")
        for index in range(self.num_decoders):
            self.add(f"decoder-{index}", self.command("decoder", "--decoder-index", str(index)))
        self.add("gateway", self.command("gateway"))
        for index in range(self.num_decoders):
            self.await_health(unix_target(self.paths.decoder_socket(index)), f"decoder-{index}")
        self.await_health(self.target, "gateway")
        self.open()

    def await_health(self, target: str, name: str) -> None:
        """Wait until `target` serves, or fail with the log of the process behind it."""
        process = self.processes[name]

        def serving_or_dead() -> bool:
            if process.status() is not None:
                raise AssertionError(f"{name} ended with {process.status()}\n{process.tail()}")
            return serves(target)

        try:
            poll(serving_or_dead, within=START_SECONDS, what=f"{name} serves")
        except AssertionError:
            print(self.tails())
            raise

    def open(self) -> None:
        """Read the credentials and open the clients."""
        self.key = read_secret(self.paths.default_key)
        self.admin_key = read_secret(self.paths.admin_key)
        self.internal_key = read_secret(self.paths.internal_key)
        self.secrets |= {self.key, self.admin_key, self.internal_key}
        self.channel = self._stack.enter_context(open_sync_channel(self.target))
        self.admin = Admin(unix_target(self.paths.admin_socket), self.admin_key)
        self._stack.callback(self.admin.channel.close)
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)  # type: ignore[no-untyped-call]

    def await_decoders(self) -> None:
        """Wait until every decoder is attached and the gateway is connected to it."""
        count = self.num_decoders
        poll(lambda: len(self.admin.sessions()) == count, within=START_SECONDS, what="every decoder is attached")
        connected = lambda: self.log_text().count("decoder_connected") >= count  # noqa: E731
        poll(connected, within=START_SECONDS, what="the gateway is connected to every decoder")

    def stop(self) -> None:
        """Ask every process to end, the gateway first, and wait."""
        for process in reversed(self.processes.values()):
            process.stop()

    def kill(self) -> None:
        """SIGKILL everything."""
        for process in self.processes.values():
            process.kill()

    # -- requests

    def stream(
        self, request: pb.GenerateRequest, *, key: str | None = None, channel: grpc.Channel | None = None,
        timeout: float = CALL_SECONDS,
    ) -> Stream:  # fmt: skip
        """Start a call."""
        return Stream(channel or self.channel, key or self.key, request, patience(timeout))

    def generate(self, request: pb.GenerateRequest, *, key: str | None = None) -> Result:
        """Run a call to its end."""
        return self.stream(request, key=key).finish()

    def again(self, request: pb.GenerateRequest) -> Result:
        """Send a request until it is served; only UNAVAILABLE may come before."""

        def attempt() -> Result | None:
            try:
                return self.generate(request)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return None

        result = poll(attempt, within=START_SECONDS, what="the node serves again")
        if result is None:
            raise AssertionError("unreachable: poll gives a true answer")
        return result

    def background(self, request: pb.GenerateRequest, *, key: str | None = None) -> Background:
        """Run a call in a thread."""
        return Background(self.stream(request, key=key))

    def together(self, requests: Sequence[pb.GenerateRequest], keys: Sequence[str] | None = None) -> list[Result]:
        """Run calls at once; results in the order of the requests."""
        with ThreadPoolExecutor(max_workers=len(requests)) as pool:
            futures = [
                pool.submit(self.generate, request, key=keys[i] if keys else None) for i, request in enumerate(requests)
            ]
            return [future.result() for future in futures]

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of token ids in one piece."""
        request = pb.DetokenizeRequest(token_ids=token_ids)
        return str(self.inference.Detokenize(request, metadata=bearer_metadata(self.key), timeout=ADMIN_SECONDS).text)

    def new_tenant(self, name: str) -> str:
        """Create a tenant and a key for it."""
        self.admin.call("CreateTenant", admin_pb2.CreateTenantRequest(tenant=name))
        key = str(self.admin.call("CreateKey", admin_pb2.CreateKeyRequest(tenant=name)).key)
        self.secrets.add(key)
        return key

    # -- checks

    def busy(self) -> list[str]:
        """Why the node is not quiet; empty when it is."""
        now = self.admin.snapshot()
        reasons = [
            f"{name} = {getattr(now, name)}"
            for name in ("active_blocks", "credit_blocks", "leases", "quarantined_blocks", "queued_requests")
            if getattr(now, name)
        ]
        if now.kept_branches:
            reasons.append(f"kept_branches = {now.kept_branches}")
        if now.free_blocks + now.cached_blocks != now.total_blocks:
            reasons.append(f"free {now.free_blocks} + cached {now.cached_blocks} != total {now.total_blocks}")
        return reasons

    def quiet(self) -> admin_pb2.GetSnapshotResponse:
        """quiet() of the cases: within 2 s nothing is held, every reference is the index's own, integrity holds."""
        try:
            poll(lambda: not self.busy(), within=QUIET_SECONDS, what="the node is quiet")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.busy()}; leases {self.admin.leases()}") from None
        for block in self.admin.blocks():
            if block.references != int(block.published):
                raise AssertionError(f"a quiet node holds block {block}")
        violations = self.admin.violations()
        if violations:
            raise AssertionError(f"integrity: {violations}")
        return self.admin.snapshot()

    def fresh(self) -> admin_pb2.GetSnapshotResponse:
        """Wait until it is quiet and empty the cache."""
        self.quiet()
        self.admin.evict_all()
        now = self.quiet()
        if now.cached_blocks or now.indexed_blocks:
            raise AssertionError("eviction of everything left blocks behind")
        return now

    def decoder_pid(self) -> int:
        """Process id of the one attached decoder, once there is one."""
        sessions = poll(self.admin.sessions, within=START_SECONDS, what="a decoder is attached")
        return int(sessions[0].process_id)

    def log_files(self) -> list[Path]:
        """Every log of the node."""
        return [*self.state_dir.glob("*.log"), *self.paths.logs_dir.glob("**/*")]

    def log_text(self) -> str:
        """Every log of the node in one text."""
        return "".join(path.read_text("utf-8", "replace") for path in self.log_files() if path.is_file())

    def leaks(self) -> list[str]:
        """Secrets and prompt words that occur in the logs."""
        text = self.log_text()
        return sorted(word for word in self.secrets | CANARIES if word in text)

    def tails(self) -> str:
        """The ends of all logs, for failures."""
        parts = [process.tail() for process in self.processes.values()]
        for path in sorted(self.paths.logs_dir.glob("*")):
            parts.append(f"--- {path.name}\n" + "\n".join(path.read_text("utf-8", "replace").splitlines()[-30:]))
        return "\n".join(parts)


class SupervisedNode(Node):
    """A node under `tessera up`, which restarts what dies."""

    def start(self) -> None:
        """Start the supervisor and wait until the gateway serves."""
        self.add("up", ["-m", "cli", "up", *self.options])
        self.await_health(self.target, "up")
        self.open()

    def log_text(self) -> str:
        """Every log; without the one line in which the supervisor shows a new key to the person who started it."""
        shown = f"{self.key}  (of tenant default; shown this once)"
        return super().log_text().replace(shown, "", 1)

    def child(self, word: str) -> int:
        """Process id of the child whose command line names `word`, once there is one."""

        def find() -> int:
            found = children_of(self.processes["up"].pid)
            return next((pid for pid, line in found.items() if word in line.split()), 0)

        return poll(find, within=START_SECONDS, what=f"the supervisor runs {word}")

    def kill(self) -> None:
        """SIGKILL the supervisor and its children."""
        supervisor = self.processes.get("up")
        orphans = children_of(supervisor.pid) if supervisor and supervisor.status() is None else {}
        super().kill()
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
