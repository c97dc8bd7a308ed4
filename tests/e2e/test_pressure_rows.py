"""Rows 15, 17, 18, 19, 20, 21 and 37 of the cases: a small pool, exact accounts, and no reply that pays for it."""

from __future__ import annotations

import math
import random
import threading
import time
from pathlib import Path

import grpc
import pytest

from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import Result, make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import patience, poll
from tests.e2e.prompts import Prompts
from tests.e2e.repeats import repeats
from tests.e2e.rig import Node

B = 16


@repeats(300, few=60)
def test_row_15_utilisation_never_leaves_its_bounds(
    node: Node, solo: Solo, tiny_model: Path, seed: int, rounds: int
) -> None:
    """Sequential prompts with repeats: no refusal, used within 0..total in every sample, and quiet in between."""
    prompts, source = Prompts(tiny_model, seed), random.Random(seed)
    pool = [make_request(prompts.tokens(source.randrange(2 * B, 6 * B)), new=2) for _ in range(24)]
    for number in range(rounds):
        request = source.choice(pool)
        solo.check(request, node.generate(request))
        now = node.admin.snapshot()
        used = now.cached_blocks + now.active_blocks + now.quarantined_blocks
        assert used + now.free_blocks == now.total_blocks == 32
        if number % 50 == 49:
            node.quiet()


def test_a_flood_of_one_tenant_holds_up_another_for_a_few_requests_alone(slow_node: Node, prompts: Prompts) -> None:
    """Forty requests of one tenant come, and while many wait one more of it and then one of another: few of the flood
    start before the other's. The one more of the flood, the positive control, starts after nearly all that waited."""
    flood, other = slow_node.key, slow_node.new_tenant("quiet")
    requests = [make_request(prompts.tokens(3 * B + 2), new=24) for _ in range(42)]
    lines = [slow_node.background(request, key=flood) for request in requests[:40]]

    def started() -> int:
        return sum(line.stream.accepted is not None for line in lines)

    poll(lambda: slow_node.admin.snapshot().queued_requests > 22, within=patience(10), what="many wait")
    before = started()
    last, first = slow_node.background(requests[40], key=flood), slow_node.stream(requests[41], key=other)
    first.read(1)
    between, passed = started() - before, last.stream.accepted is None
    first.finish()
    last.result()
    assert started() - before > 20
    for line in lines:
        line.result()
    assert passed, "the flood's own comes after the other tenant's"
    assert between <= 18, (before, between)


@pytest.mark.parametrize("new", [1, B - 1, B, B + 1, 200])
def test_row_17_a_lone_request_leaves_exact_accounts(node: Node, solo: Solo, prompts: Prompts, new: int) -> None:
    """However a lone request ends, by length, end of sequence, stop string or cancel, nothing stays held."""
    tokens = prompts.tokens(B + 5)
    by_length = make_request(tokens, new=new)
    result = node.generate(by_length)
    solo.check(by_length, result)
    assert (len(result.token_ids), result.samples[0].reason) == (new, pb.FINISH_REASON_LENGTH)
    node.quiet()

    by_eos = make_request(tokens, new=new + 1, ignore_eos=False, min_tokens=new, bias={2: 100.0})
    result = node.generate(by_eos)
    solo.check(by_eos, result)
    assert result.samples[0].reason == pb.FINISH_REASON_STOP
    node.quiet()

    text = next((c for c in solo(by_length).samples[0].chunks[::-1] if c.strip("\ufffd ")), "")
    if text:
        by_string = make_request(tokens, new=new, stop=[text])
        result = node.generate(by_string)
        solo.check(by_string, result)
        assert (result.samples[0].reason, result.samples[0].stop) == (pb.FINISH_REASON_STOP, text)
        node.quiet()

    stream = node.stream(make_request(tokens, new=400))
    stream.read(min(new, 30))
    stream.cancel()
    node.quiet()
    solo.probe(node)


def test_row_18_two_large_prompts_both_finish(slow_node: Node, solo: Solo, prompts: Prompts) -> None:
    """Two prompts of 20 blocks that cannot run together: neither holds half and waits, both equal solo, and together
    they take less than three times as long as one after the other."""
    requests = [make_request(prompts.tokens(20 * B - 8), new=8) for _ in range(2)]
    alone = 0.0
    for request in requests:
        started = time.monotonic()
        result = slow_node.generate(request)
        alone += time.monotonic() - started
        solo.check(request, result)
    slow_node.fresh()
    started = time.monotonic()
    results = slow_node.together(requests)
    took = time.monotonic() - started
    for request, result in zip(requests, results, strict=True):
        solo.check(request, result)
    assert took < patience(3 * alone), f"{took:.2f} s together, {alone:.2f} s one after the other"
    slow_node.quiet()


