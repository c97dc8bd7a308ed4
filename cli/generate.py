"""`tessera generate "..."`: sends one prompt and streams the answer; the numbers go to stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from cli.client import Client, Numbers, add_connection_options, add_turns, check_text
from cli.errors import EXIT_USAGE, CommandError
from cli.generation_options import add_generation_options, build_request
from cli.node_wait import add_wait_option, wait_for_node
from cli.output_options import add_logprob_options, show_logprobs
from common.arguments import CommandParser, number, whole

MAX_SAMPLES = 16


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = CommandParser(prog="tessera generate", description="Send one prompt and stream the answer.")
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as plain text, without a chat template")
    parser.add_argument(
        "--n", type=whole(1, MAX_SAMPLES), metavar="N", help="samples of the one prompt, 1..16 (default 1)"
    )
    parser.add_argument(
        "--beams",
        type=whole(1, MAX_SAMPLES),
        metavar="N",
        help="beam search over N hypotheses; --n are printed",
    )
    parser.add_argument(
        "--length-penalty", type=number, metavar="X", help="exponent of the length in a beam's score (default 0)"
    )
    parser.add_argument("--quiet", action="store_true", help="print the text alone")
    add_generation_options(parser)
    add_logprob_options(parser, whole)
    add_connection_options(parser)
    add_wait_option(parser)
    options = parser.parse_args(arguments)
    if options.raw and options.system is not None:
        parser.error("--system is part of a conversation; leave --raw out")
    if options.length_penalty is not None and options.beams is None:
        parser.error("--length-penalty belongs to a beam search; name --beams too")
    prompt = check_text("the prompt", _read_standard_input() if options.prompt == "-" else options.prompt)
    if not (prompt if options.raw else prompt.strip()):
        where = "standard input is" if options.prompt == "-" else "the prompt is"
        raise CommandError(f"nothing was asked: {where} empty", EXIT_USAGE)
    request = build_request(options, options.n)
    if options.beams is not None:
        request.beam.width = options.beams
        request.beam.length_penalty = options.length_penalty or 0.0
    if options.raw:
        request.text = prompt
    else:
        system = [] if options.system is None else [("system", check_text("--system", options.system))]
        add_turns(request, [*system, ("user", prompt)])
    wait_for_node(options)
    numbers = Numbers()
    samples: dict[int, list[str]] = {}
    logprobs: list[tuple[int, Any]] = []
    streamed = options.n in (None, 1)
    has_begun = False
    try:
        with Client.from_options(options) as client:
            for delta in client.generate(request, numbers):
                logprobs += ((delta.index, item) for item in delta.logprobs)
                if streamed:
                    print(delta.text, end="", flush=True)
                    has_begun = has_begun or bool(delta.text)
                else:
                    samples.setdefault(delta.index, []).append(delta.text)
    except CommandError:
        if has_begun:
            print()  # what went wrong starts on a line of its own
        raise
    if streamed:
        print()
    for index, pieces in sorted(samples.items()):
        print(f"[{index}] {''.join(pieces)}")
    if options.prompt_logprobs is not None:
        print(show_logprobs("place in the prompt", list(enumerate(numbers.prompt_logprobs, 1))), file=sys.stderr)
    if options.logprobs is not None:
        print(show_logprobs("sample", sorted(logprobs, key=lambda pair: pair[0])), file=sys.stderr)
    if not options.quiet:
        for line in (numbers.describe_cut(options.max_tokens), numbers.describe()):
            if line is not None:
                print(line, file=sys.stderr)
    return 0


def _read_standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise CommandError("standard input is no UTF-8 text", EXIT_USAGE) from None
