"""Chat templates: a conversation becomes a prompt by the model's own jinja template, in a sandbox.

Owns what a template may do: no attribute of Python objects, no file, bounded output, time from a passed-in clock.
A template that refuses a conversation (`raise_exception`) is an error of the caller with the template's own words.
Called by `gateway/prompts.py`; it knows no tokenizer.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import FailedPrecondition, InvalidArgument

ROLES: Final = ("system", "user", "assistant")
MAX_MESSAGES: Final = 4096
_MAX_TEMPLATE_ERROR: Final = 500
_MARK: Final = f"answer{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str
    content: str


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant says, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own contract

    def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
             sort_keys: bool = False) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template. Raises FailedPrecondition if its source is no valid template.

    `special_tokens` are what templates call bos_token, eos_token and so on. `now` is the clock of strftime_now.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime], max_characters: int
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(str(form))
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise FailedPrecondition(f"the model's chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._max_characters = max_characters

    def render(self, turns: Sequence[Turn]) -> str:
        """The prompt up to where the assistant speaks. Raises InvalidArgument on a bad role or a refusal."""
        _check_turns(turns)
        return self._render(turns)

    def render_after_answer(self, turns: Sequence[Turn]) -> str:
        """What comes after the text of an assistant's turn when `turns` follow it: the end of that turn, the new turns,
        and where the assistant speaks again. It is what the template over the whole conversation has there.

        The template is run over a made-up conversation whose answer is a mark that nobody can guess; what stands after
        the mark counts. Raises InvalidArgument as `render`, and where that would not be the same: the text after the
        mark depends on what was said before, or the turns change what stands before it.
        """
        _check_turns(turns)
        short = [Turn("user", "a"), Turn("assistant", _MARK)]
        long = [Turn("user", "b"), Turn("assistant", "c"), Turn("user", "d"), Turn("assistant", _MARK)]
        head, mark, after = self._render([*short, *turns]).partition(_MARK)
        plain_head, _, _ = self._render([*short, Turn("user", "e")]).partition(_MARK)
        _, _, other_after = self._render([*long, *turns]).partition(_MARK)
        if not mark or _MARK in after or after != other_after or head != plain_head:
            raise InvalidArgument(
                "chat.messages", "the model's chat template cannot go on with these turns; send the whole conversation"
            )
        return after

    def _render(self, turns: Sequence[Turn]) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        chunks, length = [], 0
        try:
            for chunk in self._template.generate(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **self._special_tokens
            ):
                length += len(chunk)
                if length > self._max_characters:
                    raise InvalidArgument(
                        "chat.messages", f"make a prompt of over {self._max_characters} characters, which is the limit"
                    )
                chunks.append(chunk)
        except jinja2.TemplateError as error:
            raise InvalidArgument("chat.messages", str(error)[:_MAX_TEMPLATE_ERROR]) from error
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            kind = type(error).__name__
            raise InvalidArgument("chat.messages", f"the model's chat template fails on them ({kind})") from error
        return "".join(chunks)


def _check_turns(turns: Sequence[Turn]) -> None:
    """Raises InvalidArgument for none, too many, and a role that is not one."""
    if not turns:
        raise InvalidArgument("chat.messages", "is empty; allowed is one message or more")
    if len(turns) > MAX_MESSAGES:
        raise InvalidArgument("chat.messages", f"holds {len(turns)} messages; allowed are 1..{MAX_MESSAGES}")
    for index, turn in enumerate(turns):
        if turn.role not in ROLES:
            raise InvalidArgument(f"chat.messages[{index}].role", f"allowed are {', '.join(ROLES)}")
