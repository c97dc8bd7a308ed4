"""Where the cache manager is, and what this decoder introduces itself as. Fixed for the life of the process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from common.arena_frames import PROTOCOL_VERSION
from common.cuda_driver import Gpu
from common.layout import KvLayout
from decoder.cache_messages import layout_message
from tessera.cache.v1 import cache_pb2
from tessera.common.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class SessionTarget:
    """Where the cache manager is and what this decoder is to it; `gpu` is where it computes, None: on the CPU."""

    target: str
    secret: str
    arena_socket: Path
    layout: KvLayout
    key: common_pb2.CacheKey
    decoder_name: str
    gpu: Gpu | None = None

    def attach_message(self) -> cache_pb2.AttachRequest:
        """An attach of this process, without a resume, to be sent now."""
        return cache_pb2.AttachRequest(
            protocol_version=PROTOCOL_VERSION,
            decoder_name=self.decoder_name,
            layout=layout_message(self.layout),
            process_id=os.getpid(),
            sent_ns=time.monotonic_ns(),
        )
