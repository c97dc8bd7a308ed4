"""Intel AMX inside numba: permission, tile set-up and one block product.

A tile is sixteen rows of 64 bytes. `product_RxC` multiplies R row tiles of bfloat16 with C packed column tiles and
leaves float32 sums in memory. The hardware adds the products of one (row, column) in order of k, so a
row's result does not depend on the rows it is computed with. Used only where `available()` says so.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any, Final

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from decoder.kernels.compiled import intrinsic

_SYS_ARCH_PRCTL: Final = 158
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_XFEATURE_XTILEDATA: Final = 18

_I8 = ir.IntType(8)
_I64 = ir.IntType(64)


@functools.cache
def available() -> bool:
    """Whether this process may use AMX bfloat16 tiles; asks the kernel for permission on the first call."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    features = llvm.get_host_cpu_features()
    if not (
        features.get("amx-tile") and features.get("amx-bf16") and features.get("avx512f") and features.get("avx512dq")
    ):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)) == 0


def _call(builder: Any, name: str, arguments: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I8.as_pointer())


@intrinsic
def configure(typingctx: Any, address: Any) -> Any:
    """Load the tile configuration at `address` (64 bytes) into the calling thread."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "llvm.x86.ldtilecfg", [_pointer(builder, args[0])])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def release(typingctx: Any) -> Any:
    """Give the tiles back, so that a context switch need not save them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "llvm.x86.tilerelease", [])
        return context.get_dummy_value()

    return types.void(), generate


def full_tiles() -> bytes:
    """The configuration in which all eight tiles have sixteen rows of 64 bytes."""
    palette = bytes([1, 0]) + bytes(14)
    columns = b"".join((64).to_bytes(2, "little") for _ in range(8)) + bytes(16)
    return palette + columns + bytes([16] * 8) + bytes(8)


def _product(row_tiles: int, column_tiles: int, prefetch_bytes: int) -> Any:
    """Block product of at most two row tiles by at most two column tiles.

    Operands: a, bytes between rows of a tile, between k steps, between row tiles; b, bytes between k steps, between
    column tiles (a column tile is 1024 contiguous bytes: sixteen k pairs of sixteen columns); number of k steps of
    32; c, bytes between rows, between row tiles, between column tiles. C is overwritten.
    """

    def declare(
        typingctx: Any, a: Any, a_row: Any, a_k: Any, a_m: Any, b: Any, b_k: Any, b_n: Any, steps: Any,
        c: Any, c_row: Any, c_m: Any, c_n: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            a, a_row, a_k, a_m, b, b_k, b_n, steps, c, c_row, c_m, c_n = args
            sums = [[_I8(2 * m + n) for n in range(column_tiles)] for m in range(row_tiles)]
            rows, columns = [_I8(4 + m) for m in range(row_tiles)], [_I8(6), _I8(7)]
            for row in sums:
                for tile in row:
                    _call(builder, "llvm.x86.tilezero", [tile])
            with cgutils.for_range(builder, steps) as loop:
                a_now = builder.add(a, builder.mul(loop.index, a_k))
                b_now = builder.add(b, builder.mul(loop.index, b_k))
                for n in range(column_tiles):
                    address = builder.add(b_now, builder.mul(b_n, _I64(n)))
                    _call(builder, "llvm.x86.tileloadd64", [columns[n], _pointer(builder, address), _I64(64)])
                    for line in range(0, 1024 if prefetch_bytes else 0, 64):
                        ahead = _pointer(builder, builder.add(address, _I64(prefetch_bytes + line)))
                        options = [ir.IntType(32)(value) for value in (0, 2, 1)]
                        _call(builder, "llvm.prefetch.p0", [ahead, *options])
                for m in range(row_tiles):
                    address = builder.add(a_now, builder.mul(a_m, _I64(m)))
                    _call(builder, "llvm.x86.tileloadd64", [rows[m], _pointer(builder, address), a_row])
                    for n in range(column_tiles):
                        _call(builder, "llvm.x86.tdpbf16ps", [sums[m][n], rows[m], columns[n]])
            for m in range(row_tiles):
                for n in range(column_tiles):
                    offset = builder.add(builder.mul(c_m, _I64(m)), builder.mul(c_n, _I64(n)))
                    target = _pointer(builder, builder.add(c, offset))
                    _call(builder, "llvm.x86.tilestored64", [sums[m][n], target, c_row])
            return context.get_dummy_value()

        return types.void(*([types.int64] * 12)), generate

    return intrinsic(declare)


product_2x2 = _product(2, 2, 0)
product_2x1 = _product(2, 1, 0)
product_1x2 = _product(1, 2, 0)
product_1x2_streaming = _product(1, 2, 4096)
product_2x2_streaming = _product(2, 2, 4096)
