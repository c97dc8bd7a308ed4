"""A real cache manager process is killed and started again; this process plays its decoders, over the real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from cachemgr.ids import TenantId
from cachemgr.tenant_store import TenantStore
from cachemgr.tenants import Tenants
from common.arena_wire import fetch_arena, return_arena
from common.errors import PermissionDenied
from common.layout import NONCE_BYTES
from common.paths import StatePaths
from common.rpc import open_channel, unix_target
from common.tokens import pack_tokens
from tessera.admin.v1 import admin_pb2, admin_pb2_grpc
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc
from tessera.common.v1 import common_pb2
from tests.cachemgr.daemon_rig import KEY, SessionClient, acquire_request, attach_request, ids, report_request
from tests.cachemgr.rig import ROOT, eventually_async

BLOCKS = 16
PROMPT = list(range(1, 11))


class Killable:
    """A cache manager process on a state directory of its own, and clients of its newest life."""

    def __init__(self, state_dir: Path, *options: str, module: str = "cachemgr") -> None:
        self.paths = StatePaths(state_dir)
        self._command = [
            sys.executable, "-m", module, "--state-dir", str(state_dir), "--pool-blocks", str(BLOCKS), *options,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self._stack = contextlib.AsyncExitStack()
        self.admin: Any = None
        self.log = state_dir / "cachemgr.log"

    async def start(self) -> None:
        """Start it, and connect."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=ROOT, stderr=log, stdout=log)
        await eventually_async(self._connected)

    @property
    def process_id(self) -> int:
        """Of its newest life."""
        return 0 if self._process is None else self._process.pid

    async def _connected(self) -> bool:
        await self._stack.aclose()
        if not self.paths.admin_key.exists() or not self.paths.admin_socket.exists():
            return False
        self.internal = await self._channel(self.paths.cachemgr_socket, self.paths.internal_key)
        self.admin = admin_pb2_grpc.AdminServiceStub(  # type: ignore[no-untyped-call]
            await self._channel(self.paths.admin_socket, self.paths.admin_key)
        )
        try:
            await self.admin.GetSnapshot(admin_pb2.GetSnapshotRequest(), timeout=1)
        except grpc.aio.AioRpcError:
            return False
        return True

    async def _channel(self, socket: Path, key: Path) -> grpc.aio.Channel:
        return await self._stack.enter_async_context(open_channel(unix_target(socket), key.read_text().strip()))

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def close(self) -> None:
        """The end of it."""
        await self._stack.aclose()
        self.kill()

    async def snapshot(self) -> admin_pb2.GetSnapshotResponse:
        """All counters."""
        answer: admin_pb2.GetSnapshotResponse = await self.admin.GetSnapshot(admin_pb2.GetSnapshotRequest())
        return answer

    async def violations(self) -> list[str]:
        """What CheckIntegrity says."""
        answer = await self.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest())
        return list(answer.violations)

    async def grant(self) -> bytes:
        """A grant of the default tenant."""
        stub: Any = cache_pb2_grpc.CredentialServiceStub(self.internal)  # type: ignore[no-untyped-call]
        key = self.paths.default_key.read_text().strip()
        answer: cache_pb2.AuthenticateResponse = await stub.Authenticate(cache_pb2.AuthenticateRequest(key=key))
        return answer.grant


