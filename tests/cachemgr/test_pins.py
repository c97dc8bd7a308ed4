"""Pins keep what is resident, within a budget and for a time; priorities can be changed later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cachemgr.ids import TenantId
from cachemgr.quotas import Quota
from cachemgr.views import PinView
from common.errors import InvalidArgument, NotFound, ResourceExhausted
from tests.cachemgr.core_rig import Rig, pack, root_of, span_of
from tests.cachemgr.test_pruning import Approved

B = 4
A = TenantId("a")
TEAM = "@group:team"


def pinned_rig(num_blocks: int = 16, pin_blocks: int = 8) -> Rig:
    rig = Rig(num_blocks=num_blocks)
    rig.manager.set_quota(A, Quota(pin_blocks=pin_blocks))
    return rig


def pin(rig: Rig, tokens: Sequence[int], ttl_ns: int | None = None) -> PinView:
    return rig.manager.pin(A, root=root_of("a"), tokens=pack(tokens), now_ns=rig.now_ns, ttl_ns=ttl_ns)


def flood(rig: Rig) -> None:
    for number in range(40):
        rig.serve(range(1000 * number, 1000 * number + 3 * B), tenant="a")


def test_a_pin_survives_a_flood_until_it_is_ended() -> None:
    """What is pinned is a hit after any flood; ended, it goes like all else."""
    rig = pinned_rig()
    prompt = [*range(500, 500 + 2 * B + 2)]
    rig.serve(prompt)
    made = pin(rig, prompt)
    assert (made.num_tokens, made.num_blocks, made.tenant, made.expires_ns) == (2 * B + 2, 3, "a", None)
    assert rig.manager.list_pins().items == [made]
    assert rig.manager.count_pinned() == rig.manager.count_pinned(A) == 3
    flood(rig)
    rig.check()
    assert rig.serve([*prompt, 9]) == len(prompt)
    rig.manager.unpin(made.pin)
    flood(rig)
    rig.quiet()
    assert rig.serve([*prompt, 9]) == 0
    assert rig.manager.list_pins().items == []
    with pytest.raises(NotFound):
        rig.manager.unpin(made.pin)


def test_only_what_is_resident_is_pinned() -> None:
    """A pin covers the resident part of its prefix, up to the middle of a block; of nothing there is no pin."""
    rig = pinned_rig()
    rig.serve(range(3 * B))
    made = pin(rig, [*range(2 * B + 1), 77, 78, 79, 80])
    assert (made.num_tokens, made.num_blocks) == (2 * B + 1, 3)
    with pytest.raises(NotFound, match="resident"):
        pin(rig, [900, 901])
    with pytest.raises(NotFound):
        rig.manager.pin(TenantId("b"), root=root_of("a"), tokens=pack(range(3 * B)), now_ns=0)
    for root, tokens, ttl in ((b"", b"\0" * 4, None), (root_of("a"), b"\0", None), (root_of("a"), b"\0" * 4, 0)):
        with pytest.raises(InvalidArgument):
            rig.manager.pin(A, root=root, tokens=tokens, now_ns=0, ttl_ns=ttl)


def test_the_budget_counts_each_block_once() -> None:
    """Pins that overlap share their blocks; one block beyond the budget is refused with numbers and changes nothing."""
    rig = pinned_rig(pin_blocks=4)
    rig.serve(range(3 * B))
    rig.serve([*range(2 * B), *range(100, 100 + 2 * B)])
    first, second = pin(rig, range(3 * B)), pin(rig, range(2 * B))
    with pytest.raises(ResourceExhausted) as caught:
        pin(rig, [*range(2 * B), *range(100, 100 + 2 * B)])
    error = caught.value
    assert (error.reason, error.subject, error.needed, error.usable) == ("PIN_BUDGET_EXCEEDED", "pin_blocks", 5, 4)
    rig.check()
    assert rig.manager.count_pinned(A) == 3
    third = pin(rig, [*range(2 * B), *range(100, 100 + B)])
    for made in (first, second, third):
        rig.check()
        rig.manager.unpin(made.pin)
    rig.quiet()
    with pytest.raises(ResourceExhausted):
        Rig.serve(rig := Rig(), range(B))  # a tenant without a quota has no pins
        pin(rig, range(B))


def test_a_pin_ends_with_its_time() -> None:
    """A pin with a time to live ends at the tick after it, not before."""
    rig = pinned_rig()
    rig.serve(range(2 * B))
    made = pin(rig, range(2 * B), ttl_ns=10)
    assert made.expires_ns == 10
    rig.manager.tick(9)
    assert rig.manager.count_pinned() == 2
    rig.manager.tick(10)
    assert rig.manager.count_pinned() == 0
    rig.quiet()


def test_a_pinned_tail_that_is_outgrown_goes_when_the_pin_ends() -> None:
    """A partly filled block that something longer covers by now is kept for its pin and dropped after it."""
    rig = pinned_rig()
    rig.serve(range(B + 2))
    made = pin(rig, range(B + 2))
    rig.serve(range(2 * B))
    rig.check()
    before = rig.manager.snapshot().indexed_blocks
    rig.manager.unpin(made.pin)
    rig.quiet()
    assert rig.manager.snapshot().indexed_blocks == before - 1


def test_a_purge_ends_pins() -> None:
    """Purging a tenant ends its pins and frees their blocks; another tenant's stay."""
    rig = pinned_rig()
    rig.manager.set_quota(TenantId("b"), Quota(pin_blocks=8))
    rig.serve(range(2 * B), tenant="a")
    rig.serve(range(2 * B), tenant="b")
    pin(rig, range(2 * B))
    kept = rig.manager.pin(TenantId("b"), root=root_of("b"), tokens=pack(range(2 * B)), now_ns=0)
    rig.manager.purge(A)
    rig.check()
    assert rig.manager.list_pins().items == [kept]
    assert rig.manager.snapshot().free_blocks == 14


