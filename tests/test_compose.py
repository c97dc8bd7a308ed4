"""`compose.yaml` held to everything that can be checked without an engine, and its three commands run together."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from common.config import Options, build_parser, load_options
from common.paths import StatePaths
from tests.cli.support import wait_until
from tests.tiny_models import make_tiny_llama

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ("gpu", "cpu")
NAMESPACES = "namespaces"
SERVICES = ("cachemgr", "decoder", "gateway")
NOBODY = 65534
START_SECONDS = 180.0


def substitute(text: str, environ: Mapping[str, str]) -> str:
    """Compose's `${NAME}` and `${NAME:-default}`, nested ones too; an unset name without a default raises."""
    pattern = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^${}]*))?\}")

    def value(match: re.Match[str]) -> str:
        name, default = match.group(1), match.group(2)
        if environ.get(name):
            return environ[name]
        if default is None:
            raise KeyError(f"compose.yaml needs {name}, which is not set and has no default")
        return default

    while pattern.search(text):
        text = pattern.sub(value, text)
    return text


def load_compose(environ: Mapping[str, str]) -> dict[str, Any]:
    """`compose.yaml` with its variables filled in."""
    document: dict[str, Any] = yaml.safe_load(substitute((ROOT / "compose.yaml").read_text(encoding="utf-8"), environ))
    return document


@pytest.fixture
def compose() -> dict[str, Any]:
    """The file as it is for a user who sets nothing."""
    return load_compose({"HOME": "/home/someone"})


def services_of(compose: dict[str, Any], profile: str) -> dict[str, dict[str, Any]]:
    """Service name (without the profile's suffix) -> its definition."""
    chosen = {name: body for name, body in compose["services"].items() if profile in body["profiles"]}
    chosen = {name.removesuffix(f"-{profile}"): body for name, body in chosen.items()}
    return {name: body for name, body in chosen.items() if name != NAMESPACES}


def options_of(body: dict[str, Any]) -> tuple[str, Options]:
    """What the process of a service would load from its command and environment."""
    process, *flags = body["command"]
    return process, load_options(build_parser(process).parse_args(flags), body["environment"])


def seconds_of(duration: str) -> float:
    """A duration of compose, in seconds."""
    match = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", duration)
    if match is None or not duration:
        raise ValueError(f"{duration!r} is no duration that this test knows")
    return 60.0 * int(match.group(1) or 0) + int(match.group(2) or 0)


def mounted(body: dict[str, Any], path: str) -> tuple[str, bool]:
    """Source of the mount that holds `path`, and whether it may be written."""
    for mount in body["volumes"]:
        source, target, *mode = mount.rsplit(":", 2) if mount.endswith((":ro", ":rw")) else mount.rsplit(":", 1)
        if path == target or path.startswith(target + "/"):
            return source, mode != ["ro"]
    raise AssertionError(f"nothing is mounted at {path}")


def test_it_is_valid_under_the_compose_schema(compose: dict[str, Any]) -> None:
    """The file fits the published schema of the compose specification; positive control: a misspelt key does not."""
    vendor = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    validator = jsonschema.validators.validator_for(schema := json.loads(vendor.read_text(encoding="utf-8")))(schema)
    assert [error.message for error in validator.iter_errors(compose)] == []
    compose["services"]["decoder"]["comand"] = []
    assert list(validator.iter_errors(compose))


def test_both_profiles_hold_the_three_services(compose: dict[str, Any]) -> None:
    """Each profile starts one cache manager, one decoder, one gateway and what holds their namespaces, and no service
    runs without a profile."""
    for profile in PROFILES:
        assert tuple(services_of(compose, profile)) == SERVICES
    assert len(compose["services"]) == len(PROFILES) * (len(SERVICES) + 1)


