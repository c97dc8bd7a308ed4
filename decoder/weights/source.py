"""Where tensors come from: one interface over a GGUF file and a Hugging Face directory.

Tensors are handed out one at a time as float32 arrays in the common form of `names.py`, so that a load never holds
two copies of the model. A name that the model does not use is an error of the caller (`loader.py`), never skipped.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Final, Protocol

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from common.errors import InvalidArgument
from decoder.kernels.grouped_weights import GroupedForm
from decoder.models.config import ModelConfig, refuse
from decoder.models.grouping import Grouped
from decoder.weights.file_digests import KnownDigests, hash_files
from decoder.weights.gguf_config import config_from_gguf
from decoder.weights.gguf_groups import form_of, unpack
from decoder.weights.gguf_reader import GgufReader
from decoder.weights.hugging_face_config import config_from_hugging_face
from decoder.weights.names import TensorView, gguf_name, hugging_face_name, views

FloatArray = NDArray[np.float32]

_BLOCK_TYPES: Final = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_DEQUANTIZE_VALUES: Final = 1 << 16  # values at a time: they stay in the second-level cache
_FIRST: Final = "blk.0."
_BIAS: Final = ".bias"
_GGUF_DIVISORS: Final = ("rope_freqs", "rope_factors_short", "rope_factors_long")


class TensorSource(Protocol):
    """A model on disk: its configuration, its tensors' names and shapes, and the tensors themselves."""

    config: ModelConfig

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its name in the common form (an unknown tensor keeps its own name)."""

    def read(self, name: str) -> FloatArray:
        """One tensor as a float32 array in the layout of `torch.nn.Linear` ([out, in])."""

    def digest(self, known: KnownDigests | None = None) -> bytes:
        """sha256 of the content of the weights; files that are in `known`, unchanged, are not read for it."""


class GgufSource:
    """A GGUF file; quantised tensors are dequantised."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._reader = GgufReader(path)
            # Token lists are large and not the model's business.
            fields = {key: field.contents() for key, field in self._reader.fields.items() if not _is_vocabulary(key)}
        except (ValueError, IndexError, OSError, KeyError, OverflowError, struct.error) as error:
            raise InvalidArgument("model", f"{path} is not a readable GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise InvalidArgument("model", f"{path} holds no token embedding")
        divisors = {
            name: self._divisors(f"{name}.weight") for name in _GGUF_DIVISORS if f"{name}.weight" in self._tensors
        }
        biases = [
            n[len(_FIRST) :].removesuffix(_BIAS) for n in self._tensors if n.startswith(_FIRST) and n.endswith(_BIAS)
        ]
        tied = "output.weight" not in self._tensors
        self.config = config_from_gguf(fields, int(embedding.shape[1]), tied, divisors, biases)
        # GGUF lists the fastest dimension first.
        stored = {
            gguf_name(name, self.config): (name, tuple(int(n) for n in reversed(tensor.shape)))
            for name, tensor in self._tensors.items()
            if name.removesuffix(".weight") not in divisors
        }
        self._views = views(self.config, stored, gguf=True)

    def _divisors(self, name: str) -> tuple[float, ...]:
        return tuple(float(value) for value in np.asarray(self._tensors[name].data, np.float32).reshape(-1))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: view.shape for name, view in self._views.items()}

    def read(self, name: str) -> FloatArray:
        view = self._views[name]
        tensor = self._tensors[view.stored]
        # Rows are quantised one by one, so some of them can be taken before they are dequantised.
        data = _part(np.asarray(tensor.data), view)
        try:
            values = _dequantize(data, tensor.tensor_type)
        except NotImplementedError as error:
            raise refuse(f"tensor {name}", tensor.tensor_type.name, "a type the gguf package dequantises") from error
        array = np.ascontiguousarray(values, dtype=np.float32).reshape(view.shape)
        return _unpermute(array, view.heads) if view.heads else array

    def form(self, name: str) -> GroupedForm | None:
        """The form of whole numbers in groups that holds a tensor exactly; None where there is none."""
        view = self._views[name]
        return form_of(self._tensors[view.stored].tensor_type.name) if len(view.shape) == 2 else None

    def groups(self, name: str) -> Grouped:
        """A tensor that has a form, as it is."""
        view = self._views[name]
        tensor = self._tensors[view.stored]
        found = unpack(_part(np.asarray(tensor.data), view), tensor.tensor_type.name)
        return found.with_rows(lambda rows: _unpermute(rows, view.heads)) if view.heads else found

    def digest(self, known: KnownDigests | None = None) -> bytes:
        return hash_files([self._path], known)


