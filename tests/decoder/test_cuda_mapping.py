"""The decoder's side of GPU memory, against a RECORDER of driver calls: this is no driver and no GPU.

What it shows: each mapping is undone once, in order, whichever call is refused; nothing that does not fit is mapped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.arena_frames import ArenaInfo, ArenaKind
from common.cuda_driver import CudaError
from common.errors import FailedPrecondition, PermissionDenied, Unavailable
from common.layout import KvDtype, KvLayout
from decoder import arena_view
from decoder.arena_view import map_arena
from decoder.cuda_mapping import map_fd
from decoder.grouped_arena import GroupedArena
from tests.cuda_recorder import GRANULARITY, OTHER_UUID, UUID, Recorder, gpu_of, host_tensor

LAYOUT = KvLayout(2, 1, 8, 4, KvDtype.BFLOAT16)
NONCE = bytes(range(32))
OPENING = ["cuCtxSetCurrent", "cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"]
CLOSING = ["cuCtxSetCurrent", "cuCtxSynchronize", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]


@pytest.fixture
def memory() -> Iterator[int]:
    """The fd of fresh memory of another process's driver."""
    exporter = Recorder()
    handle = exporter.create(0, GRANULARITY)
    fd = exporter.export_fd(handle)
    exporter.release(handle)
    yield fd
    os.close(fd)


def info_of(**changes: object) -> ArenaInfo:
    size = LAYOUT.arena_bytes(8)
    plain = ArenaInfo(8, LAYOUT.block_bytes, size, LAYOUT.fingerprint(), NONCE)
    return replace(plain, kind=ArenaKind.CUDA, memory_bytes=GRANULARITY, device_uuid=UUID, nonce_wanted=True, **changes)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch, memory: int) -> dict[str, object]:
    """What the daemon answers (`info`), and what it heard (`written`); `refuse` is raised at the confirmation."""
    said: dict[str, object] = {"info": info_of(), "written": [], "refuse": None, "fd": -1}

    def fetch(path: Path, token: bytes) -> tuple[int, object]:
        said["fd"] = os.dup(memory)
        return said["fd"], said["info"]

    def confirm(path: Path, token: bytes, nonce: bytes) -> None:
        if isinstance(said["refuse"], Exception):
            raise said["refuse"]
        said["written"].append((token, nonce))  # type: ignore[attr-defined]

    monkeypatch.setattr(arena_view, "fetch_arena", fetch)
    monkeypatch.setattr(arena_view, "confirm_written", confirm)
    return said


def attach(recorder: Recorder) -> arena_view.MappedArena:
    return map_arena(Path("x"), b"t" * 16, LAYOUT, 8, gpu_of(recorder), host_tensor)


def test_a_mapping_is_opened_and_closed_in_order_and_once(memory: int) -> None:
    """Unmap, release, free address, after the GPU has finished; a second close does nothing."""
    recorder = Recorder()
    mapping = map_fd(gpu_of(recorder), memory, GRANULARITY)
    assert recorder.calls == OPENING
    mapping.close()
    mapping.close()
    assert recorder.calls == OPENING + CLOSING
    assert recorder.leaks() == {}


@pytest.mark.parametrize("number", range(1, 11))
def test_whichever_call_is_refused_nothing_stays_open(memory: int, number: int) -> None:
    """Of the opening: the error names the call, and what was done is undone. Of the closing: the rest is still done,
    except that addresses with memory behind them are not given back."""
    recorder = Recorder(fail_call=number)
    name = (OPENING + CLOSING)[number - 1]
    if number <= len(OPENING):
        with pytest.raises(CudaError) as caught:
            map_fd(gpu_of(recorder), memory, GRANULARITY)
        assert caught.value.call == name
    else:
        map_fd(gpu_of(recorder), memory, GRANULARITY).close()
        assert recorder.calls == OPENING + [call for call in CLOSING if (name, call) not in LEFT_OUT]
    left = {"cuMemUnmap": {"ranges": 1, "mappings": 1}, "cuMemRelease": {"handles": 1, "ranges": 1}}
    left["cuMemAddressFree"] = {"ranges": 1}
    assert recorder.leaks() == left.get(name, {})


LEFT_OUT = {
    ("cuCtxSetCurrent", "cuCtxSynchronize"),
    ("cuMemUnmap", "cuMemAddressFree"),
    ("cuMemRelease", "cuMemAddressFree"),
}


def test_a_tensor_keeps_its_memory(memory: int) -> None:
    """The mapping ends with the last tensor over it, not before."""
    recorder = Recorder()
    tensor = host_tensor(map_fd(gpu_of(recorder), memory, GRANULARITY))[:64].view(torch.float32)
    tensor[3] = 4.0
    assert recorder.leaks()
    del tensor
    assert recorder.leaks() == {}


def test_torch_gets_the_address_without_a_copy(memory: int) -> None:
    """The interface that torch reads names address, size and type, and says that it may be written: torch takes no
    other; whether it may, the mapping decides."""
    mapping = map_fd(gpu_of(Recorder()), memory, GRANULARITY, writable=False)
    told = mapping.__cuda_array_interface__
    assert told == {"shape": (GRANULARITY,), "typestr": "|u1", "data": (mapping.address, False), "version": 3}


