"""Rows 13 and 14 of the cases, in depth: odd keys, tenants and names, and internal fields sent in public."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from common.rpc import bearer_metadata
from tessera.admin.v1 import admin_pb2
from tessera.cache.v1 import cache_pb2
from tessera.common.v1 import common_pb2
from tessera.decode.v1 import decode_pb2
from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import Background, make_request
from tests.e2e.oracle import Solo
from tests.e2e.prompts import Prompts
from tests.e2e.raw_http2 import answered
from tests.e2e.rig import Node

B = 16
GENERATE = "/tessera.inference.v1.InferenceService/Generate"
LIST_MODELS = "/tessera.inference.v1.InferenceService/ListModels"
CREATE_TENANT = "/tessera.admin.v1.AdminService/CreateTenant"
ODD = {
    "empty": b"", "one megabyte": b"k" * (1 << 20), "slash": b"/", "parent": b"..", "path": b"../../default.key",
    "nul": b"\0", "percent": b"%", "percent nul": b"%00", "emoji": "\U0001f511".encode(),
    "lone surrogate": b"\xed\xa0\x80", "no utf-8": b"\xff\xfe", "129 characters": b"k" * 129,
    "newline": b"a\nb", "at": b"@public",
}  # fmt: skip
REFUSED = (
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED,
)  # fmt: skip


@pytest.fixture
def neighbour(node: Node, solo: Solo, prompts: Prompts) -> Iterator[Background]:
    """Another tenant's stream that runs beside the test and must equal its solo run in the end."""
    request = make_request(prompts.tokens(2 * B), new=300)
    running = node.background(request, key=node.new_tenant(f"beside-{prompts.random.randrange(10**9)}"))
    yield running
    solo.check(request, running.result())
    solo.probe(node)


def varint(number: int) -> bytes:
    """An unsigned integer as protobuf writes it."""
    parts = []
    while number >= 128:
        parts.append(number % 128 + 128)
        number //= 128
    return bytes([*parts, number])


def with_field(message: bytes, number: int, value: bytes) -> bytes:
    """A message with one more length-delimited field, whatever its bytes."""
    return message + varint(number << 3 | 2) + varint(len(value)) + value


def send(node: Node, request: bytes, *metadata: tuple[str, str]) -> tuple[grpc.StatusCode, list[pb.GenerateResponse]]:
    """Status and messages of a Generate call with these bytes."""
    call: Any = node.channel.unary_stream(GENERATE, response_deserializer=pb.GenerateResponse.FromString)
    received: list[pb.GenerateResponse] = []
    try:
        received.extend(call(request, metadata=(*bearer_metadata(node.key), *metadata), timeout=30))
    except grpc.RpcError as error:
        return error.code(), received
    return grpc.StatusCode.OK, received


def test_row_13_no_odd_key_is_let_in(node: Node, neighbour: Background) -> None:
    """Each odd credential, byte by byte as given, with and without the scheme, gets no answer; the right one does."""
    host, port = node.target.split(":")
    address = (host, int(port))
    assert answered(address, LIST_MODELS, b"", b"Bearer " + node.key.encode()), "positive control"
    for name, value in ODD.items():
        for header in (b"Bearer " + value, value, b"Bearer " + node.key.encode() + value):
            if header.strip() != b"Bearer " + node.key.encode():
                assert not answered(address, LIST_MODELS, b"", header), name


@pytest.mark.parametrize(
    ("field", "nested"),
    [("model", ()), ("adapter", ()), ("request_label", ()), ("scope_name", ("cache",)), ("handle", ("session",))],
)
def test_row_13_odd_names_in_a_request_are_refused_or_mean_nothing(
    node: Node, solo: Solo, prompts: Prompts, neighbour: Background, field: str, nested: tuple[str, ...]
) -> None:
    """Each odd value in each field that names something: refused, or served as without it."""
    request = make_request(prompts.tokens(8), new=4)
    if field == "scope_name":
        request.cache.scope = common_pb2.SCOPE_GROUP
    served = 0
    for name, value in ODD.items():
        descriptor: Any = pb.GenerateRequest.DESCRIPTOR
        numbers = []
        for part in nested:
            numbers.append(descriptor.fields_by_name[part].number)
            descriptor = descriptor.fields_by_name[part].message_type
        inner = with_field(b"", descriptor.fields_by_name[field].number, value)
        for number in reversed(numbers):
            inner = with_field(b"", number, inner)
        code, received = send(node, request.SerializeToString() + inner)
        if code is grpc.StatusCode.OK:
            tokens = [token for event in received for token in event.delta.token_ids]
            assert tokens == solo(request).token_ids, name
            served += 1
        else:
            assert code in REFUSED, (name, code)
    assert served or field == "scope_name", "positive control: the empty value is none"


