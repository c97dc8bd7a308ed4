"""The LoRA adapters that a decoder holds: found by name in the node's folder, kept by content, dropped when unused.

Invariants: an adapter in memory is never changed, so that a request goes on with what it began with; the same content
under two names is there once; at most `limit` are held, and one that a request uses is never dropped. A request has an
`AdapterUse` for as long as it lives; nobody has to give it back. `find` costs two `stat`s and is called on the event
loop, `load` reads files and is called on a thread. Both are safe to call at once.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from common.adapter_folder import AdapterFolder, Located, adapter_not_found
from common.errors import InvalidArgument, NotFound, ResourceExhausted, TesseraError
from common.logs import get_logger
from decoder.models.config import ModelConfig
from decoder.weights.adapter import Adapter, load_adapter

_TRIES: Final = 5  # an adapter may be replaced while it is read

Pack = Callable[[Any], Any]


class AdapterUse:
    """What a request holds of an adapter: `weights` as the model has packed them, and the `digest` of its content."""

    __slots__ = ("__weakref__", "digest", "weights")

    def __init__(self, weights: Any, digest: bytes) -> None:
        self.weights = weights
        self.digest = digest


@dataclass(frozen=True, slots=True)
class _Held:
    weights: Any
    digest: bytes
    uses: weakref.WeakSet[AdapterUse]

    def use(self) -> AdapterUse:
        use = AdapterUse(self.weights, self.digest)
        self.uses.add(use)
        return use


class AdapterPool:
    """Adapters of `folder` for a model of `config`; `pack` makes what its batches hold from an adapter's layers."""

    def __init__(
        self,
        folder: AdapterFolder,
        config: ModelConfig,
        pack: Pack,
        limit: int,
        read: Callable[..., Adapter] = load_adapter,
    ) -> None:
        self._folder = folder
        self._config = config
        self._pack = pack
        self._limit = limit
        self._read = read
        self._names: dict[str, tuple[Located, bytes]] = {}
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # least recently asked for first
        self._books = threading.Lock()
        self._loading = threading.Lock()

    @property
    def num_held(self) -> int:
        """Adapters in memory."""
        return len(self._held)

    def find(self, name: str) -> AdapterUse | None:
        """The adapter of that name, if what lies in the folder now is in memory; None where `load` must be asked.

        Raises NotFound, and InvalidArgument where it is no name.
        """
        return self._find(name, self._folder.locate(name))

    def _find(self, name: str, located: Located) -> AdapterUse | None:
        with self._books:
            known, digest = self._names.get(name, (None, b""))
            held = self._held.get(digest)
            if held is None or known != located:
                return None
            self._held.move_to_end(digest)
            return held.use()

    def load(self, name: str) -> AdapterUse:
        """As `find`, and reads it where it must. Raises InvalidArgument where it does not fit the model or is not
        served, and ResourceExhausted where all that are held are in use."""
        with self._loading:
            for _ in range(_TRIES):
                located = self._folder.locate(name)
                use = self._find(name, located)
                if use is not None:
                    return use
                began = time.monotonic()
                try:
                    adapter = self._read(located.directory, self._config)
                except (OSError, TesseraError) as error:
                    if self._folder.locate(name) != located:
                        continue  # it was replaced meanwhile
                    if isinstance(error, FileNotFoundError):
                        raise adapter_not_found(name) from None
                    if isinstance(error, OSError):
                        raise InvalidArgument("adapter", f"its files cannot be read: {error.strerror}") from None
                    raise
                use = self._hold(name, located, adapter)
                seconds = round(time.monotonic() - began, 3)
                get_logger().info("adapter_loaded", rank=adapter.rank, seconds=seconds, held=self.num_held)
                return use
        raise ResourceExhausted(
            "the adapter is replaced again and again while it is read", subject="tries", needed=_TRIES + 1,
            usable=_TRIES, reason="ADAPTER_CHANGING", retry_after_seconds=1.0,
        )  # fmt: skip

    def _hold(self, name: str, located: Located, adapter: Adapter) -> AdapterUse:
        gone = self._gone()
        with self._books:
            for other in (name, *gone):
                self._names.pop(other, None)
            held = self._held.get(adapter.digest)
            if held is None:
                self._make_room()
        if held is None:
            held = _Held(self._pack(adapter.layers), adapter.digest, weakref.WeakSet())
        with self._books:
            self._held[adapter.digest] = held
            self._held.move_to_end(adapter.digest)
            self._names[name] = (located, adapter.digest)
            return held.use()

    def _gone(self) -> list[str]:
        gone = []
        for name in list(self._names):
            try:
                self._folder.locate(name)
            except NotFound:
                gone.append(name)
        return gone

    def _make_room(self) -> None:
        named = {digest for _, digest in self._names.values()}
        # What no name leads to any more goes at once; else the one that was asked for longest ago.
        unused = [digest for digest, held in self._held.items() if not held.uses]
        drop = [digest for digest in unused if digest not in named]
        over = len(self._held) - len(drop) + 1 - self._limit
        drop += [digest for digest in unused if digest in named][: max(0, over)]
        if len(self._held) - len(drop) >= self._limit:
            raise ResourceExhausted(
                f"the decoder holds {self._limit} adapters, all of them in use", subject="adapters",
                needed=len(self._held) + 1, usable=self._limit, reason="ADAPTERS_IN_USE", retry_after_seconds=1.0,
            )  # fmt: skip
        for digest in drop:
            del self._held[digest]
        for name in [name for name, (_, digest) in self._names.items() if digest not in self._held]:
            del self._names[name]
