"""Constrained answers: every one matches, whatever else runs; what is no constraint is refused; limits hold."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.errors import FailedPrecondition, InvalidArgument
from decoder import structure
from decoder.sequence import Request
from decoder.structure import Constraint, compile_constraint
from decoder.vocabulary import Vocabulary
from tests.decoder.rig import EOS, VOCAB, Node, prompt_of, request

pytest.importorskip("llguidance", reason="a run-time dependency: install it with constraints.txt")

# Ids 0..3 are special, 3 of end; then characters; then some tokens of several bytes.
CHARACTERS = [bytes([code]) for code in b'{}[]":,- .+0123456789abcdefghijklmnopqrstuvwxyzABCDEF\\/\n']
PIECES = [b'{"', b'":', b'",', b"true", b"false", b"null", b"12", b"ab", b"name", b"]}", b"a1"]
TOKENS = [b"", b"", b"", b"", *CHARACTERS, *PIECES]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["ab", "cd"]}, "n": {"type": "integer", "minimum": -99, "maximum": 99}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
)
GBNF = 'root ::= pair+\npair ::= "a" [0-9] | "[" root "]"'


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENS, VOCAB, frozenset({EOS}))


def constrained(number: int, constraint: Constraint, *, stop_ids: tuple[int, ...] = (EOS,), **options: Any) -> Request:
    fields = {"max_tokens": 80, "temperature": 1.0, "seed": 3, "stop_ids": stop_ids, **options}
    return replace(request(number, prompt_of(11, seed=7), **fields), constraint=constraint)


def text_of(tokens: list[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens if token < len(TOKENS)).decode()


def answers(node: Node, number: int) -> dict[int, str]:
    return {sample: text_of(tokens) for (owner, sample), tokens in node.sink.tokens.items() if owner == number}


def is_balanced(text: str) -> bool:
    while (shorter := re.sub(r"a[0-9]|\[x+\]", "x", text)) != text:
        text = shorter
    return bool(re.fullmatch(r"x+", text))


def matches(kind: str, text: str) -> bool:
    if kind == "json_schema":
        try:
            value = json.loads(text)
        except ValueError:
            return False
        return set(value) == {"name", "n"} and value["name"] in ("ab", "cd") and -99 <= value["n"] <= 99
    if kind == "regex":
        return re.fullmatch("[a-f]{3,9}(-[0-9]+)?", text) is not None
    return is_balanced(text)


CASES = [("json_schema", SCHEMA), ("regex", "[a-f]{3,9}(-[0-9]+)?"), ("grammar", GBNF)]


@pytest.mark.parametrize(("kind", "text"), CASES, ids=[kind for kind, _ in CASES])
def test_every_answer_matches(vocabulary: Vocabulary, kind: str, text: str) -> None:
    """Greedy and sampled, one and several samples, of a model that knows nothing of it: all that end match, most end.
    Without the constraint, the positive control, none matches."""
    constraint = compile_constraint(kind, text, vocabulary, frozenset({EOS}))
    node = Node(num_blocks=160, chunk_tokens=64, wait_seconds=0.0)
    ended = 0
    for number in range(5):
        item = constrained(number, constraint, seed=number, num_samples=1 + number % 3, temperature=float(number % 4))
        node.submit(item)
        plain = replace(item.stopping, max_tokens=12)
        node.submit(replace(item, number=item.number + 100, constraint=None, stopping=plain))  # type: ignore[arg-type]
    node.finish(*range(5), *range(100, 105))
    assert not node.sink.failed
    for number in range(5):
        for sample, answer in answers(node, number).items():
            if node.sink.finished[number, sample].stop_id == EOS:
                ended += 1
                assert matches(kind, answer), answer
        for answer in answers(node, number + 100).values():
            assert not matches(kind, answer)
    assert ended >= 4
    node.assert_quiet()


def test_tokens_are_those_of_the_request_alone(vocabulary: Vocabulary) -> None:
    """A constrained sample says the same alone, beside others, after a hit and after a preemption; speculation and
    samples with other constraints in the same step change nothing."""
    constraint = compile_constraint("json_schema", SCHEMA, vocabulary, frozenset({EOS}))
    other = compile_constraint("regex", "[0-9]{40}", vocabulary, frozenset({EOS}))
    alone = Node(num_blocks=100)
    alone.submit(constrained(1, constraint, num_samples=3))
    alone.finish(1)
    want = answers(alone, 1)
    node = Node(num_blocks=100)
    node.submit(constrained(2, other, seed=9))
    node.submit(request(3, prompt_of(90, seed=2), max_tokens=60, temperature=1.0, seed=4))
    node.submit(constrained(1, constraint, num_samples=3))
    node.until(lambda: sum(map(len, answers(node, 1).values())) > 6)
    scheduler = node.engine._loop._scheduler
    for sequence in list(scheduler.running):
        node.engine._loop._reporter.release(sequence)
        scheduler.requeue(sequence)
    node.submit(constrained(4, constraint, num_samples=3))
    node.finish(1, 2, 3, 4)
    assert answers(node, 1) == answers(node, 4) == want
    assert node.sink.cached[4] > 0
    assert re.fullmatch("[0-9]{40}", answers(node, 2)[0])


def test_masks_are_made_while_the_model_computes(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a draw needs is begun before the forward of its step, on another thread."""
    constraint = compile_constraint("regex", "[ab]{20}", vocabulary, frozenset({EOS}))
    node = Node(num_blocks=40)
    threads: list[str] = []
    order: list[str] = []
    found = Constraint.forbidden

    def forbidden(self: Constraint, matcher: Any) -> Any:
        threads.append(threading.current_thread().name)
        return found(self, matcher)

    begin = structure.Structures.begin

    def begun(self: structure.Structures, sampled: Any) -> None:
        order.append("begin")
        begin(self, sampled)

    monkeypatch.setattr(Constraint, "forbidden", forbidden)
    monkeypatch.setattr(structure.Structures, "begin", begun)
    node.model.on_forward = lambda batch: order.append("forward")
    node.submit(constrained(1, constraint))
    node.finish(1)
    assert re.fullmatch("[ab]{20}", answers(node, 1)[0])
    assert order[:4] == ["begin", "forward"] * 2
    assert len(threads) == len(node.sink.tokens[1, 0]), "once for each length"
    assert all(name.startswith("structure") for name in threads)


