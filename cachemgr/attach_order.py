"""In which order each decoder sent its attaches, whatever order they come in.

Invariant: what a decoder is heard with was sent after all that it was heard with before, by its own clock. Each attach
comes on a stream of its own, and two streams keep no order: one that was given up may still be read when a later one
has been answered, and then says of blocks in use that nobody holds them. Called by the session registry.
"""

from __future__ import annotations


class AttachOrder:
    """The newest attach that was taken of each decoder, by process and name. Forgotten with the process."""

    def __init__(self) -> None:
        self._newest: dict[int, dict[str, int]] = {}

    def is_overtaken(self, process_id: int, decoder_name: str, sent_ns: int) -> bool:
        """Whether a later attach was taken already."""
        return sent_ns < self._newest.get(process_id, {}).get(decoder_name, 0)

    def heard(self, process_id: int, decoder_name: str, sent_ns: int) -> None:
        """An attach was taken: what was sent before it is over."""
        self._newest.setdefault(process_id, {})[decoder_name] = sent_ns

    def forget(self, process_id: int) -> None:
        """The process is dead, or has nothing here. Harmless when repeated."""
        self._newest.pop(process_id, None)
