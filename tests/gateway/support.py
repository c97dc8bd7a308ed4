"""A node around a real gateway: a fake credential service and fake decoders on real Unix sockets.

The fake decoder is a deterministic model (it echoes the prompt unless given a script) that keeps the contract of
DecodeService: welcome first, one window for each sample, one finished for each sample, ended last.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.rpc import status_pb2

from common.config import Options
from common.credentials import write_secret
from common.errors import Unauthenticated
from common.interceptors import BearerInterceptor, ErrorInterceptor
from common.paths import StatePaths
from common.rpc import add_health_and_reflection, bind, make_server, open_channel, unix_target
from common.tokens import unpack_tokens
from gateway.application import Gateway
from gateway.tokenizer import ModelTokenizer, load_tokenizer
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc
from tessera.decode.v1 import decode_pb2, decode_pb2_grpc
from tessera.inference.v1 import inference_pb2 as pb
from tessera.inference.v1 import inference_pb2_grpc
from tests.tiny_models import make_tiny_llama

INTERNAL_SECRET = "internal_test_secret"
KEYS = {"key-a": "tenant-a", "key-b": "tenant-b"}
VOCABULARY = 512
CONTEXT = 4096
EOS = 2
TEST_SECONDS = 60.0


def async_test(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine test on its own loop, with an upper bound on its time."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(TEST_SECONDS):
                await function(*arguments, **options)

        asyncio.run(bounded())

    return wrapper


async def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Poll a condition until it holds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        if loop.time() > deadline:
            raise AssertionError("the state was not reached in time")
        await asyncio.sleep(0.005)


@functools.cache
def tiny_tokenizer() -> ModelTokenizer:
    """A byte-level tokenizer of 512 ids with a chat template."""
    folder = Path(tempfile.mkdtemp(prefix="tessera-tok-"))
    try:
        return load_tokenizer(make_tiny_llama(folder, layers=1, hidden=16, heads=1, kv_heads=1, vocab=VOCABULARY))
    finally:
        shutil.rmtree(folder)


def ids_of(text: str) -> list[int]:
    """Ids of `text` in the tiny tokenizer."""
    return tiny_tokenizer().encode(text, add_special_tokens=False)


class FakeCredentials(cache_pb2_grpc.CredentialServiceServicer):
    """Knows `KEYS`; counts how often it is asked."""

    def __init__(self) -> None:
        self.keys = dict(KEYS)
        self.asked = 0

    async def Authenticate(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked += 1
        tenant = self.keys.get(request.key)
        if tenant is None:
            raise Unauthenticated("the key is not known", reason="UNKNOWN_KEY")
        return cache_pb2.AuthenticateResponse(
            tenant=tenant, grant=b"grant of " + tenant.encode(), expires_in_seconds=60, weight=2.5
        )


Script = Callable[[decode_pb2.Submit], Sequence[Sequence[int]]]


def echo(submit: decode_pb2.Submit) -> list[list[int]]:
    """Every sample says the prompt again and again."""
    prompt = unpack_tokens(submit.tokens).tolist()
    return [(prompt * (submit.stopping.max_tokens // len(prompt) + 1)) for _ in range(submit.sampling.n)]


@dataclass
class _Running:
    submit: decode_pb2.Submit
    consumed: int = 0
    cancelled_samples: set[int] = field(default_factory=set)
    finished_samples: set[int] = field(default_factory=set)
    moved: asyncio.Event = field(default_factory=asyncio.Event)


class FakeBranches(cache_pb2_grpc.BranchServiceServicer):
    """Remembers what it is asked; `refusal` is raised instead of an answer."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refusal: Exception | None = None

    def _take(self, request: Any) -> None:
        self.asked.append(request)
        if self.refusal is not None:
            raise self.refusal

    async def ForkBranch(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._take(request)
        handles = [bytes([number]) * 16 for number in range(1, request.count + 1)]
        return cache_pb2.ForkBranchResponse(handles=handles, num_tokens=9)

    async def RollbackBranch(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._take(request)
        return cache_pb2.RollbackBranchResponse()

    async def DropBranch(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._take(request)
        return cache_pb2.DropBranchResponse()


class FakeDecoder(decode_pb2_grpc.DecodeServiceServicer):
    """A decoder without a model. Tests set its attributes and read what it was sent."""

    def __init__(self) -> None:
        self.script: Script = echo
        self.failure: decode_pb2.RequestFailed | None = None
        self.tokens_per_step = 1
        self.ignore_window = False
        self.base_tokens: list[int] = []  # of the one kept conversation that it knows
        self.handle = bytes(range(16))
        self.window = 256
        self.model = pb.Model(
            name="tiny", vocab_size=VOCABULARY, max_context_tokens=CONTEXT, block_tokens=16, dtype="float32",
            kv_dtype="float32",
        )  # fmt: skip
        self.gate = asyncio.Event()  # requests do not start before it is set
        self.gate.set()
        self.step_gate: Callable[[], Awaitable[None]] | None = None
        self.submitted: list[decode_pb2.Submit] = []
        self.cancelled: list[tuple[int, int | None]] = []
        self.consumed: list[tuple[int, int]] = []
        self.produced = 0
        self.running: dict[int, _Running] = {}
        self.connections = 0

    async def Connect(self, requests: Any, context: Any) -> None:  # noqa: N802
        self.connections += 1
        outgoing: asyncio.Queue[decode_pb2.StepOutput] = asyncio.Queue()
        welcome = decode_pb2.Welcome(model=self.model, eos_token_ids=[EOS], max_batch=32, window_tokens=self.window)
        await context.write(decode_pb2.ConnectResponse(welcome=welcome))
        tasks: dict[int, asyncio.Task[None]] = {}
        reader = asyncio.create_task(self._read(requests, outgoing, tasks))
        try:
            while True:
                await context.write(decode_pb2.ConnectResponse(step=await outgoing.get()))
        finally:
            for task in (reader, *tasks.values()):
                task.cancel()
            self.running.clear()

    async def _read(self, requests: Any, outgoing: Any, tasks: dict[int, asyncio.Task[None]]) -> None:
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "submit":
                submit = message.submit
                self.submitted.append(submit)
                self.running[submit.request] = _Running(submit)
                tasks[submit.request] = asyncio.create_task(self._generate(self.running[submit.request], outgoing))
            elif kind == "cancel":
                number, index = message.cancel.request, message.cancel.index
                sample = index if message.cancel.HasField("index") else None
                self.cancelled.append((number, sample))
                state = self.running.get(number)
                if state is not None and sample is None:
                    tasks[number].cancel()
                    del self.running[number]
                elif state is not None and sample is not None:
                    (state.finished_samples if message.cancel.finish else state.cancelled_samples).add(sample)
                    state.moved.set()
            else:
                self.consumed.append((message.consumed.request, message.consumed.tokens))
                state = self.running.get(message.consumed.request)
                if state is not None:
                    state.consumed = message.consumed.tokens
                    state.moved.set()

    async def _generate(self, state: _Running, outgoing: Any) -> None:
        submit, number = state.submit, state.submit.request
        await self.gate.wait()
        if self.failure is not None:
            failed = decode_pb2.RequestFailed()
            failed.CopyFrom(self.failure)
            failed.request = number
            outgoing.put_nowait(decode_pb2.StepOutput(failed=[failed]))
            return
        samples = self.script(submit)
        ends = set(submit.stopping.stop_token_ids) | (set() if submit.stopping.ignore_eos else {EOS})
        at = [0] * len(samples)
        live, first, total = set(range(len(samples))), True, 0
        while live:
            while (
                not self.ignore_window
                and total - state.consumed >= self.window * len(samples)
                and not live & state.cancelled_samples
            ):
                state.moved.clear()
                await state.moved.wait()
            if self.step_gate is not None:
                await self.step_gate()
            step = decode_pb2.StepOutput()
            if first:
                base = self.base_tokens[: submit.session_tokens or None] if submit.session_handle else []
                prompt_tokens = len(base) + len(submit.tokens) // 4
                step.started.add(
                    request=number, cached_tokens=1, queue_nanoseconds=1000, base_tokens=base[-64:],
                    prompt_tokens=prompt_tokens,
                )  # fmt: skip
                first = False
            for index in sorted(live):
                if index in state.cancelled_samples:
                    live.discard(index)
                    continue
                if index in state.finished_samples:
                    step.finished.add(request=number, index=index, reason=pb.FINISH_REASON_STOP,
                                      session_handle=self.handle, session_tokens=prompt_tokens + at[index])  # fmt: skip
                    live.discard(index)
                    continue
                tokens, reason, stop = self._take(samples[index], at, index, submit.stopping.max_tokens, ends)
                total += len(tokens)
                self.produced += len(tokens)
                for token in tokens:  # one entry each, as the decoder does
                    entry = step.tokens.add(request=number, index=index, token_ids=[token])
                    if submit.output.HasField("logprobs"):
                        entry.logprobs.add(token_id=token, logprob=-1.0)
                if reason is not None:
                    end = step.finished.add(request=number, index=index, reason=reason, stop_token_id=stop)
                    if submit.keep_seconds:
                        end.session_handle = self.handle
                        end.session_tokens = prompt_tokens + at[index] - (stop is not None)
                    live.discard(index)
            if not live:
                step.ended.add(request=number, completion_tokens=total, cow_copies=3)
            outgoing.put_nowait(step)
            await asyncio.sleep(0)
        del self.running[number]

    def _take(
        self, script: Sequence[int], at: list[int], index: int, max_tokens: int, ends: set[int]
    ) -> tuple[list[int], Any, int | None]:
        taken: list[int] = []
        for token in script[at[index] : at[index] + self.tokens_per_step]:
            taken.append(token)
            at[index] += 1
            if token in ends:
                return taken, pb.FINISH_REASON_STOP, token
            if at[index] == max_tokens or at[index] == len(script):
                return taken, pb.FINISH_REASON_LENGTH, None
        return taken, None, None


class FakeServer:
    """A servicer on a Unix socket that can die and come back."""

    def __init__(self, path: Path, add: Callable[[grpc.aio.Server], None], name: str) -> None:
        self._path, self._add, self._name = path, add, name
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = make_server([ErrorInterceptor(), BearerInterceptor(INTERNAL_SECRET)])
        self._add(self._server)
        health = await add_health_and_reflection(self._server, [self._name], with_reflection=False)
        bind(self._server, unix_target(self._path))
        await self._server.start()
        await health.set(True)

    async def kill(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None


@dataclass
class Node:
    """A running gateway and what is around it."""

    gateway: Gateway
    credentials: FakeCredentials
    branches: FakeBranches
    daemon: FakeServer
    decoders: list[FakeDecoder]
    decoder_servers: list[FakeServer]
    state_dir: Path

    @property
    def decoder(self) -> FakeDecoder:
        return self.decoders[0]

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.gateway.port}"

    def channel(self, key: str | None = "key-a") -> grpc.aio.Channel:
        return open_channel(self.target, key)

    def narrow_channel(self) -> grpc.aio.Channel:
        """A channel that takes few bytes ahead of its reader; the default grows to megabytes on loopback."""
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16 * 1024)]
        return grpc.aio.insecure_channel(self.target, options=options)

    def stub(self, channel: grpc.aio.Channel) -> inference_pb2_grpc.InferenceServiceStub:
        return inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]