class Decoder:
    """A decoder played by hand: it maps the arena, holds one sequence, and comes back to a new daemon."""

    def __init__(self, node: Killable, name: str = "d0", **layout: Any) -> None:
        self.node = node
        self.layout = layout  # what differs from the rig's
        self.name = name
        self.fd = -1
        self.session = 0
        self.epoch = 0
        self.token = b""
        self.held: list[cache_pb2.HeldSequence] = []

    async def attach(self) -> SessionClient:
        """A fresh attach, with the memory."""
        client = SessionClient(self.node.internal)
        response = await client.ask(attach=attach_request(name=self.name, **self.layout))
        assert response.WhichOneof("result") == "attach", response.failure
        answer = response.attach
        self.session, self.epoch, self.token = answer.session_id, response.epoch, answer.resume_token
        self.fd, _ = await asyncio.to_thread(fetch_arena, self.node.paths.arena_socket, answer.arena_token)
        return client

    async def hold(
        self, client: SessionClient, tokens: list[int], sealed: int, prefix: common_pb2.ScopePrefix | None = None
    ) -> cache_pb2.HeldSequence:
        """Lease blocks and report some of them as computed; what a resume will say of it."""
        grant = await self.node.grant()
        answer = (await client.ask(acquire=acquire_request(grant, tokens, prefix=prefix))).acquire
        await client.ask(report=report_request({"lease_id": answer.lease_id, "sealed_tokens": sealed}))
        held = cache_pb2.HeldSequence(
            lease_id=answer.lease_id, grant=grant, key=KEY, tokens=pack_tokens(tokens), blocks=answer.blocks,
            sealed_tokens=sealed, request_id="r1", priority=50, prefix=prefix,
        )  # fmt: skip
        self.held.append(held)
        return held

    def nonce(self) -> bytes:
        """As read through a mapping."""
        with mmap.mmap(self.fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ) as memory:
            return memory[:NONCE_BYTES]

    def resume_request(self, **changes: Any) -> cache_pb2.AttachRequest:
        """An attach with everything held, some fields of the resume changed."""
        fields = {
            "session_id": self.session,
            "epoch": self.epoch,
            "resume_token": self.token,
            "arena_nonce": self.nonce(),
            "sequences": self.held,
            **changes,
        }
        request = attach_request(name=self.name, **self.layout)
        request.resume.CopyFrom(cache_pb2.SessionResume(**fields))
        return request

    async def come_back(self, client: SessionClient) -> cache_pb2.AttachResponse:
        """Resume, handing the memory over if it is wanted."""
        response = await client.ask(attach=self.resume_request())
        if response.attach.arena_wanted:
            socket = self.node.paths.arena_socket
            await asyncio.to_thread(return_arena, socket, response.attach.arena_token, self.fd)
            response = await client.ask(attach=self.resume_request())
        assert response.WhichOneof("result") == "attach", response.failure
        answer = response.attach
        self.session, self.epoch, self.token = answer.session_id, response.epoch, answer.resume_token
        for held, lease in zip(self.held, answer.leases, strict=True):
            held.lease_id = lease
        return answer

    def close(self) -> None:
        """Let the memory go."""
        if self.fd >= 0:
            os.close(self.fd)


@contextlib.asynccontextmanager
async def killable(*options: str) -> AsyncIterator[Killable]:
    """A running cache manager."""
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        node = Killable(Path(folder), *options)
        try:
            await node.start()
            yield node
        finally:
            await node.close()


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's body."""
    asyncio.run(body())


def failed(response: cache_pb2.SessionResponse, reason: str) -> None:
    """The operation was refused for that reason."""
    assert response.WhichOneof("result") == "failure", response
    assert response.failure.reason == reason, response.failure


