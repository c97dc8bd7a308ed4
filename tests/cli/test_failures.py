"""What a user reads when a call fails: the server's words if it spoke, and otherwise why nobody was reached."""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from cli.__main__ import main
from cli.failures import explain_connection
from cli.node_lock import sole_supervisor
from cli.node_phase import COMPILING, DRAINING, STARTING, tell_phase
from common.errors import InvalidArgument
from common.interceptors import error_status
from common.paths import StatePaths
from tests.cli.support import write_key
from tests.cli.test_clients import Inference, inference

__all__ = ["inference"]
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def ask(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What `tessera generate` says on stderr when it fails without a wait; one line."""
    assert main(["generate", "Hi", "--wait", "0", *flags]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    return line


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate that signs itself, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-keyout", str(key), "-out", str(cert),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return cert, key


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A TLS server without services for the name localhost: its port and its certificate."""
    cert, key = make_certificate(tmp_path, "localhost")
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    pair = (key.read_bytes(), cert.read_bytes())
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        yield port, cert
    finally:
        server.stop(None).wait()


def refusal(field: str, description: str) -> status_pb2.Status:
    """INVALID_ARGUMENT as a service of ours sends it."""
    return error_status(InvalidArgument(field, description))


@pytest.mark.parametrize(
    ("field", "description", "told"),
    [
        ("sampling.top_p", "is 1.5; allowed is a number in (0, 1]", "refused --top-p: is 1.5; allowed"),
        ("stopping.stop[1]", "has 0 bytes; allowed are 1..1024", "refused --stop[1]: has 0 bytes"),
        ("stopping.stop_token_ids", "holds 65 ids", "refused stopping.stop_token_ids: holds 65 ids"),
        (
            "beam.length_penalty",
            "is 1.0; allowed is none without beam.width",
            "--length-penalty: is 1.0; allowed is none w",
        ),
        ("beam.length_penalty", "is 1.0; allowed is none without beam.width", "without --beams"),
        ("adapter", "is no name of an adapter", "refused --adapter: is no name of an adapter"),
        ("chat", "the model has no chat template; send text or token_ids", "`tessera generate --raw`"),
    ],
)
def test_a_refused_field_is_called_by_its_flag(
    field: str, description: str, told: str, inference: Inference, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the user typed is named, and not the field of the message that carried it; words of the sentence stay."""
    inference[0].refuse = refusal(field, description)
    assert told in ask(capsys, *inference[1])


def test_a_message_that_is_too_large_is_told_with_both_sizes(
    inference: Inference, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's own bound on a message becomes a sentence with what was sent and what is allowed."""
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * (17 * 1024 * 1024)))
    assert main(["generate", "-", *inference[1]]) == 1
    told = capsys.readouterr().err
    assert "is too large; one holds at most 16777216 bytes" in told and "message of 178" in told
    assert not inference[0].requests


def test_a_refusal_repeats_no_field(inference: Inference, capsys: pytest.CaptureFixture[str]) -> None:
    """The message has it; other details, such as what is served, follow in brackets."""
    status = status_pb2.Status(code=5, message="the model is not served here")
    status.details.add().Pack(error_details_pb2.ErrorInfo(metadata={"field": "model", "served": "tiny"}))
    inference[0].refuse = status
    assert ask(capsys, *inference[1]).endswith("NOT_FOUND: the model is not served here (served tiny)")


