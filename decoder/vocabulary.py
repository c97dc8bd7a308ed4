"""The bytes of every token, as a gateway tells them, for constraints on text. Owns the check of what came.

Invariant: there are no more tokens than the model has ids; ids without bytes are never allowed by a constraint, but for
those of end. Immutable; made once for each gateway's stream, on a thread, as large ones take a second.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence as Rows
from typing import Any, Final

from common.errors import InvalidArgument, Unimplemented

MAX_TOKEN_BYTES: Final = 1024


def library() -> Any:
    """llguidance, loaded when the first constraint comes. Raises Unimplemented where it is not installed."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise Unimplemented(
            "output.constraint: llguidance is not installed in the environment of the decoder",
            reason="FIELD_UNIMPLEMENTED",
            metadata={"field": "output.constraint"},
        ) from None


class Vocabulary:
    """`tokens[i]` are the bytes of id i, empty for a special one; `size` ids of the model; `eos_ids` end an answer."""

    def __init__(self, tokens: Rows[bytes], size: int, eos_ids: frozenset[int]) -> None:
        if not 1 <= len(tokens) <= size:
            raise InvalidArgument("vocabulary.tokens", f"holds {len(tokens)}; allowed are 1..{size}")
        if max(map(len, tokens)) > MAX_TOKEN_BYTES:
            raise InvalidArgument("vocabulary.tokens", f"allowed are at most {MAX_TOKEN_BYTES} bytes each")
        self.size = size
        self.eos_ids = eos_ids
        self._tokens = list(tokens)
        self._built: Any = None
        self._lock = threading.Lock()

    def tokenizer(self) -> Any:
        """The library's form of it. Raises InvalidArgument where the model has no token of end."""
        with self._lock:
            if self._built is None:
                self._built = self._build()
            return self._built

    def _build(self) -> Any:
        if not self.eos_ids:
            raise InvalidArgument("output.constraint", "the model has no end-of-sequence token; allowed is none")
        padded = self._tokens + [b""] * (self.size - len(self._tokens))
        special = sorted({index for index, token in enumerate(padded) if not token} | self.eos_ids)
        for index in special:
            padded[index] = f"<special {index}>".encode()
        wrapper = _Wrapper(padded, special, min(self.eos_ids))
        return library().LLTokenizer(wrapper, n_vocab=self.size, eos_token=sorted(self.eos_ids))


class _Wrapper:
    """What the library asks of a tokenizer: the bytes of all ids, and a way to write forced text in tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos_id
        hidden = set(special)
        self._ids = {token: index for index, token in reversed(list(enumerate(tokens))) if index not in hidden}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of `text`, the longest token first; what no token can say is left out."""
        data = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        place = 0
        while place < len(data):
            for length in range(min(self._longest, len(data) - place), 0, -1):
                index = self._ids.get(data[place : place + length])
                if index is not None:
                    ids.append(index)
                    break
            place += length
        return ids
