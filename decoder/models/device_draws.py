"""Tokens that a device draws, and feeds to its own next step before the host knows them.

Owns the memory of drawn ids: two tensors in turn, so that a step can draw while the ids of the one before are read.
Invariant: no draw writes a tensor whose ids are still on their way to the host, or feed a step that is queued; ids that
name no token (NO_TOKEN) are never fed. Used by `device_model.py`.
"""

# Methods of torch without annotations.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import Internal
from decoder.batch import DrawColumns
from decoder.kernels.gpu import power_of_two
from decoder.kernels.sample.triton import Draws, SampleWorkspace, draw
from decoder.kernels.uploads import upload
from decoder.models.device_results import Arrival, SideStream

_MIN_ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class DeviceColumns:
    """`DrawColumns` on a device; `sources` int32 [decodes], None where the host knows all inputs."""

    draws: Draws
    sources: torch.Tensor | None


class DrawnIds:
    """The drawn ids of one model's steps. Its calls are those of one step after the other, in that order."""

    def __init__(self, vocab: int, device: torch.device, side: SideStream) -> None:
        self._vocab = vocab
        self._device = device
        self._side = side
        self._rows = 0
        self._last = torch.zeros(0, dtype=torch.int32, device=device)
        self._spare = self._last
        self._on_its_way: dict[int, Arrival] = {}  # by the address of the tensor that it reads
        self._workspace: SampleWorkspace | None = None

    def upload(self, columns: DrawColumns, decodes: int) -> DeviceColumns:
        """The columns of a step with so many decodes, in one copy. Raises Internal where they do not fit."""
        rows, sources = len(columns.temperatures), columns.sources
        fits = all(len(it) == rows for it in (columns.seeds, columns.samples, columns.positions))
        if not fits or len(sources) != decodes:
            raise Internal("the columns of a draw have different lengths")
        fed = bool(len(sources)) and int(sources.max()) >= 0
        if fed and int(sources.max()) >= self._rows:
            raise Internal("a step is fed with a token that was not drawn")
        words = np.concatenate([_words(it) for it in (columns.temperatures, columns.seeds)])
        words = np.concatenate([words, columns.samples, columns.positions, sources if fed else sources[:0]])
        parts = upload(words, self._device).split([2 * rows, 2 * rows, rows, rows, len(sources) if fed else 0])
        draws = Draws(parts[0].view(torch.float64), parts[1].view(torch.int64), parts[2], parts[3])
        return DeviceColumns(draws, parts[4] if fed else None)

    def feed(self, token_ids: torch.Tensor, columns: DeviceColumns) -> None:
        """Put the tokens that the draw before gave into `token_ids`, int32 [decodes or more], in place."""
        if columns.sources is None:
            return
        sources = columns.sources
        drawn = self._last.index_select(0, sources.clamp(min=0)).clamp_(min=0)
        ids = token_ids[: len(sources)]
        ids.copy_(torch.where(sources >= 0, drawn, ids))

    def draw(self, logits: torch.Tensor, columns: DeviceColumns) -> Arrival:
        """Draw one token of each row of float32 [R, vocab]; the ids, int32 [R], are on their way."""
        rows = len(logits)
        if self._workspace is None or self._workspace.best.shape[0] < rows:
            self._workspace = SampleWorkspace.allocate(max(power_of_two(rows), _MIN_ROWS), self._vocab, self._device)
        arrival = self._on_its_way.pop(self._spare.data_ptr(), None)
        if arrival is not None:
            self._side.hold(arrival)
        if len(self._spare) < rows:
            size = max(power_of_two(rows), _MIN_ROWS)
            self._spare = torch.zeros(size, dtype=torch.int32, device=self._device)
        ids = self._spare[:rows]
        draw(logits, columns.draws, self._workspace, ids)
        self._last, self._spare, self._rows = self._spare, self._last, rows
        arrival = self._side.bring(ids)
        self._on_its_way[ids.data_ptr()] = arrival
        return arrival


def _words(array: NDArray[Any]) -> NDArray[np.int32]:
    words: NDArray[np.int32] = np.ascontiguousarray(array).view(np.int32)
    return words
