"""The cache key: everything but tokens that decides whether two prompts may share keys and values.

Invariant: two keys give one root exactly when every field is equal and the secret is the same. The only place where a
key is put together: each field is tagged and length-prefixed, so no value can run into its neighbour. The service
builds `CacheKey` from its protobuf twin; the root is all that the manager sees. Holds no secret after the call.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Final

from common.errors import InvalidArgument

ROOT_BYTES: Final = 32
MIN_SECRET_BYTES: Final = 16
MAX_SECRET_BYTES: Final = 64
MAX_FIELD_BYTES: Final = 1024
MAX_MULTIMODAL: Final = 4096


class Scope(IntEnum):
    """Who may reuse the blocks; the numbers are those of tessera.common.v1.Scope (unspecified is private)."""

    PRIVATE = 1
    GROUP = 2
    PUBLIC = 3


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Digests are of content, never of names; an empty field equals only itself. Raises InvalidArgument."""

    weights_digest: bytes
    revision: str
    adapter_digest: bytes
    tokenizer_digest: bytes
    position_digest: bytes
    attention_digest: bytes
    kv_dtype: str
    kv_quantization: str
    layout_version: int
    multimodal_digests: tuple[bytes, ...] = ()
    scope: Scope = Scope.PRIVATE
    scope_name: str = ""

    def __post_init__(self) -> None:
        for name, value in self._parts():
            if len(value) > MAX_FIELD_BYTES:
                raise InvalidArgument(f"key.{name}", f"has {len(value)} bytes; allowed are {MAX_FIELD_BYTES}")
        if not self.weights_digest:
            raise InvalidArgument("key.weights_digest", "is empty; the digest of the weights is needed")
        if len(self.multimodal_digests) > MAX_MULTIMODAL:
            raise InvalidArgument("key.multimodal_digests", f"more than {MAX_MULTIMODAL} entries")
        if not 0 <= self.layout_version < 1 << 32:
            raise InvalidArgument("key.layout_version", "allowed is 0..4294967295")
        if self.scope is not Scope.GROUP and self.scope_name:
            raise InvalidArgument("key.scope_name", "is only allowed in a GROUP scope")
        if self.scope is Scope.GROUP and not self.scope_name:
            raise InvalidArgument("key.scope_name", "is needed in a GROUP scope")

    def _parts(self) -> list[tuple[str, bytes]]:
        return [
            ("weights_digest", self.weights_digest),
            ("revision", _utf8("revision", self.revision)),
            ("adapter_digest", self.adapter_digest),
            ("tokenizer_digest", self.tokenizer_digest),
            ("position_digest", self.position_digest),
            ("attention_digest", self.attention_digest),
            ("kv_dtype", _utf8("kv_dtype", self.kv_dtype)),
            ("kv_quantization", _utf8("kv_quantization", self.kv_quantization)),
            ("scope_name", _utf8("scope_name", self.scope_name)),
            *(("multimodal_digests", digest) for digest in self.multimodal_digests),
        ]

    def canonical(self) -> bytes:
        """The encoding that is hashed: version, then per field its tag, its length (4 bytes each) and its bytes."""
        numbers = (("layout_version", self.layout_version), ("scope", int(self.scope)))
        parts = [*self._parts(), *((name, value.to_bytes(4, "little")) for name, value in numbers)]
        pieces = [b"tessera-cache-key/1"]
        for name, value in parts:
            pieces += (_TAGS[name].to_bytes(4, "little"), len(value).to_bytes(4, "little"), value)
        return b"".join(pieces)


def differing_parts(left: CacheKey, right: CacheKey) -> tuple[str, ...]:
    """The names of the fields in which two keys differ, in the order of the fields."""
    return tuple(field.name for field in fields(CacheKey) if getattr(left, field.name) != getattr(right, field.name))


# Field numbers of tessera.common.v1.CacheKey: they never change their meaning.
_TAGS: Final = {
    "weights_digest": 1,
    "revision": 2,
    "adapter_digest": 3,
    "tokenizer_digest": 4,
    "position_digest": 5,
    "attention_digest": 6,
    "kv_dtype": 7,
    "kv_quantization": 8,
    "layout_version": 9,
    "multimodal_digests": 10,
    "scope": 11,
    "scope_name": 12,
}


def derive_root(secret: bytes, key: CacheKey) -> bytes:
    """The 32-byte root of `key` under `secret` (16..64 bytes): BLAKE2b, keyed. Raises InvalidArgument."""
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise InvalidArgument("secret", f"allowed are {MIN_SECRET_BYTES}..{MAX_SECRET_BYTES} bytes")
    return hashlib.blake2b(key.canonical(), key=secret, digest_size=ROOT_BYTES, person=b"tessera-root").digest()


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"key.{name}", "is not valid Unicode") from error
