"""A client that can be killed or stopped: sends the requests of a file, all at once, and prints what it got.

`python -m tests.e2e.client_process <target> <key file> <requests>`: the last is a file of serialized GenerateRequests,
each after its length as eight bytes. Prints "sent" once they are on their way, and at the end one JSON line: for each
request the token ids of its samples, or the name of the status that it ended with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from common.credentials import read_secret
from common.rpc import open_sync_channel
from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import Background, Stream
from tests.e2e.processes import Process
from tests.e2e.rig import Node

_LENGTH_BYTES = 8
_CALL_SECONDS = 120.0


def client_process(node: Node, requests: Sequence[pb.GenerateRequest], folder: Path) -> Process:
    """A client of `node`, not started yet, with its log and its requests in `folder`."""
    parts = [request.SerializeToString() for request in requests]
    path = folder / "requests"
    path.write_bytes(b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") + part for part in parts))
    arguments = ["-m", "tests.e2e.client_process", node.target, str(node.paths.default_key), str(path)]
    return Process("client", arguments, folder / "client.log")


def outcomes(process: Process) -> list[Any]:
    """What a client that has ended printed last."""
    found: list[Any] = json.loads(process.text().splitlines()[-1])
    return found


def _requests(data: bytes) -> list[pb.GenerateRequest]:
    found = []
    while data:
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        end = _LENGTH_BYTES + length
        found.append(pb.GenerateRequest.FromString(data[_LENGTH_BYTES:end]))
        data = data[end:]
    return found


def main() -> None:
    """Run it."""
    target, key, requests = sys.argv[1], read_secret(Path(sys.argv[2])), _requests(Path(sys.argv[3]).read_bytes())
    channel = open_sync_channel(target)
    running = [Background(Stream(channel, key, request, _CALL_SECONDS)) for request in requests]
    print("sent", flush=True)
    said: list[Any] = []
    for call in running:
        try:
            result = call.result()
            said.append([result.samples[index].token_ids for index in sorted(result.samples)])
        except grpc.RpcError as error:
            said.append(error.code().name)
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
