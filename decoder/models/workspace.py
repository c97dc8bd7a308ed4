"""Scratch memory of a model step, and the frame that points at it.

Owns every buffer the compiled step writes besides the arena; they grow to the largest batch seen and are zeroed when
allocated, because padding columns of matmul inputs are multiplied with zero weights and must stay finite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.layout import KvLayout
from decoder.batch import StepBatch
from decoder.kernels import amx, linear, sets, step
from decoder.kernels import frame as f
from decoder.kernels.attention_plan import Planner
from decoder.kernels.grouped_inputs import INPUT_BYTES
from decoder.kernels.grouped_products import panel_bytes
from decoder.kernels.scratch import lay_out_attention, tokens_per_item
from decoder.models.config import ExpertsConfig, ModelConfig
from decoder.models.packing import round_up
from decoder.models.regions import Regions
from decoder.models.weights import router_outputs

_ALIGN = 64


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Zeroed bytes that start on a cache line."""
    raw = np.zeros(num_bytes + _ALIGN, np.uint8)
    offset = -raw.ctypes.data % _ALIGN
    return raw[offset : offset + num_bytes]


class Workspace:
    """Buffers for steps of one model; `prepare` fills the frame for a batch."""

    def __init__(
        self, config: ModelConfig, layout: KvLayout, frame: NDArray[np.int64], threads: int, kernels: sets.Kernels
    ) -> None:
        self._config = config
        self._frame = frame
        # Bytes of 32 inputs of products: float32 or two bfloat16, or one; with weights in groups their sums as well.
        self._inputs_of_32 = 64 if isinstance(kernels, sets.AmxKernels | sets.DotKernels) else 128
        self._grouped = isinstance(kernels, sets.GroupedKernels)
        if self._grouped:
            self._inputs_of_32 = INPUT_BYTES
        self._planner = Planner(
            group=config.group_size, kv_heads=config.num_kv_heads, threads=threads, block_tokens=layout.block_tokens,
            tokens_per_item=self.tokens_per_item,
        )  # fmt: skip
        self._tokens = self._logits = self._partials = self._lowered = 0
        self._buffers: dict[int, NDArray[np.uint8]] = {}
        self._inputs: list[NDArray[Any]] = []  # what the frame points at
        head_dim, element = config.head_dim, layout.element_bytes
        frame[f.SIZE] = threads
        for index, value in (
            (f.NUM_LAYERS, config.num_layers), (f.HIDDEN, round_up(config.hidden_size, 32)),
            (f.WIDTH, config.hidden_size), (f.INNER, round_up(config.intermediate_size, 32)),
            (f.ROTARY_HALF, config.rope.dim // 2), (f.VOCAB_COLUMNS, round_up(config.vocab_size, 32)),
            (f.GATE_ENDING, linear.GATE if config.activation == "silu" else linear.GATE_GELU),
            (f.HEAD_ENDING, linear.STORE if config.logit_cap is None else linear.CAPPED),
            (f.POST_NORMS, config.post_norms),
            (f.HEADS, config.num_heads), (f.KV_HEADS, config.num_kv_heads), (f.HEAD_DIM, head_dim),
            (f.QKV_COLUMNS, round_up(config.query_size + 2 * config.kv_size, 32)),
            (f.MIXED_COLUMNS, round_up(config.query_size, 32)), (f.MAX_POSITION, config.max_position),
            (f.BLOCK_TOKENS, layout.block_tokens), (f.BLOCK_BYTES, layout.block_bytes),
            (f.LAYER_BYTES, layout.scales_offset // layout.block_layers),
            (f.VALUE_OFFSET, layout.scales_offset // layout.block_layers // 2), (f.SCALES, layout.scales_offset),
            (f.HEAD_BYTES, layout.block_tokens * head_dim * element), (f.ROW_BYTES, head_dim * element),
        ):  # fmt: skip
            frame[index] = value
        self._set_constants()
        if config.experts is not None:
            experts = config.experts
            frame[f.EXPERTS], frame[f.EXPERTS_USED] = experts.count, experts.per_token
            frame[f.EXPERT_INNER], frame[f.EXPERT_NORMALIZE] = round_up(experts.inner, 32), experts.normalize
            frame[f.ROUTER_COLUMNS] = round_up(router_outputs(experts), 32)
            frame[f.SHARED_INNER] = round_up(experts.shared, 32)
        self._tile_config = np.frombuffer(amx.full_tiles(), np.uint8).copy()
        frame[f.TILE_CONFIG] = self._tile_config.ctypes.data
        self._counters = aligned((config.num_layers * step.COUNTERS_PER_LAYER + step.LAST_COUNTERS) * f.COUNTER_BYTES)
        frame[f.COUNTERS] = self._counters.ctypes.data
        self._set_scratch(threads, layout)
        self._regions = Regions(layout, frame) if layout.grouped else None

    def _set_constants(self) -> None:
        """Norm epsilon, score scale and soft caps; scores become exponents of two, so log2(e) is in their scale."""
        config, frame, log2_e = self._config, self._frame, np.log2(np.e)
        scale = config.query_scale * log2_e if config.attention_cap is None else 1.0
        values = [config.norm_epsilon, scale, config.embedding_scale]
        for index, cap, rate, unit in (
            (f.SCORE_CAP, config.attention_cap, config.query_scale, log2_e), (f.LOGIT_CAP, config.logit_cap, 1.0, 1.0)
        ):  # fmt: skip
            if cap is not None:
                frame[index] = 4 * len(values)  # made an address below
                values += [2.0 * log2_e * rate / cap, cap * unit]
        self._constants = np.array(values, np.float32)
        address = self._constants.ctypes.data
        frame[f.EPSILON], frame[f.SCALE], frame[f.EMBEDDING_SCALE] = address, address + 4, address + 8
        for index in (f.SCORE_CAP, f.LOGIT_CAP):
            if frame[index]:
                frame[index] += address

    @property
    def _group_tiles(self) -> int:
        """Tiles of sixteen lanes that the query heads of one group take."""
        return -(-self._config.group_size // 16)

    @property
    def tokens_per_item(self) -> int:
        """Query tokens of one prefill task of attention."""
        return tokens_per_item(self._config.group_size)

    def _set_scratch(self, threads: int, layout: KvLayout) -> None:
        frame, config = self._frame, self._config
        depths = (f.HIDDEN, f.INNER, f.MIXED_COLUMNS, f.EXPERT_INNER, f.SHARED_INNER)
        room = panel_bytes(max(int(frame[index]) for index in depths)) if self._grouped else 0
        lay_out_attention(frame, config.group_size, config.head_dim, f.SUM_BYTES + room)
        self._hold(f.SCRATCH, threads * int(frame[f.SCRATCH_BYTES]))

    def _input_bytes(self, rows: int, columns: int) -> int:
        return rows * columns // 32 * self._inputs_of_32

    def _hold(self, index: int, num_bytes: int) -> None:
        self._buffers[index] = aligned(num_bytes)
        self._frame[index] = self._buffers[index].ctypes.data

    def _hold_experts(self, rows: int, experts: ExpertsConfig) -> None:
        """Room for the choices of `rows` rows; every expert may leave most of one block of slots empty."""
        choices, hidden = rows * experts.per_token, int(self._frame[f.HIDDEN])
        slots = round_up(choices + experts.count * (f.ROW_BLOCK - 1), f.ROW_BLOCK)
        for index, num_bytes in (
            (f.ROUTED, rows * int(self._frame[f.ROUTER_COLUMNS]) * 4), (f.CHOICES, choices * 4),
            (f.CHOICE_WEIGHTS, choices * 4), (f.CHOICE_SLOTS, choices * 4), (f.EXPERT_STARTS, experts.count * 8),
            (f.EXPERT_ROWS, experts.count * 8), (f.EXPERT_INPUTS, self._input_bytes(slots, hidden)),
            (f.EXPERT_GATED, self._input_bytes(slots, int(self._frame[f.EXPERT_INNER]))),
            (f.EXPERT_OUTPUTS, slots * hidden * 4),
        ):  # fmt: skip
            self._hold(index, num_bytes)

    def _grow(self, tokens: int, logits: int, partials: int) -> None:
        frame, config = self._frame, self._config
        if tokens > self._tokens:
            rows = round_up(max(tokens, 2 * self._tokens if self._tokens < 512 else 0), 32)
            self._tokens = rows
            hidden = int(frame[f.HIDDEN])
            self._hold(f.RESIDUAL, rows * hidden * 4)
            self._hold(f.NORMED, self._input_bytes(rows, hidden))
            if config.post_norms or frame[f.SHARED_INNER]:
                self._hold(f.BRANCH, rows * hidden * 4)
            self._hold(f.QKV, rows * int(frame[f.QKV_COLUMNS]) * 4)
            self._hold(f.MIXED, self._input_bytes(rows, int(frame[f.MIXED_COLUMNS])))
            self._hold(f.GATED, self._input_bytes(rows, max(int(frame[f.INNER]), int(frame[f.SHARED_INNER]))))
            if config.experts is not None:
                self._hold_experts(rows, config.experts)
            # Tiles of 32 lanes may start at any lane and read past the last one.
            frame[f.QUERY_PLANE_BYTES] = (rows * config.group_size + 32) * config.head_dim * 4
            self._hold(f.QUERIES, config.num_kv_heads * int(frame[f.QUERY_PLANE_BYTES]))
        if logits > self._logits:
            self._logits = round_up(logits, 32)
            self._hold(f.LOGITS, self._logits * int(frame[f.VOCAB_COLUMNS]) * 4)
        if partials > self._partials:
            self._partials = 2 * partials
            states = self._partials * config.num_kv_heads * self._group_tiles
            # A sequence's lanes may start anywhere in a tile, and sixteen are read.
            self._hold(f.PARTIALS, states * int(frame[f.STATE_BYTES]) + _ALIGN)

    def prepare(self, batch: StepBatch, arena: Any) -> NDArray[np.float32]:
        """Point the frame at a checked batch; returns the buffer that will hold its logits [R, vocab]."""
        tokens, logits, decodes = batch.token_ids.size, batch.logit_rows.size, batch.num_decodes
        plan = self._planner.plan(batch)
        # Rows are padded for products, so logit rows share the buffers of token rows.
        self._grow(max(tokens, logits, 1), max(logits, 1), max(plan.num_slots, 1))
        owners = np.repeat(np.arange(batch.context_lens.size, dtype=np.int32), np.diff(batch.query_starts))
        frame = self._frame
        self._inputs = []
        for index, array in (
            (f.TOKEN_IDS, batch.token_ids), (f.POSITIONS, batch.positions), (f.CONTEXT_LENS, batch.context_lens),
            (f.TABLES, batch.block_tables), (f.TASKS, plan.tasks), (f.PART_STARTS, plan.part_starts),
            (f.PARTS, plan.parts), (f.MEMBERS, plan.members), (f.OWNERS, owners), (f.LOGIT_ROWS, batch.logit_rows),
        ):  # fmt: skip
            array = np.ascontiguousarray(array, np.int32)
            self._inputs.append(array)
            frame[index] = array.ctypes.data
        if self._regions is None:
            frame[f.ARENA] = arena.ctypes.data
        else:
            self._regions.point(arena, batch.block_tables)
        frame[f.TOKENS], frame[f.NUM_LOGITS], frame[f.NUM_DECODES] = tokens, logits, decodes
        frame[f.SEQUENCES], frame[f.TABLE_WIDTH] = batch.context_lens.size, batch.block_tables.shape[1]
        frame[f.NUM_TASKS], frame[f.NUM_PARTIALS] = plan.tasks.shape[0], plan.num_slots
        self._set_adapters(batch, owners)
        self._counters[...] = 0
        columns = int(frame[f.VOCAB_COLUMNS])
        buffer = self._buffers[f.LOGITS].view(np.float32).reshape(-1, columns)
        return buffer[:logits, : self._config.vocab_size]

    def _set_adapters(self, batch: StepBatch, owners: NDArray[np.int32]) -> None:
        """The adapter's table of every row, and room for what its products go down to; nothing where no row has one."""
        frame = self._frame
        frame[f.ADAPTERS] = 0
        present = [adapter for adapter in batch.adapters if adapter is not None]
        if not present:
            return
        tables = np.array([0 if item is None else item.table.ctypes.data for item in batch.adapters], np.int64)
        rows = np.ascontiguousarray(tables[owners])
        self._inputs.append(rows)
        frame[f.ADAPTERS] = rows.ctypes.data
        frame[f.LOWERED_BYTES] = round_up(max(adapter.ranks for adapter in present) * 4, _ALIGN)
        needed = rows.size * int(frame[f.LOWERED_BYTES])
        if needed > self._lowered:
            self._lowered = 2 * needed
            self._hold(f.LOWERED, self._lowered)
