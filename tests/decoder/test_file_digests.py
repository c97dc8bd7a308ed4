"""Digests of model files: read once, believed only of the very file that was read, and never of another user's list."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from decoder.weights import file_digests, load_model, loader
from decoder.weights.file_digests import MAX_FILES, NAME, SETTLED_NS, KnownDigests, hash_files
from tests.tiny_models import make_tiny_llama


class Reads:
    """Counts the files that are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self._hash = file_digests._hash
        monkeypatch.setattr(file_digests, "_hash", self._counted)

    def _counted(self, file: BinaryIO) -> bytes:
        self.made += 1
        return self._hash(file)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """How many files were read."""
    return Reads(monkeypatch)


def later(path: Path) -> Callable[[], int]:
    """A clock by which `path` was changed long ago."""
    return lambda: path.stat().st_ctime_ns + SETTLED_NS


def known_of(folder: Path, path: Path) -> KnownDigests:
    return KnownDigests(folder, later(path))


def model_file(folder: Path, content: bytes = b"weights" * 100) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return path


def test_a_file_is_read_once(tmp_path: Path, reads: Reads) -> None:
    """The second time its digest comes from the list, which is private; without a list it is read each time."""
    path, folder = model_file(tmp_path), tmp_path / "cache" / "packed"
    want = hashlib.new("sha256", path.read_bytes()).digest()
    assert [hash_files([path], known_of(folder, path)) for _ in range(3)] == [want] * 3
    assert reads.made == 1
    assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == [NAME]
    assert [hash_files([path]) for _ in range(2)] == [want] * 2
    assert reads.made == 3


def test_shards_are_known_one_by_one(tmp_path: Path, reads: Reads) -> None:
    """The digest of several is that of their digests; of three shards the changed one alone is read again."""
    paths = [tmp_path / f"shard-{index}" for index in range(3)]
    for path in paths:
        path.write_bytes(path.name.encode())
    first = hash_files(paths, known_of(tmp_path / "cache", paths[-1]))
    assert first == hash_files(paths)
    paths[1].write_bytes(b"other")
    reads.made = 0
    assert hash_files(paths, known_of(tmp_path / "cache", paths[1])) != first
    assert reads.made == 1


def _same_size(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"W")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if its content had not been changed


def _another_inode(path: Path) -> None:
    before = path.stat()
    beside = path.with_suffix(".new")
    beside.write_bytes(b"x" * before.st_size)
    os.utime(beside, ns=(before.st_atime_ns, before.st_mtime_ns))
    beside.replace(path)


def _longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("change", [_same_size, _another_inode, _longer])
def test_a_changed_file_is_read_again(tmp_path: Path, reads: Reads, change: Callable[[Path], None]) -> None:
    """Whatever changed, even where size and time of its content are put back."""
    path = model_file(tmp_path)
    before = hash_files([path], known_of(tmp_path, path))
    change(path)
    want = hashlib.new("sha256", path.read_bytes()).digest()
    assert hash_files([path], known_of(tmp_path, path)) == want != before
    assert reads.made == 2


def test_a_digest_belongs_to_a_path(tmp_path: Path, reads: Reads) -> None:
    """A link to the file is the file; another file beside it is not."""
    path = model_file(tmp_path)
    hash_files([path], known_of(tmp_path, path))
    (tmp_path / "link").symlink_to(path)
    hash_files([tmp_path / "link"], known_of(tmp_path, path))
    assert reads.made == 1
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    hash_files([other], known_of(tmp_path, other))
    assert reads.made == 2


class ChangedMeanwhile(KnownDigests):
    """Changes the model file when it is about to be read."""

    def is_settled(self, identity: file_digests.Identity) -> bool:
        settled = super().is_settled(identity)
        _longer(self._folder.parent / "model.safetensors")
        return settled


def test_a_file_that_may_still_change_is_not_remembered(tmp_path: Path, reads: Reads) -> None:
    """One that was changed a moment before it was read, or while it was read, is read again."""
    path = model_file(tmp_path)
    fresh = KnownDigests(tmp_path / "cache", lambda: path.stat().st_ctime_ns + SETTLED_NS - 1)
    for _ in range(2):
        hash_files([path], fresh)
    assert reads.made == 2
    while_read = ChangedMeanwhile(tmp_path / "cache", later(path))
    for _ in range(2):
        hash_files([path], while_read)
    assert reads.made == 4
    assert not (tmp_path / "cache").exists()


def _readable_by_others(path: Path) -> None:
    path.chmod(0o640)


def _a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _short_digest(path: Path) -> None:
    values = json.loads(path.read_text())
    values["files"][0][-1] = values["files"][0][-1][:-2]
    path.write_text(json.dumps(values))


def _another_version(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))


@pytest.mark.parametrize("spoil", [_readable_by_others, _a_link, _cut, _short_digest, _another_version])
def test_a_list_that_is_not_ours_or_damaged_is_not_believed(
    tmp_path: Path, reads: Reads, spoil: Callable[[Path], None]
) -> None:
    """The file is read and the list made anew, private again."""
    path = model_file(tmp_path)
    want = hash_files([path], known_of(tmp_path, path))
    spoil(tmp_path / NAME)
    assert hash_files([path], known_of(tmp_path, path)) == want
    assert reads.made == 2
    assert hash_files([path], known_of(tmp_path, path)) == want
    assert reads.made == 2
    found = (tmp_path / NAME).lstat()
    assert stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600


def test_another_users_list_is_not_believed(tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list or a folder of another user counts for nothing, and nothing is written there."""
    path = model_file(tmp_path)
    hash_files([path], known_of(tmp_path, path))
    before = (tmp_path / NAME).read_bytes()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    _longer(path)
    hash_files([path], known_of(tmp_path, path))
    hash_files([path], known_of(tmp_path, path))
    assert reads.made == 3
    assert (tmp_path / NAME).read_bytes() == before


def test_the_list_is_bounded(tmp_path: Path) -> None:
    """The oldest entries go."""
    path = model_file(tmp_path)
    known = known_of(tmp_path, path)
    identity = file_digests.identity_of(path.stat())
    for index in range(MAX_FILES + 2):
        known.store(tmp_path / str(index), identity, bytes(32))
    found = [known.find(tmp_path / str(index), identity) for index in range(MAX_FILES + 2)]
    assert found == [None] * 2 + [bytes(32)] * MAX_FILES


def test_a_loaded_model_is_the_same_by_a_known_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second load reads no file for its digest, and has the digests of the first."""
    model, folder = make_tiny_llama(tmp_path / "model"), tmp_path / "cache"
    changed = max(file.stat().st_ctime_ns for file in model.iterdir())
    monkeypatch.setattr(loader, "KnownDigests", lambda folder: KnownDigests(folder, lambda: changed + SETTLED_NS))
    reads = Reads(monkeypatch)
    first, second = (load_model(model, "float32", 16, None, 1, weights_cache=folder) for _ in range(2))
    assert reads.made == 1
    assert first.digests == second.digests
