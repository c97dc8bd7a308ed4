"""These tests run Triton's kernels, interpreted (TRITON_INTERPRET=1) or on a CUDA device; else the CPU's forms.

The interpreter has to be chosen before triton is imported, so `tests/kernels/test_interpreter.py` starts them in a
process of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = Path(__file__).parent
ONLY_TRITON = [
    "test_bench_work.py", "test_device_adapters.py", "test_device_ahead.py", "test_device_experts.py",
    "test_device_groups.py", "test_device_model.py", "test_device_sharing.py", "test_device_storage.py", "test_lora.py",
    "test_mixture.py", "test_sample.py", "test_shared_prefix_decode.py", "test_shortcuts.py",
]  # fmt: skip
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ONLY_TRITON
REPLACED: list[tuple[Any, str, Any]] = []

if INTERPRETED:
    from tests.kernels.interpreted.interpreter import mend, shorten

    mend()
    REPLACED += shorten()


@pytest.fixture
def replaced() -> list[tuple[Any, str, Any]]:
    """What the shortcuts of the interpreter stand for: owner, name, value."""
    return REPLACED


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The CPU's forms are compiled for each type of keys and values; all but float32 are slow tests."""
    if INTERPRETED or torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent == HERE and any(word in item.name for word in ("quantised", "narrow", "e4m3")):
            item.add_marker(pytest.mark.slow)
