"""The engine over a real cache manager: tokens equal solo runs whatever is shared, and nothing is held afterwards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.errors import ResourceExhausted, Unavailable
from decoder.outputs import EndReason
from tests.decoder.rig import (
    BLOCK_TOKENS,
    Node,
    RecordingSink,
    greedy_oracle,
    prompt_of,
    request,
    solo,
)


def test_greedy_tokens_are_those_of_the_model() -> None:
    """A lone request gets the tokens that follow from its prompt alone, and its books are closed."""
    node = Node()
    node.submit(request(1, prompt_of(11), max_tokens=30))
    node.finish(1)
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt_of(11), 30)
    assert node.sink.finished[1, 0].reason is EndReason.LENGTH
    assert node.sink.ended[1] == (30, 0)
    node.assert_quiet()
    assert node.manager.snapshot().generated_tokens == 30


@pytest.mark.parametrize("length", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 5 * BLOCK_TOKENS])
def test_a_repeated_prompt_reads_the_cache_and_says_the_same(length: int) -> None:
    """The second and third time all but the last token are cached, and the tokens are equal."""
    node = Node()
    for number in range(3):
        node.submit(request(number, prompt_of(length), max_tokens=9))
        node.finish(number)
        assert node.sink.tokens[number, 0] == greedy_oracle(prompt_of(length), 9)
        assert node.sink.cached[number] == (length - 1 if number else 0)
    node.assert_quiet()


@pytest.mark.parametrize("shared", range(9, 9 + 2 * BLOCK_TOKENS + 1))
def test_every_split_point_inside_a_block_is_reused_by_copy(shared: int) -> None:
    """A prefix that ends anywhere in a block is reused to the token, by one copy where it ends inside one."""
    node = Node()
    base = prompt_of(24)
    other = base[:shared] + [token + 1 if token < 90 else 4 for token in base[shared:]]
    node.submit(request(1, base))
    node.finish(1)
    node.submit(request(2, other))
    node.finish(2)
    assert node.sink.tokens[2, 0] == greedy_oracle(other, 8)
    assert node.sink.cached[2] == min(shared, len(other) - 1)
    assert node.sink.ended[2][1] == (1 if node.sink.cached[2] % BLOCK_TOKENS else 0)
    node.submit(request(3, base))
    node.finish(3)
    assert node.sink.tokens[3, 0] == greedy_oracle(base, 8)
    node.assert_quiet()


def test_thirty_two_mixed_requests_equal_their_solo_runs() -> None:
    """Mixed lengths, a shared prefix, sampling and penalties in one batch: each request is as if alone."""
    node = Node(num_blocks=800, chunk_tokens=500)
    shared = prompt_of(18, seed=99)
    items = [
        request(
            number,
            (shared if number % 2 else []) + prompt_of(1 + 3 * number, seed=number),
            max_tokens=5 + number,
            temperature=0.0 if number % 3 else 0.9,
            seed=number,
            top_k=(0, 20, 5)[number % 3],
            repetition_penalty=1.3 if number % 5 == 0 else 1.0,
        )
        for number in range(32)
    ]
    for item in items:
        node.submit(item)
    node.finish(*range(32))
    for item in items:
        assert node.sink.tokens[item.number, 0] == solo(item)[0], item.number
    assert max(singles for singles, _ in node.model.batches) > 16, "they ran together"
    node.assert_quiet()


def test_a_second_wave_of_the_same_requests_reads_the_cache() -> None:
    """What one wave computed the next reads, with equal tokens: the positive control of the cache switches."""
    node = Node(num_blocks=200)
    waves = [[request(10 * wave + number, prompt_of(13, seed=number)) for number in range(6)] for wave in range(2)]
    for wave in waves:
        for item in wave:
            node.submit(item)
        node.finish(*(item.number for item in wave))
    assert [node.sink.cached[item.number] for item in waves[0]] == [0] * 6
    assert [node.sink.cached[item.number] for item in waves[1]] == [12] * 6
    assert all(node.sink.tokens[n, 0] == node.sink.tokens[10 + n, 0] for n in range(6))


@pytest.mark.parametrize("switch", ["no_read", "no_store"])
def test_no_read_and_no_store_are_honoured(switch: str) -> None:
    """A request with no_read computes everything; one with no_store leaves nothing behind."""
    node = Node()
    node.submit(request(1, prompt_of(12), no_store=switch == "no_store"))
    node.finish(1)
    node.submit(request(2, prompt_of(12), no_read=switch == "no_read"))
    node.finish(2)
    assert node.sink.cached[2] == 0
    node.submit(request(3, prompt_of(12)))
    node.finish(3)
    assert node.sink.cached[3] == 11  # request 2 stored, or request 1 did
    node.assert_quiet()


def test_seals_come_after_the_step_that_wrote_them() -> None:
    """At every moment the index holds no more tokens than have been computed."""
    node = Node()
    computed = 0

    def check(batch: object) -> None:
        indexed = sum(prefix.num_tokens for prefix in node.manager.list_prefixes().items)
        assert indexed <= computed

    node.model.on_forward = check
    node.submit(request(1, prompt_of(40), max_tokens=10))
    node.until(lambda: len(node.model.batches) == 1)
    computed = 16
    node.until(lambda: len(node.model.batches) == 2)
    assert sum(prefix.num_tokens for prefix in node.manager.list_prefixes().items) <= 16 + 16
    computed = 1000
    node.finish(1)
    assert sum(prefix.num_tokens for prefix in node.manager.list_prefixes().items) > 0


def test_decodes_send_few_reports() -> None:
    """A decode step without news sends nothing: two reports for each block (an ask, a seal), not one for each token."""
    node = Node()
    node.submit(request(1, prompt_of(8), max_tokens=80))
    node.finish(1)
    assert node.client.num_reports <= 2 * 80 // BLOCK_TOKENS + 4


# ---- ends


def test_a_stop_token_ends_a_sample_and_is_told() -> None:
    """The stop token is the last token, is counted, and is named."""
    tokens = greedy_oracle(prompt_of(9), 20)
    node = Node()
    node.submit(request(1, prompt_of(9), max_tokens=20, stop_ids=[tokens[6]]))
    node.finish(1)
    first = tokens.index(tokens[6])
    assert node.sink.tokens[1, 0] == tokens[: first + 1]
    assert (node.sink.finished[1, 0].reason, node.sink.finished[1, 0].stop_id) == (EndReason.STOP, tokens[6])
    node.assert_quiet()


def test_min_tokens_keeps_stop_tokens_out() -> None:
    """Before min_tokens no stop token is drawn; without it the same request ends early."""
    stops = sorted(set(greedy_oracle(prompt_of(9), 3)))
    node = Node()
    node.submit(request(1, prompt_of(9), max_tokens=20, stop_ids=stops))
    node.submit(request(2, prompt_of(9), max_tokens=20, min_tokens=12, stop_ids=stops))
    node.finish(1, 2)
    assert len(node.sink.tokens[1, 0]) == 1
    assert len(node.sink.tokens[2, 0]) >= 12
    assert not set(stops) & set(node.sink.tokens[2, 0][:12])


@pytest.mark.parametrize("max_tokens", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 100])
def test_the_books_close_for_every_length(max_tokens: int) -> None:
    """A lone request of any length leaves nothing held, whatever part of a block is left over."""
    node = Node()
    node.submit(request(1, prompt_of(7), max_tokens=max_tokens))
    node.finish(1)
    assert len(node.sink.tokens[1, 0]) == max_tokens
    node.assert_quiet()


# ---- what does not fit


def test_a_prompt_larger_than_the_pool_is_refused_at_once_and_the_queue_moves() -> None:
    """EXCEEDS_POOL comes with needed and usable numbers, and the request behind it is served."""
    node = Node(num_blocks=8)
    node.submit(request(1, prompt_of(8 * BLOCK_TOKENS)))
    node.submit(request(2, prompt_of(5)))
    node.step()
    error = node.sink.failed[1]
    assert isinstance(error, ResourceExhausted)
    assert (error.needed, error.usable, error.reason) == (9, 8, "EXCEEDS_POOL")
    node.finish(2)
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(5), 8)
    node.assert_quiet()


def test_a_prompt_that_fills_the_pool_is_served_when_one_token_is_asked_for() -> None:
    """The last token needs no block: a prompt of exactly the pool and one new token fits."""
    node = Node(num_blocks=8)
    node.submit(request(1, prompt_of(8 * BLOCK_TOKENS), max_tokens=1))
    node.finish(1)
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt_of(8 * BLOCK_TOKENS), 1)
    node.assert_quiet()


def test_a_sequence_that_outgrows_the_pool_fails_alone() -> None:
    """The unbounded one ends with numbers; the three short ones beside it are as if alone."""
    node = Node(num_blocks=16)
    node.submit(request(0, prompt_of(8), max_tokens=500))
    for number in (1, 2, 3):
        node.submit(request(number, prompt_of(8, seed=number), max_tokens=12))
    node.finish(0, 1, 2, 3)
    error = node.sink.failed[0]
    assert isinstance(error, ResourceExhausted)
    assert (error.needed, error.usable) == (17, 16)
    assert len(node.sink.tokens[0, 0]) == 16 * BLOCK_TOKENS - 8 + 1, "it used the whole pool first"
    for number in (1, 2, 3):
        assert node.sink.tokens[number, 0] == greedy_oracle(prompt_of(8, seed=number), 12)
    node.assert_quiet()


def test_a_full_queue_of_one_tenant_leaves_room_for_others_up_to_the_total() -> None:
    """A tenant's own bound refuses it alone; the bound of all refuses anybody, with its numbers."""
    node = Node(num_blocks=64, max_batch=1, max_queue=3, max_queue_total=5)
    tenants = ["a"] * 5 + ["b"] * 2 + ["c"]
    for number, tenant in enumerate(tenants):
        node.submit(replace(request(number, prompt_of(6, seed=number)), tenant=tenant))
    node.finish(*range(len(tenants)))
    failed = {number: getattr(error, "subject", None) for number, error in node.sink.failed.items()}
    assert failed == {4: "queue", 7: "total_queue"}
    assert all(error.retry_after_seconds for error in node.sink.failed.values())


