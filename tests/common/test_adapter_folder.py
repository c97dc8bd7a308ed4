"""Adapters on disk: names, what a configuration may say, and replacement that a reader sees whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.adapter_config import PICKLE_FILE, parse_adapter_config, read_adapter_config
from common.adapter_folder import AdapterFolder, is_adapter_name
from common.errors import AlreadyExists, InvalidArgument, NotFound
from tests.tiny_adapters import adapter_config, write_adapter

TENSORS = {"t": np.zeros(1, np.float32)}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type"),
    ({"peft_type": None}, "peft_type"),
    *(({"r": value}, "r of") for value in (0, -1, 513, 4.0, True, "4", None)),
    *(({"lora_alpha": value}, "lora_alpha") for value in (0, -1, float("nan"), float("inf"), True, "8", None)),
    *(({"target_modules": value}, "target_modules") for value in ([], None, 3, "", [3], ["lm_head"], ["w1"])),
    ({"use_dora": True}, "use_dora"),
    ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
    ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    *(({"bias": value}, "bias") for value in ("all", "lora_only", True)),
    ({"lora_bias": True}, "lora_bias"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED)
def test_a_setting_that_is_not_served_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    """Each setting that would change what is computed is refused, and the message names it and what is allowed."""
    with pytest.raises(InvalidArgument) as caught:
        parse_adapter_config(adapter_config(4) | changes)
    assert named in caught.value.description
    assert "allowed is" in caught.value.description


def test_scales_and_modules() -> None:
    """The scale is alpha / r, with rslora alpha / sqrt(r); modules are the last parts of their names."""
    plain = parse_adapter_config(adapter_config(4, ["model.layers.0.self_attn.q_proj", "v_proj"]))
    assert (plain.rank, plain.scale, plain.modules) == (4, 2.0, frozenset({"q_proj", "v_proj"}))
    stable = parse_adapter_config(adapter_config(16, use_rslora=True, target_modules="all-linear"))
    assert (stable.scale, stable.modules) == (8.0, None)
    eva = parse_adapter_config(adapter_config(4, init_lora_weights="gaussian"))
    assert eva.rank == 4


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "a/b", "a\\b", "a b", "x" * 65, "a\n", "a\x00", "é", "%2e"])
def test_odd_names_lead_nowhere(tmp_path: Path, name: str) -> None:
    """What is no name is refused before any file is looked at; a plain one is looked for."""
    assert not is_adapter_name(name)
    folder = AdapterFolder(tmp_path / "folder")
    for call in (folder.locate, folder.remove, lambda name: folder.add(name, tmp_path)):
        with pytest.raises(InvalidArgument):
            call(name)
    with pytest.raises(NotFound):
        folder.locate("plain")


def test_a_replacement_is_another_place_and_leaves_nothing(tmp_path: Path) -> None:
    """What was located before a replacement is not what is located after it; the old content goes, and no name is ever
    without content. A removed name is NOT_FOUND."""
    folder = AdapterFolder(tmp_path / "folder")
    source = write_adapter(tmp_path / "v", adapter_config(4), TENSORS)
    folder.add("a", source)
    first = folder.locate("a")
    assert folder.locate("a") == first
    folder.add("a", source)
    second = folder.locate("a")
    assert second != first
    assert not first.directory.exists()
    assert folder.names() == ["a"]
    folder.remove("a")
    with pytest.raises(NotFound):
        folder.locate("a")
    with pytest.raises(NotFound):
        folder.remove("a")
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_failed_add_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copying fails, or the new content could never be served, the name keeps what it had and nothing is left."""
    folder = AdapterFolder(tmp_path / "folder")
    source = write_adapter(tmp_path / "v", adapter_config(4), TENSORS)
    folder.add("a", source)
    before = folder.locate("a")
    bad = write_adapter(tmp_path / "bad", adapter_config(4, use_dora=True), TENSORS)
    with pytest.raises(InvalidArgument):
        folder.add("a", bad)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(OSError, match="space"):
        folder.add("a", source)
    assert folder.locate("a") == before
    assert len(list((tmp_path / "folder").iterdir())) == 2


def test_a_directory_put_there_by_hand_serves_and_is_never_overwritten(tmp_path: Path) -> None:
    """It is located by its own files, changes with them, is not replaced, and goes when it is removed by name."""
    folder = AdapterFolder(tmp_path)
    write_adapter(tmp_path / "hand", adapter_config(4), TENSORS)
    before = folder.locate("hand")
    write_adapter(tmp_path / "hand", adapter_config(8), TENSORS)
    assert folder.locate("hand") != before
    with pytest.raises(AlreadyExists):
        folder.add("hand", tmp_path / "hand")
    folder.remove("hand")
    assert folder.names() == []


def test_a_link_to_elsewhere_is_removed_alone(tmp_path: Path) -> None:
    """Somebody's own link serves; replacing or removing it leaves what it names."""
    folder, own = AdapterFolder(tmp_path / "folder"), write_adapter(tmp_path / "own", adapter_config(4), TENSORS)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").symlink_to(own)
    assert folder.locate("a").directory == own.resolve()
    folder.add("a", own)
    (tmp_path / "folder" / "b").symlink_to(own)
    folder.remove("b")
    assert own.is_dir()


def test_pickles_and_missing_files_are_named(tmp_path: Path) -> None:
    """A .bin beside no safetensors is refused as a pickle; a missing or broken file by its name."""
    source = write_adapter(tmp_path / "v", adapter_config(4), TENSORS)
    tensors = source / "adapter_model.safetensors"
    tensors.rename(source / PICKLE_FILE)
    with pytest.raises(InvalidArgument, match="pickle"):
        read_adapter_config(source)
    (source / PICKLE_FILE).unlink()
    with pytest.raises(InvalidArgument, match="safetensors is missing"):
        read_adapter_config(source)
    tensors.touch()
    for text in ("[]", "{", "", "[" * 100_000, json.dumps("x" * (1 << 20))):
        (source / "adapter_config.json").write_text(text)
        with pytest.raises(InvalidArgument, match="JSON object"):
            read_adapter_config(source)
