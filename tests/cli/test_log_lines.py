"""What of a log reaches the terminal, and in which words."""

from __future__ import annotations

import json

from cli.log_lines import COMPILING, SENTENCES, last_words, loud_line


def event(name: str, level: str = "error", **fields: object) -> str:
    """A line as our processes log it."""
    return json.dumps({**fields, "event": name, "level": level, "timestamp": "t", "process": "decoder-0"})


def test_errors_are_told_in_words_and_the_rest_is_not() -> None:
    """Events of level error become one sentence without frames; other events, and broken lines, stay in the file."""
    line = event("step_failed", error="ValueError", frames=["a.py:1 f"], sequences=3, failed_steps=1)
    assert loud_line(line) == "a step failed (ValueError); its 3 sequences have ended"
    assert loud_line(event("odd_thing", some_count=7)) == "odd thing: some count 7"
    assert loud_line(event("step_failed", error="X\nY")) == "step failed: error X Y"
    assert loud_line("error: no room") == "error: no room"
    quiet = [event("ready", "info"), event("x", "warning"), event("service_failed"), "{broken", "warning: x", "[1]", ""]
    assert [loud_line(text) for text in quiet] == [None] * len(quiet)


def test_every_sentence_is_one_line_with_its_fields() -> None:
    """Every sentence can be said: its fields are filled and it is one line."""
    for name, sentence in SENTENCES.items():
        said = loud_line(event(name, error="E", method="/m", violations=2, first="f", reason="R", sequences=1))
        assert said is not None
        assert "{" not in said
        assert said.startswith(sentence.partition("{")[0])


def test_progress_of_loading_is_told() -> None:
    """The stage and its per cent, and that it is done; none of it explains an unexpected end."""
    lines = [
        event("model_loading", "info", stage="weights", fraction=0.55),
        event("model_loaded", "info", model="tiny", seconds=0.9),
    ]
    assert [loud_line(line) for line in lines] == [
        "loading the model: weights 55 %",
        "loading the model: done in 0.9 s",
    ]
    assert last_words(lines, 15) == []


def test_last_words_are_errors_and_plain_text() -> None:
    """A traceback and errors explain an end; what requests did, progress and the C core's own lines do not."""
    lines = [
        *[event("request_left", "info")] * 20,
        event("model_loading", "info", stage="weights", fraction=0.5),
        event("kernels_compiling", "info", functions=0, seconds=0),
        "I1129 20:04:43.829374   22501 chttp2_transport.cc:1403] Got goaway",
        "Traceback (most recent call last):",
        event("odd_thing"),
        "",
        "ImportError: no such thing",
    ]
    assert last_words(lines, 15) == ["Traceback (most recent call last):", "odd thing", "ImportError: no such thing"]
    assert last_words(lines, 1) == ["ImportError: no such thing"]


def test_compiling_is_told_with_what_it_takes_and_how_far_it_is() -> None:
    """At first what it takes, then how far it is; each time that it is done once."""
    begun = loud_line(event("kernels_compiling", "info", functions=0, seconds=0))
    later = loud_line(event("kernels_compiling", "info", functions=117, seconds=20))
    assert begun == f"{COMPILING}6 to 20 s of processor time"
    assert later == f"{COMPILING}117 functions in 20 s so far"
    assert "once per machine" in COMPILING
