"""`python -m cachemgr` as a real process: first start, second start, refusals, signals."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.paths import StatePaths
from common.rpc import bearer_metadata, unix_target
from tessera.admin.v1 import admin_pb2, admin_pb2_grpc
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc
from tests.cachemgr.daemon_rig import attach_request
from tests.cachemgr.rig import DEADLINE_SECONDS, ROOT

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def state():
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        yield StatePaths(Path(folder) / "s")


def command(state, *extra):
    return [sys.executable, "-m", "cachemgr", "--state-dir", str(state.state_dir), *extra]


@contextlib.contextmanager
def daemon(state, *extra, terminal=False):
    """A running daemon that says SERVING, and the file its stderr goes to; killed at the end if it is still there."""
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        stderr = stack.enter_context(terminal_onto(log)) if terminal else log
        process = stack.enter_context(subprocess.Popen(command(state, *extra), cwd=ROOT, stderr=stderr))
        try:
            wait_until(lambda: process.poll() is not None or is_serving(state.cachemgr_socket))
            yield process, log
        finally:
            if process.poll() is None:
                process.kill()


@contextlib.contextmanager
def terminal_onto(log):
    """A terminal's fd; what is written to it goes to `log`, all of it before the context ends."""
    ours, theirs = os.openpty()

    def copy():
        with contextlib.suppress(OSError):  # the terminal says EIO when its last writer has gone
            while data := os.read(ours, 4096):
                log.write(data)
                log.flush()

    copying = threading.Thread(target=copy)
    copying.start()
    try:
        yield theirs
    finally:
        os.close(theirs)
        copying.join(DEADLINE_SECONDS)
        os.close(ours)


def is_serving(path):
    if not path.exists():
        return False
    with grpc.insecure_channel(unix_target(path)) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return False
        return answer.status == SERVING


def wait_until(check):
    end = time.monotonic() + DEADLINE_SECONDS
    while not check():
        assert time.monotonic() < end, "the state did not come about"
        time.sleep(0.02)


def text_of(log):
    """What was written so far, without moving the position that the writer shares."""
    return os.pread(log.fileno(), 1 << 20, 0).decode()


def refused(state, *extra):
    """What a start that must fail writes."""
    done = subprocess.run(command(state, *extra), cwd=ROOT, capture_output=True, timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode in (1, 2)
    return done.stderr.decode()


def snapshot(state):
    metadata = bearer_metadata(state.admin_key.read_text().strip())
    with grpc.insecure_channel(unix_target(state.admin_socket)) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        return stub.GetSnapshot(admin_pb2.GetSnapshotRequest(), metadata=metadata, timeout=10)


def test_first_start_makes_everything_private_and_shows_the_key_once(state):
    """Keys, database and sockets are for the owner alone; a terminal shows the key at the first start, no file does."""
    with daemon(state, terminal=True) as (process, log):
        assert is_serving(state.admin_socket)
        assert snapshot(state).epoch == 1
        key = state.default_key.read_text().strip()
        for path in (state.default_key, state.admin_key, state.internal_key, state.tenants_db):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
        for path in (state.cachemgr_socket, state.admin_socket, state.arena_socket):
            assert stat.S_ISSOCK(path.stat().st_mode)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
        for path in (state.state_dir, state.run_dir):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 0
        wait_until(lambda: key in text_of(log))
        written = text_of(log)
    assert written.count(key) == 1
    written = written.replace(key, "")
    for secret in (state.admin_key, state.internal_key):
        assert secret.read_text().strip() not in written
    with daemon(state, terminal=True) as (process, log):
        assert snapshot(state).epoch == 2
        assert state.default_key.read_text().strip() == key
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_SECONDS) == 0
        assert key not in text_of(log)


def test_log_file_keeps_no_key(state):
    """Where stderr is no terminal, not even the first start writes the default key."""
    with daemon(state) as (process, log):
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 0
        written = text_of(log)
    assert "service_ready" in written
    assert state.default_key.read_text().strip() not in written


def test_second_daemon_on_the_state_directory_is_refused_and_harms_nothing(state):
    """The lock keeps a second daemon out; the first goes on serving on its own sockets."""
    with daemon(state) as (process, _):
        assert "another cache manager" in refused(state)
        assert process.poll() is None
        assert snapshot(state).epoch == 1
        assert is_serving(state.cachemgr_socket)


def test_killed_daemon_leaves_nothing_in_the_way(state):
    """After kill -9 the sockets and the lock that are left behind do not hinder the next start."""
    with daemon(state) as (process, _):
        process.kill()
        process.wait(DEADLINE_SECONDS)
    assert state.arena_socket.exists()
    with daemon(state) as (process, _):
        assert snapshot(state).epoch == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 0
    assert not state.arena_socket.exists()