def test_a_decoder_comes_back_with_memory_leases_and_cache() -> None:
    """The new daemon asks for the memory, keeps the lease, publishes what was sealed meanwhile, and has the same blocks
    cached; whatever the decoder wrote is in the memory that it hands out."""

    async def body() -> None:
        async with killable() as node:
            decoder = Decoder(node)
            client = await decoder.attach()
            held = await decoder.hold(client, PROMPT, 4)
            os.pwrite(decoder.fd, b"keys", ids(held.blocks)[0] * 512)
            before = await node.snapshot()
            assert (before.indexed_blocks, before.leases, before.epoch) == (1, 1, 1)
            node.kill()
            held.sealed_tokens = 9
            await node.start()
            client = SessionClient(node.internal)
            answer = await decoder.come_back(client)
            assert answer.resumed and len(answer.leases) == 1 and answer.leases[0]
            now = await node.snapshot()
            assert (now.indexed_blocks, now.leases, now.epoch, now.adopted_blocks) == (2, 1, 2, 1)
            assert now.quarantined_blocks == 0
            await client.ask(report=report_request({"lease_id": answer.leases[0], "release": True}))
            again = (await client.ask(acquire=acquire_request(await node.grant(), [*PROMPT[:9], 77]))).acquire
            assert again.cached_tokens == 9
            assert ids(again.blocks)[0] == ids(held.blocks)[0]
            other = Decoder(node, "d1")
            await other.attach()
            assert os.pread(other.fd, 4, ids(held.blocks)[0] * 512) == b"keys"
            assert await node.violations() == []
            other.close()
            decoder.close()

    run(body)


def test_a_fresh_decoder_waits_until_the_survivors_are_heard() -> None:
    """While one is waited for, another is told UNAVAILABLE; then it attaches to the adopted arena."""

    async def body() -> None:
        async with killable() as node:
            survivor, late = Decoder(node), Decoder(node, "d1")
            client = await survivor.attach()
            await survivor.hold(client, PROMPT, 8)
            node.kill()
            await node.start()
            failed(await SessionClient(node.internal).ask(attach=attach_request(name="d1")), "ADOPTING")
            await survivor.come_back(SessionClient(node.internal))
            await late.attach()
            assert (await node.snapshot()).sessions == 2
            assert late.nonce() == survivor.nonce()
            survivor.close()
            late.close()

    run(body)


def test_the_survivor_may_begin_anew() -> None:
    """A decoder that attaches without a resume has nothing: nobody else has the memory, so that the daemon begins anew
    as well, with other memory."""

    async def body() -> None:
        async with killable() as node:
            decoder = Decoder(node)
            client = await decoder.attach()
            await decoder.hold(client, PROMPT, 8)
            nonce = decoder.nonce()
            decoder.close()
            node.kill()
            await node.start()
            await decoder.attach()
            now = await node.snapshot()
            assert (now.adopted_blocks, now.indexed_blocks, now.free_blocks) == (0, 0, BLOCKS)
            assert decoder.nonce() != nonce
            decoder.close()

    run(body)


def test_of_two_survivors_nothing_is_given_away_before_the_second_is_heard() -> None:
    """The first gets no new block until the second has claimed, and both keep what they had."""

    async def body() -> None:
        async with killable() as node:
            first, second = Decoder(node), Decoder(node, "d1")
            for decoder in (first, second):
                client = await decoder.attach()
                await decoder.hold(client, [100 * len(decoder.name + decoder.name), *PROMPT, ord(decoder.name[1])], 4)
            node.kill()
            await node.start()
            client = SessionClient(node.internal)
            assert (await first.come_back(client)).leases[0]
            grant = await node.grant()
            failed(await client.ask(acquire=acquire_request(grant, [7] * 6)), "POOL_FULL")
            answer = await client.ask(credit=cache_pb2.CreditRequest(wanted_blocks=3))
            assert answer.credit_granted.granted_blocks == 0
            assert (await node.snapshot()).quarantined_blocks > 0
            other = SessionClient(node.internal)
            assert (await second.come_back(other)).leases[0]
            assert (await client.ask(acquire=acquire_request(grant, [7] * 6))).acquire.lease_id
            now = await node.snapshot()
            assert (now.quarantined_blocks, now.leases, now.sessions) == (0, 3, 2)
            assert await node.violations() == []
            first.close()
            second.close()

    run(body)


