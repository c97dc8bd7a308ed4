"""No log holds a key, a grant or a word of a prompt. Every other node of the suite is read at its end as well."""

from __future__ import annotations

import base64

import grpc
import pytest

from common.rpc import bearer_metadata, open_sync_channel, unix_target
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc
from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import make_request
from tests.e2e.prompts import CANARIES, Prompts
from tests.e2e.rig import Node

GRANT_PREFIX = 9  # version, length and name of the tenant "default": the same in each of its grants


def test_no_log_holds_a_key_a_grant_or_a_word_of_a_prompt(node: Node, prompts: Prompts) -> None:
    """Text, chat and refused prompts, right and wrong keys, at level debug: the logs tell of it, not what it said."""
    results = [node.generate(make_request(prompts.text(), new=4, label="label")) for _ in range(3)]
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=prompts.text())])
    results.append(node.generate(make_request(chat, new=4)))
    refused = [
        make_request(prompts.text(400), new=4),
        make_request(prompts.text(), new=4, stop=[prompts.text(300)]),
        make_request(pb.Chat(messages=[pb.ChatMessage(role=prompts.text(2), content=prompts.text())])),
    ]
    for request in refused:
        with pytest.raises(grpc.RpcError):
            node.generate(request)
    wrong_key = "tsk_" + prompts.text(1).replace(" ", "")
    with pytest.raises(grpc.RpcError):
        node.generate(make_request(prompts.text()), key=wrong_key)
    node.quiet()

    with open_sync_channel(unix_target(node.paths.cachemgr_socket)) as channel:
        stub = cache_pb2_grpc.CredentialServiceStub(channel)  # type: ignore[no-untyped-call]
        question = cache_pb2.AuthenticateRequest(key=node.key)
        answer = stub.Authenticate(question, metadata=bearer_metadata(node.internal_key), timeout=10)
    grant = answer.grant
    assert b"default" in grant[:GRANT_PREFIX]

    for name, process in node.processes.items():
        assert len(process.text().splitlines()) > 2, f"positive control: {name} logs"
    text = node.log_text()
    assert any(result.request_id in text for result in results), "positive control: requests are logged by their id"
    assert len(CANARIES) > 8
    assert [word for word in CANARIES if word in text] == []
    forms = {node.key, node.admin_key, node.internal_key, wrong_key, *node.secrets}
    for part in (grant, grant[:GRANT_PREFIX]):
        forms |= {part.hex(), repr(part)[2:-1], base64.b64encode(part).decode().rstrip("=")}
    assert [form[:6] for form in forms if form in text] == []
