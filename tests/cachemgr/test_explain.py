"""ExplainPrefix's core: how far a prompt is resident, and the one true reason why it stops there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cachemgr.explain import Elsewhere, Explanation, MissReason
from cachemgr.ghosts import MAX_GHOSTS
from cachemgr.ids import TenantId
from cachemgr.keys import Scope
from tests.cachemgr.core_rig import Rig, pack, root_of, span_of

B = 4
PROMPT = list(range(4 * B))
PUBLIC = "@public"


def explain(
    rig: Rig, tokens: Sequence[int], *, tenant: str = "a", root: str = "", scope: str = "", num_tokens: int = 0,
    others: Sequence[Elsewhere] = (),
) -> Explanation:  # fmt: skip
    """The explanation; looking has changed nothing."""
    order = [(node.node_id, node.last_use, node.priority) for node in rig.manager._state.index.forest.nodes.values()]
    shot = rig.manager.snapshot()
    answer = rig.manager.explain(
        TenantId(tenant), root=root_of(root or tenant), tokens=pack(tokens),
        prefix=span_of(scope, num_tokens) if scope else None, others=others,
    )  # fmt: skip
    nodes = rig.manager._state.index.forest.nodes.values()
    assert [(node.node_id, node.last_use, node.priority) for node in nodes] == order
    assert rig.manager.snapshot() == shot
    rig.check()
    return answer


@pytest.mark.parametrize("length", [1, B - 1, B, 2 * B + 1, 4 * B])
def test_resident(length: int) -> None:
    """All of the prompt is there, its last token too."""
    rig = Rig()
    rig.serve(PROMPT)
    assert explain(rig, PROMPT[:length]) == Explanation(length, 0, MissReason.RESIDENT)


@pytest.mark.parametrize("length", [1, B - 1, B, B + 2, 3 * B])
def test_diverged(length: int) -> None:
    """The token where it diverges, and what stands there instead, at most eight tokens."""
    rig = Rig()
    rig.serve(PROMPT)
    answer = explain(rig, [*PROMPT[:length], 99, 98])
    assert answer.reason is MissReason.DIVERGED
    assert answer.resident_tokens == length
    assert answer.other_tokens == tuple(PROMPT[length : length + 8])


def test_diverged_between_children_names_one_that_stands_there() -> None:
    """Behind a node with several children, the nearest is shown."""
    rig = Rig()
    rig.serve([*PROMPT[:B], 50, 51, 52, 53])
    rig.serve([*PROMPT[:B], 60, 61, 62, 63])
    answer = explain(rig, [*PROMPT[:B], 61, 61, 61, 61])
    assert (answer.reason, answer.resident_tokens) == (MissReason.DIVERGED, B)
    assert answer.other_tokens in ((50, 51, 52, 53), (60, 61, 62, 63))
    inside = explain(rig, [*PROMPT[:B], 60, 61, 7, 7])
    assert (inside.resident_tokens, inside.other_tokens) == (B + 2, (62, 63))


def test_never_seen() -> None:
    """Nothing is known to have gone on there; and a tenant that never was has nothing at all."""
    rig = Rig()
    rig.serve(PROMPT)
    assert explain(rig, [*PROMPT, 1, 2]) == Explanation(4 * B, 0, MissReason.NEVER_SEEN)
    assert explain(rig, PROMPT, tenant="nobody") == Explanation(0, 0, MissReason.NEVER_SEEN)


def test_another_tenants_prompt_is_never_told() -> None:
    """What A has is no reason and no token of an answer about B."""
    rig = Rig()
    rig.serve(PROMPT, tenant="a")
    rig.serve([*PROMPT[:B], 70, 71], tenant="b")
    answer = explain(rig, PROMPT, tenant="b")
    assert (answer.reason, answer.resident_tokens, answer.other_tokens) == (MissReason.DIVERGED, B, (70, 71))
    assert explain(rig, PROMPT, tenant="a").reason is MissReason.RESIDENT


def test_evicted_when_and_for_whom() -> None:
    """The tenant that needed the room is named, and the time it went."""
    rig = Rig(num_blocks=6)
    rig.serve(PROMPT)
    rig.manager.tick(5_000)
    rig.serve(range(100, 100 + 4 * B), tenant="b")  # takes two of a's four
    answer = explain(rig, PROMPT)
    assert (answer.reason, answer.resident_tokens) == (MissReason.EVICTED, 2 * B)
    assert answer.evicted_for == "b"
    assert explain(rig, [*PROMPT[: 2 * B], 9, 9]).reason is MissReason.NEVER_SEEN  # that was never there
    assert explain(rig, range(100, 100 + 4 * B), tenant="b").reason is MissReason.RESIDENT


def test_evicted_whole_and_in_parts() -> None:
    """However a prompt went, in one piece or block by block, the place where it stops now is known."""
    for step in (1, 2, 4):
        rig = Rig()
        rig.serve(PROMPT)
        for left in range(4 - step, -1, -step):
            rig.manager.evict(num_blocks=step)
            answer = explain(rig, PROMPT)
            assert (answer.reason, answer.resident_tokens) == (MissReason.EVICTED, left * B)
            assert answer.evicted_for == "operator"


def test_evicted_and_partly_computed_again() -> None:
    """Where another prompt brought the first blocks back, the rest is still known as evicted."""
    rig = Rig()
    rig.serve(PROMPT)
    rig.manager.evict(num_blocks=4)
    rig.serve([*PROMPT[: 2 * B], 80, 81])
    answer = explain(rig, PROMPT)
    assert (answer.reason, answer.resident_tokens) == (MissReason.EVICTED, 2 * B)
    other = explain(rig, [*PROMPT[: 2 * B], 90])
    assert (other.reason, other.other_tokens) in (
        (MissReason.DIVERGED, (80, 81)),
        (MissReason.EVICTED, ()),  # the ring keeps the first block of a run: it cannot tell what its third one held
    )


def test_another_prompt_that_stops_where_one_was_evicted_is_none_of_it() -> None:
    """A run that went began with other tokens: it says nothing about this prompt."""
    rig = Rig()
    rig.serve(PROMPT)
    rig.manager.evict(num_blocks=4)
    rig.serve(range(600, 600 + 2 * B))
    assert explain(rig, [*range(600, 600 + 2 * B), *PROMPT[2 * B :]]).reason is MissReason.NEVER_SEEN
    assert explain(rig, PROMPT).reason is MissReason.EVICTED


def test_an_evicted_tail_is_known_by_its_tokens() -> None:
    """A partly filled block that went is told apart from one that held something else."""
    rig = Rig()
    rig.serve([*PROMPT[:B], 40, 41])
    rig.serve([*PROMPT[:B], 50])
    rig.serve([*PROMPT[:B], *PROMPT[B : 2 * B]])
    rig.manager.evict(num_blocks=2)
    assert explain(rig, [*PROMPT[:B], 40, 41, 42]).reason is MissReason.EVICTED
    assert explain(rig, [*PROMPT[:B], 50]).reason is MissReason.EVICTED
    assert explain(rig, [*PROMPT[:B], 45]).reason is MissReason.DIVERGED


def test_what_was_evicted_below_other_tokens_is_no_reason() -> None:
    """The same block in the same place of another prompt was not this prompt's."""
    rig = Rig()
    rig.serve([*range(300, 300 + B), *PROMPT[:B]])
    rig.serve([*range(400, 400 + B), 7])
    rig.manager.set_priority(TenantId("a"), root=root_of("a"), tokens=pack([*range(400, 400 + B), 7]), priority=99)
    assert rig.manager.evict(num_blocks=1) == 1
    assert explain(rig, [*range(300, 300 + B), *PROMPT[:B]]).reason is MissReason.EVICTED
    assert explain(rig, [*range(400, 400 + B), *PROMPT[:B]]).reason is MissReason.DIVERGED


