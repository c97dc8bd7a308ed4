"""The batch of a step: single tokens first, contexts and tables right, the wanted rows ascending."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from decoder.adapter_pool import AdapterUse
from decoder.runner import Runner
from decoder.scheduler import Plan
from decoder.sequence import LeaseId, Sequence, SequenceId
from tests.decoder.rig import request


def sequence_of(number: int, tokens: list[int], computed: int, blocks: list[int], generated: int = 0) -> Sequence:
    split = len(tokens) - generated
    sequence = Sequence(SequenceId(number), request(number, tokens[:split]), 0, number, is_trunk=False)
    for token in tokens[split:]:
        sequence.append_token(token)
    sequence.hold(LeaseId(number), np.array(blocks, np.int32), computed, split, None)
    return sequence


def test_a_mixed_step_has_single_tokens_first() -> None:
    """Decodes, then chunks of one token, then longer chunks; only chunks that reach their end want logits."""
    decode = sequence_of(1, [11, 12, 13, 14, 15], 4, [7, 8], generated=2)
    whole = sequence_of(2, [21, 22, 23], 0, [3])
    part = sequence_of(3, [31, 32, 33, 34, 35, 36, 37], 2, [4, 5])
    last = sequence_of(4, [41, 42], 1, [6])
    work = Runner(4, 8).build(Plan(decodes=[decode], chunks=[(whole, 3), (part, 4), (last, 1)]))
    batch = work.batch
    assert batch.num_decodes == 2
    assert batch.token_ids.tolist() == [15, 42, 21, 22, 23, 33, 34, 35, 36]
    assert batch.positions.tolist() == [4, 1, 0, 1, 2, 2, 3, 4, 5]
    assert batch.query_starts.tolist() == [0, 1, 2, 5, 9]
    assert batch.context_lens.tolist() == [5, 2, 3, 6]
    assert batch.block_tables.tolist() == [[7, 8], [6, 0], [3, 0], [4, 5]]
    assert batch.logit_rows.tolist() == [0, 1, 4]
    assert work.sampled == [(decode, 0), (last, 1), (whole, 2)]
    for array in (batch.token_ids, batch.positions, batch.query_starts, batch.context_lens, batch.block_tables):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
    assert batch.logit_rows.dtype == np.int32


def test_guessed_tokens_are_a_chunk_with_logits_at_every_row() -> None:
    """A decode with guesses computes its last token and the guesses; a chunk beside it wants its last row alone."""
    plain = sequence_of(1, [11, 12, 13], 2, [7], generated=1)
    guessed = sequence_of(2, [21, 22, 23, 24], 3, [3, 9], generated=2)
    whole = sequence_of(3, [31, 32, 33], 0, [5])
    plan = Plan(decodes=[guessed, plain], chunks=[(whole, 3)])
    plan.drafts[guessed.sequence_id] = np.array([25, 26], np.int32)
    work = Runner(4, 8).build(plan)
    assert work.batch.num_decodes == 1
    assert work.batch.token_ids.tolist() == [13, 24, 25, 26, 31, 32, 33]
    assert work.batch.positions.tolist() == [2, 3, 4, 5, 0, 1, 2]
    assert work.batch.context_lens.tolist() == [3, 6, 3]
    assert work.batch.logit_rows.tolist() == [0, 1, 2, 3, 6]
    assert work.sampled == [(plain, 0), (guessed, 1), (whole, 4)]


def test_buffers_grow_to_the_step() -> None:
    """A step larger than the runner was made for is built whole, and the next small one is right again."""
    runner = Runner(1, 1)
    large = sequence_of(1, list(range(100)), 0, list(range(1, 26)))
    batch = runner.build(Plan(chunks=[(large, 100)])).batch
    assert batch.token_ids.tolist() == list(range(100))
    small = sequence_of(2, [5, 6], 1, [9])
    batch = runner.build(Plan(chunks=[(small, 1)])).batch
    assert (batch.token_ids.tolist(), batch.block_tables.tolist()) == ([6], [[9]])


def test_adapters_are_those_of_the_sequences_in_their_order() -> None:
    """Each sequence of a batch has its own request's adapter; where none has one there are none to look at."""
    adapters = [AdapterUse(weights, b"d") for weights in ("A", "B")]
    plain, whole, last = (sequence_of(n, [11, 12, 13], 2 if n != 2 else 0, [n]) for n in (1, 2, 3))
    assert Runner(4, 8).build(Plan(decodes=[plain], chunks=[(whole, 3), (last, 1)])).batch.adapters == ()
    whole.request = replace(whole.request, adapter=adapters[0])
    last.request = replace(last.request, adapter=adapters[1])
    assert Runner(4, 8).build(Plan(decodes=[plain], chunks=[(whole, 3), (last, 1)])).batch.adapters == (None, "B", "A")
