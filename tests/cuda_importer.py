"""`python -m tests.cuda_importer DRIVER ARENA_SOCKET FD:GPU_UUID...`: for each, a process that maps an arena as a
decoder does, with a recorder for a driver, or the `real` one. They are forked from one, which imports torch once.

Each is told what to do by lines of JSON on its FD, [command, arguments...], and answers with one line; the first line
that it sends is its process id.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from common.cuda_driver import Gpu, load_bindings
from common.errors import TesseraError
from common.layout import KvDtype, KvLayout
from decoder.arena_view import MappedArena, map_arena
from decoder.cuda_arena import wrap_tensor
from tests.cuda_recorder import Recorder, gpu_of, host_tensor

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_tokens=4, dtype=KvDtype.FLOAT32)
BLOCKS = 16


class Importer:
    """One mapped arena."""

    def __init__(self, socket: Path, uuid: bytes, *, real: bool) -> None:
        self._socket = socket
        self._recorder = Recorder(uuids=(uuid,))
        self._gpu = Gpu(load_bindings(), 0, uuid) if real else gpu_of(self._recorder, uuid)
        self._wrap = wrap_tensor if real else host_tensor
        self._arena: MappedArena | None = None

    def map(self, token: str) -> str:
        """Map the arena; "ok", or the reason of the refusal, and what is left open then."""
        try:
            self._arena = map_arena(self._socket, bytes.fromhex(token), LAYOUT, BLOCKS, self._gpu, self._wrap)
        except TesseraError as error:
            return f"{error.reason} {self._recorder.leaks()}"
        return "ok"

    def write(self, block: int, value: float) -> None:
        """Fill a block."""
        self._tensor[block] = value
        self._gpu.driver.synchronize()

    def read(self, block: int) -> float:
        """A block's value, where all of it is one."""
        values = self._tensor[block].unique()
        return float(values[0]) if len(values) == 1 else float("nan")

    def nonce(self) -> str:
        """As it stands in the memory."""
        assert self._arena is not None
        return self._arena.read_nonce().hex()

    def hand_back(self, token: str) -> None:
        """Give the memory to a new daemon."""
        assert self._arena is not None
        self._arena.hand_back(self._socket, bytes.fromhex(token))

    @property
    def _tensor(self) -> torch.Tensor:
        assert self._arena is not None
        tensor: torch.Tensor = self._arena.array
        return tensor


def serve(link: socket.socket, importer: Importer) -> None:
    """Until the other side closes."""
    with link, link.makefile("rw") as lines:
        answer: Any = os.getpid()
        while True:
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
            line = lines.readline()
            if not line:
                return
            command, *arguments = json.loads(line)
            answer = getattr(importer, command)(*arguments)


def main() -> None:
    """Fork, and wait for the end of standard input."""
    driver, path, *children = sys.argv[1:]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    links = {int(child.partition(":")[0]): bytes.fromhex(child.partition(":")[2]) for child in children}
    for fd, uuid in links.items():
        if os.fork() == 0:
            for other in links.keys() - {fd}:
                os.close(other)
            serve(socket.socket(fileno=fd), Importer(Path(path), uuid, real=driver == "real"))
            os._exit(0)
    for fd in links:
        os.close(fd)
    sys.stdin.read()


if __name__ == "__main__":
    main()
