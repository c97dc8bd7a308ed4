"""`tessera up` for real: three processes, the clients of the first page against them, and a clean end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.client import Numbers
from cli.demo import describe_results, free_port
from common.paths import StatePaths
from tests.cli.support import wait_until
from tests.cli.test_supervisor import is_gone
from tests.test_readme import api_examples, readme_client, run_client
from tests.tiny_models import make_tiny_llama

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240.0


class RunningNode:
    """A `tessera up` in its own home, so that every default of the clients applies."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.state = home / ".local" / "state" / "tessera"
        self.listen = f"127.0.0.1:{free_port()}"
        self.output = home / "up.out"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TESSERA_", "XDG_"))}
        self.environ = {**kept, "HOME": str(home), "PYTHONPATH": str(ROOT)}
        model = make_tiny_llama(home / "model")
        options = ["--model", str(model), "--listen", self.listen, "--pool-blocks", "64", "--dtype", "float32"]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cli", "up", *options], env=self.environ, stdout=output, stderr=output
            )

    def text(self) -> str:
        """What it has said."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def pids(self) -> dict[str, int]:
        """Name -> process id, as it printed them."""
        match = re.search(r"processes +(.*)", self.text())
        return {} if match is None else {n: int(p) for n, p in re.findall(r"([\w-]+) (\d+)", match.group(1))}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A `tessera` command in the same home."""
        command = [sys.executable, "-m", "cli", *arguments]
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, check=False, timeout=120)

    def wait_ready(self) -> None:
        """Until it says that it is ready."""

        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"it ended:\n{self.text()}")
            return "Ctrl-C drains" in self.text()

        phase = StatePaths(self.state).phase_file
        wait_until(phase.exists, "the node says that it starts", START_SECONDS)
        assert phase.read_text() == f"starting {self.process.pid}\n"
        wait_until(ready, "the node is ready", START_SECONDS)
        assert not phase.exists()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """One node for the tests of this file; the last of them stops it."""
    made = RunningNode(tmp_path_factory.mktemp("home"))
    try:
        made.wait_ready()
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def test_it_says_where_it_is_and_how_to_call_it(node: RunningNode) -> None:
    """Addresses, key files, process ids, a grpcurl line and a Python client are printed; into a file the key is not."""
    said = node.text()
    key = (node.state / "default.key").read_text(encoding="utf-8").strip()
    assert set(node.pids()) == {"cachemgr", "decoder-0", "gateway"}
    for expected in (node.listen, str(node.state / "default.key"), "grpcurl -plaintext", "tessera.inference.v1"):
        assert expected in said
    assert key not in said
    logs = "".join(path.read_text(encoding="utf-8") for path in (node.state / "logs").glob("*.log"))
    assert logs
    assert key not in logs


def test_the_client_of_the_first_page_works_on_a_real_node(node: RunningNode) -> None:
    """The Python client of the README streams text from the node, and its second run finds its prompt in the cache."""
    script = readme_client(node.home, node.listen)
    first, second = run_client(script, node.home), run_client(script, node.home)
    assert first.returncode == 0, first.stderr
    assert "completion_tokens" in first.stdout
    assert "cached_tokens" not in first.stdout  # zero is not printed
    assert "cached_tokens" in second.stdout


def test_the_examples_of_the_pages_work_on_a_real_node(node: RunningNode) -> None:
    """Those of docs/api.md, each as it stands: an answer of a given form, wider scopes, conversations that are kept."""
    assert node.run("admin", "groups", "create", "team", "default").returncode == 0
    said = []
    for script in api_examples(node.home, node.listen):
        answer = run_client(script, node.home)
        assert answer.returncode == 0, f"{script.read_text()}\n{answer.stderr}"
        said.append(answer.stdout)
    assert said[0].startswith("{") and all(said)
    prefixes = json.loads(node.run("admin", "prefixes", "--json").stdout)
    assert "@group" in {prefix["tenant"].partition(":")[0] for prefix in prefixes}
    kept = [branch["branch"] for branch in json.loads(node.run("admin", "branches", "--json").stdout)]
    assert kept, "conversations are kept"
    refused = node.run("admin", "evict", "--all")
    assert refused.returncode == 1 and "drop-branch" in refused.stderr
    for branch in kept:
        dropped = node.run("admin", "drop-branch", str(branch))
        assert dropped.returncode == 0, dropped.stderr
    assert json.loads(node.run("admin", "branches", "--json").stdout) == []


