"""Low-rank products of rows with adapters: the groups against a plain loop, the kernels against the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import Internal
from decoder.kernels.lora import plan, triton
from decoder.models.config import ModelConfig
from decoder.models.device_adapters import DeviceAdapter, part_ends
from decoder.models.rope import RopeConfig
from tests.kernels import oracles
from tests.kernels.rig import DEVICE, TOLERANCE, padded, random

CONFIG = ModelConfig("phi3", 64, 2, 5, 1, 16, 48, 40, 1e-6, RopeConfig(1e4, 16), 64, (2,), None, False)
SHAPES = {
    "q_proj": (80, 48), "k_proj": (16, 48), "v_proj": (16, 48), "qkv_proj": (112, 48), "o_proj": (48, 80),
    "gate_proj": (40, 48), "up_proj": (40, 48), "gate_up_proj": (80, 48), "down_proj": (48, 40),
}  # fmt: skip
# Modules of each product, and where their outputs begin.
PRODUCTS = (
    {"q_proj": 0, "k_proj": 80, "v_proj": 96, "qkv_proj": 0}, {"o_proj": 0},
    {"gate_proj": 0, "up_proj": 40, "gate_up_proj": 0}, {"down_proj": 0},
)  # fmt: skip
SEPARATE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def layers_of(rank: int, modules: Sequence[str], seed: int) -> tuple[dict[str, tuple[Any, Any]], ...]:
    """Random layers as `load_adapter` gives them."""
    numbers = np.random.default_rng(seed)

    def pair(module: str) -> tuple[Any, Any]:
        outputs, inputs = SHAPES[module]
        shapes = ((rank, inputs), (outputs, rank))
        return tuple(numbers.standard_normal(shape).astype("f4") / shape[1] ** 0.5 for shape in shapes)  # type: ignore[return-value]

    return tuple({module: pair(module) for module in modules} for _ in range(2))


def delta(x: torch.Tensor, layer: dict[str, tuple[Any, Any]], product: int, dtype: torch.dtype) -> torch.Tensor:
    """B (A x) of rows for all outputs of a product, float64, with matrices rounded to `dtype`."""
    outputs = part_ends(CONFIG)[product][-1]
    result = torch.zeros((len(x), outputs), dtype=torch.float64)
    for module, begin in PRODUCTS[product].items():
        if module in layer:
            down, up = (torch.from_numpy(matrix).to(dtype).double() for matrix in layer[module])
            result[:, begin : begin + len(up)] += oracles.low_rank(x.cpu(), down, up)
    return result


def check(
    adapters: Sequence[Any], counts: Sequence[int], dtype: torch.dtype = torch.float32, spare: int = 0
) -> list[torch.Tensor]:
    """Every product of layer 1 over sequences of `counts` rows, each with layers or None; the outputs."""
    packed: dict[int, DeviceAdapter] = {
        id(layers): DeviceAdapter(CONFIG, layers, dtype, DEVICE) for layers in adapters if layers is not None
    }
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    groups = plan.group_rows([None if it is None else packed[id(it)] for it in adapters], starts)
    assert groups is not None
    if spare:  # as in fixed memory
        none = np.zeros(spare, np.int32)
        groups = replace(
            groups, tables=np.append(groups.tables, [0] * spare), rows=np.append(groups.rows, none),
            tiles=np.append(groups.tiles, np.stack([none, none], 1), axis=0),
        )  # fmt: skip
    rows = plan.AdapterRows.of(groups, DEVICE)
    results = []
    for product, ends in enumerate(part_ends(CONFIG)):
        inputs = SHAPES[next(iter(PRODUCTS[product]))][1]
        x = random(int(starts[-1]), inputs, seed=product, dtype=dtype)
        before = random(int(starts[-1]), ends[-1], seed=10 + product, dtype=dtype)
        output = padded(before.clone())
        triton.add(padded(x), output, rows, 1, product, ends)
        assert torch.isnan(output.as_strided((len(x), 8), (ends[-1] + 8, 1), ends[-1])).all()
        for layers, first, last in zip(adapters, starts[:-1], starts[1:], strict=True):
            if layers is None:
                assert torch.equal(output[first:last], before[first:last])
                continue
            want = before[first:last].cpu().double() + delta(x[first:last], layers[1], product, dtype)
            assert oracles.relative_error(output[first:last].cpu(), want) < TOLERANCE[dtype]
            assert product != plan.QKV or oracles.relative_error(before[first:last].cpu(), want) > 0.1  # control
        results.append(output.clone())
    return results


@pytest.mark.parametrize("spare", [0, 3])
def test_rows_of_several_adapters_and_of_none(spare: int) -> None:
    """Ranks 4, 16 and 20 beside rows without an adapter, one adapter twice; with tiles that nobody uses as well."""
    first, second, third = (layers_of(rank, SEPARATE, rank) for rank in (4, 16, 20))
    check([first, None, second, first, third, None], [1, 1, 2, 19, 1, 3], spare=spare)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    """What goes down stays float32; matrices and outputs are narrow."""
    check([layers_of(5, SEPARATE, 1), None, layers_of(17, FUSED, 2)], [3, 2, 1], dtype)


def test_fused_matrices_and_some_modules() -> None:
    """One A for all parts of a product; both kinds at once; one part of three; and none of a product."""
    both = layers_of(3, (*FUSED, "k_proj", "up_proj"), 4)
    check([layers_of(6, FUSED, 1), layers_of(4, ("v_proj", "up_proj"), 2), both], [2, 2, 2])


def test_large_groups_have_large_tiles() -> None:
    """A chunk of sixty-five rows is two tiles of sixty-four."""
    layers = layers_of(4, ("q_proj", "v_proj"), 1)
    check([layers, None], [65, 1])


def test_inputs_are_cut_where_tiles_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """With cuts of one step of inputs the sums are the same within rounding, and the same bits twice."""
    layers = layers_of(4, SEPARATE, 1)
    whole = check([layers, None], [3, 1])
    monkeypatch.setattr(triton, "_CUT", 16)
    monkeypatch.setattr(triton, "depth_of", lambda itemsize, rows: 16)
    assert [triton.cuts_of(48, programs) for programs in (1, 128, 256)] == [2, 2, 1]
    first, second = (check([layers, None], [3, 1]) for _ in range(2))
    for one, other, again in zip(whole, first, second, strict=True):
        assert torch.equal(other, again)
        assert oracles.relative_error(one, other) < 1e-6


@dataclass(frozen=True)
class Named:
    """An adapter that has an address and no memory."""

    address: int
    lowered: int = 16
    products: int = 1


def test_groups_equal_a_plain_loop() -> None:
    """Each row with an adapter is in exactly one tile, of its adapter's; tiles are within their size."""
    numbers = np.random.default_rng(0)
    for _ in range(50):
        known = [None, *(Named(100 + n, 16 * (n + 1), 1 << n) for n in range(3))]
        adapters = [known[n] for n in numbers.integers(0, 4, 7)]
        starts = np.concatenate([[0], np.cumsum(numbers.integers(1, 90, 7))]).astype(np.int32)
        groups = plan.group_rows(adapters, starts)
        present = [adapter for adapter in adapters if adapter is not None]
        if not present:
            assert groups is None
            continue
        assert groups is not None
        found = {}
        for table, (first, count) in zip(groups.tables.tolist(), groups.tiles.tolist(), strict=True):
            assert 0 < count <= groups.tile_rows
            for row in groups.rows[first : first + count].tolist():
                assert row not in found
                found[row] = table
        assert found == {
            row: adapter.address
            for adapter, first, last in zip(adapters, starts[:-1].tolist(), starts[1:].tolist(), strict=True)
            if adapter is not None
            for row in range(first, last)
        }
        assert groups.lowered == max(adapter.lowered for adapter in present)
        assert groups.products == int(np.bitwise_or.reduce([adapter.products for adapter in present]))
    assert plan.group_rows([None, None], np.array([0, 1, 2], np.int32)) is None


