"""Weights of 8 and 4 bits: a file's own are taken bit by bit, others are off by rounding alone, and types never mix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from common.errors import InvalidArgument
from decoder.kernels import sets
from decoder.kernels.grouped_weights import INT8, UINT4
from decoder.models.grouping import quantize
from decoder.models.select import ComputeDevice
from decoder.weights import load_model, load_on
from decoder.weights.gguf_groups import form_of, unpack
from tests.decoder.model_rig import make_config, make_model, random_tensors, run_prompt
from tests.decoder.test_weights_gguf import CASES, write_gguf
from tests.tiny_models import make_tiny_llama

PROMPT = np.random.default_rng(3).integers(3, 200, 90).astype(np.int32)
Type = gguf.GGMLQuantizationType
FOUR_BITS = ("Q4_0", "Q4_1")


@pytest.mark.parametrize("name", ["Q8_0", "Q5_0", *FOUR_BITS])
def test_blocks_of_a_file_are_taken_bit_by_bit(name: str) -> None:
    """The weights are those of the `gguf` package, to the last bit, also of the largest and smallest numbers."""
    random = np.random.default_rng(0)
    matrix = (random.standard_normal((6, 96)) * np.logspace(-4, 2, 6)[:, None]).astype(np.float32)
    data = gguf.quantize(matrix, Type[name])
    found = unpack(data, name)
    assert found.form is form_of(name) is (UINT4 if name in FOUR_BITS else INT8)
    assert np.array_equal(found.values(), gguf.dequantize(data, Type[name]))
    assert form_of("Q6_K") is form_of("Q5_1") is form_of("F16") is None


def _relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize(("layers", "vocab"), [(2, 131)])
def test_int8_computes_the_quantised_model(layers: int, vocab: int) -> None:
    """The logits are those of float32 kernels on the quantised weights; those of the weights before are farther off."""
    config = make_config(layers=layers, vocab=vocab)
    tensors = random_tensors(config)
    rounded = {
        name: quantize(array).values()[:, : array.shape[1]] if array.ndim == 2 else array
        for name, array in tensors.items()
    }
    prompt = PROMPT % vocab
    got = run_prompt(make_model(config, tensors, "int8"), prompt)
    assert _relative(got, run_prompt(make_model(config, rounded, "float32"), prompt)) < 2e-5
    assert _relative(got, run_prompt(make_model(config, tensors, "float32"), prompt)) > 1e-3


# Sizes that are whole groups, so that each matrix of a file can have a form.
SIZES: dict[str, dict[str, Any]] = {
    "qwen2-moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "decoder_sparse_step": 1},
}
METADATA: dict[str, dict[str, Any]] = {
    "qwen2-moe": {"expert_feed_forward_length": 64, "expert_shared_feed_forward_length": 96},
}


def _write(folder: Path, name: str, type_of: Callable[[str], Type]) -> Path:
    """A GGUF file of a family with random weights."""
    pytest.importorskip("transformers")
    from tests.tiny_families import make_family

    make_family(folder / "hf", name, **SIZES.get(name, {}))
    architecture, extra = CASES[name]
    write_gguf(folder / "hf", folder / "model.gguf", architecture, extra | METADATA.get(name, {}), type_of)
    return folder / "model.gguf"


def _mixed(tensor: str) -> Type:
    kinds = {"token_embd": Type.Q8_0, "attn_output": Type.Q4_0, "ffn_down": Type.Q5_0, "ffn_gate_inp": Type.Q8_0}
    return next((kind for part, kind in kinds.items() if part in tensor), Type.Q4_1)


@pytest.mark.parametrize("name", ["llama3", "gemma3", "mixtral", "qwen2-moe"])
def test_a_file_computes_its_own_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Matrices of 4 and 8 bits, embeddings and experts give the logits of float32 on the same file but for the order of
    sums, and no tensor is named; in chunks the same bits. As int8, 4 bits are rounded."""
    path = _write(tmp_path, name, _mixed)
    exact = run_prompt(load_model(path, "float32", 16), PROMPT)
    capsys.readouterr()
    model = load_model(path, "file", 16, "float32")
    said = "".join(capsys.readouterr())
    assert type(model._kernels) is sets.GroupedKernels
    got = run_prompt(model, PROMPT)
    if name == "qwen2-moe":  # the gate of its shared expert is one row in the format, and never quantised
        assert "shared_expert_gate" in said and "proj" not in said
        difference = np.abs(got - exact).max(-1) / np.abs(exact).max(-1)
        assert np.median(difference) < 5e-3
    else:
        assert "weights_quantised_anew" not in said
        assert _relative(got, exact) < 5e-5
        assert _relative(run_prompt(load_model(path, "int8", 16, "float32"), PROMPT), exact) > 1e-3
    for chunk in (1, 37):
        assert np.array_equal(run_prompt(model, PROMPT, chunk=chunk), got)


def test_a_matrix_that_no_form_holds_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is quantised anew, with those beside it in one matrix that have 4 bits; the others are taken as they are."""
    path = _write(tmp_path, "llama3", lambda name: Type.F32 if "attn_v" in name else _mixed(name))
    exact = run_prompt(load_model(path, "float32", 16), PROMPT)
    capsys.readouterr()
    model = load_model(path, "file", 16, "float32")
    said = "".join(capsys.readouterr())
    assert "weights_quantised_anew" in said and "o_proj" not in said and "mlp" not in said
    assert all(f"layers.0.self_attn.{name}_proj" in said for name in "qkv")
    difference = np.abs(run_prompt(model, PROMPT) - exact).max(-1) / np.abs(exact).max(-1)
    assert 1e-4 < np.median(difference) < 5e-2


def test_types_of_weights_have_keys_and_files_of_their_own(tmp_path: Path) -> None:
    """Keys and values of one type are never those of another, nor is a file of packed weights; what is mapped answers
    bit by bit like what was packed."""
    path, folder = _write(tmp_path, "llama3", lambda name: Type.Q4_1), tmp_path / "packed"
    digests = set()
    for dtype in ("float32", "bfloat16", "int8", "file"):
        first = load_model(path, dtype, 16, "float32", 1, weights_cache=folder)  # type: ignore[arg-type]
        digests.add(first.digests.attention)
        if dtype in ("int8", "file"):
            again = load_model(path, dtype, 16, "float32", 1, weights_cache=folder)  # type: ignore[arg-type]
            assert again._weights._memory.filled
            assert np.array_equal(run_prompt(again, PROMPT), run_prompt(first, PROMPT))
    assert len(digests) == len(list(folder.glob("*.packed"))) == 4


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    """A directory has no bits of its own, and a GPU's kernels read no groups."""
    path = make_tiny_llama(tmp_path / "tiny")
    with pytest.raises(InvalidArgument, match=r"dtype.*file.*int8"):
        load_model(path, "file", 16)
    for dtype in ("int8", "file"):
        with pytest.raises(InvalidArgument, match=rf"dtype.*{dtype}.*bfloat16"):
            load_on(ComputeDevice(interpreted=True), path, dtype, 16)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"dtype.*int4.*file"):
        load_model(path, "int4", 16)  # type: ignore[arg-type]
