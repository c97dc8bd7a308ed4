"""`tessera plan`: the memory planner of `decoder/plan.py`, with the tables of the command line."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from cli.model_store import ModelStore
from cli.tables import format_table
from common.paths import models_dir


def main(arguments: Sequence[str]) -> int:
    """Print what keys and values of a model take; returns the exit status."""
    return int(importlib.import_module("decoder.plan").main(arguments, format_table, _find))


def _find(model: Path) -> Path:
    """A path as it is; the name of a fetched model as `tessera up` takes it."""
    fetched = None if model.exists() else ModelStore(models_dir(os.environ)).find(str(model))
    return model if fetched is None else fetched