def make_options(state_dir: Path, **options: Any) -> Options:
    """Options of a gateway on a free loopback port."""
    values: dict[str, Any] = {"listen": "127.0.0.1:0", "drain_seconds": 0.2, "max_queue": 64} | options
    return Options(state_dir=state_dir, **values)


@asynccontextmanager
async def node(num_decoders: int = 1, wait: bool = True, window: int = 256, **options: Any) -> AsyncIterator[Node]:
    """A node in a short-named folder; waits until the gateway says that it is SERVING."""
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    paths = StatePaths(folder)
    paths.prepare()
    write_secret(paths.internal_key, INTERNAL_SECRET)
    credentials, branches = FakeCredentials(), FakeBranches()

    def add_credentials(server: grpc.aio.Server) -> None:
        cache_pb2_grpc.add_CredentialServiceServicer_to_server(credentials, server)  # type: ignore[no-untyped-call]
        cache_pb2_grpc.add_BranchServiceServicer_to_server(branches, server)  # type: ignore[no-untyped-call]

    daemon = FakeServer(paths.cachemgr_socket, add_credentials, "tessera.cache.v1.CredentialService")
    decoders = [FakeDecoder() for _ in range(num_decoders)]
    servers = []
    for index, decoder in enumerate(decoders):
        decoder.window = window

        def add(server: grpc.aio.Server, decoder: FakeDecoder = decoder) -> None:
            decode_pb2_grpc.add_DecodeServiceServicer_to_server(decoder, server)  # type: ignore[no-untyped-call]

        servers.append(FakeServer(paths.decoder_socket(index), add, "tessera.decode.v1.DecodeService"))
    gateway = Gateway(make_options(folder, decoders=num_decoders, **options), tiny_tokenizer())
    try:
        await asyncio.gather(daemon.start(), *(server.start() for server in servers))
        await gateway.start()
        here = Node(gateway, credentials, branches, daemon, decoders, servers, folder)
        if wait:
            await eventually(lambda: gateway.is_serving)
        yield here
    finally:
        await gateway.stop()
        await asyncio.gather(daemon.kill(), *(server.kill() for server in servers))
        shutil.rmtree(folder)


