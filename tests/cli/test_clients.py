"""`generate`, `chat` and `admin` against small servers that speak the public contract."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from cli.__main__ import main
from cli.admin_tenant_tables import show_keys
from cli.client import Client, Numbers
from cli.errors import CommandError
from tessera.admin.v1 import admin_pb2, admin_pb2_grpc
from tessera.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.cli.support import serving, write_key


def named_status(code: int, reason: str) -> status_pb2.Status:
    """A refusal with a reason, as ours are."""
    status = status_pb2.Status(code=code, message="refused")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="tessera"))
    return status


class FakeInference(inference_pb2_grpc.InferenceServiceServicer):  # type: ignore[misc,unused-ignore]
    """Answers each request with two deltas and remembers what it was sent."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.refuse: status_pb2.Status | None = None
        self.kept: set[str] = set()
        self.can_keep = True
        self.stop = ""
        self.reason = inference_pb2.FINISH_REASON_STOP
        self.has_template = True

    def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        """As the real one where the model has a chat template, and where it has none."""
        self.metadata.append(dict(context.invocation_metadata()))
        if request.HasField("chat") and not self.has_template:
            refusal = named_status(3, "INVALID_ARGUMENT")
            refusal.details[0].Clear()
            refusal.details[0].Pack(error_details_pb2.ErrorInfo(metadata={"field": "chat"}))
            context.abort_with_status(rpc_status.to_status(refusal))
        return inference_pb2.TokenizeResponse(token_ids=[1])

    def DropSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        """As the real one."""
        if request.handle not in self.kept:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such conversation")
        self.kept.remove(request.handle)
        return inference_pb2.DropSessionResponse()

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802 - the name is the contract's
        """Stream a fixed answer."""
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.refuse is not None:
            context.abort_with_status(rpc_status.to_status(self.refuse))
        if request.session.handle and request.session.handle not in self.kept:
            context.abort_with_status(rpc_status.to_status(named_status(5, "BRANCH_NOT_FOUND")))
        if request.session.keep_seconds and not self.can_keep:
            context.abort_with_status(rpc_status.to_status(named_status(8, "TOO_MANY_KEPT")))
        accepted = inference_pb2.Accepted(request_id="r1", prompt_tokens=20, cached_tokens=12)
        if request.output.HasField("prompt_logprobs"):
            accepted.prompt_logprobs.add(token_id=77, logprob=-2.5)
        yield inference_pb2.GenerateResponse(accepted=accepted)
        for index in range(max(1, request.sampling.n)):
            for text in (f"Hel{index}", "lo"):
                delta = inference_pb2.Delta(index=index, text=text, token_ids=[1])
                if request.output.HasField("logprobs"):
                    chosen = delta.logprobs.add(token_id=1, logprob=-0.125)
                    chosen.top.add(token_id=9, logprob=-0.0625)
                yield inference_pb2.GenerateResponse(delta=delta)
            handle = f"handle{len(self.requests)}" if request.session.keep_seconds else ""
            self.kept |= {handle} - {""}
            finished = inference_pb2.Finished(index=index, reason=self.reason, stop=self.stop, session_handle=handle)
            yield inference_pb2.GenerateResponse(finished=finished)
        usage = inference_pb2.Usage(prompt_tokens=20, cached_tokens=12, completion_tokens=2)
        yield inference_pb2.GenerateResponse(summary=inference_pb2.Summary(usage=usage))


