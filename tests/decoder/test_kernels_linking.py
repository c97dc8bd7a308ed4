"""How kernels come into entries: as code that is optimised and assembled once, in the entry, and compiled once."""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="no-any-return,no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import pytest
from llvmlite import ir
from numba import types
from numba.core import codegen

from decoder.kernels.compiled import entry, inlined, intrinsic, kernel, made_kernel, variant
from decoder.kernels.linking import KernelLibrary


def _chain(decorate: Callable[[str], Callable[[Any], Any]]) -> Any:
    """An entry over three functions, each of which calls the one before it with two constants."""

    @decorate("one")
    def one(x: int, y: int) -> int:
        return x * 10 + y

    @decorate("two")
    def two(x: int, y: int) -> int:
        return one(x, 1) - one(y, 2)

    @decorate("three")
    def three(x: int, y: int) -> int:
        return two(x, 3) + two(y, 4)

    @entry
    def whole(x: int) -> int:
        return three(x, 5) + three(6, x)

    return whole, (one, two, three)


def _assembled(monkeypatch: pytest.MonkeyPatch, whole: Any) -> list[str]:
    """Names of the functions that go through LLVM on their own while an entry is compiled. It must be right."""
    names: list[str] = []
    original = codegen.CPUCodeLibrary._optimize_final_module

    def optimize(library: Any) -> None:
        if library.name != "nrt":  # numba's runtime, made by the first entry of a process
            names.append(library.name.rpartition(".")[2])
        original(library)

    monkeypatch.setattr(codegen.CPUCodeLibrary, "_optimize_final_module", optimize)
    assert whole(7) == ((71 - 32) + (51 - 42)) + ((61 - 32) + (71 - 42))
    return names


def test_kernels_are_optimised_in_their_entry_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of kernels becomes machine code once, as a part of the entry, with one copy of each."""
    whole, parts = _chain(lambda name: made_kernel(f"linking_{name}"))
    assert _assembled(monkeypatch, whole) == ["whole"]
    assert [len(part.overloads) for part in parts] == [1, 1, 1]


def test_functions_of_numba_are_optimised_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: numba's own functions are assembled one by one, a copy for each constant in a call."""
    whole, parts = _chain(lambda name: numba.njit)
    names = _assembled(monkeypatch, whole)
    assert {"one", "two", "three", "whole"} <= set(names) and len(names) > 4
    assert all(len(part.overloads) > 1 for part in parts)


def _pick(x: Any) -> Any:
    raise NotImplementedError("compiled code only")


@variant(_pick)
def _choose(x: Any) -> Any:
    if isinstance(x, numba.types.Float):
        return lambda x: -1
    return lambda x: x * 2


@inlined
def _add_three(x: Any) -> Any:
    return x + 3


@kernel
def _shared(x: int) -> int:
    return _pick(_add_three(x)) + max(x, 100)


@kernel
def _outer(x: int) -> int:
    return _shared(x) + _shared(x + 1) + _pick(1.5)


def test_a_kernel_serves_several_entries() -> None:
    """Entries that call one kernel, one by way of another kernel, each have it; so has one compiled much later."""

    @entry
    def first(x: int) -> int:
        return _shared(x)

    @entry
    def second(x: int) -> int:
        return _outer(x) + _shared(x)

    assert first(4) == 114
    assert second(4) == 114 + 116 - 1 + 114


@intrinsic
def _never(typing_context: Any) -> Any:
    """False, which LLVM knows and numba does not: as what a CPU lacks."""
    return types.boolean(), lambda context, builder, signature, args: ir.Constant(ir.IntType(1), 0)


@kernel
def _last(x: int) -> int:
    return x * 3 + max(x, 1)


@kernel
def _without_its_call(x: int) -> int:
    if _never():
        return _last(x) + max(x, 2)
    return x + 1


@kernel
def _with_its_call(x: int) -> int:
    return _last(x) + 5


@kernel
def _numbas_own(x: int) -> int:
    return max(x, 3) + 7


@kernel
def _call_kept_first(x: int) -> int:
    return _with_its_call(x) + _numbas_own(x) + _without_its_call(x)


@kernel
def _call_lost_first(x: int) -> int:
    return _without_its_call(x) + _numbas_own(x) + _with_its_call(x)


def test_a_call_that_llvm_leaves_out_takes_no_kernel_from_those_that_call_it() -> None:
    """What one kernel calls only in a branch that is never taken is there for another that does call it."""

    @entry
    def kept_first(x: int) -> int:
        return _call_kept_first(x)

    @entry
    def lost_first(x: int) -> int:
        return _call_lost_first(x)

    assert kept_first(4) == lost_first(4) == (12 + 4 + 5) + (4 + 7) + (4 + 1)


def test_a_call_that_leads_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that lacks what it calls raises while its entry is compiled: LLVM would have it call address 0."""

    @made_kernel("linking_nowhere")
    def outer(x: int) -> int:
        return _with_its_call(x)

    @entry
    def whole(x: int) -> int:
        return outer(x)

    monkeypatch.setattr(KernelLibrary, "add_linking_library", lambda self, library: None)
    with pytest.raises(RuntimeError, match=r"nothing defines \S*_with_its_call"):
        whole(4)
