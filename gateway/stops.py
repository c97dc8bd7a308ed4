"""Stop strings over streamed text: what may be shown now, and where the text ends.

Owns the invariant that no character of a matched stop string is ever released (unless it is to be included), and
that text is held back only while it is a prefix of some stop string. The match that ends first wins; of several
that end at the same character, the one that begins first (the longest). One automaton (Aho and Corasick 1975) per
request is shared by its samples. Called by `gateway/generation.py`; it knows no tokens and no protocol.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """What one feed brought. `text` is final. `stop` is the string that ended the sample, or None."""

    text: str
    stop: str | None = None


class StopAutomaton:
    """The goto, failure and output functions over a fixed set of non-empty strings; immutable after construction.

    Node 0 is the root. Building costs the total length of the strings; one character costs O(1) amortised.
    """

    __slots__ = ("_children", "_failure", "_held", "_output")

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._output: list[str | None] = [None]
        depth = [0]
        for stop in stops:
            if not stop:
                raise ValueError("a stop string is empty")
            node = 0
            for character in stop:
                following = self._children[node].get(character)
                if following is None:
                    following = len(self._children)
                    self._children[node][character] = following
                    self._children.append({})
                    self._output.append(None)
                    depth.append(depth[node] + 1)
                node = following
            self._output[node] = stop
        self._failure = [0] * len(self._children)
        self._held = [0] * len(self._children)
        self._link(depth)

    def _link(self, depth: list[int]) -> None:
        pending = deque(self._children[0].values())
        for node in self._children[0].values():
            self._held[node] = depth[node] if self._children[node] else 0
        while pending:
            node = pending.popleft()
            for character, child in self._children[node].items():
                self._failure[child] = self.step(self._failure[node], character)
                if self._output[child] is None:
                    self._output[child] = self._output[self._failure[child]]
                # A leaf can only go on by way of its failure.
                self._held[child] = depth[child] if self._children[child] else self._held[self._failure[child]]
                pending.append(child)

    def step(self, node: int, character: str) -> int:
        """The node after `character`: the longest suffix read so far that begins a stop string."""
        while True:
            following = self._children[node].get(character)
            if following is not None:
                return following
            if node == 0:
                return 0
            node = self._failure[node]

    def match(self, node: int) -> str | None:
        """The longest stop string that ends at `node`."""
        return self._output[node]

    def held(self, node: int) -> int:
        """How many characters at the end of the text can still become a stop string."""
        return self._held[node]


class StopScanner:
    """The state of one sample. Text goes in as it becomes final, and comes out as soon as no stop can begin in it."""

    __slots__ = ("_automaton", "_include", "_node", "_pending", "_stopped")

    def __init__(self, automaton: StopAutomaton, *, include_stop: bool) -> None:
        self._automaton = automaton
        self._include = include_stop
        self._node = 0
        self._pending = ""
        self._stopped = False

    def feed(self, text: str, *, armed: bool = True) -> Scan:
        """Add text. While not `armed`, stop strings that end in it are ignored. Raises ValueError after a stop."""
        if self._stopped:
            raise ValueError("the sample has stopped")
        for position, character in enumerate(text):
            self._node = self._automaton.step(self._node, character)
            stop = self._automaton.match(self._node) if armed else None
            if stop is not None:
                self._stopped = True
                read = self._pending + text[: position + 1]
                self._pending = ""
                # With what was ignored before, a match may reach back into text that is out already.
                return Scan(read if self._include else read[: max(0, len(read) - len(stop))], stop)
        read = self._pending + text
        cut = len(read) - min(self._automaton.held(self._node), len(read))
        self._pending = read[cut:]
        return Scan(read[:cut])

    def flush(self) -> str:
        """The text still held back, at the end of a sample that did not stop by a string."""
        text, self._pending = self._pending, ""
        return text
