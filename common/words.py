"""Numbers in sentences."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """`1 block`, `2 blocks`, `0 blocks`: for nouns that take an s."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
