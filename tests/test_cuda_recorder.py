"""The recorder that stands in for a driver sees each broken rule: the positive control of every test that uses it."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.cachemgr.rig import spawn_python
from tests.cuda_recorder import GRANULARITY, BrokenRule, Recorder

SIZE = GRANULARITY


def mapped(recorder: Recorder) -> tuple[int, int]:
    """(address, handle) of fresh memory, mapped and with no access yet."""
    handle = recorder.create(0, SIZE)
    address = recorder.reserve(SIZE)
    recorder.map(address, SIZE, handle)
    return address, handle


def _release_twice(it: Recorder) -> None:
    handle = it.create(0, SIZE)
    it.release(handle)
    it.release(handle)


def _map_after_release(it: Recorder) -> None:
    handle = it.create(0, SIZE)
    it.release(handle)
    it.map(it.reserve(SIZE), SIZE, handle)


def _free_while_mapped(it: Recorder) -> None:
    it.free_address(mapped(it)[0], SIZE)


def _release_before_unmap(it: Recorder) -> None:
    address, handle = mapped(it)
    it.release(handle)
    it.unmap(address, SIZE)


def _read_without_access(it: Recorder) -> None:
    it.use_device(0)
    it.read(mapped(it)[0], 1)


def _write_what_is_read_only(it: Recorder) -> None:
    it.use_device(0)
    address, _ = mapped(it)
    it.set_access(address, SIZE, 0, writable=False)
    it.write(address, b"x")


def _read_after_unmap(it: Recorder) -> None:
    it.use_device(0)
    address, _ = mapped(it)
    it.set_access(address, SIZE, 0, writable=True)
    it.unmap(address, SIZE)
    it.read(address, 1)


def _read_without_a_context(it: Recorder) -> None:
    address, _ = mapped(it)
    it.set_access(address, SIZE, 0, writable=True)
    it.read(address, 1)


def _export_what_was_imported(it: Recorder) -> None:
    it.export_fd(it.import_fd(it.export_fd(it.create(0, SIZE))))


def _free_twice(it: Recorder) -> None:
    it.use_device(0)
    address = it.allocate(SIZE)
    it.free(address)
    it.free(address)


def _close_twice(it: Recorder) -> None:
    it.use_device(0)
    it.close_ipc(4096)


def _open_in_the_process_that_made_it(it: Recorder) -> None:
    it.use_device(0)
    it.open_ipc(it.ipc_handle(it.allocate(SIZE)))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda it: it.create(0, SIZE + 1),
        lambda it: it.create(1, SIZE),
        lambda it: it.reserve(4096),
        lambda it: it.map(it.reserve(SIZE), SIZE, 1),
        lambda it: it.map(4096, SIZE, it.create(0, SIZE)),
        lambda it: it.unmap(mapped(it)[0], SIZE // 2),
        lambda it: it.set_access(it.reserve(SIZE), SIZE, 0, writable=True),
        lambda it: it.map(mapped(it)[0], SIZE, 101),
        lambda it: it.free_address(4096, SIZE),
        lambda it: it.allocate(SIZE),
        lambda it: it.synchronize(),
        _release_twice,
        _map_after_release,
        _free_while_mapped,
        _release_before_unmap,
        _read_without_access,
        _write_what_is_read_only,
        _read_after_unmap,
        _read_without_a_context,
        _export_what_was_imported,
        _free_twice,
        _close_twice,
        _open_in_the_process_that_made_it,
    ],
)
def test_a_broken_rule_is_seen(wrong: Callable[[Recorder], object]) -> None:
    """Order, lifetime, size and context, each broken once."""
    with pytest.raises(BrokenRule):
        wrong(Recorder())


def test_a_mapping_for_reading_alone_faults_on_a_write() -> None:
    """The process that writes through its address dies of it; one that may write does not."""
    program = (
        "import ctypes, sys; from tests.cuda_recorder import GRANULARITY as n, Recorder; it = Recorder()\n"
        "a = it.reserve(n); it.map(a, n, it.create(0, n)); it.set_access(a, n, 0, writable=sys.argv[1] == 'rw')\n"
        "ctypes.memset(a, 1, 1)"
    )
    children = [spawn_python(program, access) for access in ("rw", "r")]
    assert [child.wait(60) for child in children] == [0, -signal.SIGSEGV]
    for child in children:
        child.communicate()
