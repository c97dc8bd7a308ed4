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
            print(os.environ.get("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS"))
sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
import grpc
"""


def seen_by_grpc(module: str, **environment: str) -> list[str]:
    """What the variables were when a fresh process that imports `module` came to `grpc`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, module], env={**clean, **environment}, capture_output=True, text=True, check=True
    )
    assert "experiment" not in done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_process_does_without_the_event_engine(entry: str) -> None:
    """Each entry point sets the variables before gRPC is imported, and gRPC knows the names in the first."""
    assert seen_by_grpc(entry) == ["-event_engine_client,-event_engine_listener", "200"]


def test_the_environment_has_the_last_word() -> None:
    """A value that is there already stays; a process that imports nothing of ours has none (positive control)."""
    own = {"GRPC_EXPERIMENTS": "-tcp_frame_size_tuning", "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": "900"}
    assert seen_by_grpc("gateway.__main__", **own) == list(own.values())
    assert seen_by_grpc("json") == ["None", "None"]
