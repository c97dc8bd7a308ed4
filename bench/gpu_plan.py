"""What `bench/gpu.py` measures on a GPU, and what is predicted of it, before anything runs. No device here.

Predictions are for one H200 and from published figures (Llama-3-like attention: 64 query heads by 8, 128 elements,
bfloat16): a decode takes its key and value bytes at the measured copy bandwidth, over 0.97, and about 6 microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

HEADS: Final = 64
KV_HEADS: Final = 8
HEAD_DIM: Final = 128
TOKEN_BYTES: Final = 2 * KV_HEADS * HEAD_DIM * 2
COPY_BYTES: Final = 8 << 30
PREDICTED_COPY: Final = 4.3e12
PREDICTED_MATMUL: Final = 780e12
FIXED_US: Final = 6.0

# Tile, warps, stages, programs of a multiprocessor.
CONFIGS: Final = ((64, 4, 3, 2), (64, 4, 4, 1), (64, 4, 3, 3), (128, 8, 2, 1))
SWEEP: Final = ((1, 4096), (4, 4096), (16, 8192), (64, 1024), (64, 8192), (256, 4096))


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement. `bytes_moved` or `flops` is what the result is judged by; `params` is for `gpu_work.py`."""

    section: str
    label: str
    kind: str
    params: dict[str, Any] = field(hash=False)
    predicted_us: float
    bytes_moved: int = 0
    flops: int = 0


PREDICTIONS: Final = {
    "ceilings": "8 GiB copied at 4.3 TB/s (read and written bytes); 8192^3 bfloat16 at 780 TFLOP/s.",
    "decode": "80-88 % of the copy bandwidth from 256 MB of keys and values on; 9-12 us at batch 1, 4k.",
    "mixed": "One context of 32k among 63 of 1k is at most 10 % slower than 64 equal ones of the same bytes.",
    "pages": "Pages of 16 tokens cost 5-15 % against 64; 128 costs nothing.",
    "quantised": "8-bit keys and values: decode 1.7-1.85 times as fast as bfloat16, prefill at most 10 % slower.",
    "shared": (
        "32 sequences over one run of 8k: at least 4 times as fast as without sharing; 8 over 2k about as fast, where "
        "the step begins to share; a recorded step of 32 over 4k at least 1.2 times as fast."
    ),
    "adapters": "A recorded step with 8 adapters of rank 16, one a row, takes at most 1.3 times as long as with none.",
    "experts": (
        "A recorded step of 8 rows by 8 of 64 experts reads about 42 of them in each of 4 layers, 1.1 GB in 0.25 ms; "
        "one of 64 rows, all: 1.6 GB in 0.38 ms. The rest of the step takes 0.3 ms."
    ),
    "prefill": "400-450 TFLOP/s at 8k; scattered pages cost at most 8 % against consecutive ones.",
    "ahead": (
        "A recorded step whose ids are read when the next one is launched is at least 1.15 times as fast as one whose "
        "ids are read at once: the host's part, 0.25 ms, runs beside the device's."
    ),
    "step": "A recorded decode step of a small model is at least 1.6 times as fast as the same step launched anew.",
}


def decode_us(num_bytes: int) -> float:
    """Predicted time of one decode call over so many bytes of keys and values."""
    return num_bytes / PREDICTED_COPY / 0.97 * 1e6 + FIXED_US


def prefill_flops(length: int) -> int:
    """Causal: half of the products of queries with keys, and of weights with values."""
    return 2 * HEADS * length * length * HEAD_DIM


