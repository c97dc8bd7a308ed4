"""What an adapter_config.json says, as far as this build serves it: LoRA (Hu et al. 2021) of the projections.

Invariant: a configuration is taken exactly or refused by the name of its setting, with what would be needed. Pure but
for reading the one file; knows no model, so that the command line checks with it too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common.errors import InvalidArgument

CONFIG_FILE: Final = "adapter_config.json"
TENSORS_FILE: Final = "adapter_model.safetensors"
PICKLE_FILE: Final = "adapter_model.bin"
# The last two are fused, as in Phi-3: q, k and v, or gate and up, in one matrix.
MODULES: Final = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj",
)  # fmt: skip
MAX_RANK: Final = 512
MAX_BASE_NAME: Final = 256  # characters of it that are told
MAX_CONFIG_BYTES: Final = 1 << 20
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq")  # ways to begin that change the base's weights as well


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """rank: columns of A and rows of B; scale: what B A is multiplied by; modules: named ones, None where a pattern
    names them, so that the tensors tell; base_model: the name of the model that it was made for, for people to read."""

    rank: int
    scale: float
    modules: frozenset[str] | None
    base_model: str = ""


def read_adapter_config(directory: Path) -> AdapterConfig:
    """The configuration of the adapter in `directory`.

    Raises InvalidArgument naming what is wrong or not served, FileNotFoundError where the directory is not there.
    """
    if not directory.is_dir():
        raise FileNotFoundError(directory)
    for name in (CONFIG_FILE, TENSORS_FILE):
        if not (directory / name).is_file():
            if name == TENSORS_FILE and (directory / PICKLE_FILE).is_file():
                raise refuse_adapter(
                    f"{PICKLE_FILE} is a pickle, which can run code when it is read; save it as {TENSORS_FILE}"
                )
            raise refuse_adapter(f"{name} is missing")
    try:
        with (directory / CONFIG_FILE).open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        values = json.loads(text) if len(text) <= MAX_CONFIG_BYTES else None
    except (OSError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise refuse_adapter(f"{CONFIG_FILE} is no JSON object of at most {MAX_CONFIG_BYTES} bytes")
    return parse_adapter_config(values)


def refuse_adapter(description: str) -> InvalidArgument:
    """The error of an adapter that cannot be used."""
    return InvalidArgument("adapter", description)


def parse_adapter_config(values: Mapping[str, Any]) -> AdapterConfig:
    """See `read_adapter_config`; `values` is the JSON object."""
    kind = values.get("peft_type")
    if kind != "LORA":
        raise _setting("peft_type", kind, '"LORA"')
    for name, is_plain, needed in _PLAIN:
        if name in values and not is_plain(values[name]):
            raise _setting(name, values[name], needed)
    start = values.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise _setting("init_lora_weights", start, "an adapter of the unchanged base: convert it when saving")
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise _setting("r", rank, f"a whole number in 1..{MAX_RANK}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise _setting("lora_alpha", alpha, "a finite number > 0")
    # Rank-stabilised (Kalajdzievski 2023): the scale falls with the root of the rank.
    scale = alpha / (math.sqrt(rank) if values.get("use_rslora") else rank)
    return AdapterConfig(rank, scale, _modules(values.get("target_modules")), _base_model(values))


def _modules(targets: Any) -> frozenset[str] | None:
    if isinstance(targets, str) and targets:
        return None  # a pattern of module names, or "all-linear"
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise _setting("target_modules", targets, "names of modules, or one pattern")
    modules = frozenset(name.rpartition(".")[2] for name in targets)
    for name in sorted(modules - set(MODULES)):
        raise _setting("target_modules", name, f"of {', '.join(MODULES)}")
    return modules


def _base_model(values: Mapping[str, Any]) -> str:
    """The last part of a path: where a model lay on the machine that trained is nobody's business."""
    name = values.get("base_model_name_or_path")
    if not isinstance(name, str) or not name.isprintable():
        return ""
    is_path = name.startswith(("/", ".", "~")) or "\\" in name
    return (re.split(r"[/\\]", name.rstrip("/\\"))[-1] if is_path else name)[:MAX_BASE_NAME]


def _setting(name: str, value: Any, allowed: str) -> InvalidArgument:
    shown = json.dumps(value, default=str)
    return refuse_adapter(f"{name} of {CONFIG_FILE} is {shown[:80]}; allowed is {allowed}")


def _empty(value: Any) -> bool:
    return not value


_Check = tuple[str, Callable[[Any], bool], str]
# Settings that change what is computed, and when they do not.
_PLAIN: Final[tuple[_Check, ...]] = (
    ("use_dora", _empty, "false: DoRA would need the norms of the adapted weights"),
    ("rank_pattern", _empty, "none: ranks by module are not read from it"),
    ("alpha_pattern", _empty, "none: one scale for all modules"),
    ("modules_to_save", _empty, "none: whole modules would need weights of their own"),
    ("bias", lambda value: value in ("none", None), '"none": biases would need a place in every product'),
    ("lora_bias", _empty, "false: biases would need a place in every product"),
    ("fan_in_fan_out", _empty, "false: weights are stored as [out, in]"),
    ("layer_replication", _empty, "none: the model's own layers"),
    ("trainable_token_indices", _empty, "none: the embedding stays the base's"),
    ("target_parameters", _empty, "none: modules alone"),
    ("megatron_config", _empty, "none"),
    ("use_qalora", _empty, "false"),
    ("alora_invocation_tokens", _empty, "none: an adapter is active from the first token on"),
)  # fmt: skip