@pytest.mark.parametrize("phase", [STARTING, DRAINING])
def test_a_node_that_starts_or_drains_is_not_called_absent(
    phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While `tessera up` starts or drains its state directory says so, to both clients and before there is a key; what
    a killed one left behind says nothing, nor does it speak for an address that was named."""
    paths = StatePaths(tmp_path)
    paths.prepare()
    state = ("--state-dir", str(tmp_path))
    tell_phase(paths, phase)
    assert f"{phase} (process {os.getpid()})" in ask(capsys, *state)
    for key in (paths.default_key, paths.admin_key):
        write_key(key)
    with socket.socket() as unused, sole_supervisor(paths):
        unused.bind(("127.0.0.1", 0))
        paths.endpoint_file.write_text(f"127.0.0.1:{unused.getsockname()[1]}\n")
        told = ask(capsys, *state)
        assert "nothing answers at 127.0.0.1:" in told and f"is {phase} (process {os.getpid()})" in told
        assert main(["admin", "check", *state]) == 1
        assert f"is {phase}" in capsys.readouterr().err
        assert "tessera up" in ask(capsys, *state, "--endpoint", f"127.0.0.1:{unused.getsockname()[1]}")
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        paths.phase_file.write_text(f"{phase} {gone.pid}\n")
        assert "the gateway of the node" in (said := ask(capsys, *state)) and "is being started again" in said
        tell_phase(paths, None)
        assert not paths.phase_file.exists()


@pytest.mark.parametrize("phase", [STARTING, COMPILING, None])
def test_a_gateway_without_a_decoder_says_what_its_node_does(
    phase: str | None, inference: Inference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the node starts or compiles, its gateway answers already: why there is no decoder is said with its word."""
    paths = StatePaths(tmp_path)
    paths.prepare()
    write_key(paths.default_key)
    tell_phase(paths, phase)
    inference[0].refuse = status_pb2.Status(code=14, message="no decoder is connected")
    inference[0].refuse.details.add().Pack(error_details_pb2.RetryInfo())
    with sole_supervisor(paths):
        paths.endpoint_file.write_text(f"unix:{tmp_path}/g.sock\n")
        said = ask(capsys, "--state-dir", str(tmp_path))
    assert "UNAVAILABLE: no decoder is connected" in said
    assert (f"is {phase} (process {os.getpid()})" in said) is (phase is not None)
    assert ("once per machine" in said) is (phase == COMPILING)


@pytest.mark.parametrize("message", ["no decoder is connected; try again", "cannot connect to the cache manager"])
def test_a_server_that_answered_is_never_called_absent(
    message: str, inference: Inference, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the server says is shown, with the time to try again; nobody is told to start what runs."""
    refusal = status_pb2.Status(code=14, message=message)
    delay = error_details_pb2.RetryInfo()
    delay.retry_delay.FromMilliseconds(1500)
    refusal.details.add().Pack(delay)
    inference[0].refuse = refusal
    said = ask(capsys, *inference[1])
    assert f"UNAVAILABLE: {message}" in said
    assert said.endswith("try again in 1.5 s")
    assert said.count("try again") == 1
    assert "tessera up" not in said
    assert "nothing answers" not in said


def test_a_socket_without_a_voice_is_told_apart_from_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stopped process still has its socket: nobody is told to start it; without a socket they are."""
    key = ["--key-file", str(write_key(tmp_path / "k"))]
    path = str(tmp_path / "mute.sock")
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(path)
        mute.listen(8)
        assert "does not answer; the process there may be stopped" in ask(capsys, "--endpoint", f"unix:{path}", *key)
        assert main(["admin", "snapshot", "--target", f"unix:{path}", *key]) == 1
        assert "does not answer; the process there may be stopped" in capsys.readouterr().err
    assert main(["admin", "snapshot", "--target", f"unix:{tmp_path}/none.sock", *key]) == 1
    assert "the cache manager does not run; `tessera up` starts it" in capsys.readouterr().err
    assert "nothing answers" in ask(capsys, "--endpoint", f"unix:{tmp_path}/none.sock", *key)


@needs_openssl
def test_every_way_to_miss_a_tls_gateway_is_worded(
    secure: tuple[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plaintext to TLS, another authority, another name: each has its own advice; the right authority gets through."""
    port, cert = secure
    key = ["--key-file", str(write_key(tmp_path / "k"))]
    endpoint = ["--endpoint", f"localhost:{port}"]
    other, _ = make_certificate(tmp_path, "other")
    assert "takes no plaintext; if the gateway uses TLS" in ask(capsys, *endpoint, *key)
    assert "is not signed by one in the file of --tls-ca" in ask(capsys, *endpoint, *key, "--tls-ca", str(other))
    assert "UNIMPLEMENTED" in ask(capsys, *endpoint, *key, "--tls-ca", str(cert))
    by_number = ask(capsys, "--endpoint", f"127.0.0.1:{port}", *key, "--tls-ca", str(cert))
    assert "may be for another name" in by_number or "nothing answers" in by_number  # localhost may be IPv6 alone


@needs_openssl
def test_tls_to_plaintext_is_worded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A client with --tls-ca on a plaintext gateway is told to leave it out."""
    cert, _ = make_certificate(tmp_path, "localhost")
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        flags = ["--key-file", str(write_key(tmp_path / "k")), "--tls-ca", str(cert)]
        assert "does not speak TLS; leave --tls-ca out" in ask(capsys, "--endpoint", f"127.0.0.1:{port}", *flags)
    finally:
        server.stop(None).wait()


def test_a_broken_connection_and_a_deadline_are_worded() -> None:
    """A server that ends in the middle, and one that takes too long; texts that are not known stay as they are."""
    code = grpc.StatusCode.UNAVAILABLE
    told = explain_connection(code, "Socket closed", "h:1", "", secure=False)
    assert told == "the connection to h:1 broke off; what was running there has ended"
    late = explain_connection(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "h:1", "", secure=False)
    assert late is not None
    assert "no answer from h:1 in time" in late
    assert explain_connection(code, "draining", "h:1", "", secure=False) is None
    assert explain_connection(grpc.StatusCode.NOT_FOUND, "Socket closed", "h:1", "", secure=False) is None


def test_files_are_named_with_their_option_and_whole_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that the user named is told with its flag and path, and nobody says that something will make it."""
    key = str(write_key(tmp_path / "k"))
    none, folder, text = tmp_path / "none", tmp_path / "folder", tmp_path / "text.pem"
    folder.mkdir()
    text.write_text("no certificate\n", encoding="utf-8")
    for flags, expected in (
        (["--key-file", str(none)], f"--key-file {none}: there is no such file"),
        (["--key-file", str(folder)], f"--key-file {folder}: Is a directory"),
        (["--key-file", key, "--tls-ca", str(none)], f"--tls-ca {none}: No such file or directory"),
        (["--key-file", key, "--tls-ca", str(text)], f"--tls-ca {text}: holds no PEM certificate"),
    ):
        assert ask(capsys, *flags) == f"tessera generate: {expected}"
    assert main(["admin", "check", "--key-file", str(none)]) == 2
    assert capsys.readouterr().err == f"tessera admin: --key-file {none}: there is no such file\n"


def test_a_lost_default_key_can_be_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where tenants are there and the key's file is not, starting the node would not help; another key does."""
    assert "tessera up" in ask(capsys, "--state-dir", str(tmp_path))
    (tmp_path / "tenants.db").touch()
    (paths := StatePaths(tmp_path)).prepare()
    with sole_supervisor(paths):
        paths.endpoint_file.write_text("127.0.0.1:1\n")
        said = ask(capsys, "--state-dir", str(tmp_path))
    assert "tessera admin create-key default" in said
    assert str(tmp_path / "default.key") in said
    assert "tessera up" not in said


def test_the_core_of_grpc_is_silent(tmp_path: Path) -> None:
    """What gRPC's C core logs about a bad connection does not reach the terminal; our one line does."""
    key = write_key(tmp_path / "k")
    command = [sys.executable, "-m", "cli", "generate", "x", "--key-file", str(key), "--endpoint", "127.0.0.1:1"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert len(answer.stderr.splitlines()) == 1
    assert "nothing answers at 127.0.0.1:1" in answer.stderr