def test_the_profiles_differ_in_the_gpu_alone(compose: dict[str, Any]) -> None:
    """The cpu profile is the gpu profile without its devices and `--device`, apart from the names of services."""
    for service in SERVICES:
        bodies = []
        for profile in PROFILES:
            body = dict(services_of(compose, profile)[service])
            body.pop("deploy", None)
            body.pop("profiles")
            body["command"] = [word for word in body["command"] if word not in ("--device", "cuda")]
            bodies.append(json.loads(json.dumps(body).replace("-cpu", "")))
        assert bodies[0] == bodies[1]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_command_line_is_accepted_by_our_parsers(compose: dict[str, Any], profile: str) -> None:
    """Each service runs the process of its name with options that this process takes."""
    for name, body in services_of(compose, profile).items():
        process, options = options_of(body)
        assert process == name
        assert options.state_dir == Path("/var/lib/tessera")
        assert options.model is not None


@pytest.mark.parametrize("profile", PROFILES)
def test_every_variable_is_one_that_somebody_reads(compose: dict[str, Any], profile: str) -> None:
    """No misspelt TESSERA_ variable: each one changes what is loaded."""
    for body in services_of(compose, profile).values():
        process, *flags = body["command"]
        for name in [key for key in body["environment"] if key.startswith("TESSERA_")]:
            changed = dict(body["environment"], **{name: "1"})
            parsed = build_parser(process).parse_args(flags)
            before, after = load_options(parsed, body["environment"]), load_options(parsed, changed)
            assert before != after, name


@pytest.mark.parametrize("profile", PROFILES)
def test_sockets_volumes_and_health_checks_agree(compose: dict[str, Any], profile: str) -> None:
    """All three share one writable volume for their sockets, and each health check asks where its service listens."""
    services = services_of(compose, profile)
    loaded = {name: options_of(body)[1] for name, body in services.items()}
    paths = {name: StatePaths(options.state_dir) for name, options in loaded.items()}
    expected = {
        "cachemgr": f"unix:{paths['cachemgr'].cachemgr_socket}",
        "decoder": f"unix:{paths['decoder'].decoder_socket(loaded['decoder'].decoder_index)}",
        "gateway": f"127.0.0.1:{loaded['gateway'].listen.rpartition(':')[2]}",
    }
    for name, body in services.items():
        assert body["healthcheck"]["test"] == ["CMD", "tessera", "probe", "--target", expected[name]]
        assert mounted(body, str(paths[name].run_dir)) == ("state", True)
        assert mounted(body, str(loaded[name].model)) == ("/home/someone/.cache/tessera/models", False)
        assert mounted(body, body["environment"]["NUMBA_CACHE_DIR"])[1]
        assert mounted(body, str(loaded[name].weights_cache))[1]
    assert len({options.state_dir for options in loaded.values()}) == 1
    assert len({options.decoders for options in loaded.values()}) == 1
    assert "state" in compose["volumes"]


@pytest.mark.parametrize(("profile", "device"), [("gpu", "cuda"), ("cpu", "cpu")])
def test_daemon_and_decoder_are_on_the_same_device(compose: dict[str, Any], profile: str, device: str) -> None:
    """Both map the one GPU that they are given, or both none."""
    services = services_of(compose, profile)
    assert {options_of(services[name])[1].device for name in ("cachemgr", "decoder")} == {device}


@pytest.mark.parametrize("profile", PROFILES)
def test_stop_grace_is_longer_than_the_drain(compose: dict[str, Any], profile: str) -> None:
    """The engine kills nobody who is still draining."""
    for body in services_of(compose, profile).values():
        assert seconds_of(body["stop_grace_period"]) > options_of(body)[1].drain_seconds + 10


