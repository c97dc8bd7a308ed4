"""No block of an answer is left out where its window blocks are named, also none of a field that is added later."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from cachemgr.window_messages import blocks_named
from common.tokens import pack_tokens
from tessera.cache.v1 import cache_pb2

RESULTS = [field.name for field in cache_pb2.SessionResponse.DESCRIPTOR.oneofs_by_name["result"].fields]
NO_BLOCKS = {"scrub", "window_blocks", "window_scrub"}  # of the message itself


def filled(message: Message, numbers: Iterator[int], result: str = "") -> list[int]:
    """Puts two blocks into every field of packed blocks, and one into every number that is a block, of a message and
    all that it may hold; of the oneof, into `result` alone. Returns the blocks."""
    blocks: list[int] = []
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof is not None and field.name != result:
            continue
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            value = getattr(message, field.name)
            if field.name == "metadata":  # a map of texts
                continue
            for _ in range(2 if field.is_repeated else 1):
                part = value.add() if field.is_repeated else value
                part.SetInParent()
                blocks += filled(part, numbers)
        elif field.name in ("blocks", "credit") or (field.name.endswith("_blocks") and field.name not in NO_BLOCKS):
            if field.type != FieldDescriptor.TYPE_BYTES:
                continue
            two = [next(numbers), next(numbers)]
            setattr(message, field.name, pack_tokens(two))
            blocks += two
        elif field.name in ("source", "target"):
            setattr(message, field.name, block := next(numbers))
            blocks.append(block)
    return blocks


@pytest.mark.parametrize("result", [name for name in RESULTS if name != "attach"])
def test_every_block_of_an_answer_is_found(result: str) -> None:
    """Whatever the result, of every message in it; a session that goes on hears of all that it holds (`name_all`)."""
    response = cache_pb2.SessionResponse()
    blocks = filled(response, count(1), result)
    assert len(blocks) >= 2
    assert blocks_named(response).tolist() == sorted(blocks)


def test_the_walk_finds_what_a_table_a_copy_and_a_replacement_name() -> None:
    """Positive control of the walk itself."""
    found = {name: len(filled(cache_pb2.SessionResponse(), count(1), name)) for name in RESULTS}
    assert found["heartbeat"] == 2  # the credit
    assert found["acquire"] == found["rollback"] == found["make_writable"] == 6
    assert found["fork"] == 2 + 2 * 4
    assert found["report"] >= 2 + 2 * 2 and found["commit"] == 2 + 2 * 2
