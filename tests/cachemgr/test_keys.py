"""The cache key: every part of it alone decides, and nothing but the tenant's secret opens it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.keys import MAX_FIELD_BYTES, ROOT_BYTES, CacheKey, Scope, derive_root
from common.errors import InvalidArgument

SECRET = bytes(range(32))
KEY = CacheKey(
    weights_digest=b"w" * 32,
    revision="1",
    adapter_digest=b"",
    tokenizer_digest=b"t" * 32,
    position_digest=b"p" * 32,
    attention_digest=b"a" * 32,
    kv_dtype="float32",
    kv_quantization="none",
    layout_version=1,
    multimodal_digests=(b"m" * 32,),
    scope=Scope.GROUP,
    scope_name="team",
)
FLIPPED = {
    "weights_digest": b"W" * 32,
    "revision": "2",
    "adapter_digest": b"x",
    "tokenizer_digest": b"T" * 32,
    "position_digest": b"P" * 32,
    "attention_digest": b"A" * 32,
    "kv_dtype": "bfloat16",
    "kv_quantization": "int8",
    "layout_version": 2,
    "multimodal_digests": (b"m" * 32, b"n" * 32),
    "scope_name": "crew",
}


def test_equal_keys_have_one_root() -> None:
    """The root depends on the values of the key and the secret alone."""
    again = dataclasses.replace(KEY)
    assert derive_root(SECRET, KEY) == derive_root(bytes(SECRET), again)
    assert len(derive_root(SECRET, KEY)) == ROOT_BYTES


@pytest.mark.parametrize("name", sorted(FLIPPED))
def test_each_field_alone_changes_the_root(name: str) -> None:
    """Two keys that differ in one field share nothing."""
    assert derive_root(SECRET, dataclasses.replace(KEY, **{name: FLIPPED[name]})) != derive_root(SECRET, KEY)


def test_scope_alone_changes_the_root() -> None:
    """A private and a public key of the same content share nothing."""
    private, public = (dataclasses.replace(KEY, scope=scope, scope_name="") for scope in (Scope.PRIVATE, Scope.PUBLIC))
    assert len({derive_root(SECRET, key) for key in (private, public, KEY)}) == 3


def test_every_field_is_covered_by_the_flips() -> None:
    """A field that is added to the key must be added to the tests above."""
    assert {field.name for field in dataclasses.fields(CacheKey)} == {*FLIPPED, "scope"}


def test_another_secret_has_another_root() -> None:
    """Two tenants with the same key share nothing."""
    assert derive_root(SECRET, KEY) != derive_root(SECRET[::-1], KEY)


@given(st.tuples(*[st.text(alphabet="ab\0", max_size=3)] * 2), st.tuples(*[st.text(alphabet="ab\0", max_size=3)] * 2))
def test_neighbouring_fields_never_run_together(left: tuple[str, str], right: tuple[str, str]) -> None:
    """Moving characters from one field to the next is another key."""
    keys = [dataclasses.replace(KEY, kv_dtype=pair[0], kv_quantization=pair[1]) for pair in (left, right)]
    assert (keys[0].canonical() == keys[1].canonical()) == (left == right)


@given(st.lists(st.binary(max_size=3), max_size=4), st.lists(st.binary(max_size=3), max_size=4))
def test_multimodal_digests_are_a_list(left: list[bytes], right: list[bytes]) -> None:
    """Order and borders of the digests are part of the key."""
    keys = [dataclasses.replace(KEY, multimodal_digests=tuple(digests)) for digests in (left, right)]
    assert (derive_root(SECRET, keys[0]) == derive_root(SECRET, keys[1])) == (left == right)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"weights_digest": b""}, "key.weights_digest"),
        ({"revision": "x" * (MAX_FIELD_BYTES + 1)}, "key.revision"),
        ({"revision": "\ud800"}, "key.revision"),
        ({"layout_version": -1}, "key.layout_version"),
        ({"layout_version": 1 << 32}, "key.layout_version"),
        ({"multimodal_digests": (b"",) * 5000}, "key.multimodal_digests"),
        ({"scope": Scope.PRIVATE}, "key.scope_name"),
        ({"scope_name": ""}, "key.scope_name"),
    ],
)
def test_bad_fields_are_refused_by_name(change: dict[str, object], field: str) -> None:
    """A key that cannot be encoded says which field is wrong."""
    with pytest.raises(InvalidArgument) as caught:
        dataclasses.replace(KEY, **change)
    assert caught.value.field == field


@pytest.mark.parametrize("secret", [b"", b"short", b"x" * 65])
def test_bad_secrets_are_refused(secret: bytes) -> None:
    """A secret has 16..64 bytes; the error does not quote it."""
    with pytest.raises(InvalidArgument) as caught:
        derive_root(secret, KEY)
    assert not secret or secret.decode() not in str(caught.value)
