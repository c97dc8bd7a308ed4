"""Packed weights in a file: the same bits as without it, mapped and never copied, and remade where it is wrong."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from common.errors import Internal
from decoder.models.llama import CausalLM
from decoder.models.packing import Memory
from decoder.weights import load_model, packed_cache, packed_file
from decoder.weights.packed_file import HEADER_BYTES, FilledMemory, StoringMemory, read_file
from tests.decoder.model_rig import run_prompt
from tests.tiny_families import make_family
from tests.tiny_models import make_tiny_llama

KEY = b"k" * 32
PROMPT = np.arange(5, 30, dtype=np.int32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The cache's folder, not there yet."""
    return tmp_path / "cache" / "packed"


def loaded(model: Path, folder: Path | None, dtype: str = "bfloat16") -> CausalLM:
    return load_model(model, dtype, 16, None, 1, weights_cache=folder)  # type: ignore[arg-type]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.packed"))


def memory_of(model: CausalLM) -> Memory:
    return model._weights._memory


def test_the_second_load_maps_what_the_first_one_stored(tmp_path: Path, folder: Path) -> None:
    """Both answer bit by bit like a load without the folder; the second reads no tensor; file and folder are private;
    other types and other weights have files of their own."""
    path = make_tiny_llama(tmp_path / "model")
    plain = run_prompt(loaded(path, None), PROMPT)
    first = loaded(path, folder)
    assert isinstance(memory_of(first), StoringMemory)
    assert np.array_equal(run_prompt(first, PROMPT), plain)
    (stored,) = files(folder)
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    before = stored.stat()
    second = loaded(path, folder)
    assert isinstance(memory_of(second), FilledMemory)
    assert np.array_equal(run_prompt(second, PROMPT), plain)
    assert stored.stat().st_mtime_ns == before.st_mtime_ns and stored.stat().st_ino == before.st_ino
    loaded(path, folder, "float32")
    loaded(make_tiny_llama(tmp_path / "other", seed=1), folder)
    assert len(files(folder)) == 3
    shutil.rmtree(folder)
    assert np.array_equal(run_prompt(second, PROMPT), plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_are_mapped_too(tmp_path: Path, folder: Path, dtype: str) -> None:
    """A mixture of experts answers from the file bit by bit as without it, its experts at the same distances."""
    pytest.importorskip("transformers")
    make_family(tmp_path / "model", "qwen3-moe")
    plain = loaded(tmp_path / "model", None, dtype)
    want = run_prompt(plain, PROMPT)
    for kind in (StoringMemory, FilledMemory):
        model = loaded(tmp_path / "model", folder, dtype)
        assert isinstance(memory_of(model), kind)
        assert model._weights.expert_bytes == plain._weights.expert_bytes != (0, 0)
        assert np.array_equal(run_prompt(model, PROMPT), want)


def test_the_weights_are_the_file_and_cannot_be_written(tmp_path: Path, folder: Path) -> None:
    """Its pages lie at the arrays' addresses in the process that made it, too; a store into them is a fault."""
    path = make_tiny_llama(tmp_path / "model")
    for _ in range(2):
        model = loaded(path, folder)
        address = model._weights.head.address
        with open("/proc/self/maps") as maps:
            line = next(line for line in maps if _holds(line, address))
        assert " r--s " in line and line.rstrip().endswith(files(folder)[0].name)


def _holds(line: str, address: int) -> bool:
    start, end = (int(part, 16) for part in line.split()[0].split("-"))
    return start <= address < end


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def _cut_header(path: Path) -> None:
    os.truncate(path, 20)


def _flip(offset: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))

    return change


def _another_version(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] = 2
    path.write_bytes(content)


