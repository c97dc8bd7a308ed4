"""The process put together: it serves once everything is there, follows the truth, and ends with no lease held."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.config import Options
from common.errors import FailedPrecondition, InvalidArgument, Unavailable
from common.kept_sockets import kept_path
from common.rpc import open_channel, unix_target
from common.tokens import pack_tokens
from decoder.__main__ import PASSIVE_THREADS, main, set_thread_environment
from decoder.cache_key import cache_key, tokenizer_digest
from decoder.process import serve
from decoder.weights import load_model
from tessera.decode.v1 import decode_pb2, decode_pb2_grpc
from tests.cachemgr.daemon_rig import Rig, running
from tests.tiny_models import make_tiny_llama

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama on disk."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-1.5b")


async def status_of(channel: grpc.aio.Channel) -> int:
    try:
        return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status
    except grpc.aio.AioRpcError:
        return 0


async def until(probe: Callable[[], Awaitable[Any]], what: str, seconds: float = 120.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not await probe():
        assert asyncio.get_running_loop().time() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)


class Served:
    """`serve` as a task, and a channel to it."""

    def __init__(self, rig: Rig, model_dir: Path, **options: Any) -> None:
        self.stop = asyncio.Event()
        values = {"model": model_dir, "dtype": "float32", "pool_blocks": 32, "drain_seconds": 5.0, **options}
        self.options = replace(Options(state_dir=rig.paths.state_dir), **values)
        self.task = asyncio.create_task(serve(self.options, self.stop))
        secret = rig.paths.internal_key.read_text().strip()
        self.channel = open_channel(unix_target(rig.paths.decoder_socket(0)), secret)

    async def is_serving(self) -> bool:
        if self.task.done():
            self.task.result()
        return await status_of(self.channel) == SERVING

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, 60)
        await self.channel.close()


def submit_message(grant: bytes, number: int, max_tokens: int) -> decode_pb2.ConnectRequest:
    submit = decode_pb2.Submit(request=number, request_id=f"r{number}", grant=grant, tokens=pack_tokens(range(5, 30)))
    submit.sampling.temperature = 0
    submit.stopping.max_tokens = max_tokens
    submit.stopping.ignore_eos = True
    return decode_pb2.ConnectRequest(submit=submit)


def run(body: Callable[[Rig], Awaitable[None]], **options: Any) -> None:
    async def inside() -> None:
        async with running(**{"pool_blocks": 32, **options}) as rig:
            await body(rig)

    asyncio.run(inside())


def test_it_serves_drains_and_releases(model_dir: Path) -> None:
    """SERVING only when attached; a running request ends well within the drain; then socket and leases are gone."""

    async def body(rig: Rig) -> None:
        served = Served(rig, model_dir)
        await until(served.is_serving, "serving")
        call = decode_pb2_grpc.DecodeServiceStub(served.channel).Connect()
        welcome = (await call.read()).welcome
        assert (welcome.model.name, welcome.model.vocab_size, welcome.model.block_tokens) == ("tiny-1.5b", 512, 16)
        assert (welcome.model.dtype, welcome.model.kv_dtype, list(welcome.eos_token_ids)) == ("float32", "float32", [2])
        assert len(welcome.weights_digest) == 32
        await call.write(submit_message(await rig.grant(), 1, 60))
        first = await call.read()
        assert first.step.tokens
        served.stop.set()
        tokens, ended = len(first.step.tokens), False
        while not ended:
            step = (await call.read()).step
            assert not step.failed
            tokens += sum(len(item.token_ids) for item in step.tokens)
            ended = bool(step.ended)
        assert tokens == 60
        await served.end()
        assert not rig.paths.decoder_socket(0).exists()
        assert await rig.is_quiet()

    run(body)


def test_what_does_not_end_in_time_ends_unavailable(model_dir: Path) -> None:
    """With no time to drain, the rest ends with UNAVAILABLE before the stream closes, and its leases are released."""

    async def body(rig: Rig) -> None:
        served = Served(rig, model_dir, drain_seconds=0.0)
        await until(served.is_serving, "serving")
        call = decode_pb2_grpc.DecodeServiceStub(served.channel).Connect()
        await call.read()
        await call.write(submit_message(await rig.grant(), 1, 400))
        assert (await call.read()).step.tokens
        served.stop.set()
        failed: list[decode_pb2.RequestFailed] = []
        while not failed:
            failed = list((await call.read()).step.failed)
        assert (failed[0].request, failed[0].code) == (1, grpc.StatusCode.UNAVAILABLE.value[0])
        await served.end()
        assert await rig.is_quiet()

    run(body)


def test_health_follows_the_daemon(model_dir: Path) -> None:
    """Without its daemon the decoder is NOT_SERVING within a second, and SERVING again with the next one."""

    async def inside() -> None:
        with tempfile.TemporaryDirectory(prefix="ts-") as folder:
            async with running(state_dir=Path(folder), pool_blocks=32) as rig:
                served = Served(rig, model_dir)
                await until(served.is_serving, "serving")

            async def is_not_serving() -> bool:
                return not await served.is_serving()

            await until(is_not_serving, "not serving", 1.0)
            async with running(state_dir=Path(folder), pool_blocks=32):
                await until(served.is_serving, "serving again", 10.0)
                await served.end()

    asyncio.run(inside())


def test_a_second_decoder_of_an_index_is_refused(model_dir: Path) -> None:
    """It ends with an error that names the option; the first one's socket stays and serves, then and afterwards."""

    async def body(rig: Rig) -> None:
        served = Served(rig, model_dir)
        await until(served.is_serving, "serving")
        with pytest.raises(FailedPrecondition, match="--decoder-index 0"):
            await serve(served.options, asyncio.Event())
        async with open_channel(unix_target(rig.paths.decoder_socket(0))) as channel:
            assert await status_of(channel) == SERVING
        await served.end()
        again = Served(rig, model_dir)
        await until(again.is_serving, "serving again: the lock went with its holder")
        await again.end()

    run(body)


