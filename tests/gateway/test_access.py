"""Who may call: every RPC needs a known credential, and only the daemon says which are known."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.errors import Unauthenticated
from common.rpc import bearer_metadata
from gateway.auth import MAX_KEPT, DaemonAuthenticator, current_caller
from tessera.cache.v1 import cache_pb2
from tessera.inference.v1 import inference_pb2 as pb
from tests.gateway.support import Node, async_test, collect, details_of, eventually, node, request

OPEN = "/grpc.health.v1.Health/"


async def methods_by_reflection(here: Node) -> list[tuple[str, bool]]:
    """Every method that the server has: its path, and whether it streams responses."""
    found = []
    async with here.channel() as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def ask(message: Any) -> Any:
            call: Any = stub.ServerReflectionInfo(iter([message]))
            return await call.read()

        listed = await ask(reflection_pb2.ServerReflectionRequest(list_services=""))
        for service in listed.list_services_response.service:
            answer = await ask(reflection_pb2.ServerReflectionRequest(file_containing_symbol=service.name))
            for raw in answer.file_descriptor_response.file_descriptor_proto:
                file = descriptor_pb2.FileDescriptorProto.FromString(raw)
                for described in file.service:
                    if f"{file.package}.{described.name}" == service.name:
                        found += [(f"/{service.name}/{m.name}", m.server_streaming) for m in described.method]
    return found


async def call_raw(channel: Any, path: str, metadata: Any = None) -> grpc.StatusCode:
    """Call a method with an empty message: OK if it answers anything, else the status it ends with."""
    call = channel.unary_stream(path)(b"", metadata=metadata, timeout=10.0)
    try:
        if await call.read() is not grpc.aio.EOF:
            call.cancel()
            return grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await call.code()  # type: ignore[no-any-return]


@async_test
async def test_every_rpc_but_health_is_refused_without_a_credential() -> None:
    """All methods that reflection lists are refused without a key and with a wrong one, and not with a right one."""
    async with node() as here, grpc.aio.insecure_channel(here.target) as channel:
        methods = await methods_by_reflection(here)
        paths = {path for path, _ in methods}
        assert {f"/tessera.inference.v1.InferenceService/{name}" for name in
                ("Generate", "Tokenize", "Detokenize", "ListModels")} <= paths  # fmt: skip
        assert any(path.startswith("/grpc.reflection.") for path in paths)
        for path in sorted(paths):
            for metadata in (None, bearer_metadata("wrong"), bearer_metadata("internal_test_secret")):
                code = await call_raw(channel, path, metadata)
                if path.startswith(OPEN):
                    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED), path
                else:
                    assert code is grpc.StatusCode.UNAUTHENTICATED, path
            served = await call_raw(channel, path, bearer_metadata("key-a"))
            # The empty message is no valid prompt; that it is judged at all shows that the call was let in.
            allowed = {"Generate": grpc.StatusCode.INVALID_ARGUMENT, "Tokenize": grpc.StatusCode.INVALID_ARGUMENT}
            allowed |= dict.fromkeys(("ForkSession", "DropSession"), grpc.StatusCode.NOT_FOUND)
            allowed["RollbackSession"] = grpc.StatusCode.INVALID_ARGUMENT
            if not path.startswith(OPEN):
                assert served is allowed.get(path.rpartition("/")[2], grpc.StatusCode.OK), path
        unknown = await call_raw(channel, "/tessera.inference.v1.InferenceService/NoSuchMethod")
        assert unknown in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)


BAD_HEADERS = [
    [("authorization", "")],
    [("authorization", "Bearer")],
    [("authorization", "Bearer ")],
    [("authorization", "Basic key-a")],
    [("authorization", "key-a")],
    [("authorization", "Bearer key-a "), ("authorization", "Bearer key-a")],
    [("authorization", "Bearer " + "k" * 129)],
    [("authorization", "Bearer " + "k" * 8000)],
    [("authorization", "Bearer /")],
    [("authorization", "Bearer ..")],
    [("authorization", "Bearer %00%s")],
    [("authorization-bin", b"Bearer key-a")],
    [("x-tenant", "tenant-a")],
]


@async_test
async def test_malformed_credentials_are_refused_and_leave_a_neighbour_whole() -> None:
    """Row 13: whatever the header holds, the answer is UNAUTHENTICATED and another tenant's stream goes on."""
    async with node() as here, grpc.aio.insecure_channel(here.target) as channel, here.channel("key-b") as other:
        here.decoder.step_gate = lambda: asyncio.sleep(0.002)
        neighbour = asyncio.create_task(collect(here.stub(other).Generate(request(max_tokens=300))))
        await eventually(lambda: here.decoder.produced > 0)
        for metadata in BAD_HEADERS:
            call = here.stub(channel).Generate(request(), metadata=metadata)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, metadata
        assert len((await neighbour).token_ids()) == 300
        assert len(here.decoder.submitted) == 1
        answer = await collect(here.stub(channel).Generate(request(), metadata=bearer_metadata("key-a")))
        assert answer.kinds[-1] == "summary"


