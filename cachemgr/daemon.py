"""The cache manager's process put together: state, core, sockets; how it starts, drains and ends.

Invariant: nothing is bound before the state directory is locked; health says SERVING while both servers and the arena
socket take work, within a second after the pool was drained or serves again; at the end every fd, lock and file is let
go. Called by `__main__` and by tests.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
from collections.abc import Callable
from typing import Final

import grpc

from cachemgr.admin import AdminService
from cachemgr.admin_listener import refuse_beyond_loopback
from cachemgr.arena.handoff import Handoff
from cachemgr.arena.maker import HOST_MEMORY, ArenaPlace
from cachemgr.audit import AuditLog
from cachemgr.audit_calls import AuditInterceptor
from cachemgr.branch_service import BRANCH_SERVICE, BranchService
from cachemgr.claim_operation import Proofs
from cachemgr.clocks import Clocks
from cachemgr.first_start import NodeSecrets, ensure_default_tenant, ensure_secrets
from cachemgr.grants import GrantSigner
from cachemgr.handles import Handles
from cachemgr.ids import SessionId
from cachemgr.operations import Operations
from cachemgr.pool_owner import PoolOwner, PoolSize
from cachemgr.roles import ADMIN_SERVICE, Role, RoleInterceptor
from cachemgr.service import CACHE_SERVICE, CREDENTIAL_SERVICE, CacheService, CredentialService
from cachemgr.sessions import Sessions
from cachemgr.succession import Succession
from cachemgr.tenant_store import TenantStore
from cachemgr.tenants import Tenants
from cachemgr.watchdog import Watchdog
from cachemgr.weights.memory import WeightsPlace
from cachemgr.weights.service import WeightsSocket
from cachemgr.weights.store import WeightsStore
from common.config import DEFAULT_POOL_BYTES, Options
from common.errors import FailedPrecondition
from common.interceptors import BearerInterceptor, ErrorInterceptor
from common.kept_sockets import KeptSocket, watch_sockets
from common.layout import NONCE_BYTES
from common.logs import get_logger
from common.paths import StatePaths
from common.rpc import Health, add_health_and_reflection, bind, bind_kept, make_server
from common.socket_files import take_lock
from tessera.admin.v1 import admin_pb2_grpc
from tessera.cache.v1 import cache_pb2_grpc

TICK_SECONDS: Final = 1.0
LOOKS_PER_DEADLINE: Final = 8
DRAIN_POLL_SECONDS: Final = 0.02
STOP_GRACE_SECONDS: Final = 0.5


class Daemon:
    """One cache manager on one state directory. Create, `start`, and always `stop`, whatever happened between."""

    def __init__(
        self,
        options: Options,
        *,
        show_key: Callable[[str], object],
        clocks: Clocks | None = None,
        place: ArenaPlace = HOST_MEMORY,
    ) -> None:
        self._options = options
        self._show_key = show_key
        self._place = place
        self._clocks = clocks or Clocks()
        self._paths = StatePaths(options.state_dir)
        self._log = get_logger()
        self._lock: int | None = None
        self._store: TenantStore | None = None
        self._audit: AuditLog | None = None
        self._tenants: Tenants | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._sockets: list[KeptSocket] = []
        self._servers: list[grpc.aio.Server] = []
        self._healths: list[Health] = []
        self._handoff = Handoff(self._handed_over)
        self._weights: WeightsSocket | None = None
        self._owner: PoolOwner | None = None
        self._sessions: Sessions | None = None
        self.admin_port: int | None = None

    async def start(self) -> None:
        """Bind everything and say SERVING. Raises FailedPrecondition, with what to do, where the state forbids it."""
        options = self._options
        if options.admin_listen is not None:
            refuse_beyond_loopback(options.admin_listen)
        self._paths.prepare()
        self._lock = take_lock(
            self._paths.lock_file,
            FailedPrecondition(
                "another cache manager runs on this state directory; stop it, or choose another --state-dir",
                reason="STATE_IN_USE",
            ),
        )
        store = self._store = TenantStore(self._paths.tenants_db)
        tenants = self._tenants = Tenants(store)
        node_secrets = ensure_secrets(self._paths)
        audit = self._audit = AuditLog(self._paths.audit_log, wall_ns=self._clocks.wall_ns)
        ensure_default_tenant(tenants, self._paths, now_ns=self._clocks.wall_ns(), show=self._show_key)
        epoch = store.next_epoch()
        owner = self._owner = PoolOwner(
            size=PoolSize(options.pool_blocks, options.pool_bytes or DEFAULT_POOL_BYTES),
            epoch=epoch,
            faults=options.faults,
            handoff=self._handoff,
            lease_seconds=options.lease_seconds,
            grace_seconds=options.grace_seconds,
            max_kept=options.max_kept,
            succession=Succession(
                self._paths.index_journal, epoch=epoch, wait_seconds=options.lease_seconds + options.grace_seconds
            ),
            may_adopt=tenants.may_be_adopted,
            all_purged=tenants.all_purged,
            steady_ns=self._clocks.steady_ns,
            place=self._place,
            make_room=lambda: self._weights is not None and self._weights.make_room(),
        )
        for tenant, quota in tenants.quotas().items():
            owner.set_quota(tenant, quota)
        sessions = self._sessions = Sessions(owner, self._handoff, self._clocks)
        for process_id, pidfd in owner.look_for_orphan():
            sessions.survivor(process_id, pidfd)
        await self._handoff.start(self._paths.arena_socket)
        await self._start_internal(node_secrets, owner, sessions, tenants, GrantSigner(store.signing_secret()))
        await self._start_admin(node_secrets, owner, sessions, tenants, audit)
        weights = self._weights = self._weights_socket(owner)
        await weights.start(self._paths.weights_socket, node_secrets.internal)
        handing = [it.kept_socket for it in (self._handoff, weights) if it.kept_socket is not None]
        # A socket that cannot be restored does not end the daemon: the cache that it holds serves on.
        watching = watch_sockets([*self._sockets, *handing])
        self._tasks.append(asyncio.create_task(watching, name="watch-sockets"))
        self._tasks.append(asyncio.create_task(self._tick(owner, tenants, weights), name="tick"))
        self._tasks.append(asyncio.create_task(self._watch_deadlines(owner, sessions), name="deadlines"))
        self._tasks.append(asyncio.create_task(owner.watch_orphan(), name="orphan"))
        await self._say_serving(True)
        self._log.info("service_ready", epoch=owner.epoch)

    async def drain(self, seconds: float) -> None:
        """Take no new work, and wait until no lease is held, at most `seconds`."""
        owner = self._owner
        if owner is None:
            return
        owner.draining = True
        await self._say_serving(False)
        try:
            async with asyncio.timeout(seconds):
                while owner.manager is not None and owner.manager.snapshot().leases:
                    await asyncio.sleep(DRAIN_POLL_SECONDS)
        except TimeoutError:
            self._log.warning("drain_timed_out", seconds=seconds)

    async def stop(self) -> None:
        """End every stream and let everything go. Harmless when repeated."""
        if self._owner is not None:
            self._owner.draining = True
        if self._sessions is not None:
            self._sessions.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for kept in self._sockets:
            kept.remove()
        self._sockets.clear()
        await asyncio.gather(*(server.stop(STOP_GRACE_SECONDS) for server in self._servers))
        self._servers.clear()
        await self._handoff.stop()
        if self._weights is not None:
            await self._weights.stop()
        if self._owner is not None:
            self._owner.close()
        if self._audit is not None:
            self._audit.close()
        if self._tenants is not None and self._store is not None:
            self._flush(self._tenants)
            self._store.close()
            self._tenants = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _start_internal(
        self, node_secrets: NodeSecrets, owner: PoolOwner, sessions: Sessions, tenants: Tenants, signer: GrantSigner
    ) -> None:
        server = make_server([BearerInterceptor(node_secrets.internal), ErrorInterceptor()])
        self._servers.append(server)
        handles = Handles()
        operations = Operations(tenants=tenants, signer=signer, sessions=sessions, handles=handles, clocks=self._clocks)
        cache = CacheService(
            owner=owner,
            sessions=sessions,
            handoff=self._handoff,
            operations=operations,
            faults=self._options.faults,
            clocks=self._clocks,
            proofs=Proofs(tenants, signer, self._clocks),
        )
        cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, server)  # type: ignore[no-untyped-call]
        credentials = CredentialService(tenants=tenants, signer=signer, clocks=self._clocks)
        cache_pb2_grpc.add_CredentialServiceServicer_to_server(credentials, server)  # type: ignore[no-untyped-call]
        branches = BranchService(owner=owner, tenants=tenants, signer=signer, handles=handles, clocks=self._clocks)
        cache_pb2_grpc.add_BranchServiceServicer_to_server(branches, server)  # type: ignore[no-untyped-call]
        names = (CACHE_SERVICE, CREDENTIAL_SERVICE, BRANCH_SERVICE)
        self._healths.append(await add_health_and_reflection(server, names, with_reflection=False))
        self._sockets.append(bind_kept(server, self._paths.cachemgr_socket))
        await server.start()

    async def _start_admin(
        self, node_secrets: NodeSecrets, owner: PoolOwner, sessions: Sessions, tenants: Tenants, audit: AuditLog
    ) -> None:
        roles = RoleInterceptor({node_secrets.admin: Role.OPERATOR, node_secrets.reader: Role.READER}, audit)
        server = make_server([roles, ErrorInterceptor(), AuditInterceptor(audit)])
        self._servers.append(server)
        admin = AdminService(owner=owner, sessions=sessions, tenants=tenants, clocks=self._clocks)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)  # type: ignore[no-untyped-call]
        self._healths.append(await add_health_and_reflection(server, (ADMIN_SERVICE,)))
        self._sockets.append(bind_kept(server, self._paths.admin_socket))
        if self._options.admin_listen is not None:
            self.admin_port = bind(server, self._options.admin_listen)
        await server.start()

    def _handed_over(self, session: SessionId, process_id: int, pidfd: int) -> None:
        if self._sessions is None:
            os.close(pidfd)
        else:
            self._sessions.handed_over(session, process_id, pidfd)

    def _weights_socket(self, owner: PoolOwner) -> WeightsSocket:
        store = WeightsStore(
            WeightsPlace(self._place),
            reserved=lambda: owner.reserved_bytes,
            draw_nonce=lambda: secrets.token_bytes(NONCE_BYTES),
        )
        return WeightsSocket(store, now=lambda: self._clocks.steady_ns() / 1e9)

    async def _tick(self, owner: PoolOwner, tenants: Tenants, weights: WeightsSocket) -> None:
        watchdog = Watchdog(owner)
        while True:
            await asyncio.sleep(TICK_SECONDS)
            watchdog.look()
            owner.release_memory()
            weights.tick()
            self._flush(tenants)
            await self._say_serving(owner.serving and not owner.drained)

    async def _watch_deadlines(self, owner: PoolOwner, sessions: Sessions) -> None:
        shortest = min(self._options.lease_seconds, self._options.grace_seconds or self._options.lease_seconds)
        pause = min(TICK_SECONDS, shortest / LOOKS_PER_DEADLINE)
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(pause)
            now, before, last = loop.time(), last, loop.time()
            # After a standstill of this very process, what was said meanwhile is heard first.
            if owner.manager is not None and now - before < pause + TICK_SECONDS:
                sessions.end_lapsed(owner.manager.tick(self._clocks.steady_ns()))

    def _flush(self, tenants: Tenants) -> None:
        try:
            tenants.flush()
        except sqlite3.Error as error:  # a full disk, say: last uses may wait, serving may not
            self._log.warning("tenants_flush_failed", error=str(error))

    async def _say_serving(self, serving: bool) -> None:
        for health in self._healths:
            if health.serving != serving:
                await health.set(serving)