def test_a_survivor_that_does_not_come_is_waited_for_no_longer_than_its_lease_and_grace() -> None:
    """What it may write is quarantined after that, until it attaches anew."""

    async def body() -> None:
        async with killable("--lease-seconds", "2", "--grace-seconds", "1") as node:
            first, second = Decoder(node), Decoder(node, "d1")
            for number, decoder in enumerate((first, second)):
                client = await decoder.attach()
                await decoder.hold(client, [number, *PROMPT], 4)
            node.kill()
            await node.start()
            client = SessionClient(node.internal)
            await first.come_back(client)

            async def serves() -> bool:
                answer = await client.ask(heartbeat=cache_pb2.HeartbeatRequest())
                assert answer.WhichOneof("result") == "heartbeat"
                probe = SessionClient(node.internal)
                response = await probe.ask(attach=attach_request(name="d7"))
                return bool(response.WhichOneof("result") == "attach")

            await eventually_async(serves)
            now = await node.snapshot()
            assert now.quarantined_blocks == 2  # of the second one's lease, what was not published
            assert now.free_blocks == BLOCKS - 3 - 3
            failed(await SessionClient(node.internal).ask(attach=second.resume_request()), "SESSION_OVER")
            second.close()
            await second.attach()
            assert (await node.snapshot()).quarantined_blocks == 0
            assert await node.violations() == []
            first.close()
            second.close()

    run(body)


def test_who_cannot_prove_a_session_gets_nothing() -> None:
    """A wrong token, session, nonce, process or layout is refused by its reason, and the true decoder still comes
    back."""

    async def body() -> None:
        async with killable() as node:
            decoder = Decoder(node)
            client = await decoder.attach()
            await decoder.hold(client, PROMPT, 8)
            node.kill()
            await node.start()
            client = SessionClient(node.internal)
            cases: list[tuple[dict[str, Any], str]] = [
                ({"resume_token": bytes(16)}, "PERMISSION_DENIED"),
                ({"session_id": 99}, "PERMISSION_DENIED"),
                ({"arena_nonce": bytes(NONCE_BYTES)}, "ARENA_NONCE"),
            ]
            for changes, reason in cases:
                failed(await client.ask(attach=decoder.resume_request(**changes)), reason)
            stranger = decoder.resume_request()
            stranger.process_id = os.getpid() + 1
            failed(await client.ask(attach=stranger), "SESSION_OVER")
            other = decoder.resume_request()
            other.layout.num_layers += 1
            failed(await client.ask(attach=other), "LAYOUT_MISMATCH")
            wanted = (await client.ask(attach=decoder.resume_request())).attach
            assert wanted.arena_wanted and wanted.session_id == 0
            fake = os.memfd_create("fake")
            os.ftruncate(fake, os.fstat(decoder.fd).st_size)
            with pytest.raises(PermissionDenied):
                await asyncio.to_thread(return_arena, node.paths.arena_socket, wanted.arena_token, fake)
            os.close(fake)
            assert (await decoder.come_back(client)).resumed
            decoder.close()

    run(body)


def test_a_sequence_with_a_false_grant_is_refused_alone() -> None:
    """Its blocks are not free before the decoder has acknowledged; the other sequence is kept."""

    async def body() -> None:
        async with killable() as node:
            decoder = Decoder(node)
            client = await decoder.attach()
            await decoder.hold(client, [*PROMPT], 0)
            await decoder.hold(client, [9, *PROMPT], 0)
            decoder.held[0].grant = b"x" * 80
            node.kill()
            await node.start()
            client = SessionClient(node.internal)
            answer = await decoder.come_back(client)
            assert [bool(lease) for lease in answer.leases] == [False, True]
            free = (await node.snapshot()).free_blocks
            await client.ask(applied_revision=(await node.snapshot()).revision, report=report_request())
            assert (await node.snapshot()).free_blocks == free + 3
            assert await node.violations() == []
            decoder.close()

    run(body)


