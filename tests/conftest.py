"""Options of the simulation, Hypothesis without chance and without a clock, and which tests begin first: see
docs/testing.md."""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from decoder.__main__ import PASSIVE_THREADS

# Threads of torch wait without spinning, as those of a decoder do: several processes share the cores.
for name, value in PASSIVE_THREADS.items():
    os.environ.setdefault(name, value)

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


# Their tests share nodes, models or an oracle, which cost seconds: one process runs all tests of a folder or a file.
TOGETHER = (
    "e2e", "bench", "cli/test_up.py", "decoder/test_engine_llama.py", "decoder/test_models_transformers.py",
    "decoder/test_process.py", "gateway/test_tokenizer.py", "test_cache_correctness.py", "test_shared_weights.py",
)  # fmt: skip
# Of the others what lasts longest begins first, so that neither process is left alone with it.
FIRST = ("kernels/test_interpreter.py", "kernels/test_ahead_of_time.py", "decoder/test_engine_ahead.py", "simulation")


def _begins(node: str, names: tuple[str, ...]) -> int:
    """The place of the first name that is the file of a test or a folder of it; as many as there are for none."""
    file = PurePosixPath(node.partition("::")[0])
    return next((at for at, name in enumerate(names) if file.is_relative_to(f"tests/{name}")), len(names))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order of the tests where several processes share them (`make test`)."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: _begins(item.nodeid, FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Processes get tests one by one, and what stays together as a whole, the largest first."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            place = _begins(nodeid, TOGETHER)
            return TOGETHER[place] if place < len(TOGETHER) else nodeid

    return Scheduler(config, log)
