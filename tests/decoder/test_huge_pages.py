"""Huge pages under mapped weights: asked for after the content was read, seen in smaps, and never a condition."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from decoder.models.packing import HUGE_PAGE
from decoder.weights import huge_pages, packed_file
from decoder.weights.huge_pages import collapse, huge_bytes, map_over
from decoder.weights.packed_file import FilledMemory, StoringMemory, read_file, write_file

KEY = b"k" * 32
NUM_PAGES = 3
TAIL_BYTES = 3 * 4096 + 100
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def _small_unless_collapsed() -> bool:
    """Whether tmpfs has small pages here until MADV_COLLAPSE is called, and huge ones after."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if not SETTINGS.exists() or version is None or (int(version[1]), int(version[2])) < (6, 1):
        return False
    return SETTINGS.read_text().partition("[")[2].partition("]")[0] in ("never", "advise")


collapses = pytest.mark.skipif(not _small_unless_collapsed(), reason="this kernel's tmpfs has no MADV_COLLAPSE")


def content_of(num_bytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, num_bytes, np.uint8)


@pytest.fixture
def room() -> StoringMemory:
    """Memory of this process at a huge page's address."""
    return StoringMemory(NUM_PAGES * HUGE_PAGE + TAIL_BYTES, Path("unused"), KEY)


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A folder on tmpfs with room for the weights below."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or os.statvfs(shared).f_bavail * os.statvfs(shared).f_frsize < 32 << 20:
        pytest.skip("no room in /dev/shm")
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield Path(folder)


@collapses
def test_small_pages_are_put_together(room: StoringMemory) -> None:
    """All whole huge pages of a mapping become ones, before that none was; the content stays, the tail too."""
    memory = room.take((NUM_PAGES * HUGE_PAGE + TAIL_BYTES,), np.uint8)
    content = content_of(memory.size)
    fd = os.memfd_create("weights", os.MFD_CLOEXEC)
    os.pwrite(fd, content, 4096 * 512)
    map_over(memory, fd, 4096 * 512)
    os.close(fd)
    assert np.array_equal(memory, content)
    assert huge_bytes(memory) == 0
    collapse(memory)
    assert huge_bytes(memory) == NUM_PAGES * HUGE_PAGE
    assert np.array_equal(memory, content)


@collapses
@pytest.mark.parametrize("asked", [True, False])
def test_weights_of_a_file_lie_in_huge_pages(tmpfs: Path, monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    """In the process that stored them and in those that map them; without asking, in neither."""
    if not asked:
        monkeypatch.setattr(packed_file, "collapse", lambda memory: None)
    stored = StoringMemory(NUM_PAGES * HUGE_PAGE, tmpfs / "x.packed", KEY)
    weights = stored.take((NUM_PAGES * HUGE_PAGE,), np.uint8)
    content = content_of(weights.size)
    weights[...] = content
    stored.finish()
    found, missing = read_file(tmpfs / "x.packed", KEY)
    assert isinstance(found, FilledMemory), missing
    mapped = found.take(weights.shape, np.uint8)
    assert np.array_equal(weights, content) and np.array_equal(mapped, content)
    assert (huge_bytes(weights), found.huge_bytes) == ((weights.size, weights.size) if asked else (0, 0))


@pytest.mark.parametrize(
    ("refusal", "num_calls"), [(errno.EINVAL, 1), (errno.ENOMEM, 1), (errno.EAGAIN, 3), (errno.EBUSY, 3), (0, 3)]
)
def test_a_refusal_is_no_error(monkeypatch: pytest.MonkeyPatch, refusal: int, num_calls: int) -> None:
    """A kernel that has no such call, or no huge page left, is asked once; one that cannot do a piece now, for each of
    the others; whole huge pages alone are ever named."""
    calls: list[tuple[int, int, int]] = []

    def madvise(address: int, num_bytes: int, advice: int) -> int:
        calls.append((address, num_bytes, advice))
        ctypes.set_errno(refusal)
        return -1 if refusal else 0

    monkeypatch.setattr(huge_pages, "_libc", SimpleNamespace(madvise=madvise))
    pages = 2 * 32 + 5
    memory = np.empty(pages * HUGE_PAGE + 4096, np.uint8)  # never touched
    collapse(memory)
    assert len(calls) == num_calls
    assert calls[0] == (memory.ctypes.data, 32 * HUGE_PAGE, 25)
    if num_calls > 1:
        assert sum(num_bytes for _, num_bytes, _ in calls) == pages * HUGE_PAGE
    collapse(memory[: HUGE_PAGE - 1])
    assert len(calls) == num_calls


def test_a_stored_file_is_mapped_from_a_descriptor_that_cannot_write(tmp_path: Path) -> None:
    """Since one that is open for writing anywhere gets no huge pages."""
    before = set(os.listdir("/proc/self/fd"))
    fd = write_file(tmp_path / "x.packed", b"header", content_of(5000))
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert os.pread(fd, 5000, HUGE_PAGE) == content_of(5000).tobytes()
    os.close(fd)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_that_cannot_be_put_in_place_leaves_no_descriptor(tmp_path: Path) -> None:
    """Nor itself: a folder lies where it should go."""
    (tmp_path / "x.packed" / "in the way").mkdir(parents=True)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        write_file(tmp_path / "x.packed", b"header", content_of(5000))
    assert set(os.listdir("/proc/self/fd")) == before
    assert [it.name for it in tmp_path.iterdir()] == ["x.packed"]
