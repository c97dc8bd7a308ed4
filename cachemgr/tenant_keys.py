"""The text of a tenant key, its salted hash, and the names that tenants, groups and approvals may have. Pure.

Invariant: a key is `tsr_<key id>_<secret>`; the secret has 256 random bits, so a fast salted hash (BLAKE2b) is enough,
and it is never stored. Called by the tenant modules and the admin service.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Final

from cachemgr.ids import TenantId
from common.errors import InvalidArgument

MAX_KEY_BYTES: Final = 256
MAX_KEY_NAME_BYTES: Final = 64
SALT_BYTES: Final = 16
HASH_BYTES: Final = 32

_PREFIX: Final = "tsr"
_KEY_ID_BYTES: Final = 8
_KEY_TEXT: Final = re.compile(r"tsr_([0-9a-f]{16})_([A-Za-z0-9_-]{43})", re.ASCII)
_KEY_SECRET: Final = re.compile(r"(tsr_[0-9a-f]{16}_)[A-Za-z0-9_-]+", re.ASCII)
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)


def new_key() -> tuple[str, str]:
    """(key id, key text) of a fresh key."""
    key_id = secrets.token_hex(_KEY_ID_BYTES)
    return key_id, f"{_PREFIX}_{key_id}_{secrets.token_urlsafe(32)}"


def split_key(text: str) -> tuple[str, bytes] | None:
    """(key id, secret) of a key text; None where it is no key of ours."""
    if len(text) > MAX_KEY_BYTES:
        return None
    match = _KEY_TEXT.fullmatch(text)
    return None if match is None else (match[1], match[2].encode())


def hide_keys(text: str) -> str:
    """`text` with the secret of every key in it left out, for what is written down."""
    return _KEY_SECRET.sub(r"\1…", text)


def hash_secret(secret: bytes, salt: bytes) -> bytes:
    """The stored form of a key's secret, 32 bytes."""
    return hashlib.blake2b(secret, digest_size=HASH_BYTES, salt=salt, person=b"tessera-key").digest()


def check_name(name: str, field: str) -> str:
    """`name` of a tenant, group or approval. Raises InvalidArgument, without repeating the name."""
    if _NAME.fullmatch(name) is None:
        raise InvalidArgument(field, "allowed are 1..64 of a-z, 0-9, '-' and '_', beginning with a letter or digit")
    return name


def check_tenant_name(name: str, field: str = "tenant") -> TenantId:
    """`name` as a tenant id. Raises InvalidArgument, without repeating the name."""
    return TenantId(check_name(name, field))


def check_key_name(name: str, field: str = "name") -> str:
    """`name` for operators. Raises InvalidArgument where it is too long or not printable."""
    if len(name.encode("utf-8", "surrogatepass")) > MAX_KEY_NAME_BYTES or not name.isprintable():
        raise InvalidArgument(field, f"allowed are at most {MAX_KEY_NAME_BYTES} bytes of printable text")
    return name
