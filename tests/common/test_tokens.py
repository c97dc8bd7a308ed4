"""Packed token ids: what is accepted, alone and in runs, and that the check without an array says the same."""

from __future__ import annotations

import pytest

from common.errors import InvalidArgument
from common.tokens import check_tokens, pack_tokens, unpack_tokens

GOOD = ([], [0], [1], [2**31 - 1], [5, 0, 2**31 - 1])
BAD = (b"\1", b"\0\0\0\x80", b"\xff\xff\xff\xff", b"\0\0\0\0\0", pack_tokens([3]) + b"\0\0\0\x80")


@pytest.mark.parametrize("ids", GOOD)
def test_ids_come_back_as_they_went(ids: list[int]) -> None:
    """Packing and unpacking are each other's reverse, and both checks agree."""
    data = pack_tokens(ids)
    check_tokens(data)
    assert unpack_tokens(data).tolist() == ids


@pytest.mark.parametrize("data", BAD)
def test_broken_lengths_and_negative_ids_are_refused_by_field(data: bytes) -> None:
    """Both checks refuse the same bytes, and name the field."""
    for check in (check_tokens, unpack_tokens):
        with pytest.raises(InvalidArgument) as caught:
            check(data, "acquire.tokens")
        assert "acquire.tokens" in str(caught.value.violations if hasattr(caught.value, "violations") else caught.value)
