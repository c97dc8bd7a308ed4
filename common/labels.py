"""Request labels: the caller's own words, shown to operators on terminals. Pure; called by gateway and decoder."""

from __future__ import annotations

import unicodedata
from typing import Final

from common.errors import InvalidArgument

MAX_LABEL_BYTES: Final = 256
_REFUSED: Final = frozenset({"Cc", "Zl", "Zp"})  # control characters, line and paragraph separators
_TURNS: Final = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # of the writing's direction


def check_label(label: str) -> None:
    """Raises InvalidArgument for a label that is too long, or that would do something to a terminal."""
    if len(label.encode()) > MAX_LABEL_BYTES:
        raise InvalidArgument("request_label", f"allowed are at most {MAX_LABEL_BYTES} bytes")
    if any(letter in _TURNS or unicodedata.category(letter) in _REFUSED for letter in label):
        raise InvalidArgument("request_label", "holds a control character; allowed is text in one line")
