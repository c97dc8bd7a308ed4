"""Starts the tests of `compiled/`, which compile every GPU kernel without a GPU, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "compiled"


def run_compiled(*arguments: str, **changed: str) -> subprocess.CompletedProcess[str]:
    """pytest over the folder, with `changed` in its environment."""
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **changed}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, str(FOLDER)]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)


def test_every_kernel_compiles_within_its_bounds(request: pytest.FixtureRequest) -> None:
    """Every test of the folder passes."""
    marks = request.config.getoption("markexpr") or "not gpu"
    done = run_compiled("-m", marks, TESSERA_TEST_COMPILE="1")
    assert done.returncode == 0, done.stdout[-8000:]


def test_the_folder_is_not_collected_otherwise() -> None:
    """The main run of the tests does not import the compiler."""
    assert run_compiled("--collect-only", TESSERA_TEST_COMPILE="0").returncode == pytest.ExitCode.NO_TESTS_COLLECTED