def test_the_printed_python_client_works(node: RunningNode) -> None:
    """The lines that `up` prints are a program that runs."""
    block = node.text().split("\nin Python\n", 1)[1].split("\n\n", 1)[0]
    source = "\n".join(line.removeprefix("  ") for line in block.splitlines())
    answer = subprocess.run(
        [sys.executable, "-c", source], env=node.environ, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout


def test_generate_and_admin_agree(node: RunningNode) -> None:
    """`generate` finds its own prompt again, the admin commands see it, and everything is whole afterwards."""
    prompt = "The quick brown fox jumps over the lazy dog. " * 4
    flags = ["--max-tokens", "4"]  # and nothing of where it listens: the state directory says it
    texts = []
    for _ in range(2):
        answer = node.run("generate", prompt, *flags)
        assert answer.returncode == 0, answer.stderr
        texts.append(answer.stdout)
    assert texts[0] == texts[1]
    match = re.search(r"(\d+) prompt tokens, (\d+) of them cached", answer.stderr)
    assert match is not None
    assert 0 < int(match.group(2)) < int(match.group(1))
    snapshot = json.loads(node.run("admin", "snapshot", "--json").stdout)
    assert snapshot["sessions"] == 1
    assert snapshot["hits"] >= 1
    assert node.run("admin", "check").returncode == 0
    for command in ("blocks", "prefixes", "leases", "sessions", "tenants"):
        listed = node.run("admin", command, "--json")
        assert listed.returncode == 0, listed.stderr
        json.loads(listed.stdout)
    evicted = node.run("admin", "evict", "--all")
    assert evicted.returncode == 0, evicted.stderr
    assert "0 remain in the index" in evicted.stdout


def test_a_second_node_on_the_same_state_is_refused(node: RunningNode) -> None:
    """Another `tessera up` on this state directory ends at once and says why; the first goes on."""
    answer = node.run("up", "--model", str(node.home / "model"))
    assert answer.returncode == 1
    assert "another `tessera up`" in answer.stderr
    assert node.process.poll() is None


def test_a_second_node_on_the_same_port_is_refused(node: RunningNode, tmp_path: Path) -> None:
    """A node with a state of its own on a port that is taken ends at once and never calls itself ready."""
    flags = ["--model", str(node.home / "model"), "--state-dir", str(tmp_path / "s"), "--listen", node.listen]
    answer = node.run("up", *flags)
    assert answer.returncode == 1
    assert f"{node.listen} is in use by another process; stop it, or choose another --listen" in answer.stderr
    assert "ready" not in answer.stdout + answer.stderr
    assert node.run("probe", "--target", node.listen).returncode == 0


def test_probe_sees_every_process(node: RunningNode) -> None:
    """The health checks of the containers answer for all three."""
    sockets = [f"unix:{node.state}/run/cachemgr.sock", f"unix:{node.state}/run/decoder-0.sock"]
    for target in (*sockets, node.listen):
        assert node.run("probe", "--target", target, "--timeout", "5").returncode == 0, target


def test_ctrl_c_drains_and_ends_everything(node: RunningNode) -> None:
    """SIGINT ends all processes by themselves; the status is 0 and nothing stays behind."""
    pids = node.pids()
    node.process.send_signal(signal.SIGINT)
    wait_until(lambda: node.process.poll() is not None, "the node has ended", 60.0)
    assert node.process.returncode == 0, node.text()
    assert all(is_gone(pid) for pid in pids.values())
    assert not list((node.state / "run").glob("*.sock"))
    assert not (node.state / "run" / "endpoint").exists()


def test_the_table_of_the_demo_names_both_prompts() -> None:
    """What `make run` prints at its end: tokens, cached tokens, time to first token, rate."""
    table = describe_results([Numbers(400, 0, 96, 0.3, 2.0), Numbers(410, 390, 96, 0.04, 2.0)])
    assert table.splitlines()[-1].split() == ["2", "410", "390", "40.0", "96", "47.5"]