@pytest.mark.parametrize("profile", PROFILES)
def test_decoder_and_daemon_share_namespaces_that_outlive_both(compose: dict[str, Any], profile: str) -> None:
    """IPC and PID namespaces are those of a service that does nothing else, holds no secret and no file of ours and
    cannot die of ours; each service waits until the one before is healthy, and no decoder restarts with the daemon."""
    services = services_of(compose, profile)
    suffix = "" if profile == "gpu" else f"-{profile}"
    holder = compose["services"][f"{NAMESPACES}{suffix}"]
    assert holder["entrypoint"] == ["sleep", "infinity"]
    assert holder["ipc"] == "shareable"
    assert holder["init"], "process 1 reaps what the others leave"
    assert not holder["volumes"]
    assert not holder["environment"]
    assert "deploy" not in holder
    for name in ("cachemgr", "decoder"):
        assert services[name]["ipc"] == services[name]["pid"] == f"service:{NAMESPACES}{suffix}"
        assert services[name]["depends_on"][f"{NAMESPACES}{suffix}"] == {
            "condition": "service_started",
            "restart": True,
        }
        assert "init" not in services[name], "process 1 is that of the shared namespace"
    assert services["decoder"]["depends_on"][f"cachemgr{suffix}"] == {"condition": "service_healthy"}
    assert services["gateway"]["depends_on"][f"decoder{suffix}"]["condition"] == "service_healthy"


def test_daemon_and_decoder_reserve_the_same_gpu(compose: dict[str, Any]) -> None:
    """The daemon exports memory of exactly the devices that the decoder computes on; the gateway has none."""
    services = services_of(compose, "gpu")
    devices = [services[name]["deploy"]["resources"]["reservations"]["devices"] for name in ("cachemgr", "decoder")]
    assert devices[0] == devices[1]
    assert devices[0][0]["capabilities"] == ["gpu"]
    assert devices[0][0]["driver"] == "nvidia"
    assert "deploy" not in services["gateway"]
    assert all("deploy" not in body for body in services_of(compose, "cpu").values())


