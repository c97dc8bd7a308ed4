"""The options of every command that asks for text, and the request that they make.

A request without its prompt: that is the command's. Used by `cli/generate.py` and `cli/chat.py`.
"""

from __future__ import annotations

import argparse

from cli.client import MAX_INT64, MAX_UINT64, check_text
from cli.errors import EXIT_USAGE, CommandError
from cli.output_options import add_constraint_options, fill_output
from common.arguments import number, whole
from tessera.inference.v1 import inference_pb2

MAX_DRAFT_TOKENS = 16
SPECULATION_MODES = {
    "prompt-lookup": inference_pb2.SPECULATION_MODE_PROMPT_LOOKUP,
    "draft-model": inference_pb2.SPECULATION_MODE_DRAFT_MODEL,
}


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """Options of every command that asks for text."""
    group = parser.add_argument_group("generation")
    group.add_argument("--model", default="", metavar="NAME", help="model of the gateway (default: its only or first)")
    group.add_argument("--adapter", metavar="NAME", help="LoRA adapter of the server (default: none)")
    group.add_argument("--system", metavar="TEXT", help="system prompt of the conversation")
    group.add_argument(
        "--max-tokens", type=whole(1, MAX_INT64), default=256, metavar="N", help="bound of the answer (default 256)"
    )
    group.add_argument("--temperature", type=number, default=0.0, metavar="T", help="0 is greedy (default)")
    group.add_argument("--top-p", type=number, metavar="P", help="keep the likeliest tokens up to this probability")
    group.add_argument("--top-k", type=whole(0, MAX_INT64), metavar="K", help="keep the K likeliest tokens")
    group.add_argument("--min-p", type=number, metavar="P", help="drop tokens less likely than P times the likeliest")
    group.add_argument("--seed", type=whole(0, MAX_UINT64), metavar="N", help="make sampling repeatable")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--speculate", choices=SPECULATION_MODES, help="guess tokens ahead; the answer stays the same")
    group.add_argument(
        "--draft-tokens", type=whole(1, MAX_DRAFT_TOKENS), metavar="N", help="guess at most N in one step (default 8)"
    )
    group.add_argument("--no-cache", action="store_true", help="neither read nor store prefixes")
    add_constraint_options(parser)


def build_request(options: argparse.Namespace, n: int | None = None) -> inference_pb2.GenerateRequest:
    """A request without its prompt. Raises CommandError where a text is none."""
    request = inference_pb2.GenerateRequest(model=check_text("--model", options.model))
    request.sampling.temperature = options.temperature
    for name in ("top_p", "top_k", "min_p", "seed"):
        value = getattr(options, name)
        if value is not None:
            setattr(request.sampling, name, value)
    if n is not None:
        request.sampling.n = n
    request.stopping.max_tokens = options.max_tokens
    request.stopping.stop.extend(check_text("--stop", text) for text in options.stop)
    if options.speculate is not None:
        request.speculation.mode = SPECULATION_MODES[options.speculate]
    if options.draft_tokens is not None:
        if options.speculate is None:
            raise CommandError("--draft-tokens belongs to a way of guessing; name --speculate too", EXIT_USAGE)
        request.speculation.draft_tokens = options.draft_tokens
    fill_output(request.output, options)
    request.cache.no_read = request.cache.no_store = options.no_cache
    request.adapter = check_text("--adapter", options.adapter or "")
    return request
