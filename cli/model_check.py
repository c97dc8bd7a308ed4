"""What can be wrong with a model's files, and with options that must fit the model, seen without loading it.

Invariant: nothing that would be served is refused here; only configurations and headers are read, and what needs more
is left to the decoder. Called by `preflight.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.errors import refuse_option
from common.config import DEFAULT_POOL_BYTES, MIN_POOL_BLOCKS, Options
from common.devices import CPU
from common.errors import InvalidArgument
from common.families import GGUF_ARCHITECTURES, SUPPORTED_ARCHITECTURES
from common.gguf_metadata import read_metadata
from common.layout import KvLayout, default_kv_dtype
from common.memory import machine_bytes

WEIGHTS = "*.safetensors"
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
MIXED_FAMILIES = ("gemma2", "gemma3_text", "qwen2", "qwen3", "qwen2_moe")
"""Families of which some layers may have a window and others none."""
FILE_DTYPE = "file"
SERVED = "served are GGUF files and Hugging Face directories"


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at a model told; None is what its files do not say plainly.

    sizes:           layers of a block at least, key heads, head size
    longest_context: tokens
    """

    sizes: tuple[int, int, int] | None
    longest_context: int | None


def look_at_model(option: str, path: Path) -> Look:
    """Raises CommandError, with the option that names the model, where it is none or none that is served."""
    return _look_at_directory(option, path) if path.is_dir() else _look_at_file(option, path)


def check_fit(options: Options, look: Look) -> None:
    """Raises CommandError where the pool, the longest context or the type of weights do not fit the model or this
    machine."""
    if options.dtype == FILE_DTYPE and options.model is not None and options.model.is_dir():
        refuse_option("--dtype", f"{FILE_DTYPE} is for GGUF files, and {options.model} is a directory; int8 has 8 bits")
    longest, wanted = look.longest_context, options.max_context
    if wanted is not None and longest is not None and wanted > longest:
        refuse_option("--max-context", f"{wanted} is more than the {longest} tokens that this model serves")
    if look.sizes is None:
        return
    try:
        layout = KvLayout.of(*look.sizes, options.block_tokens, options.kv_dtype or default_kv_dtype(options.dtype))
    except ValueError:
        return  # the decoder says why
    memory = machine_bytes()
    if options.pool_blocks is not None:
        needed = (options.pool_blocks + 1) * layout.block_bytes
        if options.device == CPU and needed > memory:
            refuse_option(
                "--pool-blocks",
                f"{options.pool_blocks} blocks of this model take {needed} bytes; this machine has {memory}",
            )
        return
    pool = options.pool_bytes or DEFAULT_POOL_BYTES
    if options.device == CPU and pool > memory:
        refuse_option("--pool-bytes", f"{pool} bytes are more than the {memory} bytes of memory that this machine has")
    if pool < MIN_POOL_BLOCKS * layout.block_bytes:
        refuse_option(
            "--pool-bytes",
            f"{pool} bytes are fewer than {MIN_POOL_BLOCKS} blocks of {layout.block_bytes} bytes, as this model needs",
        )


def _look_at_file(option: str, path: Path) -> Look:
    try:
        fields = read_metadata(path)
    except InvalidArgument as error:
        refuse_option(option, f"{path}: {error.description}; {SERVED}")
    family = fields.get("general.architecture", "")
    if family not in GGUF_ARCHITECTURES:
        refuse_option(option, f"{path}: its architecture is {family!r}; served are {', '.join(GGUF_ARCHITECTURES)}")
    heads = fields.get(f"{family}.attention.head_count")
    width = fields.get(f"{family}.embedding_length")
    size = fields.get(f"{family}.attention.key_length") or _part(width, heads)
    windows = bool(fields.get(f"{family}.attention.sliding_window")) or family.startswith("gemma")
    layers = _layers(GGUF_ARCHITECTURES[family], windows, fields.get(f"{family}.block_count"))
    sizes = _sizes(layers, fields.get(f"{family}.attention.head_count_kv", heads), size)
    return Look(sizes, _positive(fields.get(f"{family}.context_length")))


def _look_at_directory(option: str, path: Path) -> Look:
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "is no JSON"
        refuse_option(option, f"{path / CONFIG}: {why}; {SERVED}")
    if not isinstance(config, dict):
        refuse_option(option, f"{path / CONFIG}: is no object")
    family = config.get("model_type")
    if family not in SUPPORTED_ARCHITECTURES:
        served = ", ".join(SUPPORTED_ARCHITECTURES)
        refuse_option(option, f"{path / CONFIG}: its model_type is {family!r}; served are {served}")
    if not any(path.glob(WEIGHTS)):
        refuse_option(option, f"{path} holds no weights ({WEIGHTS})")
    if not (path / TOKENIZER).is_file():
        refuse_option(option, f"{path} holds no {TOKENIZER}")
    heads = config.get("num_attention_heads")
    size = config.get("head_dim") or _part(config.get("hidden_size"), heads)
    # Some ways to scale positions make a context longer than it says.
    is_scaled = config.get("rope_scaling") or config.get("rope_parameters")
    longest = None if is_scaled else _positive(config.get("max_position_embeddings"))
    windows = bool(config.get("use_sliding_window", family.startswith("gemma")))
    layers = _layers(family, windows, config.get("num_hidden_layers"))
    return Look(_sizes(layers, config.get("num_key_value_heads", heads), size), longest)


def _layers(family: str, windows: bool, layers: Any) -> Any:
    """Layers that a block holds at least: where some may have a window and others none, those may lie elsewhere."""
    return 1 if windows and family in MIXED_FAMILIES and isinstance(layers, int) else layers


def _part(width: Any, heads: Any) -> int | None:
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _sizes(layers: Any, key_heads: Any, head_dim: Any) -> tuple[int, int, int] | None:
    if isinstance(layers, int) and isinstance(key_heads, int) and isinstance(head_dim, int):
        return layers, key_heads, head_dim
    return None
