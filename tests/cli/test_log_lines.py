"""What of a log reaches the terminal, and in which words."""

from __future__ import annotations

import json

from cli.log_lines import SENTENCES, last_words, loud_line, warming_after


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
    """The stage and its per cent."""
    line = event("model_loading", "info", stage="weights", fraction=0.55)
    assert loud_line(line) == "loading the model: weights 55 %"


def test_last_words_are_errors_and_plain_text() -> None:
    """A traceback and errors explain an end; what requests did, progress and the C core's own lines do not."""
    lines = [
        *[event("request_left", "info")] * 20,
        event("model_loading", "info", stage="weights", fraction=0.5),
        "I1129 20:04:43.829374   22501 chttp2_transport.cc:1403] Got goaway",
        "Traceback (most recent call last):",
        event("odd_thing"),
        "",
        "ImportError: no such thing",
    ]
    assert last_words(lines, 15) == ["Traceback (most recent call last):", "odd thing", "ImportError: no such thing"]
    assert last_words(lines, 1) == ["ImportError: no such thing"]


def test_kernels_are_made_ready_between_the_last_weight_and_the_loaded_model() -> None:
    """Only then is a silence explained by kernels."""
    state, seen = False, []
    for line in (
        event("model_loading", "info", stage="weights", fraction=0.75),
        event("model_loading", "info", stage="weights", fraction=1.0),
        event("other", "info"),
        "text",
        event("model_loaded", "info"),
        event("other", "info"),
    ):
        state = warming_after(line, state)
        seen.append(state)
    assert seen == [False, True, True, True, False, False]
