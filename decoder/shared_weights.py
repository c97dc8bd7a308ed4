"""Weights that the decoders of a node share: memory that the cache manager holds, filled by one, mapped by all.

Invariant: tensors come out of a mapping for reading alone, whose header names these weights and the daemon's nonce; the
one process that was asked to fill maps the memory to write first, and lets that mapping go before anybody reads. There
is no other memory to fall back to: what does not fit is raised. Given to the GPU's model as its `WeightMemory`.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from common.arena_frames import ArenaKind
from common.cuda_driver import CudaError, Gpu
from common.devices import gpu_name
from common.errors import FailedPrecondition, TesseraError, Unavailable
from common.logs import get_logger
from common.weights_frames import HEADER_BYTES, WeightsReply, WeightsStatus, filled_proof, weights_header
from common.weights_wire import WeightsLink
from decoder.cuda_arena import Wrap, wrap_tensor
from decoder.cuda_mapping import map_fd
from decoder.models.config import ModelDigests
from decoder.models.device_layout import DeviceLayout, Place

VERSION: Final = 1  # of what is laid down in the places; raise it where that changes and the places do not
DAEMON_SECONDS: Final = 60.0
RETRY_SECONDS: Final = 0.2


def weights_key(digests: ModelDigests, layout: DeviceLayout) -> bytes:
    """32 bytes that follow from everything that the bytes of the memory follow from."""
    content = digests.weights + digests.position + digests.attention + layout.digest() + VERSION.to_bytes(4, "little")
    return hashlib.blake2b(content, digest_size=32, person=b"tessera-shared").digest()


class _Mapping(Protocol):
    def read(self, num_bytes: int) -> bytes: ...
    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...


class HostMapping:
    """A memfd of weights, mapped. The memory lives as long as this object and the tensors over it."""

    def __init__(self, fd: int, num_bytes: int, *, writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, access)
        self.num_bytes = num_bytes

    def read(self, num_bytes: int) -> bytes:
        """The first bytes."""
        return self._memory[:num_bytes]

    def write(self, data: bytes) -> None:
        """Set the first bytes."""
        self._memory[: len(data)] = data

    def close(self) -> None:
        """Unmap it. Nothing may look at it any more."""
        self._memory.close()

    def tensor(self) -> torch.Tensor:
        """uint8 [num_bytes], without a copy. A write to a mapping for reading alone ends the process."""
        address = np.frombuffer(self._memory, np.uint8).ctypes.data
        array: Any = (ctypes.c_char * self.num_bytes).from_address(address)
        array.mapping = self  # torch keeps the array, and the array this
        return torch.frombuffer(array, dtype=torch.uint8)


class SharedWeights:
    """The weights of one model, as the daemon holds them. Made by `WeightsSource`; `close` gives the hold up.

    connect: a fresh link to the daemon
    """

    def __init__(
        self, connect: Callable[[], WeightsLink], key: bytes, layout: DeviceLayout, gpu: Gpu | None, wrap: Wrap
    ) -> None:
        self._connect, self._key, self._layout, self._gpu, self._wrap = connect, key, layout, gpu, wrap
        self._closed = threading.Event()
        self._mapping: _Mapping | None = None
        self._bytes: torch.Tensor | None = None
        self._fd = -1
        self._started = time.monotonic()
        self._link = self._connected()
        try:
            self._take_over(*self._link.ask())
        except TesseraError:
            self.close()
            raise
        if self.filled:
            self._hold()

    def take(self, place: Place) -> torch.Tensor:
        if self._bytes is None:
            raise FailedPrecondition("the weights are closed", reason="WEIGHTS_MAP")
        part: Any = self._bytes[place.offset : place.offset + place.num_bytes]
        tensor: torch.Tensor = part.view(place.dtype).view(place.shape)
        return tensor

    def finish(self) -> None:
        mapping = self._mapping
        if mapping is None:
            raise FailedPrecondition("the weights are closed", reason="WEIGHTS_MAP")
        try:
            if self._gpu is not None:
                self._gpu.driver.use_device(self._gpu.ordinal)
                self._gpu.driver.synchronize()
            # Last, so that memory with a header is whole.
            mapping.write(weights_header(self._key, self._layout.num_bytes, self._reply.nonce))
            proof = filled_proof(self._reply.nonce, mapping.read(HEADER_BYTES))
            self._let_go()
            self._take_over(*self._link.filled(proof))
        except CudaError as error:
            self.close()
            raise _cannot_map(error) from None
        except TesseraError:
            self.close()
            raise
        self._hold()

    def close(self) -> None:
        """Give the hold up. Tensors that were taken stay good. Harmless when repeated."""
        self._closed.set()
        self._link.close()
        self._bytes = self._mapping = None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _connected(self) -> WeightsLink:
        deadline = self._started + DAEMON_SECONDS
        while True:
            try:
                return self._connect()
            except Unavailable:  # it starts beside this decoder, or again
                if time.monotonic() >= deadline:
                    raise
                time.sleep(RETRY_SECONDS)

    def _take_over(self, reply: WeightsReply, fd: int) -> None:
        """Map what was given. The fd of memory to read is kept, for a daemon that has lost it."""
        self._reply, self.filled = reply, reply.status is WeightsStatus.READ
        try:
            self._check_device(reply)
            self._map(fd, reply)
            if self.filled:
                self._check_header()
        except CudaError as error:
            os.close(fd)
            raise _cannot_map(error) from None
        except (OSError, ValueError, FailedPrecondition) as error:
            os.close(fd)
            if isinstance(error, FailedPrecondition):
                raise
            raise FailedPrecondition("the weights cannot be mapped", reason="WEIGHTS_MAP") from error
        if self.filled:
            self._fd = fd
        else:
            os.close(fd)  # the mapping holds the memory; no other may be made by it

    def _map(self, fd: int, reply: WeightsReply) -> None:
        if self._gpu is None:
            host = HostMapping(fd, reply.memory_bytes, writable=not self.filled)
            self._mapping, self._bytes = host, host.tensor()
        else:
            mapping = map_fd(self._gpu, fd, reply.memory_bytes, writable=not self.filled)
            self._mapping, self._bytes = mapping, self._wrap(mapping)

    def _let_go(self) -> None:
        """The mapping to write ends before the daemon seals."""
        mapping, self._mapping, self._bytes = self._mapping, None, None
        if mapping is not None:
            mapping.close()

    def _check_device(self, reply: WeightsReply) -> None:
        have = "host memory" if reply.kind is ArenaKind.HOST else gpu_name(reply.device_uuid)
        want = "host memory" if self._gpu is None else self._gpu.name
        if have != want:
            raise FailedPrecondition(
                f"the weights are in {have}, this decoder computes in {want}: give both processes the same --device",
                reason="DEVICE_MISMATCH", metadata={"want": want, "have": have},
            )  # fmt: skip
        wanted = self._layout.num_bytes if self._gpu is None else self._gpu.rounded(self._layout.num_bytes)
        if reply.memory_bytes != wanted:
            raise FailedPrecondition(
                f"the memory has {reply.memory_bytes} bytes; these weights need {wanted}", reason="WEIGHTS_SIZE"
            )

    def _check_header(self) -> None:
        mapping = self._mapping
        wanted = weights_header(self._key, self._layout.num_bytes, self._reply.nonce)
        if mapping is None or not hmac.compare_digest(mapping.read(HEADER_BYTES), wanted):
            self._let_go()
            raise FailedPrecondition("the mapped memory does not hold these weights", reason="WEIGHTS_HEADER")

    def _hold(self) -> None:
        get_logger().info(
            "weights_shared", bytes=self._reply.memory_bytes, seconds=round(time.monotonic() - self._started, 3)
        )
        threading.Thread(target=self._keep_held, name="weights-hold", daemon=True).start()

    def _keep_held(self) -> None:
        """A daemon that comes after this one gets the memory back, so that the next decoder finds it."""
        while not self._closed.is_set():
            self._link.wait_closed()
            while not self._closed.wait(RETRY_SECONDS):
                try:
                    link = self._connect()
                    if not self._handed_back(link):
                        return
                    break
                except Unavailable:
                    continue

    def _handed_back(self, link: WeightsLink) -> bool:
        try:
            if link.hand_back(self._reply.nonce, self._fd):
                self._link = link
                if self._closed.is_set():
                    link.close()
                get_logger().info("weights_handed_back", bytes=self._reply.memory_bytes)
                return True
        except (Unavailable, FailedPrecondition) as error:
            link.close()
            if isinstance(error, Unavailable):
                raise
        link.close()
        get_logger().warning("weights_return_refused", effect="this decoder keeps a copy of its own")
        return False


class WeightsSource:
    """Where a decoder's shared weights come from: the cache manager's socket, with the node's internal key."""

    def __init__(self, socket: Path, secret: str, gpu: Gpu | None, wrap: Wrap = wrap_tensor) -> None:
        self._socket, self._secret, self._gpu, self._wrap = socket, secret, gpu, wrap

    def weights_of(self, digests: ModelDigests, layout: DeviceLayout) -> SharedWeights:
        """The memory of a model's weights. Raises FailedPrecondition, PermissionDenied, ResourceExhausted, each by its
        reason, and Unavailable where the daemon is not there for a minute."""
        key = weights_key(digests, layout)

        def connect() -> WeightsLink:
            return WeightsLink(self._socket, self._secret, key, layout.num_bytes)

        return SharedWeights(connect, key, layout, self._gpu, self._wrap)


def _cannot_map(error: CudaError) -> FailedPrecondition:
    return FailedPrecondition(f"the weights cannot be mapped: {error}", reason="WEIGHTS_MAP")