def pin_in_team(rig: Rig, tokens: Sequence[int], num_tokens: int = 2 * B) -> PinView:
    prefix = span_of(TEAM, num_tokens)
    return rig.manager.pin(A, root=root_of("a"), tokens=pack(tokens), now_ns=0, prefix=prefix)


@pytest.mark.parametrize("num_tokens", [4 * B + 2, 4 * B, 3 * B + 1, 2 * B, 2 * B - 1, B])
def test_a_pin_reaches_through_a_wider_scope(num_tokens: int) -> None:
    """Two blocks of a group and the private tail below: what is pinned of both outlives the eviction of either, and
    counts for the tenant's budget. Ended, it goes. Without the scope's name there is nothing to pin."""
    rig = pinned_rig()
    prompt = [*range(500, 500 + 4 * B + 2)]
    rig.serve(prompt, scope=TEAM, num_tokens=2 * B)
    with pytest.raises(NotFound):
        pin(rig, prompt)
    made = pin_in_team(rig, prompt[:num_tokens])
    rig.check()
    num_blocks = -(-num_tokens // B)
    assert (made.num_tokens, made.num_blocks) == (num_tokens, num_blocks)
    assert rig.manager.count_pinned(A) == num_blocks
    for owner in (A, TenantId(TEAM)):
        rig.manager.evict(tenant=owner)
    rig.check()
    assert rig.manager.snapshot().indexed_blocks == num_blocks
    hit = rig.acquire([*prompt, 9], scope=TEAM, num_tokens=2 * B)
    assert hit.computed >= (num_tokens if num_tokens >= 2 * B else num_tokens // B * B)
    rig.finish(hit)
    rig.manager.unpin(made.pin)
    rig.quiet()
    for owner in (A, TenantId(TEAM)):
        rig.manager.evict(tenant=owner)
    assert rig.serve([*prompt, 9], scope=TEAM, num_tokens=2 * B) == 0


def test_a_pin_in_a_wider_scope_has_the_budget_of_its_tenant() -> None:
    """Blocks of the scope count like the tenant's own, each once; one beyond is refused with numbers."""
    rig = pinned_rig(pin_blocks=3)
    prompt = [*range(500, 500 + 4 * B)]
    rig.serve(prompt, scope=TEAM, num_tokens=2 * B)
    pin_in_team(rig, prompt[: 2 * B])
    pin_in_team(rig, prompt[: 3 * B])
    with pytest.raises(ResourceExhausted) as caught:
        pin_in_team(rig, prompt)
    assert (caught.value.reason, caught.value.needed, caught.value.usable) == ("PIN_BUDGET_EXCEEDED", 4, 3)
    rig.check()


@pytest.mark.parametrize("end", ["purge of the tenant", "purge of the scope", "prune", "prune of another"])
def test_a_pin_ends_with_the_scope_that_it_begins_in(end: str) -> None:
    """What may not be named any more is not kept either; a prune that leaves the prefix leaves the pin."""
    rig = pinned_rig()
    prompt = [*range(500, 500 + 4 * B)]
    rig.serve(prompt, scope=TEAM, num_tokens=2 * B)
    rig.serve(range(700, 700 + 2 * B), scope=TEAM, num_tokens=2 * B)
    pin_in_team(rig, prompt)
    stays = end == "prune of another"
    if end.startswith("purge"):
        rig.manager.purge(A if end.endswith("tenant") else TenantId(TEAM))
    else:
        rig.manager.prune(TenantId(TEAM), Approved(prompt[: 2 * B] if stays else [*range(700, 700 + 2 * B)]))
    rig.check()
    assert len(rig.manager.list_pins().items) == stays
    if not stays:
        rig.quiet()


def test_a_pin_of_two_paths_is_found() -> None:
    """CheckIntegrity sees a pin whose tail hangs at another prefix of the scope than the one that it keeps."""
    rig = pinned_rig()
    for first in (500, 700):
        rig.serve(range(first, first + 3 * B), scope=TEAM, num_tokens=2 * B)
    made = pin_in_team(rig, [*range(500, 500 + 3 * B)])
    pins = rig.manager._state.pins
    other = pin_in_team(rig, [*range(700, 700 + 3 * B)])
    rig.check()
    mixed = np.concatenate((pins[other.pin].blocks[:2], pins[made.pin].blocks[2:]))
    pins[made.pin] = replace(pins[made.pin], blocks=mixed)
    assert f"pin {made.pin}: its blocks are of two trees, one of which does not hang at the other" in (
        rig.manager.check_integrity()
    )


def test_a_priority_reaches_through_a_wider_scope() -> None:
    """The prefix, for everybody, and the tail below it, as far as the prompt says; what else hangs there keeps its."""
    rig = Rig(num_blocks=32)
    prompt = [*range(500, 500 + 4 * B)]
    for tenant in ("a", "b"):
        rig.serve(prompt, tenant=tenant, scope=TEAM, num_tokens=2 * B)

    def set_to(priority: int, tokens: Sequence[int]) -> int:
        prefix = span_of(TEAM, 2 * B)
        changed = rig.manager.set_priority(A, root=root_of("a"), tokens=pack(tokens), priority=priority, prefix=prefix)
        rig.check()
        return changed

    def shown() -> list[tuple[str, int, int]]:
        items = rig.manager.list_prefixes().items
        return sorted((item.tenant, item.start_token, item.priority) for item in items)

    assert set_to(7, prompt) == 4 * B
    assert shown() == [(TEAM, 0, 7), ("a", 2 * B, 7), ("b", 2 * B, 50)]
    assert set_to(8, prompt[: 3 * B]) == 3 * B
    assert shown() == [(TEAM, 0, 8), ("a", 2 * B, 8), ("a", 3 * B, 7), ("b", 2 * B, 50)]
    assert set_to(9, [*prompt[: 2 * B], prompt[2 * B], 900]) == 2 * B  # part of a block of the tail
    assert set_to(10, prompt[:B]) == B
    assert shown()[:2] == [(TEAM, 0, 10), (TEAM, B, 9)]
    with pytest.raises(NotFound):
        set_to(1, [900] * B)


def test_pins_are_listed_in_pages() -> None:
    """Each pin is on one page, by id."""
    rig = pinned_rig()
    rig.serve(range(2 * B))
    made = [pin(rig, range(2 * B)) for _ in range(5)]
    page = rig.manager.list_pins(limit=3)
    assert page.items == made[:3]
    rest = rig.manager.list_pins(after=page.next_after, limit=3)
    assert (rest.items, rest.next_after) == (made[3:], 0)


def test_a_priority_set_later_decides_who_goes() -> None:
    """Raised, a prefix outlives what was used after it; lowered, it goes before what was used long ago."""
    for priority, survives in ((90, True), (50, False), (0, False)):
        rig = Rig(num_blocks=12)
        rig.serve(range(2 * B))
        rig.serve(range(500, 500 + 2 * B))
        assert rig.manager.set_priority(A, root=root_of("a"), tokens=pack(range(2 * B)), priority=priority) == 2 * B
        for number in range(4):
            rig.serve(range(2000 + 100 * number, 2000 + 100 * number + 2 * B))
        rig.check()
        rig.serve(range(5000, 5000 + 2 * B))
        assert (rig.serve([*range(2 * B), 7]) == 2 * B) is survives
    rig = Rig(num_blocks=8)
    rig.serve(range(500, 500 + 2 * B))
    rig.serve(range(2 * B))
    rig.manager.set_priority(A, root=root_of("a"), tokens=pack(range(2 * B)), priority=0)
    rig.manager.evict(num_blocks=2)
    assert rig.serve([*range(500, 500 + 2 * B), 7]) == 2 * B


def test_a_priority_covers_its_prefix_and_no_more() -> None:
    """What goes on after the prefix, or beside it, keeps its priority; of nothing there is no priority."""
    rig = Rig(num_blocks=32)
    rig.serve(range(4 * B))
    rig.serve([*range(2 * B), *range(100, 100 + B + 2)])
    changed = rig.manager.set_priority(A, root=root_of("a"), tokens=pack([*range(B), *range(B, 2 * B - 1)]), priority=7)
    assert changed == B
    rig.check()
    nodes = rig.manager._state.index.forest.nodes.values()
    assert sorted((node.start, len(node.blocks), node.priority) for node in nodes) == [
        (0, 1, 7), (1, 1, 50), (2, 1, 50), (2, 2, 50), (3, 1, 50),
    ]  # fmt: skip
    tail = [*range(2 * B), *range(100, 100 + B + 2)]
    assert rig.manager.set_priority(A, root=root_of("a"), tokens=pack(tail), priority=3) == len(tail)
    rig.check()
    with pytest.raises(NotFound):
        rig.manager.set_priority(A, root=root_of("a"), tokens=pack([900] * B), priority=3)
    with pytest.raises(NotFound, match="whole block"):
        rig.manager.set_priority(A, root=root_of("a"), tokens=pack([0, 900]), priority=3)
    with pytest.raises(InvalidArgument):
        rig.manager.set_priority(A, root=root_of("a"), tokens=pack(range(B)), priority=101)
