"""The cache key of a loaded model: everything but tokens that decides whether keys and values may be shared.

Invariant: digests are of content, never of names; two decoders with the same key compute the same keys and values.
Called once at start. The daemon alone turns the key into a tree's root.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

from decoder.weights.gguf_reader import GgufReader
from tessera.common.v1 import common_pb2

_CHUNK_BYTES: Final = 1 << 20


def tokenizer_digest(model: Path) -> bytes:
    """SHA-256 of `tokenizer.json`, or of a GGUF file's tokenizer fields; empty where the model has no tokenizer."""
    digest = hashlib.sha256()
    if model.is_dir():
        path = model / "tokenizer.json"
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.digest()
    fields = GgufReader(model).field_bytes("tokenizer.")
    for name, value in sorted(fields.items()):
        for part in (name.encode(), value):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest() if fields else b""


def cache_key(model: Any, tokenizer: bytes) -> common_pb2.CacheKey:
    """The key of `model` (a `CausalLM`: its `digests` and `layout`) with the tokenizer's digest."""
    layout = model.layout
    return common_pb2.CacheKey(
        weights_digest=model.digests.weights,
        tokenizer_digest=tokenizer,
        position_digest=model.digests.position,
        attention_digest=model.digests.attention,
        kv_dtype=layout.dtype.value,
        kv_quantization=layout.quantization,
        layout_version=layout.version,
        scope=common_pb2.SCOPE_PRIVATE,
    )
