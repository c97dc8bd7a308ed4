"""Which build of torch is installed: never gigabytes of CUDA libraries unasked."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli import torch_build
from cli.torch_build import CPU_INDEX, choose_arguments, is_cpu_build, offers_cpu_build, pinned_version

VERSIONS = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.13.0, 2.12.1\n"


def test_the_pin_is_read_from_the_constraints_file() -> None:
    """The version that the repository pins is the one that is installed."""
    root = Path(__file__).resolve().parents[2]
    assert pinned_version((root / "constraints.txt").read_text(encoding="utf-8")) == "2.13.0"
    with pytest.raises(ValueError, match="pins no version"):
        pinned_version("torchvision==1.0\n# torch==2\n")


def test_an_offered_cpu_build_is_told_from_its_neighbours() -> None:
    """Only the exact version with the label +cpu counts."""
    assert offers_cpu_build(VERSIONS, "2.13.0")
    assert not offers_cpu_build(VERSIONS, "2.15.0")
    assert not offers_cpu_build("Available versions: 12.13.0+cpu, 2.13.0+cpu.cxx11", "2.13.0")
    assert not offers_cpu_build("", "2.13.0")


@pytest.mark.parametrize(
    ("index", "platform", "versions", "expected"),
    [
        ("", "linux", VERSIONS, ["torch==2.13.0+cpu"]),
        ("", "linux", "Available versions: 2.13.0", ["--index-url", CPU_INDEX, "--no-deps", "torch==2.13.0"]),
        ("", "linux", "", ["--index-url", CPU_INDEX, "--no-deps", "torch==2.13.0"]),
        ("", "darwin", "", ["torch==2.13.0"]),
        ("configured", "linux", "", ["torch==2.13.0"]),
        ("https://x/cu130", "linux", VERSIONS, ["--index-url", "https://x/cu130", "--no-deps", "torch==2.13.0"]),
    ],
)
def test_cuda_builds_come_only_when_asked_for(index: str, platform: str, versions: str, expected: list[str]) -> None:
    """Without TORCH_INDEX, Linux gets a CPU build from the configured index if it has one, else from PyTorch's own."""
    assert choose_arguments("2.13.0", index, platform, lambda: versions) == expected


def test_a_cpu_build_is_recognised_by_what_it_requires() -> None:
    """A build that pulls CUDA libraries is none for the CPU, whatever its label."""
    assert is_cpu_build(["filelock"], "2.13.0+cpu")
    assert is_cpu_build(["filelock"], "2.13.0")
    assert not is_cpu_build(["nvidia-cudnn-cu13==9.1; platform_system == 'Linux'"], "2.13.0")
    assert not is_cpu_build([], "2.13.0+cu130")


def test_what_is_installed_is_not_installed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pinned version there, pip is not called; positive control: with another version there, it is."""
    calls: list[list[str]] = []

    class Answer:
        returncode = 0
        stdout = VERSIONS

    def record(command: list[str], **_options: object) -> Answer:
        calls.append(command)
        return Answer()

    monkeypatch.setattr("cli.torch_build.subprocess.run", record)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch==2.13.0\n", encoding="utf-8")
    monkeypatch.setattr(torch_build, "installed_version", lambda: "2.13.0+cpu")
    assert torch_build.install(constraints, "") == 0
    assert calls == []
    monkeypatch.setattr(torch_build, "installed_version", lambda: "2.12.0+cpu")
    assert torch_build.install(constraints, "") == 0
    assert calls[-1][-1] == "torch==2.13.0+cpu"
