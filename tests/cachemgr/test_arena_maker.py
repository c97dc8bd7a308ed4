"""A pool larger than the machine is refused, though a sparse memory file of that size could be made."""

from __future__ import annotations

import pytest

from cachemgr.arena.host import HostArena
from cachemgr.arena.maker import HOST_MEMORY
from common.arena_sizes import ArenaSizes
from common.errors import ResourceExhausted
from common.layout import NONCE_BYTES
from common.memory import machine_bytes

BLOCK = 1 << 20


def test_a_pool_beyond_the_machines_memory_is_refused() -> None:
    """The error says how much it would take and how much there is; half of it is given."""
    with pytest.raises(ResourceExhausted, match=str(machine_bytes())) as refused:
        HOST_MEMORY.make(ArenaSizes(machine_bytes() // BLOCK, BLOCK))
    assert refused.value.reason == "NO_MEMORY"
    HOST_MEMORY.make(ArenaSizes(machine_bytes() // (2 * BLOCK), BLOCK)).close()


def test_the_file_itself_would_be_no_limit() -> None:
    """Positive control: without the check such a pool is made."""
    HostArena(ArenaSizes(2 * machine_bytes() // BLOCK, BLOCK), nonce=bytes(NONCE_BYTES)).close()