def test_the_first_decoder_writes_the_nonce_and_the_next_one_finds_it(daemon: dict[str, object], memory: int) -> None:
    """The first says so, with what it read back; a write of one is seen by the other; the shape is the layout's."""
    first, second = Recorder(), Recorder()
    one = attach(first)
    assert daemon["written"] == [(b"t" * 16, NONCE)]
    assert os.pread(memory, 32, 0) == NONCE
    daemon["info"] = replace(info_of(), nonce_wanted=False)
    two = attach(second)
    assert daemon["written"] == [(b"t" * 16, NONCE)] and second.calls.count("cuMemcpyHtoD") == 0
    assert (one.array.shape, one.array.dtype) == ((9, 2, 2, 1, 4, 8), torch.bfloat16)
    one.array[3, 1, 0, 0, 2, 5] = 42
    assert two.array[3, 1, 0, 0, 2, 5] == 42
    assert one.read_nonce() == two.read_nonce() == NONCE
    assert one.outlives_daemon
    one.close()
    two.array[3, 1, 0, 0, 2, 5] = 43
    assert one.array[3, 1, 0, 0, 2, 5] == 43


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_with_groups_both_pools_are_tensors_over_one_mapping(
    daemon: dict[str, object], memory: int, kv_dtype: str
) -> None:
    """Shapes are those of the two groups; what is written through one mapping is where the sizes say, and in the other
    mapping too."""
    layout = KvLayout.of(3, 1, 8, 4, kv_dtype, 9, (0, 2))
    sizes = layout.sizes(20)
    info = replace(info_of(), num_blocks=20, block_bytes=sizes.block_bytes, arena_bytes=sizes.arena_bytes)
    daemon["info"] = replace(
        info,
        layout_fingerprint=layout.fingerprint(),
        num_window_blocks=sizes.num_window_blocks,
        window_block_bytes=sizes.window_block_bytes,
    )
    arenas = [map_arena(Path("x"), b"t" * 16, layout, 20, gpu_of(Recorder()), host_tensor).array for _ in range(2)]
    assert all(isinstance(arena, GroupedArena) for arena in arenas)
    one, two = arenas
    assert one.blocks.shape == (21, *layout.full_group.array_shape)
    assert one.window_blocks.shape == (sizes.num_window_blocks + 1, *layout.window_group.array_shape)
    one.window_blocks[-1].view(torch.uint8)[...] = 7
    one.blocks[-1].view(torch.uint8)[...] = 5
    assert (
        os.pread(memory, 1, sizes.arena_bytes - 1) == b"\x07" and os.pread(memory, 1, sizes.blocks_bytes - 1) == b"\x05"
    )
    assert (two.window_blocks[-1].view(torch.uint8) == 7).all() and not two.window_blocks[1].view(torch.uint8).any()


def test_another_nonce_is_refused(daemon: dict[str, object], memory: int) -> None:
    """Memory that lacks the daemon's nonce, where somebody wrote it before, is not the arena."""
    daemon["info"] = replace(info_of(), nonce_wanted=False)
    recorder = Recorder()
    refused(recorder, daemon, "ARENA_NONCE")


def refused(recorder: Recorder, daemon: dict[str, object], reason: str, **place: object) -> FailedPrecondition:
    with pytest.raises(FailedPrecondition) as caught:
        map_arena(Path("x"), b"t" * 16, LAYOUT, 8, **{"gpu": gpu_of(recorder), "wrap": host_tensor, **place})  # type: ignore[arg-type]
    assert caught.value.reason == reason
    assert recorder.leaks() == {}
    with pytest.raises(OSError):
        os.fstat(int(str(daemon["fd"])))
    return caught.value


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout_fingerprint": b"x" * 16}, "LAYOUT_MISMATCH"),
        ({"num_blocks": 7}, "ARENA_SIZE"),
        ({"memory_bytes": 2 * GRANULARITY}, "ARENA_SIZE"),
        ({"memory_bytes": GRANULARITY - 1}, "ARENA_SIZE"),
        ({"device_uuid": OTHER_UUID}, "DEVICE_MISMATCH"),
        ({"kind": ArenaKind.HOST}, "DEVICE_MISMATCH"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_mapped(
    daemon: dict[str, object], changes: dict[str, object], reason: str
) -> None:
    """Layout, size and GPU, each by its reason; no mapping call is made."""
    daemon["info"] = replace(info_of(), **changes)  # type: ignore[arg-type]
    recorder = Recorder()
    refused(recorder, daemon, reason)
    assert "cuMemImportFromShareableHandle" not in recorder.calls


def test_a_decoder_on_the_cpu_does_not_take_gpu_memory(daemon: dict[str, object]) -> None:
    """The error names both places, and what to do."""
    error = refused(Recorder(), daemon, "DEVICE_MISMATCH", gpu=None)
    assert error.metadata == {"want": "host memory", "have": "GPU-0a1b2c3d-0000-1111-2222-33334444555f"}
    assert "--device" in error.message


def test_whichever_call_of_an_attach_is_refused_nothing_stays_open(daemon: dict[str, object]) -> None:
    """The decoder is told the driver's call and result, and no address or handle."""
    good = Recorder()
    kept = attach(good)
    calls = list(good.calls)
    assert len(calls) == 11
    for number in range(1, len(calls) + 1):
        recorder = Recorder(fail_call=number, fail_with="CUDA_ERROR_UNKNOWN")
        error = refused(recorder, daemon, "ARENA_MAP")
        assert error.message == f"the arena cannot be mapped: {calls[number - 1]}: CUDA_ERROR_UNKNOWN"
    kept.close()


@pytest.mark.parametrize("error", [PermissionDenied("no"), Unavailable("away")])
def test_an_unheard_confirmation_undoes_the_attach(daemon: dict[str, object], error: Exception) -> None:
    """The decoder attaches anew then, and is asked again."""
    daemon["refuse"] = error
    recorder = Recorder()
    with pytest.raises(type(error)):
        attach(recorder)
    assert recorder.leaks() == {}
    with pytest.raises(OSError):
        os.fstat(int(str(daemon["fd"])))
