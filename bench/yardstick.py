"""The same work through openvino-genai, in the same run: time to first token and tokens a second, and the ratios.

The other engine runs in a process of its own, with the Python of `--yardstick-python` where it is installed; it gets
equal weights (`bench/gguf_rewrite.py`), its prefix cache, its own choice of threads and of KV precision, and is driven
in process, step by step: no gateway, socket or detokenizing. Ours is the whole node over its public service. The two
take turns. Before anything is timed both continue the same text, and have to agree in how it begins.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.client import Answer, BenchClient, Load
from bench.gguf_rewrite import rewrite_gguf
from bench.node import add_node_options, open_node
from bench.serve import add_load_options, level_prompts, node_flags
from bench.setting import (
    make_parser,
    model_shape,
    positive,
    positive_list,
    positive_or_zero,
    read_setting,
    start_report,
)
from bench.table import Cell, Report, median
from bench.work import random_prompt
from cli.errors import EXIT_USAGE, CommandError

EXIT_ABSENT = 3
PROBE_TEXT = "The capital of France is Paris. The capital of Germany is"
PROBE_TOKENS = 24
MIN_AGREEMENT = 4
WORKER = Path(__file__).with_name("_openvino_worker.py")
TTFT_COLUMNS = (
    "prompt", "ours cold ms", "theirs cold ms", "cold ratio", "ours warm ms", "theirs warm ms", "warm ratio",
)  # fmt: skip
LOAD_COLUMNS = (
    "streams", "ours tokens/s", "theirs tokens/s", "ratio", "ours ITL p50 ms", "theirs ITL p50 ms",
    "ours TTFT p50 ms", "theirs TTFT p50 ms",
)  # fmt: skip


class Absent(Exception):
    """The other engine is not installed where it was looked for."""


class Worker:
    """The other engine behind JSON lines. It has the face of `BenchClient` as far as the workload needs it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def call(self, **message: Any) -> dict[str, Any]:
        """One operation. Raises CommandError with what the other side says, or if it has died."""
        if self._process.stdin is None:
            raise CommandError("the yardstick's process has no input")
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise CommandError("the yardstick's process has ended; its own words are above") from None
        return self.read()

    def read(self) -> dict[str, Any]:
        """The next line of the other side."""
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise CommandError("the yardstick's process has ended; its own words are above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CommandError(f"openvino-genai: {answer['error']}")
        return answer

    def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """One prompt, greedy, exactly `max_tokens` tokens."""
        return self.closed_loop([[prompt]], max_tokens).answers[0]

    def closed_loop(self, streams: Sequence[Sequence[Sequence[int]]], max_tokens: int) -> Load:
        """As `BenchClient.closed_loop`; the other engine does not say how much it found cached."""
        done = self.call(op="closed_loop", streams=[[list(p) for p in s] for s in streams], max_tokens=max_tokens)
        answers = tuple(
            Answer(
                ttft_seconds=item["ttft"],
                gaps_seconds=tuple(item["gaps"]),
                message_tokens=tuple(item["counts"]),
                prompt_tokens=item["prompt_tokens"],
                cached_tokens=0,
                token_ids=tuple(item["ids"]),
            )
            for item in done["answers"]
        )
        return Load(answers, done["seconds"])


Side = BenchClient | Worker


def main(arguments: Sequence[str], worker_command: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status, 3 where openvino-genai is not installed.

    `worker_command` replaces the other engine's process; for tests.
    """
    parser = make_parser("yardstick", __doc__)
    add_node_options(parser)
    add_load_options(parser)
    parser.add_argument("--yardstick-python", default=sys.executable, metavar="PATH", help="Python with openvino-genai")
    parser.add_argument("--yardstick-cache-gb", type=positive, default=2, metavar="N", help="its KV cache")
    parser.add_argument(
        "--yardstick-batch-tokens", type=positive_or_zero, default=0, metavar="N", help="its step; 0 is its default"
    )
    parser.add_argument("--lengths", type=positive_list, default=[128, 1024, 4000], metavar="N,N", help="prompt tokens")
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help="cold and warm pairs of each length")
    parser.add_argument("--load-repeats", type=positive, default=1, metavar="N", help="runs of each side at each level")
    namespace = parser.parse_args(list(arguments))
    setting = read_setting(namespace)
    if setting.model.suffix != ".gguf":
        raise CommandError("the yardstick needs a GGUF model, which both engines read", EXIT_USAGE)
    if setting.dtype != "bfloat16":
        raise CommandError("the yardstick compares in bfloat16; the other engine reads no float32 weights", EXIT_USAGE)
    config, _ = model_shape(setting)
    command = worker_command or [namespace.yardstick_python, "-I", str(WORKER)]
    with tempfile.TemporaryDirectory(prefix="tessera-yardstick-") as folder:
        try:
            with _open_worker(command) as worker:
                equal = Path(folder) / "weights.gguf"
                rewrite_gguf(setting.model, equal)
                loaded = worker.call(
                    op="load",
                    model=str(equal),
                    precision="bf16",
                    cache_gigabytes=namespace.yardstick_cache_gb,
                    batch_tokens=namespace.yardstick_batch_tokens,
                )
                facts: dict[str, Cell] = {
                    "openvino-genai": loaded["version"],
                    "its threads": loaded["threads"],
                    "its KV precision": loaded["kv_precision"],
                    "its step tokens": loaded["batch_tokens"],
                }
                report = start_report("yardstick", setting, facts)
                with open_node(namespace, setting, node_flags(namespace)) as endpoint, BenchClient(endpoint) as client:
                    check_agreement(report, client, worker)
                    ttft_table(report, client, worker, namespace, config.vocab_size)
                    load_table(report, client, worker, namespace, config.vocab_size)
        except Absent as error:
            print(
                f"openvino-genai is not installed for {command[0]} ({error}). Make an environment for it "
                "(python -m venv DIR; DIR/bin/pip install openvino-genai) and name its Python: --yardstick-python",
                file=sys.stderr,
            )
            return EXIT_ABSENT
    report.note(
        "A ratio above 1 means that ours is faster. Ours is three processes behind gRPC, theirs is called in process. "
        "Both have equal weights, greedy answers of fixed length, and their prefix cache on."
    )
    report.write_json(setting.json)
    return 0


@contextmanager
def _open_worker(command: Sequence[str]) -> Iterator[Worker]:
    try:
        process = subprocess.Popen(list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    except OSError as error:
        raise CommandError(f"cannot run {command[0]}: {error}", EXIT_USAGE) from None
    try:
        worker = Worker(process)
        hello = worker.read()
        if "missing" in hello:
            raise Absent(hello["missing"])
        yield worker
    finally:
        process.kill()
        process.communicate()


def check_agreement(report: Report, client: BenchClient, worker: Worker) -> None:
    """Both continue one text. Raises CommandError where they do not begin alike: then they do not run one model."""
    prompt = client.tokenize(PROBE_TEXT)
    ours, theirs = (side.ask(prompt, PROBE_TOKENS).token_ids for side in (client, worker))
    agreed = next((index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))
    text = worker.call(op="text", ids=list(theirs))["text"]
    if agreed < MIN_AGREEMENT:
        raise CommandError(f"the engines agree in {agreed} of {PROBE_TOKENS} greedy tokens; theirs: {text!r}")
    report.note(f"Greedy tokens alike before any timing: the first {agreed} of {PROBE_TOKENS}. Theirs: {text!r}")


def ttft_table(report: Report, client: BenchClient, worker: Worker, namespace: Any, vocab_size: int) -> None:
    """Time to first token, cold and warm; the sides take turns at every prompt."""
    rows: list[list[Cell]] = []
    for length in namespace.lengths:
        times: dict[tuple[Side, str], list[float]] = {}
        for index in range(namespace.repeats + 1):
            prompt = random_prompt([namespace.seed, length, index], length, vocab_size)
            for side in _order(client, worker, index):
                for state in ("cold", "warm"):
                    seconds = side.ask(prompt, 1).ttft_seconds
                    if index:  # the first round of each length warms both engines up for its shapes
                        times.setdefault((side, state), []).append(seconds * 1e3)
        middle = {key: median(values) for key, values in times.items()}
        row: list[Cell] = [length]
        for state in ("cold", "warm"):
            ours, theirs = middle[client, state], middle[worker, state]
            row += [ours, theirs, theirs / ours]
        rows.append(row)
    report.table(f"Time to first token, medians of {namespace.repeats}", TTFT_COLUMNS, rows)


def load_table(report: Report, client: BenchClient, worker: Worker, namespace: Any, vocab_size: int) -> None:
    """Tokens a second in the closed loop of `bench/serve.py`."""
    warm = level_prompts(namespace, 1, vocab_size, salt=999)
    for side in (client, worker):
        side.closed_loop(warm, min(8, namespace.new_tokens))
    rows: list[list[Cell]] = []
    for count in namespace.concurrency:
        loads: dict[Side, list[Load]] = {client: [], worker: []}
        for repeat in range(namespace.load_repeats):
            prompts = level_prompts(namespace, count, vocab_size, salt=repeat + 1)
            for side in _order(client, worker, repeat):
                loads[side].append(side.closed_loop(prompts, namespace.new_tokens))
        ours, theirs = (median([load.tokens_per_second for load in loads[side]]) for side in (client, worker))
        gaps = [_milliseconds([load.gap(0.5) for load in loads[side]]) for side in (client, worker)]
        first = [_milliseconds([load.ttft(0.5) for load in loads[side]]) for side in (client, worker)]
        rows.append([count, ours, theirs, ours / theirs, *gaps, *first])
    report.table("Tokens a second, closed loop", LOAD_COLUMNS, rows)


def _order(client: BenchClient, worker: Worker, index: int) -> tuple[Side, Side]:
    return (client, worker) if index % 2 == 0 else (worker, client)


def _milliseconds(values: Sequence[float | None]) -> float | None:
    known = [value * 1e3 for value in values if value is not None]
    return median(known) if known else None
