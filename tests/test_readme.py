"""The first page keeps its word: its client runs as it stands, its calls exist, its options and links are real."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format

from cli.__main__ import COMMANDS
from cli.up import grpcurl_line
from common.config import build_parser, load_options
from common.errors import TesseraError
from tessera.common.v1 import common_pb2
from tessera.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.cli.support import serving, write_key
from tests.cli.test_clients import FakeInference

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(language: str) -> list[str]:
    """The code blocks of the first page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def readme_client(folder: Path, endpoint: str) -> Path:
    """The Python client of the first page as a file; only the address is another."""
    (source,) = code_blocks("python")
    assert source.count("127.0.0.1:50051") == 1
    script = folder / "client.py"
    script.write_text(source.replace("127.0.0.1:50051", endpoint), encoding="utf-8")
    return script


def run_client(script: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Run it with the default key below `home`."""
    environ = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environ, check=False)


def test_the_python_client_runs_as_it_stands(tmp_path: Path) -> None:
    """The client of the first page streams text and usage with the default key, in about fifteen lines."""
    (tmp_path / ".local/state/tessera").mkdir(parents=True)
    write_key(tmp_path / ".local/state/tessera/default.key")
    fake = FakeInference()

    def register(server: grpc.Server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)  # type: ignore[no-untyped-call]

    with serving("127.0.0.1:0", register) as port:
        answer = run_client(readme_client(tmp_path, f"127.0.0.1:{port}"), tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("Hel0lo\nprompt_tokens: 20\ncached_tokens: 12\n")
    assert fake.metadata[0]["authorization"] == "Bearer tsk_test"
    assert fake.requests[0].chat.messages[0].content == "Why is the sky blue?"
    assert len([line for line in code_blocks("python")[0].splitlines() if line.strip()]) <= 15


def parse_grpcurl(line: str) -> tuple[str, str, Any]:
    """Header, method and request of a grpcurl call."""
    words = shlex.split(line.replace("\\\n", " "))
    assert words[0] == "grpcurl"
    service, _, method = words[-1].partition("/")
    assert service == inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
    assert method in inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
    request = json_format.ParseDict(json.loads(words[words.index("-d") + 1]), inference_pb2.GenerateRequest())
    return words[words.index("-H") + 1], method, request


def test_the_grpcurl_lines_name_what_there_is() -> None:
    """The call of the first page and the one that `tessera up` prints fit the contract and carry the credential."""
    (shown,) = [block for block in code_blocks("sh") if block.startswith("grpcurl")]
    for line in (shown, grpcurl_line("127.0.0.1:50051", "/k")):
        header, method, request = parse_grpcurl(line)
        assert header.startswith("authorization: Bearer $(cat ")
        assert method == "Generate"
        assert request.text
        assert "-plaintext" in line
    assert "-plaintext" not in grpcurl_line("h:1", "/k", Path("/c.pem"))
    assert "-cacert /c.pem" in grpcurl_line("h:1", "/k", Path("/c.pem"))


def test_every_command_and_option_of_the_first_page_exists() -> None:
    """No `tessera` command and no option in a table that our parsers do not know."""
    commands = re.findall(r"^(?:\.venv/bin/)?tessera ([a-z]+)", README, flags=re.MULTILINE)
    assert commands
    assert set(commands) <= set(COMMANDS)
    table = README.split("| option | default | meaning |", 1)[1].split("\n\n", 1)[0]
    flags = set(re.findall(r"--[a-z][a-z-]+", table))
    known = {flag for action in build_parser("up")._actions for flag in action.option_strings}
    assert flags
    assert flags <= known


def test_the_first_page_names_what_a_newcomer_needs() -> None:
    """Each command for people is in a block of the first page, and that clients need the state directory of `up`."""
    blocks = "\n".join(code_blocks("sh"))
    for command in ("up", "generate", "chat", "plan", "admin", "model"):
        assert re.search(rf"^(?:\.venv/bin/)?tessera {command} ", blocks, flags=re.MULTILINE), command
    assert re.search(r"Where `up` got a `--state-dir`, the clients .* need the same one", README)


def test_the_names_of_the_one_option_that_differs_are_right(tmp_path: Path) -> None:
    """What the first page says of --no-prefix-cache, as a variable and in a file, does what the flag does."""
    assert "`TESSERA_PREFIX_CACHE=false`" in README
    assert "`prefix_cache = false`" in README
    config = tmp_path / "node.toml"
    config.write_text("prefix_cache = false\n", encoding="utf-8")
    parser = build_parser("up")
    ways = (["--no-prefix-cache"], {}), ([], {"TESSERA_PREFIX_CACHE": "false"}), (["--config", str(config)], {})
    assert [load_options(parser.parse_args(flags), environ).prefix_cache for flags, environ in ways] == [False] * 3
    assert load_options(parser.parse_args([]), {}).prefix_cache


def test_every_status_that_there_is_stands_in_the_table_of_errors() -> None:
    """docs/api.md lists every code that our errors have and a client can see."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    never_public = {"ALREADY_EXISTS", "FAILED_PRECONDITION", "OUT_OF_RANGE"}  # between processes and for operators
    codes = {kind.code.name for kind in TesseraError.__subclasses__()} - never_public
    table = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    assert {code for code in codes if code not in table} == set()


def api_examples(folder: Path, endpoint: str) -> list[Path]:
    """The Python examples of docs/api.md as files; only the address is another."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    scripts = []
    for number, source in enumerate(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)):
        assert source.count("127.0.0.1:50051") == 1
        scripts.append(folder / f"api-{number}.py")
        scripts[-1].write_text(source.replace("127.0.0.1:50051", endpoint), encoding="utf-8")
    assert len(scripts) == 3
    return scripts


def test_the_example_of_scopes_makes_the_requests_that_it_says(tmp_path: Path) -> None:
    """That of docs/api.md names both scopes, the group's for the tokens of its handbook. All examples run on a node in
    `tests/cli/test_up.py`."""
    (tmp_path / ".local/state/tessera").mkdir(parents=True)
    write_key(tmp_path / ".local/state/tessera/default.key")
    fake = FakeInference()

    def register(server: grpc.Server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)  # type: ignore[no-untyped-call]

    with serving("127.0.0.1:0", register) as port:
        scripts = api_examples(tmp_path, f"127.0.0.1:{port}")
        (script,) = [script for script in scripts if "SCOPE_GROUP" in script.read_text(encoding="utf-8")]
        answer = run_client(script, tmp_path)
    assert answer.returncode == 0, answer.stderr
    team, everyone = (request.cache for request in fake.requests)
    assert (team.scope, team.scope_name, everyone.scope) == (common_pb2.SCOPE_GROUP, "team", common_pb2.SCOPE_PUBLIC)
    assert (team.public_tokens, everyone.public_tokens) == (1, 0), "of one token is every text to the fake"


def test_every_target_of_make_that_is_named_exists() -> None:
    """`make X` on any page is a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"{page.name}: make {target}"


def test_links_lead_somewhere() -> None:
    """Every relative link of every page leads to a file."""
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"
