"""Token ids to text, incrementally: chunks joined equal the one-shot decode, and no chunk splits a character.

Owns the hold-back of incomplete UTF-8: bytes are released once they are a whole character or can no longer become
one (then as U+FFFD). `ByteDetokenizer` is exact and O(1) amortised per token; it serves every tokenizer whose tokens
are byte strings. `WindowDetokenizer` serves the others through their own decoder. Called by `gateway/generation.py`
and the Detokenize RPC; it knows no stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Final, Protocol

REPLACEMENT: Final = "\ufffd"
_WINDOW_TOKENS: Final = 8  # a character has at most 4 bytes; what is invalid for longer stays invalid


class Detokenizer(Protocol):
    """One sample's way from ids to text."""

    def feed(self, token_id: int) -> str:
        """Text that became final with this token; empty while a character is incomplete or for a special token."""

    def flush(self) -> str:
        """The rest, at the end: U+FFFD for a cut character, else empty."""


class ByteDetokenizer:
    """Exact decoding where each token is a byte string. Special tokens and ids without a token are empty.

    With `strip_space`, the first space of the text is dropped (SentencePiece marks the start of a text with it).
    """

    __slots__ = ("_decoder", "_strip", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes], *, strip_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_space

    def feed(self, token_id: int) -> str:
        return self._trim(self._decoder.decode(self._token_bytes(token_id)))

    def flush(self) -> str:
        return self._trim(self._decoder.decode(b"", True))

    def _trim(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """Prefix-diff decoding for any other decoder: the text of a window of tokens, less the text of its beginning.

    The window begins at the last token whose text was released, so that rules between neighbours (a leading space)
    apply; its length is bounded, so a token costs O(1).
    """

    __slots__ = ("_begin", "_decode", "_ids", "_read")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._begin = 0  # first token of the window
        self._read = 0  # first token whose text is not out

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._advance(final=len(self._ids) - self._read >= _WINDOW_TOKENS)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        if self._read == len(self._ids):
            return ""
        before = self._decode(self._ids[self._begin : self._read])
        after = self._decode(self._ids[self._begin :])
        if len(after) <= len(before) and not final:
            return ""
        if after.endswith(REPLACEMENT) and not final:
            return ""
        self._ids = self._ids[self._read :]
        self._begin, self._read = 0, len(self._ids)
        return after[len(before) :]
