"""Where the time of a fully cached prompt goes on its way to the first token: one row for each part, measured directly.

Admission is what lies between the arrival of the call at the gateway and the begin of the step that computes it. The
parts are differences of moments that the processes note by the clock that they share (CLOCK_MONOTONIC) and that the
gateway tells in its log (`first_token_timed`, at debug); the client adds when it asked and when it had the token. The
bench starts the node itself, since it reads that log. Requests come one at a time, after a pause.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.node import Endpoint, started_node
from bench.setting import make_parser, model_shape, positive, positive_or_zero, read_setting, start_report
from bench.table import Cell, quantile
from bench.work import random_prompt
from cli.errors import CommandError
from common.rpc import open_channel
from tessera.inference.v1 import inference_pb2, inference_pb2_grpc

EVENT = "first_token_timed"
CALL_SECONDS = 600.0
SETTLE_SECONDS = 2.0
NUM_PROMPTS = 4
COLUMNS = ("part", "p50 ms", "p99 ms")
PARTS = (
    ("client to gateway: asked, until the call is there", "asked_by_client_ns", "arrived_ns"),
    ("gateway: credential, message, checks, choice of a decoder", "arrived_ns", "submitted_ns"),
    ("gateway to decoder: sent, read, checked again", "submitted_ns", "queued_ns"),
    ("decoder: its turn, until the lease is asked for", "queued_ns", "asked_ns"),
    ("lease: there and back, until the engine has it", "asked_ns", "admitted_ns"),
    ("copy-on-write", "admitted_ns", "copied_ns"),
    ("until the step begins", "copied_ns", "begun_ns"),
    ("ADMISSION: from the gateway to the step's begin", "arrived_ns", "begun_ns"),
    ("the step", "begun_ns", "computed_ns"),
    ("decoder to gateway", "computed_ns", "first_token_ns"),
    ("gateway to client: two messages", "first_token_ns", "told_client_ns"),
    ("all: time to first token at the client", "asked_by_client_ns", "told_client_ns"),
)


@dataclass(frozen=True, slots=True)
class Told:
    """One answer as the client saw it."""

    request_id: str
    cached_tokens: int
    asked_ns: int
    first_token_ns: int


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = make_parser("admission", __doc__)
    parser.add_argument("--prompt-tokens", type=positive, default=4000, metavar="N", help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=positive, default=1, metavar="N", help="tokens of an answer")
    parser.add_argument("--rounds", type=positive, default=200, metavar="N", help="requests that are measured")
    parser.add_argument("--pause-ms", type=positive_or_zero, default=50, metavar="N", help="before each request")
    parser.add_argument("--pool-bytes", default="2G", metavar="SIZE", help="pool of the node")
    parser.add_argument("--seed", type=positive, default=1, metavar="N", help="of the prompts")
    options = parser.parse_args(list(arguments))
    setting = read_setting(options)
    vocabulary = model_shape(setting)[0].vocab_size
    facts: dict[str, Cell] = {"prompt tokens": options.prompt_tokens, "rounds": options.rounds}
    report = start_report("admission", setting, {**facts, "pause ms": options.pause_ms})
    prompts = [random_prompt([options.seed, index], options.prompt_tokens, vocabulary) for index in range(NUM_PROMPTS)]
    with started_node(setting, ["--pool-bytes", options.pool_bytes, "--log-level", "debug"]) as endpoint:
        told = asyncio.run(ask_all(endpoint, prompts, options.rounds, options.pause_ms / 1e3, options.new_tokens))
        moments = join(told, endpoint.logs)
    report.table("The way of a cached prompt", COLUMNS, rows_of(moments))
    cached = min(answer.cached_tokens for answer in told)
    report.note(
        f"Of {len(moments)} answers, one at a time; of each prompt {cached} tokens or more came from the cache. "
        "A quantile of a sum is not the sum of the quantiles."
    )
    report.write_json(setting.json)
    return 0


async def ask_all(
    endpoint: Endpoint, prompts: Sequence[Sequence[int]], rounds: int, pause_seconds: float, new_tokens: int
) -> list[Told]:
    """Each prompt twice, which is not measured; then in turn."""
    requests = [
        inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=inference_pb2.Sampling(temperature=0.0),
            stopping=inference_pb2.Stopping(max_tokens=new_tokens, ignore_eos=True),
        )
        for prompt in prompts
    ]
    told = []
    async with open_channel(endpoint.target, endpoint.key) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
        for request in (*requests, *requests):
            await _ask(stub, request)
        for number in range(rounds):
            await asyncio.sleep(pause_seconds)
            told.append(await _ask(stub, requests[number % len(requests)]))
    return told


async def _ask(stub: Any, request: inference_pb2.GenerateRequest) -> Told:
    request_id, cached_tokens, first_ns = "", 0, 0
    asked_ns = time.monotonic_ns()
    async for response in stub.Generate(request, timeout=CALL_SECONDS):
        if response.delta.token_ids and not first_ns:
            first_ns = time.monotonic_ns()
        elif response.HasField("accepted"):
            request_id, cached_tokens = response.accepted.request_id, response.accepted.cached_tokens
    if not first_ns:
        raise CommandError("an answer ended without a token")
    return Told(request_id, cached_tokens, asked_ns, first_ns)


def join(told: Sequence[Told], logs: Path | None) -> list[dict[str, int]]:
    """The moments of each answer, those of the gateway's log and those of the client. Raises CommandError where the log
    does not have one of them."""
    if logs is None:
        raise CommandError("the node's log is not there")
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:  # the last line is written when the client has had its answer
        seen = read_moments(logs / "gateway.log")
        missing = [answer for answer in told if answer.request_id not in seen]
        if not missing:
            break
        if time.monotonic() > deadline:
            raise CommandError(f"the gateway's log does not tell of {len(missing)} of {len(told)} answers")
        time.sleep(0.05)
    return [
        {**seen[answer.request_id], "asked_by_client_ns": answer.asked_ns, "told_client_ns": answer.first_token_ns}
        for answer in told
    ]


def read_moments(log: Path) -> dict[str, dict[str, int]]:
    """Request id -> its moments, of every answer that the log tells of."""
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if EVENT in line]
    return {
        event["request_id"]: {name: int(value) for name, value in event.items() if name.endswith("_ns")}
        for event in events
    }


def rows_of(moments: Sequence[dict[str, int]]) -> list[list[Cell]]:
    """One row a part. Raises CommandError where a part ends before it begins: then something was not noted."""
    rows: list[list[Cell]] = []
    for name, begin, end in PARTS:
        times = [(one[end] - one[begin]) / 1e6 for one in moments]
        if min(times) < 0 or not all(one[begin] and one[end] for one in moments):
            raise CommandError(f"{name}: {begin} and {end} are not in order")
        rows.append([name, quantile(times, 0.5), quantile(times, 0.99)])
    return rows