@pytest.mark.parametrize("profile", PROFILES)
def test_services_run_with_as_few_rights_as_they_can(compose: dict[str, Any], profile: str) -> None:
    """Not root, no capability, a read-only root, no network but the gateway's, and that on the loopback alone."""
    services = services_of(compose, profile)
    for name, body in services.items():
        user, group = map(int, body["user"].split(":"))
        assert user > 0 < group
        assert body["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in body["security_opt"]
        assert body["read_only"] is True
        assert "privileged" not in body
        assert body.get("network_mode") == (None if name == "gateway" else "none")
    assert services["gateway"]["ports"] == ["127.0.0.1:50051:50051"]
    assert len({body["user"] for body in services.values()}) == 1, "the daemon's sockets are for its own user"


def test_the_image_runs_as_the_user_of_the_compose_file(compose: dict[str, Any]) -> None:
    """The image makes the user, owns the state folder with it, and runs `tessera`."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    user = compose["services"]["cachemgr"]["user"]
    number = user.partition(":")[0]
    assert f"USER {user}" in text
    assert f"--owner {number} --group {number} --mode 0700 /var/lib/tessera" in text
    assert 'ENTRYPOINT ["tessera"]' in text


def test_the_image_gets_every_package_that_is_installed() -> None:
    """What pyproject packages is let through .dockerignore, and secrets and builds are not."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line.removeprefix("!").removesuffix("/**") for line in lines if line.startswith("!")}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages <= allowed
    assert allowed - packages == {"pyproject.toml", "constraints.txt", "README.md"}
    assert "*" in lines


@contextlib.contextmanager
def ordinary_user_folder() -> Iterator[tuple[Path, Callable[..., subprocess.Popen[bytes]]]]:
    """A folder of an ordinary user, and a way to start a process as that user (as ourselves where we are no root)."""
    with tempfile.TemporaryDirectory(prefix="tessera-compose-") as name:
        folder = Path(name)
        if os.geteuid() != 0:
            yield folder, subprocess.Popen
            return
        os.chown(folder, NOBODY, NOBODY)
        wrapper = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--bounding-set=-all"]
        if not reachable_by_others(Path(sys.executable).resolve()):
            # A Python in root's home: lend the one right to read it. Writing stays that of an ordinary user.
            wrapper[-1] = "--bounding-set=-all,+dac_read_search"
            wrapper += ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]

        def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            return subprocess.Popen([*wrapper, *command], **options)

        yield folder, start


def reachable_by_others(path: Path) -> bool:
    """Whether an ordinary user can get at `path`."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in [path, *path.parents] if folder.is_dir())


def free_port() -> int:
    """A free TCP port of the loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_three_commands_come_up_together_as_an_ordinary_user(compose: dict[str, Any]) -> None:
    """The commands and variables of the cpu profile, run here by an ordinary user, become healthy by their own checks.

    Only places differ: the state directory, the model and the public port. Afterwards SIGTERM ends each with status 0.
    """
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is needed to become an ordinary user")
    services, port = services_of(compose, "cpu"), free_port()
    with ordinary_user_folder() as (folder, start), contextlib.ExitStack() as cleanup:
        model = make_tiny_llama(folder / "model")
        for path in [model, *model.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        moved = [
            ("/var/lib/tessera", str(folder / "state")),
            (compose["x-environment"]["TESSERA_MODEL"], str(model)),
            ("0.0.0.0:50051", f"127.0.0.1:{port}"),
            ("127.0.0.1:50051", f"127.0.0.1:{port}"),
        ]
        here = {name: json.loads(_replaced(json.dumps(body), moved)) for name, body in services.items()}
        running: dict[str, subprocess.Popen[bytes]] = {}
        cleanup.callback(lambda: kill_all(running.values()))
        logs = {name: (folder / f"{name}.log") for name in here}
        for name, body in here.items():
            environ = {**{k: os.environ[k] for k in ("PATH", "LANG") if k in os.environ}, **body["environment"]}
            environ |= {"TESSERA_POOL_BYTES": "64M", "PYTHONPATH": str(ROOT), "HOME": str(folder)}
            log = cleanup.enter_context(logs[name].open("wb"))
            command = [sys.executable, "-m", "cli", *body["command"]]
            running[name] = start(command, env=environ, cwd=folder, stdout=log, stderr=log)
            check = [sys.executable, "-m", "cli", *body["healthcheck"]["test"][2:]]

            def healthy(check: list[str] = check, environ: dict[str, str] = environ) -> bool:
                ended = [key for key, process in running.items() if process.poll() is not None]
                if ended:
                    raise AssertionError(f"{ended[0]} ended:\n{logs[ended[0]].read_text(errors='replace')[-3000:]}")
                return start(check, env=environ, cwd=folder, stderr=subprocess.DEVNULL).wait(30) == 0

            what = f"{name} is healthy:\n{logs[name].read_text(errors='replace')[-3000:]}"
            wait_until(healthy, what, START_SECONDS, interval=1.0)  # each check is a process
        assert {owner_of(process.pid) for process in running.values()} == {
            NOBODY if os.geteuid() == 0 else os.geteuid()
        }
        for name in reversed(SERVICES):
            running[name].terminate()
            assert running[name].wait(60) == 0, logs[name].read_text(errors="replace")[-3000:]


def kill_all(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Leave nothing behind, whatever the test did."""
    for process in processes:
        process.kill()
        process.wait()


def owner_of(pid: int) -> int:
    """Effective user of a process."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(next(line for line in text.splitlines() if line.startswith("Uid:")).split()[2])


def _replaced(text: str, pairs: list[tuple[str, str]]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text


def test_substitution_is_that_of_compose() -> None:
    """Set, default, nested and missing variables."""
    assert substitute("a ${X:-b} ${Y:-${Z}/c}", {"Z": "z"}) == "a b z/c"
    assert substitute("${X:-b}", {"X": "x"}) == "x"
    with pytest.raises(KeyError, match="needs X"):
        substitute("${X}", {})


def test_docker_itself_accepts_the_file() -> None:
    """Where the compose plug-in is installed, it accepts the file for both profiles."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    for profile in PROFILES:
        command = [docker, "compose", "--profile", profile, "config", "--quiet"]
        assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
