"""Checks of single fields of session messages, before the cache manager sees them. Pure.

Invariant: a wrong field is refused by its name and with what is allowed, and never repeated in the message beyond a
number. Called by `operations.py` and `service.py`. Whose block or lease an id is, only the manager knows.
"""

from __future__ import annotations

from typing import Final

from cachemgr.ids import BlockArray
from common.errors import InvalidArgument
from common.layout import WINDOW_SHARE, KvDtype, KvLayout
from common.tokens import unpack_tokens
from tessera.cache.v1 import cache_pb2
from tessera.common.v1 import common_pb2

MAX_DECODER_NAME_CHARACTERS: Final = 64
MAX_TTL_SECONDS: Final = 100 * 365.25 * 86_400
NS: Final = 1_000_000_000


def layout_of(message: common_pb2.KvLayout) -> KvLayout:
    """The layout of an attach. Raises InvalidArgument where no kernel could serve it."""
    try:
        return KvLayout(
            num_layers=message.num_layers,
            num_kv_heads=message.num_kv_heads,
            head_dim=message.head_dim,
            block_tokens=message.block_tokens,
            dtype=KvDtype(message.dtype),
            quantization=message.quantization,
            version=message.version,
            window_tokens=message.window_tokens,
            window_layers=tuple(message.window_layers),
            window_share=message.window_share or WINDOW_SHARE,
        )
    except ValueError as error:
        raise InvalidArgument("attach.layout", str(error)) from None


def check_ttl(field: str, seconds: float) -> int:
    """A time to live in nanoseconds, at least 1; 0 means never. Raises InvalidArgument; NaN is refused."""
    if not 0 <= seconds <= MAX_TTL_SECONDS:
        raise InvalidArgument(field, "allowed is 0, or a number of seconds of at most 100 years")
    return max(1, int(seconds * NS)) if seconds else 0


def check_decoder(request: cache_pb2.AttachRequest) -> None:
    """Raises InvalidArgument where an attach names no process or no proper decoder name."""
    check_text("attach.decoder_name", request.decoder_name, MAX_DECODER_NAME_CHARACTERS)
    if request.process_id < 1:
        raise InvalidArgument("attach.process_id", f"is {request.process_id}; allowed are numbers above 0")


def unpack_blocks(data: bytes, field: str) -> BlockArray:
    """Block ids of a field, int32 [n], all >= 1. Raises InvalidArgument; the manager checks whose they are."""
    blocks = unpack_tokens(data, field)
    if blocks.size and int(blocks.min()) < 1:
        raise InvalidArgument(field, "holds the null block; allowed are ids of the session's credit")
    return blocks


def pairs_of(data: bytes, field: str) -> BlockArray:
    """Pairs (block, its window block) of a field, int32 [n, 2], all >= 1. Raises InvalidArgument."""
    numbers = unpack_blocks(data, field)
    if len(numbers) % 2:
        raise InvalidArgument(field, f"has {len(numbers)} numbers; allowed are whole pairs")
    return numbers.reshape(-1, 2)


def check_text(field: str, text: str, most: int) -> None:
    """Raises InvalidArgument unless `text` is 1..most printable characters."""
    if not 1 <= len(text) <= most or not text.isprintable():
        raise InvalidArgument(field, f"allowed are 1..{most} printable characters")


def check_most(field: str, value: int, most: int) -> None:
    """Raises InvalidArgument where a count is above `most`."""
    if value > most:
        raise InvalidArgument(field, f"is {value}; allowed is at most {most}")
