"""Where numba keeps the machine code of the kernel sets."""

from __future__ import annotations

import fcntl
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from decoder.kernels import sets, step
from decoder.kernels.compiled import cached_entry, compile_once, kernel, made_kernel
from tests.e2e.processes import poll

STORAGES = (
    sets.Float32Storage(),
    sets.Bfloat16Storage(),
    sets.Float16Storage(),
    sets.Int8Storage(),
    sets.Int8DotStorage(),
    sets.Float8Storage(),
    sets.Float8DotStorage(),
)


def _file(entry: Any) -> str:
    return str(entry._cache._impl.filename_base)


def test_each_kernel_set_has_a_cache_file_of_its_own() -> None:
    """No two sets share a file of machine code, so processes that compile two at once cannot take one for the other."""
    kinds = (sets.Float32Kernels, sets.WideKernels, sets.AmxWideKernels, sets.GroupedKernels)
    chosen = [kind(storage) for kind, storage in itertools.product(kinds, STORAGES)]
    chosen += [sets.Bfloat16Kernels(), sets.DotKernels(), sets.AmxKernels()]
    files = {_file(step.entry_of_set(kernels)) for kernels in chosen}
    assert len(files) == len(chosen)
    assert step.entry_of_set(chosen[0]) is step.entry_of_set(chosen[0])
    assert _file(cached_entry(step._run)) == _file(cached_entry(step._run))  # control: else they share one


# Two entries, each with a kernel that `make` gave it, too long to be compiled into its caller.
_MODULE = f"""
import numba

from decoder.kernels.compiled import _compiled, cached_entry, made_kernel

def make(value):
    @DECORATOR
    def number(x):
        {"; ".join(f"x = (x ^ (x >> 3)) + {index}" for index in range(150))}
        return x + value
    return number

one, two = make(1), make(2)

@cached_entry
def first(x):
    return one(x) + one(x + 1)

@cached_entry
def second(x):
    return two(x) + two(x + 1)
"""


def _loaded_from_two_caches(folder: Path, decorator: str) -> str:
    """By how much what both entries give differs in a process that loads them, each compiled by another process."""
    (folder / "pair.py").write_text(_MODULE.replace("DECORATOR", decorator))
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": f"{folder}:{Path.cwd()}"}
    answer = ""
    for call in ("first(5)", "second(5)", "second(5) - pair.first(5)"):
        command = [sys.executable, "-c", f"import pair; print(pair.{call})"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        answer = done.stdout.strip()
    return answer


def test_kernels_made_by_a_function_are_told_apart_across_caches(tmp_path: Path) -> None:
    """Machine code that two processes compiled is put together right, because each made kernel has a name."""
    assert _loaded_from_two_caches(tmp_path, "made_kernel(str(value))") == "2"


def test_without_names_one_made_kernel_would_serve_for_another(tmp_path: Path) -> None:
    """Control: numba tells two functions of one text apart by a number that two processes give out twice."""
    assert _loaded_from_two_caches(tmp_path, "_compiled") == "0"


def test_a_kernel_made_in_a_function_needs_a_name() -> None:
    """`kernel` refuses it, and `made_kernel` refuses a name that is taken."""

    def number(x: int) -> int:
        return x

    with pytest.raises(TypeError, match=r"number is made in a function; give it a name of its own"):
        kernel(number)
    made_kernel("first")(number)

    def other(x: int) -> int:
        return x

    other.__qualname__ = "test_a_kernel_made_in_a_function_needs_a_name.<locals>.number"
    made_kernel("second")(other)
    other.__qualname__ = "test_a_kernel_made_in_a_function_needs_a_name.<locals>.number"
    with pytest.raises(ValueError, match="was made before"):
        made_kernel("first")(other)


_ENTRY = """
from numba import types

from decoder.kernels.compiled import cached_entry, compile_once

@cached_entry
def double(x):
    return 2 * x

compile_once(double, (types.int64,))
print(double(21), sum(double.stats.cache_hits.values()), sum(double.stats.cache_misses.values()))
"""


def test_of_processes_that_want_one_kernel_set_at_once_one_compiles(tmp_path: Path) -> None:
    """Both wait for the lock, which the test holds; then one compiles, and the other loads what it wrote."""
    (tmp_path / "alone.py").write_text(_ENTRY)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    (tmp_path / "__pycache__").mkdir()
    with (tmp_path / "__pycache__" / "compiling.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        inode = f":{os.fstat(held.fileno()).st_ino} "
        both = [
            subprocess.Popen([sys.executable, "-c", "import alone"], env=environment, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]

        def waiting() -> int:
            lines = Path("/proc/locks").read_text().splitlines()
            return sum("-> FLOCK" in line and inode in line for line in lines)

        poll(lambda: waiting() == 2, within=60, what="both wait")
    answers = [process.communicate(timeout=60)[0].split() for process in both]
    assert sorted(answers) == [["42", "0", "1"], ["42", "1", "0"]]


def test_where_machine_code_cannot_be_kept_it_is_compiled_all_the_same(tmp_path: Path) -> None:
    """A file in the place of the folder: no lock can be had."""

    class Entry:
        stats = type("Stats", (), {"cache_path": str(tmp_path / "file")})
        compiled: tuple[Any, ...] = ()

        def compile(self, signature: tuple[Any, ...]) -> None:
            self.compiled = signature

    (tmp_path / "file").touch()
    entry = Entry()
    compile_once(entry, (1,))
    assert entry.compiled == (1,)
