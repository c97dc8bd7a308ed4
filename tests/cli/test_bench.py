"""`tessera bench`: finds benchmarks by name, without importing the others."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from cli import bench
from cli.__main__ import main


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `bench` package of our own."""
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "__init__.py").write_text("", encoding="utf-8")
    (folder / "one.py").write_text(
        '"""First.\n\nMore."""\ndef main(arguments):\n    print("one", arguments)\n    return 3\n', encoding="utf-8"
    )
    (folder / "two.py").write_text(
        '"""Second."""\nimport sys\ndef main():\n    print("two", sys.argv[1:])\n', encoding="utf-8"
    )
    (folder / "helper.py").write_text("VALUE = 1\n", encoding="utf-8")
    (folder / "_worker.py").write_text("def main(): ...\n", encoding="utf-8")
    (folder / "broken.py").write_text('"""Third."""\nimport nothing_of_this_name\ndef main(): ...\n', encoding="utf-8")
    for name in [key for key in sys.modules if key == "bench" or key.startswith("bench.")]:
        monkeypatch.delitem(sys.modules, name)
    module = types.ModuleType("bench")
    module.__path__ = [str(folder)]
    monkeypatch.setitem(sys.modules, "bench", module)
    spec = types.SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr("cli.bench.importlib.util.find_spec", lambda name: spec)
    return folder


def test_benchmarks_are_listed_with_their_first_line(package: Path) -> None:
    """Modules with a `main` are listed, helpers and private ones are not, and none is imported for it."""
    assert bench.list_benchmarks() == {"broken": "Third.", "one": "First.", "two": "Second."}


def test_arguments_reach_the_benchmark(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options go through unchanged, to a `main` that takes them and to one that reads the command line."""
    monkeypatch.setattr(sys, "argv", ["tessera"])
    assert main(["bench", "one", "--x", "1"]) == 3
    assert main(["bench", "two", "--y"]) == 0
    assert capsys.readouterr().out == "one ['--x', '1']\ntwo ['--y']\n"


def test_an_unknown_benchmark_names_those_there_are(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong name ends with status 2 and the right ones."""
    assert main(["bench", "three"]) == 2
    assert "broken, one, two" in capsys.readouterr().err
