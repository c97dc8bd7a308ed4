"""Which weights this daemon holds, who fills them and who reads them. Nothing here waits, listens or reads a clock.

Invariant: there is at most one memory of a key, and it is given to read only after its one filler has proven that it
read the header back from it; a filler that leaves before takes its memory with it, since it may still write there.
What nobody uses is kept for `keep_seconds`, and dropped before a new memory is refused. Called by `service.py` alone.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cachemgr.weights.memory import WeightsMemory, WeightsPlace
from common.cuda_driver import CudaError
from common.errors import PermissionDenied, ResourceExhausted
from common.logs import get_logger
from common.weights_frames import filled_proof, weights_header

KEEP_SECONDS: Final = 600.0
RETRY_SECONDS: Final = 0.2

Holder = int


@dataclass(slots=True, eq=False)
class Copy:
    """One memory. `filler` is None once it can be read; `idle_since` is the time at which its last holder left."""

    key: bytes
    num_bytes: int
    nonce: bytes
    memory: WeightsMemory
    filler: Holder | None = None
    holders: set[Holder] = field(default_factory=set)
    idle_since: float = 0.0


class WeightsStore:
    """The copies of one daemon.

    reserved:   bytes that are the arena's
    draw_nonce: 32 random bytes
    """

    def __init__(
        self,
        place: WeightsPlace,
        *,
        reserved: Callable[[], int],
        draw_nonce: Callable[[], bytes],
        keep_seconds: float = KEEP_SECONDS,
    ) -> None:
        self._place = place
        self._reserved = reserved
        self._draw_nonce = draw_nonce
        self._keep_seconds = keep_seconds
        self._copies: dict[bytes, Copy] = {}
        self._fills: dict[Holder, Copy] = {}
        self._log = get_logger()

    @property
    def copies(self) -> list[Copy]:
        """All of them."""
        return list(self._copies.values())

    def ask(self, holder: Holder, key: bytes, num_bytes: int) -> Copy | None:
        """The copy for `holder`: to fill where its `filler` is `holder`, else to read; None while another fills it.

        Raises PermissionDenied where the copy has another size, ResourceExhausted with the needed and the free bytes
        where a new one does not fit (with a time to try again where the books have room and the system has not, as
        just after a process was killed), FailedPrecondition where it cannot be shared.
        """
        copy = self._copies.get(key)
        if copy is None:
            copy = Copy(key, num_bytes, self._draw_nonce(), self._made(num_bytes), filler=holder)
            self._copies[key] = self._fills[holder] = copy
            self._say("weights_fill_granted", copy)
            return copy
        if copy.num_bytes != num_bytes:
            raise PermissionDenied("weights of that key have another size", reason="WEIGHTS_SIZE")
        if copy.filler is not None:
            return None
        return self._given(holder, copy)

    def filled(self, holder: Holder, proof: bytes) -> Copy:
        """`holder` has laid its weights down; the copy that it reads from now on, as all others do.

        That is another memory where one was handed back meanwhile. Raises PermissionDenied where it fills nothing, its
        proof is wrong, or it could still write.
        """
        own = self._fills.pop(holder, None)
        if own is None:
            raise PermissionDenied("this process fills no weights", reason="WEIGHTS_REFUSED")
        current = self._copies.get(own.key)
        if current is not None and current is not own:
            own.memory.close()
            return self._given(holder, current)
        wanted = filled_proof(own.nonce, weights_header(own.key, own.num_bytes, own.nonce))
        try:
            if not hmac.compare_digest(wanted, proof):
                raise PermissionDenied("the header was not read back", reason="WEIGHTS_REFUSED")
            own.memory.seal()
        except (ValueError, PermissionDenied) as error:
            self._discard(own)
            raise PermissionDenied(str(error), reason="WEIGHTS_REFUSED") from error
        own.filler = None
        self._say("weights_filled", own)
        return self._given(holder, own)

    def take_back(self, holder: Holder, key: bytes, num_bytes: int, nonce: bytes, fd: int) -> bool:
        """Hold what `holder` has mapped, read-only, since the daemon before this one; `fd` is ours from now on.

        Whether it is held: not where there is another copy that can be read already. One that is being filled gives
        way. Raises ValueError where the memory does not fit.
        """
        memory = self._place.adopt(fd, num_bytes)
        present = self._copies.get(key)
        if present is not None and present.filler is None:
            memory.close()
            same = (present.num_bytes, present.nonce) == (num_bytes, nonce)
            if same:
                self._given(holder, present)
            return same
        copy = self._copies[key] = Copy(key, num_bytes, nonce, memory)
        self._say("weights_adopted", copy)
        self._given(holder, copy)
        return True

    def leave(self, holder: Holder, now: float) -> None:
        """`holder` uses nothing any more. Harmless when repeated."""
        fill = self._fills.pop(holder, None)
        if fill is not None:
            self._say("weights_filler_gone", fill)
            self._discard(fill)
        for copy in self._copies.values():
            if holder in copy.holders:
                copy.holders.discard(holder)
                copy.idle_since = now

    def drop_idle(self, now: float) -> None:
        """Drop what nobody has used for `keep_seconds`."""
        for copy in self._unused():
            if now - copy.idle_since >= self._keep_seconds:
                self._drop(copy)

    def drop_unused(self) -> bool:
        """Drop what nobody uses, because the arena needs room; whether there was any."""
        unused = self._unused()
        for copy in unused:
            self._drop(copy)
        return bool(unused)

    def close(self) -> None:
        """Let everything go; processes keep what they mapped. Harmless when repeated."""
        for copy in (*self._copies.values(), *self._fills.values()):
            copy.memory.close()
        self._copies.clear()
        self._fills.clear()

    @property
    def free_bytes(self) -> int:
        """What the place has beside the arena and the weights, by this daemon's books. Raises CudaError."""
        held = {id(it): it.memory.memory_bytes for it in (*self._copies.values(), *self._fills.values())}
        return max(0, self._place.capacity - self._reserved() - sum(held.values()))

    def _made(self, num_bytes: int) -> WeightsMemory:
        """Memory that was counted before it is taken; what is unused gives way, the oldest first."""
        unused = self._unused()
        cause, again = "the pool and other weights take the rest", None
        try:
            needed = self._place.size_of(num_bytes)
            while True:
                if needed <= self.free_bytes:
                    try:
                        return self._place.make(num_bytes)
                    except (OSError, CudaError) as error:
                        cause, again = f"it was refused: {_words(error)}", RETRY_SECONDS
                if not unused:
                    break
                self._drop(unused.pop(0))
            free = self.free_bytes
        except CudaError as error:
            needed, free, cause = num_bytes, 0, str(error)
        raise ResourceExhausted(
            f"weights take {needed} bytes, {free} are free: {cause}",
            subject="weights_bytes", needed=needed, usable=free, reason="NO_MEMORY", retry_after_seconds=again,
        )  # fmt: skip

    def _unused(self) -> list[Copy]:
        found = [copy for copy in self._copies.values() if copy.filler is None and not copy.holders]
        return sorted(found, key=lambda copy: copy.idle_since)

    def _given(self, holder: Holder, copy: Copy) -> Copy:
        copy.holders.add(holder)
        self._say("weights_granted", copy)
        return copy

    def _drop(self, copy: Copy) -> None:
        self._say("weights_dropped", copy)
        self._discard(copy)

    def _discard(self, copy: Copy) -> None:
        copy.memory.close()
        if self._copies.get(copy.key) is copy:
            del self._copies[copy.key]

    def _say(self, event: str, copy: Copy) -> None:
        # The key is a digest of content, and names nothing that opens anything.
        self._log.info(event, weights=copy.key.hex()[:12], bytes=copy.memory.memory_bytes, holders=len(copy.holders))


def _words(error: OSError | CudaError) -> str:
    return str(error) if isinstance(error, CudaError) else error.strerror or "no memory"
