"""One model step on a device: dense products by torch, all else by the Triton kernels. Owns the order of a layer.

`run` allocates from torch's caching allocator alone and never waits for the device, so that with inputs in fixed
memory (`device_inputs.py`) a decode step can be recorded as a CUDA graph. Called by `device_model.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn.functional import linear

from common.errors import Internal
from common.layout import KvLayout
from decoder.kernels.activation.triton import gate
from decoder.kernels.gpu import capability
from decoder.kernels.lora import plan as lora_plan
from decoder.kernels.lora.plan import AdapterRows
from decoder.kernels.lora.triton import add
from decoder.kernels.mixture.triton import ProductConfig, configs, mix
from decoder.kernels.norm.triton import norm
from decoder.models.config import ModelConfig
from decoder.models.device_adapters import part_ends
from decoder.models.device_arena import DeviceArena
from decoder.models.device_attention import DeviceAttention
from decoder.models.device_batch import StepInputs
from decoder.models.device_weights import DeviceWeights, Experts, Feed


class DeviceStep:
    """The layers of one model. Not safe for concurrent calls: attention's plans belong to one step at a time.

    `dtype` is the type of activations, `query_dtype` that of rotated queries: the one in which keys are multiplied.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: KvLayout,
        weights: DeviceWeights,
        dtype: torch.dtype,
        query_dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._weights = weights
        self._dtype = dtype
        self._device = weights.embedding.device
        self._part_ends = part_ends(config)
        self.attention = DeviceAttention(config, layout, dtype, query_dtype, self._device)

    def run(self, inputs: StepInputs, arena: DeviceArena) -> torch.Tensor:
        """Logits, float32 [R, vocab]; keys and values of the rows are written to the arena."""
        config, weights = self._config, self._weights
        self.attention.begin(inputs, arena.elements.shape[4])
        residual = weights.embedding.index_select(0, inputs.token_ids).float()
        if config.embedding_scale != 1.0:
            residual *= config.embedding_scale
        hidden = torch.empty(residual.shape, dtype=self._dtype, device=self._device)
        epsilon = config.norm_epsilon
        norm(residual, weights.layers[0].input_norm, hidden, epsilon=epsilon)
        following = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, following, strict=True)):
            product = functools.partial(self._product, inputs.adapters, index)
            fused = product(lora_plan.QKV, hidden, layer.qkv, layer.qkv_bias)
            attended = self.attention.attend(fused, index, layer, inputs, arena)
            mixed = product(lora_plan.OUTPUT, attended, layer.output, layer.output_bias)
            norm(
                mixed, layer.mlp_norm, hidden, epsilon=epsilon, residual=residual,
                post_weight=layer.attention_post_norm,
            )  # fmt: skip
            branch = self._mlp(layer.mlp, hidden, inputs, product)
            norm(branch, next_norm, hidden, epsilon=epsilon, residual=residual, post_weight=layer.mlp_post_norm)
        if inputs.logit_rows is not None:
            hidden = hidden.index_select(0, inputs.logit_rows)
        logits = linear(hidden, weights.head).float()
        if config.logit_cap:
            logits = config.logit_cap * torch.tanh(logits / config.logit_cap)
        return logits

    def _product(
        self,
        adapters: AdapterRows | None,
        layer: int,
        product: int,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        # A dense product of all rows, and for those with an adapter what that adds.
        output = linear(x, weight, bias)
        if adapters is not None:
            add(x, output, adapters, layer, product, self._part_ends[product])
        return output

    def _mlp(
        self, mlp: Feed | Experts, hidden: torch.Tensor, inputs: StepInputs, product: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        if isinstance(mlp, Feed):
            both = product(lora_plan.GATE_UP, hidden, mlp.gate_up, mlp.gate_up_bias)
            return product(lora_plan.DOWN, self._gated(both), mlp.down, mlp.down_bias)
        return self._mix(mlp, hidden, inputs.lengths[: inputs.num_decodes])

    def warm_up_experts(self) -> None:
        """Compile the products of experts that have many rows, which a small step does not reach."""
        for mlp in (layer.mlp for layer in self._weights.layers):
            if isinstance(mlp, Experts):
                hidden = torch.zeros((1, self._config.hidden_size), dtype=self._dtype, device=self._device)
                _, many = configs(capability(self._device), hidden.itemsize)
                lengths = torch.ones(1, dtype=torch.int32, device=self._device)
                self._mix(mlp, hidden, lengths, many)
                return

    def _mix(
        self, mlp: Experts, hidden: torch.Tensor, lengths: torch.Tensor, config: ProductConfig | None = None
    ) -> torch.Tensor:
        settings = self._config.experts
        if settings is None:
            raise Internal("a layer has experts, and its model none")
        shared = None
        if mlp.shared is not None:
            shared = linear(self._gated(linear(hidden, mlp.shared.gate_up)), mlp.shared.down)
        mixture = torch.empty(hidden.shape, dtype=torch.float32, device=self._device)
        # In float32: a rounded product would choose other experts.
        logits = linear(hidden.float(), mlp.router)
        mix(
            hidden, logits, mlp.gate_up, mlp.down, mixture, used=settings.per_token, normalize=settings.normalize,
            activation=self._config.activation, shared=shared, lengths=lengths, config=config,
        )  # fmt: skip
        return mixture

    def _gated(self, both: torch.Tensor) -> torch.Tensor:
        gated = torch.empty((len(both), both.shape[1] // 2), dtype=self._dtype, device=self._device)
        gate(both, gated, activation=self._config.activation)
        return gated
