"""Weights that the cache manager holds: one fills, the rest read; on a memfd, and on a recorder of driver calls."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachemgr.arena.handoff import Handoff
from cachemgr.arena.maker import ArenaPlace
from cachemgr.pool_owner import PoolOwner, PoolSize
from cachemgr.succession import Succession
from cachemgr.weights.memory import HostWeights, WeightsPlace
from cachemgr.weights.store import Copy, WeightsStore
from common.arena_frames import PROTOCOL_VERSION, ArenaKind, FrameError
from common.cuda_driver import CudaError
from common.errors import FailedPrecondition, PermissionDenied, ResourceExhausted
from common.faults import Faults
from common.layout import KvDtype, KvLayout
from common.weights_frames import (
    WeightsCall,
    WeightsReply,
    WeightsRequest,
    WeightsStatus,
    caller_proof,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    filled_proof,
    weights_header,
)
from tests.cuda_recorder import GRANULARITY, UUID, Recorder, gpu_of

KEY, OTHER = b"k" * 32, b"o" * 32
SIZE = 10_000


class Rig:
    """A store whose nonces are numbered; `reserved` bytes are the arena's."""

    def __init__(self, place: ArenaPlace | None = None, keep_seconds: float = 60.0) -> None:
        self.reserved = 0
        self._number = 0
        self.store = WeightsStore(
            WeightsPlace(place or ArenaPlace()),
            reserved=lambda: self.reserved, draw_nonce=self._nonce, keep_seconds=keep_seconds,
        )  # fmt: skip

    def _nonce(self) -> bytes:
        self._number += 1
        return bytes([self._number]) * 32

    def fill(self, holder: int, key: bytes = KEY, num_bytes: int = SIZE) -> Copy:
        """Ask as the first, and lay down nothing but the header."""
        copy = self.store.ask(holder, key, num_bytes)
        assert copy is not None and copy.filler == holder
        return self.store.filled(holder, proof_of(copy))


def proof_of(copy: Copy) -> bytes:
    return filled_proof(copy.nonce, weights_header(copy.key, copy.num_bytes, copy.nonce))


@pytest.fixture
def rig() -> Iterator[Rig]:
    it = Rig()
    yield it
    it.store.close()


def on_recorder(recorder: Recorder, **options: float) -> Rig:
    return Rig(ArenaPlace(gpu_of(recorder)), **options)


def test_one_fills_and_the_rest_read_the_same_memory(rig: Rig) -> None:
    """While one fills, nobody else is given anything; afterwards everybody has the one file."""
    first = rig.store.ask(1, KEY, SIZE)
    assert first is not None and first.filler == 1
    assert rig.store.ask(2, KEY, SIZE) is None
    assert rig.store.filled(1, proof_of(first)) is first
    second = rig.store.ask(2, KEY, SIZE)
    assert second is first and second.filler is None and second.holders == {1, 2}
    assert rig.store.ask(3, OTHER, SIZE) is not first


def test_read_only_means_that_the_kernel_refuses(rig: Rig) -> None:
    """Before the seal the file can be written (the control); after it neither its fd, nor a reopened one, nor a mapping
    can; a mapping for reading can be made."""
    copy = rig.store.ask(1, KEY, SIZE)
    assert copy is not None
    os.pwrite(copy.memory.fileno(), b"laid down", 0)
    rig.store.filled(1, proof_of(copy))
    fd = copy.memory.fileno()
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    for it in (fd, again):
        with pytest.raises(OSError):
            os.pwrite(it, b"x", 0)
        with pytest.raises(OSError):
            os.ftruncate(it, SIZE + 1)
        with pytest.raises(PermissionError):
            mmap.mmap(it, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(again)
    with mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ) as reading:
        assert reading[:9] == b"laid down"
    with pytest.raises(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0)


def test_a_filler_that_can_still_write_is_not_believed(rig: Rig) -> None:
    """Nor one with a wrong proof, nor one that fills nothing; what it filled is gone, and the next one fills."""
    copy = rig.store.ask(1, KEY, SIZE)
    assert copy is not None
    with mmap.mmap(copy.memory.fileno(), SIZE), pytest.raises(PermissionDenied, match="still be written"):
        rig.store.filled(1, proof_of(copy))
    second = rig.store.ask(2, KEY, SIZE)
    assert second is not None and second.filler == 2 and second.nonce != copy.nonce
    with pytest.raises(PermissionDenied, match="read back"):
        rig.store.filled(2, proof_of(copy))
    with pytest.raises(PermissionDenied, match="fills no weights"):
        rig.store.filled(2, proof_of(second))
    assert rig.store.copies == []


