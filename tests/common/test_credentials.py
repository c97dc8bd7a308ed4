"""Secrets in files: private, never overwritten, refused when others could read them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from common.credentials import new_secret, read_secret, write_secret
from common.errors import FailedPrecondition


def test_a_secret_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    """The first writer wins, the file has mode 0600, and nothing else is left in the folder."""
    path = tmp_path / "admin.key"
    assert write_secret(path, "first") is True
    assert write_secret(path, "second") is False
    assert read_secret(path) == "first"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["admin.key"]


def test_a_secret_that_others_could_read_is_refused(tmp_path: Path) -> None:
    """A wider mode than 0600 is an error that says so; the secret is not in the error."""
    path = tmp_path / "admin.key"
    write_secret(path, "hush")
    path.chmod(0o644)
    with pytest.raises(FailedPrecondition, match="0644; allowed is 0600") as caught:
        read_secret(path)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", "x" * 600])
def test_an_empty_or_huge_secret_is_refused(tmp_path: Path, text: str) -> None:
    """A file that holds no sensible secret is an error."""
    path = tmp_path / "admin.key"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(FailedPrecondition):
        read_secret(path)


def test_secrets_differ() -> None:
    """No two secrets are the same, and both carry the prefix."""
    one, two = new_secret("tsi"), new_secret("tsi")
    assert one != two
    assert one.startswith("tsi_")
    assert len(one) > 40
