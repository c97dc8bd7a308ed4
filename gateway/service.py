"""The public InferenceService: the edge where protobuf comes in and goes out. Thin; each rule lives in its module.

Owns one invariant: a call that ends, however it ends, lets go of its place and of its request at the decoder. Called
by gRPC; the caller's tenant was named by `gateway/auth.py` before.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import grpc

from common.adapter_folder import AdapterFolder
from common.errors import TesseraError
from common.logs import get_logger
from gateway.adapters import list_adapters
from gateway.admission import Admission
from gateway.auth import arrival_time, current_caller
from gateway.decode_stream import DecodeStream
from gateway.decoder_pool import DecoderPool
from gateway.decoders import DecoderModel
from gateway.generation import Arrival, Generation
from gateway.prompts import PromptEncoder
from gateway.sessions import Branches
from gateway.submission import build_submission
from gateway.validation import ModelLimits, check_prompt_logprobs, check_public_tokens, check_request
from tessera.inference.v1 import inference_pb2, inference_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves every decoder of `pool` with one tokenizer. `clock` gives seconds and never goes back."""

    def __init__(
        self,
        pool: DecoderPool,
        prompts: PromptEncoder,
        admission: Admission,
        branches: Branches,
        clock: Callable[[], float],
        adapters: AdapterFolder,
    ) -> None:
        self._pool = pool
        self._branches = branches
        self._prompts = prompts
        self._admission = admission
        self._clock = clock
        self._adapters = adapters

    async def Generate(  # noqa: N802 - the contract's name
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        """Run a prompt. Headers go out with the first response, as nothing is sent before it.

        A coroutine that writes, and no generator: a cancel then ends this very frame, and `finally` runs at once.
        """
        with self._admission.hold(current_caller().tenant):
            generation, stream = await self._begin(request)
            outcome = "CANCELLED"
            try:
                await generation.run(context.write)
                outcome = "OK"
            except TesseraError as error:
                outcome = error.reason
                raise
            finally:
                stream.close()
                log = get_logger()
                log.info("request_left", outcome=outcome, **generation.counters())
                log.debug("first_token_timed", request_id=generation.request_id, **generation.moments())

    async def _begin(self, request: inference_pb2.GenerateRequest) -> tuple[Generation, DecodeStream]:
        arrived = arrival_time()
        caller = current_caller()
        model = self._pool.find_model(request.model)
        limits = _limits(model)
        plan = check_request(request, limits)
        prompt = await self._prompts.encode_prompt(request, limits)
        check_public_tokens(request.cache, len(prompt))
        check_prompt_logprobs(request.output, len(prompt))
        request_id = f"req_{secrets.token_hex(12)}"
        submit = build_submission(
            request, plan, prompt, limits, caller=caller, request_id=request_id, seed=secrets.randbits(64)
        )
        vocabulary = await self._prompts.vocabulary(limits) if request.output.HasField("constraint") else None
        stream = self._pool.submit(model, submit, caller.tenant, plan.num_samples, vocabulary)
        generation = Generation(
            stream,
            plan,
            request_id=request_id,
            tenant=caller.tenant,
            prompt_tokens=len(prompt),
            new_detokenizer=self._prompts.tokenizer.new_detokenizer,
            arrival=Arrival(arrived, self._clock()),
            clock=self._clock,
            cut=lambda handle, num_tokens: self._branches.cut(caller, handle, num_tokens),
        )
        return generation, stream

    async def Tokenize(  # noqa: N802 - the contract's name
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Ids of a prompt, as Generate would see them."""
        limits = _limits(self._pool.find_model(request.model))
        with self._admission.hold(current_caller().tenant):
            return inference_pb2.TokenizeResponse(token_ids=await self._prompts.tokenize(request, limits))

    async def Detokenize(  # noqa: N802 - the contract's name
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Text of ids."""
        limits = _limits(self._pool.find_model(request.model))
        with self._admission.hold(current_caller().tenant):
            text = await self._prompts.detokenize(list(request.token_ids), limits)
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(  # noqa: N802 - the contract's name
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """What is served now."""
        with self._admission.hold(current_caller().tenant):
            adapters = await asyncio.to_thread(list_adapters, self._adapters)
        models = [
            inference_pb2.Model(
                name=model.name,
                vocab_size=model.vocab_size,
                max_context_tokens=model.max_context_tokens,
                block_tokens=model.block_tokens,
                dtype=model.dtype,
                kv_dtype=model.kv_dtype,
                adapters=adapters,
            )
            for model in self._pool.models()
        ]
        return inference_pb2.ListModelsResponse(models=models)

    async def ForkSession(  # noqa: N802 - the contract's name
        self, request: inference_pb2.ForkSessionRequest, context: Context
    ) -> inference_pb2.ForkSessionResponse:
        """More handles of a kept conversation."""
        with self._admission.hold(current_caller().tenant):
            return await self._branches.fork(current_caller(), request)

    async def RollbackSession(  # noqa: N802 - the contract's name
        self, request: inference_pb2.RollbackSessionRequest, context: Context
    ) -> inference_pb2.RollbackSessionResponse:
        """Cut a kept conversation back."""
        with self._admission.hold(current_caller().tenant):
            await self._branches.rollback(current_caller(), request)
        return inference_pb2.RollbackSessionResponse()

    async def DropSession(  # noqa: N802 - the contract's name
        self, request: inference_pb2.DropSessionRequest, context: Context
    ) -> inference_pb2.DropSessionResponse:
        """End a kept conversation."""
        with self._admission.hold(current_caller().tenant):
            await self._branches.drop(current_caller(), request)
        return inference_pb2.DropSessionResponse()


def _limits(model: DecoderModel) -> ModelLimits:
    return ModelLimits(model.name, model.vocab_size, model.max_context_tokens)
