"""`python -m tests.weights_loader FD...`: for each, a process that loads shared weights as a decoder on a GPU does.

They are forked from one, which imports torch once, and told what to do by lines of JSON, [command, arguments...]; the
first line that each sends is its process id. The GPU's driver is a recorder, or the `real` one; or there is no GPU, and
memory is a memfd.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.cuda_driver import Gpu, load_bindings
from common.errors import ResourceExhausted, TesseraError
from decoder.cuda_arena import wrap_tensor
from decoder.models.config import ModelConfig, digest_config
from decoder.models.device_layout import device_layout
from decoder.models.device_weights import DeviceWeights, load_weights
from decoder.models.rope import RopeConfig
from decoder.shared_weights import SharedWeights, WeightsSource, weights_key
from decoder.weights.loader import expected_shapes
from tests.cuda_recorder import Recorder, gpu_of, host_tensor

CONFIG = ModelConfig("llama", 200, 2, 4, 2, 16, 64, 96, 1e-6, RopeConfig(1e4, 16), 128, (2,), None, False)
LAYOUT = device_layout(CONFIG, torch.bfloat16)


def key_of(model: int) -> bytes:
    """Of the weights number `model`."""
    return weights_key(digest_config(CONFIG, bytes([model]) * 32, "bfloat16/gpu"), LAYOUT)


class Loader:
    """One process's weights."""

    def __init__(self, lines: Any) -> None:
        self._lines = lines
        self._recorder: Recorder | None = None
        self._shared: SharedWeights | None = None
        self._weights: DeviceWeights | None = None

    def load(self, path: str, secret: str, device: str, model: int, stall: int = -1) -> dict[str, Any]:
        """Load weights number `model`; how many tensors were read, or why not. Before tensor number `stall` is read,
        one line is written, and one is waited for."""
        self._recorder = Recorder() if device == "recorder" else None
        gpu = None if self._recorder is None else gpu_of(self._recorder)
        if device == "real":
            driver = load_bindings()
            gpu = Gpu(driver, 0, driver.device_uuids()[0])
        source = WeightsSource(Path(path), secret, gpu, wrap_tensor if device == "real" else host_tensor)
        shapes, count = expected_shapes(CONFIG), 0
        digests = digest_config(CONFIG, bytes([model]) * 32, "bfloat16/gpu")

        def read(name: str) -> Any:
            nonlocal count
            if count == stall:
                self.answer("stalled")
                self._lines.readline()
            count += 1
            return np.full(shapes[name], model + count, np.float32)

        def memory(layout: Any) -> SharedWeights:
            self._shared = source.weights_of(digests, layout)
            return self._shared

        try:
            self._weights = load_weights(CONFIG, read, torch.bfloat16, lambda done: None, memory)
        except TesseraError as error:
            numbers = [error.needed, error.usable] if isinstance(error, ResourceExhausted) else []
            return {"reason": error.reason, "numbers": numbers, "leaks": self._leaks()}
        return {"read": count}

    def _leaks(self) -> dict[str, int]:
        return {} if self._recorder is None else self._recorder.leaks()

    def content(self) -> str:
        """A digest of every tensor."""
        total = hashlib.sha256()
        for tensor in self._tensors():
            total.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return total.hexdigest()

    def _tensors(self) -> Iterable[torch.Tensor]:
        assert self._weights is not None
        yield from (self._weights.embedding, self._weights.head, self._weights.final_norm)
        for layer in self._weights.layers:
            yield from (layer.input_norm, layer.qkv, layer.output, layer.mlp_norm, layer.mlp.gate_up, layer.mlp.down)
            yield from layer.rotation

    def inode(self) -> int:
        """Of the memory that the tensors lie in, as the kernel's table of mappings has it."""
        address = next(iter(self._tensors())).data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split()
            start, _, end = fields[0].partition("-")
            if int(start, 16) <= address < int(end, 16):
                assert fields[1] == "r--s", fields[1]
                return int(fields[4])
        return 0

    def write(self) -> None:
        """Into the first tensor."""
        first = next(iter(self._tensors()))
        first[0] = 0.0
        if first.is_cuda:
            torch.cuda.synchronize()

    def close(self) -> dict[str, int]:
        """Let everything go; what is left open."""
        assert self._shared is not None
        self._weights = None
        self._shared.close()
        self._shared = None
        return self._leaks()

    def answer(self, value: Any) -> None:
        """One line."""
        self._lines.write(json.dumps(value) + "\n")
        self._lines.flush()


def serve(link: socket.socket) -> None:
    """Until the other side closes."""
    with contextlib.suppress(ConnectionError), link, link.makefile("rw") as lines:
        loader = Loader(lines)
        loader.answer(os.getpid())
        while line := lines.readline():
            command, *arguments = json.loads(line)
            loader.answer(getattr(loader, command)(*arguments))


def main() -> None:
    """Fork, and wait for the end of standard input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    fds = [int(word) for word in sys.argv[1:]]
    for fd in fds:
        if os.fork() == 0:
            for other in fds:
                if other != fd:
                    os.close(other)
            serve(socket.socket(fileno=fd))
            os._exit(0)
    for fd in fds:
        os.close(fd)
    sys.stdin.read()


if __name__ == "__main__":
    main()
