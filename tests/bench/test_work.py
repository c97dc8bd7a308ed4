"""`bench/work.py`: the work of a step against a count by hand, and the prompts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench.client import Answer, Load
from bench.setting import Setting, model_shape
from bench.work import FIRST_ORDINARY_ID, MachineLimits, ModelWork, random_prompt, shared_prompts
from decoder.weights.loader import expected_shapes


@pytest.fixture
def work(tiny_gguf: Path) -> ModelWork:
    """Work of the tiny model."""
    return ModelWork(*model_shape(Setting(tiny_gguf, "bfloat16", 1, None)))


def test_a_step_reads_every_matrix_once(work: ModelWork) -> None:
    """Weight bytes are those of all matrices but the embedding, which is looked up and not multiplied."""
    shapes = expected_shapes(work.config)
    matrices = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and "embed" not in name)
    assert work.weight_bytes == 2 * matrices


def test_operations_add_up_over_chunks(work: ModelWork) -> None:
    """A prompt costs the same in one piece and in pieces, but for the logits that each piece asks for."""
    whole = work.operations(100, 0, num_logits=1)
    pieces = work.operations(60, 0, num_logits=0) + work.operations(40, 60, num_logits=1)
    assert pieces == pytest.approx(whole, rel=1e-12)
    by_hand = sum(4.0 * work.config.num_layers * work.config.query_size * (index + 1) for index in range(100))
    by_hand += 2.0 * (100 * work.layer_parameters + work.head_parameters)
    assert whole == pytest.approx(by_hand, rel=1e-12)


def test_a_limit_is_the_slower_of_reading_and_arithmetic(work: ModelWork) -> None:
    """With endless arithmetic the bytes decide, with endless bandwidth the arithmetic does."""
    reads = work.decode_limit_seconds([10, 20], MachineLimits(1e9, math.inf))
    assert reads == pytest.approx((work.weight_bytes + 30 * work.layout.token_bytes) / 1e9)
    arithmetic = work.decode_limit_seconds([10, 20], MachineLimits(math.inf, 1e9))
    assert arithmetic == pytest.approx((work.operations(1, 10) + work.operations(1, 20)) / 1e9)
    assert work.prefill_limit_seconds(64, 63, MachineLimits(math.inf, 1e9)) == work.operations(1, 63) / 1e9


def test_prompts_share_their_first_half_and_nothing_more() -> None:
    """Prompts of one seed agree in the shared tokens, differ after them, are ordinary ids, and come back the same."""
    prompts = shared_prompts(3, 8, 64, 32, 512)
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 1
    assert len({tuple(prompt[32:]) for prompt in prompts}) == 8
    assert all(FIRST_ORDINARY_ID <= token < 512 for prompt in prompts for token in prompt)
    assert shared_prompts(3, 8, 64, 32, 512) == prompts
    other = shared_prompts(3, 8, 64, 32, 512, salt=1)
    assert other[0][:32] == prompts[0][:32]
    assert not {tuple(prompt) for prompt in other} & {tuple(prompt) for prompt in prompts}


def test_a_prompt_varies_and_a_vocabulary_without_words_is_refused() -> None:
    """A prompt has common and rare ids; a vocabulary of special tokens alone has none."""
    prompt = random_prompt([1], 4000, 49152)
    assert 100 < len(set(prompt)) < 4000
    with pytest.raises(ValueError, match="vocab_size"):
        random_prompt([1], 10, FIRST_ORDINARY_ID)


def test_a_message_of_several_tokens_counts_as_so_many_steps() -> None:
    """Steps sum to the time between the first message and the last; without a second message there is none."""
    answer = Answer(1.0, (0.3, 0.1), (1, 3, 1), 8, 0, (1, 2, 3, 4, 5))
    assert answer.steps_seconds == pytest.approx((0.1, 0.1, 0.1, 0.1))
    load = Load((answer, Answer(2.0, (), (2,), 8, 4, (1, 2))), 2.0)
    assert (load.step(), load.gap(1.0), load.ttft(0.5)) == (pytest.approx(0.1), 0.3, 1.5)
    assert (load.tokens_per_second, load.cached_fraction) == (3.5, 0.25)
    assert Load((Answer(2.0, (), (2,), 8, 4, (1, 2)),), 2.0).step() is None
