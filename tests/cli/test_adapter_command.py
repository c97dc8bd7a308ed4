"""`tessera adapter`: what it leaves in a state directory before a node has ever run there."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.__main__ import main
from tests.tiny_adapters import adapter_config, write_adapter


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short path: where several processes share the tests pytest's own leaves no room for a socket's
    name."""
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        yield Path(folder)


def test_an_adapter_before_the_first_start_leaves_a_private_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory that it makes is closed to others, as `tessera up` makes it; in another user's it puts nothing."""
    source = write_adapter(tmp_path / "source", adapter_config(2), {})
    state = tmp_path / "new" / "state"
    old = os.umask(0o022)
    try:
        assert main(["adapter", "add", "sql", str(source), "--state-dir", str(state)]) == 0
    finally:
        os.umask(old)
    assert stat.S_IMODE(state.stat().st_mode) == stat.S_IMODE((state / "adapters").stat().st_mode) == 0o700
    owner = state.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert main(["adapter", "add", "other", str(source), "--state-dir", str(state)]) == 1
    assert f"belongs to user {owner}" in capsys.readouterr().err
    assert not (state / "adapters" / "other").exists()
