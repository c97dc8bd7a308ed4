"""Start, listen, drain and end of a gateway, in this process and as a process of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

from common.addresses import is_local
from common.errors import FailedPrecondition
from common.rpc import open_channel
from gateway.__main__ import main
from gateway.application import listener_credentials
from tests.gateway.support import async_test, collect, details_of, eventually, make_options, node, request
from tests.tiny_models import make_tiny_llama

ROOT = Path(__file__).resolve().parents[2]


@async_test
async def test_a_drain_lets_running_requests_end() -> None:
    """While draining health is NOT_SERVING and new requests are refused; a running stream comes to its own end."""
    async with node(drain_seconds=30.0) as here, here.channel() as channel:
        here.decoder.step_gate = lambda: asyncio.sleep(0.002)
        stub = here.stub(channel)
        running = asyncio.create_task(collect(stub.Generate(request(max_tokens=200))))
        await eventually(lambda: here.decoder.produced > 0)
        stopping = asyncio.create_task(here.gateway.stop())
        await eventually(lambda: not here.gateway.is_serving)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(request()))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(caught.value, error_details_pb2.ErrorInfo).reason == "DRAINING"
        assert len((await running).token_ids()) == 200
        await stopping


@async_test
async def test_after_the_drain_the_rest_is_unavailable_and_ends_at_the_decoder() -> None:
    """A request that outlives the drain ends with UNAVAILABLE, not CANCELLED, and the decoder hears of it."""
    async with node(drain_seconds=0.1) as here, here.channel() as channel:
        here.decoder.step_gate = lambda: asyncio.sleep(0.01)
        call = here.stub(channel).Generate(request(max_tokens=3000))
        await call.read()
        stopping = asyncio.create_task(here.gateway.stop())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(caught.value, error_details_pb2.ErrorInfo).reason == "DRAINING"
        await stopping
        assert (1, None) in here.decoder.cancelled


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/tmp/x", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("example.org:1", False),
    ],
)
def test_plaintext_beyond_loopback_needs_a_flag(tmp_path: Path, address: str, local: bool) -> None:
    """A plaintext listener that others could reach is refused unless it was asked for by name."""
    assert is_local(address) is local
    if local:
        assert listener_credentials(make_options(tmp_path, listen=address)) is None
    else:
        with pytest.raises(FailedPrecondition, match="--insecure-listen"):
            listener_credentials(make_options(tmp_path, listen=address))
        assert listener_credentials(make_options(tmp_path, listen=address, insecure_listen=True)) is None


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999"])
def test_a_broken_address_is_refused(address: str) -> None:
    """An address without a port number is named as such."""
    with pytest.raises(ValueError, match=r"is no address|outside"):
        is_local(address)


def test_unreadable_tls_files_are_refused(tmp_path: Path) -> None:
    """TLS that was asked for never falls back to plaintext."""
    options = make_options(tmp_path, tls_cert=tmp_path / "c.pem", tls_key=tmp_path / "k.pem")
    with pytest.raises(FailedPrecondition, match=r"--tls-key: .*k\.pem cannot be read"):
        listener_credentials(options)
    (tmp_path / "k.pem").write_text("")
    with pytest.raises(FailedPrecondition, match=r"--tls-cert: .*c\.pem cannot be read"):
        listener_credentials(options)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate of this test")
@async_test
async def test_a_listener_with_a_certificate_speaks_tls_alone(tmp_path: Path) -> None:
    """With a certificate a client that trusts it is served, and a plaintext client is not."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    async with node(tls_cert=cert, tls_key=key) as here:
        trusted = grpc.ssl_channel_credentials(cert.read_bytes())
        async with open_channel(f"localhost:{here.gateway.port}", "key-a", trusted) as channel:
            assert (await collect(here.stub(channel).Generate(request()))).kinds[-1] == "summary"
        async with here.channel() as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await collect(here.stub(channel).Generate(request(), timeout=5.0))


def test_bad_options_end_with_status_two(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No model, and a model that is not there, are usage errors with a message."""
    assert main([], {}) == 2
    assert "--model" in capsys.readouterr().err
    assert main(["--model", str(tmp_path / "absent")], {}) == 2
    assert "absent" in capsys.readouterr().err


def test_the_gateway_imports_neither_torch_nor_numba() -> None:
    """Importing the whole gateway brings in no compute library."""
    check = "import gateway.__main__, sys; print([m for m in ('torch', 'numba', 'transformers') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_the_process_serves_and_leaves_with_zero_on_sigterm(tmp_path: Path) -> None:
    """`python -m gateway` listens, serves a request, drains on SIGTERM and exits 0."""
    model = make_tiny_llama(tmp_path / "model", layers=1, hidden=16, heads=1, kv_heads=1)

    @async_test
    async def scenario() -> None:
        async with node() as here:
            command = [
                sys.executable, "-m", "gateway", "--model", str(model), "--state-dir", str(here.state_dir),
                "--listen", f"unix:{here.state_dir}/public.sock", "--drain-seconds", "1",
            ]  # fmt: skip
            environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
            process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environ, stderr=subprocess.PIPE)
            try:
                await eventually(lambda: here.decoder.connections == 2, seconds=30.0)
                target = f"unix:{here.state_dir}/public.sock"
                async with grpc.aio.insecure_channel(target) as channel:
                    call = here.stub(channel).Generate(request(), metadata=(("authorization", "Bearer key-a"),))
                    assert (await collect(call)).kinds[-1] == "summary"
                process.send_signal(signal.SIGTERM)
                _, errors = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            assert process.returncode == 0
            log = errors.decode()
            assert "gateway_listening" in log
            assert "gateway_stopped" in log
            for secret in ("key-a", "internal_test_secret", "grant of", "hello world", str(here.state_dir) + "/run"):
                assert secret not in log

    scenario()
