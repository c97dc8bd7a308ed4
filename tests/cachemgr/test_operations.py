"""The cache key of a request: found again by its bytes, and checked all the same."""

from __future__ import annotations

import pytest

from cachemgr import operations
from cachemgr.operations import cache_key_of
from common.errors import InvalidArgument
from tessera.common.v1 import common_pb2


def message(**fields: object) -> common_pb2.CacheKey:
    return common_pb2.CacheKey(**{"weights_digest": b"w" * 32, "kv_dtype": "float32", "layout_version": 1, **fields})


def test_equal_messages_are_one_key_and_others_are_not() -> None:
    """A key that was seen is found again, and each field still tells keys apart."""
    first = cache_key_of(message())
    assert cache_key_of(message()) is first
    for fields in (
        {"weights_digest": b"v" * 32}, {"revision": "r"}, {"adapter_digest": b"a"}, {"tokenizer_digest": b"t"},
        {"position_digest": b"p"}, {"attention_digest": b"a"}, {"kv_dtype": "float16"}, {"kv_quantization": "int8"},
        {"layout_version": 2}, {"multimodal_digests": [b"m"]},
    ):  # fmt: skip
        assert cache_key_of(message(**fields)) != first


def test_a_wrong_key_is_refused_each_time() -> None:
    """What is refused is not remembered as a key."""
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="weights_digest"):
            cache_key_of(message(weights_digest=b""))
        with pytest.raises(InvalidArgument, match="scope"):
            cache_key_of(message(scope=common_pb2.SCOPE_GROUP))


def test_a_key_of_many_digests_is_not_kept() -> None:
    """Nobody fills the memory with keys."""
    large = message(multimodal_digests=[bytes([number]) * 1000 for number in range(8)])
    before = operations._seen_key.cache_info().currsize
    assert cache_key_of(large) == cache_key_of(large)
    assert operations._seen_key.cache_info().currsize == before
    for number in range(200):
        cache_key_of(message(revision=str(number)))
    assert operations._seen_key.cache_info().currsize <= operations.SEEN_KEYS
