"""The command lines of a node's processes, and the lock that keeps one supervisor to a state directory."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.errors import CommandError
from cli.node import plan_node, unknown_variables, up_parser
from cli.node_lock import SUPERVISOR_LOCK, is_supervised, sole_supervisor
from cli.supervisor import is_healthy
from cli.up import callable_address
from common.config import Options, build_parser, load_options
from common.paths import StatePaths


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path: sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        yield Path(folder)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment of our own with a fetched demo model."""
    models = tmp_path / "cache" / "tessera" / "models"
    models.mkdir(parents=True)
    (models / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    (models / "owner--model").mkdir()
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def child_options(command: tuple[str, ...], environ: dict[str, str]) -> tuple[str, Options]:
    """The service of a child's command line and the options that it would load."""
    service, flags = command[2], list(command[3:])
    return service, load_options(build_parser(service).parse_args(flags), environ)


def test_every_process_gets_the_options_of_up(environ: dict[str, str]) -> None:
    """Flags of `up` reach all processes alike; state directory and model are the same absolute paths in all of them."""
    flags = ["--pool-blocks", "40", "--no-prefix-cache", "--dtype", "float32", "--listen", "127.0.0.1:6000"]
    stages = plan_node(flags, environ).stages()
    loaded = [child_options(spec.command, environ) for stage in stages for spec in stage]
    assert [service for service, _ in loaded] == ["cachemgr", "decoder", "gateway"]
    for _, options in loaded:
        assert (options.pool_blocks, options.prefix_cache, options.dtype) == (40, False, "float32")
        assert options.listen == "127.0.0.1:6000"
        assert options.model is not None
        assert options.model.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
        assert options.model.is_absolute()
        assert options.state_dir == Path(environ["XDG_STATE_HOME"]) / "tessera"


def test_several_decoders_share_the_cores(environ: dict[str, str]) -> None:
    """Each decoder has its own index, socket and share of the cores; a share that was asked for is kept."""
    cores = len(os.sched_getaffinity(0))
    decoders = plan_node(["--decoders", "3"], environ).stages()[1]
    options = [child_options(spec.command, environ)[1] for spec in decoders]
    assert [item.decoder_index for item in options] == [0, 1, 2]
    assert {item.threads for item in options} == {max(1, cores // 3)}
    assert len({spec.health_target for spec in decoders}) == 3
    asked = plan_node(["--decoders", "2", "--threads", "7"], environ).stages()[1]
    assert {child_options(spec.command, environ)[1].threads for spec in asked} == {7}


@pytest.mark.parametrize("index", ["0", "3"])
def test_a_node_numbers_its_decoders_itself(environ: dict[str, str], index: str, tmp_path: Path) -> None:
    """--decoder-index is refused for a whole node, wherever it is said, and not shown in its help."""
    with pytest.raises(CommandError, match=r"--decoder-index .* for `tessera decoder` alone") as refused:
        plan_node(["--decoder-index", index], environ)
    assert refused.value.status == 2
    with pytest.raises(CommandError, match="--decoder-index"):
        plan_node(["--decoders", "4"], {**environ, "TESSERA_DECODER_INDEX": "3"})
    assert "--decoder-index" not in up_parser().format_help()
    assert "--decoder-index" in build_parser("decoder").format_help()
    assert len(plan_node(["--decoders", "4"], environ).stages()[1]) == 4


def test_misspelt_variables_are_found() -> None:
    """Every option, --config and what compose.yaml reads are known; other TESSERA_ names are not."""
    known = {f"TESSERA_{action.dest.upper()}": "x" for action in build_parser("up")._actions}
    assert "TESSERA_PREFIX_CACHE" in known
    more = {"TESSERA_CONFIG": "x", "TESSERA_FAULTS": "", "TESSERA_MODELS": "/m", "HOME": "/"}
    wrong = {"TESSERA_POOL_SIZE": "1G", "TESSERA_NO_PREFIX_CACHE": "true"}
    assert unknown_variables({**known, **more}) == []
    assert unknown_variables({**known, **more, **wrong}) == sorted(wrong)


def test_a_fetched_model_can_be_named(environ: dict[str, str], tmp_path: Path) -> None:
    """--model takes a path, or the name of a fetched model; anything else is refused with status 2."""
    model = plan_node(["--model", "owner/model"], environ).options.model
    assert model is not None
    assert model.name == "owner--model"
    with pytest.raises(CommandError, match="no model at") as refused:
        plan_node(["--model", str(tmp_path / "none")], environ)
    assert refused.value.status == 2
    with pytest.raises(CommandError, match=r"^--draft-model: no model at"):
        plan_node(["--draft-model", str(tmp_path / "none")], environ)


def test_a_state_directory_too_long_for_sockets_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    """A path that no Unix socket fits into is refused before anything starts."""
    with pytest.raises(CommandError, match="too long for a Unix socket"):
        plan_node(["--state-dir", str(tmp_path / ("x" * 120))], environ)


def test_one_supervisor_a_state_directory(tmp_path: Path) -> None:
    """A second `tessera up` on the same state directory is refused; after the first has ended, it is not."""
    paths = StatePaths(tmp_path)
    with sole_supervisor(paths), pytest.raises(CommandError, match="another `tessera up`"), sole_supervisor(paths):
        raise AssertionError("it was let in")
    with sole_supervisor(paths):
        pass


def test_who_looks_for_a_node_keeps_none_from_starting(tmp_path: Path) -> None:
    """A client that holds the lock for a moment to look is waited for; one that looks changes nothing."""
    paths = StatePaths(tmp_path)
    assert not is_supervised(paths) and not list(tmp_path.iterdir())
    with sole_supervisor(paths):
        assert is_supervised(paths)
    with (tmp_path / SUPERVISOR_LOCK).open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not is_supervised(paths), "another client that looks is no node"
        timer = threading.Timer(0.1, fcntl.flock, (looking, fcntl.LOCK_UN))
        timer.start()
        with sole_supervisor(paths):
            assert is_supervised(paths)
        timer.join()


def test_a_state_directory_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    """As on a file system that became read-only: one sentence that names the directory, and no traceback."""
    (tmp_path / SUPERVISOR_LOCK).mkdir()
    with (
        pytest.raises(CommandError, match=f"{tmp_path} cannot be used: Is a directory"),
        sole_supervisor(StatePaths(tmp_path)),
    ):
        raise AssertionError("it was let in")


@pytest.mark.parametrize(
    ("listen", "secure", "expected"),
    [
        ("127.0.0.1:1", False, "127.0.0.1:1"),
        ("0.0.0.0:1", False, "127.0.0.1:1"),
        ("[::]:1", True, "localhost:1"),
        ("node.example:1", True, "node.example:1"),
    ],
)
def test_what_is_printed_can_be_called(listen: str, secure: bool, expected: str) -> None:
    """A listener on every interface is shown under a name that a client on this machine can use."""
    assert callable_address(listen, secure=secure) == expected


def test_a_gateway_behind_tls_is_asked_for_its_port_alone(environ: dict[str, str]) -> None:
    """The supervisor does not speak plain text to a TLS gateway; it waits until its port is open."""
    plain = plan_node([], environ).stages()[2][0]
    secure = plan_node(["--tls-cert", "c.pem", "--tls-key", "k.pem"], environ).stages()[2][0]
    assert (plain.health_target, secure.health_target) == ("127.0.0.1:50051", "tcp:127.0.0.1:50051")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert is_healthy(f"tcp:127.0.0.1:{port}")
    assert not is_healthy(f"tcp:127.0.0.1:{port}")
