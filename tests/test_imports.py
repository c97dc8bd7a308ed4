"""Who imports whom: calls go one way, and the daemon and the gateway stay light."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("cachemgr", "decoder", "gateway")
OURS = (*SERVICES, "common", "cli", "bench", "tests", "protos")
ALLOWED = {
    "common": {"common"},
    "cachemgr": {"common", "cachemgr"},
    "decoder": {"common", "decoder"},
    "gateway": {"common", "gateway"},
    "cli": {"common", "cli"},
}
HEAVY = ("torch", "numba", "llvmlite", "transformers")


def imported_names(source: str, package: str) -> Iterator[str]:
    """Top-level names of everything that `source` imports, at any depth; relative imports count as `package`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield package if node.level else (node.module or "").partition(".")[0]


def forbidden_imports(package: str) -> list[str]:
    """`file: name` of every import of ours that `package` may not have."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        names = set(imported_names(path.read_text(encoding="utf-8"), package))
        wrong = (names & set(OURS)) - ALLOWED[package]
        found += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(wrong)]
    return found


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_packages_import_only_what_lies_below_them(package: str) -> None:
    """The services never import each other; common imports no service; the command line imports common alone."""
    assert list((ROOT / package).rglob("*.py"))
    assert forbidden_imports(package) == []


def test_the_walk_finds_every_kind_of_import() -> None:
    """Positive control: plain, dotted, aliased, nested and relative imports are all seen."""
    source = (
        "import decoder.batch as b\ndef f():\n    from gateway.router import x\nfrom . import y\nimport os, common\n"
    )
    assert set(imported_names(source, "cachemgr")) == {"decoder", "gateway", "cachemgr", "os", "common"}


@pytest.mark.parametrize("service", ["cachemgr", "gateway"])
def test_daemon_and_gateway_load_no_numerics(service: str) -> None:
    """Importing every module of the cache manager or the gateway brings in neither torch nor numba."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / service).rglob("*.py"))
        if path.stem not in ("__main__", "__init__")
    ]
    main = f"{service}.__main__"
    if importlib.util.find_spec(main) is not None:
        modules.append(main)
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == "[]"


def test_the_heavy_check_would_notice() -> None:
    """Positive control: a program that imports numba is seen to."""
    program = f"import sys, numba\nprint(sorted(set({HEAVY!r}) & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "numba" in answer.stdout
