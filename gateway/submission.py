"""From a checked request to what a decoder is sent. Pure but for the seed, which is passed in.

Owns what crosses to the decoder: the tenant's grant, ids, a seed, a bounded number of tokens; never text, stop
strings or fields that this build does not know. Called by `gateway/service.py`.
"""

from __future__ import annotations

from common.tokens import pack_tokens
from gateway.auth import Caller
from gateway.validation import Ids, ModelLimits, Plan
from tessera.decode.v1 import decode_pb2
from tessera.inference.v1 import inference_pb2


def build_submission(
    request: inference_pb2.GenerateRequest,
    plan: Plan,
    prompt: Ids,
    limits: ModelLimits,
    *,
    caller: Caller,
    request_id: str,
    seed: int,
) -> decode_pb2.Submit:
    """The message for the decoder, without its number. `seed` (64 bits) is used where the request brings none."""
    room = limits.max_context_tokens - len(prompt)
    submit = decode_pb2.Submit(
        request_id=request_id,
        grant=caller.grant,
        tokens=pack_tokens(prompt),
        sampling=request.sampling,
        stopping=request.stopping,
        output=request.output,
        cache=request.cache,
        priority=request.priority,
        request_label=request.request_label,
        session_handle=plan.session.handle,
        session_tokens=plan.session.num_tokens,
        keep_seconds=plan.session.keep_seconds,
        adapter=request.adapter,
        tenant=caller.tenant,
        tenant_weight=caller.weight,
    )
    if request.HasField("beam"):
        submit.beam.CopyFrom(request.beam)
    if request.HasField("speculation"):
        submit.speculation.CopyFrom(request.speculation)
    submit.DiscardUnknownFields()
    submit.sampling.n = plan.num_samples
    if not submit.sampling.HasField("seed"):
        submit.sampling.seed = seed
    submit.stopping.ClearField("stop")
    submit.stopping.ClearField("include_stop")
    submit.stopping.max_tokens = room if plan.max_tokens is None else min(plan.max_tokens, room)
    return submit
