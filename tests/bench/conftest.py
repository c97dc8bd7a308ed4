"""One tiny GGUF model and one node on it for the benches' tests; a start costs seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.node import started_node
from bench.setting import Setting
from tests.bench.tiny_gguf import make_tiny_gguf
from tests.tiny_models import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in a GGUF file, matrices in float32."""
    folder = tmp_path_factory.mktemp("bench")
    return make_tiny_gguf(make_tiny_llama(folder / "tiny"), folder / "tiny.gguf")


@pytest.fixture(scope="session")
def node_options(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Flags that point a bench at a running node on `tiny_gguf`."""
    key_file = tmp_path_factory.mktemp("key") / "default.key"
    with started_node(Setting(tiny_gguf, "bfloat16", 1, None), ["--pool-bytes", "32M"]) as endpoint:
        key_file.write_text(endpoint.key)
        key_file.chmod(0o600)
        yield ["--endpoint", endpoint.target, "--key-file", str(key_file)]


@pytest.fixture
def common_options(tiny_gguf: Path, tmp_path: Path) -> list[str]:
    """Flags that every bench takes."""
    return ["--model", str(tiny_gguf), "--threads", "1", "--json", str(tmp_path / "rows.json")]
