"""Norm, activation and sampling against plain torch and against the host sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.errors import Internal
from decoder.kernels.activation.triton import gate
from decoder.kernels.norm.triton import norm
from decoder.kernels.sample.triton import NO_TOKEN, RUN, Draws, SampleWorkspace, draw
from decoder.sampler import Draw, sample
from decoder.sequence import SamplingParams
from tests.kernels import oracles
from tests.kernels.rig import DEVICE, TOLERANCE, random

KINDS = [torch.float32, torch.bfloat16, torch.float16]


def padded(rows: torch.Tensor, margin: int = 8) -> torch.Tensor:
    """The same rows inside poisoned memory: wider rows, of which a view is given."""
    memory = torch.full((rows.shape[0], rows.shape[1] + margin), torch.nan, dtype=rows.dtype, device=DEVICE)
    memory[:, : rows.shape[1]] = rows
    return memory[:, : rows.shape[1]]


@pytest.mark.parametrize("width", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_norm(kind: torch.dtype, width: int) -> None:
    """Plain, with the addition, and with the norm before the addition; the residual is what is added up."""
    x, residual = random(3, width, seed=1, dtype=kind), random(3, width, seed=2)
    weight, post = 1 + random(width, seed=3), 1 + random(width, seed=4)
    for before in (None, residual):
        for post_weight in (None, post) if before is not None else (None,):
            total = x.double()
            if post_weight is not None:
                total = oracles.rms_norm(total, post_weight)
            if before is not None:
                total = total + before
            sums = None if before is None else padded(before)
            output = padded(torch.full_like(x, torch.nan))
            norm(padded(x), weight, output, epsilon=1e-6, residual=sums, post_weight=post_weight)
            assert oracles.relative_error(output, oracles.rms_norm(total, weight)) < TOLERANCE[kind]
            if sums is not None:
                assert oracles.relative_error(sums, total) < TOLERANCE[torch.float32]
                assert torch.isnan(sums.as_strided((3, 8), (width + 8, 1), width)).all()
            assert torch.isnan(output.as_strided((3, 8), (width + 8, 1), width)).all()


def test_norm_in_place_and_twice() -> None:
    """The output may be the input, and two runs agree bit for bit."""
    x, weight = random(4, 100, seed=1), random(100, seed=2)
    first, second = x.clone(), torch.full_like(x, torch.nan)
    norm(first, weight, first, epsilon=1e-6)
    norm(x, weight, second, epsilon=1e-6)
    assert torch.equal(first, second)


def test_a_norm_that_does_not_fit_is_refused() -> None:
    """Weights of another width or type, and a first norm with nothing to add to."""
    x = random(2, 32, seed=1)
    for arguments in ({"weight": random(31, seed=2)}, {"weight": random(32, seed=2, dtype=torch.bfloat16)}):
        with pytest.raises(Internal, match="weights of a norm"):
            norm(x, output=x, epsilon=1e-6, **arguments)
    with pytest.raises(Internal, match="needs a residual"):
        norm(x, random(32, seed=2), x, epsilon=1e-6, post_weight=random(32, seed=3))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("kind", KINDS)
def test_activation(kind: torch.dtype, activation: str) -> None:
    """Both activations, far out as well, on widths that are no powers of two."""
    for inner in (1, 63, 64, 65, 1100):
        both = random(3, 2 * inner, seed=inner, dtype=kind) * 3
        both[0, 0], both[1, 0] = 200.0, -200.0
        output = padded(torch.full((3, inner), torch.nan, dtype=kind, device=DEVICE))
        gate(padded(both), output, activation=activation)
        first, second = both.double().chunk(2, dim=1)
        silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
        want = (silu(first) if activation == "silu" else gelu(first, approximate="tanh")) * second
        assert oracles.relative_error(output, want) < TOLERANCE[kind]
        assert torch.isnan(output.as_strided((3, 8), (inner + 8, 1), inner)).all()
    with pytest.raises(Internal, match="relu"):
        gate(both, output, activation="relu")


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
