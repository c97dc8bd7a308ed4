"""What a request becomes once the kept conversation that it continues is known: one whose prompt is all of it.

Invariant: from then on nothing tells it from a request that was sent whole, so that penalties, positions, seeds, bounds
and preemption are the same. Called by the committer. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from common.errors import InvalidArgument
from decoder.sequence import IntArray, Request

BASE_TOKENS: Final = 64  # last tokens of a conversation that a gateway is told, to go on with its text


def continued(request: Request, prompt: IntArray) -> Request:
    """`request` with `prompt` for its own. Raises InvalidArgument where that leaves no room for an answer."""
    stopping = request.stopping
    if request.max_context:
        room = request.max_context - len(prompt)
        if room < 1:
            raise InvalidArgument(
                "session.handle",
                f"the conversation and the prompt are {len(prompt)} tokens; allowed are {request.max_context - 1}",
            )
        stopping = replace(stopping, max_tokens=min(stopping.max_tokens, room))
    return replace(request, prompt=prompt, stopping=stopping, session_handle=b"", session_tokens=0)
