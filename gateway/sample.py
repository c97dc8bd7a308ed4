"""The text of one sample: tokens in, text that is final out, and the stop string that ends it.

Owns the count of its tokens, up to and including the one that completed a stop. Made by `gateway/generation.py`, one
for each sample; it knows no protocol.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.detokenizer import Detokenizer
from gateway.stops import StopScanner
from gateway.validation import Plan


class Sample:
    """The text of one sample."""

    def __init__(self, detokenizer: Detokenizer, scanner: StopScanner | None, plan: Plan) -> None:
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._plan = plan
        self.num_tokens = 0
        self.has_ended = False
        self.stop: str | None = None  # found; the decoder is asked to keep what came before

    def prime(self, token_ids: Sequence[int]) -> None:
        """Go on with a text whose last tokens these are."""
        for token_id in token_ids:
            self._detokenizer.feed(token_id)

    def feed(self, token_ids: Sequence[int], stop_token_id: int | None) -> tuple[str, int, str | None]:
        """Take tokens; returns final text, how many tokens count, and the stop string that ended the sample.

        `stop_token_id` is the token that ends the sample, if the last of these does; it adds no text of its own.
        """
        text = ""
        for used, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            if token_id == stop_token_id and used == len(token_ids) and not self._plan.include_stop:
                continue
            final, stop = self._scan(self._detokenizer.feed(token_id))
            text += final
            if stop is not None:
                return text, used, stop
        return text, len(token_ids), None

    def flush(self) -> tuple[str, str | None]:
        """The text that was held back, and the stop string if the very end completes one."""
        text, stop = self._scan(self._detokenizer.flush())
        if stop is None and self._scanner is not None:
            text += self._scanner.flush()
        return text, stop

    def _scan(self, text: str) -> tuple[str, str | None]:
        if self._scanner is None or not text:
            return text, None
        scan = self._scanner.feed(text, armed=self.num_tokens > self._plan.min_tokens)
        return scan.text, scan.stop