def test_what_does_not_fit_is_refused() -> None:
    """Outputs of another type, parts that end elsewhere, and a product that there is not; nothing is launched."""
    adapter = DeviceAdapter(CONFIG, layers_of(4, SEPARATE, 1), torch.float32, DEVICE)
    groups = plan.group_rows([adapter], np.array([0, 2], np.int32))
    assert groups is not None
    rows = plan.AdapterRows.of(groups, DEVICE)
    x, output = random(2, 48, seed=1), random(2, 112, seed=2)
    for arguments, message in (
        ((x, output.half(), rows, 0, 0, (112,)), "do not fit outputs"),
        ((x, output, rows, 0, 0, (80, 96)), "parts that end"),
        ((x, output, rows, 0, 4, (112,)), "product 4"),
    ):
        with pytest.raises(Internal, match=message):
            triton.add(*arguments)
    assert torch.equal(output, random(2, 112, seed=2))


def test_a_product_that_nobody_changes_is_left_alone() -> None:
    """Nothing is launched where no adapter of the step has the product; control: with it the output changes."""
    adapter = DeviceAdapter(CONFIG, layers_of(4, SEPARATE, 1), torch.float32, DEVICE)
    groups = plan.group_rows([adapter], np.array([0, 2], np.int32))
    assert groups is not None
    x = random(2, 48, seed=1)
    for products, changes in ((0b1110, False), (0b0001, True)):
        output = random(2, 112, seed=2)
        rows = replace(plan.AdapterRows.of(groups, DEVICE), products=products)
        triton.add(x, output, rows, 0, plan.QKV, (80, 96, 112))
        assert torch.equal(output, random(2, 112, seed=2)) != changes
