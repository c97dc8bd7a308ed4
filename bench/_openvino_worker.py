"""The other side of `bench/yardstick.py`: openvino-genai in a process of its own, perhaps in another environment.

Reads one JSON object a line from stdin and answers each with one line on stdout. It imports the standard library and
openvino alone, since the environment it runs in need not hold this project. What the library itself prints goes to
stderr. Times are from `time.perf_counter`, in seconds; a token's time is when it was read after the step that made it.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import IO, Any


class Worker:
    """One pipeline with its prefix cache on, driven step by step as a server would."""

    def __init__(self) -> None:
        self._genai = importlib.import_module("openvino_genai")
        self._openvino = importlib.import_module("openvino")
        self._pipeline: Any = None
        self._numbers = itertools.count(1)

    def load(self, model: str, precision: str, cache_gigabytes: int, batch_tokens: int) -> dict[str, Any]:
        """Load a GGUF file. `batch_tokens` 0 leaves the library's own default; threads are always its own default."""
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = cache_gigabytes
        if batch_tokens:
            scheduler.max_num_batched_tokens = batch_tokens
        properties = {"INFERENCE_PRECISION_HINT": precision}
        began = time.perf_counter()
        self._pipeline = self._genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        core = self._openvino.Core()
        return {
            "version": self._genai.__version__,
            "load_seconds": time.perf_counter() - began,
            "batch_tokens": scheduler.max_num_batched_tokens,
            "threads": str(core.get_property("CPU", "INFERENCE_NUM_THREADS") or "its default"),
            "kv_precision": _type_name(core.get_property("CPU", "KV_CACHE_PRECISION")),
        }

    def closed_loop(self, streams: list[list[list[int]]], max_tokens: int) -> dict[str, Any]:
        """Each stream asks its prompts one after another, all streams at once, greedy, exactly `max_tokens` tokens."""
        queues = [list(reversed(stream)) for stream in streams]
        running: list[dict[str, Any]] = []
        answers: list[dict[str, Any]] = []
        began = time.perf_counter()
        for queue in queues:
            running.append(self._ask(queue, max_tokens))
        while running:
            self._pipeline.step()
            now = time.perf_counter()
            left = []
            for request in running:
                if request["handle"].can_read():
                    before = len(request["ids"])
                    for output in request["handle"].read().values():
                        request["ids"].extend(output.generated_ids)
                    request["arrivals"].append(now)
                    request["counts"].append(len(request["ids"]) - before)
                if len(request["ids"]) < max_tokens:
                    left.append(request)
                    continue
                answers.append(_answer(request))
                if request["queue"]:
                    left.append(self._ask(request["queue"], max_tokens))
            running = left
        seconds = time.perf_counter() - began
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return {"seconds": seconds, "answers": answers}

    def text(self, ids: list[int]) -> dict[str, Any]:
        """The text of token ids."""
        return {"text": self._pipeline.get_tokenizer().decode(ids)}

    def _ask(self, queue: list[list[int]], max_tokens: int) -> dict[str, Any]:
        prompt = queue.pop()
        config = self._genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        # The library takes an integer tensor of shape [1, tokens]; numpy is a dependency of its own.
        numpy = importlib.import_module("numpy")
        tensor = self._openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        began = time.perf_counter()
        handle = self._pipeline.add_request(next(self._numbers), tensor, config)
        return {
            "queue": queue,
            "handle": handle,
            "began": began,
            "prompt": len(prompt),
            "ids": [],
            "arrivals": [],
            "counts": [],
        }


def _type_name(kind: Any) -> str:
    return str(kind.get_type_name()) if hasattr(kind, "get_type_name") else str(kind)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    arrivals = request["arrivals"]
    return {
        "ttft": arrivals[0] - request["began"],
        "gaps": [later - earlier for earlier, later in itertools.pairwise(arrivals)],
        "counts": request["counts"],
        "prompt_tokens": request["prompt"],
        "ids": request["ids"],
    }


def serve(source: IO[str], target: IO[str]) -> int:
    """Answer lines until the input ends. The first line out says whether the library is there."""

    def say(message: dict[str, Any]) -> None:
        target.write(json.dumps(message) + "\n")
        target.flush()

    try:
        worker = Worker()
    except ImportError as error:
        say({"missing": str(error)})
        return 3
    say({"ready": True})
    operations: dict[str, Callable[..., dict[str, Any]]] = {
        "load": worker.load,
        "closed_loop": worker.closed_loop,
        "text": worker.text,
    }
    for line in source:
        message = json.loads(line)
        try:
            say(operations[message.pop("op")](**message))
        except RuntimeError as error:  # what the library raises for everything it refuses
            say({"error": str(error)})
    return 0


if __name__ == "__main__":
    # The library writes to file descriptor 1 as it likes; the protocol gets a descriptor of its own.
    protocol = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.exit(serve(sys.stdin, protocol))