@pytest.mark.parametrize("name", ["cachemgr_socket", "admin_socket"])
def test_deleted_socket_comes_back(state, name):
    """A socket file that somebody deletes is connectable again while the daemon lives."""
    with daemon(state) as (process, log):
        path = getattr(state, name)
        path.unlink()
        wait_until(lambda: is_serving(path))
        state.arena_socket.unlink()
        wait_until(state.arena_socket.is_socket)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        wait_until(lambda: text_of(log).count("socket_restored") == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 0
    assert [file for file in state.run_dir.iterdir() if file.is_socket()] == []


def test_lost_sockets_leave_the_cache_alive(state):
    """With every file of the run folder deleted the daemon says so once for each socket, and lives on."""
    with daemon(state) as (process, log):
        for file in state.run_dir.iterdir():
            file.unlink()
        wait_until(lambda: text_of(log).count("socket_lost") == 4)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 0


def test_files_that_others_can_read_end_the_start(state):
    """A credential or database with a mode wider than 0600 is refused by its name; narrowed again it serves."""
    with daemon(state) as (process, _):
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_SECONDS)
    for path in (state.default_key, state.admin_key, state.internal_key, state.tenants_db):
        path.chmod(0o644)
        message = refused(state)
        assert path.name in message
        assert "0644" in message
        path.chmod(0o600)
    with daemon(state) as (process, _):
        assert process.poll() is None


def test_socket_path_that_holds_a_file_is_left_alone(state):
    """A plain file where a socket should be ends the start and is not deleted."""
    state.prepare()
    state.arena_socket.write_text("mine")
    assert "arena.sock" in refused(state)
    assert state.arena_socket.read_text() == "mine"


def test_state_directory_that_is_a_file_is_refused_in_one_line(state):
    """The message names the option and the path; there is no traceback."""
    path = StatePaths(state.state_dir / "file")
    state.prepare()
    path.state_dir.write_text("")
    message = refused(path)
    assert f"--state-dir {path.state_dir}" in message
    assert "Traceback" not in message


def test_lost_default_key_is_warned_of(state):
    """A start on a database whose default.key is gone names the way to another key; with the file it says nothing."""
    for lost in (False, True):
        if lost:
            state.default_key.unlink()
        for _ in range(2 if not lost else 1):
            with daemon(state) as (process, log):
                process.send_signal(signal.SIGTERM)
                assert process.wait(DEADLINE_SECONDS) == 0
                assert ("tessera admin create-key default" in text_of(log)) is lost


def test_key_file_of_an_interrupted_first_start_is_adopted(state):
    """A default.key that no database knows becomes the default tenant's key; garbage in it is refused."""
    state.prepare()
    key = "tsr_0123456789abcdef_" + "A" * 43
    state.default_key.write_text("no key")
    state.default_key.chmod(0o600)
    assert "default key" in refused(state)
    state.default_key.write_text(key)
    with daemon(state) as (_, log):
        assert is_serving(state.cachemgr_socket)
        assert key not in text_of(log)
    assert state.default_key.read_text() == key


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (("--admin-listen", "0.0.0.0:50052"), "loopback"),
        (("--pool-blocks", "1"), "--pool-blocks"),
        (("--fault", "poison_on_free=1"), "--test-faults"),
    ],
)
def test_unsafe_or_impossible_options_end_the_start_clearly(state, extra, text):
    """The message names the option."""
    assert text in refused(state, *extra)


def test_too_long_state_directory_is_refused_with_numbers(state):
    """A path that no Unix socket can have ends the start before anything is made."""
    long = StatePaths(state.state_dir / ("x" * 100))
    message = refused(long)
    assert "107" in message
    assert not long.state_dir.exists()


def test_sigterm_says_not_serving_and_ends_in_time_with_a_decoder_attached(state):
    """With an idle stream open the daemon still ends with status 0, and the stream ends with UNAVAILABLE."""
    import queue

    with daemon(state) as (process, _), grpc.insecure_channel(unix_target(state.cachemgr_socket)) as channel:
        outgoing: queue.Queue = queue.Queue()
        call = cache_pb2_grpc.CacheServiceStub(channel).Session(
            iter(outgoing.get, None), metadata=bearer_metadata(state.internal_key.read_text().strip())
        )
        outgoing.put(cache_pb2.SessionRequest(sequence=1, attach=attach_request()))
        assert next(call).attach.session_id
        process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert process.wait(DEADLINE_SECONDS) == 0
        outgoing.put(None)
    assert not is_serving(state.cachemgr_socket)


def test_flood_of_connections_under_a_small_fd_limit_is_survived(state):
    """With 64 fds and 200 open connections nobody may get in; when they are gone the daemon serves as before."""
    limited = ["sh", "-c", 'ulimit -n 64; exec "$0" "$@"', *command(state)]
    with subprocess.Popen(limited, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: is_serving(state.admin_socket))
            before = len(os.listdir(f"/proc/{process.pid}/fd"))
            links = []
            for number in range(200):
                link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                links.append(link)
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    path = (state.arena_socket, state.cachemgr_socket, state.admin_socket)[number % 3]
                    link.connect(os.fspath(path))
            wait_until(lambda: len(os.listdir(f"/proc/{process.pid}/fd")) >= 60)
            for link in links:
                link.close()
            wait_until(lambda: is_serving(state.cachemgr_socket) and is_serving(state.admin_socket))
            assert snapshot(state).epoch == 1
            wait_until(lambda: len(os.listdir(f"/proc/{process.pid}/fd")) <= before + 4)
            assert process.poll() is None
        finally:
            process.kill()


def test_daemon_imports_no_model_or_kernel_library():
    """The daemon is up at once because it loads neither torch nor numba."""
    source = "import sys, cachemgr.__main__; print([n for n in ('torch', 'numba', 'tokenizers') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"


def test_lock_is_held_by_the_process_and_not_by_the_file(state):
    """A lock file without a holder is no obstacle."""
    state.prepare()
    state.lock_file.touch()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(os.fspath(state.cachemgr_socket))
    stale.close()
    with daemon(state):
        assert is_serving(state.cachemgr_socket)
