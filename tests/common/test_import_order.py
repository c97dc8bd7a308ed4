"""What gRPC's core reads from the environment is set in every process before `grpc` is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ENTRIES = ("cachemgr.__main__", "decoder.__main__", "decoder.process", "gateway.__main__", "cli.__main__")
PROBE = """
import importlib, os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_EXPERIMENTS"))
sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
import grpc
"""


def seen_by_grpc(module: str, **environment: str) -> list[str]:
    """What the variable was when a fresh process that imports `module` came to `grpc`; and what it wrote to stderr."""
    clean = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, module], env={**clean, **environment}, capture_output=True, text=True, check=True
    )
    assert "experiment" not in done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_process_does_without_the_event_engine(entry: str) -> None:
    """Each entry point sets the variable before gRPC is imported, and gRPC knows the names in it."""
    assert seen_by_grpc(entry) == ["-event_engine_client,-event_engine_listener"]


def test_the_environment_has_the_last_word() -> None:
    """A value that is there already stays; a process that imports nothing of ours has none (positive control)."""
    assert seen_by_grpc("gateway.__main__", GRPC_EXPERIMENTS="-tcp_frame_size_tuning") == ["-tcp_frame_size_tuning"]
    assert seen_by_grpc("json") == ["None"]