@pytest.mark.parametrize("rotated", [False, True])
def test_what_a_rotation_purged_is_not_published_by_the_next_daemon(rotated: bool) -> None:
    """A sequence that ran through the rotation of its tenant's secret and the daemon's death ends and leaves
    nothing: without the rotation all is a hit, and what began after it, too."""

    async def body() -> None:
        async with killable() as node:
            decoder = Decoder(node)
            client = await decoder.attach()
            held = await decoder.hold(client, PROMPT, 4)
            if rotated:
                await node.admin.RotateTenantSecret(admin_pb2.RotateTenantSecretRequest(tenant="default"))
                await decoder.hold(client, [90, *PROMPT], 8)
            node.kill()
            held.sealed_tokens = 9
            await node.start()
            client = SessionClient(node.internal)
            answer = await decoder.come_back(client)
            assert all(answer.leases)
            done = [{"lease_id": lease, "release": True} for lease in answer.leases]
            assert not (await client.ask(report=report_request(*done))).report.refusals
            grant = await node.grant()
            for tokens, cached in (([*PROMPT[:9], 77], 0 if rotated else 9), ([90, *PROMPT], 8 if rotated else 0)):
                again = (await client.ask(acquire=acquire_request(grant, tokens))).acquire
                assert again.cached_tokens == cached
            assert await node.violations() == []
            decoder.close()

    run(body)


@pytest.mark.parametrize("again", [False, True])
def test_a_group_made_again_under_its_name_has_nothing_of_the_one_before(again: bool) -> None:
    """What ran in a group's scope when the group was deleted and made again, just before the daemon's death, is not
    found by the new group, though the decoder that claims it names the group as before; the control: the old one."""

    async def body() -> None:
        async with killable() as node:
            made = admin_pb2.CreateGroupRequest(group="team", tenants=["default"])
            await node.admin.CreateGroup(made)
            decoder = Decoder(node)
            client = await decoder.attach()
            prefix = common_pb2.ScopePrefix(scope=common_pb2.SCOPE_GROUP, group="team", num_tokens=8)
            held = await decoder.hold(client, PROMPT, 4, prefix)
            if again:
                await node.admin.DeleteGroup(admin_pb2.DeleteGroupRequest(group="team"))
                await node.admin.CreateGroup(made)
            node.kill()
            held.sealed_tokens = 9
            await node.start()
            client = SessionClient(node.internal)
            (lease,) = (await decoder.come_back(client)).leases
            await client.ask(report=report_request({"lease_id": lease, "release": True}))
            ask = acquire_request(await node.grant(), [*PROMPT[:9], 77], prefix=prefix)
            assert (await client.ask(acquire=ask)).acquire.cached_tokens == (0 if again else 9)
            assert await node.violations() == []
            decoder.close()

    run(body)


@pytest.mark.parametrize("again", [False, True])
def test_blocks_of_a_group_whose_deletion_was_cut_short_are_dropped(again: bool) -> None:
    """The daemon dies between the end of a group in its database and the end of its blocks: the next one lists none of
    them, also where the name was taken again; the control: a group that is still there."""

    async def body() -> None:
        async with killable() as node:
            await node.admin.CreateGroup(admin_pb2.CreateGroupRequest(group="team", tenants=["default"]))
            decoder = Decoder(node)
            client = await decoder.attach()
            prefix = common_pb2.ScopePrefix(scope=common_pb2.SCOPE_GROUP, group="team", num_tokens=8)
            await decoder.hold(client, PROMPT, 8, prefix)
            await client.ask(report=report_request({"lease_id": decoder.held.pop().lease_id, "release": True}))
            assert (await node.snapshot()).indexed_blocks == 2
            node.kill()
            if again:
                store = TenantStore(node.paths.tenants_db)
                groups = Tenants(store).groups
                groups.delete("team")
                groups.create("team", [TenantId("default")], 5)
                store.close()
            await node.start()
            client = SessionClient(node.internal)
            await decoder.come_back(client)
            assert (await node.snapshot()).indexed_blocks == (0 if again else 2)
            assert await node.violations() == []
            decoder.close()

    run(body)


