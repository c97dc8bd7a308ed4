"""Sockets with two names: either one restores the other, only their own files are removed, a loss is told once."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.errors import FailedPrecondition
from common.kept_sockets import KeptSocket, SocketState, kept_path, watch_sockets
from common.paths import StatePaths
from common.socket_files import take_lock


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short folder, as socket paths are bounded."""
    with tempfile.TemporaryDirectory(prefix="ts-") as name:
        yield Path(name)


def listening(kept: KeptSocket) -> socket.socket:
    """A real listener behind `kept`."""
    kept.clear()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(kept.kept))
    listener.listen(16)
    kept.publish()
    return listener


def connects(path: Path) -> bool:
    """Whether somebody listens at `path`."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(2)
        try:
            link.connect(os.fspath(path))
        except OSError:
            return False
        return True


async def until(probe: Callable[[], bool], what: str) -> None:
    """Poll until `probe` is true."""
    deadline = time.monotonic() + 20
    while not probe():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


def test_either_name_restores_the_other(folder: Path) -> None:
    """A deleted name is put back within a look, private and connectable; a stranger's file in its place is replaced."""

    async def body() -> None:
        kept = KeptSocket(folder / "a.sock")
        with listening(kept):
            assert stat.S_IMODE(kept.path.stat().st_mode) == 0o600
            watching = asyncio.create_task(watch_sockets([kept]))
            for name in (kept.path, kept.kept, kept.path):
                name.unlink()
                assert not connects(name), "positive control"
                await until(lambda name=name: connects(name), f"{name.name} is back")  # type: ignore[misc]
                assert stat.S_IMODE(name.stat().st_mode) == 0o600
            kept.path.unlink()
            kept.path.write_text("a stranger")
            await until(lambda: connects(kept.path), "back in spite of a file in its place")
            watching.cancel()
            kept.remove()
            assert list(folder.iterdir()) == []

    asyncio.run(body())


def test_a_lost_socket_is_told_once(folder: Path) -> None:
    """With both names gone nothing can be restored: the owner is told once, and not while one name is left."""

    class Counted(KeptSocket):
        looks = 0

        def look(self) -> SocketState:
            self.looks += 1
            return super().look()

    async def body() -> None:
        kept = Counted(folder / "a.sock")
        told: list[int] = []
        with listening(kept):
            watching = asyncio.create_task(watch_sockets([kept], lambda: told.append(1)))
            kept.path.unlink()
            await until(lambda: connects(kept.path), "restored")
            assert not told
            kept.path.unlink()
            kept.kept.unlink()
            await until(lambda: bool(told), "told")
            seen = kept.looks
            await until(lambda: kept.looks >= seen + 2, "two more looks")
            assert told == [1]
            watching.cancel()

    asyncio.run(body())


def test_an_end_removes_no_other_process_s_socket(folder: Path) -> None:
    """After a loss another owner may have bound there; the end of the first one leaves its files alone."""
    first, second = KeptSocket(folder / "a.sock"), KeptSocket(folder / "a.sock")
    with listening(first):
        first.path.unlink()
        first.kept.unlink()
        with listening(second):
            first.remove()
            assert connects(second.path)
            assert second.look() is SocketState.WHOLE
            second.remove()
            assert not second.path.exists()


def test_a_file_system_without_hard_links_serves_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket has its public name alone; a look changes nothing, and its deletion is a loss."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    kept = KeptSocket(folder / "a.sock")
    with listening(kept):
        assert connects(kept.path)
        assert kept.look() is SocketState.STUCK
        assert connects(kept.path)
        kept.path.unlink()
        assert kept.look() is SocketState.LOST


def test_stale_names_go_at_the_start_and_other_files_do_not(folder: Path) -> None:
    """What a killed owner left is no obstacle; a file that is no socket ends the start and is kept."""
    dead = KeptSocket(folder / "a.sock")
    listening(dead).close()
    assert dead.path.exists() and dead.kept.exists()
    fresh = KeptSocket(folder / "a.sock")
    with listening(fresh):
        assert connects(fresh.path)
        fresh.remove()
    fresh.kept.write_text("mine")
    with pytest.raises(FailedPrecondition, match="not a socket"):
        fresh.clear()
    assert fresh.kept.read_text() == "mine"


def test_the_path_limit_counts_the_longer_name(folder: Path) -> None:
    """A state directory is accepted only if the hidden name of its longest socket can be bound as well."""
    room = 107 - len(os.fsencode(kept_path(StatePaths(folder / "x").decoder_socket(99)))) + 1
    fits, too_long = StatePaths(folder / ("x" * room)), StatePaths(folder / ("x" * (room + 1)))
    fits.prepare()
    with listening(KeptSocket(fits.decoder_socket(99))):
        assert connects(fits.decoder_socket(99))
    with pytest.raises(FailedPrecondition, match="108 bytes"):
        too_long.prepare()


def test_a_lock_has_one_holder(folder: Path) -> None:
    """The second taker gets its refusal; after the first lets go it may have it; a folder as the file is an error."""
    refusal = FailedPrecondition("taken")
    fd = take_lock(folder / "lock", refusal)
    with pytest.raises(FailedPrecondition, match="taken"):
        take_lock(folder / "lock", refusal)
    os.close(fd)
    os.close(take_lock(folder / "lock", refusal))
    (folder / "folder").mkdir()
    with pytest.raises(FailedPrecondition, match="cannot be opened"):
        take_lock(folder / "folder", refusal)


def test_what_is_wrong_with_a_state_directory_is_said(folder: Path) -> None:
    """A file, an unwritable parent and a folder that others may write to are refused by name; `run` is tightened."""
    (folder / "file").write_text("")
    with pytest.raises(FailedPrecondition, match=r"--state-dir .*file cannot be used"):
        StatePaths(folder / "file").prepare()
    with pytest.raises(FailedPrecondition, match=r"--state-dir .* cannot be used"):
        StatePaths(Path("/proc/tessera")).prepare()
    state = StatePaths(folder / "state")
    state.prepare()
    state.run_dir.chmod(0o755)
    state.state_dir.chmod(0o755)
    state.prepare()
    assert stat.S_IMODE(state.run_dir.stat().st_mode) == 0o700
    state.state_dir.chmod(0o770)
    with pytest.raises(FailedPrecondition, match="0770"):
        state.prepare()


def test_a_state_directory_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To root as well, who could write to it: what a node of root's makes there would be closed to its owner. Nothing
    in it is changed."""
    state = StatePaths(folder / "state")
    state.prepare()
    state.run_dir.rmdir()
    owner = state.state_dir.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 0 if owner else 12_345)
    for refuse in (state.check, state.prepare):
        with pytest.raises(FailedPrecondition, match=f"state belongs to user {owner}, and this is user"):
            refuse()
    assert not state.run_dir.exists()
    monkeypatch.undo()
    state.prepare()
    assert state.run_dir.exists(), "control: its owner may"
