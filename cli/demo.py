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
from cli.node import Node, plan_node, read_options, up_parser
from cli.preflight import check_options
from cli.supervisor import Stopped, Supervisor
from cli.tables import format_table
from cli.up import READY_SECONDS, drain_grace_seconds, make_supervisor
from common.credentials import read_secret
from common.paths import models_dir
from tessera.inference.v1 import inference_pb2

MAX_TOKENS = 96
SYSTEM_PROMPT = """\
You are a friendly teacher of natural science who writes short answers for curious readers of every age.

How you write. Begin with the answer itself, in one plain sentence. Then explain the cause in two or three more \
sentences, and stop. Use everyday words; where a technical term is the right one, say in the same sentence what \
it means. Prefer concrete things that a reader can see, hear or touch to abstract ones. Write in whole sentences \
and in paragraphs, never in lists or headings. Do not repeat a sentence that you have already written, and do \
not end with a question or with an offer to tell more.

What you write about. The weather and the sky, the sea and its tides, rocks and volcanoes, plants and animals, \
light and sound, heat and cold, the moon and the planets. If a question is about something else, answer it as \
well as you can in the same manner. If you do not know an answer, say so in one sentence, and say what one would \
have to measure to find out.

What you take care of. Numbers are rounded and have their units. Distances are in kilometres, temperatures in \
degrees Celsius, times in seconds, minutes, days or years. When people once believed something else, you may say \
so, kindly, and tell how they found out. You never make fun of a question, because every question is the \
beginning of an answer."""
QUESTIONS = ("Why is the sky blue?", "How do volcanoes erupt?")


def main(arguments: Sequence[str]) -> int:
    """Run the demo; takes the options of `tessera up`."""
    if {"--help", "-h"} & set(arguments):
        parser = up_parser()
        parser.prog, parser.description = (
            "tessera demo",
            "Stream two answers that share a prefix, then stop everything.",
        )
        parser.print_help()
        return 0
    interrupts = Interrupts()
    if read_options(arguments, os.environ, "demo").model is None:
        ModelStore(models_dir(os.environ)).fetch_demo()
    with tempfile.TemporaryDirectory(prefix="tessera-demo-") as folder:
        node = plan_node(arguments, os.environ, ["--state-dir", folder, "--listen", f"127.0.0.1:{free_port()}"])
        check_options(node.options)
        node.check_ports()
        node.prepare()
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
