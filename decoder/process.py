"""One decoder process: model, engine, session and service put together, from start to drained end.

Invariants: health says SERVING only while a request that came now would be served, and follows that within a second;
at the end leases are released before the session closes; a second decoder of the same index does not start. Called by
`__main__` once the thread environment is set.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, Final

from common.adapter_folder import AdapterFolder
from common.config import Options
from common.credentials import read_secret
from common.cuda_checks import report_surroundings
from common.errors import FailedPrecondition, InvalidArgument, Unavailable
from common.interceptors import BearerInterceptor, ErrorInterceptor
from common.kept_sockets import watch_sockets
from common.logs import get_logger
from common.paths import StatePaths
from common.rpc import Health, add_health_and_reflection, bind_kept, make_server, unix_target
from common.serving import settle_heap
from common.socket_files import take_lock
from decoder.adapter_pool import AdapterPool
from decoder.cache_client import GrpcCacheClient
from decoder.cache_key import cache_key
from decoder.draft_model import DraftModel
from decoder.engine import Engine, EngineOptions
from decoder.loading import load_until
from decoder.models.select import INTERPRETER, ComputeDevice, resolve_device
from decoder.sequence import SpeculationMode
from decoder.service import SERVICE_NAME, Backend, DecodeService
from decoder.session_target import SessionTarget
from decoder.shared_weights import WeightsSource
from decoder.validation import ServedModel
from tessera.decode.v1 import decode_pb2, decode_pb2_grpc
from tessera.inference.v1 import inference_pb2

HEALTH_SECONDS: Final = 0.2
KEY_SECONDS: Final = 30.0
JOIN_SECONDS: Final = 30.0


async def serve(options: Options, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then drain and end. Raises the TesseraError that keeps the decoder from serving."""
    if options.model is None:
        raise InvalidArgument("model", "is not set; give --model, a GGUF file or a Hugging Face directory")
    device = resolve_device(INTERPRETER if options.faults.interpreted_kernels else options.device, options.dtype)
    if device.gpu is not None:
        report_surroundings(device.gpu, os.environ)
    paths = StatePaths(options.state_dir)
    paths.prepare()
    secret = await _internal_key(paths.internal_key, stop)
    if secret is None:
        return
    index = options.decoder_index
    lock = take_lock(
        paths.decoder_lock(index),
        FailedPrecondition(
            f"another decoder runs with --decoder-index {index} on this state directory; stop it, or choose another",
            reason="DECODER_IN_USE",
        ),
    )
    try:
        await _serve_at(options, (options.model, device), paths, secret, stop)
    finally:
        os.close(lock)


async def _serve_at(
    options: Options, source: tuple[Path, ComputeDevice], paths: StatePaths, secret: str, stop: asyncio.Event
) -> None:
    server = make_server([ErrorInterceptor(), BearerInterceptor(secret)])
    service = DecodeService()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call,unused-ignore]
    health = await add_health_and_reflection(server, [SERVICE_NAME], with_reflection=False)
    kept = bind_kept(server, paths.decoder_socket(options.decoder_index))
    await server.start()
    lost = False

    def end() -> None:
        nonlocal lost
        lost = True
        stop.set()

    watching = asyncio.create_task(watch_sockets([kept], end))
    try:
        loaded = await load_until(stop, *source, options, _shared_weights(options, source[1], paths, secret))
        if loaded is not None:
            model, draft, tokenizer = loaded
            target = SessionTarget(
                target=unix_target(paths.cachemgr_socket),
                secret=secret,
                arena_socket=paths.arena_socket,
                layout=model.layout,
                key=cache_key(model, tokenizer),
                decoder_name=f"decoder-{options.decoder_index}",
                gpu=source[1].gpu,
            )
            await _run(options, (model, draft), target, service, health, stop)
    finally:
        watching.cancel()
        kept.remove()
        await server.stop(grace=1.0)
    if lost:
        raise Unavailable("the socket files of this decoder were deleted: nobody can connect", reason="SOCKET_LOST")


