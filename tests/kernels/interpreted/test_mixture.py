"""Mixtures of experts: choices and slots against a plain loop, the whole against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.errors import Internal
from decoder.kernels.mixture import routing, triton
from decoder.kernels.mixture.routing import most_blocks, route
from tests.kernels import oracles
from tests.kernels.rig import DEVICE, TOLERANCE, int32, padded, random


def logits_of(rows: int, experts: int, seed: int, extra: int = 0) -> torch.Tensor:
    """Router products with many ties."""
    return (random(rows, experts + extra, seed=seed) * 2).round()


def check_routes(logits: torch.Tensor, experts: int, used: int, rows: int, empty: list[int], normalize: bool) -> None:
    """Every choice is in exactly one slot, in a block of its expert, in order; what is left of a block is -1."""
    lengths = [0 if row in empty else 5 for row in range(max(empty, default=-1) + 1)]
    routes = route(logits, experts, used, rows, normalize=normalize, lengths=int32(lengths) if lengths else None)
    choices, slots, sources = (t.cpu().numpy() for t in (routes.choices, routes.slots, routes.sources))
    owners = routes.owners.cpu().numpy()
    shares = logits[:, :experts].double().softmax(-1).cpu()
    for row in range(len(logits)):
        if row in empty:
            assert (choices[row] == -1).all()
            continue
        want = sorted(sorted(range(experts), key=lambda e, row=row: (-float(shares[row, e]), e))[:used])
        assert choices[row].tolist() == want
        total = float(shares[row, want].sum()) if normalize else 1.0
        assert np.allclose(routes.shares[row].cpu(), shares[row, want] / total, rtol=1e-5)
    flat = choices.ravel()
    blocks = 0
    for expert in range(experts):
        mine = np.flatnonzero(flat == expert)
        here = slots.ravel()[mine]
        assert np.array_equal(here, blocks * rows + np.arange(mine.size))  # in the order of the choices
        assert np.array_equal(sources[here], mine)
        count = -(-mine.size // rows)
        assert (owners[blocks : blocks + count] == expert).all()
        assert (sources[blocks * rows + mine.size : (blocks + count) * rows] == -1).all()
        blocks += count
    assert (owners[blocks:] == -1).all()


@pytest.mark.parametrize(("rows", "experts", "used"), [(1, 4, 2), (7, 5, 2), (40, 8, 3), (3, 60, 4), (9, 3, 3)])
def test_routes(rows: int, experts: int, used: int) -> None:
    """Few rows and many, with ties, with a column more than there are experts, and with rows that are nobody's."""
    logits = logits_of(rows, experts, rows, extra=1)
    check_routes(padded(logits), experts, used, 16, [], True)
    check_routes(logits, experts, used, 4, [0, rows - 1] if rows > 2 else [], False)


def test_choices_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert's choices go on where those of the chunk before end."""
    monkeypatch.setattr(routing, "_CHUNK", 16)
    check_routes(logits_of(40, 6, 1), 6, 3, 16, [5], True)