def test_a_deleted_socket_file_comes_back(model_dir: Path) -> None:
    """Whichever of its names is deleted, the decoder can be connected to again, mode 0600; at the end both are gone."""

    async def body(rig: Rig) -> None:
        served = Served(rig, model_dir)
        await until(served.is_serving, "serving")
        path = rig.paths.decoder_socket(0)
        for name in (path, kept_path(path), path):
            name.unlink()

            async def is_back() -> bool:
                async with open_channel(unix_target(path)) as channel:
                    return kept_path(path).exists() and await status_of(channel) == SERVING

            await until(is_back, "connectable again", 10.0)
            assert path.stat().st_mode & 0o777 == 0o600
        await served.end()
        assert not path.exists() and not kept_path(path).exists()

    run(body)


def test_a_decoder_whose_socket_is_lost_ends_with_an_error(model_dir: Path) -> None:
    """Where both names are deleted it drains and raises, so that a supervisor starts it again."""

    async def body(rig: Rig) -> None:
        served = Served(rig, model_dir)
        await until(served.is_serving, "serving")
        call = decode_pb2_grpc.DecodeServiceStub(served.channel).Connect()
        await call.read()
        await call.write(submit_message(await rig.grant(), 1, 60))
        assert (await call.read()).step.tokens
        for name in (rig.paths.decoder_socket(0), kept_path(rig.paths.decoder_socket(0))):
            name.unlink()
        ended = False
        while not ended:
            step = (await call.read()).step
            assert not step.failed
            ended = bool(step.ended)
        with pytest.raises(Unavailable, match="deleted"):
            await asyncio.wait_for(served.task, 60)
        await served.channel.close()
        assert await rig.is_quiet()

    run(body)


def test_a_stop_while_loading_ends_at_once(model_dir: Path) -> None:
    """A stop that comes before the model is there does not wait for it."""

    async def body(rig: Rig) -> None:
        served = Served(rig, model_dir)
        await served.end()
        assert (await rig.snapshot()).sessions == 0

    run(body)


def test_a_model_that_is_missing_is_an_error_by_name(tmp_path: Path) -> None:
    """Without --model, or with one that is not there, `serve` raises what is wrong."""

    async def body(rig: Rig) -> None:
        for path in (None, tmp_path / "nowhere"):
            with pytest.raises(InvalidArgument):
                await serve(replace(Options(state_dir=rig.paths.state_dir), model=path), asyncio.Event())

    run(body)


def test_wrong_options_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A bad value ends with status 2 and names the option."""
    assert main(["--chunk-tokens", "1"]) == 2
    assert "--chunk-tokens" in capsys.readouterr().err


def test_threads_wait_passively_unless_told_otherwise() -> None:
    """The environment is set before the libraries load, and what the operator set stays."""
    environ = {"OMP_WAIT_POLICY": "ACTIVE"}
    set_thread_environment(environ, 3)
    assert environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert environ["OMP_NUM_THREADS"] == environ["NUMBA_NUM_THREADS"] == "3"
    fresh: dict[str, str] = {}
    set_thread_environment(fresh, 0)
    assert PASSIVE_THREADS.items() <= fresh.items()


def test_the_cache_key_is_of_content(model_dir: Path, tmp_path: Path) -> None:
    """A copy of the model under another name has the same key; another tokenizer or other weights another one."""
    copy = tmp_path / "renamed"
    shutil.copytree(model_dir, copy)
    keys = [cache_key(load_model(path, "float32", 16), tokenizer_digest(path)) for path in (model_dir, copy)]
    assert keys[0] == keys[1]
    assert all(len(getattr(keys[0], name)) == 32 for name in ("weights_digest", "tokenizer_digest", "position_digest"))
    with (copy / "tokenizer.json").open("a") as file:
        file.write("\n")
    assert tokenizer_digest(copy) != tokenizer_digest(model_dir)
    other = make_tiny_llama(tmp_path / "other", seed=1)
    assert cache_key(load_model(other, "float32", 16), tokenizer_digest(other)).weights_digest != keys[0].weights_digest
    (copy / "tokenizer.json").unlink()
    assert tokenizer_digest(copy) == b""
