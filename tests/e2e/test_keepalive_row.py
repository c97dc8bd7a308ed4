"""Row 33 of the cases: a client that pings while nothing is said keeps its channel and all its calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.rpc import bearer_metadata
from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import Background, Stream, make_request
from tests.e2e.oracle import Solo
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node


def pinging_channel(target: str, seconds: float) -> grpc.Channel:
    """A channel that pings each so many seconds, with calls and without."""
    options: list[tuple[str, Any]] = [
        ("grpc.keepalive_time_ms", int(seconds * 1000)),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.insecure_channel(target, options=options)


class _Silent(grpc.GenericRpcHandler):
    """A method of a server with default options that says nothing for some seconds."""

    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            deadline = time.monotonic() + 12
            while context.is_active() and time.monotonic() < deadline:
                time.sleep(0.05)
            yield request

        return grpc.unary_stream_rpc_method_handler(answer)


def test_row_33_positive_control_a_default_server_drops_the_channel() -> None:
    """A server with default options ends a channel that pings each second: the case is real."""
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[_Silent()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pinging_channel(f"127.0.0.1:{port}", 1.0) as channel, pytest.raises(grpc.RpcError) as caught:
            call: Any = channel.unary_stream("/x.Y/Z")
            list(call(b"", timeout=30))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "pings" in str(caught.value.details()).lower()
    finally:
        server.stop(None)


@pytest.mark.parametrize(
    ("keepalive", "step", "tokens", "others"),
    [(5.1, 17.0, 1, 0), pytest.param(10.0, 31.0, 2, 10, marks=pytest.mark.slow)],
    ids=["few", "full"],
)
def test_row_33_pings_during_a_long_silence_end_no_call(
    tiny_model: Path, solo: Solo, prompts: Prompts, keepalive: float, step: float, tokens: int, others: int
) -> None:
    """A slow stream and others on one channel that pings in the silence: no GOAWAY, all finish, all equal solo."""
    with Node(tiny_model, faults=[f"step_delay={step}"]) as node, pinging_channel(node.target, keepalive) as channel:
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        requests = [
            make_request(prompts.tokens(16), new=tokens),
            *(make_request(prompts.tokens(9), new=1) for _ in range(others)),
        ]
        calls = [Background(Stream(channel, node.key, request, 900)) for request in requests]
        for request, call in zip(requests, calls, strict=True):
            solo.check(request, call.result(900))
        assert grpc.ChannelConnectivity.TRANSIENT_FAILURE not in states
        assert grpc.ChannelConnectivity.IDLE not in states[1:], "the connection was never given up"
        stub_call = channel.unary_unary(
            "/tessera.inference.v1.InferenceService/ListModels",
            request_serializer=pb.ListModelsRequest.SerializeToString,
            response_deserializer=pb.ListModelsResponse.FromString,
        )
        assert stub_call(pb.ListModelsRequest(), metadata=bearer_metadata(node.key), timeout=20).models
