"""Nodes that the end-to-end tests share (a start costs seconds), and how often a case repeats."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.oracle import Solo
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node
from tests.tiny_models import make_tiny_llama

STEP_DELAY = 0.02


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose greedy text depends on its whole context."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="session")
def shared_node(tiny_model: Path) -> Iterator[Node]:
    """R32 with chunks of four blocks, so that longer prompts are prefilled in several steps."""
    with Node(tiny_model, options=["--chunk-tokens", "64"]) as node:
        yield node


@pytest.fixture
def node(shared_node: Node) -> Iterator[Node]:
    """R32, quiet and empty before the test, and quiet after it."""
    shared_node.fresh()
    yield shared_node
    shared_node.quiet()


@pytest.fixture(scope="session")
def solo(tiny_model: Path) -> Iterator[Solo]:
    """Solo runs on the tiny model."""
    with Node(tiny_model, pool_blocks=64, options=["--no-prefix-cache", "--threads", "1"]) as alone:
        yield Solo(alone)


@pytest.fixture(scope="session")
def shared_slow_node(tiny_model: Path) -> Iterator[Node]:
    """R32 whose every step takes some 20 ms longer, so that a stream lasts."""
    with Node(tiny_model, faults=[f"step_delay={STEP_DELAY}"], options=["--threads", "1"]) as node:
        yield node


@pytest.fixture
def slow_node(shared_slow_node: Node) -> Iterator[Node]:
    """The slow node, quiet and empty before the test, and quiet after it."""
    shared_slow_node.fresh()
    yield shared_slow_node
    shared_slow_node.quiet()


@pytest.fixture
def seed() -> int:
    """Seed of this test; `TESSERA_E2E_SEED` repeats a run."""
    value = int(os.environ.get("TESSERA_E2E_SEED") or random.SystemRandom().randrange(1_000_000))
    print(f"TESSERA_E2E_SEED={value}")
    return value


@pytest.fixture
def prompts(tiny_model: Path, seed: int) -> Prompts:
    """Prompts of the tiny model."""
    return Prompts(tiny_model, seed)
