"""What the GPU kernels take of a chip: registers, spills, shared memory, occupancy. Compiled here, without a GPU.

    python -m bench.gpu_resources [--all] [--targets 80,90,100,gfx942]

Every number is the compiler's and the assembler's, for the launch parameters that `choose_config` gives; none is a
measurement, and no kernel is run. `tests/kernels/compiled/test_compiled.py` holds what must not get worse.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common.arguments import CommandParser

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.gpu_case import TARGETS, Case
from bench.gpu_cases import all_cases, main_cases, quantised_cases
from bench.gpu_row_cases import small_cases

# Shared memory: most that one block may have, and what a multiprocessor has (CUDA C++ programming guide, compute
# capabilities; AMD CDNA 3 ISA guide).
BLOCK_SHARED: Final = {"80": 163 << 10, "90": 227 << 10, "100": 227 << 10, "gfx942": 64 << 10}
CHIP_SHARED: Final = {"80": 164 << 10, "90": 228 << 10, "100": 228 << 10, "gfx942": 64 << 10}
CHIP_REGISTERS: Final = 65536
CHIP_WARPS: Final = 64
CHIP_BLOCKS: Final = 32

_FLOATS: Final = frozenset({"logit_scale", "soft_cap", "epsilon", "log2_e"})
_INDICES: Final = frozenset(
    {
        "tables",
        "query_starts",
        "lengths",
        "row_blocks",
        "starts",
        "ranges",
        "sequences",
        "positions",
        "sources",
        "targets",
        "num_tokens",
        "block_ids",
        "best",
        "samples",
        "ids",
        "places",
        "tiles",
        "row_ids",
        "choices",
        "counts",
        "slots",
        "owners",
    }
)
_FLOAT_POINTERS: Final = frozenset(
    {
        "log_sums",
        "partial",
        "statistics",
        "cosines",
        "sines",
        "query_norm",
        "key_norm",
        "weight",
        "post_weight",
        "residual",
        "logits",
        "shared",
        "shared_sums",
        "rest",
        "rest_sums",
        "lowered",
        "shares",
        "gates",
        "mixture",
    }
)
_SCALES: Final = frozenset({"key_scales", "value_scales"})
_WIDE_POINTERS: Final = {"temperatures": "*fp64", "seeds": "*i64", "addresses": "*i64"}
_SIXTEENS: Final = frozenset({"words", "inputs", "outputs", "cut", "width", "first_end", "second_end", "third_end"})
_ELEMENTS: Final = frozenset(
    {"queries", "output", "rotated", "x", "gate_up", "expert_weights", "expert_outputs", "branch"}
)
_BYTES: Final = frozenset({"planes", "blocks", "buffer"})


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes."""

    registers: int
    spilled: int
    """Bytes of local memory of a thread: spilled registers, and nothing else, as no kernel has local arrays."""
    shared: int
    warps_resident: int
    assembly: str


def compile_case(case: Case) -> Any:
    """Compile to a binary. Pointers and strides are multiples of 16, as those of an arena are."""
    names = case.kernel.arg_names
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        if name in case.constants:
            signature[name] = "constexpr"
            continue
        if name in _FLOATS:
            signature[name] = "fp32"
            continue
        if name in _INDICES:
            signature[name] = "*i32"
        elif name in _FLOAT_POINTERS:
            signature[name] = "*fp32"
        elif name in _WIDE_POINTERS:
            signature[name] = _WIDE_POINTERS[name]
        elif name in _SCALES:
            signature[name] = "*i16"
        elif name in _BYTES:
            signature[name] = "*i32"
        elif name in ("keys", "values") and case.operation == "kv_write":
            signature[name] = f"*{case.element}"
        elif name in ("keys", "values", "key_arena", "value_arena"):
            signature[name] = f"*{case.stored}"
        elif name in _ELEMENTS:
            signature[name] = f"*{case.element}"
        else:
            signature[name] = "i32"
        if signature[name].startswith("*") or name.endswith("stride") or name in _SIXTEENS:
            attributes[(index,)] = [["tt.divisibility", 16]]
    nvidia = case.target.isdigit()
    target = GPUTarget("cuda", int(case.target), 32) if nvidia else GPUTarget("hip", case.target, 64)
    source = ASTSource(case.kernel, signature, case.constants, attributes)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    if case.registers:
        options["maxnreg"] = case.registers
    return triton.compile(source, target=target, options=options)


def measure(case: Case) -> Resources:
    """Compile and read the binary's own account of itself."""
    compiled = compile_case(case)
    shared = int(compiled.metadata.shared)
    if not case.target.isdigit():
        text = compiled.asm["amdgcn"]
        found = {key: int(value) for key, value in re.findall(r"^\s+\.(\w+):\s+(\d+)\s*$", text, flags=re.MULTILINE)}
        return Resources(found["vgpr_count"], found["private_segment_fixed_size"], shared, 0, text)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
    registers, stack, local = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    by_registers = CHIP_REGISTERS // (-(-registers * 32 // 256) * 256) // case.warps
    by_shared = CHIP_SHARED[case.target] // (shared + 1024)  # one KiB of a block is the system's
    resident = min(by_registers, by_shared, CHIP_WARPS // case.warps, CHIP_BLOCKS) * case.warps
    return Resources(registers, stack + local, shared, resident, compiled.asm["ptx"])


def machine_code(case: Case) -> str:
    """The disassembled binary of an NVIDIA target."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compile_case(case).asm["cubin"])
        file.flush()
        return _tool("nvdisasm", "-c", file.name)


def _tool(name: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print the table."""
    parser = CommandParser(prog="python -m bench.gpu_resources", description="Resources of GPU kernels.")
    parser.add_argument("--all", action="store_true", help="every shape, not only the main ones (minutes)")
    parser.add_argument("--targets", default="80,90,100", help=f"of {','.join(TARGETS)} (default 80,90,100)")
    options = parser.parse_args()
    print("| operation | shape | target | warps | stages | registers | spilled bytes | shared KiB | warps resident |")
    print("|---|---|---|---|---|---|---|---|---|")
    for target in options.targets.split(","):
        quantised = quantised_cases(target) if target.isdigit() else ()
        cases = all_cases(target) if options.all else [*main_cases(target), *quantised, *small_cases(target)]
        for case in cases:
            r = measure(case)
            print(
                f"| {case.operation} | {case.label} | {target} | {case.warps} | {case.stages} | {r.registers} "
                f"| {r.spilled} | {r.shared / 1024:.1f} | {r.warps_resident or '-'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
