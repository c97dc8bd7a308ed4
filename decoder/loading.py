"""How a decoder gets its model: on a thread that nobody waits for, with its progress in the log.

Invariant: whoever waits for the model goes on at once when the decoder is to stop. The thread then computes on until
the process ends, which it must do by `leave`: an ordinary end of the interpreter waits for what the compiler holds.
Called by `process.py`, and by `__main__` at the end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, cast

from common.config import Options
from common.logs import get_logger
from decoder.cache_key import tokenizer_digest
from decoder.compile_watch import CompileWatch
from decoder.draft_model import DraftModel, load_draft
from decoder.grouped_arena import private_arena
from decoder.models.select import ComputeDevice
from decoder.shared_weights import WeightsSource
from decoder.weights import WeightsDtype, load_on

LOGGED_FRACTION: Final = 0.25
LOGGED_SECONDS: Final = 10.0
_THREAD: Final = "load"

Loaded = tuple[Any, DraftModel | None, bytes]


async def load_until(
    stop: asyncio.Event, path: Path, device: ComputeDevice, options: Options, weights: WeightsSource | None
) -> Loaded | None:
    """The model, the draft model and the digest of the tokenizer; None once `stop` is set before they are there."""
    result: concurrent.futures.Future[Loaded] = concurrent.futures.Future()

    def load() -> None:
        try:
            result.set_result(_load(path, device, options, weights))
        except Exception as error:  # noqa: BLE001 - handed over whole; `serve` raises it
            result.set_exception(error)

    with CompileWatch(began=lambda: get_logger().info("kernels_compiling", functions=0, seconds=0)) as watch:
        threading.Thread(target=contextvars.copy_context().run, args=(load,), name=_THREAD, daemon=True).start()
        loading = asyncio.wrap_future(result)
        stopping = asyncio.create_task(stop.wait())
        while not (loading.done() or stopping.done()):
            await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED, timeout=LOGGED_SECONDS)
            if (progress := watch.progress()) is not None:
                get_logger().info("kernels_compiling", functions=progress[0], seconds=round(progress[1]))
        stopping.cancel()
    return await loading if loading.done() else None


def leave(status: int) -> int:
    """`status`, to exit with; where a model is still being loaded the process ends here, with it."""
    if any(thread.name == _THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _load(path: Path, device: ComputeDevice, options: Options, weights: WeightsSource | None) -> Loaded:
    # Compiling and loading take seconds; both happen before anybody is told that this decoder serves.
    log = get_logger()
    logged = {"": -1.0}

    def progress(stage: str, fraction: float) -> None:
        if fraction >= logged.get(stage, -1.0) + LOGGED_FRACTION or fraction >= 1.0:
            logged[stage] = fraction
            log.info("model_loading", stage=stage, fraction=round(fraction, 2))

    dtype = cast(WeightsDtype, options.dtype)
    started = time.monotonic()
    model = load_on(
        device,
        path,
        dtype,
        options.block_tokens,
        options.kv_dtype,
        options.threads,
        progress,
        options.max_context or 0,
        options.weights_cache,
        None if weights is None else weights.weights_of,
    )
    progress("kernels", 0.0)
    model.warm_up(private_arena(model.layout, 1))
    log.info("model_loaded", model=path.name, seconds=round(time.monotonic() - started, 2))
    draft = None if options.draft_model is None else load_draft(options, model, dtype, progress)
    return model, draft, tokenizer_digest(path)