@async_test
async def test_a_huge_credential_is_refused_and_the_server_goes_on() -> None:
    """Row 13: a megabyte of key is refused, by the transport or by us, and the next call is served."""
    async with node() as here, grpc.aio.insecure_channel(here.target) as channel:
        call = here.stub(channel).ListModels(pb.ListModelsRequest(), metadata=bearer_metadata("k" * 1_000_000))
        assert await call.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert here.credentials.asked == 0
        answer = await collect(here.stub(channel).Generate(request(), metadata=bearer_metadata("key-a")))
        assert answer.kinds[-1] == "summary"


@async_test
async def test_the_tenant_comes_from_the_credential_alone() -> None:
    """Whatever labels and metadata say, the grant that goes to the decoder is that of the key."""
    async with node() as here, grpc.aio.insecure_channel(here.target) as channel:
        message = request(max_tokens=1)
        message.request_label = "tenant-b"
        forged = (*bearer_metadata("key-a"), ("x-tenant", "tenant-b"), ("tenant", "tenant-b"))
        await collect(here.stub(channel).Generate(message, metadata=forged))
        await collect(here.stub(channel).Generate(message, metadata=bearer_metadata("key-b")))
        assert [submit.grant for submit in here.decoder.submitted] == [b"grant of tenant-a", b"grant of tenant-b"]
        turns = [(submit.tenant, submit.tenant_weight) for submit in here.decoder.submitted]
        assert turns == [("tenant-a", 2.5), ("tenant-b", 2.5)]


@async_test
async def test_concurrent_calls_of_two_tenants_keep_their_own_grants() -> None:
    """Interleaved calls never see each other's tenant."""
    async with node() as here, here.channel("key-a") as first, here.channel("key-b") as second:
        calls = [
            collect(here.stub(channel).Generate(request(text, max_tokens=3)))
            for _ in range(20)
            for channel, text in ((first, "from a"), (second, "from b"))
        ]
        await asyncio.gather(*calls)
        by_grant = {(submit.grant, bytes(submit.tokens)) for submit in here.decoder.submitted}
        assert len(by_grant) == 2


@async_test
async def test_while_the_daemon_is_away_calls_are_unavailable_and_health_says_so() -> None:
    """Without the credential service nobody is let in and nobody is called unknown; health follows in a second."""
    async with node() as here, here.channel("key-a") as channel, grpc.aio.insecure_channel(here.target) as bare:
        await here.daemon.kill()
        await eventually(lambda: not here.gateway.is_serving, seconds=2.0)
        health = await health_pb2_grpc.HealthStub(bare).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(here.stub(channel).Generate(request()))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert details_of(caught.value, error_details_pb2.RetryInfo) is not None
        await here.daemon.start()
        await eventually(lambda: here.gateway.is_serving)
        assert (await collect(here.stub(channel).Generate(request()))).kinds[-1] == "summary"


@async_test
async def test_a_daemon_that_is_back_is_found_before_a_call_is_refused() -> None:
    """The channel pauses between attempts to connect; a call that comes meanwhile waits for the next one."""
    async with node() as here, here.channel("key-a") as channel:
        await here.daemon.kill()
        await eventually(lambda: not here.gateway.is_serving, seconds=2.0)
        await here.daemon.start()
        assert (await collect(here.stub(channel).Generate(request()))).kinds[-1] == "summary"


@async_test
async def test_health_can_be_watched_without_a_credential() -> None:
    """Watch tells each change, for the server and for the service by name."""
    async with node() as here, grpc.aio.insecure_channel(here.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "tessera.inference.v1.InferenceService"):
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            await here.decoder_servers[0].kill()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await here.decoder_servers[0].start()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()


