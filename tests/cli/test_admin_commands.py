"""Each newer `tessera admin` command: what it asks for, what it prints, as text and as JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from grpc_status import rpc_status

from cli.__main__ import main
from cli.admin_prefixes import of_which_whole
from common.errors import TesseraError
from common.interceptors import error_status
from tessera.admin.v1 import admin_pb2, admin_pb2_grpc
from tessera.common.v1 import common_pb2
from tessera.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.cli.support import serving, write_key

METHODS = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods
ANSWERS: dict[str, Any] = {
    "DeleteTenant": admin_pb2.DeleteTenantResponse(evicted_blocks=7),
    "RotateTenantSecret": admin_pb2.RotateTenantSecretResponse(evicted_blocks=5),
    "CreateTenant": admin_pb2.CreateTenantResponse(tenant="acme"),
    "CreateKey": admin_pb2.CreateKeyResponse(key_id="k9", key="tsr_new"),
    "DeleteGroup": admin_pb2.DeleteGroupResponse(evicted_blocks=3),
    "WithdrawPrefix": admin_pb2.WithdrawPrefixResponse(evicted_blocks=2),
    "ApprovePrefix": admin_pb2.ApprovePrefixResponse(num_tokens=3),
    "PinPrefix": admin_pb2.PinPrefixResponse(pin=4, pinned_tokens=16, pinned_blocks=1),
    "SetPriority": admin_pb2.SetPriorityResponse(changed_tokens=32),
    "DrainPool": admin_pb2.DrainPoolResponse(drained=True),
    "ExplainPrefix": admin_pb2.ExplainPrefixResponse(
        resident_tokens=2,
        scope_tokens=1,
        reason="The prompt diverges at token 2: other tokens stand there.",
        miss_reason=admin_pb2.MISS_REASON_DIVERGED,
        other_token_ids=[77, 78],
    ),
    "ListTenants": admin_pb2.ListTenantsResponse(
        tenants=[
            admin_pb2.Tenant(
                tenant="acme",
                floor_blocks=3,
                weight=2.5,
                groups=["team"],
                keys=[admin_pb2.Key(key_id="k1", name="laptop", created_unix_seconds=1e9)],
            )
        ]
    ),
    "ListGroups": admin_pb2.ListGroupsResponse(groups=[admin_pb2.Group(group="team", tenants=["acme", "blue"])]),
    "ListApprovedPrefixes": admin_pb2.ListApprovedPrefixesResponse(
        prefixes=[admin_pb2.ApprovedPrefix(name="system", num_tokens=2048, created_unix_seconds=1e9)]
    ),
    "ListPins": admin_pb2.ListPinsResponse(
        pins=[admin_pb2.Pin(pin=4, tenant="acme", num_tokens=160, num_blocks=10, expires_in_seconds=12.5)]
    ),
    "ListBranches": admin_pb2.ListBranchesResponse(
        branches=[admin_pb2.Branch(branch=6, tenant="acme", num_tokens=99, num_blocks=7, expires_in_seconds=30)]
    ),
    "ListPrefixes": admin_pb2.ListPrefixesResponse(
        prefixes=[admin_pb2.Prefix(node=1, tenant="acme", num_tokens=32, blocks=[5, 6], pinned=True, priority=50)]
    ),
    "GetSnapshot": admin_pb2.GetSnapshotResponse(epoch=3, total_blocks=8, block_tokens=16, free_blocks=8),
    "GetHitRateLimits": admin_pb2.GetHitRateLimitsResponse(
        admissions=10, hit_rate=0.25, best_hit_rate=0.5, infinite_hit_rate=0.75
    ),
}


class FakeAdmin(admin_pb2_grpc.AdminServiceServicer):  # type: ignore[misc,unused-ignore]
    """Answers from the table, an empty message where it has none, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.refusal: TesseraError | None = None
        self.events = [
            admin_pb2.WatchEventsResponse(sequence=8, kind="tenant_created", tenant="acme", unix_seconds=1e9),
            admin_pb2.WatchEventsResponse(
                sequence=9, kind="blocks_published", lease=2, blocks=range(12), token_ids=[1, 2], detail={"cause": "x"}
            ),
        ]

    def WatchEvents(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """Two events, then the end of what is known."""
        self.asked.append(("WatchEvents", request))
        yield from self.events
        context.abort(grpc.StatusCode.OUT_OF_RANGE, "known are events 20..30")


def _method(name: str) -> Any:
    def answer(self: FakeAdmin, request: Any, context: Any) -> Any:
        self.asked.append((name, request))
        if self.refusal is not None:
            context.abort_with_status(rpc_status.to_status(error_status(self.refusal)))
        return ANSWERS.get(name, getattr(admin_pb2, f"{name}Response")())

    return answer


for _item in METHODS:
    if not _item.server_streaming:
        setattr(FakeAdmin, _item.name, _method(_item.name))


class FakeGateway(inference_pb2_grpc.InferenceServiceServicer):  # type: ignore[misc,unused-ignore]
    """One token a letter."""

    def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Its code point."""
        return inference_pb2.TokenizeResponse(token_ids=map(ord, request.text))


class Node:
    """The fakes and the flags that reach them."""

    def __init__(self, admin: FakeAdmin, folder: Path) -> None:
        self.admin = admin
        self.flags = ["--state-dir", str(folder)]
        self.gateway = ["--endpoint", f"unix:{folder}/g.sock", "--tenant-key-file", str(folder / "default.key")]

    def last(self) -> tuple[str, dict[str, Any]]:
        """The last call and its fields as they are in JSON."""
        name, request = self.admin.asked[-1]
        return name, json_format.MessageToDict(request, preserving_proto_field_name=True)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A running admin RPC and a gateway in a state directory of their own."""
    fake = FakeAdmin()
    (tmp_path / "run").mkdir()
    write_key(tmp_path / "admin.key")
    write_key(tmp_path / "default.key")

    def register(server: grpc.Server) -> None:
        admin_pb2_grpc.add_AdminServiceServicer_to_server(fake, server)  # type: ignore[no-untyped-call]

    def register_gateway(server: grpc.Server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(FakeGateway(), server)  # type: ignore[no-untyped-call]

    with serving(f"unix:{tmp_path}/run/admin.sock", register), serving(f"unix:{tmp_path}/g.sock", register_gateway):
        yield Node(fake, tmp_path)


@pytest.mark.parametrize(
    ("command", "asked", "expected"),
    [
        (["tenants"], ("ListTenants", {"page_size": 1000}), ["acme", "pool", "2.5", "team", "laptop"]),
        (["tenants", "list"], ("ListTenants", {"page_size": 1000}), ["acme"]),
        (["tenants", "create", "acme"], ("CreateTenant", {"tenant": "acme"}), ["create-key acme"]),
        (
            ["tenants", "update", "acme", "--floor", "3", "--weight", "0.5"],
            ("UpdateTenant", {"tenant": "acme", "floor_blocks": "3", "weight": 0.5}),
            ["quota of tenant acme is changed"],
        ),
        (
            ["tenants", "update", "acme", "--ceiling", "0", "--pins", "9"],
            ("UpdateTenant", {"tenant": "acme", "ceiling_blocks": "0", "pin_blocks": "9"}),
            ["is changed"],
        ),
        (["tenants", "delete", "acme"], ("DeleteTenant", {"tenant": "acme"}), ["acme is gone, and 7 blocks"]),
        (["tenants", "rotate", "acme"], ("RotateTenantSecret", {"tenant": "acme"}), ["5 blocks dropped"]),
        (["keys"], ("ListTenants", {"page_size": 1000}), ["k1", "laptop", "valid"]),
        (
            ["keys", "create", "acme", "--name", "ci", "--ttl", "60"],
            ("CreateKey", {"tenant": "acme", "name": "ci", "ttl_seconds": 60.0}),
            ["tsr_new"],
        ),
        (["keys", "revoke", "k1"], ("RevokeKey", {"key_id": "k1"}), ["key k1 is revoked"]),
        (["groups"], ("ListGroups", {"page_size": 1000}), ["team", "acme blue"]),
        (
            ["groups", "create", "team", "acme", "blue"],
            ("CreateGroup", {"group": "team", "tenants": ["acme", "blue"]}),
            ["with 2 members"],
        ),
        (
            ["groups", "update", "team", "--add", "a", "--add", "b", "--remove", "c"],
            ("UpdateGroup", {"group": "team", "add_tenants": ["a", "b"], "remove_tenants": ["c"]}),
            ["team are changed"],
        ),
        (["groups", "delete", "team"], ("DeleteGroup", {"group": "team"}), ["3 blocks"]),
        (["withdraw", "system"], ("WithdrawPrefix", {"name": "system"}), ["2 blocks dropped"]),
        (["approved"], ("ListApprovedPrefixes", {"page_size": 1000}), ["system", "2048"]),
        (["pins"], ("ListPins", {"page_size": 1000}), ["acme", "160", "12.5"]),
        (["unpin", "4"], ("UnpinPrefix", {"pin": "4"}), ["pin 4 is over"]),
        (["branches"], ("ListBranches", {"page_size": 1000}), ["99", "30.0"]),
        (["drop-branch", "7"], ("DropBranch", {"branch": "7"}), ["conversation 7 is over"]),
        (
            ["tree", "--tenant", "acme"],
            ("ListPrefixes", {"tenant": "acme", "page_size": 1000}),
            ["tokens 0..31", "pinned"],
        ),
        (["drain"], ("DrainPool", {}), ["nothing new begins; nothing is held"]),
        (["drain", "--timeout", "2.5"], ("DrainPool", {"timeout_seconds": 2.5}), ["nothing is held"]),
        (["drain", "--resume"], ("DrainPool", {"resume": True}), ["begins again"]),
        (
            ["pin", "--tokens", "1,2 3", "--tenant", "acme", "--ttl", "9"],
            ("PinPrefix", {"tenant": "acme", "token_ids": ["1", "2", "3"], "ttl_seconds": 9.0}),
            ["pin 4 keeps 16 tokens in 1 block\n"],
        ),
        (
            ["pin", "--tokens", "1", "--public", "0"],
            ("PinPrefix", {"tenant": "default", "token_ids": ["1"], "prefix": {"scope": "SCOPE_PUBLIC"}}),
            ["pin 4 keeps"],
        ),
        (
            ["priority", "--tokens", "7", "--set", "0", "--group", "team"],
            (
                "SetPriority",
                {"tenant": "default", "token_ids": ["7"], "prefix": {"scope": "SCOPE_GROUP", "group": "team"}},
            ),
            ["priority 0 from now on"],
        ),
        (
            ["priority", "--tokens", "7", "--set", "0"],
            ("SetPriority", {"tenant": "default", "token_ids": ["7"]}),
            ["priority 0 from now on for 32 tokens"],
        ),
        (
            ["approve", "system", "--tokens", "1 2 3"],
            ("ApprovePrefix", {"name": "system", "token_ids": ["1", "2", "3"]}),
            ["may share system, 3 tokens; nothing of it is shared, since it is shorter than a block of 16 tokens\n"],
        ),
        (
            ["explain", "--tokens", "1,2,3"],
            ("ExplainPrefix", {"tenant": "default", "token_ids": ["1", "2", "3"]}),
            ["2 of 3 tokens are resident", "1 of them in the wider scope", "diverges at token 2", "tokens 77 78"],
        ),
        (
            ["explain", "--tokens", "1", "--public", "0"],
            ("ExplainPrefix", {"tenant": "default", "token_ids": ["1"], "prefix": {"scope": "SCOPE_PUBLIC"}}),
            ["resident"],
        ),
        (
            ["explain", "--tokens", "1", "--group", "team", "--group-tokens", "1"],
            (
                "ExplainPrefix",
                {
                    "tenant": "default",
                    "token_ids": ["1"],
                    "prefix": {"scope": "SCOPE_GROUP", "group": "team", "num_tokens": 1},
                },
            ),
            ["resident"],
        ),
    ],
)
def test_command_asks_and_prints(
    node: Node,
    command: list[str],
    asked: tuple[str, dict[str, Any]],
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exactly the right call; the answer in words, and with --json as something that parses."""
    assert main(["admin", *command, *node.flags]) == 0
    assert node.last() == asked
    printed = capsys.readouterr().out
    for piece in expected:
        assert piece in printed
    assert main(["admin", *command, "--json", *node.flags]) == 0
    assert node.last() == asked
    assert json.loads(capsys.readouterr().out) is not None


@pytest.mark.parametrize("command", [["explain"], ["pin"], ["approve", "system"], ["priority", "--set", "5"]])
def test_text_becomes_tokens_by_the_gateway(
    node: Node, tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an option, from a file, or from standard input, and never guessed."""
    file = tmp_path / "prompt.txt"
    file.write_text("Hé")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hé"))
    for given in (["--text", "Hé"], ["--file", str(file)], ["--text", "-"]):
        assert main(["admin", *command, *given, *node.flags, *node.gateway]) == 0
        assert node.last()[1]["token_ids"] == ["72", "233"]
    capsys.readouterr()
    node.admin.asked.clear()
    for given in ([], ["--text", "Hi", "--tokens", "1"], ["--tokens", "1,x"], ["--tokens=-3"], ["--tokens", " "]):
        assert main(["admin", *command, *node.flags, *node.gateway, *given]) == 2
    assert main(["admin", *command, "--file", str(tmp_path / "none"), *node.flags]) == 2
    assert node.admin.asked == []
    assert "there is no token id" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "block", "said"),
    [(15, 16, "; nothing of it"), (16, 16, ""), (40, 16, "whole blocks, its first 32 tokens"), (3, 0, "")],
)
def test_an_approval_says_how_much_of_it_can_be_shared(tokens: int, block: int, said: str) -> None:
    """Whole blocks alone; nothing is said where all of it is, or where the size of a block is not known yet."""
    text = of_which_whole(tokens, block)
    assert said in text and bool(said) == bool(text)


def test_an_update_of_nothing_is_refused(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """A quota is changed only where an option says to what."""
    assert main(["admin", "tenants", "update", "acme", *node.flags]) == 2
    assert "give one of --floor, --ceiling, --pins, --weight" in capsys.readouterr().err
    assert node.admin.asked == []


def test_scopes_of_an_explanation_exclude_each_other(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt begins in one scope."""
    assert main(["admin", "explain", "--tokens", "1", "--public", "3", "--group", "g", *node.flags]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_options_of_a_family_count_before_and_after_its_verb(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """--json and the state directory may stand at either place."""
    for command in (["tenants", "--json", *node.flags, "list"], ["tenants", "list", "--json", *node.flags]):
        assert main(["admin", *command]) == 0
        assert json.loads(capsys.readouterr().out)[0]["tenant"] == "acme"


def test_json_has_null_for_what_is_unset_and_objects_for_maps(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """A program can tell never from zero, and read details by name."""
    assert main(["admin", "tree", "--json", *node.flags]) == 0
    assert json.loads(capsys.readouterr().out)[0]["expires_in_seconds"] is None
    assert main(["admin", "pins", "--json", *node.flags]) == 0
    assert json.loads(capsys.readouterr().out)[0]["expires_in_seconds"] == 12.5
    assert main(["admin", "events", "--json", "--limit", "2", *node.flags]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["detail"] for event in events] == [{}, {"cause": "x"}]


def test_events_are_followed_line_by_line(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """From where it was told, so many as it was told; the end of the stream is told in words."""
    assert main(["admin", "events", "--after", "7", "--epoch", "3", "--tokens", "--limit", "2", *node.flags]) == 0
    assert node.last() == ("WatchEvents", {"after_sequence": "7", "epoch": "3", "with_tokens": True})
    first, second = capsys.readouterr().out.splitlines()
    assert "8" in first.split() and "tenant acme" in first
    assert "blocks 0 1 2 3 4 5 6 7 … (12)" in second
    assert second.endswith("cause x  tokens 1 2")
    assert main(["admin", "events", *node.flags]) == 1
    assert node.last() == ("WatchEvents", {})
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2
    assert "known are events 20..30" in captured.err


def test_drain_that_is_not_done_says_so(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1 and how many leases are held."""
    monkeypatch.setitem(ANSWERS, "DrainPool", admin_pb2.DrainPoolResponse(drained=False, leases=3))
    assert main(["admin", "drain", *node.flags]) == 1
    assert "3 leases still held" in capsys.readouterr().out


def test_top_once_prints_one_screen(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal it prints one time by itself; as JSON it has everything that the screen has."""
    for flags in (["--once"], []):
        assert main(["admin", "top", *flags, *node.flags]) == 0
        printed = capsys.readouterr().out
        assert "epoch 3" in printed and "25.0 % away" in printed and "\x1b" not in printed
    assert main(["admin", "top", "--json", *node.flags]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["snapshot"]["epoch"], shown["hit_rate_limits"]["best_hit_rate"]) == (3, 0.5)


@pytest.mark.parametrize("flags", [["--interval", "0"], ["--interval", "nan"], ["--interval", "x"]])
def test_top_refuses_impossible_intervals(node: Node, flags: list[str]) -> None:
    """A screen is drawn neither all the time nor never."""
    with pytest.raises(SystemExit) as caught:
        main(["admin", "top", *flags, *node.flags])
    assert caught.value.code == 2


def test_scope_numbers_are_those_of_the_contract() -> None:
    """What the command line names is what the message means."""
    assert (common_pb2.SCOPE_GROUP, common_pb2.SCOPE_PUBLIC) == (2, 3)
