"""Adapters in a decoder: read whole or refused by name, kept by content, dropped when nobody uses them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from common.adapter_folder import AdapterFolder
from common.errors import InvalidArgument, NotFound, ResourceExhausted
from decoder.adapter_pool import AdapterPool
from decoder.models.adapter_weights import AdapterWeights
from decoder.weights.adapter import load_adapter, module_shapes, needed_bytes
from tests.decoder.model_rig import make_config
from tests.tiny_adapters import MODULES, adapter_config, adapter_tensors, write_adapter

CONFIG = make_config()
SHAPES = module_shapes(CONFIG)
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
WIDE = np.zeros((4, 64), np.float32)
Tensors = dict[str, NDArray[np.float32]]


def put(folder: Path, name: str, seed: int, rank: int = 2) -> None:
    """Add a random adapter to a folder."""
    source = write_adapter(
        folder.parent / f"source-{seed}",
        adapter_config(rank, ["q_proj"]),
        adapter_tensors(SHAPES, CONFIG.num_layers, rank, ["q_proj"], seed),
    )
    AdapterFolder(folder).add(name, source)


class Pool:
    """A pool over a folder that counts what is read."""

    def __init__(self, folder: Path, limit: int = 2) -> None:
        self.reads = 0
        self.pool = AdapterPool(AdapterFolder(folder), CONFIG, lambda layers: layers, limit, self._read)

    def _read(self, directory: Path, config: Any) -> Any:
        self.reads += 1
        return load_adapter(directory, config)


def test_content_is_what_counts(tmp_path: Path) -> None:
    """A name is read once; other content under the name is read anew and leaves a request what it has; the same content
    under two names, or put there again, is one."""
    folder, pool = tmp_path / "f", Pool(tmp_path / "f", limit=8)
    put(folder, "a", seed=1)
    assert pool.pool.find("a") is None
    first = pool.pool.load("a")
    again = pool.pool.find("a")
    assert again is not None
    assert (again.digest, again.weights is first.weights, pool.reads) == (first.digest, True, 1)
    put(folder, "a", seed=2)
    assert pool.pool.find("a") is None
    second = pool.pool.load("a")
    assert second.digest != first.digest
    assert again.weights is first.weights
    put(folder, "b", seed=1)
    put(folder, "a", seed=1)
    assert pool.pool.load("a").digest == pool.pool.load("b").digest == first.digest
    assert pool.pool.load("b").weights is first.weights
    AdapterFolder(folder).remove("a")
    for call in (pool.pool.find, pool.pool.load):
        with pytest.raises(NotFound, match="'a'"):
            call("a")


def test_digest_is_of_what_is_computed_with(tmp_path: Path) -> None:
    """Other base names or dropout are the same content; another scale, or one bit of a tensor, is not."""

    def digest(name: str, config: dict[str, Any], changed: float = 0.0) -> bytes:
        tensors = adapter_tensors(SHAPES, CONFIG.num_layers, 4)
        next(iter(tensors.values()))[0, 0] += changed
        return load_adapter(write_adapter(tmp_path / name, config, tensors), CONFIG).digest

    plain = digest("plain", adapter_config(4))
    assert digest("named", adapter_config(4, base_model_name_or_path="other", lora_dropout=0.1)) == plain
    assert digest("scaled", adapter_config(4, lora_alpha=9)) != plain
    assert digest("changed", adapter_config(4), 1e-3) != plain


def test_only_the_unused_give_way(tmp_path: Path) -> None:
    """At the limit the one that was asked for longest ago goes, never one in use; where all are, RESOURCE_EXHAUSTED."""
    folder, pool = tmp_path / "f", Pool(tmp_path / "f", limit=2)
    for seed, name in enumerate("abc"):
        put(folder, name, seed)
    first = pool.pool.load("a")
    second = pool.pool.load("b")
    with pytest.raises(ResourceExhausted) as caught:
        pool.pool.load("c")
    assert caught.value.retry_after_seconds
    assert pool.pool.num_held == 2
    del second, caught
    gc.collect()
    third = pool.pool.load("c")
    assert pool.pool.find("b") is None
    found = pool.pool.find("a")
    assert found is not None
    assert found.weights is first.weights
    del third
    gc.collect()
    del first, found
    gc.collect()
    pool.pool.find("a")
    pool.pool.load("b")  # c is older now
    assert pool.pool.find("c") is None
    assert pool.pool.find("a") is not None
    assert pool.pool.num_held == 2


def test_replaced_or_removed_while_it_is_read(tmp_path: Path) -> None:
    """What is read while the name changes is read again; a name that goes meanwhile is NOT_FOUND."""
    folder, seen = tmp_path / "f", list[Path]()
    put(folder, "a", seed=1)
    actions: list[Callable[[], None]] = [lambda: put(folder, "a", seed=2), lambda: None]

    def read(directory: Path, config: Any) -> Any:
        seen.append(directory)
        actions.pop(0)()
        return load_adapter(directory, config)

    pool = AdapterPool(AdapterFolder(folder), CONFIG, lambda layers: layers, 2, read)
    use = pool.load("a")
    assert len(seen) == 2
    assert use.digest == load_adapter(AdapterFolder(folder).locate("a").directory, CONFIG).digest
    put(folder, "a", seed=3)
    actions.append(lambda: AdapterFolder(folder).remove("a"))
    with pytest.raises(NotFound):
        pool.load("a")


BAD: list[tuple[str, Callable[[Tensors], object]]] = [
    (f"{PREFIX}A.weight has shape", lambda t: t.update({f"{PREFIX}A.weight": np.zeros((3, 64), np.float32)})),
    (f"{PREFIX}B.weight has shape", lambda t: t.update({f"{PREFIX}B.weight": np.zeros((64, 4, 1), np.float32)})),
    ("one is missing", lambda t: t.pop(f"{PREFIX}B.weight")),
    ("not finite", lambda t: t.update({f"{PREFIX}A.weight": np.full((4, 64), np.inf, np.float32)})),
    ("layers 0..1", lambda t: t.update({PREFIX.replace("0", "2") + "A.weight": WIDE})),
    ("not one of lora_A", lambda t: t.update({"base_model.model.lm_head.lora_A.weight": WIDE})),
    ("int32", lambda t: t.update({f"{PREFIX}A.weight": np.zeros((4, 64), np.int32)})),
    ("holds no tensor", lambda t: t.clear()),
    ("holds nothing", lambda t: [t.pop(name) for name in list(t) if "v_proj" in name]),
    ("does not name k_proj", lambda t: t.update({PREFIX.replace("q_proj", "k_proj") + "A.weight": WIDE})),
    ("cannot be adapted", lambda t: t.update({PREFIX.replace("q_proj", "w1") + "A.weight": WIDE})),
    ("qkv_proj cannot", lambda t: t.update({PREFIX.replace("q_proj", "qkv_proj") + "A.weight": WIDE})),
    ("experts are not adapted",
     lambda t: t.update({PREFIX.replace("self_attn.q_proj", "mlp.experts.3.up_proj") + "A.weight": WIDE})),
]  # fmt: skip


@pytest.mark.parametrize(("named", "change"), BAD)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, named: str, change: Callable[[Tensors], object]) -> None:
    """Every tensor must be of a known module and layer, of the right shape and type, and finite; none may lack."""
    modules = ["q_proj", "v_proj"]
    tensors = adapter_tensors(SHAPES, CONFIG.num_layers, 4, modules)
    load_adapter(write_adapter(tmp_path / "right", adapter_config(4, modules), tensors), CONFIG)
    change(tensors)
    with pytest.raises(InvalidArgument) as caught:
        load_adapter(write_adapter(tmp_path / "wrong", adapter_config(4, modules), tensors), CONFIG)
    assert named in caught.value.description
    assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize("modules", [MODULES, ("q_proj", "v_proj"), ("down_proj",)])
def test_the_memory_of_an_adapter_is_known_before_it_is_taken(tmp_path: Path, modules: tuple[str, ...]) -> None:
    """What is asked for is what the tensors and the packed form take; where a byte of it lacks nothing is read, and the
    error has both numbers."""
    tensors = adapter_tensors(SHAPES, CONFIG.num_layers, 5, modules)
    path = write_adapter(tmp_path / "a", adapter_config(5, modules), tensors)
    needed = needed_bytes(CONFIG, [modules] * CONFIG.num_layers, 5)
    packed = AdapterWeights(CONFIG, load_adapter(path, CONFIG, lambda: needed).layers)
    assert needed == packed.num_bytes + sum(tensor.nbytes for tensor in tensors.values())
    with pytest.raises(ResourceExhausted, match=f"needs {needed} bytes of memory and {needed - 1} are free") as caught:
        load_adapter(path, CONFIG, lambda: needed - 1)
    assert (caught.value.needed, caught.value.usable) == (needed, needed - 1)
    assert caught.value.reason == "ADAPTER_EXCEEDS_MEMORY"


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """Bytes that are no safetensors file are refused, without what they are."""
    path = write_adapter(tmp_path / "a", adapter_config(4), adapter_tensors(SHAPES, CONFIG.num_layers, 4, MODULES))
    (path / "adapter_model.safetensors").write_bytes(b"\x80\x04." * 40)
    with pytest.raises(InvalidArgument, match="no safetensors file"):
        load_adapter(path, CONFIG)