def test_memory_is_enough_for_any_choice() -> None:
    """Blocks of the worst choice: one row for each expert, and the rest for one."""
    for choices in range(1, 60):
        for experts in (1, 3, 8, 64):
            for rows in (4, 16):
                alone = min(experts, choices)
                counts = [1] * (alone - 1) + [choices - alone + 1]
                worst = max(sum(-(-c // rows) for c in counts), -(-choices // rows))
                even = sum(-(-c // rows) for c in np.bincount(np.arange(choices) % experts).tolist())
                assert max(worst, even) <= most_blocks(choices, experts, rows) <= choices


def test_numbers_that_are_none_choose_experts_that_there_are() -> None:
    """NaN products lead to no memory of others, and to a NaN share, not to a number."""
    logits = logits_of(3, 5, 1)
    logits[1] = torch.nan
    routes = route(logits, 5, 2, 16, normalize=True)
    assert routes.choices[1].tolist() == [0, 1]
    assert torch.isnan(routes.shares[1]).all()
    assert not torch.isnan(routes.shares[[0, 2]]).any()


def mixed(
    dtype: torch.dtype = torch.float32, *, rows: int = 6, experts: int = 4, used: int = 2, normalize: bool = True,
    activation: str = "silu", shared: bool = False, empty: int = 0, config: triton.ProductConfig | None = None,
    width: int = 40, inner: int = 24,
) -> torch.Tensor:  # fmt: skip
    """A mixture held to the oracle; its result. The first `empty` rows are nobody's."""
    x = random(rows, width, seed=1, dtype=dtype)
    gate_up = random(experts, 2 * inner, width, seed=2, dtype=dtype) / width**0.5
    down = random(experts, width, inner, seed=3, dtype=dtype) / inner**0.5
    logits = random(rows, experts + shared, seed=4)
    branch = random(rows, width, seed=5, dtype=dtype) if shared else None
    mixture = torch.full((rows, width), torch.nan, device=DEVICE)
    lengths = int32([0] * empty + [3] * (rows - empty)) if empty else None
    triton.mix(
        padded(x), logits, gate_up, down, mixture, used=used, normalize=normalize, activation=activation, shared=branch,
        lengths=lengths, config=config,
    )  # fmt: skip
    parts = [None if it is None else it.cpu() for it in (x, logits, gate_up, down)]
    want = oracles.mixture(*parts, used, normalize, activation, None if branch is None else branch.cpu())
    assert oracles.relative_error(mixture[empty:].cpu(), want[empty:]) < 2 * TOLERANCE[dtype]
    if empty:
        alone = torch.sigmoid(logits[:empty, experts:]) * branch[:empty] if branch is not None else torch.zeros(1)
        assert float((mixture[:empty] - alone).abs().max()) < 1e-6
    return mixture


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_mixture(normalize: bool, shared: bool) -> None:
    """Parts of all or of the used, with a shared expert and without, beside rows that are nobody's."""
    mixed(normalize=normalize, shared=shared, empty=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_and_gelu(dtype: torch.dtype) -> None:
    """Sums are float32; what an expert gates and puts out is narrow."""
    mixed(dtype, activation="gelu_tanh", shared=True)


def test_more_rows_of_an_expert_than_a_block_has() -> None:
    """Forty rows over three experts take several blocks each, in small blocks and in large ones."""
    small, large = (
        mixed(rows=40, experts=3, config=triton.ProductConfig(rows, 16, 16, 4, 1)) for rows in (16, 32)
    )  # fmt: skip
    assert oracles.relative_error(small, large) < 1e-6


def test_every_expert_of_one() -> None:
    """One expert, used by all; and all of three used by each."""
    mixed(experts=1, used=1)
    mixed(experts=3, used=3, normalize=False)


def test_twice_the_same_bits() -> None:
    """Two runs agree bit for bit."""
    assert torch.equal(mixed(torch.bfloat16, shared=True), mixed(torch.bfloat16, shared=True))


def test_small_blocks_where_experts_have_few_rows() -> None:
    """A decode streams weights, a chunk computes."""
    assert triton.choose_config(90, 64 * 8, 128, 2).rows == 16
    assert triton.choose_config(90, 2048 * 8, 128, 2).rows == 64


def test_what_does_not_fit_is_refused() -> None:
    """Experts of another width, a router of another count, a branch without its gate, a choice of more than there are;
    nothing is launched."""
    x, logits = random(3, 40, seed=1), random(3, 4, seed=2)
    gate_up, down = random(4, 48, 40, seed=3), random(4, 40, 24, seed=4)
    output = torch.full((3, 40), torch.nan, device=DEVICE)
    rest = {"used": 2, "normalize": True, "activation": "silu"}
    for arguments, options, message in (
        ((x, logits, gate_up, down[:, :, 1:], output), rest, "do not fit rows"),
        ((x, logits[:, 1:], gate_up, down, output), rest, "router products"),
        ((x, logits, gate_up, down, output), {**rest, "shared": x}, "router products"),
        ((x, logits, gate_up, down, output), {**rest, "used": 5}, "no choice of 5"),
        ((x, logits, gate_up, down, output), {**rest, "activation": "relu"}, "relu"),
        ((x, logits, gate_up, down, output.T.contiguous().T), rest, "contiguous"),
    ):
        with pytest.raises(Internal, match=message):
            triton.mix(*arguments, **options)
    assert torch.isnan(output).all()
