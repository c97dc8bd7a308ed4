"""The cache manager's side of GPU memory, against a RECORDER of driver calls: this is no driver and no GPU.

What it shows: calls in the order the documentation asks for, no context, nothing left over when a call is refused.
`tests/gpu/test_cuda_arena.py` has the same cases for a real GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cachemgr.arena.base import Arena
from cachemgr.arena.cuda import CudaArena
from cachemgr.arena.cuda_ipc import CudaIpcArena
from cachemgr.arena.maker import HOST_MEMORY, ArenaPlace, open_place
from cachemgr.journal_format import JournalIdentity
from common.arena_frames import ArenaKind
from common.arena_sizes import ArenaSizes
from common.config import Options
from common.cuda_checks import surroundings
from common.cuda_driver import CudaError, Gpu, open_gpu
from common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from common.faults import Faults
from tests.cuda_recorder import GRANULARITY, OTHER_UUID, UUID, Recorder, gpu_of

NONCE = bytes(range(32))
SIZES = ArenaSizes(3, 1 << 20)


def make(kind: type[CudaArena] | type[CudaIpcArena], recorder: Recorder) -> Arena:
    return kind(gpu_of(recorder), SIZES, nonce=NONCE)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_memory_is_exportable_rounded_up_and_kept_by_its_fd_alone() -> None:
    """No context, nothing mapped, no handle kept; the size is a multiple of the granularity; the fd is in no child."""
    recorder, before = Recorder(), open_fds()
    arena = make(CudaArena, recorder)
    assert recorder.calls == [
        "cuDeviceGetAttribute",
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemRelease",
    ]
    assert recorder.context is None and recorder.leaks() == {}
    assert (arena.arena_bytes, arena.memory_bytes) == (4 << 20, 4 << 20)
    odd = CudaArena(gpu_of(recorder), ArenaSizes(3, 1000), nonce=NONCE)
    assert (odd.arena_bytes, odd.memory_bytes) == (4000, GRANULARITY)
    assert not os.get_inheritable(arena.fileno())
    info = arena.info(b"f" * 16)
    assert (info.kind, info.device_uuid, info.nonce_wanted) == (ArenaKind.CUDA, UUID, True)
    for it in (arena, arena, odd):
        it.close()
    assert open_fds() == before
    with pytest.raises(ValueError, match="closed"):
        arena.fileno()


@pytest.mark.parametrize("kind", [CudaArena, CudaIpcArena])
def test_each_call_that_is_refused_leaves_nothing_and_says_which(
    kind: type[CudaArena] | type[CudaIpcArena],
) -> None:
    """Every call of the creation fails once: its name and result come out, nothing stays open."""
    good = Recorder()
    make(kind, good).close()
    creation = len(good.calls) - (0 if kind is CudaArena else 1)
    assert creation >= 4
    for number in range(1, creation + 1):
        recorder, before = Recorder(fail_call=number, fail_with="CUDA_ERROR_OUT_OF_MEMORY"), open_fds()
        with pytest.raises(CudaError) as caught:
            make(kind, recorder)
        assert (caught.value.call, caught.value.result) == (good.calls[number - 1], "CUDA_ERROR_OUT_OF_MEMORY")
        left = {"handles": 1} if caught.value.call == "cuMemRelease" else {}  # the one thing that cannot be let go
        assert recorder.leaks() == left
        assert open_fds() == before + len(left)


def test_a_device_that_cannot_export_is_refused_before_anything_is_made() -> None:
    """The error names the GPU and the way out."""
    recorder = Recorder(exportable=False)
    with pytest.raises(FailedPrecondition, match=r"GPU-0a1b2c3d.*--arena-handles ipc") as caught:
        make(CudaArena, recorder)
    assert caught.value.reason == "GPU_NO_EXPORT"
    assert "cuMemCreate" not in recorder.calls


@pytest.mark.parametrize("kind", [CudaArena, CudaIpcArena])
def test_impossible_sizes_are_refused_by_name(kind: type[CudaArena] | type[CudaIpcArena]) -> None:
    """Before any call."""
    recorder = Recorder()
    cases = [
        (ArenaSizes(0, 1 << 20), NONCE, "num_blocks"),
        (ArenaSizes(3, 16), NONCE, "block_bytes"),
        (ArenaSizes(3, 1 << 20, 2, 0), NONCE, "num_window_blocks"),
        (SIZES, b"short", "nonce"),
    ]
    for sizes, nonce, named in cases:
        with pytest.raises(ValueError, match=named):
            kind(gpu_of(recorder), sizes, nonce=nonce)
    assert recorder.calls == []


def test_the_older_handle_is_in_a_sealed_file_and_nowhere_else(capsys: pytest.CaptureFixture[str]) -> None:
    """The nonce is in the memory; repr, info and log have nothing of the 64 bytes; closing frees, once."""
    recorder, before = Recorder(), open_fds()
    arena = make(CudaIpcArena, recorder)
    secret = os.pread(arena.fileno(), 200, 0)
    assert len(secret) == 64 and secret.startswith(b"SECRET")
    with pytest.raises(PermissionError):
        os.pwrite(arena.fileno(), b"x", 0)
    shown = repr(arena) + repr(vars(arena)) + repr(arena.info(b"f" * 16)) + "".join(capsys.readouterr())
    assert "SECRET" not in shown
    address = next(iter(recorder._allocated))
    assert recorder.read(address, 32) == NONCE
    arena.poison(np.array([2], np.int32))
    assert recorder.read(address + (2 << 20), 1 << 20) == b"\xff" * (1 << 20)
    assert recorder.read(address + (3 << 20), 4) == bytes(4)
    with pytest.raises(ValueError, match=r"not in 1\.\.3"):
        arena.poison(np.array([0], np.int32))
    with pytest.raises(ValueError, match=r"window block 1 is not in 1\.\.0"):
        arena.poison_windows(np.array([1], np.int32))
    arena.close()
    arena.close()
    assert recorder.leaks() == {} and open_fds() == before


def identity(**changes: object) -> JournalIdentity:
    values = {"num_blocks": 3, "block_tokens": 4, "block_bytes": 1 << 20, "layout_fingerprint": b"f" * 16}
    return JournalIdentity(**{**values, "nonce": NONCE, "boot": bytes(16), "device_uuid": UUID, **changes})  # type: ignore[arg-type]


def test_memory_that_comes_back_is_imported_once_and_let_go() -> None:
    """An fd that is GPU memory is taken, without a context; the nonce is asked of those who map it."""
    recorder, before = Recorder(), open_fds()
    arena = make(CudaArena, recorder)
    twin = ArenaPlace(gpu_of(recorder)).adopt(os.dup(arena.fileno()), identity())
    assert (twin.kind, twin.memory_bytes, twin.nonce_written) == (ArenaKind.CUDA, 4 << 20, True)
    assert recorder.leaks() == {} and recorder.context is None
    twin.close()
    arena.close()
    assert open_fds() == before


def test_what_is_no_memory_of_this_place_is_not_adopted() -> None:
    """A stranger's fd, memory of another GPU, and host memory for a daemon on a GPU are refused, and closed."""
    before = open_fds()
    on_gpu = ArenaPlace(gpu_of(Recorder()))
    cases = [
        (on_gpu, identity(), "cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE"),
        (on_gpu, identity(device_uuid=OTHER_UUID), "another device"),
        (on_gpu, identity(device_uuid=bytes(16)), "another device"),
        (HOST_MEMORY, identity(), "another device"),
    ]
    for place, of, why in cases:
        with pytest.raises(ValueError, match=why):
            place.adopt(os.open("/dev/null", os.O_RDWR), of)
    assert open_fds() == before


