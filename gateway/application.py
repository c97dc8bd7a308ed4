"""Puts the gateway together: listener, channels, decoders, health; and takes it apart in the right order.

Owns start and shutdown: NOT_SERVING first, then running requests to the drain's end, then UNAVAILABLE for the rest.
Called by `gateway/__main__.py` and by tests; it reads no environment.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from pathlib import Path
from typing import Final

import grpc

from common.adapter_folder import AdapterFolder
from common.addresses import is_local
from common.config import Options
from common.credentials import read_secret
from common.errors import FailedPrecondition, Unavailable
from common.interceptors import ErrorInterceptor
from common.logs import get_logger
from common.paths import StatePaths
from common.rpc import Health, add_health_and_reflection, bind, make_server, open_channel, unix_target
from gateway.admission import Admission
from gateway.auth import DaemonAuthenticator, TenantInterceptor
from gateway.decoder_pool import DecoderPool
from gateway.health import HealthMonitor
from gateway.prompts import PromptEncoder
from gateway.service import InferenceService
from gateway.sessions import Branches
from gateway.tokenizer import ModelTokenizer
from tessera.inference.v1 import inference_pb2, inference_pb2_grpc

SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_LAST_WORDS_SECONDS: Final = 2.0  # for refusals to reach their clients after the drain


class Gateway:
    """A gateway that listens at `options.listen` once started. Needs the node's internal credential on disk."""

    def __init__(self, options: Options, tokenizer: ModelTokenizer) -> None:
        self._options = options
        credentials = listener_credentials(options)
        paths = StatePaths(options.state_dir)
        secret = read_secret(paths.internal_key)
        self._daemon = open_channel(unix_target(paths.cachemgr_socket), secret)
        targets = [unix_target(paths.decoder_socket(index)) for index in range(options.decoders)]
        self._pool = DecoderPool(targets, secret)
        self._prompts = PromptEncoder(tokenizer, lambda: datetime.now().astimezone())
        # What the decoders run and what may wait; more would only wait in their queues, or be refused there.
        self._admission = Admission(
            options.queue_total + options.max_batch * options.decoders,
            options.max_queue + options.max_batch * options.decoders,
        )
        tenants = TenantInterceptor(DaemonAuthenticator(self._daemon, time.monotonic), time.monotonic)
        self._server = make_server([tenants, ErrorInterceptor()])
        branches = Branches(self._daemon)
        adapters = AdapterFolder(options.adapters_path)
        service = InferenceService(self._pool, self._prompts, self._admission, branches, time.monotonic, adapters)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, self._server)  # type: ignore[no-untyped-call]
        self._credentials = credentials
        self._health: Health | None = None
        self._monitor: HealthMonitor | None = None
        self._watching: asyncio.Task[None] | None = None
        self.port = 0

    @property
    def is_serving(self) -> bool:
        """What health says now."""
        return self._health is not None and self._health.serving

    @property
    def running(self) -> int:
        """Calls that hold a place now."""
        return self._admission.running

    async def start(self) -> None:
        """Listen. Raises FailedPrecondition where the address cannot be had."""
        self._health = await add_health_and_reflection(self._server, [SERVICE])
        self._monitor = HealthMonitor(self._health, self._daemon, self._pool)
        self.port = bind(self._server, self._options.listen, self._credentials)
        await self._server.start()
        self._pool.start()
        self._watching = asyncio.create_task(self._monitor.run())
        get_logger().info("gateway_listening", address=self._options.listen, port=self.port)

    async def stop(self) -> None:
        """Drain and end; takes at most `drain_seconds` and a little."""
        if self._monitor is not None:
            await self._monitor.drain()
        self._admission.drain()
        get_logger().info("drain_started", requests=self._admission.running)
        if not await self._admission.wait_idle(self._options.drain_seconds):
            get_logger().warning("drain_ended", requests=self._admission.running)
            error = Unavailable("the gateway is shutting down", reason="DRAINING", retry_after_seconds=1.0)
            self._pool.abandon_all(error)
            await self._admission.wait_idle(_LAST_WORDS_SECONDS)
        await self._server.stop(_LAST_WORDS_SECONDS)
        await self._pool.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._daemon.close()
        self._prompts.close()
        get_logger().info("gateway_stopped")


def listener_credentials(options: Options) -> grpc.ServerCredentials | None:
    """TLS credentials of the public listener, or None for plaintext.

    Raises FailedPrecondition for plaintext beyond this machine without `insecure_listen`, and for unreadable files.
    """
    if options.tls_cert is not None and options.tls_key is not None:
        pair = (_pem("--tls-key", options.tls_key), _pem("--tls-cert", options.tls_cert))
        return grpc.ssl_server_credentials([pair])
    if is_local(options.listen):
        return None
    if not options.insecure_listen:
        raise FailedPrecondition(
            f"--listen {options.listen} is beyond loopback: give --tls-cert and --tls-key, "
            "or accept keys and prompts in plaintext with --insecure-listen"
        )
    get_logger().warning("plaintext_listener", address=options.listen)
    return None


def _pem(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FailedPrecondition(f"{option}: the TLS file {path} cannot be read: {error.strerror}") from error
