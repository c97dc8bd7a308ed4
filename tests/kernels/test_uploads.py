"""What a step takes to a device: copies of their own, which the host does not wait for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from decoder.kernels.uploads import upload

ROOT = Path(__file__).resolve().parents[2] / "decoder"
# Adapters and weights are laid down before any step uses them.
LOADED_ONCE = {"device_adapters.py", "device_weights.py"}


def test_an_upload_is_a_copy() -> None:
    """The array may be changed at once; types and shapes stay, also of nothing, and of what is not contiguous."""
    cpu = torch.device("cpu")
    array = np.arange(12, dtype=np.int64).reshape(3, 4)
    for given in (array, array[:, 1:3], array[:0], np.empty(0, np.int32)):
        want = given.copy()
        got = upload(given, cpu)
        given[...] = 77
        assert np.array_equal(got.numpy(), want) and got.numpy().dtype == want.dtype
        assert got.is_contiguous()
        array[...] = np.arange(12).reshape(3, 4)
    assert upload(np.empty(0, np.int32), cpu).view(torch.float64).shape == (0,)


def waiting_calls(source: str) -> Iterator[str]:
    """Calls that make the host wait for a device, or may: a copy there that is not queued, a value from there."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        words = ast.unparse(node)
        to_device = node.func.attr == "to" and any("device" in ast.unparse(it).lower() for it in node.args)
        if (to_device and "non_blocking=True" not in words) or node.func.attr in ("item", "cpu", "cuda", "nonzero"):
            yield words


def files() -> list[Path]:
    """Where steps are put together."""
    kernels = [*ROOT.glob("kernels/*/plan.py"), *ROOT.glob("kernels/*/triton.py"), ROOT / "kernels" / "uploads.py"]
    return sorted([*kernels, *(it for it in ROOT.glob("models/device_*.py") if it.name not in LOADED_ONCE)])


@pytest.mark.parametrize("file", files(), ids=lambda file: f"{file.parent.name}/{file.name}")
def test_no_step_waits_for_the_device_while_it_is_put_together(file: Path) -> None:
    """Else the next step could not be launched while one runs."""
    assert not list(waiting_calls(file.read_text()))


def test_waiting_calls_are_found() -> None:
    """The control."""
    source = "a.to(device)\nb.to(self.device, non_blocking=True)\nc.max().item()\nd.to(torch.float32)\ne.cpu()\n"
    assert list(waiting_calls(source)) == ["a.to(device)", "c.max().item()", "e.cpu()"]
