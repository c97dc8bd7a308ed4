"""Prompts for the end-to-end tests: random, of exact length, each with a canary word, no two with one first token.

Distinct first tokens make "nothing is cached of this prompt" exact, since reuse is token-granular.
"""

from __future__ import annotations

import random
import string
from pathlib import Path

from tokenizers import Tokenizer

CANARIES: set[str] = set()  # every word that has been part of a prompt; no log may hold one


def canary_word(source: random.Random) -> str:
    """A random word that occurs nowhere else."""
    word = "zq" + "".join(source.choices(string.ascii_lowercase, k=10))
    CANARIES.add(word)
    return word


class Prompts:
    """Makes prompts of one model from one seed."""

    def __init__(self, model: Path, seed: int) -> None:
        print(f"prompt seed {seed}")
        self.random = random.Random(seed)
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        size = min(self._tokenizer.get_vocab_size(), 500)
        self.ids = list(range(3, size))  # without the special tokens
        self._first = self.random.sample(self.ids, len(self.ids))

    def tokens(self, length: int) -> list[int]:
        """A prompt of `length` tokens; its first token is new, the canary follows as far as there is room."""
        word = self._tokenizer.encode(canary_word(self.random)).ids
        body = [*word, *self.random.choices(self.ids, k=max(0, length - len(word)))]
        return [self.first(), *body][:length]

    def first(self) -> int:
        """A token that no other prompt or tail of this object begins with."""
        if not self._first:
            raise AssertionError("all first tokens are used; make another Prompts")
        return self._first.pop()

    def text(self, words: int = 12) -> str:
        """A text prompt with a canary."""
        body = " ".join("".join(self.random.choices(string.ascii_lowercase, k=5)) for _ in range(words))
        return f"{canary_word(self.random)} {body}"