def test_a_filler_that_leaves_takes_its_memory_with_it(rig: Rig) -> None:
    """The next one is asked to fill other memory, with another nonce."""
    first = rig.store.ask(1, KEY, SIZE)
    assert first is not None and rig.store.ask(2, KEY, SIZE) is None
    inode = os.fstat(first.memory.fileno()).st_ino
    rig.store.leave(1, 0.0)
    second = rig.store.ask(2, KEY, SIZE)
    assert second is not None and second.filler == 2
    assert os.fstat(second.memory.fileno()).st_ino != inode
    with pytest.raises(ValueError, match="closed"):
        first.memory.fileno()


def test_what_nobody_uses_is_kept_for_its_time(rig: Rig) -> None:
    """A decoder that starts again within it finds its weights; later they are gone; what is used never goes."""
    rig.fill(1)
    rig.fill(2, OTHER)
    rig.store.leave(1, 100.0)
    rig.store.drop_idle(159.0)
    found = rig.store.ask(3, KEY, SIZE)
    assert found is not None and found.filler is None
    rig.store.leave(3, 200.0)
    rig.store.drop_idle(1000.0)
    assert [copy.key for copy in rig.store.copies] == [OTHER]


def test_another_size_is_refused(rig: Rig) -> None:
    """A key names its size too; whoever says another is given nothing."""
    rig.fill(1)
    with pytest.raises(PermissionDenied) as caught:
        rig.store.ask(2, KEY, SIZE + 1)
    assert caught.value.reason == "WEIGHTS_SIZE"


def test_memory_is_counted_before_it_is_taken() -> None:
    """The pool and other weights count; the error has both numbers; what is unused gives way, what is used does not."""
    recorder = Recorder(memory=10 * GRANULARITY)
    rig = on_recorder(recorder)
    rig.reserved = 4 * GRANULARITY
    rig.fill(1, num_bytes=3 * GRANULARITY - 1)
    created = recorder.calls.count("cuMemCreate")
    with pytest.raises(ResourceExhausted) as caught:
        rig.store.ask(2, OTHER, 3 * GRANULARITY + 1)
    assert (caught.value.needed, caught.value.usable) == (4 * GRANULARITY, 3 * GRANULARITY)
    assert recorder.calls.count("cuMemCreate") == created
    rig.store.leave(1, 0.0)
    assert rig.store.ask(2, OTHER, 3 * GRANULARITY + 1) is not None
    assert [copy.key for copy in rig.store.copies] == [OTHER]
    rig.store.close()


