"""Options of the simulation, and Hypothesis without chance and without a clock: see docs/testing.md."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Processes that tests start leave nothing in the cache folder of whoever runs them.
os.environ.setdefault("TESSERA_WEIGHTS_CACHE", "none")

# How long an example takes says how busy the machine is, and nothing of the code.
settings.register_profile(
    "same-every-time", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same-every-time")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--seeds` and `--seed`."""
    group = parser.getgroup("simulation")
    group.addoption("--seeds", type=int, default=1000, help="how many seeds the simulation runs (default 1000)")
    group.addoption("--seed", type=int, default=None, help="run exactly this seed of the simulation")
