"""Rows 12 and 7 of the cases: guessing tokens ahead changes no reply and leaves no wrong guess in the index; beams."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import poll
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node

B = 16
FEW = dict.fromkeys((40, 41, 42), 60.0)  # an answer of three words repeats itself: some guesses are right, some wrong


def test_row_12_guesses_change_no_reply_and_are_never_indexed(node: Node, solo: Solo, prompts: Prompts) -> None:
    """Six requests share five blocks and guess ahead, one is cancelled midway: each reply is the solo one without
    guesses, and the index has no token beside those of prompts and replies."""
    node.fresh()
    shared = prompts.tokens(5 * B)
    requests = []
    for number in range(6):
        temperature = 0.0 if number % 2 else 0.7
        request = make_request(
            [*shared, *prompts.tokens(3 + number)], new=24, bias=FEW, temperature=temperature, seed=number
        )
        request.speculation.mode = pb.SPECULATION_MODE_PROMPT_LOOKUP
        requests.append(request)
    running = [node.background(request) for request in requests[:5]]
    stream = node.stream(requests[5])
    while stream.num_tokens <= 8:
        stream.step()
    stream.cancel()
    told = stream.samples[0].token_ids
    results = [one.result() for one in running]
    for request, result in zip(requests, results, strict=False):
        solo.check(request, result)
    answers = [solo(request).token_ids for request in requests]
    assert answers[5][: len(told)] == told
    drafted = sum(result.usage.drafted_tokens for result in results)
    accepted = sum(result.usage.accepted_tokens for result in results)
    assert 0 < accepted < drafted, "positive control: some guesses were right and some wrong"
    node.quiet()
    said = {
        tuple((*request.token_ids.ids, *answer)[:end])
        for request, answer in zip(requests, answers, strict=True)
        for end in range(1, len(request.token_ids.ids) + len(answer) + 1)
    }
    assert 0 < sum(prefix.num_tokens for prefix in node.admin.prefixes()) <= len(said)
    for request, answer in zip(requests[:5], answers, strict=False):
        again = make_request([*request.token_ids.ids, *answer, 50], new=2)
        result = node.generate(again)
        assert result.cached_tokens >= len(request.token_ids.ids) + len(answer) - 1 - B
        solo.check(again, result)


def test_row_07_beams_never_touch_one_another(node: Node, solo: Solo, prompts: Prompts) -> None:
    """Two searches of four beams and a plain request together: each as alone; tails were copied where beams part."""
    node.fresh()
    shared = prompts.tokens(2 * B + 3)
    requests = []
    for penalty in (0.0, 1.0):
        request = make_request(shared, new=12, n=3, ignore_eos=False)
        request.beam.width, request.beam.length_penalty = 4, penalty
        requests.append(request)
    requests.append(make_request([*shared, *prompts.tokens(5)], new=20))
    results = node.together(requests)
    for request, result in zip(requests, results, strict=True):
        solo.check(request, result)
    assert len({tuple(sample.token_ids) for sample in results[0].samples.values()}) == 3
    assert all(result.usage.cow_copies >= 3 for result in results[:2])
    node.quiet()


@pytest.mark.slow
def test_guesses_and_beams_outlive_the_cache_manager(tiny_model: Path, solo: Solo, prompts: Prompts) -> None:
    """A node with a draft model, which is the model itself: lookups, drafts and beams run while the cache manager is
    killed and comes back; every reply is the solo one, greedy drafts were all right, and nothing stays held."""
    options = ["--draft-model", str(tiny_model), "--draft-kv-bytes", "16M", "--threads", "1"]
    with Node(tiny_model, pool_blocks=96, options=options, faults=["step_delay=0.05", "poison_on_free=1"]) as node:
        node.fresh()
        requests = []
        for number, mode in enumerate((pb.SPECULATION_MODE_PROMPT_LOOKUP, pb.SPECULATION_MODE_DRAFT_MODEL) * 2):
            lookup = mode == pb.SPECULATION_MODE_PROMPT_LOOKUP
            requests.append(make_request(prompts.tokens(20 + number), new=60, bias=FEW if lookup else None))
            requests[-1].speculation.mode = mode
        requests.append(make_request(prompts.tokens(20), new=20, n=2))
        requests[-1].beam.width = 3
        running = [node.background(request) for request in requests]
        poll(lambda: node.admin.snapshot().generated_tokens > 40, within=60, what="they decode")
        node.processes["cachemgr"].kill()
        node.processes["cachemgr"].start()
        for request, one in zip(requests, running, strict=True):
            result = one.result()
            solo.check(request, result)
            usage = result.usage
            if request.speculation.mode == pb.SPECULATION_MODE_DRAFT_MODEL:
                assert usage.drafted_tokens == usage.accepted_tokens > 0
            elif request.speculation.mode == pb.SPECULATION_MODE_PROMPT_LOOKUP:
                assert usage.accepted_tokens > 0
        node.quiet()