@pytest.mark.parametrize("end", ["rotation", "withdrawal", "nothing", "settled", "withdrawn"])
def test_what_a_change_that_was_cut_short_should_have_purged_is_not_listed(end: str) -> None:
    """The daemon dies when a rotation or withdrawal is on disk and its purge has not begun: the next one lists nothing
    that nobody could find, and its blocks are free; once more, it has what was computed since. Sequences that run below
    the public prefix come back, and what they share is published anew where it is approved still. Without the change,
    or where its purge was done, all stays."""
    public, longest = (common_pb2.ScopePrefix(scope=common_pb2.SCOPE_PUBLIC, num_tokens=count) for count in (8, 0))

    async def body() -> None:
        async with killable() as node:
            for name, tokens in (("system", PROMPT[:8]), ("other", range(50, 66))):
                await node.admin.ApprovePrefix(admin_pb2.ApprovePrefixRequest(name=name, token_ids=tokens))
            decoder = Decoder(node)
            client = await decoder.attach()
            await decoder.hold(client, PROMPT, 9, public)
            await decoder.hold(client, [*PROMPT, 11], 9, public)
            for tokens, prefix in (([70, *PROMPT[:8]], None), ([*range(50, 66), 1], longest)):
                await decoder.hold(client, tokens, len(tokens) - 1, prefix)
                await client.ask(report=report_request({"lease_id": decoder.held.pop().lease_id, "release": True}))
            assert (await node.snapshot()).indexed_blocks == 8
            if end == "withdrawn":
                await node.admin.WithdrawPrefix(admin_pb2.WithdrawPrefixRequest(name="other"))
            node.kill()
            store = TenantStore(node.paths.tenants_db)
            tenants = Tenants(store)
            if end == "withdrawal":
                tenants.approvals.withdraw("other")
            elif end in ("rotation", "settled"):
                tenants.rotate_secret("default")
            if end == "settled":
                tenants.purged(TenantId("default"))
            store.close()
            await node.start()
            client = SessionClient(node.internal)
            answer = await decoder.come_back(client)
            assert all(answer.leases)
            assert await node.violations() == []
            done = [{"lease_id": lease, "release": True} for lease in answer.leases]
            assert not (await client.ask(report=report_request(*done))).report.refusals
            # The system's 2 blocks, the tail below them where it is published, 2 private ones, 4 of the other prefix: a
            # withdrawal of it keeps the first 2, for what is no longer than the system's passes for a part of that.
            listed = {"rotation": 6, "withdrawal": 5, "nothing": 9, "settled": 8, "withdrawn": 7}[end]
            assert (await node.snapshot()).indexed_blocks == listed
            grant = await node.grant()
            below = (await client.ask(acquire=acquire_request(grant, [*PROMPT, 12], prefix=public))).acquire
            assert below.cached_tokens == (8 if end in ("rotation", "settled") else 9)
            ended = {"lease_id": below.lease_id, "sealed_tokens": 11, "copied": True, "release": True}
            assert not (await client.ask(report=report_request(ended))).report.refusals
            snapshot = await node.snapshot()
            assert snapshot.free_blocks + snapshot.cached_blocks == BLOCKS and snapshot.active_blocks == 0
            assert await node.violations() == []
            decoder.close()

    run(body)


def test_a_death_while_it_adopts_is_survived() -> None:
    """The daemon dies after it was given the memory, and again after it answered a claim whose answer was lost."""

    async def body() -> None:
        async with killable() as node:
            decoder = Decoder(node)
            client = await decoder.attach()
            await decoder.hold(client, PROMPT, 8)
            node.kill()
            await node.start()
            wanted = (await SessionClient(node.internal).ask(attach=decoder.resume_request())).attach
            await asyncio.to_thread(return_arena, node.paths.arena_socket, wanted.arena_token, decoder.fd)
            node.kill()
            await node.start()
            client = SessionClient(node.internal)
            wanted = (await client.ask(attach=decoder.resume_request())).attach
            await asyncio.to_thread(return_arena, node.paths.arena_socket, wanted.arena_token, decoder.fd)
            lost = (await client.ask(attach=decoder.resume_request())).attach
            assert lost.resumed
            node.kill()
            await node.start()
            answer = await decoder.come_back(SessionClient(node.internal))
            assert answer.leases[0]
            now = await node.snapshot()
            assert (now.adopted_blocks, now.leases, now.epoch) == (2, 1, 4)
            assert await node.violations() == []
            decoder.close()

    run(body)


