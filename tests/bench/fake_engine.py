"""Stands for the other engine in tests of `bench/yardstick.py`: our own model behind its JSON lines.

    python -m tests.bench.fake_engine [wrong]

It answers from the weights that it is handed, so the comparison's check of equal tokens is a real one; with `wrong` it
answers other tokens.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from bench.local_engine import LocalEngine
from bench.setting import Setting
from common.logs import configure_logs


def main() -> int:
    """Answer lines until the input ends."""
    configure_logs("fake", "error")
    shift = 1 if sys.argv[1:] == ["wrong"] else 0
    engine: LocalEngine | None = None
    _say({"ready": True})
    for line in sys.stdin:
        message = json.loads(line)
        if message["op"] == "load":
            engine = LocalEngine(Setting(Path(message["model"]), "bfloat16", 1, None), 1 << 24, 8)
            _say({"version": "fake", "batch_tokens": 512, "threads": "1", "kv_precision": "bf16"})
        elif message["op"] == "closed_loop" and engine is not None:
            load = engine.closed_loop(message["streams"], message["max_tokens"])
            answers: list[dict[str, Any]] = []
            for answer in map(dataclasses.asdict, load.answers):
                answers.append(
                    {
                        "ttft": answer["ttft_seconds"],
                        "gaps": answer["gaps_seconds"],
                        "counts": answer["message_tokens"],
                        "prompt_tokens": answer["prompt_tokens"],
                        "ids": [token + shift for token in answer["token_ids"]],
                    }
                )
            _say({"seconds": load.seconds, "answers": answers})
        else:
            _say({"text": "some text"} if message["op"] == "text" else {"error": "no model"})
    return 0


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
