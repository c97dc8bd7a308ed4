"""`tessera demo`, which `make run` calls: the main job once, from an empty state directory to a clean stop.

Starts the three processes, streams the answer to a chat prompt, sends a second prompt with the same long system prompt,
and prints what both cost. It fails if the second found nothing in the cache, or if anything did not stop cleanly.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cli.client import Client, Numbers, add_turns
from cli.errors import EXIT_INTERRUPTED, CommandError
from cli.interrupts import Interrupts
from cli.model_store import ModelStore
from cli.node import Node, plan_node, read_options
from cli.supervisor import Stopped, Supervisor
from cli.tables import format_table
from cli.up import READY_SECONDS, drain_grace_seconds, make_supervisor
from common.config import build_parser
from common.credentials import read_secret
from common.paths import models_dir
from tessera.inference.v1 import inference_pb2

MAX_TOKENS = 96
SYSTEM_PROMPT = """\
You are the guide of a small museum of mosaics by the sea. Visitors of every age ask you about the rooms, the
makers and the materials, and you answer in two or three friendly sentences, in plain words and without lists.

What you know of the house. The museum has five rooms. The first holds floors from Roman villas: black and white
waves, a dog on a chain with the words that warn of it, and a calendar of the seasons in which winter wears a
hood. The second holds Byzantine walls; their gold is leaf between two layers of glass, set at slight angles so
that candlelight moves over it. The third is the workshop, where a restorer works in the mornings and shows how
a tessera is cut from a rod of glass with a hammer and a hardie. The fourth holds modern work made of broken
plates, bottle ends and sea glass. The fifth is a terrace with a fountain whose floor the town's children made
from four thousand pieces that they found on the beach.

What you know of the craft. A mosaic is made of tesserae, small tiles of stone, glass or fired clay. In the
direct method they are pressed one by one into wet mortar; in the indirect method they are glued face down to
paper and turned over at the end. The gaps are called interstices, and lines of tesserae that follow an outline
are called opus vermiculatum because they crawl like worms. Lime mortar sets slowly, which gives time to
correct; cement does not forgive.

Practical things. The house opens at ten and closes at six, and on Mondays it stays shut. Children come in free.
The cafe on the terrace sells lemonade and almond cake. Flash photography is welcome everywhere except in the
second room. If you do not know an answer, say so and send the visitor to the restorer.
"""
QUESTIONS = ("How does the gold in the second room shine like that?", "What can I see the restorer do?")


def main(arguments: Sequence[str]) -> int:
    """Run the demo; takes the options of `tessera up`."""
    if {"--help", "-h"} & set(arguments):
        parser = build_parser("up")
        parser.prog, parser.description = (
            "tessera demo",
            "Stream two answers that share a prefix, then stop everything.",
        )
        parser.print_help()
        return 0
    interrupts = Interrupts()
    if read_options(arguments, os.environ).model is None:
        ModelStore(models_dir(os.environ)).fetch_demo()
    with tempfile.TemporaryDirectory(prefix="tessera-demo-") as folder:
        node = plan_node(arguments, os.environ, ["--state-dir", folder, "--listen", f"127.0.0.1:{free_port()}"])
        return _run(node, interrupts)


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(node: Node, interrupts: Interrupts) -> int:
    supervisor = make_supervisor(node, interrupts)
    try:
        supervisor.start(READY_SECONDS)
        results = _ask_all(node, supervisor, interrupts)
    except Stopped:
        supervisor.stop(drain_grace_seconds(node), interrupts.hurry)
        return EXIT_INTERRUPTED
    except CommandError:
        _show_logs(node.paths.logs_dir)
        raise
    finally:
        clean = supervisor.stop(drain_grace_seconds(node), interrupts.hurry)
    print(f"\n{describe_results(results)}\n")
    if results[-1].cached_tokens == 0:
        raise CommandError("the second prompt found nothing of the shared prefix in the cache")
    if not clean:
        raise CommandError("a process did not stop cleanly")
    print("All processes have stopped.", file=sys.stderr)
    return 0


def _ask_all(node: Node, supervisor: Supervisor, interrupts: Interrupts) -> list[Numbers]:
    results = []
    with Client(node.options.listen, read_secret(node.paths.default_key)) as client:
        for question in QUESTIONS:
            request = inference_pb2.GenerateRequest()
            request.sampling.temperature = 0.0
            request.stopping.max_tokens = MAX_TOKENS
            add_turns(request, [("system", SYSTEM_PROMPT), ("user", question)])
            numbers = Numbers()
            print(f"\n> {question}")
            for delta in client.generate(request, numbers):
                print(delta.text, end="", flush=True)
                supervisor.poll()
                if interrupts.stopping():
                    raise Stopped
            print()
            results.append(numbers)
    return results


def describe_results(results: Sequence[Numbers]) -> str:
    """What each prompt cost, as a table."""
    header = ("prompt", "prompt tokens", "cached tokens", "first token (ms)", "new tokens", "tokens/s")
    rows = [
        (
            index,
            numbers.prompt_tokens,
            numbers.cached_tokens,
            numbers.ttft_seconds * 1e3,
            numbers.completion_tokens,
            numbers.tokens_per_second,
        )
        for index, numbers in enumerate(results, start=1)
    ]
    return format_table(header, rows)


def _show_logs(folder: Path) -> None:
    """The end of every log, because the folder is about to go."""
    for log in sorted(folder.glob("*.log")):
        print(f"--- {log.name}", file=sys.stderr)
        print("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]), file=sys.stderr)
