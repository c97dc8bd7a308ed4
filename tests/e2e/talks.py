"""The kept conversations of one round of the fuzzer, as their clients know them.

Invariant: a handle stands for exactly the tokens that are remembered with it; every handle that came is dropped when
the round is over. Used by `fuzzer.py`, from many threads: each call has a place of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from common.rpc import bearer_metadata
from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import Result
from tests.e2e.rig import ADMIN_SECONDS, Node
from tests.e2e.traces import Call

KEEP_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Talk:
    """One kept conversation."""

    handle: str
    tokens: list[int]


class Talks:
    """All of a round, by the place of the call that kept them. `keys` are those of the tenants, in order."""

    def __init__(self, node: Node, keys: Sequence[str]) -> None:
        self._node, self._keys = node, keys
        self._talks: dict[int, Talk] = {}
        self._kept: list[tuple[int, str]] = []  # tenant and handle

    def __contains__(self, place: int | None) -> bool:
        return place in self._talks

    def remember(self, place: int, call: Call, whole: pb.GenerateRequest, result: Result) -> None:
        """What a call has kept. Raises AssertionError where that is not what was said."""
        self._kept += [(call.tenant, sample.handle) for sample in result.samples.values() if sample.handle]
        sample = result.samples[0]
        if sample.handle:
            said = [*whole.token_ids.ids, *sample.token_ids]
            if not len(said) - 1 <= sample.session_tokens <= len(said):  # without the token that ended it
                raise AssertionError(f"{sample.session_tokens} tokens are kept of {len(said)}")
            self._talks[place] = Talk(sample.handle, said[: sample.session_tokens])

    def go_on(self, call: Call, key: str) -> tuple[pb.GenerateRequest, pb.GenerateRequest]:
        """(the request that goes on with a conversation as its call says, the one that says the whole). Raises
        grpc.RpcError where the conversation is over."""
        if call.after is None:
            raise ValueError("the call goes on with nothing")
        talk, options = self._talks[call.after], {"metadata": bearer_metadata(key), "timeout": ADMIN_SECONDS}
        handle, count = talk.handle, len(talk.tokens)
        if call.turn in ("part", "cut"):
            count = 1 + int(call.part * (count - 1))
        if call.turn in ("fork", "cut"):
            fork = pb.ForkSessionRequest(handle=handle, count=1, keep_seconds=KEEP_SECONDS)
            forked = self._node.inference.ForkSession(fork, **options)
            handle = forked.handles[0]
            self._kept.append((call.tenant, handle))
            if forked.num_tokens != len(talk.tokens):
                raise AssertionError(f"a fork has {forked.num_tokens} tokens of {len(talk.tokens)}")
        if call.turn == "cut":
            cut = pb.RollbackSessionRequest(handle=handle, num_tokens=count)
            self._node.inference.RollbackSession(cut, **options)
        request, whole = pb.GenerateRequest(), pb.GenerateRequest()
        request.CopyFrom(call.request)
        request.session.handle = handle
        if call.turn == "part":
            request.session.num_tokens = count
        whole.CopyFrom(request)
        del whole.token_ids.ids[:]
        whole.token_ids.ids.extend([*talk.tokens[:count], *request.token_ids.ids])
        return request, whole

    def drop_all(self) -> None:
        """Ends them all."""
        for tenant, handle in self._kept:
            drop = pb.DropSessionRequest(handle=handle)
            with contextlib.suppress(grpc.RpcError):  # it is over already, or its daemon is
                options = {"metadata": bearer_metadata(self._keys[tenant]), "timeout": ADMIN_SECONDS}
                self._node.inference.DropSession(drop, **options)
        self._kept.clear()
        self._talks.clear()
