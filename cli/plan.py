"""`tessera plan`: the memory planner of `decoder/plan.py`, with the tables of the command line."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from cli.tables import format_table


def main(arguments: Sequence[str]) -> int:
    """Print what keys and values of a model take; returns the exit status."""
    return int(importlib.import_module("decoder.plan").main(arguments, format_table))
