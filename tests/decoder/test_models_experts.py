"""Mixtures of experts beside bfloat16 weights: near `transformers`, and the same bits however a prompt is cut."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoder.kernels import amx, dots, sets, step
from decoder.kernels.compiled import entry
from decoder.weights import load_model
from tests.decoder.amx_emulation import emulate
from tests.decoder.model_rig import run_prompt
from tests.decoder.test_models_families import PROMPT, beside_others, reference_logits
from tests.tiny_families import make_family

pytest.importorskip("transformers")


def _rounded(reference: Any) -> Any:
    """The float32 model whose matrices are rounded to bfloat16. Vectors are float32 in every kernel set."""
    rounded = copy.deepcopy(reference)
    with torch.no_grad():
        for tensor in rounded.parameters():
            if tensor.ndim > 1:
                tensor.copy_(tensor.to(torch.bfloat16))
    return rounded


def _check(directory: Path, reference: Any, kv_dtype: str, kernels: type, near: float) -> None:
    """The median of the error over positions, since a rounding may change a router's choice; then equality with itself.

    `near` bounds the median. With keys, values and inputs in float32 no choice changes: there it bounds every position.
    """
    model = load_model(directory, "bfloat16", 16, kv_dtype)  # type: ignore[arg-type]
    assert type(model._kernels) is kernels
    whole = run_prompt(model, PROMPT)
    want = reference_logits(_rounded(reference))
    errors = np.abs(whole - want).max(-1) / np.abs(want).max(-1)
    assert (errors.max() if kv_dtype == "float32" else np.median(errors)) < near
    assert np.array_equal(run_prompt(model, PROMPT, chunk=37), whole)
    assert np.array_equal(beside_others(model), whole)
    model.close()


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_experts_beside_bfloat16_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Keys and values in float32, float16 and bfloat16: as near to `transformers` on the same weights as they allow."""
    monkeypatch.setattr(amx, "available", lambda: False)
    reference = make_family(tmp_path, name)
    _check(tmp_path, reference, "float32", sets.WideKernels, 5e-5)
    _check(tmp_path, reference, "float16", sets.WideKernels, 3e-3)
    chosen = sets.DotKernels if dots.HAS_DOTS else sets.Bfloat16Kernels
    _check(tmp_path, reference, "bfloat16", chosen, 3e-2)


@pytest.mark.slow
def test_experts_with_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with AMX, or with its emulation: whole steps, compiled for this test alone where tiles are emulated."""
    if not amx.available():
        emulate(monkeypatch)
        monkeypatch.setattr(amx, "available", lambda: True)
        monkeypatch.setattr(step, "compile_for", lambda kernels: entry(step._run))
    reference = make_family(tmp_path, "qwen3-moe")
    _check(tmp_path, reference, "float16", sets.AmxWideKernels, 3e-3)
    _check(tmp_path, reference, "bfloat16", sets.AmxKernels, 3e-2)
