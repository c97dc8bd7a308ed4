"""Which window blocks the blocks of an answer have: filled in once the rest of the answer is there, whatever it is.

Invariant: each block that an answer names and that has a window block is named with it, as both are when the operation
is over. Called by `service.py` for every answer, where there are layer groups. Holds no state.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cachemgr.ids import BlockArray, SessionId
from cachemgr.manager import CacheManager
from common.tokens import TOKEN_DTYPE, pack_tokens
from tessera.cache.v1 import cache_pb2

_Tabled = cache_pb2.AcquireResponse | cache_pb2.Branch | cache_pb2.RollbackResponse | cache_pb2.MakeWritableResponse


def name_window_blocks(manager: CacheManager, response: cache_pb2.SessionResponse) -> None:
    """Completes an answer with the window blocks of what it names, and those of them that are to be zeroed."""
    if not manager.num_window_blocks:
        return
    _name(manager, response, blocks_named(response))
    scrub = manager.take_window_scrub()
    if len(scrub):
        response.window_scrub = pack_tokens(scrub)


def name_all(manager: CacheManager, response: cache_pb2.SessionResponse, session: SessionId) -> None:
    """As `name_window_blocks`, for the answer that a session goes on: of everything that it holds."""
    if manager.num_window_blocks:
        _name(manager, response, manager.held_blocks(session))


def blocks_named(response: cache_pb2.SessionResponse) -> BlockArray:
    """int32 [n]: the blocks of an answer, each once."""
    parts = [part for part in _parts(response) if part]
    if not parts:
        return np.zeros(0, np.int32)
    blocks = np.frombuffer(b"".join(parts), TOKEN_DTYPE)
    return blocks if len(parts) == 1 else np.unique(blocks)


def _name(manager: CacheManager, response: cache_pb2.SessionResponse, blocks: BlockArray) -> None:
    if len(blocks):
        response.window_blocks = pack_tokens(manager.window_pairs(blocks))


def _parts(response: cache_pb2.SessionResponse) -> Iterator[bytes]:
    yield response.credit
    match response.WhichOneof("result"):
        case "report":
            yield from (item.blocks for item in response.report.replacements)
            yield from (item.blocks for item in response.report.growths)
        case "acquire":
            yield from _table(response.acquire)
        case "fork":
            for branch in response.fork.branches:
                yield from _table(branch)
        case "rollback":
            yield from _table(response.rollback)
        case "make_writable":
            yield from _table(response.make_writable)
        case "commit":
            yield from (item.blocks for item in response.commit.replacements)


def _table(message: _Tabled) -> Iterator[bytes]:
    yield message.blocks
    if message.HasField("copy"):
        yield pack_tokens((message.copy.source, message.copy.target))