def test_still_computing() -> None:
    """A running sequence computes more of it: how much."""
    rig = Rig()
    running = rig.acquire(PROMPT)
    rig.compute(running, B)
    rig.report(rig.message(running))
    answer = explain(rig, [*PROMPT, 5])
    assert (answer.reason, answer.resident_tokens, answer.computing_tokens) == (MissReason.COMPUTING, B, 4 * B)
    assert explain(rig, PROMPT, tenant="b").reason is MissReason.NEVER_SEEN
    rig.finish(running)
    assert explain(rig, PROMPT).reason is MissReason.RESIDENT


def test_the_key_differs() -> None:
    """It is resident further under another key: which parts differ. Where it is not, they are no reason."""
    rig = Rig()
    rig.serve(PROMPT)
    place = Elsewhere(root_of("a"), None, ("revision", "kv_dtype"))
    answer = explain(rig, PROMPT, root="other", others=[place])
    assert answer.reason is MissReason.KEY_DIFFERS
    assert (answer.differing_parts, answer.elsewhere_tokens) == (("revision", "kv_dtype"), 4 * B)
    assert explain(rig, range(700, 720), root="other", others=[place]).reason is MissReason.NEVER_SEEN
    assert explain(rig, PROMPT, root="other").reason is MissReason.NEVER_SEEN


