"""Weights on a real GPU, with the real driver: the cases that `tests/test_shared_weights.py` runs on a recorder."""

from __future__ import annotations

import asyncio

import pytest
import torch

from cachemgr.arena.maker import ArenaPlace
from cachemgr.weights.memory import CudaWeights
from common.cuda_driver import Gpu
from decoder.cuda_mapping import map_fd
from tests.gpu.test_cuda_arena import gpu  # noqa: F401 - a fixture
from tests.test_shared_weights import TENSORS, forked, serving

pytestmark = pytest.mark.gpu
SIZE = 256 << 20


def test_processes_have_one_copy_read_only(gpu: Gpu) -> None:  # noqa: F811
    """The first reads every tensor, the second none, with the same content; the first is killed, then one that writes
    dies of it: the third, which comes after both, reads nothing and finds the content as it was."""

    async def body() -> None:
        with forked(4) as children:
            async with serving("real", ArenaPlace(gpu)) as service:
                one, two, writer, late = children
                assert await one.ask(*service.load()) == {"read": TENSORS}
                content = await one.ask("content")
                assert await two.ask(*service.load()) == {"read": 0}
                assert await two.ask("content") == content
                await one.kill()
                assert await writer.ask(*service.load()) == {"read": 0}
                assert await writer.ask("write") is None
                assert await two.ask("content") == content
                assert await late.ask(*service.load()) == {"read": 0}
                assert await late.ask("content") == content

    asyncio.run(body())


def test_the_next_one_fills_when_the_filler_dies(gpu: Gpu) -> None:  # noqa: F811
    """As on the recorder."""

    async def body() -> None:
        with forked(2) as children:
            async with serving("real", ArenaPlace(gpu)) as service:
                filler, waiting = children
                assert await filler.ask(*service.load(1, 5)) == "stalled"
                waiting.say(*service.load())
                await filler.kill()
                assert await waiting.answer() == {"read": TENSORS}

    asyncio.run(body())


def test_a_second_mapping_takes_no_memory(gpu: Gpu) -> None:  # noqa: F811
    """256 MiB are taken once, whoever maps them, and given back with the last mapping."""
    torch.zeros(1, device=f"cuda:{gpu.ordinal}")
    before = torch.cuda.mem_get_info(gpu.ordinal)[0]
    memory = CudaWeights(gpu, SIZE)
    first = map_fd(gpu, memory.fileno(), memory.memory_bytes, writable=False)
    one = torch.cuda.mem_get_info(gpu.ordinal)[0]
    second = map_fd(gpu, memory.fileno(), memory.memory_bytes, writable=False)
    two = torch.cuda.mem_get_info(gpu.ordinal)[0]
    memory.close()
    first.close()
    second.close()
    assert before - one >= SIZE - (8 << 20)
    assert one - two < 8 << 20
    assert torch.cuda.mem_get_info(gpu.ordinal)[0] >= before - (8 << 20)
