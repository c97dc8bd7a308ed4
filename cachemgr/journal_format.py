"""Where the parts of an index journal lie, and the header that says whose it is. Pure.

Invariant: the sizes follow from the number of blocks and of tokens in one; the header stands in two slots that are
written in turn, so that one of them is whole at any moment. Called by `journal.py` and `journal_file.py`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from cachemgr.journal_table import Table
from cachemgr.keys import ROOT_BYTES
from cachemgr.records import digest_of, row_words
from common.arena_sizes import ArenaSizes
from common.devices import NO_DEVICE, UUID_BYTES
from common.layout import NONCE_BYTES, TOKEN_BYTES

VERSION: Final = 4
MAGIC: Final = b"TSRJRNL\x01"
BOOT_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 16
MAX_OWNERS: Final = 16_384
MAX_PROCESSES: Final = 1_024
OWNER_BYTES: Final = 264  # u64 length, then UTF-8
TREE_BYTES: Final = 2 * ROOT_BYTES + 8
PROCESS_BYTES: Final = 328
HEADER_SLOTS: Final = 2
PAGE: Final = 4096
_HEADER: Final = struct.Struct(f"<8sIIQQQQQQ{FINGERPRINT_BYTES}s{NONCE_BYTES}s{BOOT_BYTES}s{UUID_BYTES}s")
HEADER_BYTES: Final = -(-_HEADER.size // 8) * 8


@dataclass(frozen=True, slots=True)
class JournalIdentity:
    """Which arena a journal speaks of. `boot` tells starts of the machine apart; `device_uuid` is a GPU's, or zeros."""

    num_blocks: int
    block_tokens: int
    block_bytes: int
    layout_fingerprint: bytes
    nonce: bytes
    boot: bytes
    device_uuid: bytes = NO_DEVICE
    num_window_blocks: int = 0
    window_block_bytes: int = 0

    @property
    def sizes(self) -> ArenaSizes:
        """Of the arena."""
        return ArenaSizes(self.num_blocks, self.block_bytes, self.num_window_blocks, self.window_block_bytes)


@dataclass(frozen=True, slots=True)
class TreeName:
    """Whose tree, and which: its key, the key without what is above it, and the blocks above it (0: it is no layer)."""

    owner: str
    root: bytes
    base: bytes
    start: int

    def salt(self) -> int:
        """What the tree adds to the checksums of its records: a number that is used anew validates no older record."""
        return digest_of(self.owner.encode(), self.root, self.base, self.start.to_bytes(4, "little"))


@dataclass(frozen=True, slots=True)
class Sections:
    """Byte offsets of the parts; all of them are multiples of 8."""

    num_owners: int
    num_trees: int
    processes: int
    owners: int
    trees: int
    checksums: int
    holders: int
    windows: int
    rows: int
    end: int

    @classmethod
    def of(cls, num_blocks: int, block_tokens: int, num_window_blocks: int = 0) -> Self:
        """For a pool of so many usable blocks; without window blocks there is no column of them."""
        num_owners = min(num_blocks, MAX_OWNERS)
        processes = PAGE
        owners = processes + Table.size(MAX_PROCESSES, PROCESS_BYTES)
        trees = owners + Table.size(num_owners, OWNER_BYTES)
        checksums = _page(trees + Table.size(num_blocks, TREE_BYTES))
        holders = _page(checksums + (num_blocks + 1) * 8)
        windows = _page(holders + (num_blocks + 1) * 8)
        rows = _page(windows + (num_blocks + 1) * 8) if num_window_blocks else windows
        end = rows + (num_blocks + 1) * row_words(block_tokens) * TOKEN_BYTES
        return cls(num_owners, num_blocks, processes, owners, trees, checksums, holders, windows, rows, end)


def pack_header(identity: JournalIdentity, epoch: int, turn: int) -> bytes:
    """The bytes of a header slot."""
    return _HEADER.pack(
        MAGIC,
        VERSION,
        identity.block_tokens,
        identity.num_blocks,
        identity.block_bytes,
        identity.num_window_blocks,
        identity.window_block_bytes,
        epoch,
        turn,
        identity.layout_fingerprint,
        identity.nonce,
        identity.boot,
        identity.device_uuid,
    )


def write_header(memory: NDArray[np.uint8], identity: JournalIdentity, epoch: int) -> None:
    """Makes `memory` (u8, zeros, as long as `Sections.end` says) an empty journal."""
    Table(memory, 0, HEADER_SLOTS, HEADER_BYTES).write(0, pack_header(identity, epoch, 0))


def read_header(memory: NDArray[np.uint8]) -> tuple[JournalIdentity, int, int] | None:
    """(identity, epoch, turn) of the newest whole header whose journal fits `memory`; None where there is none."""
    if len(memory) < PAGE:
        return None
    newest: tuple[JournalIdentity, int, int] | None = None
    for _, data in Table(memory, 0, HEADER_SLOTS, HEADER_BYTES).used():
        magic, version, tokens, blocks, size, *windows, epoch, turn, fingerprint, nonce, boot, device = (
            _HEADER.unpack_from(data)
        )
        if (magic, version) != (MAGIC, VERSION) or not 1 <= tokens <= 1 << 16 or not 1 <= blocks < 1 << 31:
            continue
        identity = JournalIdentity(blocks, tokens, size, fingerprint, nonce, boot, device, *windows)
        if not 0 <= windows[0] <= blocks:
            continue
        if Sections.of(blocks, tokens, windows[0]).end == len(memory) and (newest is None or turn > newest[2]):
            newest = (identity, epoch, turn)
    return newest


def _page(offset: int) -> int:
    return -(-offset // PAGE) * PAGE
