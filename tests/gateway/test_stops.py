"""Stop strings over streamed text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.stops import StopAutomaton, StopScanner

LETTERS = "ab"


def scan(stops: list[str], chunks: list[str], include: bool = False) -> tuple[list[str], str | None]:
    scanner = StopScanner(StopAutomaton(stops), include_stop=include)
    out = []
    for chunk in chunks:
        result = scanner.feed(chunk)
        out.append(result.text)
        if result.stop is not None:
            return out, result.stop
    out.append(scanner.flush())
    return out, None


def oracle(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """The match that ends first, of those the longest; by trying every end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(deadline=None)
@given(
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    chunks=st.lists(st.text(LETTERS + "c", max_size=4), max_size=12),
    include=st.booleans(),
)
def test_text_before_the_first_match_comes_out_however_it_is_cut(
    stops: list[str], chunks: list[str], include: bool
) -> None:
    """For all stops, texts and ways to cut them, the joined chunks are the text before the first match."""
    out, stop = scan(stops, chunks, include)
    assert ("".join(out), stop) == oracle(stops, "".join(chunks), include)


@settings(deadline=None)
@given(
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    text=st.text(LETTERS + "c", max_size=30),
)
def test_only_a_possible_prefix_of_a_stop_is_held_back(stops: list[str], text: str) -> None:
    """After every character, what is held back is exactly the longest end of the text that can become a stop."""
    scanner = StopScanner(StopAutomaton(stops), include_stop=False)
    out = ""
    for end, character in enumerate(text, start=1):
        result = scanner.feed(character)
        if result.stop is not None:
            return
        out += result.text
        read = text[:end]
        held = max(
            n for n in range(end + 1) if n == 0 or any(s.startswith(read[-n:]) and s != read[-n:] for s in stops)
        )
        assert out == read[: end - held]


@pytest.mark.parametrize("edges", [1, 2, 3, 4])
def test_a_stop_across_token_edges_never_shows(edges: int) -> None:
    """Row 29: a stop string that is cut into 2, 3, 4 and 5 tokens ends the text before it."""
    stop = "STOP!"
    cut = [stop[:1], *stop[1:edges], stop[edges:]] if edges > 1 else [stop[:2], stop[2:]]
    assert "".join(cut) == stop
    out, found = scan([stop], ["some ", "text ", *cut, " more"])
    assert ("".join(out), found) == ("some text ", stop)


def test_overlapping_stops_end_at_the_earliest_match() -> None:
    """Row 29: of "aab" and "ab" the match that begins first wins, and a lone "ab" is found too."""
    assert scan(["aab", "ab"], ["x", "a", "a", "b", "y"]) == (["x", "", "", ""], "aab")
    assert scan(["aab", "ab"], ["xcab"]) == (["xc"], "ab")


def test_a_long_stop_that_never_occurs_delays_nothing() -> None:
    """Row 30: with a 200-character stop string each chunk comes out with its own token."""
    chunks = ["The ", "quick ", "brown ", "fox"]
    out, found = scan(["z" * 200], chunks)
    assert (out, found) == ([*chunks, ""], None)


def test_half_a_stop_at_the_very_end_is_delivered() -> None:
    """Row 30: the first half of a stop string at the end of the text comes out with the flush."""
    assert scan(["END OF TEXT"], ["this is the ", "END OF"]) == (["this is the ", "", "END OF"], None)


def test_include_stop_keeps_the_stop_and_nothing_after_it() -> None:
    """With include_stop the text ends with the stop string."""
    assert scan(["ab"], ["xa", "bc"], include=True) == (["x", "ab"], "ab")


def test_an_unarmed_match_is_ignored_and_a_later_one_counts() -> None:
    """Before min_tokens a stop string is plain text; one that ends later stops, even if it began before."""
    scanner = StopScanner(StopAutomaton(["ab"]), include_stop=False)
    assert scanner.feed("xab", armed=False).stop is None
    assert scanner.feed("ya", armed=False).text + scanner.feed("b", armed=True).text == "y"
    reached = StopScanner(StopAutomaton(["aba"]), include_stop=False)
    assert reached.feed("aba", armed=False).text == "ab"
    assert reached.feed("ba").stop == "aba"


def test_feeding_past_a_stop_is_refused() -> None:
    """A scanner that stopped takes no more text."""
    scanner = StopScanner(StopAutomaton(["a"]), include_stop=False)
    scanner.feed("a")
    with pytest.raises(ValueError, match="stopped"):
        scanner.feed("b")
    with pytest.raises(ValueError, match="empty"):
        StopAutomaton([""])
