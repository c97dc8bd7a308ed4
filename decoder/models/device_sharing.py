"""Whether the decodes of a device step read a shared run of blocks once: the cost model, and the rule that applies it.

Owns the choice alone. It is made on the host, from block tables and sizes, before a step is queued, so a step knows
what it will do; `decoder/kernels/shared_prefix_decode/` finds the runs and computes. Results differ within rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.layout import KvLayout
from decoder.batch import StepBatch
from decoder.kernels.shared_prefix_decode.plan import MIN_SEQUENCES, Group, SlotLayout, find_groups, lay_out
from decoder.models.config import ModelConfig

_MORE_LAUNCHES: Final = 4  # of a layer: the gathering of queries, a decode, its combination, the merge
_PREPARING_LAUNCHES: Final = 8  # of a step: the rest of each table and its length, and the tile plan of the shared runs


@dataclass(frozen=True, slots=True)
class SharingCosts:
    """What a launch more costs, in bytes of keys and values that are read in its time, and the smallest group.

    recorded_bytes: inside a CUDA graph: 3 microseconds at 3 TB/s
    launched_bytes: outside: 40 microseconds, most of them the host's
    min_sequences:  sequences that share a run from this many on

    The numbers are assumptions for a chip like an H200. No device has confirmed them.
    """

    recorded_bytes: int = 9_000_000
    launched_bytes: int = 120_000_000
    min_sequences: int = MIN_SEQUENCES


DEFAULT_COSTS: Final = SharingCosts()


class SharingRule:
    """The rule for one model, whose slots have `members` places and whose queries have elements of `query_bytes`."""

    def __init__(
        self, config: ModelConfig, layout: KvLayout, members: int, query_bytes: int, costs: SharingCosts
    ) -> None:
        self.members = members
        self._costs = costs
        self._block_tokens = layout.block_tokens
        self._layers = sum(layer.window is None for layer in config.layers)
        self._block_bytes = layout.block_bytes // layout.block_layers
        row = config.num_heads * config.head_dim
        # The rest's result is float32 and is read again by the merge.
        self._row_bytes = row * 8
        # A query is gathered and read; the shared part's result is written and read.
        self._place_bytes = row * (8 + 3 * query_bytes)

    def choose(self, batch: StepBatch, *, recorded: bool) -> SlotLayout | None:
        """Slots for the decodes of a checked batch; None where sharing saves nothing, or less than it costs."""
        decodes = batch.num_decodes
        if not self._layers or decodes < self._costs.min_sequences:
            return None
        tables = batch.block_tables[:decodes]
        groups = find_groups(
            tables, batch.context_lens[:decodes], block_tokens=self._block_tokens, members=self.members,
            min_sequences=self._costs.min_sequences,
        )  # fmt: skip
        if self.saved_bytes(groups, decodes, recorded=recorded) <= 0:
            return None
        return lay_out(groups, tables, block_tokens=self._block_tokens, members=self.members)

    def saved_bytes(self, groups: list[Group], decodes: int, *, recorded: bool) -> int:
        """Bytes that a step reads less, over all layers without a window, minus what that costs it."""
        saved = sum(group.saved_blocks(self.members) for group in groups) * self._block_bytes
        places = sum(group.slots(self.members) for group in groups) * self.members
        launch = self._costs.recorded_bytes if recorded else self._costs.launched_bytes
        layer = saved - decodes * self._row_bytes - places * self._place_bytes - _MORE_LAUNCHES * launch
        return layer * self._layers - _PREPARING_LAUNCHES * launch