def test_the_queue_is_bounded() -> None:
    """One request more than places and queue hold is refused with numbers and a hint; the others are served."""
    node = Node(num_blocks=64, max_batch=2, max_queue=3)
    for number in range(6):
        node.submit(request(number, prompt_of(6, seed=number)))
    node.finish(*range(6))
    assert set(node.sink.failed) == {5}
    error = node.sink.failed[5]
    assert isinstance(error, ResourceExhausted)
    assert (error.subject, error.usable) == ("queue", 3)
    assert error.retry_after_seconds
    node.assert_quiet()


def test_a_number_in_use_is_refused_for_the_second_request_alone() -> None:
    """Two requests under one number of one stream: the second fails; another stream may use the number."""
    node = Node()
    other = RecordingSink()
    node.submit(request(1, prompt_of(6), max_tokens=4))
    node.engine.submit(request(1, prompt_of(7), max_tokens=4), other)
    node.submit(request(1, prompt_of(8), max_tokens=4))
    node.step(30)
    assert node.sink.refused == [1]
    assert other.tokens[1, 0] == greedy_oracle(prompt_of(7), 4)
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt_of(6), 4)


# ---- windows and priority


def test_a_reader_that_stops_pauses_its_own_samples_alone() -> None:
    """Past its window a sample waits; reading lets it go on with the same tokens; its neighbour never waited."""
    node = Node(window_tokens=6)
    node.submit(request(1, prompt_of(6), max_tokens=30))
    node.step(60)
    assert len(node.sink.tokens[1, 0]) == 7
    node.submit(request(2, prompt_of(5), max_tokens=6))
    node.finish(2)
    for read in range(0, 31, 3):
        node.engine.consumed(node.sink, 1, read)
        node.step(8)
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt_of(6), 30)
    node.assert_quiet()


