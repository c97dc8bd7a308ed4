"""Back-pressure: a client that stops reading pauses its own samples and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.client import make_request
from tests.e2e.oracle import Solo
from tests.e2e.processes import poll
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node

B = 16
WINDOW = 32
LONG = 700


@pytest.fixture(scope="module")
def windowed(tiny_model: Path) -> Iterator[Node]:
    """A node that lets a sample run 32 tokens ahead of its reader."""
    with Node(tiny_model, pool_blocks=128, options=["--window-tokens", str(WINDOW), "--threads", "1"]) as node:
        yield node


def narrow_channel(target: str) -> grpc.Channel:
    """A channel whose streams buffer a few hundred bytes, so that a reader who stops is felt at the server."""
    options: list[tuple[str, Any]] = [
        ("grpc.http2.lookahead_bytes", 256), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1),
    ]  # fmt: skip
    return grpc.insecure_channel(target, options=options)


def test_a_reader_that_stops_pauses_itself_alone(windowed: Node, solo: Solo, prompts: Prompts) -> None:
    """While one client does not read, its sample stands still and its neighbours finish; later it gets it all."""
    tokens = prompts.tokens(B)
    request = make_request(tokens, new=LONG)
    before = windowed.fresh()
    with narrow_channel(windowed.target) as channel:
        stalled = windowed.stream(request, channel=channel)
        stalled.read(5)
        neighbours = [make_request(prompts.tokens(2 * B), new=300) for _ in range(3)]
        for other, result in zip(neighbours, windowed.together(neighbours), strict=True):
            solo.check(other, result)
        others = make_request(prompts.tokens(B), new=LONG)
        assert len(windowed.generate(others).token_ids) == LONG, "positive control: who reads gets as much"
        poll(lambda: len(windowed.admin.leases()) == 1, within=5, what="only the stalled one holds blocks")
        leases = windowed.admin.leases()
        assert leases[0].num_tokens < B + LONG - WINDOW, "it has been paused"
        generated = windowed.admin.snapshot().generated_tokens - before.generated_tokens
        assert generated < 3 * 300 + 2 * LONG - WINDOW
        result = stalled.finish()
    assert len(result.token_ids) == LONG
    solo.check(request, result)
    windowed.quiet()
