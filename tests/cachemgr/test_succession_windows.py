"""Layer groups across the death of the daemon: hits keep their window blocks, and nobody gets those of a survivor."""

from __future__ import annotations

from typing import Any

import pytest

from common.layout import KvLayout
from common.tokens import pack_tokens
from tessera.admin.v1 import admin_pb2
from tessera.cache.v1 import cache_pb2
from tests.cachemgr.daemon_rig import SessionClient, acquire_request, ids, report_request
from tests.cachemgr.rig import eventually_async
from tests.cachemgr.test_succession import BLOCKS, PROMPT, Decoder, Killable, failed, killable, run

GROUPS: dict[str, Any] = {"num_layers": 3, "window_tokens": 6, "window_layers": (0, 2)}
LAYOUT = KvLayout.of(3, 1, 8, 4, "float32", 6, (0, 2))
WINDOWS = LAYOUT.num_window_blocks(BLOCKS)


def pairs(response: cache_pb2.SessionResponse) -> dict[int, int]:
    """Block -> its window block, as an answer says it."""
    numbers = ids(response.window_blocks)
    return dict(zip(numbers[::2], numbers[1::2], strict=True))


class Grouped(Decoder):
    """A decoder that keeps the mirror of which block has which window block."""

    def __init__(self, node: Killable, name: str = "d0") -> None:
        super().__init__(node, name, **GROUPS)
        self.mirror: dict[int, int] = {}
        self.credit: list[int] = []
        self.said: bytes | None = None  # of window blocks, in place of what is so

    async def lease(self, client: SessionClient, tokens: list[int], sealed: int) -> cache_pb2.HeldSequence:
        """As `hold`, with the mirror."""
        grant = await self.node.grant()
        answer = await client.ask(acquire=acquire_request(grant, tokens))
        self.mirror |= pairs(answer)
        lease = answer.acquire
        self.mirror |= pairs(
            await client.ask(report=report_request({"lease_id": lease.lease_id, "sealed_tokens": sealed}))
        )
        held = cache_pb2.HeldSequence(
            lease_id=lease.lease_id, grant=grant, key=acquire_request(grant, tokens).key, tokens=pack_tokens(tokens),
            blocks=lease.blocks, sealed_tokens=sealed, request_id="r1", priority=50,
        )  # fmt: skip
        self.held.append(held)
        return held

    async def borrow(self, client: SessionClient, count: int) -> None:
        """Some credit."""
        answer = await client.ask(credit=cache_pb2.CreditRequest(wanted_blocks=count))
        self.credit += ids(answer.credit)
        self.mirror |= pairs(answer)

    def resume_request(self, **changes: Any) -> Any:
        """With the window blocks of the credit and of what the windows have not passed."""
        needed = list(self.credit)
        for held in self.held:
            needed += ids(held.blocks)[max(0, held.sealed_tokens + 1 - 6) // 4 :]
        said = pack_tokens([number for block in needed for number in (block, self.mirror[block])])
        said = said if self.said is None else self.said
        values = {"credit_blocks": pack_tokens(self.credit), "window_blocks": said, **changes}
        return super().resume_request(**values)


async def windows_of(node: Killable) -> dict[int, int]:
    """Block -> its window block, as the daemon lists them."""
    listed = await node.admin.ListBlocks(admin_pb2.ListBlocksRequest())
    return {block.block: block.window_block for block in listed.blocks if block.window_block}


def test_hits_and_leases_keep_their_window_blocks() -> None:
    """The new daemon has each window block where the old one had it; the lease goes on, and a prompt is cached as
    far as it was."""

    async def body() -> None:
        async with killable() as node:
            decoder = Grouped(node)
            client = await decoder.attach()
            await decoder.lease(client, PROMPT, 9)
            await decoder.borrow(client, 2)
            before = await windows_of(node)
            assert len(before) == 5
            node.kill()
            await node.start()
            client = SessionClient(node.internal)
            answer = await decoder.come_back(client)
            assert answer.resumed and answer.leases[0]
            assert await windows_of(node) == before
            now = await node.snapshot()
            assert (now.indexed_blocks, now.windows.total_blocks, now.windows.free_blocks) == (2, WINDOWS, WINDOWS - 5)
            again = await client.ask(acquire=acquire_request(await node.grant(), [*PROMPT[:8], 77]))
            table = ids(again.acquire.blocks)
            assert again.acquire.cached_tokens == 8
            assert {block: pairs(again)[block] for block in table[:2]} == {block: before[block] for block in table[:2]}
            assert await node.violations() == []
            await client.ask(report=report_request({"lease_id": answer.leases[0], "release": True}))
            assert await node.violations() == []
            decoder.close()

    run(body)


@pytest.mark.parametrize("wrong", ["another's", "none", "beyond"])
def test_a_sequence_whose_decoder_says_another_window_block_is_not_kept(wrong: str) -> None:
    """It lost it, or the journal did: what it would compute next reads other memory. The sequence beside it goes on."""

    async def body() -> None:
        async with killable() as node:
            decoder = Grouped(node)
            client = await decoder.attach()
            odd = await decoder.lease(client, PROMPT, 9)
            await decoder.lease(client, [9, *PROMPT], 9)
            node.kill()
            await node.start()
            said = ids(decoder.resume_request().resume.window_blocks)
            block = ids(odd.blocks)[1]
            place = said[::2].index(block) * 2
            match wrong:
                case "another's":
                    said[place + 1] = decoder.mirror[ids(odd.blocks)[2]]
                case "none":
                    del said[place : place + 2]
                case _:
                    said[place + 1] = WINDOWS + 1
            decoder.said = pack_tokens(said)
            client = SessionClient(node.internal)
            answer = await decoder.come_back(client)
            assert answer.resumed and [bool(lease) for lease in answer.leases] == [False, True]
            assert await node.violations() == []

    run(body)


@pytest.mark.parametrize("said", [pack_tokens([1]), pack_tokens([BLOCKS + 1, 1]), pack_tokens([0, 1]), b"\1"])
def test_what_is_no_list_of_pairs_is_refused(said: bytes) -> None:
    """Half a pair, a block that is none, broken bytes: nothing has changed, and the right one is taken."""

    async def body() -> None:
        async with killable() as node:
            decoder = Grouped(node)
            client = await decoder.attach()
            await decoder.lease(client, PROMPT, 9)
            node.kill()
            await node.start()
            decoder.said = said
            with pytest.raises(AssertionError, match="window_blocks"):
                await decoder.come_back(SessionClient(node.internal))
            decoder.said = None
            assert (await decoder.come_back(SessionClient(node.internal))).leases[0]
            decoder.close()

    run(body)


def test_window_blocks_of_a_decoder_that_was_not_heard_are_given_to_nobody() -> None:
    """Neither while it is waited for, nor while its process may still write; then they are free again."""

    async def body() -> None:
        async with killable("--lease-seconds", "2", "--grace-seconds", "1") as node:
            first, second = Grouped(node), Grouped(node, "d1")
            await first.lease(await first.attach(), PROMPT, 4)
            client = await second.attach()
            await second.lease(client, [99, *PROMPT], 4)
            await second.borrow(client, 2)
            theirs = set(second.mirror.values())
            assert len(theirs) == 5
            node.kill()
            await node.start()
            client = SessionClient(node.internal)
            await first.come_back(client)
            grant = await node.grant()
            failed(await client.ask(acquire=acquire_request(grant, [7] * 6)), "POOL_FULL")

            got: set[int] = set()

            async def serves() -> bool:
                answer = await client.ask(credit=cache_pb2.CreditRequest(wanted_blocks=BLOCKS))
                got.update(pairs(answer).values())
                return bool(answer.credit_granted.granted_blocks)

            await eventually_async(serves)
            assert (await node.snapshot()).quarantined_blocks == 4  # one of its table is listed
            mine = {second.mirror[block] for block in await quarantined(node)}
            assert got and len(mine) == 4 and got.isdisjoint(mine)
            assert await node.violations() == []
            await second.attach()  # it begins anew: it writes no more what it had
            assert (await node.snapshot()).quarantined_blocks == 0
            assert not await quarantined(node) and await node.violations() == []
            more = await client.ask(credit=cache_pb2.CreditRequest(wanted_blocks=BLOCKS))
            assert set(pairs(more).values()) == mine
            first.close()
            second.close()

    run(body)


async def quarantined(node: Killable) -> list[int]:
    """The quarantined blocks."""
    request = admin_pb2.ListBlocksRequest(state=admin_pb2.BLOCK_STATE_QUARANTINED)
    return [block.block for block in (await node.admin.ListBlocks(request)).blocks]