class HuggingFaceSource:
    """A directory with config.json and model.safetensors, or shards with their index."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        values = _read_json(directory / "config.json")
        generation = directory / "generation_config.json"
        if generation.is_file():
            # The ids that end a chat turn are often listed there alone.
            values = {**values, **{k: v for k, v in _read_json(generation).items() if k == "eos_token_id"}}
        self.config = config_from_hugging_face(values)
        self._files = self._list_files()
        self._owner: dict[str, Any] = {}
        stored: dict[str, tuple[str, tuple[int, ...]]] = {}
        for path in self._files:
            try:
                shard: Any = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise InvalidArgument("model", f"{path} is not a readable safetensors file: {error}") from error
            for name in list(shard.keys()):
                self._owner[name] = shard
                stored[hugging_face_name(name)] = (name, tuple(shard.get_slice(name).get_shape()))
        self._views = views(self.config, stored, gguf=False)

    def _list_files(self) -> list[Path]:
        index = self._directory / "model.safetensors.index.json"
        if not index.is_file():
            single = self._directory / "model.safetensors"
            if not single.is_file():
                raise InvalidArgument("model", f"{self._directory} holds neither model.safetensors nor its index")
            return [single]
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        for name in names:
            if Path(name).name != name or not (self._directory / name).is_file():
                raise InvalidArgument("model", f"{index} names {name!r}, which is no file of its folder")
        if not names:
            raise InvalidArgument("model", f"{index} lists no file")
        return [self._directory / name for name in names]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: view.shape for name, view in self._views.items()}

    def read(self, name: str) -> FloatArray:
        view = self._views[name]
        tensor = _part(self._owner[view.stored].get_slice(view.stored), view)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise refuse(f"tensor {name}", str(tensor.dtype), "float32, bfloat16 or float16")
        array: FloatArray = tensor.to(torch.float32).contiguous().numpy()
        return array + np.float32(view.offset) if view.offset else array

    def digest(self, known: KnownDigests | None = None) -> bytes:
        return hash_files(self._files, known)


def open_source(path: Path) -> TensorSource:
    """The source for a path: a `.gguf` file or a directory. Raises InvalidArgument on anything else."""
    if path.is_dir():
        return HuggingFaceSource(path)
    if path.is_file() and path.suffix == ".gguf":
        return GgufSource(path)
    if not path.exists():
        raise InvalidArgument("model", f"there is no {path}; give a .gguf file or a directory with config.json")
    raise InvalidArgument("model", f"{path} is neither a .gguf file nor a directory with config.json")


def _dequantize(data: NDArray[Any], kind: Any) -> NDArray[Any]:
    """The values of a tensor; raises NotImplementedError on a type the gguf package does not know."""
    if kind.name not in _BLOCK_TYPES:
        values: NDArray[Any] = gguf.dequantize(data, kind)
        return values
    # The package's own loop takes sixteen rows at a time, which costs more than the arithmetic.
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    decode = getattr(gguf.quants, kind.name).dequantize_blocks
    blocks = data.reshape(-1, block_bytes)
    out = np.empty((blocks.shape[0], block_size), np.float32)
    step = max(1, _DEQUANTIZE_VALUES // block_size)
    for first in range(0, blocks.shape[0], step):
        out[first : first + step] = decode(blocks[first : first + step])
    return out


def _part(stored: Any, view: TensorView) -> Any:
    """The rows of one view of a stored tensor."""
    if not view.stacked:
        return stored[view.first : view.first + view.shape[0]]
    per_entry = len(stored[0]) if isinstance(stored, np.ndarray) else stored.get_shape()[1]
    parts = per_entry // view.shape[0]
    entry, place = divmod(view.first, parts)
    rows = stored[entry : entry + 1, place * view.shape[0] : (place + 1) * view.shape[0]]
    return rows[0]


def _unpermute(array: NDArray[Any], num_heads: int) -> NDArray[Any]:
    # GGUF stores rotary pairs next to each other; the model rotates the two halves of a head against each other.
    pairs = array.reshape(num_heads, len(array) // num_heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))


def _is_vocabulary(key: str) -> bool:
    return key in (
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.scores",
        "tokenizer.ggml.token_type",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument("model", f"{path} is missing or not JSON") from error
    if not isinstance(values, dict):
        raise InvalidArgument("model", f"{path} is not a JSON object")
    return values
