"""One model step on a device: dense products by torch, all else by the Triton kernels. Owns the order of a layer.

`run` allocates from torch's caching allocator alone and never waits for the device, so that with inputs in fixed
memory (`device_inputs.py`) a decode step can be recorded as a CUDA graph. Called by `device_model.py`.
"""

# Methods of torch without annotations.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import linear

from decoder.kernels.activation.triton import gate
from decoder.kernels.gpu import capability
from decoder.kernels.kv_write.triton import write
from decoder.kernels.norm.triton import norm
from decoder.kernels.paged_decode import triton as paged_decode
from decoder.kernels.paged_decode.plan import DecodePlan
from decoder.kernels.paged_prefill import triton as paged_prefill
from decoder.models.config import ModelConfig
from decoder.models.device_weights import DeviceLayer, DeviceWeights

MAX_DECODES: Final = 1024
_INTERPRETED_PROGRAMS: Final = 2


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """The chunks of a step, which come after its decodes: starts int32 [C + 1] of their rows, counted from the first
    chunk's, and the plan that all layers share."""

    starts: torch.Tensor
    plan: paged_prefill.PrefillPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A batch on the device, as `StepBatch` has it; `owners` int32 [T] is the sequence of each row.

    logit_rows int64 [R]; None where every row's logits are wanted. An empty place of a decode batch has position 0,
    length 0 and a table of null blocks.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    owners: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    num_decodes: int
    prefill: PrefillInputs | None = None
    logit_rows: torch.Tensor | None = None


class DeviceStep:
    """The layers of one model. Not safe for concurrent calls: the decode plans belong to one step at a time.

    `dtype` is the type of activations, `query_dtype` that of rotated queries: the one in which keys are multiplied.
    """

    def __init__(
        self, config: ModelConfig, weights: DeviceWeights, dtype: torch.dtype, query_dtype: torch.dtype
    ) -> None:
        self._config = config
        self._weights = weights
        self._dtype = dtype
        self._query_dtype = query_dtype
        self._device = weights.embedding.device
        chip = capability(self._device)
        itemsize = query_dtype.itemsize
        self.prefill_config = paged_prefill.choose_config(chip, config.head_dim, itemsize)
        programs = _INTERPRETED_PROGRAMS
        decode_config = paged_decode.choose_config(chip, config.head_dim, itemsize, max(16, config.group_size))
        if self._device.type == "cuda":
            count = torch.cuda.get_device_properties(self._device).multi_processor_count
            programs = count * decode_config.programs
        self._plans = {
            window: DecodePlan.allocate(
                max_batch=MAX_DECODES,
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                programs=programs,
                tile=decode_config.tile,
                device=self._device,
            )
            for window in sorted({layer.window for layer in weights.layers})
        }

    def run(self, inputs: StepInputs, arena: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
        """Logits, float32 [R, vocab]; keys and values of the rows are written to `arena`, and to `scales` if quantised.

        Both as `decoder/models/device_arena.py` gives them.
        """
        config, weights = self._config, self._weights
        if inputs.num_decodes:
            for window, plan in self._plans.items():
                plan.build(inputs.lengths[: inputs.num_decodes], window)
        residual = weights.embedding.index_select(0, inputs.token_ids).float()
        if config.embedding_scale != 1.0:
            residual *= config.embedding_scale
        hidden = torch.empty(residual.shape, dtype=self._dtype, device=self._device)
        epsilon = config.norm_epsilon
        norm(residual, weights.layers[0].input_norm, hidden, epsilon=epsilon)
        following = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, following, strict=True)):
            attended = self._attention(hidden, index, layer, inputs, arena, scales)
            norm(
                linear(attended, layer.output, layer.output_bias), layer.mlp_norm, hidden, epsilon=epsilon,
                residual=residual, post_weight=layer.attention_post_norm,
            )  # fmt: skip
            both = linear(hidden, layer.gate_up, layer.gate_up_bias)
            gated = torch.empty((len(both), both.shape[1] // 2), dtype=self._dtype, device=self._device)
            gate(both, gated, activation=config.activation)
            norm(
                linear(gated, layer.down, layer.down_bias), next_norm, hidden, epsilon=epsilon, residual=residual,
                post_weight=layer.mlp_post_norm,
            )  # fmt: skip
        if inputs.logit_rows is not None:
            hidden = hidden.index_select(0, inputs.logit_rows)
        logits = linear(hidden, weights.head).float()
        if config.logit_cap:
            logits = config.logit_cap * torch.tanh(logits / config.logit_cap)
        return logits

    def _attention(
        self,
        hidden: torch.Tensor,
        index: int,
        layer: DeviceLayer,
        inputs: StepInputs,
        arena: torch.Tensor,
        scales: torch.Tensor | None,
    ) -> torch.Tensor:
        # [T, heads * head_dim]: the rows of decodes first, then those of chunks.
        config = self._config
        fused = linear(hidden, layer.qkv, layer.qkv_bias)
        heads = fused.unflatten(1, (-1, config.head_dim))
        queries, keys, values = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        rotated, attended = (
            torch.empty(queries.shape, dtype=dtype, device=self._device) for dtype in (self._query_dtype, self._dtype)
        )
        write(
            queries, keys, values, arena, index, inputs.tables, inputs.owners, inputs.positions, *layer.rotation,
            rotated, scales=scales, norms=layer.head_norms, epsilon=config.norm_epsilon,
        )  # fmt: skip
        decodes = inputs.num_decodes
        scale, soft_cap = config.query_scale, config.attention_cap or 0.0
        if decodes:
            paged_decode.attend(
                rotated[:decodes, None], arena, index, inputs.tables[:decodes], inputs.lengths[:decodes],
                self._plans[layer.window], attended[:decodes, None], scale=scale, scales=scales,
                soft_cap=soft_cap,
            )  # fmt: skip
        if inputs.prefill is not None:
            paged_prefill.attend(
                rotated[decodes:], arena, index, inputs.tables[decodes:], inputs.prefill.starts,
                inputs.lengths[decodes:], inputs.prefill.plan, attended[decodes:], scale=scale, scales=scales,
                soft_cap=soft_cap, window=layer.window,
            )  # fmt: skip
        return attended.flatten(1)
