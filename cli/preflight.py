"""What can be wrong with the options of a node, found before any of its processes starts: listeners, threads, the
model's files, and a pool too small for a model.

Invariant: nothing that would be served is refused here; what needs more than a look at a header is left to the service
that reads it. Called by `up` and `demo`; it starts and changes nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from cli.errors import EXIT_USAGE, CommandError
from common.addresses import is_local
from common.config import DEFAULT_POOL_BYTES, MIN_POOL_BLOCKS, Options
from common.devices import CPU
from common.errors import TesseraError
from common.gguf_metadata import read_metadata
from common.layout import KvLayout, default_kv_dtype
from common.memory import machine_bytes

WEIGHTS = "*.safetensors"
CONFIG, TOKENIZER = "config.json", "tokenizer.json"


def check_options(options: Options) -> None:
    """Raises CommandError, with the option and what is allowed, for what no process of the node would start with."""
    _check_listeners(options)
    cores = len(os.sched_getaffinity(0))
    if options.threads > cores:
        _refuse("--threads", f"{options.threads} is outside 0..{cores}, the CPUs of this machine for one decoder")
    if options.model is not None:
        _check_model(options, options.model)


def _check_listeners(options: Options) -> None:
    for option, path in (("--tls-cert", options.tls_cert), ("--tls-key", options.tls_key)):
        if path is not None:
            try:
                path.open("rb").close()
            except OSError as error:
                _refuse(option, f"{path} cannot be read: {error.strerror}")
    if not (options.tls_cert or options.insecure_listen or is_local(options.listen)):
        _refuse(
            "--listen",
            f"{options.listen} is beyond loopback: give --tls-cert and --tls-key, or accept keys and prompts in "
            "plaintext with --insecure-listen",
        )
    if options.admin_listen is not None and not is_local(options.admin_listen):
        _refuse("--admin-listen", f"{options.admin_listen} is beyond loopback; the admin RPC has no TLS")


def _check_model(options: Options, model: Path) -> None:
    sizes = _sizes_of_directory(model) if model.is_dir() else _sizes_of_file(model)
    if sizes is None or options.pool_blocks is not None:
        return
    try:
        layout = KvLayout.of(*sizes, options.block_tokens, options.kv_dtype or default_kv_dtype(options.dtype))
    except ValueError:
        return  # the decoder says why
    pool = options.pool_bytes or DEFAULT_POOL_BYTES
    if options.device == CPU and pool > machine_bytes():
        _refuse(
            "--pool-bytes", f"{pool} bytes are more than the {machine_bytes()} bytes of memory that this machine has"
        )
    if pool < MIN_POOL_BLOCKS * layout.block_bytes:
        _refuse(
            "--pool-bytes",
            f"{pool} bytes are fewer than {MIN_POOL_BLOCKS} blocks of {layout.block_bytes} bytes, as this model needs",
        )


def _sizes_of_file(path: Path) -> tuple[int, int, int] | None:
    """(layers, key heads, head size) of a GGUF file; None where its header does not say them plainly."""
    try:
        fields = read_metadata(path)
    except TesseraError as error:
        _refuse("--model", f"{path}: {error.message}; served are GGUF files and Hugging Face directories")
    family = fields.get("general.architecture", "")
    heads = fields.get(f"{family}.attention.head_count")
    width = fields.get(f"{family}.embedding_length")
    size = fields.get(f"{family}.attention.key_length") or _part(width, heads)
    return _sizes(fields.get(f"{family}.block_count"), fields.get(f"{family}.attention.head_count_kv", heads), size)


def _sizes_of_directory(path: Path) -> tuple[int, int, int] | None:
    """As `_sizes_of_file`, of a Hugging Face directory."""
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "is no JSON"
        _refuse("--model", f"{path / CONFIG}: {why}; served are GGUF files and Hugging Face directories")
    if not isinstance(config, dict):
        _refuse("--model", f"{path / CONFIG}: is no object")
    if not any(path.glob(WEIGHTS)):
        _refuse("--model", f"{path} holds no weights ({WEIGHTS})")
    if not (path / TOKENIZER).is_file():
        _refuse("--model", f"{path} holds no {TOKENIZER}")
    heads = config.get("num_attention_heads")
    size = config.get("head_dim") or _part(config.get("hidden_size"), heads)
    return _sizes(config.get("num_hidden_layers"), config.get("num_key_value_heads", heads), size)


def _part(width: Any, heads: Any) -> int | None:
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None


def _sizes(layers: Any, key_heads: Any, head_dim: Any) -> tuple[int, int, int] | None:
    if isinstance(layers, int) and isinstance(key_heads, int) and isinstance(head_dim, int):
        return layers, key_heads, head_dim
    return None


def _refuse(option: str, why: str) -> NoReturn:
    raise CommandError(f"{option}: {why}", EXIT_USAGE)
