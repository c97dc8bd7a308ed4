"""Chat templates in their sandbox."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from common.errors import FailedPrecondition, InvalidArgument
from gateway.chat import ChatTemplate, Turn

NOW = datetime(2026, 2, 3, 4, 5, tzinfo=UTC)
TURNS = [Turn("system", "be brief"), Turn("user", "hi")]


def template(source: str, limit: int = 10_000) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, now=lambda: NOW, max_characters=limit)


def test_a_template_sees_messages_special_tokens_and_the_generation_prompt() -> None:
    """The usual names are there and render as in transformers."""
    source = (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:{{ message.content }}{{ eos_token }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert template(source).render(TURNS) == "<s>system:be brief</s>\nuser:hi</s>\nassistant:"


def test_the_usual_helpers_are_there() -> None:
    """tojson keeps unicode, strftime_now takes the passed-in clock, loops can break, generation tags are no text."""
    source = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content | tojson }}{% endfor %}"
        "{{ strftime_now('%d %b %Y') }}{% generation %}x{% endgeneration %}{{ tools is none }}"
    )
    assert template(source).render([Turn("user", 'é"'), Turn("user", "b")]) == '"é\\""03 Feb 2026xTrue'


def test_a_refusal_of_the_template_comes_in_its_own_words() -> None:
    """raise_exception is the caller's error, with the message of the template."""
    with pytest.raises(InvalidArgument, match="roles must alternate") as caught:
        template("{{ raise_exception('roles must alternate') }}").render(TURNS)
    assert caught.value.field == "chat.messages"


@pytest.mark.parametrize(
    ("turns", "field"),
    [
        ([], "chat.messages"),
        ([Turn("user", "a"), Turn("tool", "b")], "chat.messages[1].role"),
        ([Turn("", "a")], "chat.messages[0].role"),
        ([Turn("System", "a")], "chat.messages[0].role"),
    ],
)
def test_bad_roles_are_refused_by_their_path(turns: list[Turn], field: str) -> None:
    """A role that is not system, user or assistant is refused, as is an empty conversation."""
    with pytest.raises(InvalidArgument) as caught:
        template("{{ messages[0].content }}").render(turns)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for a in range(999999999) %}x{% endfor %}",
        "{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ undefined_name.field }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_a_template_can_neither_reach_out_nor_grow_without_bound(source: str) -> None:
    """Python internals, mutation, endless output and failing expressions end in INVALID_ARGUMENT."""
    with pytest.raises(InvalidArgument):
        template(source).render(TURNS)


def test_message_text_is_never_a_template() -> None:
    """Braces in a message are text."""
    assert template("{{ messages[0].content }}").render([Turn("user", "{{ 7 * 7 }}")]) == "{{ 7 * 7 }}"


def test_a_broken_template_is_an_error_of_the_model() -> None:
    """A syntax error is no fault of the caller."""
    with pytest.raises(FailedPrecondition, match="template"):
        template("{% for %}")