@pytest.mark.parametrize(
    ("seconds", "gap"), [(4.0, 0.1), pytest.param(20.0, 0.05, marks=pytest.mark.slow)], ids=["few", "full"]
)
def test_row_19_prompts_that_arrive_under_pressure_end_no_process(
    node: Node, solo: Solo, prompts: Prompts, seconds: float, gap: float
) -> None:
    """Growing streams and a steady rain of prompts: the same processes live on; OK answers equal solo."""
    pids = {name: process.pid for name, process in node.processes.items()}
    growing = [make_request(prompts.tokens(3 * B), new=6 * B - 4) for _ in range(4)]
    rain = [make_request(prompts.tokens(8 * B - 4), new=4) for _ in range(6)]
    running = [node.background(request) for request in growing]
    arrivals, pause = [], threading.Event()
    for number in range(int(seconds / gap)):
        arrivals.append((rain[number % len(rain)], node.background(rain[number % len(rain)])))
        pause.wait(gap)  # the rate of arrivals is the case, not a wait for a state
    served = 0
    for request, call in [*zip(growing, running, strict=True), *arrivals]:
        try:
            result = call.result()
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
        else:
            solo.check(request, result)
            served += 1
    assert served, "positive control: some calls were served"
    assert {name: process.pid for name, process in node.processes.items() if process.status() is None} == pids
    node.quiet()
    solo.probe(node)


def test_row_20_one_stream_that_outgrows_the_pool_harms_no_other(node: Node, solo: Solo, prompts: Prompts) -> None:
    """Three short streams beside an unbounded one: the three equal solo, whatever becomes of the big one."""
    big = node.background(make_request(prompts.tokens(4 * B), new=4000))
    poll(lambda: node.admin.snapshot().leases, within=20, what="the big stream runs")
    for _ in range(3):
        shorts = [make_request(prompts.tokens(2 * B), new=60) for _ in range(3)]
        for request, result in zip(shorts, node.together(shorts), strict=True):
            solo.check(request, result)
    try:
        result = big.result()
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
    else:
        assert len(result.token_ids) + 4 * B <= 33 * B, "it cannot have outgrown the pool"
    node.quiet()
    solo.probe(node)


@repeats(10, few=2)
def test_row_21_a_preempted_stream_loses_and_repeats_nothing(
    node: Node, solo: Solo, tiny_model: Path, seed: int, rounds: int
) -> None:
    """Six streams that cannot all stay, three of them with penalties (row 34): preemptions happen, and each reply,
    count and token is as alone."""
    preempted = 0
    for number in range(rounds):
        prompts = Prompts(tiny_model, seed + number)
        before = node.fresh()
        penalised = {"frequency_penalty": 1.05, "repetition_penalty": 1.1}
        requests = [make_request(prompts.tokens(4 * B), new=100, **(penalised if n % 2 else {})) for n in range(6)]
        results = node.together(requests)
        for request, result in zip(requests, results, strict=True):
            solo.check(request, result)
            assert (result.usage.completion_tokens, result.cached_tokens) == (100, 0)
        after = node.quiet()
        preempted += after.preemptions - before.preemptions
        assert after.misses - before.misses == 6, "a resumed sequence is not counted again"
    assert preempted > 0, "positive control: the pool was too small"


@pytest.fixture(scope="module")
def poisoned(tiny_model: Path) -> object:
    """R32 whose freed blocks become NaN."""
    with Node(tiny_model, faults=["poison_on_free=1"]) as node:
        yield node


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.slow)], ids=["few", "full"])
def test_row_37_nothing_is_read_past_the_end_of_a_sequence(
    poisoned: Node, solo: Solo, prompts: Prompts, rounds: int
) -> None:
    """On a pool of NaN, prompts of 1..3B tokens have finite logprobs and the reply of a clean node."""

    def run(length: int) -> tuple[pb.GenerateRequest, Result]:
        request = make_request(prompts.tokens(length), new=4, logprobs=0)
        return request, poisoned.generate(request)

    for _ in range(rounds):
        run(28 * B)  # touch most of the pool, so that what is freed has been written
        poisoned.fresh()
        for length in range(1, 3 * B + 1):
            request, result = run(length)
            solo.check(request, result)
            assert len(result.logprobs) == 4
            assert all(math.isfinite(value) for value in result.logprobs)
            expected = solo(request).logprobs
            assert max(abs(a - b) for a, b in zip(result.logprobs, expected, strict=True)) < 1e-4
        shared = prompts.tokens(2 * B + 7)
        together = [make_request([*shared, *prompts.tokens(9)], new=20, logprobs=0) for _ in range(4)]
        for request, result in zip(together, poisoned.together(together), strict=True):
            solo.check(request, result)
        poisoned.fresh()
