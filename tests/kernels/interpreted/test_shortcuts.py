"""The shortcuts of Triton's interpreter save time and change nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.kernels.interpreted.test_kv_write import check as write
from tests.kernels.interpreted.test_paged_decode import run as attend
from tests.kernels.rig import DEVICE, INTERPRETED, paged, random

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on a GPU the kernels are compiled")


def results() -> list[torch.Tensor]:
    """Of kernels with pointers, masks, casts, products, sums and calls of functions, in float32 and int8."""
    context = paged([21, 40], kv_heads=1, head_dim=32)
    queries = random(2, 1, 2, 32, seed=4).to(DEVICE)
    return [*write(2, 1, 32, norm=True), *write(2, 1, 32, stored=torch.int8), *attend(context, queries)]


def test_the_interpreters_shortcuts_change_no_bit(
    replaced: list[tuple[Any, str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what they stand for put back the results are the same, and each of it is used; the control: a shortcut that
    knows a wrong type is seen."""
    short = results()
    called = []
    for owner, name, original in replaced:

        def noted(*arguments: Any, original: Any = original, key: Any = (owner, name)) -> Any:
            called.append(key)
            return original(*arguments)

        monkeypatch.setattr(owner, name, noted)
    long = results()
    assert set(called) == {(owner, name) for owner, name, _ in replaced}
    for one, two in zip(short, long, strict=True):
        assert torch.equal(one, two)
    owner, name, _ = next(each for each in replaced if each[1] == "_get_np_dtype")
    right = getattr(owner, name)

    def wrong(kind: Any) -> Any:
        """Only of numbers that are computed with: addresses of the wrong type are read from."""
        return np.dtype(np.float16) if kind.scalar == tl.float32 else right(kind)

    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((InterpreterError, AssertionError)), np.errstate(all="ignore"):  # or an oracle's own
        results()
