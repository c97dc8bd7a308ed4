"""The cache key: every part of it alone decides, and nothing but the tenant's secret opens it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.ids import TenantId
from cachemgr.keys import _TAGS, MAX_FIELD_BYTES, ROOT_BYTES, CacheKey, Scope, derive_root, differing_parts
from cachemgr.results import Acquired, SequenceReport
from common.errors import InvalidArgument
from tessera.common.v1 import common_pb2
from tests.cachemgr.core_rig import Rig, pack

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
    multimodal_digests=(b"m" * 32, b"n" * 32),
    scope=Scope.GROUP,
    scope_name="team",
)
FLIPPED: dict[str, dict[str, object]] = {
    "weights_digest": {"weights_digest": b"W" * 32},
    "revision": {"revision": "2"},
    "adapter_digest": {"adapter_digest": b"x"},
    "tokenizer_digest": {"tokenizer_digest": b"T" * 32},
    "position_digest": {"position_digest": b"P" * 32},
    "attention_digest": {"attention_digest": b"A" * 32},
    "kv_dtype": {"kv_dtype": "bfloat16"},
    "kv_quantization": {"kv_quantization": "int8"},
    "layout_version": {"layout_version": 2},
    "multimodal_digests": {"multimodal_digests": (b"n" * 32, b"m" * 32)},  # the order is part of the key
    "multimodal_digests, one more": {"multimodal_digests": (b"m" * 32, b"n" * 32, b"o" * 32)},
    "multimodal_digests, one less": {"multimodal_digests": (b"m" * 32,)},
    "scope": {"scope": Scope.PUBLIC, "scope_name": ""},
    "scope_name": {"scope_name": "crew"},
}


def test_equal_keys_have_one_root() -> None:
    """The root depends on the values of the key and the secret alone."""
    again = dataclasses.replace(KEY)
    assert derive_root(SECRET, KEY) == derive_root(bytes(SECRET), again)
    assert len(derive_root(SECRET, KEY)) == ROOT_BYTES


def change(name: str) -> CacheKey:
    """KEY with one field flipped; where the scope is, its name goes too, as a key without a group has none."""
    return dataclasses.replace(KEY, **FLIPPED[name])


@pytest.mark.parametrize("name", sorted(FLIPPED))
def test_each_field_alone_changes_the_root(name: str) -> None:
    """Two keys that differ in one field share nothing, and are told apart by that field alone."""
    assert derive_root(SECRET, change(name)) != derive_root(SECRET, KEY)
    assert set(differing_parts(KEY, change(name))) == set(FLIPPED[name])
    assert differing_parts(KEY, dataclasses.replace(KEY)) == ()


@pytest.mark.parametrize("name", sorted(FLIPPED))
def test_each_field_alone_makes_a_resident_prompt_a_miss(name: str) -> None:
    """Asked of the manager: with everything equal the prompt is a hit; with one part flipped it is a miss."""
    rig = Rig()
    prompt = list(range(12))

    def serve(key: CacheKey) -> int:
        answer = rig.manager.acquire(
            rig.session, tenant=TenantId("a"), root=derive_root(SECRET, key), tokens=pack(prompt), request_id="r",
            sample=0, now_ns=0,
        )  # fmt: skip
        assert isinstance(answer, Acquired)
        done = SequenceReport(answer.lease_id, sealed_tokens=12, copied=answer.copy is not None, release=True)
        rig.report(done)
        return answer.cached_tokens

    assert serve(KEY) == 0
    assert serve(dataclasses.replace(KEY)) == len(prompt) - 1
    assert serve(change(name)) == 0
    assert serve(change(name)) == len(prompt) - 1
    assert serve(KEY) == len(prompt) - 1


def test_every_pair_of_scopes_is_apart() -> None:
    """A private, a group's and a public key of the same content share nothing."""
    private, public = (dataclasses.replace(KEY, scope=scope, scope_name="") for scope in (Scope.PRIVATE, Scope.PUBLIC))
    assert len({derive_root(SECRET, key) for key in (private, public, KEY)}) == 3


def test_every_field_is_covered_by_the_flips() -> None:
    """A field that is added to the key must be flipped above, has a tag of its own, and is part of what is hashed."""
    names = {field.name for field in dataclasses.fields(CacheKey)}
    assert {name.partition(",")[0] for name in FLIPPED} == names
    assert {tag.name for tag in common_pb2.CacheKey.DESCRIPTOR.fields} == names
    assert {tag.name: tag.number for tag in common_pb2.CacheKey.DESCRIPTOR.fields} == _TAGS
    for name in names:
        assert change(name).canonical() != KEY.canonical()


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