def test_a_claim_whose_answer_was_lost_is_answered_again() -> None:
    """The daemon lives on and serves already; the decoder, whose stream broke, presents once more what it held under
    the daemon before, one sequence longer meanwhile and one over: it has its session and leases. A wrong token, and a
    claim that was sent before the one that was heard, get nothing, and once the decoder has reported, nobody goes on as
    the old session."""

    async def body() -> None:
        async with killable() as node:
            decoder = Decoder(node)
            client = await decoder.attach()
            over = await decoder.hold(client, PROMPT, 8)  # so that the numbers of the leases change with the claim
            await client.ask(report=report_request({"lease_id": over.lease_id, "release": True}))
            decoder.held.clear()
            held = await decoder.hold(client, PROMPT, 8)
            await decoder.hold(client, [9, *PROMPT], 0)
            await decoder.hold(client, [8, *PROMPT], 0)
            decoder.held[2].grant = b"x" * 80
            credit = (await client.ask(report=report_request(wanted_blocks=1))).credit
            node.kill()
            await node.start()
            client = SessionClient(node.internal)
            wanted = (await client.ask(attach=decoder.resume_request(credit_blocks=credit))).attach
            await asyncio.to_thread(return_arena, node.paths.arena_socket, wanted.arena_token, decoder.fd)
            overtaken = decoder.resume_request()
            lost = (await client.ask(attach=decoder.resume_request(credit_blocks=credit))).attach
            failed(await SessionClient(node.internal).ask(attach=overtaken), "ATTACH_OVERTAKEN")
            assert [bool(lease) for lease in lost.leases] == [True, True, False]
            old = decoder.session, decoder.epoch, decoder.token
            wrong = await SessionClient(node.internal).ask(attach=decoder.resume_request(resume_token=bytes(16)))
            failed(wrong, "PERMISSION_DENIED")
            del decoder.held[1]
            held.tokens += pack_tokens([5, 6, 7])
            held.blocks += credit
            held.sealed_tokens = 12
            client = SessionClient(node.internal)
            answer = await decoder.come_back(client)
            assert (answer.session_id, list(answer.leases)) == (lost.session_id, [lost.leases[0], 0])
            now = await node.snapshot()
            assert (now.leases, now.credit_blocks, now.quarantined_blocks, now.indexed_blocks) == (1, 0, 0, 3)
            assert await node.violations() == []
            await client.ask(applied_revision=now.revision, report=report_request())
            decoder.session, decoder.epoch, decoder.token = old
            failed(await SessionClient(node.internal).ask(attach=decoder.resume_request()), "SESSION_OVER")
            assert (await node.snapshot()).leases == 1
            decoder.close()

    run(body)


def test_a_damaged_journal_is_no_journal() -> None:
    """With its header torn, the daemon starts empty: a decoder that comes back has lost its session."""

    async def body() -> None:
        async with killable() as node:
            decoder = Decoder(node)
            client = await decoder.attach()
            await decoder.hold(client, PROMPT, 8)
            node.kill()
            with node.paths.index_journal.open("r+b") as file:
                file.write(np.random.default_rng(1).bytes(400))
            await node.start()
            failed(await SessionClient(node.internal).ask(attach=decoder.resume_request()), "SESSION_OVER")
            decoder.close()
            await decoder.attach()
            assert (await node.snapshot()).free_blocks == BLOCKS
            decoder.close()

    run(body)