def test_of_several_places_the_one_that_has_most_is_named() -> None:
    """The longest prefix elsewhere is the reason."""
    rig = Rig()
    rig.serve(PROMPT[: 2 * B], tenant="a")
    rig.serve(PROMPT, tenant="a", scope=PUBLIC, num_tokens=3 * B)
    places = [
        Elsewhere(root_of("a"), None, ("revision",)),
        Elsewhere(root_of("a"), span_of(PUBLIC, 3 * B), (), Scope.PUBLIC),
    ]
    answer = explain(rig, PROMPT, root="other", others=places)
    assert (answer.reason, answer.other_scope) == (MissReason.OTHER_SCOPE, Scope.PUBLIC)
    assert answer.elsewhere_tokens == 4 * B


def test_resident_in_another_scope() -> None:
    """A request that did not name the scope is told which one has it; one that did has it."""
    rig = Rig()
    rig.serve(PROMPT, tenant="b", scope=PUBLIC, num_tokens=3 * B)
    place = Elsewhere(root_of("a"), span_of(PUBLIC, 3 * B), (), Scope.PUBLIC)
    answer = explain(rig, PROMPT, others=[place])
    assert (answer.reason, answer.other_scope, answer.elsewhere_tokens) == (
        MissReason.OTHER_SCOPE, Scope.PUBLIC, 3 * B
    )  # fmt: skip
    named = explain(rig, PROMPT, scope=PUBLIC, num_tokens=3 * B)
    assert (named.resident_tokens, named.scope_tokens, named.reason) == (3 * B, 3 * B, MissReason.NEVER_SEEN)
    private = Elsewhere(root_of("b"), None, (), Scope.PRIVATE)
    rig.serve(PROMPT, tenant="b")
    hidden = explain(rig, PROMPT, tenant="b", scope="@group:g", num_tokens=2 * B, others=[private])
    assert (hidden.reason, hidden.other_scope) == (MissReason.OTHER_SCOPE, Scope.PRIVATE)


def test_layers_are_explained_like_requests_see_them() -> None:
    """Residency, divergence, computing and eviction in a prefix and in the tail below it."""
    rig = Rig(num_blocks=64)
    options = {"scope": PUBLIC, "num_tokens": 2 * B}
    running = rig.acquire(PROMPT, tenant="b", scope=PUBLIC, num_tokens=2 * B)
    assert explain(rig, PROMPT, **options).computing_tokens == 2 * B  # type: ignore[arg-type]
    assert explain(rig, PROMPT, tenant="b", **options).computing_tokens == 4 * B  # type: ignore[arg-type]
    rig.finish(running)
    rig.serve(PROMPT, tenant="a", scope=PUBLIC, num_tokens=2 * B)
    whole = explain(rig, PROMPT, **options)  # type: ignore[arg-type]
    assert whole == Explanation(4 * B, 2 * B, MissReason.RESIDENT)
    tail = explain(rig, [*PROMPT[: 3 * B], 9], **options)  # type: ignore[arg-type]
    assert (tail.reason, tail.resident_tokens, tail.other_tokens) == (MissReason.DIVERGED, 3 * B, (12, 13, 14, 15))
    above = explain(rig, [*PROMPT[: B + 1], *range(80, 90)], **options)  # type: ignore[arg-type]
    assert (above.reason, above.resident_tokens, above.scope_tokens) == (MissReason.DIVERGED, B + 1, B + 1)
    assert above.other_tokens == ()  # what a wider scope holds is not the tenant's to see
    assert rig.manager.evict(tenant=TenantId("a")) == 2
    gone = explain(rig, PROMPT, **options)  # type: ignore[arg-type]
    assert (gone.reason, gone.resident_tokens, gone.evicted_for) == (MissReason.EVICTED, 2 * B, "operator")
    rig.manager.evict(everything=True)
    empty = explain(rig, PROMPT, **options)  # type: ignore[arg-type]
    assert (empty.reason, empty.resident_tokens) == (MissReason.EVICTED, 0)


def test_the_ring_is_bounded() -> None:
    """Old evictions are forgotten; nothing grows."""
    rig = Rig(num_blocks=2)
    rig.serve(range(5, 5 + B))
    for number in range(MAX_GHOSTS + 4):
        rig.serve([*range(B * number + 100, B * number + 100 + B)])
    assert explain(rig, range(5, 5 + B)).reason is not MissReason.EVICTED
    last = B * (MAX_GHOSTS - 1) + 100
    assert explain(rig, range(last, last + B)).reason is MissReason.EVICTED
    assert len(rig.manager._state.index.forest.ghosts._ring) == MAX_GHOSTS
