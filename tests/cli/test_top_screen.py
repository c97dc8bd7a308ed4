"""The screen of `tessera admin top` and the drawn tree: what stands where, and that no number can break it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cli.admin_tree import show_tree
from cli.top_screen import MAP_LINES, WIDTH, Reading, draw
from tessera.admin.v1 import admin_pb2


def snapshot(**fields: Any) -> Any:
    values = {"epoch": 1, "total_blocks": 100, "block_tokens": 16, "block_bytes": 2**20, **fields}
    return admin_pb2.GetSnapshotResponse(**values)


def reading(moment: float = 0.0, blocks: Any = None, sessions: Any = (), limits: Any = None, **fields: Any) -> Reading:
    return Reading(moment, snapshot(**fields), sessions, blocks, limits or admin_pb2.GetHitRateLimitsResponse(), moment)


def test_before_the_first_decoder_there_is_still_a_screen() -> None:
    """Nothing to show is said in words."""
    empty = Reading(0, admin_pb2.GetSnapshotResponse(epoch=4), (), None, admin_pb2.GetHitRateLimitsResponse(), 0)
    text = draw(empty, None)
    assert "epoch 4   no decoder has attached yet" in text
    assert "no decoder is attached" in text
    assert "no request was admitted yet" in text


def test_map_of_a_small_pool_is_block_by_block() -> None:
    """Each block is where its number says."""
    states = [
        admin_pb2.BLOCK_STATE_FREE,
        admin_pb2.BLOCK_STATE_ACTIVE,
        admin_pb2.BLOCK_STATE_CACHED,
        admin_pb2.BLOCK_STATE_QUARANTINED,
    ]
    lines = draw(reading(blocks=states * 25), None).splitlines()
    assert lines[2] == ".#=!" * 16
    assert lines[3] == ".#=!" * 9


def test_map_of_a_large_pool_is_its_shares() -> None:
    """Active, cached, quarantined and free in their proportions; whatever there is at all is seen."""
    lines = draw(reading(active_blocks=50, cached_blocks=25, quarantined_blocks=1, free_blocks=24), None).splitlines()
    drawn = "".join(lines[2 : 2 + MAP_LINES])
    assert len(drawn) == WIDTH * MAP_LINES
    assert (drawn.count("#"), drawn.count("=")) == (WIDTH * 2, WIDTH)
    assert drawn.count("!") == 3
    tiny = draw(reading(total_blocks=10**6, quarantined_blocks=1, free_blocks=10**6 - 1), None)
    assert tiny.splitlines()[2].startswith("!.")


def test_window_blocks_have_a_line_where_there_are_any() -> None:
    """Without layer groups nothing is said of them; with them the size of the pool counts both."""
    assert "window" not in draw(reading(), None)
    windows = admin_pb2.WindowPool(total_blocks=30, free_blocks=10, needed_blocks=7, block_bytes=2**21)
    text = draw(reading(windows=windows), None)
    assert "100 blocks of 16 tokens, 160 MiB" in text
    assert "window blocks: needed 7   attached 20   free 10" in text


def test_rates_are_of_the_time_between_two_looks() -> None:
    """Numbers a second, and none across a restart of the daemon."""
    before = reading(moment=10, generated_tokens=100, evictions=5)
    now = reading(moment=12, generated_tokens=150, evictions=5)
    rows = {line.split("  ")[0]: line.split() for line in draw(now, before).splitlines() if "tokens" in line}
    assert rows["generated tokens"][-2:] == ["25.0", "150"]
    anew = reading(moment=14, generated_tokens=3, epoch=2)
    rows = {line.split("  ")[0]: line.split() for line in draw(anew, now).splitlines() if "tokens" in line}
    assert rows["generated tokens"] == ["generated", "tokens", "3"]


def test_quota_bar_shows_use_and_floor() -> None:
    """Half used, the floor at a quarter; without a ceiling the pool is the whole."""
    usage = admin_pb2.TenantUsage(tenant="acme", used_blocks=20, floor_blocks=10, ceiling_blocks=40, hits=3, misses=1)
    text = draw(reading(tenants=[usage, admin_pb2.TenantUsage(tenant="blue", used_blocks=100)]), None)
    acme = next(line for line in text.splitlines() if line.startswith("acme"))
    assert "[#####|####..........]" in acme
    assert "75.0 %" in acme
    assert "request hits" in text
    assert "[####################]" in next(line for line in text.splitlines() if line.startswith("blue"))


def test_distance_to_the_best_and_decoders_that_are_away() -> None:
    """How far the hit rate is from the best possible; who is attached, and who has lost its stream."""
    limits = admin_pb2.GetHitRateLimitsResponse(admissions=9, hit_rate=0.5, best_hit_rate=0.625, infinite_hit_rate=0.75)
    sessions = [admin_pb2.Session(decoder_name="d0", leases=2), admin_pb2.Session(decoder_name="d1", away=True)]
    text = draw(reading(limits=limits, sessions=sessions), None)
    assert "62.5 % was the best possible in this pool: 12.5 % away" in text
    assert "token hits 50.0 % of the prompt tokens" in text
    shown = {line.split()[0]: line.split()[2] for line in text.splitlines() if line.startswith(("d0", "d1"))}
    assert shown == {"d0": "attached", "d1": "away"}


@given(
    total=st.integers(0, 10**9),
    parts=st.lists(st.integers(0, 10**9), min_size=4, max_size=4),
    used=st.integers(0, 2**40),
    floor=st.integers(0, 2**40),
    ceiling=st.integers(0, 2**40),
)
def test_no_numbers_break_the_screen(total: int, parts: list[int], used: int, floor: int, ceiling: int) -> None:
    """Counts that do not add up, as between two looks, still give a map of the right size and a bar in its frame."""
    usage = admin_pb2.TenantUsage(tenant="t", used_blocks=used, floor_blocks=floor, ceiling_blocks=ceiling)
    names = ("active_blocks", "cached_blocks", "quarantined_blocks", "free_blocks")
    text = draw(reading(total_blocks=total, tenants=[usage], **dict(zip(names, parts, strict=True))), None)
    bar = next(line for line in text.splitlines() if line.startswith("t ")).split()[1]
    assert len(bar) == 22 and bar[0] == "[" and bar[-1] == "]"
    if total:
        assert all(len(line) == WIDTH for line in text.splitlines()[2 : 2 + MAP_LINES])


def prefix(node: int, parent: int, tenant: str = "acme", start: int = 0, **fields: Any) -> Any:
    values = {"num_tokens": 16, "blocks": [node], **fields}
    return admin_pb2.Prefix(node=node, parent=parent, tenant=tenant, start_token=start, **values)


def test_tree_hangs_each_node_below_its_parent() -> None:
    """Children below parents, tenants apart, another owner's tail below the scope that it goes on from."""
    text = show_tree(
        [
            prefix(1, 0),
            prefix(2, 1, start=16, references=2),
            prefix(3, 1, start=16, pinned=True),
            prefix(4, 2, start=32, expires_in_seconds=9.0, priority=70),
            prefix(5, 0, "@public", num_tokens=48, blocks=[0, 0, 5]),  # two are gone
            prefix(6, 5, "blue", start=16),
        ]
    )
    assert text.splitlines() == [
        "@public",
        "└─ #5  tokens 0..47, 1 block",
        "   └─ #6  tokens 16..31, 1 block, of blue",
        "acme",
        "└─ #1  tokens 0..15, 1 block",
        "   ├─ #2  tokens 16..31, 1 block, 2 holders",
        "   │  └─ #4  tokens 32..47, 1 block, priority 70, ends in 9 s",
        "   └─ #3  tokens 16..31, 1 block, pinned",
    ]


def test_deep_tree_is_drawn_without_recursion() -> None:
    """A conversation of many turns is as deep as it has turns."""
    text = show_tree([prefix(node, node - 1, start=(node - 1) * 16) for node in range(1, 3001)])
    assert len(text.splitlines()) == 3001
