"""Logs: what must never be logged is not, even by a slip."""

from __future__ import annotations

import pytest

from common.logs import FORBIDDEN, configure_logs, get_logger


def test_forbidden_fields_are_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    """A secret in a field of a forbidden name never reaches the output; other fields do."""
    configure_logs("test")
    get_logger().info("key_checked", key="tsr_hush", tenant="acme")
    said = capsys.readouterr().err
    assert "tsr_hush" not in said
    assert "acme" in said
    assert "key" in FORBIDDEN


def test_an_unknown_level_is_refused() -> None:
    """A misspelt level is an error that names the allowed ones."""
    with pytest.raises(ValueError, match="debug, info"):
        configure_logs("test", "loud")
