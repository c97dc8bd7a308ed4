"""LoRA adapters on a running node: beside each other, replaced and taken away under requests, and what the cache keeps
apart (row 11 of the cases, and the rows of adapters in the cache-correctness suite)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cli.__main__ import main
from common.adapter_folder import AdapterFolder
from common.rpc import bearer_metadata
from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import Result, make_request
from tests.e2e.oracle import Solo
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node
from tests.tiny_adapters import adapter_config, adapter_tensors, write_adapter

B = 16
_QV = ("q_proj", "v_proj")
# Sizes of tests/tiny_models.py.
_SHAPES = {
    "q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64), "gate_proj": (128, 64),
    "up_proj": (128, 64), "down_proj": (64, 128),
}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two versions of an adapter of all modules, and one of queries and values alone."""
    base = tmp_path_factory.mktemp("adapters")
    write_adapter(base / "v1", adapter_config(4), adapter_tensors(_SHAPES, 2, 4, seed=1))
    write_adapter(base / "v2", adapter_config(4), adapter_tensors(_SHAPES, 2, 4, seed=2))
    write_adapter(base / "qv", adapter_config(16, _QV), adapter_tensors(_SHAPES, 2, 16, _QV, seed=3))
    return {path.name: path for path in base.iterdir()}


def folder_of(node: Node) -> AdapterFolder:
    return AdapterFolder(node.paths.adapters_dir)


@pytest.fixture(scope="module")
def adapted_solo(solo: Solo, sources: dict[str, Path]) -> Iterator[Solo]:
    """Solo runs with each source under its own name."""
    for name, path in sources.items():
        folder_of(solo.node).add(name, path)
    yield solo
    shutil.rmtree(solo.node.paths.adapters_dir)


@pytest.fixture
def adapted(node: Node) -> Iterator[Node]:
    """The shared node; what a test put in its folder of adapters is gone afterwards."""
    yield node
    shutil.rmtree(node.paths.adapters_dir, ignore_errors=True)


def under(request: pb.GenerateRequest, adapter: str) -> pb.GenerateRequest:
    """The same request with an adapter."""
    other = pb.GenerateRequest()
    other.CopyFrom(request)
    other.adapter = adapter
    return other


def refusal(node: Node, request: pb.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        node.generate(request)
    return caught.value.code(), str(caught.value.details())


def test_row_11_another_content_under_one_name_is_another_adapter(
    adapted: Node, adapted_solo: Solo, prompts: Prompts, sources: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """v1 is replaced by v2 under its name: nothing is cached, and the answer is v2's. The same content put there again,
    or under another name, is served from the cache; so v1 is when it comes back, also for a tenant of its own only."""
    request = make_request(prompts.tokens(4 * B + 3), new=12)
    folder = str(adapted.paths.adapters_dir)

    def put(version: str, name: str = "sql") -> None:
        assert main(["adapter", "add", name, str(sources[version]), "--adapters-dir", folder]) == 0

    def run(name: str = "sql", key: str | None = None) -> Result:
        return adapted.generate(under(request, name), key=key)

    put("v1")
    first = run()
    assert first.cached_tokens == 0
    assert first.token_ids == adapted_solo(under(request, "v1")).token_ids
    assert run().cached_tokens >= 4 * B, "positive control: v1 twice is cached"
    put("v2")
    second = run()
    assert second.cached_tokens == 0
    assert second.token_ids == adapted_solo(under(request, "v2")).token_ids != first.token_ids
    put("v1", "copy")
    for name in ("copy", "sql"):
        put("v1")
        back = run(name)
        assert back.cached_tokens >= 4 * B
        assert back.token_ids == first.token_ids
    base = adapted.generate(request)
    assert base.cached_tokens == 0
    assert base.token_ids == adapted_solo(request).token_ids
    key = adapted.new_tenant(f"adapter-{prompts.first()}")
    assert [run(key=key).cached_tokens for _ in range(2)] == [0, run().cached_tokens]
    capsys.readouterr()
    assert main(["adapter", "list", "--adapters-dir", folder]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["copy", "sql"]


def test_base_and_two_adapters_run_at_once(
    adapted: Node, adapted_solo: Solo, prompts: Prompts, sources: dict[str, Path]
) -> None:
    """One prompt under the base and two adapters, twice, sampled and with guesses, all at once: each Equal to its solo
    run, and three different answers."""
    for name in ("v1", "qv"):
        folder_of(adapted).add(name, sources[name])
    prompt = prompts.tokens(3 * B + 5)
    requests = []
    for name in ("", "v1", "qv"):
        sampled = under(make_request(prompt, new=16, temperature=1.0, seed=5, n=2), name)
        guessed = under(make_request(prompt, new=16), name)
        guessed.speculation.mode = pb.SPECULATION_MODE_PROMPT_LOOKUP
        requests += [sampled, guessed]
    results = adapted.together(requests)
    for request, result in zip(requests, results, strict=True):
        adapted_solo.check(request, result)
    assert len({tuple(result.token_ids) for result in results}) == 6


def test_taken_away_under_a_running_request(
    slow_node: Node, adapted_solo: Solo, prompts: Prompts, sources: dict[str, Path]
) -> None:
    """A stream that began with an adapter ends with it, whole; the next request is NOT_FOUND and names the adapter, and
    one with a broken adapter learns what is wrong."""
    folder = folder_of(slow_node)
    folder.add("v1", sources["v1"])
    request = under(make_request(prompts.tokens(B + 2), new=40), "v1")
    stream = slow_node.stream(request)
    stream.read(3)
    folder.remove("v1")
    code, details = refusal(slow_node, request)
    assert code is grpc.StatusCode.NOT_FOUND
    assert "'v1'" in details
    adapted_solo.check(request, stream.finish())
    broken = slow_node.paths.adapters_dir / "broken"
    write_adapter(broken, adapter_config(5), adapter_tensors(_SHAPES, 2, 4))
    code, details = refusal(slow_node, under(request, "broken"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "down_proj.lora_A.weight has shape (4, 128); expected (5, 128)" in details
    assert str(slow_node.state_dir) not in details
    shutil.rmtree(slow_node.paths.adapters_dir)


def test_a_kept_conversation_goes_on_under_its_adapter_alone(
    adapted: Node, adapted_solo: Solo, prompts: Prompts, sources: dict[str, Path]
) -> None:
    """With its adapter a handle continues as if all had been sent; with another, or none, there is no such handle."""
    for name in ("v1", "v2"):
        folder_of(adapted).add(name, sources[name])
    prompt, turn = prompts.tokens(2 * B), prompts.tokens(5)
    request = under(make_request(prompt, new=6), "v1")
    request.session.keep_seconds = 60
    first = adapted.generate(request)
    handle = first.samples[0].handle
    adapted.secrets.add(handle)
    for name, code in (("v2", grpc.StatusCode.NOT_FOUND), ("", grpc.StatusCode.NOT_FOUND)):
        wrong = under(make_request(turn, new=4), name)
        wrong.session.handle = handle
        assert refusal(adapted, wrong)[0] is code, name
    right = under(make_request(turn, new=8), "v1")
    right.session.handle = handle
    whole = under(make_request([*prompt, *first.token_ids, *turn], new=8), "v1")
    answer = adapted.generate(right)
    assert answer.token_ids == adapted_solo(whole).token_ids
    assert answer.cached_tokens >= 2 * B
    drop = pb.DropSessionRequest(handle=handle)
    adapted.inference.DropSession(drop, metadata=bearer_metadata(adapted.key), timeout=30)
