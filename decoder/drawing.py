"""From the logits of a step to its tokens: which row is drawn with what, and how far the guesses of a step hold.

Invariant: what is drawn at a position is a function of that sequence's tokens before it, guessed right or known, and of
nothing else of the step; what goes wrong over one sequence is a fault of its own draw and touches no other. It changes
no sequence but its counts for the penalties. Called by the step loop.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from decoder.penalties import SeenTokens
from decoder.requests import RequestTable
from decoder.runner import Work
from decoder.sampler import Draw, Drawn, sample, seen_by
from decoder.sequence import IntArray, Sequence, SequenceId, StoppingParams

NO_TOKENS: IntArray = np.empty(0, np.int32)

Draws = list[tuple[Sequence, int, Drawn]]


def is_stop(stopping: StoppingParams, token: int, num_generated: int) -> bool:
    """Whether a token ends the sample that has `num_generated` tokens with it."""
    return token in stopping.stop_ids and num_generated > stopping.min_tokens


def draw_tokens(work: Work, logits: NDArray[np.float32], requests: RequestTable) -> Draws:
    """Draw the next token of every sample whose logits came back: (sequence, sample, what was drawn); members of beam
    groups draw nothing.

    A sequence whose guesses hold comes once more for each of them, in order: what was drawn after it.
    """
    made: Draws = []
    rows = [(sequence, row, NO_TOKENS) for sequence, row in work.sampled if sequence.group is None]
    while rows:
        made_now = _draw_rows(rows, logits, requests)
        made += made_now
        if not work.drafts:
            break
        rows = _accepted(work, rows, {sequence.sequence_id: drawn for sequence, _, drawn in made_now})
    return made


def _draw_rows(
    rows: Rows[tuple[Sequence, int, IntArray]], logits: NDArray[np.float32], requests: RequestTable
) -> Draws:
    draws: list[Draw] = []
    owners: list[Sequence] = []
    faults: Draws = []
    for sequence, row, ahead in rows:
        try:
            wanted = _draws_of(row, sequence, ahead, requests)
        except Exception as error:  # noqa: BLE001 - fails this sequence's request alone
            faults.append((sequence, sequence.sample, Drawn(None, fault=error)))
            continue
        draws += wanted
        owners += [sequence] * len(wanted)
    drawn = sample(logits, draws)
    made = [(owner, draw.sample, one) for owner, draw, one in zip(owners, draws, drawn, strict=True)]
    return faults + made


def _draws_of(row: int, sequence: Sequence, ahead: IntArray, requests: RequestTable) -> list[Draw]:
    # `ahead` are guessed tokens that were drawn in this step and are not yet the sequence's.
    request = sequence.request
    sampling, stopping = request.sampling, request.stopping
    seen = _seen_by(sequence, ahead) if sampling.penalises else None
    masked = sampling.bad_ids
    if stopping.min_tokens and sequence.num_generated + len(ahead) < stopping.min_tokens:
        masked |= stopping.stop_ids
    position = sequence.num_tokens + len(ahead)
    forbidden = None if sequence.structure is None else sequence.structure.forbidden()
    indices = sorted(requests.of(sequence).open_samples) if sequence.is_trunk else (sequence.sample,)
    return [Draw(row, sampling, index, position, masked, seen, request.num_logprobs, forbidden) for index in indices]


def _seen_by(sequence: Sequence, ahead: IntArray) -> SeenTokens | None:
    seen = sequence.penalties if isinstance(sequence.penalties, SeenTokens) else None
    seen = sequence.penalties = seen_by(seen, sequence.request.sampling, sequence.tokens, sequence.num_prompt)
    return seen if seen is None or not len(ahead) else seen.after(ahead)


def _accepted(
    work: Work, rows: Rows[tuple[Sequence, int, IntArray]], drawn: dict[SequenceId, Drawn]
) -> list[tuple[Sequence, int, IntArray]]:
    # The rows to draw from next: of each sequence whose guess is the token that was drawn, and that does not end there.
    going_on = []
    for sequence, row, ahead in rows:
        draft, token = work.drafts.get(sequence.sequence_id, NO_TOKENS), drawn[sequence.sequence_id].token
        count = len(ahead) + 1
        if token is None or count > len(draft) or token != draft[count - 1]:
            continue
        if not is_stop(sequence.request.stopping, token, sequence.num_generated + count):
            going_on.append((sequence, row + 1, draft[:count]))
    return going_on
