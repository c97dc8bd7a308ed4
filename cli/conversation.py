"""A conversation as the command line holds it: all of its turns here, and a handle of what the server keeps of them.

Invariant: the turns here are the truth. A turn sends the new question alone while the server keeps the rest, and all
turns where it does not (any more); an answer that failed or was left early changes nothing. Used by `cli/chat.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

from cli.client import Client, Numbers, add_turns
from cli.errors import CommandError
from tessera.inference.v1 import inference_pb2

KEEP_SECONDS: Final = 600.0
# The server does not keep it any more, or its model's template needs all turns: those are sent.
SEND_ALL: Final = ("BRANCH_NOT_FOUND", "INVALID_ARGUMENT")
CANNOT_KEEP: Final = "TOO_MANY_KEPT"

Turn = tuple[str, str]


class Conversation:
    """The turns of one conversation with one server. With `keep` false the server is never asked to keep it."""

    def __init__(self, client: Client, opening: Sequence[Turn], *, keep: bool) -> None:
        self._client = client
        self._turns: list[Turn] = list(opening)
        self._keep = keep
        self._handle = ""

    def ask(self, request: inference_pb2.GenerateRequest, question: str, numbers: Numbers) -> Iterator[str]:
        """Stream the answer to a question; `request` has no prompt yet. Raises CommandError with the server's words."""
        pieces: list[str] = []
        for text in self._answer(request, ("user", question), numbers):
            pieces.append(text)
            yield text
        self._turns += [("user", question), ("assistant", "".join(pieces))]
        # What a stop string cut off the text is in the tokens that the server keeps: those are not the conversation.
        cut = numbers.stop in request.stopping.stop
        before, self._handle = self._handle, numbers.session_handle
        self._drop(before)
        if cut:
            self.forget_handle()

    def forget_handle(self) -> None:
        """Have the server keep nothing of it."""
        before, self._handle = self._handle, ""
        self._drop(before)

    def _answer(self, plain: inference_pb2.GenerateRequest, question: Turn, numbers: Numbers) -> Iterator[str]:
        keep, handle = self._keep, self._handle
        while True:
            request = inference_pb2.GenerateRequest()
            request.CopyFrom(plain)
            add_turns(request, [question] if handle else [*self._turns, question])
            if handle:
                request.session.handle = handle
            if keep:
                request.session.keep_seconds = KEEP_SECONDS
            try:
                yield from (delta.text for delta in self._client.generate(request, numbers))
            except CommandError as error:
                if numbers.prompt_tokens:  # it had begun
                    raise
                if handle and error.reason in SEND_ALL:
                    handle = self._handle = ""
                elif keep and error.reason == CANNOT_KEEP:
                    keep = False
                else:
                    raise
            else:
                return

    def _drop(self, handle: str) -> None:
        if handle:
            with contextlib.suppress(CommandError):  # it ends by itself
                self._client.drop_session(handle)
