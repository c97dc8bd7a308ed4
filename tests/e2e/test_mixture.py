"""Random mixtures: whatever requests meet on a small pool, with whatever options, each reply equals its solo run."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import Result, make_request
from tests.e2e.oracle import Solo
from tests.e2e.prompts import Prompts
from tests.e2e.repeats import repeats
from tests.e2e.rig import Node

B = 16
AT_ONCE = 8


def random_request(source: random.Random, prompts: Prompts, trunks: list[list[int]]) -> pb.GenerateRequest:
    """A request with random options; most share a part of one of the trunks."""
    tokens = [*source.choice(trunks)[: source.randrange(1, 5 * B)], *prompts.tokens(source.randrange(1, 2 * B))]
    if source.random() < 0.2:
        tokens = prompts.tokens(source.randrange(1, 6 * B))
    sampled = source.random() < 0.5
    extra: dict[str, Any] = {}
    if source.random() < 0.3:
        extra = {"frequency_penalty": source.uniform(-1, 1), "repetition_penalty": source.uniform(0.8, 1.3)}
    if sampled and source.random() < 0.5:
        extra |= {"top_p": source.uniform(0.3, 1), "top_k": source.randrange(0, 80), "min_p": source.uniform(0, 0.1)}
    return make_request(
        tokens,
        new=source.randrange(1, 50),
        temperature=source.uniform(0.2, 2.0) if sampled else 0.0,
        seed=source.randrange(2**64),
        n=source.choice([1, 1, 1, 2, 3]),
        stop=source.choice([(), (), ("e",), ("th", "an", "0")]),
        ignore_eos=source.random() < 0.7,
        logprobs=source.choice([None, 0, 3]),
        no_read=source.random() < 0.1,
        no_store=source.random() < 0.2,
        **extra,
    )


@repeats(40, few=2)
def test_any_mixture_of_requests_equals_its_solo_runs(
    node: Node, solo: Solo, tiny_model: Path, seed: int, rounds: int
) -> None:
    """Forty random requests, eight at once, two tenants, a quarter of them cancelled somewhere: the rest equal solo."""
    tenants = [node.key, node.new_tenant(f"mixture-{seed}-{rounds}")]
    for number in range(rounds):
        prompts, source = Prompts(tiny_model, seed + number), random.Random(seed + number)
        trunks = [prompts.tokens(5 * B) for _ in range(3)]
        plan = [
            (
                random_request(source, prompts, trunks),
                source.choice(tenants),
                source.random() < 0.25,
                source.randrange(20),
            )
            for _ in range(40)
        ]

        def run(item: tuple[pb.GenerateRequest, str, bool, int]) -> Result | None:
            request, key, is_cancelled, after = item
            stream = node.stream(request, key=key)
            if not is_cancelled:
                return stream.finish()
            try:
                while stream.num_tokens < after and stream.step():
                    pass
            finally:
                stream.cancel()
            return None

        with ThreadPoolExecutor(AT_ONCE) as pool:
            results = list(pool.map(run, plan))
        for (request, *_), result in zip(plan, results, strict=True):
            if result is None:
                continue
            solo.check(request, result)
            expected = solo(request)
            for index, sample in result.samples.items():
                pairs = zip(sample.logprobs, expected.samples[index].logprobs, strict=True)
                assert all(abs(a - b) < 1e-3 for a, b in pairs)
        node.quiet()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("delay", "report"),
        ("drop", "acquire"),
        ("drop", "report"),
        *(pytest.param("delay", name, marks=pytest.mark.slow) for name in ("acquire", "fork", "credit")),
        *(pytest.param("drop", name, marks=pytest.mark.slow) for name in ("fork", "credit")),
    ],
)
def test_a_late_or_lost_message_never_leaves_a_request_hanging(
    tiny_model: Path, solo: Solo, prompts: Prompts, message: str, fault: str
) -> None:
    """A message between decoder and cache manager that is late changes nothing; one that is lost ends in an error at
    most, and the node recovers by itself."""
    value = "0.05" if fault == "delay" else "3"
    with Node(tiny_model, faults=[f"{fault}={message}:{value}"], options=["--threads", "1"]) as node:
        requests = [make_request(prompts.tokens(2 * B), new=40, n=2, temperature=1.0, seed=i) for i in range(6)]
        calls = [node.background(request) for request in requests]
        for request, call in zip(requests, calls, strict=True):
            try:
                solo.check(request, call.result(100))
            except grpc.RpcError as error:
                assert fault == "drop", error
                assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL), error
        probe = make_request(prompts.tokens(B), new=4)
        solo.check(probe, node.again(probe))
        node.quiet()
