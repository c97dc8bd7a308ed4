"""Where numba keeps the machine code of the kernel sets."""

from __future__ import annotations

import itertools
from typing import Any

from decoder.kernels import sets, step
from decoder.kernels.compiled import cached_entry

STORAGES = (
    sets.Float32Storage(),
    sets.Bfloat16Storage(),
    sets.Float16Storage(),
    sets.Int8Storage(),
    sets.Float8Storage(),
)


def _file(entry: Any) -> str:
    return str(entry._cache._impl.filename_base)


def test_each_kernel_set_has_a_cache_file_of_its_own() -> None:
    """No two sets share a file of machine code, so processes that compile two at once cannot take one for the other."""
    kinds = (sets.Float32Kernels, sets.WideKernels, sets.AmxWideKernels)
    chosen = [kind(storage) for kind, storage in itertools.product(kinds, STORAGES)]
    chosen += [sets.Bfloat16Kernels(), sets.AmxKernels()]
    files = {_file(step.entry_of_set(kernels)) for kernels in chosen}
    assert len(files) == len(chosen)
    assert step.entry_of_set(chosen[0]) is step.entry_of_set(chosen[0])
    assert _file(cached_entry(step._run)) == _file(cached_entry(step._run))  # control: else they share one
