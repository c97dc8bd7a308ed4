"""The rotary settings of a config.json, in the forms that files have had over time.

Newer files keep all in `rope_parameters`, for some families one entry per type of layer; older ones in `rope_theta`,
`partial_rotary_factor`, `rope_local_base_freq` and `rope_scaling`. Called by `hugging_face_config.py` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from decoder.models.config import refuse
from decoder.models.rope import ROPE_KINDS, RopeConfig, RopeKind, longrope_attention_factor, yarn_attention_factor

_KINDS: Final[Mapping[str, RopeKind]] = {kind: kind for kind in ROPE_KINDS}


def read_ropes(
    family: str, values: Mapping[str, Any], head_dim: int, local: bool
) -> tuple[RopeConfig, RopeConfig | None]:
    """Settings of the model's layers, and of those with a window where they rotate by their own (`local`)."""
    given = values.get("rope_parameters") or {}
    nested = {key: given[key] for key in ("full_attention", "sliding_attention") if isinstance(given.get(key), Mapping)}
    scaling = values.get("rope_scaling") or {}
    whole = {**(nested.get("full_attention", {}) if nested else given), **scaling}
    rope = _read(family, values, whole, head_dim, float(values["rope_theta"]))
    if not local:
        if nested and _differs(nested):
            raise refuse("rope_parameters", sorted(nested), "one rotary setting for all layers of this family")
        return rope, None
    theta = float(values["rope_local_base_freq"])
    return rope, _read(family, values, nested.get("sliding_attention", {}), head_dim, theta)


def _differs(nested: Mapping[str, Any]) -> bool:
    return len(nested) == 2 and nested["full_attention"] != nested["sliding_attention"]


def _read(
    family: str, values: Mapping[str, Any], settings: Mapping[str, Any], head_dim: int, theta: float
) -> RopeConfig:
    name = settings.get("rope_type", settings.get("type", "default"))
    if family == "phi3" and name in ("su", "yarn"):
        name = "longrope"
    if name not in _KINDS:
        raise refuse("rope_scaling.rope_type", name, ", ".join(repr(kind) for kind in ROPE_KINDS))
    kind = _KINDS[name]
    theta = float(settings.get("rope_theta") or theta)
    part = settings.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    dim = int(head_dim * float(1.0 if part is None else part))
    max_position = int(values["max_position_embeddings"])
    if kind == "default":
        return RopeConfig(theta, dim)
    if kind == "linear":
        return RopeConfig(theta, dim, kind, factor=float(settings["factor"]))
    if kind == "dynamic":
        return RopeConfig(theta, dim, kind, factor=float(settings["factor"]), original_context=max_position)
    original = int(
        values.get("original_max_position_embeddings")
        or settings.get("original_max_position_embeddings")
        or max_position
    )
    if kind == "llama3":
        return RopeConfig(
            theta, dim, kind, factor=float(settings["factor"]), original_context=original,
            low_frequency_factor=float(settings["low_freq_factor"]),
            high_frequency_factor=float(settings["high_freq_factor"]),
        )  # fmt: skip
    factor = float(settings.get("factor") or max_position / original)
    attention = settings.get("attention_factor")
    if kind == "yarn":
        if attention is None:
            attention = yarn_attention_factor(factor, settings.get("mscale"), settings.get("mscale_all_dim"))
        return RopeConfig(
            theta, dim, kind, factor=factor, original_context=original, attention_factor=float(attention),
            beta_fast=float(settings.get("beta_fast") or 32), beta_slow=float(settings.get("beta_slow") or 1),
            truncate=bool(settings.get("truncate", True)),
        )  # fmt: skip
    if attention is None:
        attention = longrope_attention_factor(factor, original)
    return RopeConfig(
        theta, dim, kind, original_context=original, attention_factor=float(attention),
        short_factors=tuple(float(item) for item in settings["short_factor"]),
        long_factors=tuple(float(item) for item in settings["long_factor"]),
    )  # fmt: skip