class _Stub:
    """A CredentialService stub with a scripted answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.expires = 60.0
        self.error: Unauthenticated | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def Authenticate(self, message: Any, timeout: float) -> Any:  # noqa: N802
        self.asked.append(message.key)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return cache_pb2.AuthenticateResponse(tenant="t", grant=b"g", expires_in_seconds=self.expires)


def authenticator(stub: _Stub, now: list[float]) -> DaemonAuthenticator:
    made = DaemonAuthenticator(grpc.aio.insecure_channel("unix:/nonexistent"), lambda: now[0])
    made._stub = stub  # type: ignore[assignment]
    return made


@async_test
async def test_an_answer_is_kept_for_a_second_and_no_longer() -> None:
    """Within a second the daemon is asked once for a key; after it, again. A grant that ends sooner is not kept."""
    stub, now = _Stub(), [100.0]
    auth = authenticator(stub, now)
    for moment in (100.0, 100.2, 100.49):
        now[0] = moment
        assert (await auth.authenticate("k")).tenant == "t"
    assert stub.asked == ["k"]
    now[0] = 101.0
    await auth.authenticate("k")
    assert stub.asked == ["k", "k"]
    stub.expires = 0.25
    await auth.authenticate("other")
    now[0] = 101.3
    await auth.authenticate("other")
    assert stub.asked[2:] == ["other", "other"]


@async_test
async def test_a_key_in_use_is_asked_for_anew_before_its_second_is_over() -> None:
    """From half of its time on a use asks, once, and does not wait; what comes is good for a second from the question.
    An answer that does not come leaves the old one's end where it was."""
    stub, now = _Stub(), [100.0]
    auth = authenticator(stub, now)
    await auth.authenticate("k")
    stub.gate.clear()
    now[0] = 100.5
    for _ in range(3):
        await auth.authenticate("k")  # the daemon is silent
    await eventually(lambda: len(stub.asked) == 2)
    now[0] = 101.0
    late = asyncio.create_task(auth.authenticate("k"))
    await asyncio.sleep(0)
    assert not late.done(), "the old answer is over"
    stub.gate.set()
    await late
    now[0] = 101.49  # the question was asked at 100.5
    await auth.authenticate("k")
    await eventually(lambda: len(stub.asked) == 3)
    assert stub.asked == ["k", "k", "k"]


@async_test
async def test_a_key_that_is_refused_when_asked_for_anew_is_refused_at_once() -> None:
    """A revoked key does not live out the second of the answer before."""
    stub, now = _Stub(), [100.0]
    auth = authenticator(stub, now)
    await auth.authenticate("k")
    stub.error = Unauthenticated("the credential is not known", reason="UNKNOWN_CREDENTIAL")
    now[0] = 100.5
    await auth.authenticate("k")
    await eventually(lambda: not auth._asking)
    with pytest.raises(Unauthenticated):
        await auth.authenticate("k")
    stub.error = None
    assert (await auth.authenticate("k")).tenant == "t"


@async_test
async def test_a_key_is_not_kept_and_the_cache_is_bounded() -> None:
    """Answers are kept under a keyed hash, at most so many; the key itself is in none of the structures."""
    stub, now = _Stub(), [0.0]
    auth = authenticator(stub, now)
    for number in range(MAX_KEPT + 10):
        await auth.authenticate(f"secret-{number}")
    assert len(auth._kept) == MAX_KEPT
    assert not auth._asking
    assert b"secret" not in repr(auth._kept).encode()


@async_test
async def test_callers_share_a_question_and_survive_each_others_cancel() -> None:
    """Many calls with one key ask once; the one that is cancelled does not take the others with it."""
    stub, now = _Stub(), [0.0]
    stub.gate.clear()
    auth = authenticator(stub, now)
    tasks = [asyncio.create_task(auth.authenticate("k")) for _ in range(5)]
    await eventually(lambda: bool(stub.asked))
    tasks[0].cancel()
    stub.gate.set()
    callers = await asyncio.gather(*tasks[1:])
    assert len(callers) == 4
    assert stub.asked == ["k"]


@async_test
async def test_a_string_that_no_message_can_carry_is_unauthenticated() -> None:
    """Lone surrogates are refused without asking anybody."""
    stub, now = _Stub(), [0.0]
    auth = authenticator(stub, now)
    with pytest.raises(Unauthenticated):
        await auth.authenticate("\ud800")
    assert stub.asked == []
    for odd in ("\x00", "🙂" * 32, "k" * 129):
        await auth.authenticate(odd)


def test_outside_of_a_call_there_is_no_caller() -> None:
    """Code that no interceptor guarded finds no tenant."""
    with pytest.raises(Unauthenticated):
        current_caller()
