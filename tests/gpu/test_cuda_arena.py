"""GPU memory on a real GPU, with the real driver: the cases that `tests/test_cuda_processes.py` runs on a recorder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest
import torch

from cachemgr.arena.cuda import CudaArena
from common.arena_sizes import ArenaSizes
from common.cuda_driver import CudaError, Gpu, load_bindings
from common.devices import gpu_name
from common.errors import FailedPrecondition
from decoder.cuda_arena import wrap_tensor
from decoder.cuda_mapping import CudaMapping, map_fd
from tests.test_cuda_processes import ends, node_of, outlives

pytestmark = pytest.mark.gpu
NONCE = bytes(range(32))


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    """The first GPU; skips where there is none that can be used."""
    try:
        driver = load_bindings()
    except FailedPrecondition as error:
        pytest.skip(error.message)
    uuids = driver.device_uuids()
    if not uuids or not torch.cuda.is_available():
        pytest.skip("no CUDA device can be used by this process")
    return Gpu(driver, 0, uuids[0])


@contextlib.contextmanager
def mapped(gpu: Gpu, num_blocks: int = 3, *, writable: bool = True) -> Iterator[tuple[CudaArena, CudaMapping]]:
    """An arena of blocks of a MiB and a mapping of it."""
    arena = CudaArena(gpu, ArenaSizes(num_blocks, 1 << 20), nonce=NONCE)
    try:
        mapping = map_fd(gpu, arena.fileno(), arena.memory_bytes, writable=writable)
        yield arena, mapping
        mapping.close()
    finally:
        arena.close()


def test_two_mappings_are_one_memory_without_a_copy(gpu: Gpu) -> None:
    """What torch writes through one is read through the other; the tensor lies at the mapped address."""
    with mapped(gpu) as (arena, one):
        two = map_fd(gpu, arena.fileno(), arena.memory_bytes)
        first, second = wrap_tensor(one), wrap_tensor(two)
        assert (first.data_ptr(), first.numel(), first.dtype) == (one.address, arena.memory_bytes, torch.uint8)
        first[1 << 20 : 2 << 20] = 7
        torch.cuda.synchronize()
        assert (second[1 << 20 : 2 << 20] == 7).all()
        one.write(NONCE)
        assert two.read(32) == NONCE
        del first, second
        two.close()


def test_memory_is_given_back(gpu: Gpu) -> None:
    """A hundred arenas, one after another, leave the device's free memory as it was."""
    with mapped(gpu):
        pass
    before = torch.cuda.mem_get_info(gpu.ordinal)[0]
    for _ in range(100):
        with mapped(gpu, 255):
            pass
    assert torch.cuda.mem_get_info(gpu.ordinal)[0] >= before - (64 << 20)


def test_a_mapping_for_reading_can_be_read(gpu: Gpu) -> None:
    """Bytes written elsewhere arrive."""
    with mapped(gpu) as (arena, writer):
        reader = map_fd(gpu, arena.fileno(), arena.memory_bytes, writable=False)
        writer.write(NONCE)
        assert reader.read(32) == NONCE
        reader.close()


def test_a_stale_handle_is_refused_by_the_drivers_own_name(gpu: Gpu) -> None:
    """An fd that is no GPU memory."""
    fd = os.open("/dev/null", os.O_RDWR)
    try:
        with pytest.raises(CudaError, match="cuMemImportFromShareableHandle: CUDA_ERROR_"):
            map_fd(gpu, fd, gpu.rounded(1))
    finally:
        os.close(fd)


def test_the_memory_outlives_the_daemon_and_each_decoder(gpu: Gpu) -> None:
    """Exporter killed, importer killed, wrong UUID, wrong nonce, adoption: as on the recorder."""
    asyncio.run(outlives(gpu.uuid, device=f"cuda:{gpu_name(gpu.uuid)}", real=True))


def test_the_older_handle_ends_with_its_daemon(gpu: Gpu) -> None:
    """As on the recorder."""
    asyncio.run(ends(gpu.uuid, device=f"cuda:{gpu_name(gpu.uuid)}", real=True))


def test_the_daemon_has_no_context(gpu: Gpu) -> None:
    """The driver lists the processes that compute: the decoder is among them, the daemon is not."""

    async def body() -> None:
        async with node_of(gpu.uuid, handles="fd", device=f"cuda:{gpu_name(gpu.uuid)}", real=True) as (node, (one,)):
            assert await one.attach() == "ok"
            command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
            try:
                told = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
            except (OSError, subprocess.CalledProcessError):
                pytest.skip("nvidia-smi does not list processes here")
            listed = {int(word) for word in told.stdout.split() if word.isdigit()}
            if one.process_id not in listed:
                pytest.skip("nvidia-smi does not see this process's namespace")
            assert node.process_id not in listed

    asyncio.run(body())
