"""`ListModels` tells which adapters a request may name, and for which model each was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.adapter_config import parse_adapter_config
from common.adapter_folder import AdapterFolder
from gateway.adapters import list_adapters
from tests.tiny_adapters import adapter_config, write_adapter

TENSORS = {"x": np.zeros(1, np.float32)}


def _put(folder: Path, name: str, **changes: Any) -> None:
    write_adapter(folder / name, adapter_config(4, ["q_proj"], **changes), TENSORS)


def test_adapters_are_listed_by_name_with_their_base(tmp_path: Path) -> None:
    """Each adapter of the folder with its rank and base; one that could not be served, and no adapter, are left out."""
    folder = AdapterFolder(tmp_path)
    assert list_adapters(folder) == []
    _put(tmp_path, "sql", base_model_name_or_path="org/model-1b")
    _put(tmp_path, "law", base_model_name_or_path="/home/someone/models/model-2b/")
    _put(tmp_path, "dora", use_dora=True)
    (tmp_path / "empty").mkdir()
    listed = [(item.name, item.base_model, item.rank) for item in list_adapters(folder)]
    assert listed == [("law", "model-2b", 4), ("sql", "org/model-1b", 4)]
    folder.remove("law")
    assert [item.name for item in list_adapters(folder)] == ["sql"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("org/model", "org/model"), ("tiny", "tiny"), ("./out/run-3", "run-3"), ("C:\\models\\m", "m"), ("~/m", "m"),
        (None, ""), (7, ""), ("a\nb", ""), ("x" * 300, "x" * 256), ("/", ""),
    ],
)  # fmt: skip
def test_a_base_is_told_without_the_path_that_it_lay_at(name: Any, told: str) -> None:
    """A name of a hub stays, of a path the last part alone; what is no short printable text is not told."""
    assert parse_adapter_config(adapter_config(4, base_model_name_or_path=name)).base_model == told