def test_row_13_odd_tenants_are_never_made(node: Node, neighbour: Background) -> None:
    """Each odd value as the name of a tenant is INVALID_ARGUMENT and makes nothing; a plain name makes one."""
    call: Any = node.admin.channel.unary_unary(CREATE_TENANT)
    metadata = bearer_metadata(node.admin_key)
    before = {row.tenant for row in node.admin.call("ListTenants", admin_pb2.ListTenantsRequest()).tenants}
    for name, value in ODD.items():
        with pytest.raises(grpc.RpcError) as caught:
            call(with_field(b"", 1, value), metadata=metadata, timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (name, caught.value)
    assert {row.tenant for row in node.admin.call("ListTenants", admin_pb2.ListTenantsRequest()).tenants} == before
    plain = f"plain-{len(before)}"
    call(with_field(b"", 1, plain.encode()), metadata=metadata, timeout=20)
    assert plain in {row.tenant for row in node.admin.call("ListTenants", admin_pb2.ListTenantsRequest()).tenants}


def fill(message: Message, depth: int = 3) -> Message:
    """Sets every field of a message, and of those in it, to a magic value."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    for field in fields:
        magic: Any = 7
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_MESSAGE:
                if depth and not (field.message_type.has_options and field.message_type.GetOptions().map_entry):
                    target = getattr(message, field.name)
                    target = target.add() if field.is_repeated else target
                    target.SetInParent()
                    fill(target, depth - 1)
                continue
            case FieldDescriptor.CPPTYPE_STRING:
                magic = "magic" if field.type == FieldDescriptor.TYPE_STRING else b"magic"
            case FieldDescriptor.CPPTYPE_BOOL:
                magic = True
            case FieldDescriptor.CPPTYPE_ENUM:
                magic = field.enum_type.values[-1].number
        if field.is_repeated:
            getattr(message, field.name).append(magic)
        else:
            setattr(message, field.name, magic)
    return message


def internal_messages() -> list[Message]:
    """One filled message of each type that only internal services use."""
    files = (cache_pb2.DESCRIPTOR, decode_pb2.DESCRIPTOR, common_pb2.DESCRIPTOR)
    return [fill(GetMessageClass(kind)()) for file in files for kind in file.message_types_by_name.values()]


def test_row_14_every_internal_message_and_field_name_is_ignored_or_refused(
    node: Node, solo: Solo, prompts: Prompts
) -> None:
    """Each internal message sent as a request, behind one, and in an unknown field of one, and each internal field name
    as a header: refused, or the request is served as without; the pool holds no more than the requests need."""
    messages = internal_messages()
    assert len(messages) > 40, "positive control: they are found"
    request = make_request(prompts.tokens(10 * B), new=4, no_store=True)
    plain, expected = request.SerializeToString(), solo(request).token_ids
    refused = served = 0
    for message in messages:
        code, _ = send(node, message.SerializeToString())
        # What is by chance a prompt without a limit of its answer outgrows the pool.
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED, *REFUSED), message.DESCRIPTOR.full_name
        refused += code in REFUSED
    node.fresh()
    for message in messages:
        raw = message.SerializeToString()
        code, _ = send(node, plain + raw)
        assert code in (grpc.StatusCode.OK, *REFUSED), (message.DESCRIPTOR.full_name, code)
        refused += code in REFUSED
        code, received = send(node, with_field(plain, 2000, raw))
        assert code is grpc.StatusCode.OK
        assert [token for event in received for token in event.delta.token_ids] == expected
        served += 1
    assert refused and served, "positive control: both happened"
    names = sorted({field.name for message in messages for field in message.DESCRIPTOR.fields})
    headers = [(name.replace("_", "-"), "7") for name in names] + [(name, "7") for name in names if "_" in name]
    headers = [(name, value) for name, value in headers if not name.endswith("-bin")]
    for at in range(0, len(headers), 60):
        code, received = send(node, plain, *headers[at : at + 60])
        assert code is grpc.StatusCode.OK
        assert [token for event in received for token in event.delta.token_ids] == expected
    assert node.quiet().indexed_blocks == 0, "nothing was asked to be stored"