@dataclass
class Answer:
    """A stream that was read to its end."""

    accepted: list[pb.Accepted] = field(default_factory=list)
    deltas: list[pb.Delta] = field(default_factory=list)
    finished: list[pb.Finished] = field(default_factory=list)
    summaries: list[pb.Summary] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def add(self, response: pb.GenerateResponse) -> None:
        kind = response.WhichOneof("event")
        self.kinds.append(kind)
        lists: dict[str, list[Any]] = {
            "accepted": self.accepted, "delta": self.deltas, "finished": self.finished, "summary": self.summaries,
        }  # fmt: skip
        lists[kind].append(getattr(response, kind))

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def token_ids(self, index: int = 0) -> list[int]:
        return [token for delta in self.deltas if delta.index == index for token in delta.token_ids]


async def collect(call: Any) -> Answer:
    """Read a Generate stream to its end."""
    answer = Answer()
    while True:  # not by iteration, so that a test may have read before
        response = await call.read()
        if response is grpc.aio.EOF:
            return answer
        answer.add(response)


def request(text: str = "hello world", **stopping: Any) -> pb.GenerateRequest:
    """A Generate request for plain text."""
    return pb.GenerateRequest(text=text, stopping=pb.Stopping(**({"max_tokens": 8} | stopping)))


def details_of(error: grpc.aio.AioRpcError, kind: type[Any]) -> Any:
    """The google.rpc detail of `kind` in an error, or None."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for item in status_pb2.Status.FromString(value).details:
                detail = kind()
                if item.Unpack(detail):
                    return detail
    return None
