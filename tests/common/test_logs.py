"""Logs: what must never be logged is not, even by a slip."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.logs import FORBIDDEN, configure_logs, get_logger


def test_forbidden_fields_are_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    """A secret in a field of a forbidden name never reaches the output; other fields do."""
    configure_logs("test")
    get_logger().info("key_checked", key="tsr_hush", tenant="acme")
    said = capsys.readouterr().err
    assert "tsr_hush" not in said
    assert "acme" in said
    assert "key" in FORBIDDEN


def test_an_unknown_level_is_refused() -> None:
    """A misspelt level is an error that names the allowed ones."""
    with pytest.raises(ValueError, match="debug, info"):
        configure_logs("test", "loud")


FULL = """
import resource, signal
from pathlib import Path
from common.logs import configure_logs, get_logger

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails, as on a full disk
configure_logs("test")
log, room = get_logger(), lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
log.info("before_it", detail="x" * 20)
room(Path("log").stat().st_size + 40)
for number in range(3):
    log.info("while_full", number=number, detail="y" * 60)
room(resource.RLIM_INFINITY)
log.info("after_it")
log.info("after_that")
print("it went on")
"""


def test_a_full_disk_costs_the_lines_that_it_does_not_take_and_nothing_else(tmp_path: Path) -> None:
    """A line that was cut off is followed by a line break and not by the next record; nothing is raised, and how many
    lines were lost is said once."""
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", FULL]
        environ = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        said = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, env=environ, check=True)
    assert said.stdout == b"it went on\n"
    first, torn, *rest = (tmp_path / "log").read_text().splitlines()
    assert len(torn) == 40 and "while_full" not in first
    events = [json.loads(line) for line in rest]
    assert [event["event"] for event in events] == ["after_it", "log_lines_lost", "after_that"]
    assert events[1]["num_lines"] == 3
