"""All decoders of the node: which models they serve, and which of them takes a request.

Called by `gateway/service.py` and `gateway/health.py`. The choice itself is `gateway/router.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from common.errors import NotFound, TesseraError, Unavailable
from gateway.decode_stream import DecodeStream
from gateway.decoders import DecoderClient, DecoderModel, decoder_away
from gateway.router import Candidate, affinity, choose_decoder
from tessera.decode.v1 import decode_pb2


class DecoderPool:
    """The clients of a node's decoders. `targets[i]` is where decoder i listens."""

    def __init__(self, targets: Sequence[str], secret: str) -> None:
        self._listeners: list[Callable[[], None]] = []
        self._clients = [DecoderClient(index, target, secret, self._tell) for index, target in enumerate(targets)]

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have `listener` called whenever a decoder comes or goes."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Connect to all decoders, now and whenever they are lost."""
        for client in self._clients:
            client.start()

    async def close(self) -> None:
        """End all streams."""
        await asyncio.gather(*(client.close() for client in self._clients))

    @property
    def is_ready(self) -> bool:
        """Whether one decoder at least is connected, and answers."""
        return any(client.model is not None for client in self._clients)

    def models(self) -> list[DecoderModel]:
        """The models that are served now, one entry for each name, in the order of the decoders."""
        found: dict[str, DecoderModel] = {}
        for client in self._clients:
            if client.model is not None:
                found.setdefault(client.model.name, client.model)
        return list(found.values())

    def find_model(self, name: str) -> DecoderModel:
        """The model of that name; the first one for "". Raises Unavailable without decoders, else NotFound."""
        models = self.models()
        if not models:
            raise Unavailable("no decoder is connected; try again", reason="NO_DECODER", retry_after_seconds=1.0)
        for model in models:
            if name in ("", model.name):
                return model
        raise NotFound(
            "the model is not served here; ListModels names those that are",
            reason="MODEL_NOT_FOUND",
            metadata={"field": "model", "served": ", ".join(model.name for model in models)},
        )

    def submit(
        self,
        model: DecoderModel,
        submit: decode_pb2.Submit,
        tenant: str,
        num_samples: int,
        vocabulary: decode_pb2.Vocabulary | None = None,
    ) -> DecodeStream:
        """Send a request, with the `vocabulary` that it needs, to the decoder that suits it best. Raises Unavailable if
        none serves the model any more."""
        clients = {client.index: client for client in self._clients if client.model == model}
        if not clients:
            raise decoder_away()
        candidates = [Candidate(client.index, client.load, client.capacity) for client in clients.values()]
        chosen = choose_decoder(affinity(submit.tokens, model.block_tokens, tenant), candidates)
        return clients[chosen.index].submit(submit, num_samples, vocabulary)

    def abandon_all(self, error: TesseraError) -> None:
        """End every request at every decoder with `error`."""
        for client in self._clients:
            client.abandon_all(error)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
