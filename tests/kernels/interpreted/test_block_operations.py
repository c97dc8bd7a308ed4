"""Copy-on-write plans, packing and scrubbing against indexing."""

from __future__ import annotations

import pytest
import torch

from common.layout import KvLayout
from decoder.kernels.quantized import views
from tests.kernels.rig import DEVICE, empty_arena, form, int32, random

block_copy, block_pack, block_scrub = form("block_copy"), form("block_pack"), form("block_scrub")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def arena_of(dtype: torch.dtype, num_blocks: int = 6) -> torch.Tensor:
    """Random blocks with a NaN in each."""
    arena = random(num_blocks + 1, 2, 2, 3, 16, 80, seed=4, dtype=dtype)
    arena[:, 0, 0, 0, 0, 0] = torch.nan
    return arena


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, so that NaN equals itself."""
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_takes_the_first_tokens_of_all_layers(dtype: torch.dtype) -> None:
    """Exactly the named tokens; a source may serve two targets; an entry of none, or to block 0, does nothing."""
    arena = arena_of(dtype)
    want = arena.clone()
    plan = [(1, 3, 7), (1, 4, 16), (2, 5, 0), (2, 0, 9), (2, 6, 1)]
    for source, target, count in plan:
        if target:
            want[target, :, :, :, :count] = arena[source, :, :, :, :count]
    block_copy.copy(arena, *(int32(column) for column in zip(*plan, strict=True)))
    assert torch.equal(bits(arena), bits(want))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_copy_takes_scales_along(dtype: torch.dtype) -> None:
    """The scales of the copied tokens, and no others."""
    arena, scales = empty_arena(3, 2, 16, 64, dtype)
    assert scales is not None
    arena.view(torch.uint8)[:] = torch.arange(4, device=DEVICE, dtype=torch.uint8).reshape(-1, 1, 1, 1, 1, 1)
    scales[:] = torch.arange(4, device=DEVICE, dtype=torch.bfloat16).reshape(-1, 1, 1, 1, 1)
    block_copy.copy(arena, int32([1]), int32([3]), int32([5]), scales=scales)
    assert (arena.view(torch.uint8)[3, :, :, :, :5] == 1).all()
    assert (arena.view(torch.uint8)[3, :, :, :, 5:] == 3).all()
    assert (scales[3, ..., :5] == 1).all()
    assert (scales[3, ..., 5:] == 3).all()
    assert (scales[:3] == torch.arange(3, device=DEVICE).reshape(-1, 1, 1, 1, 1)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_and_unpack(dtype: torch.dtype) -> None:
    """Packed blocks are their bytes, and unpacked the same; the null block gives zeros and takes nothing."""
    arena = arena_of(dtype)
    want = arena.clone()
    ids = [5, 2, 0, 2]
    buffer = torch.full((4, arena[0].numel() * arena.itemsize), 0xAB, dtype=torch.uint8, device=DEVICE)
    block_pack.pack(arena, int32(ids), buffer)
    for row, block in zip(buffer, ids, strict=True):
        assert torch.equal(row, bits(arena[block]) if block else torch.zeros_like(row))
    assert torch.equal(bits(arena), bits(want))
    block_pack.unpack(arena, int32([1, 0]), buffer[[0, 1]])
    want[1] = arena[5]
    assert torch.equal(bits(arena), bits(want))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
@pytest.mark.parametrize("poison", [False, True])
def test_scrub(dtype: torch.dtype, poison: bool) -> None:
    """Named blocks are zeros, or NaN, from end to end; the others and the null block are as they were."""
    arena = arena_of(torch.float32 if dtype == torch.uint8 else dtype)
    want = arena.clone()
    blocks = arena.flatten(1).view(torch.uint8) if dtype == torch.uint8 else arena
    block_scrub.scrub(blocks, int32([4, 0, 2]), poison=poison)
    for block in (4, 2):
        assert bool(arena[block].isnan().all()) if poison else not bits(arena[block]).any()
    rest = [0, 1, 3, 5, 6]
    assert torch.equal(bits(arena[rest]), bits(want[rest]))


def test_whole_quantised_blocks_have_their_scales() -> None:
    """Packed, unpacked elsewhere and scrubbed, a block's scales go with its elements; its neighbours stay."""
    layout = KvLayout.of(2, 3, 80, 16, "int8")
    numbers = torch.Generator().manual_seed(2)
    storage = torch.randint(0, 256, (5, layout.block_bytes), dtype=torch.uint8, generator=numbers).to(DEVICE)
    elements, scales = views(storage, 2, 3, 80, 16, torch.int8)
    before, old_elements, old_scales = storage.clone(), elements.clone(), scales.view(torch.int16).clone()
    buffer = torch.zeros((2, layout.block_bytes), dtype=torch.uint8, device=DEVICE)
    block_pack.pack(storage, int32([4, 1]), buffer)
    block_pack.unpack(storage, int32([2, 3]), buffer)
    for source, target in ((4, 2), (1, 3)):
        assert torch.equal(elements[target], old_elements[source])
        assert torch.equal(scales[target].view(torch.int16), old_scales[source])
    block_scrub.scrub(storage, int32([2]), poison=True)
    assert bool(scales[2].isnan().all())
    block_scrub.scrub(storage, int32([3]))
    assert not storage[3].any()
    assert torch.equal(storage[[0, 1, 4]], before[[0, 1, 4]])
