"""Starts the tests of `interpreted/` under Triton's interpreter, which has to be chosen before triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(FOLDER.glob("test_*.py"))
MODELS = [path for path in FILES if path.name.startswith("test_device_")]
KERNELS = [path for path in FILES if path not in MODELS]
# A process imports for seconds before its first test, so that each has several files.
PROCESSES = {"models-1": MODELS[::2], "models-2": MODELS[1::2], "kernels-1": KERNELS[::2], "kernels-2": KERNELS[1::2]}


@pytest.mark.parametrize("process", PROCESSES)
def test_kernels_equal_their_oracles_under_the_interpreter(process: str, request: pytest.FixtureRequest) -> None:
    """Every test of these files passes in a process of their own; on a GPU they are collected as they stand as well."""
    marks = request.config.getoption("markexpr") or "not gpu"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marks, *map(str, PROCESSES[process])]
    environ = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_without_the_interpreter_or_a_device_the_forms_of_the_cpu_are_tested() -> None:
    """Where Triton cannot run its own tests are not collected, and none of its kernels is imported."""
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    check = f"""
import sys, pytest
assert pytest.main(["-p", "no:cacheprovider", "-q", "--collect-only", {str(FOLDER)!r}]) == 0
assert "decoder.kernels.paged_decode.cpu" in sys.modules
assert not [name for name in sys.modules if name.startswith("decoder.") and name.endswith(".triton")]
"""
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_paged_decode.py" in done.stdout
    assert "test_device_model.py" not in done.stdout


def test_what_needs_a_gpu_can_be_imported_without_one() -> None:
    """The files of tests/gpu and the benchmark name what there is; on a GPU nothing but their results is new."""
    environ = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    names = sorted(f"tests.gpu.{path.stem}" for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    names += sorted(f"bench.{path.stem}" for path in (ROOT / "bench").glob("gpu*.py"))
    assert len(names) > 10
    check = f"""
import importlib, torch
torch.cuda.is_available = lambda: True
for name in {names!r}:
    importlib.import_module(name)
"""
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
