"""Sampling against the host sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decoder.kernels.sample.triton import NO_TOKEN, RUN, Draws, SampleWorkspace, draw
from decoder.sampler import Draw, sample
from decoder.sequence import SamplingParams
from tests.kernels.rig import DEVICE, padded, random


def tokens_of(logits: torch.Tensor, draws: list[tuple[float, int, int, int]]) -> list[int]:
    """Drawn by the kernels, rows padded with NaN and the workspace poisoned."""
    columns = list(zip(*draws, strict=True))
    kinds = (torch.float64, torch.int64, torch.int32, torch.int32)
    seeds = [seed - (seed >> 63 << 64) for seed in columns[1]]
    tensors = [
        torch.tensor(c, dtype=k, device=DEVICE) for c, k in zip((columns[0], seeds, *columns[2:]), kinds, strict=True)
    ]
    workspace = SampleWorkspace.allocate(len(draws) + 1, logits.shape[1], DEVICE)
    workspace.statistics.fill_(torch.inf)
    workspace.best.fill_(10**8)
    ids = torch.full((len(draws),), 10**8, dtype=torch.int32, device=DEVICE)
    draw(padded(logits), Draws(*tensors), workspace, ids)
    return ids.tolist()


def host_tokens(logits: torch.Tensor, draws: list[tuple[float, int, int, int]]) -> list[int | None]:
    """Drawn by the host sampler."""
    wanted = [
        Draw(row, SamplingParams(temperature=temperature, seed=seed), index, position)
        for row, (temperature, seed, index, position) in enumerate(draws)
    ]
    return [drawn.token for drawn in sample(logits.cpu().numpy(), wanted)]


@pytest.mark.parametrize("vocab", [1, 63, 65, 1000, RUN, 3 * RUN + 5])
def test_draws_are_those_of_the_host_sampler(vocab: int) -> None:
    """Greedy and by temperature from 0.1 to 50, seeds of 64 bits, samples and positions: the very same tokens."""
    numbers = np.random.default_rng(vocab)
    draws = [
        (float(t), int(numbers.integers(2**64, dtype=np.uint64)), int(numbers.integers(2**31)), int(place))
        for t in (0.0, 1e-4, 0.1, 0.7, 1.0, 50.0)
        for place in numbers.integers(0, 2**31, 8)
    ]
    logits = random(len(draws), vocab, seed=7) * 4
    got = tokens_of(logits, draws)
    assert got == host_tokens(logits, draws)
    if vocab > 1000:
        assert len(set(got[24:])) > 10  # control: they are not all one token


def test_ties_go_to_the_smaller_id() -> None:
    """Equal maxima inside a run and in different runs."""
    logits = torch.zeros((2, 2 * RUN), device=DEVICE)
    logits[0, [70, 90, RUN + 3]] = 1.0
    logits[1, [RUN + 3, RUN + 8]] = 1.0
    assert tokens_of(logits, [(0.0, 1, 0, 0)] * 2) == [70, RUN + 3]


def test_rows_that_are_not_finite_give_no_token() -> None:
    """NaN, +inf or nothing but -inf; a -inf beside finite numbers is never drawn. Their neighbours do not notice."""
    logits = random(5, RUN + 9, seed=1)
    logits[0, RUN + 5], logits[1, 3], logits[2], logits[3, 1:] = torch.nan, torch.inf, -torch.inf, -torch.inf
    for temperature in (0.0, 1.0):
        draws = [(temperature, 5, 0, 9)] * 5
        got = tokens_of(logits, draws)
        assert got == [NO_TOKEN if token is None else token for token in host_tokens(logits, draws)]
        assert got[:4] == [NO_TOKEN] * 3 + [0]
