"""What a window has passed: the decoder's arithmetic is the cache manager's."""

from __future__ import annotations

import numpy as np
import pytest

from cachemgr.groups import behind
from cachemgr.windows import passed_blocks
from decoder.absence import needed_blocks
from decoder.holdings import Held
from decoder.sequence import CopyPlan, LeaseId
from decoder.windows import Windows


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_both_sides_count_alike(block_tokens: int) -> None:
    """For every window and length; with groups no block goes, and no sequence may be longer than the pool."""
    for window in (0, 1, 3, 4, 5, 17, 40):
        plain, grouped = Windows(window, block_tokens), Windows(window, block_tokens, grouped=True)
        for count in range(120):
            assert plain.passed_by(count) == plain.gone_by(count) == passed_blocks(count, window, block_tokens)
            assert grouped.passed_by(count) == (behind(count, window, block_tokens) if window else 0)
            assert grouped.gone_by(count) == 0
        assert plain.fit(1000) is (window > 0)
        assert not grouped.fit(1000)


def test_what_is_presented_is_what_may_still_be_read() -> None:
    """Of each table what its window has not passed, and both blocks of a copy that has not run."""

    def held(blocks: range, sealed: int, copy: CopyPlan | None = None) -> Held:
        return Held(LeaseId(1), b"", b"", np.array(blocks, np.int32), sealed, copy, "r", 0, False, 50, 0.0)

    windows = Windows(6, 4, grouped=True)
    tables = [held(range(1, 9), 30), held(range(11, 14), 0), held(range(21, 23), 3, CopyPlan(40, 21, 3))]
    assert needed_blocks(tables, windows).tolist() == [7, 8, 11, 12, 13, 21, 22, 40, 21]
    assert needed_blocks([], windows).size == 0
