"""Every GPU kernel compiled ahead, without a GPU: nothing spills, shared memory suffices, matrix units are used.

The table of all numbers: `python -m bench.gpu_resources`.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiling needs a process without the interpreter", allow_module_level=True)

from bench.gpu_case import Case
from bench.gpu_cases import decode_case, main_cases, prefill_case, quantised_cases, shared_case, wide_cases
from bench.gpu_resources import BLOCK_SHARED, Resources, machine_code, measure
from bench.gpu_row_cases import lora_cases, product_cases, small_cases
from decoder.kernels.gpu import FLOAT8
from decoder.kernels.paged_decode.triton import choose_config

DEFAULT = [
    *main_cases("90"),
    *small_cases("90"),
    *(make(target) for target in ("80", "100") for make in (prefill_case, decode_case)),
    decode_case("gfx942"),
    *(shared_case(target) for target in ("80", "100", "gfx942")),
    *(case for target in ("80", "100", "gfx942") for make in (lora_cases, product_cases) for case in make(target)),
    *(case for target in ("80", "90", "100") for case in quantised_cases(target)),
    decode_case("90", 256, windowed=True, soft_cap=True),
]
WIDE = {case.name: case for target in ("80", "90", "100") for case in wide_cases(target)}
COMPILERS = max(1, len(os.sched_getaffinity(0)))


def hold(case: Case) -> Resources:
    """No spills, and shared memory within the chip."""
    resources = measure(case)
    assert resources.spilled == 0
    assert resources.shared <= BLOCK_SHARED[case.target]
    return resources


@pytest.mark.parametrize("case", DEFAULT, ids=lambda case: case.name)
def test_kernels_fit_the_chip(case: Case) -> None:
    """The main shapes on Hopper, the attentions and quantised blocks on all targets, and what is built otherwise."""
    hold(case)


def misfit(name: str) -> str:
    """What is wrong with a case of WIDE, in a process of its own; empty where it fits."""
    case = WIDE[name]
    found = measure(case)
    fits = not found.spilled and found.shared <= BLOCK_SHARED[case.target]
    return "" if fits else f"{name}: {found.spilled} bytes spilled, {found.shared} bytes shared"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["80", "90", "100"])
def test_all_kernels_fit_the_chip(target: str) -> None:
    """Head sizes, element types, stored types, block sizes and row blocks, as far as their code differs."""
    names = [name for name, case in WIDE.items() if case.target == target]
    with ProcessPoolExecutor(COMPILERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert [line for line in pool.map(misfit, names) if line] == []


def test_a_kernel_that_does_not_fit_is_seen() -> None:
    """Control: a block of rows that is too large for its warps spills, and one with too many stages is too large."""
    with pytest.raises(AssertionError, match="spilled"):
        hold(_changed(prefill_case("80"), warps=4))
    with pytest.raises(AssertionError, match="shared"):
        hold(_changed(decode_case("80"), stages=7))


def test_prefill_uses_the_wide_matrix_units() -> None:
    """On Hopper warp-group products in the machine code, on Blackwell those of its tensor memory."""
    assert re.search(r"\bHGMMA\.64x\d+x16\.F32\.BF16", machine_code(prefill_case("90")))
    assert "tcgen05.mma" in measure(prefill_case("100")).assembly


def test_tiles_are_loaded_ahead() -> None:
    """Keys and values, and weights of experts, are copied asynchronously, with more than one tile under way; without
    stages they are not."""
    attention = (prefill_case("90"), prefill_case("80"), decode_case("90"), decode_case("80"))
    for case in (*attention, *product_cases("90"), *product_cases("80")):
        assert re.search(r"cp\.async\.c[ag]\.shared", measure(case).assembly)
        assert re.search(r"cp\.async\.wait_group\s+(0x)?[1-9]", measure(case).assembly)
    assert "cp.async" not in measure(_changed(decode_case("90"), stages=1)).assembly


def test_rows_are_loaded_sixteen_bytes_at_a_time() -> None:
    """Pages are read with the widest loads there are, whatever lies in them."""
    for case in (decode_case("90"), decode_case("90", kind=FLOAT8)):
        assert re.search(
            r"cp\.async\.c[ag]\.shared\.global(\.L2::\w+)?\s+\[[^\]]*\],\s*\[[^\]]*\],\s*0x10", measure(case).assembly
        )


def test_matrices_that_are_found_by_address_are_loaded_wide() -> None:
    """A and B of an adapter, whose addresses are data, come with the widest loads there are; no element comes alone."""
    for case in lora_cases("90"):
        assembly = measure(case).assembly
        assert not re.search(r"ld\.global(\.\w+)*\.b16", assembly)
        assert re.search(r"cp\.async\.cg\.shared\.global\s+\[[^\]]*\],\s*\[[^\]]*\],\s*0x10|ld\.global\.v4", assembly)


def test_the_programs_of_a_decode_fit_at_once() -> None:
    """As many blocks as the persistent grid counts on are resident on one multiprocessor."""
    for target in ("80", "90", "100"):
        case = decode_case(target)
        wanted = choose_config(int(target), 128, 2).programs
        assert measure(case).warps_resident >= wanted * case.warps


def test_a_decode_may_take_the_registers_that_its_grid_leaves() -> None:
    """The limit of the launch parameters is the assembler's; without one it gives up registers for warps."""
    case = decode_case("80")
    assert case.registers and f".maxnreg {case.registers}" in measure(case).assembly
    free = measure(_changed(case, registers=0))
    assert ".maxnreg" not in free.assembly
    assert free.registers < measure(case).registers


def _changed(case: Case, **values: int) -> Case:
    """The case with other launch parameters."""
    return replace(case, **values)  # type: ignore[arg-type]