async def _run(
    options: Options,
    models: tuple[Any, DraftModel | None],
    target: SessionTarget,
    service: DecodeService,
    health: Health,
    stop: asyncio.Event,
) -> None:
    model, draft = models
    client = GrpcCacheClient(target)
    engine = Engine(
        model,
        None,
        client,
        EngineOptions(
            max_batch=options.max_batch,
            chunk_tokens=options.chunk_tokens,
            mixed_chunk_tokens=options.mixed_tokens,
            max_queue=options.max_queue,
            max_queue_total=options.queue_total,
            window_tokens=options.window_tokens,
            step_delay_seconds=options.faults.step_delay_seconds,
        ),
        drafters={} if draft is None else {SpeculationMode.DRAFT_MODEL: draft},
    )
    settle_heap()
    engine.start()
    service.backend = _backend(options, model, engine)
    session = asyncio.create_task(client.run())
    watcher = asyncio.create_task(_follow_health(engine, health))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((session, stopping), return_when=asyncio.FIRST_COMPLETED)
        if session.done():
            session.result()  # raises why this decoder cannot work with the cache manager
        engine.drain()
        await health.set(False)
        await _drained(engine, options.drain_seconds)
    finally:
        for task in (watcher, stopping):
            task.cancel()
        await health.set(False)
        engine.stop()
        if not await asyncio.to_thread(engine.join, JOIN_SECONDS):
            get_logger().warning("engine_left", seconds=JOIN_SECONDS)
        await client.close()
        await asyncio.wait((session,), timeout=JOIN_SECONDS)


async def _drained(engine: Engine, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while engine.num_requests and time.monotonic() < deadline:
        await asyncio.sleep(HEALTH_SECONDS / 4)
    get_logger().info("decoder_drained", left=engine.num_requests)


async def _follow_health(engine: Engine, health: Health) -> None:
    while True:
        if engine.is_serving != health.serving:
            await health.set(not health.serving)
            get_logger().info("health_changed", serving=health.serving)
        await asyncio.sleep(HEALTH_SECONDS)


async def _internal_key(path: Path, stop: asyncio.Event) -> str | None:
    # The cache manager makes the key at its first start, which may be now.
    deadline = time.monotonic() + KEY_SECONDS
    while not stop.is_set():
        try:
            return read_secret(path)
        except FailedPrecondition:
            if path.exists() or time.monotonic() > deadline:
                raise
        await asyncio.sleep(HEALTH_SECONDS)
    return None


def _shared_weights(options: Options, device: ComputeDevice, paths: StatePaths, secret: str) -> WeightsSource | None:
    """Where the weights of a GPU come from; None where this decoder holds its own: on a CPU it maps a file."""
    if not device.uses_triton:
        return None
    if options.arena_handles == "ipc":
        get_logger().warning(
            "weights_not_shared", cause="--arena-handles ipc", effect="each decoder holds its own copy"
        )
        return None
    return WeightsSource(paths.weights_socket, secret, device.gpu)


def _name_of(path: Path | None) -> str:
    if path is None:
        return ""
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def _backend(options: Options, model: Any, engine: Engine) -> Backend:
    config, layout = model.config, model.layout
    max_context = min(options.max_context or config.max_position, config.max_position)
    name = options.model_name or _name_of(options.model)
    served = ServedModel(
        config.vocab_size,
        max_context,
        frozenset(config.eos_token_ids),
        options.prefix_cache,
        options.draft_model is not None,
    )
    welcome = decode_pb2.Welcome(
        model=inference_pb2.Model(
            name=name,
            vocab_size=config.vocab_size,
            max_context_tokens=max_context,
            block_tokens=layout.block_tokens,
            dtype=options.dtype,
            kv_dtype=layout.kv_dtype,
        ),
        eos_token_ids=config.eos_token_ids,
        max_batch=options.max_batch,
        window_tokens=options.window_tokens,
        weights_digest=model.digests.weights,
    )
    adapters = AdapterPool(AdapterFolder(options.adapters_path), config, model.pack_adapter, options.max_adapters)
    return Backend(engine, served, welcome, adapters)
