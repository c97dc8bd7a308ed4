"""How often a case repeats: a few times by default, in full with the slow tests."""

from __future__ import annotations

import pytest


def repeats(full: int, few: int = 3) -> pytest.MarkDecorator:
    """Parametrize `rounds`: `few` in the default run, `full` under the `slow` marker."""
    return pytest.mark.parametrize("rounds", [few, pytest.param(full, marks=pytest.mark.slow)], ids=["few", "full"])