def test_a_driver_that_refuses_is_named_and_unused_weights_give_way() -> None:
    """Others use the GPU too: where the driver refuses what the books allow, its own words are in the error."""
    recorder = Recorder()
    rig = on_recorder(recorder)
    rig.fill(1)
    rig.store.leave(1, 0.0)
    recorder.memory_taken = recorder.memory
    with pytest.raises(ResourceExhausted, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        rig.store.ask(2, OTHER, SIZE)
    assert rig.store.copies == []


def test_unused_weights_give_way_to_the_arena() -> None:
    """A first decoder whose arena is refused gets it once weights that nobody uses are gone; without any it is told."""

    class Full(Recorder):
        """Refuses while the store holds a copy."""

        def create(self, ordinal: int, num_bytes: int) -> int:
            self.memory_taken = self.memory if rig is not None and rig.store.copies else 0
            return super().create(ordinal, num_bytes)

    rig: Rig | None = None
    gpu = ArenaPlace(gpu_of(Full()))
    rig = Rig(gpu)
    rig.fill(1)
    layout = KvLayout(2, 1, 8, 4, KvDtype.FLOAT32)
    with tempfile.TemporaryDirectory() as folder:
        owner = PoolOwner(
            size=PoolSize(16, 0), epoch=1, faults=Faults(), handoff=Handoff(lambda *_: None),
            succession=Succession(Path(folder) / "journal", epoch=1, wait_seconds=1.0),
            place=gpu, make_room=rig.store.drop_unused,
        )  # fmt: skip
        with pytest.raises(ResourceExhausted):
            owner.settle(PROTOCOL_VERSION, layout)
        rig.store.leave(1, 0.0)
        owner.settle(PROTOCOL_VERSION, layout)
        assert rig.store.copies == [] and owner.reserved_bytes == GRANULARITY
        owner.close()


def test_gpu_memory_is_exportable_and_needs_no_context() -> None:
    """The recorder's rules hold; nothing is mapped or kept but the fd; each refused call leaves nothing behind."""
    recorder = Recorder()
    rig = on_recorder(recorder)
    copy = rig.fill(1)
    assert (copy.memory.kind, copy.memory.memory_bytes) == (ArenaKind.CUDA, GRANULARITY)
    assert copy.memory.device_uuid == UUID
    assert recorder.context is None and recorder.leaks() == {}
    rig.store.close()
    calls = recorder.calls
    for number, name in enumerate(calls, 1):
        refusing = Recorder(fail_call=number)
        with pytest.raises((ResourceExhausted, CudaError)):
            on_recorder(refusing).store.ask(1, KEY, SIZE)
        assert refusing.calls[number - 1] == name
        assert refusing.leaks() == ({"handles": 1} if name == "cuMemRelease" else {})


def test_what_cannot_be_shared_is_refused_by_its_reason() -> None:
    """A driver without export, and the older handles: there is no other way to the weights."""
    with pytest.raises(FailedPrecondition) as caught:
        on_recorder(Recorder(exportable=False)).store.ask(1, KEY, SIZE)
    assert caught.value.reason == "GPU_NO_EXPORT"
    with pytest.raises(FailedPrecondition) as caught:
        Rig(ArenaPlace(gpu_of(Recorder()), ipc=True)).store.ask(1, KEY, SIZE)
    assert caught.value.reason == "WEIGHTS_NOT_SHARED"


def test_a_new_store_takes_memory_back_once(rig: Rig) -> None:
    """The first that hands it back makes it readable for all; others who hold the same are counted; another memory of
    the same weights, one that can be written, and one of another size are not taken."""
    old = Rig()
    copy = old.fill(1)

    def fd() -> int:
        return os.dup(copy.memory.fileno())

    assert rig.store.take_back(1, KEY, SIZE, copy.nonce, fd())
    assert rig.store.take_back(2, KEY, SIZE, copy.nonce, fd())
    assert not rig.store.take_back(3, KEY, SIZE, b"n" * 32, fd())
    found = rig.store.ask(4, KEY, SIZE)
    assert found is not None and found.filler is None and found.holders == {1, 2, 4}
    assert os.fstat(found.memory.fileno()).st_ino == os.fstat(copy.memory.fileno()).st_ino
    writable = HostWeights(SIZE)
    with pytest.raises(ValueError, match="no sealed memory"):
        rig.store.take_back(5, OTHER, SIZE, copy.nonce, os.dup(writable.fileno()))
    writable.close()
    with pytest.raises(ValueError, match="no sealed memory"):
        rig.store.take_back(5, OTHER, SIZE + 1, copy.nonce, fd())
    old.store.close()


def test_a_filler_is_given_what_was_handed_back_meanwhile(rig: Rig) -> None:
    """There is one copy in the end: the filler's own memory goes, whatever it says or does."""
    old = Rig()
    copy = old.fill(1)
    for number, leaves in enumerate((False, True)):
        key = bytes([number]) * 32
        mine = rig.store.ask(1, key, SIZE)
        assert mine is not None and mine.filler == 1
        assert rig.store.take_back(2, key, SIZE, copy.nonce, os.dup(copy.memory.fileno()))
        if leaves:
            rig.store.leave(1, 0.0)
        else:
            given = rig.store.filled(1, b"p" * 32)
            assert given is not mine and given.nonce == copy.nonce and 1 in given.holders
        with pytest.raises(ValueError, match="closed"):
            mine.memory.fileno()
        assert rig.store.ask(3, key, SIZE) is not None
    old.store.close()


def test_frames_are_checked_field_by_field() -> None:
    """What was sent is read back; wrong lengths, magic, call, status and kind are refused; a proof is of one caller."""
    request = WeightsRequest(WeightsCall.RETURN, SIZE, KEY, b"p" * 32, b"n" * 32)
    assert decode_request(encode_request(request)) == request
    reply = WeightsReply(WeightsStatus.READ, ArenaKind.CUDA, 7, 8, 9, b"n" * 32, UUID)
    assert decode_reply(encode_reply(reply)) == reply
    frame = encode_request(request)
    for bad in (frame[:-1], b"X" + frame[1:], frame[:12] + b"\x09" + frame[13:]):
        with pytest.raises(FrameError):
            decode_request(bad)
    frame = encode_reply(reply)
    for place in (0, 8, 12, 16):
        with pytest.raises(FrameError):
            decode_reply(frame[:place] + b"\x77" + frame[place + 1 :])
    with pytest.raises(ValueError, match="have 32"):
        encode_request(WeightsRequest(WeightsCall.ASK, SIZE, b"short", b"p" * 32))
    proofs = {caller_proof(*it) for it in (("s", 1, KEY, 9), ("t", 1, KEY, 9), ("s", 2, KEY, 9), ("s", 1, OTHER, 9))}
    assert len(proofs | {caller_proof("s", 1, KEY, 8)}) == 5