def test_a_paused_sequence_gives_way_to_the_queue_and_comes_back() -> None:
    """A stopped reader must not keep others out: its blocks go, and when it reads its tokens go on unchanged."""
    node = Node(num_blocks=12, window_tokens=4)
    node.submit(request(1, prompt_of(30), max_tokens=10))
    node.step(20)
    held = len(node.sink.tokens[1, 0])
    assert held == 5
    node.submit(request(2, prompt_of(30, seed=1), max_tokens=4))
    node.finish(2)
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(30, seed=1), 4)
    node.engine.consumed(node.sink, 1, 1000)
    node.finish(1)
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt_of(30), 10)
    node.assert_quiet()


def test_higher_priority_is_admitted_first() -> None:
    """With one place, the waiting request of higher priority goes before one that came earlier."""
    node = Node(max_batch=1)
    node.submit(request(1, prompt_of(5)))
    node.step(2)
    node.submit(request(2, prompt_of(6)))
    node.submit(request(3, prompt_of(7), priority=5))
    node.until(lambda: 3 in node.sink.ended)
    assert 2 not in node.sink.cached
    node.finish(2)


# ---- draining and stopping


def test_draining_refuses_new_requests_and_finishes_the_others() -> None:
    """After drain a new request gets UNAVAILABLE and a running one its last token."""
    node = Node()
    node.submit(request(1, prompt_of(5)))
    node.step(2)
    node.engine.drain()
    assert not node.engine.is_serving
    node.submit(request(2, prompt_of(5)))
    node.finish(1, 2)
    assert isinstance(node.sink.failed[2], Unavailable)
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt_of(5), 8)


def test_stop_ends_everything_and_releases_the_leases() -> None:
    """Stop fails what runs and what waits with UNAVAILABLE, and the daemon has every block back."""
    node = Node(max_batch=1)
    for number in range(3):
        node.submit(request(number, prompt_of(9), max_tokens=100))
    node.step(5)
    node.engine.stop()
    node.engine.run()
    assert all(isinstance(node.sink.failed[number], Unavailable) for number in range(3))
    snapshot = node.manager.snapshot()
    assert (snapshot.leases, snapshot.active_blocks) == (0, 0)


def test_logprobs_come_with_every_token() -> None:
    """Each token brings its log-probability and the best k, and greedy tokens are the best of them."""
    node = Node()
    node.submit(request(1, prompt_of(5), num_logprobs=3))
    node.submit(request(2, prompt_of(6), num_logprobs=0))
    node.finish(1, 2)
    for token, logprobs in zip(node.sink.tokens[1, 0], node.sink.logprobs[1, 0], strict=True):
        assert len(logprobs.top) == 3
        assert logprobs.top[0] == (token, logprobs.chosen)
        assert np.isfinite(logprobs.chosen) and logprobs.chosen < 0
    assert all(not logprobs.top for logprobs in node.sink.logprobs[2, 0])
