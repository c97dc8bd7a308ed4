"""The step frame: one int64 array that tells the compiled step where everything is.

Set up by `decoder/models/llama.py`, read by the kernels. Names below are indices; values are counts, or addresses
and strides in bytes. `LAYERS` points at one row of weight addresses (`LAYER_*`) per layer.
"""

from __future__ import annotations

from typing import Final

SPAN: Final = 256  # keys of one softmax span; a multiple of 32. Spans start at absolute multiples of it
ROW_BLOCK: Final = 32  # rows of one product
SUM_BYTES: Final = ROW_BLOCK * 256  # of one product: two float32 sums for each row and each of 32 columns
ITEM_LANES: Final = 256  # query lanes (token, head of the group) that share one packing of a span
COUNTER_BYTES: Final = 64  # a task counter has a cache line of its own
RUN: Final = 16  # keys whose rows lie together, in blocks of at least as many tokens
RUNS_AHEAD: Final = 8  # runs asked for before they are used, at most
RUNS_BYTES: Final = (3 * SPAN // RUN + RUNS_AHEAD + 3) * 8  # addresses of a span's runs and scales; what follows
LANES_BYTES: Final = 128  # bytes of a row of scores or of weighted values: two tiles of sixteen float32 lanes

(
    CONTROL, COUNTERS, SIZE, NUM_LAYERS, HIDDEN, WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, ROTARY_HALF, QKV_COLUMNS,
    MIXED_COLUMNS, VOCAB_COLUMNS, MAX_POSITION, BLOCK_TOKENS, BLOCK_BYTES, LAYER_BYTES, VALUE_OFFSET, HEAD_BYTES,
    ROW_BYTES, SCALES, GATE_ENDING, HEAD_ENDING, POST_NORMS,
    LAYERS, EMBEDDING, EMBEDDING_SCALE, FINAL_NORM, HEAD, TILE_CONFIG,
    RESIDUAL, NORMED, QKV, QUERIES, QUERY_PLANE_BYTES, MIXED, GATED, BRANCH, LOGITS, PARTIALS,
    SCRATCH, SCRATCH_BYTES, AT_QUERIES, AT_LIMITS, AT_SCORES, AT_WEIGHTS, AT_KEYS, AT_VALUES, AT_ROWS, AT_STATE,
    AT_STATISTICS, AT_OUTPUT, AT_RUNS, STATE_BYTES,
    ARENA, TOKENS, TOKEN_IDS, POSITIONS, SEQUENCES, CONTEXT_LENS, TABLES, TABLE_WIDTH, TASKS, NUM_TASKS,
    NUM_DECODES, NUM_PARTIALS, PART_STARTS, PARTS, MEMBERS, OWNERS, LOGIT_ROWS, NUM_LOGITS, EPSILON, SCALE,
    SCORE_CAP, LOGIT_CAP, LOG_SUMS,
    EXPERTS, EXPERTS_USED, EXPERT_INNER, EXPERT_NORMALIZE, EXPERT_UP_BYTES, EXPERT_DOWN_BYTES, ROUTER_COLUMNS, ROUTED,
    CHOICES, CHOICE_WEIGHTS, CHOICE_SLOTS, EXPERT_STARTS, EXPERT_ROWS, EXPERT_INPUTS, EXPERT_GATED, EXPERT_OUTPUTS,
    ADAPTERS, LOWERED, LOWERED_BYTES, SHARED_INNER, REGIONS,
    FRAME_WORDS,
) = range(100)  # fmt: skip

# Where layers lie in two groups, REGIONS is the address of a row of REGION_WORDS for each layer: what ARENA, TABLES,
# BLOCK_BYTES and SCALES are while that layer is computed, made so that `layer * LAYER_BYTES` is its place in a block of
# its group. Without groups it is 0.
REGION_ARENA, REGION_TABLES, REGION_BLOCK_BYTES, REGION_SCALES, REGION_WORDS = range(5)

# LOG_SUMS: address of float32 [row, head] for base-2 logarithms of attention's sums, or 0.
# WIDTH is the model's hidden size, HIDDEN that size padded to whole tiles. A cap is the address of (rate, size), or 0.
# EMBEDDING_SCALE is the address of a float32 that embedding rows are multiplied with beside weights in groups; of other
# types their table is scaled.
CAP_SIZE_OFFSET: Final = 4

# A row of a layer: addresses of weights, 0 where the model has none of them; of its rotary tables; and its window. With
# experts, LAYER_GATE_UP and LAYER_DOWN are those of the first one, and the others follow at equal distances.
(
    LAYER_NORM, LAYER_QKV, LAYER_QKV_BIAS, LAYER_QUERY_NORM, LAYER_KEY_NORM, LAYER_MIX, LAYER_POST_MIX_NORM,
    LAYER_POST_NORM, LAYER_GATE_UP, LAYER_DOWN, LAYER_POST_MLP_NORM, LAYER_COSINES, LAYER_SINES, LAYER_WINDOW,
    LAYER_ROUTER, LAYER_MIX_BIAS, LAYER_GATE_UP_BIAS, LAYER_DOWN_BIAS, LAYER_SHARED_GATE_UP, LAYER_SHARED_DOWN,
    LAYER_WORDS,
) = range(21)  # fmt: skip

# ADAPTERS is 0 where no row has an adapter, else the address of one int64 a row: the address of its adapter's table, or
# 0. A table has an entry of ADAPTER_WORDS for each layer and adapted product (`decoder/models/adapter_weights.py`).
# LOWERED are rows of LOWERED_BYTES.
ADAPT_QKV, ADAPT_MIX, ADAPT_GATE_UP, ADAPT_DOWN, ADAPTED_PRODUCTS = range(5)
ADAPTER_DOWN, ADAPTER_UP, ADAPTER_RANKS, ADAPTER_WORDS = range(4)
NO_ADAPTER: Final = -1  # in place of an entry: a product that is never adapted

NO_WINDOW: Final = 1 << 30  # keys a query sees where the layer has no window

# One task of attention (int32 each): first query row, query rows, sequence, span or -1 for all spans, first slot of
# partial states, and whether several sequences share the span: then the rows are those that MEMBERS names from the
# "first row" on. A row of PARTS is a slot and the first lane in its first tile; see `attention_plan.py`.
TASK_ROW, TASK_ROWS, TASK_SEQUENCE, TASK_SPAN, TASK_SLOT, TASK_SHARED, TASK_WORDS = range(7)
PART_SLOT, PART_LANE, PART_WORDS = range(3)
