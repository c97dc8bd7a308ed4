"""Chooses which build of torch is installed, so that nobody downloads gigabytes of CUDA libraries unasked.

It owns that one choice: an index that was named is used; without one, what pip is configured for is used if it offers a
CPU build of the pinned version, and PyTorch's own CPU index otherwise. `make` runs it as a plain script before anything
is installed, so it uses the standard library alone. It never installs a second time what is there.

    python cli/torch_build.py install --constraint constraints.txt [--index URL]
    python cli/torch_build.py check
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where the PyTorch project serves CPU builds for every platform."""

CONFIGURED = "configured"
"""The value of --index that takes whatever pip is configured for, whatever its size."""


def pinned_version(constraints: str) -> str:
    """The version of torch that the text of a constraints file pins; `ValueError` if it pins none."""
    found = re.search(r"^torch==([^\s;#]+)", constraints, flags=re.MULTILINE)
    if found is None:
        raise ValueError("the constraints file pins no version of torch")
    return found.group(1)


def offers_cpu_build(versions: str, version: str) -> bool:
    """Whether the answer of `pip index versions torch` lists `version` as a CPU build (local label `+cpu`)."""
    return re.search(rf"(?<![\w.]){re.escape(version)}\+cpu(?![\w.])", versions) is not None


def installed_version() -> str | None:
    """The version of torch in this environment, or None."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def is_cpu_build(requirements: Sequence[str], version: str) -> bool:
    """Whether an installed torch of `version` with these requirements brings no CUDA or ROCm libraries."""
    label = version.partition("+")[2]
    accelerated = re.match(r"(cu\d|rocm|xpu)", label) is not None
    pulls = any(re.match(r"(nvidia-|cuda-|pytorch-triton|triton)", line, flags=re.IGNORECASE) for line in requirements)
    return label == "cpu" or not (accelerated or pulls)


def choose_arguments(version: str, index: str, platform: str, list_versions: Callable[[], str]) -> list[str]:
    """Arguments of `pip install` that get torch `version`; `list_versions` asks pip's own indexes and may be slow."""
    requirement = f"torch=={version}"
    if index == CONFIGURED or (not index and not platform.startswith("linux")):
        return [requirement]  # outside Linux the plain builds are CPU builds
    if index:
        return ["--index-url", index, "--no-deps", requirement]
    if offers_cpu_build(list_versions(), version):
        return [f"{requirement}+cpu"]
    return ["--index-url", CPU_INDEX, "--no-deps", requirement]


def pip_command(*arguments: str) -> list[str]:
    """The command line of this interpreter's pip."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]


def list_configured_versions() -> str:
    """What pip's configured indexes offer of torch; empty if they cannot be asked."""
    answer = subprocess.run(pip_command("index", "versions", "torch"), capture_output=True, text=True, check=False)
    return answer.stdout if answer.returncode == 0 else ""


def install(constraint: Path, index: str) -> int:
    """Install the pinned torch unless it is there; returns pip's exit status."""
    version = pinned_version(constraint.read_text(encoding="utf-8"))
    have = installed_version()
    if have is not None and have.partition("+")[0] == version and not index:
        print(f"torch {have} is installed")
        return 0
    arguments = choose_arguments(version, index, sys.platform, list_configured_versions)
    print("installing", " ".join(arguments), flush=True)
    status = subprocess.run(pip_command("install", "--constraint", str(constraint), *arguments), check=False).returncode
    if status != 0:
        print(
            f"torch {version} did not install. Name an index with a CPU build (make TORCH_INDEX=https://...), or "
            f"take what pip is configured for, whatever its size (make TORCH_INDEX={CONFIGURED}).",
            file=sys.stderr,
        )
    return status


def check() -> int:
    """Say which build is installed; returns 1 if there is none."""
    version = installed_version()
    if version is None:
        print("torch is not installed", file=sys.stderr)
        return 1
    kind = "CPU build" if is_cpu_build(metadata.requires("torch") or [], version) else "accelerator build"
    print(f"torch {version}: {kind}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Choose and install the build of torch.")
    commands = parser.add_subparsers(dest="command", required=True)
    installer = commands.add_parser("install", help="install the pinned version")
    installer.add_argument("--constraint", type=Path, required=True, help="the constraints file that pins torch")
    installer.add_argument("--index", default="", help=f"index URL, or {CONFIGURED!r}; empty means a CPU build")
    commands.add_parser("check", help="say which build is installed")
    options = parser.parse_args(arguments)
    return install(options.constraint, options.index) if options.command == "install" else check()


if __name__ == "__main__":
    raise SystemExit(main())