def _readable_by_others(path: Path) -> None:
    path.chmod(0o644)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _cut_header,
        _flip(HEADER_BYTES + 5),
        _flip(30),
        _flip(45),
        _another_version,
        _readable_by_others,
        _link,
    ],
)
def test_a_file_that_is_not_what_was_stored_is_remade(
    tmp_path: Path, folder: Path, damage: Callable[[Path], None]
) -> None:
    """Cut, changed in the header or in the weights, of another version, of loose mode, a link: refused, then right."""
    path = make_tiny_llama(tmp_path / "model")
    plain = run_prompt(loaded(path, folder), PROMPT)
    (stored,) = files(folder)
    damage(stored)
    assert read_file(stored, bytes.fromhex(stored.stem))[0] is None
    again = loaded(path, folder)
    assert isinstance(memory_of(again), StoringMemory)
    assert np.array_equal(run_prompt(again, PROMPT), plain)
    assert read_file(stored, bytes.fromhex(stored.stem))[0] is not None
    assert [it.name for it in folder.iterdir() if it.name.endswith(f".{os.getpid()}")] == []


def test_other_arrays_than_were_stored_are_an_error(folder: Path) -> None:
    """A packing that changed without its version is not served from an old file."""
    folder.mkdir(parents=True)
    memory = StoringMemory(1 << 16, folder / "x.packed", KEY)
    memory.take((4, 16), np.float32)[...] = 7
    memory.finish()
    found, _ = read_file(folder / "x.packed", KEY)
    assert found is not None
    assert (found.take((4, 16), np.float32) == 7).all()
    found.finish()
    for shape, dtype in (((16, 4), np.float32), ((4, 16), np.int32), ((3, 16), np.float32)):
        again, _ = read_file(folder / "x.packed", KEY)
        assert again is not None
        again.take(shape, dtype)
        with pytest.raises(Internal, match="PACKING_VERSION"):
            again.finish()
    assert read_file(folder / "x.packed", bytes(32))[0] is None


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_full_disk_costs_the_sharing_and_nothing_else(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model answers from its own memory, the log says so, and no part of a file stays."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    path = make_tiny_llama(tmp_path / "model")
    plain = run_prompt(loaded(path, None), PROMPT)
    monkeypatch.setattr(packed_file.os, call, full)
    model = loaded(path, folder)
    assert np.array_equal(run_prompt(model, PROMPT), plain)
    assert [it for it in folder.iterdir() if not it.name.endswith(".lock")] == []
    assert "weights_not_stored" in "".join(capsys.readouterr())


def test_a_folder_that_cannot_be_had_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in its place, and a lock that another holds for too long."""
    path = make_tiny_llama(tmp_path / "model")
    plain = run_prompt(loaded(path, None), PROMPT)
    (tmp_path / "file").write_text("")
    assert np.array_equal(run_prompt(loaded(path, tmp_path / "file"), PROMPT), plain)
    assert "weights_cache_unavailable" in "".join(capsys.readouterr())
    monkeypatch.setattr(packed_cache, "LOCK_SECONDS", 0.0)
    folder = tmp_path / "held"
    outer = packed_cache.PackedCache(folder, loaded(path, None).digests, "bfloat16")
    with outer.locked():
        assert np.array_equal(run_prompt(loaded(path, folder), PROMPT), plain)
    assert "weights_cache_busy" in "".join(capsys.readouterr())


def test_leftovers_of_a_dead_writer_go(tmp_path: Path, folder: Path) -> None:
    """The next one that packs removes them."""
    path = make_tiny_llama(tmp_path / "model")
    loaded(path, folder)
    (stored,) = files(folder)
    leftover = folder / f".{stored.name}.99999999"
    leftover.write_bytes(b"half")
    stored.unlink()
    loaded(path, folder)
    assert not leftover.exists() and files(folder) == [stored]


def test_of_loads_that_begin_at_once_one_packs(tmp_path: Path, folder: Path) -> None:
    """The others wait and map; all have the same weights, and there is one file. Locks are of the open file, so that
    threads are to each other here what processes are."""
    path = make_tiny_llama(tmp_path / "model")
    with ThreadPoolExecutor(3) as pool:
        models = list(pool.map(lambda _: loaded(path, folder), range(3)))
    kinds = sorted(type(memory_of(model)).__name__ for model in models)
    assert kinds == ["FilledMemory", "FilledMemory", "StoringMemory"]
    assert len({model._weights.head.array.tobytes() for model in models}) == 1
    assert len(files(folder)) == 1