def test_a_refusal_of_the_driver_reaches_the_decoder_by_name() -> None:
    """Out of memory is RESOURCE_EXHAUSTED with the bytes that were needed."""
    with pytest.raises(ResourceExhausted, match=r"4194304 bytes: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        ArenaPlace(gpu_of(Recorder(fail_call=3, fail_with="CUDA_ERROR_OUT_OF_MEMORY"))).make(SIZES)


@pytest.mark.parametrize(
    ("device", "uuids", "found"),
    [
        ("cpu", (UUID,), None),
        ("auto", (), None),
        ("auto", (UUID,), (0, UUID)),
        ("cuda", (UUID,), (0, UUID)),
        ("cuda:GPU-ffffffff-0000-1111-2222-33334444555f", (UUID, OTHER_UUID), (1, OTHER_UUID)),
    ],
)
def test_a_gpu_is_found_by_its_uuid(device: str, uuids: tuple[bytes, ...], found: tuple[int, bytes] | None) -> None:
    """Whatever its number is in this process."""
    gpu = open_gpu(device, lambda: Recorder(uuids=uuids))
    assert (None if gpu is None else (gpu.ordinal, gpu.uuid)) == found


@pytest.mark.parametrize(
    ("device", "uuids"),
    [
        ("cuda", ()),
        ("cuda", (UUID, OTHER_UUID)),
        ("auto", (UUID, OTHER_UUID)),
        ("cuda:GPU-ffffffff-0000-1111-2222-33334444555f", (UUID,)),
    ],
)
def test_no_other_gpu_is_taken_instead(device: str, uuids: tuple[bytes, ...]) -> None:
    """The error lists the UUIDs that there are."""
    with pytest.raises(FailedPrecondition, match="GPU-0a1b2c3d-0000-1111-2222-33334444555f" if uuids else "none"):
        open_gpu(device, lambda: Recorder(uuids=uuids))


def test_without_a_driver_auto_is_the_cpu_and_cuda_an_error() -> None:
    """Bindings or driver that are missing are said by name; a CPU never looks for them."""

    def missing() -> Recorder:
        raise FailedPrecondition("a GPU needs the package cuda-bindings", reason="NO_CUDA_BINDINGS")

    def untouchable() -> Recorder:
        raise AssertionError("the driver was looked for")

    assert open_gpu("auto", missing) is None
    assert open_gpu("cpu", untouchable) is None
    with pytest.raises(FailedPrecondition, match="cuda-bindings"):
        open_gpu("cuda", missing)


def test_the_surroundings_are_said_once() -> None:
    """MPS and expandable segments, each found and each absent; a GPU's daemon has no poison knob."""
    plain, shared = gpu_of(Recorder()), gpu_of(Recorder(mps=True))
    growing = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, Expandable_Segments:True"}
    assert surroundings(plain, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}) == {}
    assert list(surroundings(shared, {})) == ["gpu_uses_mps"]
    assert list(surroundings(plain, growing)) == ["gpu_expandable_segments"]
    options = Options(state_dir=Path("x"), device="cuda", faults=Faults(poison_on_free=True))
    with pytest.raises(InvalidArgument, match="poison_on_free"):
        open_place(options, {}, Recorder)