def test_a_stop_token_comes_only_where_the_constraint_may_end(vocabulary: Vocabulary) -> None:
    """A stop id whose text the constraint allows everywhere is drawn at its end and nowhere else."""
    stop = TOKENS.index(b"x")
    constraint = compile_constraint("regex", "[wxyz]{3,12}", vocabulary, frozenset({EOS, stop}))
    plain = compile_constraint("regex", "[wxyz]{3,12}", vocabulary, frozenset({EOS}))
    node = Node(num_blocks=100)
    for number in range(8):
        node.submit(constrained(number, constraint, seed=number, stop_ids=(EOS, stop)))
        node.submit(constrained(10 + number, plain, seed=number))
    node.finish(*range(8), *range(10, 18))
    ends = [node.sink.finished[number, 0].stop_id for number in range(8)]
    assert stop in ends
    for number in range(8):
        assert re.fullmatch("[wyz]{3,12}", text_of(node.sink.tokens[number, 0][:-1]))
    assert any("x" in answers(node, 10 + number)[0] for number in range(8)), "positive control: it is text of it"


def test_where_nothing_may_come_the_request_ends_with_an_error_of_its_own(vocabulary: Vocabulary) -> None:
    """Bad ids that leave the constraint no token: FAILED_PRECONDITION by name, and a neighbour is whole."""
    constraint = compile_constraint("regex", "[0-9]{4}", vocabulary, frozenset({EOS}))
    digits = frozenset(index for index, token in enumerate(TOKENS) if token.isdigit())
    node = Node(num_blocks=40)
    node.submit(constrained(1, constraint, bad_ids=digits))
    node.submit(constrained(2, constraint))
    node.finish(1, 2)
    error = node.sink.failed[1]
    assert isinstance(error, FailedPrecondition)
    assert error.reason == "CONSTRAINT_DEAD_END"
    assert re.fullmatch("[0-9]{4}", answers(node, 2)[0])
    node.assert_quiet()


