"""The tables of `tessera admin`: every counter is there, and what a layout has not is left out."""

from __future__ import annotations

from cli.admin_tables import show_blocks, show_snapshot
from tessera.admin.v1 import admin_pb2


def test_counters_of_window_blocks_are_rows_where_there_are_any() -> None:
    """One row a counter, in place of a message."""
    plain = admin_pb2.GetSnapshotResponse(total_blocks=8)
    assert "window" not in show_snapshot(plain)
    plain.windows.CopyFrom(admin_pb2.WindowPool(total_blocks=5, free_blocks=3))
    lines = [line.split() for line in show_snapshot(plain).splitlines()]
    assert ["windows.total_blocks", "5"] in lines and ["windows.free_blocks", "3"] in lines
    assert ["windows.needed_blocks", "0"] in lines


def test_a_block_says_which_window_block_it_has() -> None:
    """Blank for none."""
    state = admin_pb2.BLOCK_STATE_CACHED
    blocks = [admin_pb2.Block(block=1, state=state, window_block=7), admin_pb2.Block(block=2, state=state)]
    header, _, first, second = show_blocks(blocks).splitlines()
    place = header.index("window") + len("window")
    assert (first[:place].split()[-1], second[:place].rstrip().split()[-1]) == ("7", "no")