def test_a_gpu_shows_nothing_of_its_driver() -> None:
    """Neither handles nor addresses are in the repr."""
    recorder = Recorder()
    recorder.create(0, GRANULARITY)
    assert repr(Gpu(recorder, 0, UUID)) == f"Gpu(ordinal=0, uuid={UUID!r})"


@pytest.mark.parametrize("kind", [CudaArena, CudaIpcArena])
def test_window_blocks_lie_behind_the_blocks(kind: type[CudaArena] | type[CudaIpcArena]) -> None:
    """The memory has room for both pools and both null blocks, and the reply says how they are divided."""
    recorder, sizes = Recorder(), ArenaSizes(3, 1000, 2, 500)
    arena = kind(gpu_of(recorder), sizes, nonce=NONCE)
    assert arena.arena_bytes == 4096 + 3 * 500 and arena.memory_bytes >= arena.arena_bytes
    assert arena.info(b"f" * 16).sizes == sizes
    if kind is CudaIpcArena:
        arena.poison_windows(np.array([2], np.int32))
        assert recorder.read(next(iter(recorder._allocated)) + 4096, 1500) == bytes(1000) + b"\xff" * 500
    arena.close()


def test_memory_with_window_blocks_comes_back_in_its_full_size() -> None:
    """The identity of a journal says how large both pools are."""
    recorder = Recorder()
    arena = CudaArena(gpu_of(recorder), ArenaSizes(3, 1 << 20, 2, 1 << 20), nonce=NONCE)
    wanted = identity(num_window_blocks=2, window_block_bytes=1 << 20)
    twin = ArenaPlace(gpu_of(recorder)).adopt(os.dup(arena.fileno()), wanted)
    assert twin.sizes == arena.sizes and twin.memory_bytes == 8 << 20
    twin.close()
    arena.close()
