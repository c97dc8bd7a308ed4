"""Tests on a real GPU: `pytest tests/gpu`. Without a CUDA device each file is skipped, with the reason.

The kernels' own tests (`tests/kernels/interpreted/`) run on the device as they stand when pytest is given that folder;
what is here needs a device: real lengths, graphs, streams, the model as it is recorded, the timer of the benchmark.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder."""
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
