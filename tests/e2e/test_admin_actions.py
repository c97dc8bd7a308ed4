"""What operators do to a node that serves: clients see it at once, and nothing of it is left behind."""

from __future__ import annotations

import json

import grpc
import pytest

from cli.__main__ import main
from common.interceptors import error_from_rpc
from tessera.admin.v1 import admin_pb2
from tests.e2e.client import make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import poll
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node

B = 16
LONG = 1000


def refused(node: Node, tokens: list[int], key: str | None = None) -> grpc.StatusCode | None:
    """How a short request ends; None where it is served."""
    try:
        node.generate(make_request(tokens, new=1), key=key)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return None


def test_deleting_a_tenant_ends_its_streams_and_takes_its_blocks(slow_node: Node, solo: Solo, prompts: Prompts) -> None:
    """The running stream is ABORTED, the key is refused, its blocks are free; another tenant's stream goes on."""
    node = slow_node
    key = node.new_tenant("leaving")
    other = node.stream(make_request(prompts.tokens(B), new=30))
    stream = node.stream(make_request(prompts.tokens(4 * B), new=LONG), key=key)
    stream.read(5)
    answer = node.admin.call("DeleteTenant", admin_pb2.DeleteTenantRequest(tenant="leaving"))
    assert answer.evicted_blocks >= 4
    with pytest.raises(grpc.RpcError) as caught:
        stream.finish()
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert "leaving" not in {block.tenant for block in node.admin.blocks()}
    poll(
        lambda: refused(node, prompts.tokens(4), key) is grpc.StatusCode.UNAUTHENTICATED,
        within=5,
        what="the key of the deleted tenant is refused",
    )
    other.finish()
    assert "leaving" not in {tenant.tenant for tenant in node.admin.call("ListTenants", _all_tenants()).tenants}
    solo.probe(node)


def _all_tenants() -> admin_pb2.ListTenantsRequest:
    return admin_pb2.ListTenantsRequest(page_size=1000)


def test_drained_node_finishes_what_runs_and_serves_again(slow_node: Node, solo: Solo, prompts: Prompts) -> None:
    """New requests are UNAVAILABLE while the running one comes to its end whole; resume, and they are served."""
    node = slow_node
    request = make_request(prompts.tokens(B), new=30)
    stream = node.stream(request)
    stream.read(2)
    began = node.admin.call("DrainPool", admin_pb2.DrainPoolRequest(timeout_seconds=0.05))
    assert (began.drained, began.leases) == (False, 1)
    with pytest.raises(grpc.RpcError) as caught:
        node.generate(make_request(prompts.tokens(4), new=1))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert error_from_rpc(caught.value).reason == "DRAINING"
    solo.check(request, stream.finish())
    assert node.admin.call("DrainPool", admin_pb2.DrainPoolRequest(timeout_seconds=20)).drained
    node.admin.call("DrainPool", admin_pb2.DrainPoolRequest(resume=True))
    solo.probe(node)


def test_rotated_secret_makes_prompts_miss(node: Node, solo: Solo, prompts: Prompts) -> None:
    """A prompt that was a hit is a miss after the rotation, with the same tokens, and a hit again after that."""
    key = node.new_tenant("rotating")
    request = make_request(prompts.tokens(4 * B))
    node.generate(request, key=key)
    assert node.generate(request, key=key).cached_tokens == 4 * B - 1
    node.admin.call("RotateTenantSecret", admin_pb2.RotateTenantSecretRequest(tenant="rotating"))
    missed = node.generate(request, key=key)
    assert missed.cached_tokens == 0
    solo.check(request, missed)
    assert node.generate(request, key=key).cached_tokens == 4 * B - 1


def test_command_line_explains_a_text_prompt(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """Text is tokenized by the gateway as a request's: what was generated from it is resident; `top` shows the node."""
    text = "Once upon a time there was a cache that could say why a prompt missed, and it did."
    node.generate(make_request(text, new=1))
    flags = ["--state-dir", str(node.state_dir)]
    assert main(["admin", "explain", "--text", text, "--endpoint", node.target, "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["miss_reason"] == "MISS_REASON_RESIDENT"
    other = f"{text[:40]}XYZ{text[43:]}"
    assert main(["admin", "explain", "--text", other, "--endpoint", node.target, "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["miss_reason"] == "MISS_REASON_DIVERGED"
    assert found["resident_tokens"] > 0
    assert main(["admin", "top", "--once", *flags]) == 0
    screen = capsys.readouterr().out
    assert "32 blocks of 16 tokens" in screen
    assert "default" in screen
