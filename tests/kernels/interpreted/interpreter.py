"""Triton's interpreter as the tests use it: bfloat16 as hardware has it, and nothing computed twice.

`mend` changes results, and says how; `shorten` changes none (`test_shortcuts.py`): it keeps what depends on a type, a
shape or a module alone, which the interpreter computes anew for every operation. Both are called once, by
`conftest.py`, before a kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def mend() -> None:
    """Mend two things of the interpreter, which keeps bfloat16 as its bits.

    Its matrix product multiplies those bits as integers: widen them first; a float32 product of widened numbers,
    summed in float32, is what the hardware computes. It cuts float32 off to bfloat16: round to even instead.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    product, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = np.ascontiguousarray(handle.data).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return product(self, widen(a), widen(b), *rest)

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, rounding)
        rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
        return rounded.view(torch.uint16).numpy()

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._convert_float = convert_float


class _Kept:
    """What a launch restores when it ends: nothing, the language stays the interpreter's."""

    def restore(self) -> None:
        pass


def shorten() -> list[tuple[Any, str, Any]]:
    """Let the language be made the interpreter's once, not at each launch and each call of a function of a kernel, and
    what a tensor has from its type be computed once for each type. Returns what was replaced: owner, name, value."""
    import triton.language as tl
    from triton.runtime import interpreter

    shortcuts = (
        (interpreter, "_patch_lang", _once_for_modules(interpreter._patch_lang, (tl, tl.core))),
        (interpreter, "_get_np_dtype", _once_for_elements(interpreter._get_np_dtype, tl.block_type)),
        (tl.block_type, "__init__", _kept_type(tl.block_type.__init__, tl.constexpr)),
        (tl.tensor, "__init__", _kept_shape(tl.tensor.__init__)),
    )
    replaced = [(owner, name, getattr(owner, name)) for owner, name, _ in shortcuts]
    for owner, name, shortcut in shortcuts:
        setattr(owner, name, shortcut)
    return replaced


def _once_for_modules(patch: Callable[[Any], Any], modules: tuple[Any, ...]) -> Callable[[Any], Any]:
    functions: set[Any] = set()
    patched: set[int] = set()

    def once(function: Any) -> Any:
        if function not in functions:
            functions.add(function)
            seen = {id(value) for value in function.__globals__.values() if any(value is each for each in modules)}
            if not seen or not seen <= patched:
                patch(function)
                patched.update(seen)
        return _Kept()

    return once


def _once_for_elements(dtype_of: Callable[[Any], Any], block_type: type) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def kept(kind: Any) -> Any:
        name = kind.element_ty.name if isinstance(kind, block_type) else kind.name
        if name not in known:
            known[name] = dtype_of(kind)
        return known[name]

    return kept


def _kept_type(make: Callable[..., None], constexpr: type) -> Callable[..., None]:
    known: dict[Any, dict[str, Any]] = {}

    def kept(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[each.value if isinstance(each, constexpr) else each for each in shape]
        if key not in known:
            make(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])

    return kept


def _kept_shape(make: Callable[..., None]) -> Callable[..., None]:
    known: dict[str, tuple[Any, Any]] = {}

    def kept(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        if (name := type.name) not in known:
            make(self, handle, type)
            known[name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[name]

    return kept