def decode_cell(section: str, label: str, lengths: list[int], factor: float = 1.0, **params: Any) -> Cell:
    """A decode over contexts of these lengths; `factor` times the time that its bytes alone would take."""
    stored = params.get("stored", "bfloat16")
    num_bytes = sum(lengths) * (TOKEN_BYTES if stored == "bfloat16" else TOKEN_BYTES // 2 * (HEAD_DIM + 2) // HEAD_DIM)
    values = {"lengths": lengths, "block_tokens": 64, "stored": "bfloat16", "config": CONFIGS[0], **params}
    return Cell(section, label, "decode", values, decode_us(num_bytes) * factor, bytes_moved=num_bytes)


def cells(quick: bool = False) -> list[Cell]:
    """Everything in the order in which it is measured; `quick` leaves out the other launch parameters of the sweep."""
    result = [
        Cell("ceilings", "copy", "copy", {}, 2 * COPY_BYTES / PREDICTED_COPY * 1e6, bytes_moved=2 * COPY_BYTES),
        Cell("ceilings", "matmul", "matmul", {}, 2 * 8192**3 / PREDICTED_MATMUL * 1e6, flops=2 * 8192**3),
    ]
    for batch, length in SWEEP:
        for config in CONFIGS[:1] if quick else CONFIGS:
            name = "tile{}-warps{}-stages{}-x{}".format(*config)
            result.append(decode_cell("decode", f"B{batch} L{length} {name}", [length] * batch, config=config))
    mixed = [32768] + [1024] * 63
    result.append(decode_cell("mixed", "equal", [sum(mixed) // 64] * 64))
    result.append(decode_cell("mixed", "1 x 32k + 63 x 1k", mixed, factor=1.05))
    for tokens, factor in ((16, 1.1), (64, 1.0), (128, 1.0)):
        result.append(decode_cell("pages", f"B16 L8192 pages of {tokens}", [8192] * 16, factor, block_tokens=tokens))
    for stored in ("bfloat16", "int8", "float8_e4m3fn"):
        factor = 1.0 if stored == "bfloat16" else 1.12
        result.append(decode_cell("quantised", f"B64 L8192 {stored}", [8192] * 64, factor, stored=stored))
    for stored in ("int8", "float8_e4m3fn"):
        flops, values = prefill_flops(8192), {"length": 8192, "pages": "scattered", "stored": stored}
        predicted = flops / 430e12 * 1e6 * 1.1
        result.append(Cell("quantised", f"prefill L8192 {stored}", "prefill", values, predicted, flops=flops))
    for batch, run in ((8, 2048), (32, 8192)):
        label, lengths = f"{batch} x ({run // 1024}k + 256)", [run + 256] * batch
        result.append(decode_cell("shared", f"{label} apart", lengths, shared=run))
        once = (run + batch * 256) * TOKEN_BYTES
        values = {"lengths": lengths, "shared": run}
        result.append(Cell("shared", f"{label} together", "shared", values, decode_us(once) + 12.0, bytes_moved=once))
    values = {"recorded": True, "batch": 32, "length": 4096 + 256, "shared": 4096}
    for name, predicted, together in (("apart", 2900.0, False), ("together", 2200.0, True)):
        label = f"16 layers, 32 x (4k + 256) {name}"
        result.append(Cell("shared", label, "step", {**values, "together": together}, predicted))
    for count in (1, 8):
        values = {"recorded": True, "adapters": count, "rank": 16}
        result.append(Cell("adapters", f"16 layers, batch 8, adapters: {count}", "step", values, 1550.0))
    for batch, predicted in ((8, 550.0), (64, 700.0)):
        values = {"recorded": True, "layers": 4, "batch": batch, "experts": (64, 8, 512)}
        result.append(Cell("experts", f"4 layers, batch {batch}, 8 of 64 experts", "step", values, predicted))
    for length, rate in ((2048, 380e12), (8192, 430e12), (32768, 450e12)):
        flops = prefill_flops(length)
        for name, factor in (("consecutive", 1.0), ("scattered", 1.04), ("torch", 1.0)):
            if name == "torch" and quick:
                continue
            values = {"length": length, "pages": name}
            label = f"L{length} {name}" + (" (scaled_dot_product_attention)" if name == "torch" else " pages")
            result.append(Cell("prefill", label, "prefill", values, flops / rate * 1e6 * factor, flops=flops))
    for name, predicted, values in (
        ("launched anew", 3000.0, {"recorded": False}),
        ("recorded", 1200.0, {"recorded": True}),
        ("recorded, int8 keys and values", 1200.0, {"recorded": True, "stored": "int8"}),
    ):
        result.append(Cell("step", f"16 layers, batch 8, {name}", "step", values, predicted))
    for name, predicted, late in (("ids read at once", 1500.0, False), ("ids read a step late", 1250.0, True)):
        label = f"16 layers, batch 8, {name}"
        result.append(Cell("ahead", label, "step", {"recorded": True, "late": late}, predicted))
    return result
