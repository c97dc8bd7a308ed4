"""Lists every method of a server by its own reflection, and calls any method by name with bytes."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.rpc import bearer_metadata

REFLECTION_METHOD = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def list_methods(channel: grpc.Channel, key: str) -> dict[str, descriptor_pb2.MethodDescriptorProto]:
    """Full path -> descriptor of every method of every service that the server names."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)

    def ask(request: reflection_pb2.ServerReflectionRequest) -> Any:
        return next(iter(stub.ServerReflectionInfo(iter([request]), metadata=bearer_metadata(key), timeout=20)))

    services = ask(reflection_pb2.ServerReflectionRequest(list_services="")).list_services_response.service
    methods: dict[str, descriptor_pb2.MethodDescriptorProto] = {}
    for name in (service.name for service in services):
        answer = ask(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
        for raw in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            for service in file.service:
                if f"{file.package}.{service.name}" == name:
                    methods |= {f"/{name}/{method.name}": method for method in service.method}
    return methods


def call_raw(
    channel: grpc.Channel, path: str, key: str | None, *, scheme: str = "Bearer", seconds: float = 3.0
) -> grpc.StatusCode:
    """Status of a call with one empty message, whatever the method's kind (on the wire all kinds are one).

    DEADLINE_EXCEEDED means that the call was let in and went on.
    """
    metadata = () if key is None else (("authorization", f"{scheme} {key}"),)
    call: Any = channel.stream_stream(path)
    running = call(iter([b""]), metadata=metadata, timeout=seconds)
    try:
        for _ in running:
            pass
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK
