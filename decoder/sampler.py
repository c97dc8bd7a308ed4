"""From logits to tokens. Owns the order of the steps and that a token depends on its own row alone.

A token is a function of (its logits row, its parameters, its sequence's own tokens, seed, sample index, position);
ties go to the smaller token id. Order: penalties, bias, masked ids, temperature, top-k, top-p, min-p. Log-probabilities
are those of the raw logits. A draw that cannot be made, for whatever reason, is a `Drawn` without a token; the other
draws of the call are as if it had not been there. Called by the engine; keeps no state of its own and never changes
the logits.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.penalties import HIGHEST_LOGIT, SeenTokens
from decoder.philox import uniforms
from decoder.sequence import IntArray, SamplingParams

FloatRow = NDArray[np.float32]
IdArray = NDArray[np.int64]

# At or below this temperature the distribution differs from the likeliest token only where two logits lie within 0.003.
GREEDY_TEMPERATURE: Final = 1e-4
_HIGHEST_TEMPERATURE: Final = 1e30  # flat already; keeps the division finite
_NUCLEUS_FLOORS: Final = (1e-2, 1e-3, 1e-4, 0.0)
_RUN: Final = 512


class Draw(NamedTuple):
    """One token to draw from row `row` of the logits. `position` is the position that the token will have.

    `tokens` are all tokens of the sequence (needed with penalties), `masked_ids` must not be drawn, nor
    what `forbidden`, bool [vocab], says.
    """

    row: int
    params: SamplingParams
    sample: int
    position: int
    masked_ids: frozenset[int] = frozenset()
    seen: SeenTokens | None = None
    num_logprobs: int | None = None
    forbidden: NDArray[np.bool_] | None = None

    @property
    def takes_likeliest(self) -> bool:
        """Whether it asks for nothing but the likeliest token of its row."""
        params = self.params
        is_plain = self.seen is None and self.forbidden is None and not (self.masked_ids or params.logit_bias)
        return is_plain and self.num_logprobs is None and params.temperature <= GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-probabilities under the raw logits: of the chosen token, and of the likeliest, best first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


class Drawn(NamedTuple):
    """The drawn token, or None: where the row was not finite, or with the `fault` that kept it from being drawn."""

    token: int | None
    logprobs: Logprobs | None = None
    fault: Exception | None = None


def sample(logits: NDArray[np.float32], draws: Rows[Draw]) -> list[Drawn]:
    """Draw one token for each of `draws` from logits, float32 [R, vocab]. A row with NaN or infinity gives None.

    Never raises over one draw: what goes wrong there is that draw's `fault`.
    """
    numbers = _random_numbers(draws)
    likeliest = _likeliest(logits, {draw.row for draw in draws})
    result = []
    for index, draw in enumerate(draws):
        try:
            best = likeliest[draw.row]
            if best is not None and draw.takes_likeliest:
                result.append(Drawn(best))
            else:
                result.append(_drawn(logits[draw.row], best, draw, numbers.get(index)))
        except Exception as error:  # noqa: BLE001 - one request's numbers must not end its neighbours
            result.append(Drawn(None, fault=error))
    return result


def _random_numbers(draws: Rows[Draw]) -> dict[int, float]:
    # One call for all draws that are not greedy; where that fails, none, and each draw makes its own.
    random = [index for index, draw in enumerate(draws) if draw.params.temperature > GREEDY_TEMPERATURE]
    if not random:
        return {}
    try:
        values = _uniforms([draws[index] for index in random])
    except Exception:  # noqa: BLE001 - the draw whose name is no number fails alone, in `_drawn`
        return {}
    return dict(zip(random, values, strict=True))


def _uniforms(draws: Rows[Draw]) -> list[float]:
    values: list[float] = uniforms(
        [draw.params.seed for draw in draws], [draw.sample for draw in draws], [draw.position for draw in draws]
    ).tolist()
    return values


def _drawn(row: FloatRow, best: int | None, draw: Draw, number: float | None) -> Drawn:
    if best is None:
        return Drawn(None)
    if number is None and draw.params.temperature > GREEDY_TEMPERATURE:
        number = _uniforms([draw])[0]
    token = _draw(row, best, draw, number)
    if token is None or draw.num_logprobs is None:
        return Drawn(token)
    return Drawn(token, logprobs(row, token, draw.num_logprobs))


def logprobs(row: FloatRow, token: int, num_top: int) -> Logprobs:
    """Log-probabilities of `token` and of the `num_top` likeliest tokens under float32 [vocab] raw logits."""
    maximum = float(row.max())
    with np.errstate(over="ignore"):
        total = maximum + float(np.log(np.exp(row - np.float32(maximum)).sum(dtype=np.float64)))
    top = largest(row, min(num_top, len(row)))
    return Logprobs(float(row[token]) - total, tuple((int(i), float(row[i]) - total) for i in top))


def _likeliest(logits: NDArray[np.float32], rows: set[int]) -> dict[int, int | None]:
    """Of each of `rows`, as `_argmax`. Where all rows are asked for, one call looks at them: it takes less time, and
    lets the interpreter's lock go once. It would copy logits that lie in wider rows."""
    if len(rows) < len(logits) or not logits.flags.c_contiguous:
        return {row: _argmax(logits[row]) for row in rows}
    tokens = logits.argmax(axis=1)
    is_finite = np.isfinite(logits[np.arange(len(tokens)), tokens])
    found = zip(tokens.tolist(), is_finite.tolist(), strict=True)
    return {row: token if fine else None for row, (token, fine) in enumerate(found)}


