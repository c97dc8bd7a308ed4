"""Attention of a device step: keys and values written, decodes over their tile plans or shared runs, chunks.

Owns in which group of layers each lies, the memory of the decodes' plans, one for each window, and of the shared runs'
(none where a group's rows do not fit a slot). `begin` is called once a step, `attend` for each layer, by
`device_step.py`. It never waits for the device.
"""

# Methods of torch without annotations.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any, Final

import torch

from common.errors import Internal
from common.layout import KvLayout
from decoder.kernels.gpu import capability
from decoder.kernels.kv_write.triton import write
from decoder.kernels.paged_decode import triton as paged_decode
from decoder.kernels.paged_decode.plan import DecodePlan
from decoder.kernels.paged_prefill import triton as paged_prefill
from decoder.kernels.shared_prefix_decode import triton as shared_decode
from decoder.models.config import ModelConfig
from decoder.models.device_arena import DeviceArena
from decoder.models.device_batch import StepInputs
from decoder.models.device_weights import DeviceLayer

MAX_DECODES: Final = 1024
_INTERPRETED_PROGRAMS: Final = 2


class DeviceAttention:
    """Attention of one model. Not safe for concurrent calls: the plans belong to one step at a time.

    `dtype` is the type of activations, `query_dtype` that of rotated queries: the one in which keys are multiplied.
    """

    def __init__(
        self, config: ModelConfig, layout: KvLayout, dtype: torch.dtype, query_dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._places = [layout.place_of(layer) for layer in range(layout.num_layers)]
        self._dtype = dtype
        self._query_dtype = query_dtype
        self._device = device
        chip = capability(device)
        self.prefill_rows = paged_prefill.choose_config(
            chip, config.head_dim, query_dtype.itemsize, quantized=layout.quantized
        ).rows
        rows = max(16, config.group_size)
        decode_config = paged_decode.choose_config(chip, config.head_dim, query_dtype.itemsize, rows)
        processors, programs = 1, _INTERPRETED_PROGRAMS
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            programs = processors * decode_config.programs
        sizes: dict[str, Any] = {
            "max_batch": MAX_DECODES, "heads": config.num_heads, "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim, "device": device,
        }  # fmt: skip
        windows = {layer.window or 0 for layer in config.layers}
        self._plans = {
            window: DecodePlan.allocate(programs=programs, tile=decode_config.tile, **sizes)
            for window in sorted(windows)
        }
        self._sharing: shared_decode.SharedWorkspace | None = None
        if 0 in windows:
            try:
                self._sharing = shared_decode.SharedWorkspace.allocate(
                    multiprocessors=processors, dtype=query_dtype, **sizes
                )
            except Internal:  # not even one sequence's rows fit a slot
                self._sharing = None
        self._rest: shared_decode.Rest | None = None

    @property
    def members(self) -> int:
        """Sequences that a slot of a shared run has room for; 0 where none can share."""
        return 0 if self._sharing is None else self._sharing.members

    def begin(self, inputs: StepInputs, block_tokens: int) -> None:
        """Plan the tiles of a step's decodes. Raises Internal where it has shared runs that do not fit."""
        decodes = inputs.num_decodes
        self._rest = None
        if not decodes:
            return
        lengths = inputs.lengths[:decodes]
        if inputs.shared is not None:
            if self._sharing is None:
                raise Internal("a step with shared runs, in a model that has no layer for them")
            self._rest = shared_decode.prepare(
                inputs.shared, self._sharing, inputs.tables[:decodes], lengths, block_tokens
            )
        for window, plan in self._plans.items():
            if window or self._rest is None:
                plan.build(lengths, window)

    def attend(
        self,
        fused: torch.Tensor,
        index: int,
        layer: DeviceLayer,
        inputs: StepInputs,
        arena: DeviceArena,
    ) -> torch.Tensor:
        """Rows [T, heads * head_dim] of what layer `index` attends to, for its fused q, k and v [T, ...]: the decodes'
        first, then those of chunks. Writes keys and values."""
        config = self._config
        windowed, place = self._places[index]
        memory, tables = (arena.windows, inputs.window_tables) if windowed else (arena, inputs.tables)
        if memory is None or tables is None:
            raise Internal("a layer lies in window blocks, and the step has none")
        elements, scales = memory.elements, memory.scales
        heads = fused.unflatten(1, (-1, config.head_dim))
        queries, keys, values = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        rotated, attended = (
            torch.empty(queries.shape, dtype=dtype, device=self._device) for dtype in (self._query_dtype, self._dtype)
        )
        write(
            queries, keys, values, elements, place, tables, inputs.owners, inputs.positions, *layer.rotation,
            rotated, scales=scales, norms=layer.head_norms, epsilon=config.norm_epsilon,
        )  # fmt: skip
        decodes = inputs.num_decodes
        scale, soft_cap = config.query_scale, config.attention_cap or 0.0
        if inputs.shared is not None and self._sharing is not None and self._rest is not None and not layer.window:
            shared_decode.attend(
                rotated[:decodes, None], elements, place, inputs.shared, self._rest, self._sharing,
                attended[:decodes, None], scale=scale, scales=scales, soft_cap=soft_cap,
            )  # fmt: skip
        elif decodes:
            paged_decode.attend(
                rotated[:decodes, None], elements, place, tables[:decodes], inputs.lengths[:decodes],
                self._plans[layer.window], attended[:decodes, None], scale=scale, scales=scales,
                soft_cap=soft_cap,
            )  # fmt: skip
        if inputs.prefill is not None:
            paged_prefill.attend(
                rotated[decodes:], elements, place, tables[decodes:], inputs.prefill.starts,
                inputs.lengths[decodes:], inputs.prefill.plan, attended[decodes:], scale=scale, scales=scales,
                soft_cap=soft_cap, window=layer.window,
            )  # fmt: skip
        return attended.flatten(1)
