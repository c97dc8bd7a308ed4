"""What the tests of the internal services share: one request as a decoder makes it, and refusals by their code."""

from __future__ import annotations

import asyncio

import grpc

from tests.cachemgr.daemon_rig import acquire_request, report_request, running

CODES = {name: code.value[0] for name, code in grpc.StatusCode.__members__.items()}
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]  # 9 tokens: two whole blocks of 4 and a tail


def run(body, **options):
    """Run `body(rig)` on a daemon of its own with these options."""

    async def inside():
        async with running(**options) as rig:
            await body(rig)

    asyncio.run(inside())


def failed(response, code, text=""):
    """The failure that answers an operation; it has this code, and `text` in its message."""
    assert response.WhichOneof("result") == "failure", response
    assert response.failure.code == CODES[code], response.failure
    assert text in response.failure.message
    return response.failure


async def compute(decoder, grant, tokens, *, release=True, **fields):
    """Acquire, seal everything, and release: a whole request as a decoder would do it."""
    acquired = (await decoder.ask(acquire=acquire_request(grant, tokens, **fields))).acquire
    assert acquired.lease_id
    done = await decoder.ask(
        report=report_request(
            {"lease_id": acquired.lease_id, "sealed_tokens": len(tokens), "copied": True, "release": release}
        )
    )
    assert not done.report.refusals
    return acquired
