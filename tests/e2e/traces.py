"""Timed traces for the fuzzer: what clients and faults do, and when, drawn from one seed.

Invariant: a trace is a function of its seed and the model's vocabulary alone, so that a failing seed is repeated by
number; the machine decides how its events meet. Used by `fuzzer.py`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tessera.common.v1 import common_pb2
from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import make_request
from tests.e2e.prompts import Prompts

B: Final = 16
TRACE_SECONDS: Final = 8.0
GROUP: Final = "fuzz"  # all tenants of the fuzzer are members
FAULTS: Final = (
    "kill_decoder", "kill_cachemgr", "kill_gateway", "stop_decoder", "evict",
    "rotate", "withdraw", "leave_group", "lower_ceiling", "drain", "revoke", "delete",
)  # fmt: skip
TURNS: Final = ("whole", "whole", "part", "fork", "cut")  # how a kept conversation is gone on with


@dataclass(frozen=True, slots=True)
class Call:
    """One request of one tenant. After `leave_after` tokens the client goes, by a cancel or by closing its channel.

    after: place of the call whose kept conversation it goes on with, by one of TURNS; None: it begins one
    part:  which part of that conversation it goes on from, where that is not all of it
    """

    at: float
    request: pb.GenerateRequest
    tenant: int
    leave_after: int | None
    leave: str
    after: int | None = None
    turn: str = ""
    part: float = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What befalls the node. `victim` is the number of a decoder or tenant; `seconds` is how long it lasts."""

    at: float
    kind: str
    victim: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Trace:
    """What happens in one round."""

    seed: int
    calls: tuple[Call, ...]
    faults: tuple[Fault, ...]
    approved: tuple[int, ...]  # the tokens of the one approved prefix


def make_trace(seed: int, model: Path, *, num_tenants: int, num_decoders: int, faults: tuple[str, ...]) -> Trace:
    """The trace of `seed`: some thirty calls and up to two faults of the given kinds."""
    source, prompts = random.Random(seed), Prompts(model, seed)
    trunks = [prompts.tokens(5 * B) for _ in range(3)]
    calls = []
    for _ in range(source.randrange(15, 40)):
        leaves = source.random() < 0.3
        calls.append(
            Call(
                at=source.uniform(0, TRACE_SECONDS) if source.random() < 0.7 else source.choice([0.0, 2.0, 4.0]),
                request=_request(source, prompts, trunks),
                tenant=source.randrange(num_tenants),
                leave_after=source.randrange(30) if leaves else None,
                leave=source.choice(["cancel", "close"]),
            )
        )
    befall = [
        Fault(
            at=source.uniform(0.5, TRACE_SECONDS),
            kind=source.choice(faults),
            victim=source.randrange(num_decoders * num_tenants),
            seconds=source.uniform(0.1, 3.0),
        )
        for _ in range(source.choice([0, 1, 1, 2]) if faults else 0)
    ]
    return Trace(
        seed,
        _with_turns(source, prompts, sorted(calls, key=lambda call: call.at)),
        tuple(sorted(befall, key=lambda fault: fault.at)),
        tuple(trunks[0][: source.randrange(1, 5 * B)]),
    )


def _with_turns(source: random.Random, prompts: Prompts, calls: list[Call]) -> tuple[Call, ...]:
    """Some of the calls go on with what an earlier one of their tenant keeps."""
    turned: list[Call] = []
    for call in calls:
        kept = [
            place
            for place, earlier in enumerate(turned)
            if earlier.tenant == call.tenant and earlier.leave_after is None and earlier.request.HasField("session")
        ]
        if kept and source.random() < 0.5:
            request = pb.GenerateRequest()
            request.CopyFrom(call.request)
            request.sampling.n = 1
            request.cache.ClearField("scope")
            request.cache.ClearField("scope_name")
            request.cache.ClearField("public_tokens")
            del request.token_ids.ids[:]
            request.token_ids.ids.extend(prompts.random.choices(prompts.ids, k=source.randrange(1, B)))
            call = replace(
                call, request=request, after=source.choice(kept), turn=source.choice(TURNS), part=source.random()
            )
        turned.append(call)
    return tuple(turned)


def _request(source: random.Random, prompts: Prompts, trunks: list[list[int]]) -> pb.GenerateRequest:
    tokens = [*source.choice(trunks)[: source.randrange(1, 5 * B)], *prompts.tokens(source.randrange(1, 2 * B))]
    if source.random() < 0.2:
        tokens = prompts.tokens(source.randrange(1, 8 * B))
    sampled = source.random() < 0.5
    extra: dict[str, Any] = {}
    if source.random() < 0.3:
        extra = {"frequency_penalty": source.uniform(-1, 1), "repetition_penalty": source.uniform(0.8, 1.3)}
    request = make_request(
        tokens,
        new=source.randrange(1, 60),
        temperature=source.uniform(0.2, 2.0) if sampled else 0.0,
        seed=source.randrange(2**64),
        n=source.choice([1, 1, 1, 2, 4]),
        stop=source.choice([(), (), ("e",), ("th", "an", "0")]),
        ignore_eos=source.random() < 0.7,
        no_read=source.random() < 0.1,
        no_store=source.random() < 0.2,
        **extra,
    )
    request.priority = source.choice([0, 0, 0, -50, 100])
    if source.random() < 0.3:
        request.cache.priority = source.randrange(101)
    if source.random() < 0.2:
        request.cache.ttl_seconds = source.uniform(0.1, 5)
    scope = source.random()
    if scope < 0.2:
        request.cache.scope = common_pb2.SCOPE_PUBLIC  # as far as approved
    elif scope < 0.5:
        request.cache.scope = common_pb2.SCOPE_GROUP
        request.cache.scope_name = GROUP
        request.cache.public_tokens = source.randrange(len(tokens) + 1)
    if source.random() < 0.4:
        request.session.keep_seconds = source.uniform(0.1, 8)
    return request