def test_a_slow_constraint_holds_up_nobody(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one sample's mask is not ready the others gain tokens; when it is, it goes on with the same tokens."""
    constraint = compile_constraint("regex", "[ab]{6}", vocabulary, frozenset({EOS}))
    alone = Node(num_blocks=40)
    alone.submit(constrained(1, constraint))
    alone.finish(1)
    gate, found = threading.Event(), Constraint.forbidden

    def forbidden(self: Constraint, matcher: Any) -> Any:
        gate.wait(30)
        return found(self, matcher)

    monkeypatch.setattr(Constraint, "forbidden", forbidden)
    node = Node(num_blocks=40)
    node.submit(constrained(1, constraint))
    node.submit(request(2, prompt_of(5), max_tokens=12))
    node.until(lambda: node.sink.done(2))
    assert (1, 0) not in node.sink.tokens
    gate.set()
    node.finish(1)
    assert node.sink.tokens[1, 0] == alone.sink.tokens[1, 0]
    node.assert_quiet()


BAD = [
    ("json_schema", "{", "expected"),
    ("json_schema", '{"type": "objec"}', "objec"),
    ("json_schema", '{"$ref": "http://example.com/x"}', "not present"),
    ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "nsatisfiable"),
    ("json_schema", "[" * 60_000, ""),
    ("regex", "(a", "unclosed"),
    ("regex", "a(?=b)", "look"),
    ("regex", "(" * 30_000, ""),
    ("grammar", "start: missing", "unknown name"),
    ("grammar", "root ::= (", ""),
    ("grammar", "\x00", ""),
]


@pytest.mark.parametrize(("kind", "text", "word"), BAD)
def test_what_is_no_constraint_is_refused_with_the_reason(
    vocabulary: Vocabulary, kind: str, text: str, word: str
) -> None:
    """INVALID_ARGUMENT by field, with the library's word on it, of bounded length."""
    with pytest.raises(InvalidArgument, match=word or None) as caught:
        compile_constraint(kind, text, vocabulary, frozenset({EOS}))
    assert caught.value.field == f"output.constraint.{kind}"
    assert len(caught.value.message) < 400


def test_one_that_becomes_too_complex_ends_its_request_without_its_text(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit met in the midst of an answer fails that request alone; the error holds nothing of the answer. One met
    before is a refusal."""
    with monkeypatch.context() as patch:
        patch.setitem(structure.LIMITS, "max_grammar_size", 50)
        with pytest.raises(InvalidArgument, match=r"limit|large|big|size"):
            compile_constraint("grammar", "start: " + '"a" x ' * 99 + '\nx: "b" | "c"', vocabulary, frozenset({EOS}))
    monkeypatch.setitem(structure.LIMITS, "step_lexer_fuel", 400)
    hard = compile_constraint("regex", "(a|b)*a(a|b){60}", vocabulary, frozenset({EOS}))
    node = Node(num_blocks=100)
    node.submit(constrained(1, hard))
    node.submit(request(2, prompt_of(5), max_tokens=30))
    node.finish(1, 2)
    error = node.sink.failed[1]
    assert isinstance(error, InvalidArgument)
    assert error.message == "output.constraint: became too complex in the course of the answer"
    assert len(node.sink.tokens[2, 0]) == 30


def test_a_vocabulary_fits_its_model() -> None:
    """More tokens than ids, none, or a monster is refused; a model without a token of end serves no constraint."""
    for tokens in ([], [b"a"] * 9, [b"x" * 2000]):
        with pytest.raises(InvalidArgument, match=r"vocabulary\.tokens"):
            Vocabulary(tokens, 8, frozenset({1}))
    with pytest.raises(InvalidArgument, match="end-of-sequence"):
        compile_constraint("regex", "a", Vocabulary([b"a"], 8, frozenset()), frozenset())


def test_ids_without_text_are_never_allowed(vocabulary: Vocabulary) -> None:
    """Special ids and ids beyond the tokenizer stay out of free text; the end is allowed from the start there."""
    constraint = compile_constraint("regex", "(?s:.*)", vocabulary, frozenset({EOS}))
    forbidden = constraint.forbidden(constraint.new_matcher())
    assert forbidden.shape == (VOCAB,)
    allowed = np.flatnonzero(~forbidden)
    assert set(allowed.tolist()) == {EOS, *range(4, len(TOKENS))}