class FakeAdmin(admin_pb2_grpc.AdminServiceServicer):  # type: ignore[misc,unused-ignore]
    """Three blocks over two pages, one tenant, and a record of every change."""

    def __init__(self) -> None:
        self.changes: list[Any] = []
        self.ok = True

    def GetSnapshot(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Some counters."""
        usage = admin_pb2.TenantUsage(tenant="default", cached_blocks=2, hits=1)
        return admin_pb2.GetSnapshotResponse(total_blocks=32, free_blocks=30, cached_blocks=2, tenants=[usage])

    def CheckIntegrity(self, request: Any, context: Any) -> Any:  # noqa: N802
        """As told."""
        violations = [] if self.ok else ["block 3: references 1, holders 0"]
        return admin_pb2.CheckIntegrityResponse(ok=self.ok, violations=violations, checked_blocks=32)

    def ListBlocks(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Two blocks a page at most."""
        first = int(request.page_token or 1)
        last = min(3, first + min(2, request.page_size) - 1)
        blocks = [
            admin_pb2.Block(block=number, state=admin_pb2.BLOCK_STATE_CACHED) for number in range(first, last + 1)
        ]
        token = str(last + 1) if last < 3 else ""
        return admin_pb2.ListBlocksResponse(blocks=blocks, next_page_token=token)

    def ListPrefixes(self, request: Any, context: Any) -> Any:  # noqa: N802
        """One long node."""
        node = admin_pb2.Prefix(node=1, tenant="default", num_tokens=160, blocks=range(1, 11), name="ab")
        return admin_pb2.ListPrefixesResponse(prefixes=[node])

    def ListLeases(self, request: Any, context: Any) -> Any:  # noqa: N802
        """One lease."""
        return admin_pb2.ListLeasesResponse(leases=[admin_pb2.Lease(lease=4, request_id="r1", blocks=[1, 2])])

    def ListSessions(self, request: Any, context: Any) -> Any:  # noqa: N802
        """None."""
        return admin_pb2.ListSessionsResponse()

    def ListTenants(self, request: Any, context: Any) -> Any:  # noqa: N802
        """One with a key, one without."""
        key = admin_pb2.Key(key_id="k1", name="laptop", created_unix_seconds=1e9)
        tenants = [admin_pb2.Tenant(tenant="default", keys=[key]), admin_pb2.Tenant(tenant="empty")]
        return admin_pb2.ListTenantsResponse(tenants=tenants)

    def EvictBlocks(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Recorded."""
        self.changes.append(request)
        return admin_pb2.EvictBlocksResponse(evicted_blocks=2, remaining_blocks=0)

    def AbortRequest(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Known is r1 alone."""
        if request.request_id != "r1":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such request")
        return admin_pb2.AbortRequestResponse()

    def CreateTenant(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Recorded."""
        self.changes.append(request)
        return admin_pb2.CreateTenantResponse(tenant=request.tenant)

    def CreateKey(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Recorded."""
        self.changes.append(request)
        return admin_pb2.CreateKeyResponse(key_id="k2", key="tsk_new")

    def RevokeKey(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Recorded."""
        self.changes.append(request)
        return admin_pb2.RevokeKeyResponse()


@pytest.fixture
def inference(tmp_path: Path) -> Iterator[tuple[FakeInference, list[str]]]:
    """A running gateway and the flags that reach it."""
    fake = FakeInference()
    key = write_key(tmp_path / "tenant.key")

    def register(server: grpc.Server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)  # type: ignore[no-untyped-call]

    with serving(f"unix:{tmp_path}/g.sock", register):
        yield fake, ["--endpoint", f"unix:{tmp_path}/g.sock", "--key-file", str(key)]


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[tuple[FakeAdmin, list[str]]]:
    """A running admin RPC in a state directory of its own, and the flags that name it."""
    fake = FakeAdmin()
    (tmp_path / "run").mkdir()
    write_key(tmp_path / "admin.key")

    def register(server: grpc.Server) -> None:
        admin_pb2_grpc.add_AdminServiceServicer_to_server(fake, server)  # type: ignore[no-untyped-call]

    with serving(f"unix:{tmp_path}/run/admin.sock", register):
        yield fake, ["--state-dir", str(tmp_path)]


Inference = tuple[FakeInference, list[str]]
Admin = tuple[FakeAdmin, list[str]]


def test_generate_streams_text_and_tells_the_numbers(inference: Inference, capsys: pytest.CaptureFixture[str]) -> None:
    """Text goes to stdout alone, numbers to stderr; options, prompt and key reach the gateway as they were given."""
    fake, flags = inference
    options = ["--system", "Be brief.", "--max-tokens", "7", "--top-k", "3", "--seed", "5", "--stop", "x", "--no-cache"]
    assert main(["generate", "Hi", *options, *flags]) == 0
    shown = capsys.readouterr()
    assert shown.out == "Hel0lo\n"
    assert "20 prompt tokens, 12 of them cached" in shown.err
    request = fake.requests[0]
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "Be brief."), ("user", "Hi")]
    assert (request.stopping.max_tokens, request.sampling.top_k, request.sampling.seed) == (7, 3, 5)
    assert request.sampling.temperature == 0.0
    assert request.sampling.HasField("temperature")
    assert list(request.stopping.stop) == ["x"]
    assert request.cache.no_read
    assert request.cache.no_store
    assert not request.sampling.HasField("top_p")
    assert fake.metadata[0]["authorization"] == "Bearer tsk_test"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_answer_that_was_cut_says_so(
    command: str, inference: Inference, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a bound ended the answer, one line on stderr names the option that raises it, or the context; an answer
    that ended by itself, and `--quiet`, have no such line."""
    fake, flags = inference

    def ask(*options: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
        assert main([command, *(["Hi"] if command == "generate" else []), *options, *flags]) == 0
        shown = capsys.readouterr()
        assert "cut off" not in shown.out
        return [line for line in shown.err.splitlines() if "cut off" in line]

    assert ask("--max-tokens", "2") == []
    fake.reason = inference_pb2.FINISH_REASON_LENGTH
    assert ask("--max-tokens", "2") == ["the answer was cut off after 2 tokens; --max-tokens N allows more"]
    assert ask("--max-tokens", "3") == ["the answer was cut off: prompt and answer fill the model's context"]
    if command == "generate":
        assert ask("--max-tokens", "2", "--quiet") == []


def test_a_model_without_a_chat_template_is_told_apart(inference: Inference, tmp_path: Path) -> None:
    """The gateway's refusal of a conversation as a whole means no template; any other failure is no such answer."""
    fake, flags = inference
    with Client(flags[1], "tsk_test") as client:
        assert client.has_chat_template()
        fake.has_template = False
        assert not client.has_chat_template()
    with Client(f"unix:{tmp_path}/nobody.sock", "tsk_test") as client, pytest.raises(CommandError):
        client.has_chat_template()


def test_what_comes_beside_the_text_is_asked_for_and_shown(
    inference: Inference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Log-probabilities of answer and prompt go to stderr, token by token; without their options nothing is asked."""
    fake, flags = inference
    assert main(["generate", "Hi", "--logprobs", "1", "--prompt-logprobs", "0", "--n", "2", *flags]) == 0
    output = fake.requests[0].output
    assert (output.logprobs, output.prompt_logprobs, output.HasField("prompt_logprobs")) == (1, 0, True)
    shown = capsys.readouterr()
    assert shown.out == "[0] Hel0lo\n[1] Hel1lo\n"
    rows = [line.split() for line in shown.err.splitlines()]
    assert ["1", "77", "-2.5000"] in rows
    assert [row[0] for row in rows if row[1:] == ["1", "-0.1250", "9", "-0.0625"]] == ["0", "0", "1", "1"]
    assert main(["generate", "Hi", *flags]) == 0
    assert not fake.requests[1].HasField("output")


def test_a_form_of_the_answer_reaches_the_gateway(
    inference: Inference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Schema and grammar are read from files, a pattern is given; in a chat too. What cannot be read is named with its
    option, two forms at once are refused, and so are draft tokens without a way of guessing."""
    fake, flags = inference
    schema, grammar = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text('{"type": "integer"}')
    grammar.write_text('start: "é"', encoding="utf-8")
    for options, kind, value in (
        (["--json-schema", str(schema)], "json_schema", '{"type": "integer"}'),
        (["--grammar", str(grammar)], "grammar", 'start: "é"'),
        (["--regex", "[0-9]+"], "regex", "[0-9]+"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
        for command in (["generate", "Hi"], ["chat"]):
            assert main([*command, *options, *flags]) == 0
            constraint = fake.requests[-1].output.constraint
            assert constraint.WhichOneof("kind") == kind and getattr(constraint, kind) == value
    assert main(["generate", "Hi", "--speculate", "prompt-lookup", "--draft-tokens", "3", *flags]) == 0
    assert (fake.requests[-1].speculation.mode, fake.requests[-1].speculation.draft_tokens) == (1, 3)
    sent = len(fake.requests)
    capsys.readouterr()
    (tmp_path / "bytes").write_bytes(b"\xff")
    for options, told in (
        (["--json-schema", str(tmp_path / "none")], f"--json-schema {tmp_path}/none: No such file"),
        (["--grammar", str(tmp_path / "bytes")], f"--grammar {tmp_path}/bytes: is no UTF-8 text: byte 0"),
        (["--draft-tokens", "3"], "name --speculate too"),
    ):
        assert main(["generate", "Hi", *options, *flags]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", "Hi", "--regex", "a", "--json-schema", str(schema), *flags])
    assert "not allowed with" in capsys.readouterr().err
    assert len(fake.requests) == sent


@pytest.mark.parametrize(
    ("tokens", "seconds", "rate"),
    [(8, 0.0005, None), (15, 10.0, None), (16, 0.049, None), (16, 0.05, 300.0), (101, 2.0, 50.0), (0, 0.0, None)],
)
def test_a_rate_is_told_only_where_there_is_one(tokens: int, seconds: float, rate: float | None) -> None:
    """The rate is that of the tokens after the first; an answer of a few tokens or milliseconds has none."""
    numbers = Numbers(20, 12, tokens, 0.1, seconds)
    assert numbers.tokens_per_second == pytest.approx(rate)
    assert ("tokens/s" in numbers.describe()) == (rate is not None)
    assert f"{tokens} tokens" in numbers.describe()


def test_generate_shows_samples_apart(inference: Inference, capsys: pytest.CaptureFixture[str]) -> None:
    """With --n the samples do not run into each other."""
    assert main(["generate", "Hi", "--n", "2", "--quiet", *inference[1]]) == 0
    shown = capsys.readouterr()
    assert shown.out == "[0] Hel0lo\n[1] Hel1lo\n"
    assert shown.err == ""


def test_generate_reads_plain_text_from_standard_input(inference: Inference, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` reads the prompt from standard input; --raw sends it without a chat template."""
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon\n"))
    assert main(["generate", "-", "--raw", *inference[1]]) == 0
    assert inference[0].requests[0].text == "Once upon\n"


@pytest.mark.parametrize("coding", ["utf-8", "utf-8:surrogateescape"])
def test_bytes_that_are_no_text_are_refused(
    coding: str, inference: Inference, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Invalid UTF-8 in an argument or on standard input ends with a message and status 2, whatever the locale does."""
    broken = os.fsdecode(b"a\xff\xfe")
    for flags, name in (
        ([broken], "the prompt"),
        (["x", "--system", broken], "--system"),
        (["x", "--stop", broken], "--stop"),
        (["x", "--model", broken], "--model"),
    ):
        assert main(["generate", *flags, *inference[1]]) == 2
        assert f"{name} is no UTF-8 text (character 2)" in capsys.readouterr().err
    assert main(["chat", "--system", broken, *inference[1]]) == 2
    assert main(["admin", "create-tenant", broken]) == 2
    name, _, errors = coding.partition(":")
    for command in (["generate", "-"], ["chat"]):
        text = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding=name, errors=errors or "strict")
        monkeypatch.setattr("sys.stdin", text)
        main([*command, *inference[1]])
        assert "is no UTF-8 text" in capsys.readouterr().err
    assert not inference[0].requests


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("--seed", "-1", "0..18446744073709551615"),
        ("--seed", "9" * 23, "0..18446744073709551615"),
        ("--seed", "9" * 5000, "0..18446744073709551615"),
        ("--top-k", "9" * 22, "0..9223372036854775807"),
        ("--max-tokens", "0", "1..9223372036854775807"),
        ("--n", "17", "1..16"),
    ],
)
def test_a_number_out_of_range_names_its_flag_and_the_range(
    flag: str, value: str, allowed: str, inference: Inference, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number that no message can carry is refused with its flag and what is allowed; the largest one is sent."""
    with pytest.raises(SystemExit) as end:
        main(["generate", "x", flag, value, *inference[1]])
    assert end.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"tessera generate: {flag}: ")
    assert said.endswith(f"{allowed} (see `tessera generate --help`)")
    assert not inference[0].requests
    assert main(["generate", "x", flag, allowed.partition("..")[2], *inference[1]]) == 0
    assert len(inference[0].requests) == 1


def test_a_refusal_is_told_with_its_numbers(inference: Inference, capsys: pytest.CaptureFixture[str]) -> None:
    """What the server refuses, and how much would have fitted, reaches the user; the status is 1."""
    info = error_details_pb2.ErrorInfo(reason="EXCEEDS_POOL", metadata={"needed": "40", "usable": "32"})
    refusal = status_pb2.Status(code=8, message="the prompt needs more blocks than there are")
    refusal.details.add().Pack(info)
    inference[0].refuse = refusal
    assert main(["generate", "Hi", *inference[1]]) == 1
    shown = capsys.readouterr().err
    assert "RESOURCE_EXHAUSTED: the prompt needs more blocks than there are" in shown
    assert "needed 40" in shown
    assert "usable 32" in shown


def test_nobody_there_says_how_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a server the user reads how to start one, for the gateway and for the admin RPC."""
    key = str(write_key(tmp_path / "k"))
    assert main(["generate", "Hi", "--endpoint", f"unix:{tmp_path}/none.sock", "--key-file", key]) == 1
    assert main(["admin", "snapshot", "--target", f"unix:{tmp_path}/none.sock", "--key-file", key]) == 1
    assert main(["generate", "Hi", "--state-dir", str(tmp_path / "none")]) == 1
    assert main(["admin", "snapshot", "--state-dir", str(tmp_path / "none")]) == 1
    told = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(told) == 4
    assert all("tessera up" in line for line in told)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A credential file with loose permissions is not used."""
    key = write_key(tmp_path / "k")
    key.chmod(0o644)
    assert main(["generate", "Hi", "--key-file", str(key)]) == 2
    assert "0600" in capsys.readouterr().err


def test_leaving_an_answer_early_cancels_it(inference: Inference, tmp_path: Path) -> None:
    """Closing the stream of deltas ends the call; nothing raises."""
    with Client(f"unix:{tmp_path}/g.sock", "tsk_test") as client:
        deltas = client.generate(inference_pb2.GenerateRequest(text="x"), Numbers())
        assert next(deltas).text == "Hel0"
        deltas.close()  # type: ignore[attr-defined]


def test_chat_keeps_the_conversation_and_forgets_it_on_reset(
    inference: Inference, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every turn sends itself alone, after what the server keeps; /reset keeps the system prompt alone; /exit ends with
    status 0, and nothing is kept any more."""
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\n/help\ntwo\n/reset\nthree\n/exit\nnever\n"))
    assert main(["chat", "--system", "S", *inference[1]]) == 0
    assert asked(inference[0]) == [("", ["S", "one"]), ("handle1", ["two"]), ("", ["S", "three"])]
    assert {request.session.keep_seconds for request in inference[0].requests} == {600.0}
    assert inference[0].kept == set()
    assert capsys.readouterr().out.count("12 of them cached") == 3


@pytest.mark.parametrize("typed", ["", "\n \n", "/reset\n/help\n", "/exit\nnever\n"])
def test_a_chat_without_a_question_says_so(
    typed: str, inference: Inference, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a file or a pipe that holds no question nothing is asked, and that is said, with status 2."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert main(["chat", *inference[1]]) == 2
    assert capsys.readouterr().err.startswith("tessera chat: nothing was asked: standard input holds no question")
    assert not inference[0].requests


@pytest.mark.parametrize("flags", [[], ["--raw"]])
def test_an_empty_prompt_is_not_sent(
    flags: list[str], inference: Inference, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it came from is told. Blanks are no question, but a text that can be continued."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["generate", "-", *flags, *inference[1]]) == 2
    assert main(["generate", "", *flags, *inference[1]]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.partition("asked: ")[2] for line in told] == ["standard input is empty", "the prompt is empty"]
    assert not inference[0].requests
    assert main(["generate", " ", *flags, *inference[1]]) == (0 if flags else 2)
    assert [request.text for request in inference[0].requests] == ([" "] if flags else [])


def asked(fake: FakeInference) -> list[tuple[str, list[str]]]:
    """Of each request the handle and the turns."""
    return [(r.session.handle, [m.content for m in r.chat.messages]) for r in fake.requests]


def chat(inference: Inference, monkeypatch: pytest.MonkeyPatch, lines: list[Any], *flags: str) -> None:
    """Type lines into a chat; what is callable is called in its place."""

    class Lines(io.StringIO):
        def readline(self, *sizes: Any) -> str:  # type: ignore[override]
            while lines and callable(lines[0]):
                lines.pop(0)()
            return f"{lines.pop(0)}\n" if lines else ""

    monkeypatch.setattr("sys.stdin", Lines())
    assert main(["chat", *flags, *inference[1]]) == 0


def test_chat_sends_everything_where_the_server_forgot(
    inference: Inference, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A handle that has expired costs one more message, and no word of it is shown."""
    fake = inference[0]
    chat(inference, monkeypatch, ["one", fake.kept.clear, "two", "three"])
    assert asked(fake) == [
        ("", ["one"]),
        ("handle1", ["two"]),
        ("", ["one", "Hel0lo", "two"]),
        ("handle3", ["three"]),
    ]
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out.count("Hel0lo") == 3


def test_chat_goes_on_where_nothing_more_can_be_kept(inference: Inference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many conversations of the tenant: it works as if there were no handles."""
    fake = inference[0]
    fake.can_keep = False
    chat(inference, monkeypatch, ["one", "two"])
    answered = [request for request in fake.requests if not request.session.keep_seconds]
    turns = [[m.content for m in request.chat.messages] for request in answered]
    assert turns == [["one"], ["one", "Hel0lo", "two"]]
    assert not any(request.session.handle for request in fake.requests)


def test_chat_uses_no_handle_of_an_answer_that_a_stop_string_cut(
    inference: Inference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server keeps the tokens of the stop string, the conversation does not. Nor is one kept with --no-cache."""
    fake = inference[0]
    fake.stop = "END"
    chat(inference, monkeypatch, ["one", "two"], "--stop", "END")
    assert asked(fake) == [("", ["one"]), ("", ["one", "Hel0lo", "two"])] and not fake.kept
    fake.requests.clear()
    chat(inference, monkeypatch, ["one"], "--no-cache")
    assert not fake.requests[0].HasField("session")


def test_a_failed_turn_leaves_the_conversation_as_it_was(
    inference: Inference, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error ends the turn and not the chat; its question is not kept. Without a terminal the status is 1 then."""
    fake, flags = inference
    fake.refuse = status_pb2.Status(code=14, message="draining")

    class Lines(io.StringIO):
        def readline(self, *sizes: Any) -> str:  # type: ignore[override]
            line = super().readline(*sizes)
            if line.startswith("two"):
                fake.refuse = None
            return line

    monkeypatch.setattr("sys.stdin", Lines("one\ntwo\n"))
    assert main(["chat", *flags]) == 1
    assert [m.content for m in fake.requests[-1].chat.messages] == ["two"]
    assert "draining" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["snapshot"], ["total_blocks", "32", "default"]),
        (["check"], ["32 blocks checked: every invariant holds"]),
        (["blocks"], ["cached", "generation"]),
        (["prefixes"], ["1 2 3 4 5 6 7 8 … (10)", "160"]),
        (["leases"], ["r1", "1 2"]),
        (["sessions"], ["none"]),
        (["tenants"], ["k1", "laptop", "no key", "never"]),
        (["evict", "--all"], ["2 blocks evicted"]),
        (["abort", "r1"], ["has been ended"]),
        (["create-tenant", "acme"], ["tessera admin create-key acme"]),
        (["create-key", "acme", "--name", "n", "--ttl", "60"], ["k2", "tsk_new", "shown this once"]),
        (["revoke-key", "k2"], ["k2 is revoked"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_admin_shows_every_verb_as_text_and_as_json(
    admin: Admin, command: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each admin command prints what a person needs, and with --json what a program can parse."""
    assert main(["admin", *command, *admin[1]]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in expected), shown
    assert main(["admin", *command, "--json", *admin[1]]) == 0
    json.loads(capsys.readouterr().out)


def test_a_key_is_shown_as_what_it_is() -> None:
    """An expired key is never called valid; one that expires later, or never, is; revoked comes first."""
    moments = {"expired": 1e9, "valid": time.time() + 1e6}
    keys = [admin_pb2.Key(key_id=state, expires_unix_seconds=moment) for state, moment in moments.items()]
    keys += [admin_pb2.Key(key_id="valid"), admin_pb2.Key(key_id="revoked", revoked=True, expires_unix_seconds=1.0)]
    table = show_keys([admin_pb2.Tenant(tenant="t", keys=keys)]).splitlines()
    assert table[0].split() == ["tenant", "key", "id", "name", "state", "created", "expires", "last", "used"]
    assert [line.split()[1:3] for line in table[2:]] == [
        [state, state] for state in ("expired", "valid", "valid", "revoked")
    ]
    assert "2001-09-0" in table[2]
    assert table[4].count("never") == 3


def test_admin_follows_the_pages(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    """A list is whole, whatever the page size of the server; --limit cuts it."""
    for flags, numbers in ([], [1, 2, 3]), (["--limit", "1"], [1]), (["--limit", "3"], [1, 2, 3]):
        assert main(["admin", "blocks", "--json", *flags, *admin[1]]) == 0
        assert [block["block"] for block in json.loads(capsys.readouterr().out)] == numbers


def test_clients_follow_the_state_directory_of_the_environment(
    admin: Admin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inside a container, where TESSERA_STATE_DIR is set, no flag is needed."""
    monkeypatch.setenv("TESSERA_STATE_DIR", admin[1][1])
    assert main(["admin", "check"]) == 0
    assert "every invariant holds" in capsys.readouterr().out


def test_admin_json_has_numbers_and_names(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    """Counters are numbers, states are names, and fields that are zero are there."""
    assert main(["admin", "snapshot", "--json", *admin[1]]) == 0
    snapshot = json.loads(capsys.readouterr().out)
    assert (snapshot["total_blocks"], snapshot["active_blocks"]) == (32, 0)
    assert snapshot["tenants"][0]["cached_blocks"] == 2
    assert main(["admin", "blocks", "--json", *admin[1]]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "BLOCK_STATE_CACHED"


def test_admin_sends_what_was_asked(admin: Admin) -> None:
    """The fields of a change are those of the command line."""
    assert main(["admin", "evict", "--tenant", "acme", "--blocks", "5", *admin[1]]) == 0
    assert main(["admin", "create-key", "acme", *admin[1]]) == 0
    evict, key = admin[0].changes
    assert (evict.all, evict.tenant, evict.num_blocks) == (False, "acme", 5)
    assert not key.HasField("ttl_seconds")


def test_admin_check_fails_where_an_invariant_is_broken(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    """A broken invariant is listed and gives status 1, so that scripts can rely on it."""
    admin[0].ok = False
    assert main(["admin", "check", *admin[1]]) == 1
    assert "block 3: references 1" in capsys.readouterr().out


def test_admin_tells_what_is_not_there(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown request is NOT_FOUND, with status 1."""
    assert main(["admin", "abort", "r9", *admin[1]]) == 1
    assert "NOT_FOUND: no such request" in capsys.readouterr().err
