"""The choice of the device that computes, and what is said where it is not there."""

from __future__ import annotations

import asyncio
import dataclasses
import types
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import Options
from common.errors import FailedPrecondition, InvalidArgument
from common.faults import parse_faults
from decoder.models import select
from decoder.models.select import INTERPRETER, resolve_device
from decoder.process import serve

UUIDS = ("11111111-2222-3333-4444-555555555555", "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee")


def driver_of(*uuids: str) -> Any:
    """A driver that knows these GPUs."""
    return lambda: types.SimpleNamespace(device_uuids=lambda: [uuid.UUID(text).bytes for text in uuids])


def test_the_gpu_is_the_one_of_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """A UUID names its GPU, by the driver's order; the CPU needs no driver."""
    monkeypatch.setattr(select, "_missing", lambda: "")
    found = resolve_device(f"cuda:GPU-{UUIDS[1]}", "bfloat16", driver_of(*UUIDS))
    assert found.torch_device == torch.device("cuda:1")
    assert found.uses_triton
    on_cpu = resolve_device("cpu", "bfloat16", driver_of(*UUIDS))
    assert (on_cpu.torch_device, on_cpu.uses_triton) == (torch.device("cpu"), False)
    assert resolve_device("auto", "bfloat16", driver_of()) == on_cpu


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_gpu_that_torch_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """`auto` too: the cache manager has put its blocks there. The refusal names the option and the reason."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(FailedPrecondition, match=rf"--device {device}: this build of torch .* has no CUDA"):
        resolve_device(device, "bfloat16", driver_of(UUIDS[0]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_decoder_for_a_gpu_that_is_not_there_does_not_start(tmp_path: Path) -> None:
    """It is refused before a model is read, and nothing is left in the state directory."""
    options = Options(tmp_path / "state", model=tmp_path / "missing", device="cuda")
    with pytest.raises(FailedPrecondition, match=r"a GPU needs|--device cuda|NVIDIA driver"):
        asyncio.run(serve(options, asyncio.Event()))
    assert not (tmp_path / "state").exists()
    with pytest.raises(InvalidArgument, match="model"):  # control: without a model that is what is said
        asyncio.run(serve(dataclasses.replace(options, model=None), asyncio.Event()))


def test_interpreted_kernels_are_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need --test-faults, float32, and a process in which Triton interprets."""
    with pytest.raises(ValueError, match="without --test-faults"):
        parse_faults(["interpreted_kernels=1"], enabled=False)
    assert parse_faults(["interpreted_kernels=1"], enabled=True).interpreted_kernels
    assert not parse_faults([], enabled=True).interpreted_kernels
    with pytest.raises(InvalidArgument, match="float32 alone"):
        resolve_device(INTERPRETER, "bfloat16")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(FailedPrecondition, match="not interpreted"):
        resolve_device(INTERPRETER, "float32")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_device(INTERPRETER, "float32").interpreted


@pytest.mark.parametrize("dtype", ["int8", "file"])
def test_weights_in_groups_are_for_a_cpu(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Where a GPU is found they are refused, also by `auto`, with what to give instead."""
    monkeypatch.setattr(select, "_missing", lambda: "")
    for device in ("cuda", "auto"):
        with pytest.raises(InvalidArgument, match=f"dtype.*{dtype}.*bfloat16.*--device cpu"):
            resolve_device(device, dtype, driver_of(UUIDS[0]))
    assert not resolve_device("cpu", dtype).uses_triton