def _argmax(row: FloatRow) -> int | None:
    best = int(row.argmax())  # the first of equals; the first NaN, if there is one
    return best if np.isfinite(row[best]) else None


def _draw(raw: FloatRow, best: int, draw: Draw, number: float | None) -> int | None:
    params = draw.params
    row = raw
    if draw.masked_ids or params.logit_bias or draw.seen is not None or draw.forbidden is not None:
        row = _adjust(raw, draw)
        adjusted = _argmax(row)
        if adjusted is None:  # what may be drawn at all has no weight
            return None
        best = adjusted
    if number is None:
        return best
    inverse = np.float32(1.0 / min(params.temperature, _HIGHEST_TEMPERATURE))
    kept: IdArray | None = None  # None: the whole vocabulary
    if 0 < params.top_k < len(row):
        kept = largest(row, params.top_k)
    values = row if kept is None else row[kept]
    with np.errstate(over="ignore"):
        weights = np.exp((values - row[best]) * inverse)
    if params.top_p < 1.0:
        nucleus = _nucleus(weights, params.top_p)
        kept = nucleus if kept is None else kept[nucleus]
        weights = weights[nucleus]
    if params.min_p > 0.0:
        likely = np.flatnonzero(weights >= params.min_p)  # the likeliest weighs 1
        kept = likely if kept is None else kept[likely]
        weights = weights[likely]
    index = _pick(weights, number)
    return index if kept is None else int(kept[index])


def _adjust(raw: FloatRow, draw: Draw) -> FloatRow:
    row = raw.copy()
    if draw.seen is not None:
        draw.seen.apply(row, draw.params)
    for token, bias in draw.params.logit_bias:
        row[token] = min(max(float(row[token]) + bias, -HIGHEST_LOGIT), HIGHEST_LOGIT)
    if draw.forbidden is not None:
        row[draw.forbidden] = -np.inf
    if 0 < len(draw.masked_ids) < len(row):
        row[np.fromiter(draw.masked_ids, np.int64, len(draw.masked_ids))] = -np.inf
    return row


def largest(values: FloatRow, count: int) -> IdArray:
    """Indices of the `count` largest, best first; of equals the smaller index, as a full stable sort would give."""
    if count == 0:
        return np.empty(0, np.int64)
    bound = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > bound)
    equal = np.flatnonzero(values == bound)[: count - len(above)]
    chosen = np.concatenate((above, equal))
    return chosen[np.lexsort((chosen, -values[chosen]))]


def _nucleus(weights: FloatRow, top_p: float) -> IdArray:
    # The smallest set of the likeliest whose share reaches top_p (Holtzman et al. 2020), in ascending index. No more
    # is sorted than the weights above the first floor that together reach it; the likeliest weighs 1.
    share = top_p * float(weights.sum(dtype=np.float64))
    for floor in _NUCLEUS_FLOORS:
        candidates = weights[weights >= floor]
        if floor == 0.0 or candidates.sum(dtype=np.float64) >= share:
            break
    candidates.sort()
    sums = np.cumsum(candidates[::-1], dtype=np.float64)
    count = min(int(np.searchsorted(sums, share, side="left")) + 1, len(candidates))
    bound = candidates[len(candidates) - count]
    above = np.flatnonzero(weights > bound)
    equal = np.flatnonzero(weights == bound)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _pick(weights: FloatRow, number: float) -> int:
    # Inverts the cumulative distribution at `number` in [0, 1): first the run of weights, then the one in the run.
    starts = np.arange(0, len(weights), _RUN)
    runs = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    target = min(number * float(runs[-1]), float(np.nextafter(runs[-1], 0.0)))  # a product may round up to the total
    run = int(np.searchsorted(runs, target, side="right"))
    start = int(starts[run])
    before = float(runs[run - 1]) if run else 0.0
    sums = np.cumsum(weights[start : start + _RUN], dtype=np.float64)
    index = int(np.searchsorted(sums, min(target - before, np.nextafter(sums[-1], 0.0)), side="right"))
    return start + index


def seen_by(seen: SeenTokens | None, params: SamplingParams, tokens: IntArray, num_prompt: int) -> SeenTokens | None:
    """The counts for a sequence with `tokens`, brought up to date; None where no penalty asks for them."""
    if not params.penalises:
        return None
    counts = seen if seen is not None else SeenTokens(num_prompt)
    counts.advance(tokens)
    return counts
