"""What every bench is told and what it says about where it ran: model, dtype, threads, date, CPU.

The one place that reads the common flags; each bench adds its own. It changes nothing but the number of threads that
torch and numba use in this process.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.table import Cell, Report
from cli.node import find_model
from common.arguments import CommandParser
from common.layout import DENSE_DTYPES, KvLayout, default_kv_dtype
from decoder.models.config import ModelConfig
from decoder.weights.source import open_source

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Setting:
    """The common options of a bench, checked."""

    model: Path
    dtype: str
    threads: int
    json: Path | None


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benches share."""
    parser = CommandParser(
        prog=f"tessera bench {name}",
        description=(description or "").partition("\n")[0],
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="PATH", help="GGUF file or Hugging Face directory (demo model)")
    parser.add_argument("--dtype", choices=DENSE_DTYPES, default="bfloat16", help="type of the weights")
    parser.add_argument("--threads", type=positive_or_zero, default=0, metavar="N", help="compute threads; 0 is all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    return parser


def make_pool_parser(name: str, description: str | None, rounds: int = 300) -> argparse.ArgumentParser:
    """A parser with the options of the benches that need a pool and no model."""
    parser = CommandParser(
        prog=f"tessera bench {name}",
        description=(description or "").partition("\n")[0],
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--blocks", type=positive, default=131_072, metavar="N", help="blocks of the pool")
    parser.add_argument("--published", type=positive, default=100_000, metavar="N", help="blocks in the index")
    parser.add_argument("--rounds", type=positive, default=rounds, metavar="N", help="times that each operation runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    return parser


def read_setting(namespace: argparse.Namespace) -> Setting:
    """The common options. Raises CommandError where no model can be found."""
    threads = namespace.threads or len(os.sched_getaffinity(0))
    return Setting(find_model(namespace.model, os.environ), namespace.dtype, threads, namespace.json)


def positive(text: str) -> int:
    """An argparse type: a whole number >= 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def positive_or_zero(text: str) -> int:
    """An argparse type: a whole number >= 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def positive_list(text: str) -> list[int]:
    """An argparse type: whole numbers >= 1, separated by commas."""
    return [positive(part) for part in text.split(",")]


def model_shape(setting: Setting) -> tuple[ModelConfig, KvLayout]:
    """Sizes of the model and of its keys and values; reads the file's head, not its weights."""
    config = open_source(setting.model).config
    layout = KvLayout.of(
        config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_TOKENS, default_kv_dtype(setting.dtype)
    )
    return config, layout


def start_report(name: str, setting: Setting, more: Mapping[str, Cell] | None = None) -> Report:
    """A report that has printed date, CPU, threads, dtype and model."""
    facts: dict[str, Cell] = {
        **machine_facts(),
        "threads": setting.threads,
        "dtype": setting.dtype,
        "model": setting.model.name,
        **(more or {}),
    }
    report = Report(name, facts)
    report.begin()
    return report


def machine_facts() -> dict[str, Cell]:
    """When and where a bench runs, whatever it measures."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "CPU": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "Python": platform.python_version(),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def cpu_model(lines: Sequence[str] | None = None) -> str:
    """The processor's name, and which of the instructions that decide a matmul's speed it has."""
    if lines is None:
        path = Path("/proc/cpuinfo")
        lines = path.read_text().splitlines() if path.exists() else []
    values = dict(part for line in lines if len(part := [item.strip() for item in line.split(":", 1)]) == 2)
    flags = values.get("flags", "").split()
    found = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    name = values.get("model name") or platform.processor() or platform.machine()
    return f"{name} ({' '.join(found)})" if found else name
