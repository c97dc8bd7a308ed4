"""Norm and activation against plain torch."""

from __future__ import annotations

import pytest
import torch

from common.errors import Internal
from tests.kernels import oracles
from tests.kernels.rig import DEVICE, TOLERANCE, form, padded, random

norm, gate = form("norm").norm, form("activation").gate
KINDS = [torch.float32, torch.bfloat16, torch.float16]


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
