"""Rows 29, 30, 31 and 32 of the cases: streamed text is the whole text, cut at the right place and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.chain_model import make_chain_model
from tests.e2e.client import Sample, make_request
from tests.e2e.rig import Node

STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH
ENGLISH = [
    b"The ", b"qu", b"ick ", b"br", b"own f", b"ox", b" jum", b"ps ", b"ov", b"er t", b"he la", b"zy d", b"og, and ",
    b"so", b" on ", b"it", b" went", b".",
]  # fmt: skip
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # three people joined by ZWJ
SCRIPTS = {
    "korean": "안녕하세요, 세계! 한글 문장입니다".encode(),
    "emoji": f"a{FAMILY}b\U0001f44d\U0001f3fd c\U0001f1f0\U0001f1f7".encode(),
    "accents": "é è ê ö ü ß œ € ∀x".encode(),
    "invalid": b"ok\xff mid\xc3( \xf0\x9f\x92 end\x80\x81.",
    "cut": b"last " + "한".encode()[:2],
}


def split_uniquely(data: bytes, used: set[bytes]) -> list[bytes]:
    """Pieces of `data`, as short as they can be without a repetition; most end inside a character."""
    pieces: list[bytes] = []
    position = 0
    while position < len(data):
        sizes = range(1, len(data) - position + 1)
        size = next((n for n in sizes if data[position : position + n] not in used), 0)
        if not size:  # the rest occurs elsewhere: it goes with the piece before
            used.remove(pieces[-1])
            pieces[-1] += data[position:]
            used.add(pieces[-1])
            break
        piece = data[position : position + size]
        used.add(piece)
        pieces.append(piece)
        position += size
    return pieces


@dataclass(frozen=True, slots=True)
class Chains:
    """A node that says known pieces, and the token each begins with."""

    node: Node
    pieces: Mapping[str, Sequence[bytes]]
    starts: Mapping[str, int]

    def say(self, name: str, **options: object) -> Sample:
        """What the node answers to a chain's start, greedily."""
        settings = {"new": 200, "ignore_eos": False, **options}
        result = self.node.generate(make_request([self.starts[name]], **settings))  # type: ignore[arg-type]
        check_pieces(self, name, result.samples[0])
        return result.samples[0]

    def text(self, name: str, count: int | None = None) -> str:
        """The text of the first `count` pieces in one go."""
        return b"".join(self.pieces[name][:count]).decode("utf-8", "replace")


def check_pieces(chains: Chains, name: str, sample: Sample) -> None:
    """The tokens are those of the chain, and Detokenize agrees with the bytes."""
    ids = [token for token in sample.token_ids if token != 2]
    assert chains.node.detokenize(ids) == chains.text(name, len(ids))


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chains]:
    """A node on a model of known texts."""
    pieces: dict[str, list[bytes]] = {
        "english": ENGLISH,
        "overlap": [b"Qa", b"ab", b"Z!"],
        "half": [b"we sail ", b"north ", b"END", b"-OF"],
    }
    used = {piece for chain in pieces.values() for piece in chain}
    for name, data in SCRIPTS.items():
        pieces[name] = split_uniquely(data, used)
    directory = tmp_path_factory.mktemp("chain") / "chain"
    starts = make_chain_model(Path(directory), pieces)
    with Node(directory, options=["--threads", "1"]) as node:
        yield Chains(node, pieces, starts)
        node.quiet()


def test_the_chain_model_says_its_text(chains: Chains) -> None:
    """Positive control: without stops the whole text comes and ends at the end-of-sequence token."""
    sample = chains.say("english")
    assert (sample.text, sample.reason) == (chains.text("english"), STOP)


@pytest.mark.parametrize("edges", [0, 1, 2, 3, 4])
def test_row_29_no_part_of_a_stop_string_reaches_the_client(chains: Chains, edges: int) -> None:
    """A stop string across token edges, at every place: the text ends before it, tokens are counted through it."""
    whole = chains.text("english")
    for first in range(len(ENGLISH) - edges):
        begin = len(b"".join(ENGLISH[:first])) + (1 if len(ENGLISH[first]) > 1 else 0)
        end = len(b"".join(ENGLISH[: first + edges])) + 1
        stop = whole[begin : max(end, begin + 1)]
        sample = chains.say("english", stop=[stop])
        expected = whole[: whole.index(stop)]
        assert (sample.text, sample.reason, sample.stop) == (expected, STOP, stop)
        reached = whole.index(stop) + len(stop)
        needed = next(n for n in range(len(ENGLISH) + 1) if len(b"".join(ENGLISH[:n])) >= reached)
        assert len(sample.token_ids) == needed
        included = chains.say("english", stop=[stop], include_stop=True)
        assert included.text == expected + stop


def test_row_29_of_overlapping_stops_the_earliest_counts(chains: Chains) -> None:
    """ "aab" and "ab" that end together, a stop in the first token, and a stop that is the whole text."""
    for stops in (["aab", "ab"], ["ab", "aab"]):
        sample = chains.say("overlap", stop=stops)
        assert (sample.text, sample.reason, sample.stop) == ("Q", STOP, "aab")
    first = chains.say("overlap", stop=["Q"])
    assert (first.text, first.stop, len(first.token_ids)) == ("", "Q", 1)
    everything = chains.say("overlap", stop=["QaabZ!"])
    assert (everything.text, everything.stop) == ("", "QaabZ!")
    assert chains.say("overlap", stop=["aaab", "Zz", "qaab"]).text == "QaabZ!", "no false match"


def test_row_29_a_stop_token_ends_the_sample(chains: Chains) -> None:
    """A stop token id ends it, and is named; before min_tokens it cannot be chosen."""
    token = chains.say("english").token_ids[4]
    sample = chains.say("english", stop_token_ids=[token])
    assert (sample.reason, sample.stop) == (STOP, str(token))
    assert sample.token_ids[-1] == token
    assert len(sample.token_ids) == 5
    request = make_request([chains.starts["english"]], new=30, stop_token_ids=[token], min_tokens=6)
    late = chains.node.generate(request)
    assert len(late.token_ids) >= 6
    assert late.token_ids[:4] == sample.token_ids[:4]
    assert token not in late.token_ids[:6], "it is not chosen before it may end the sample"


def test_row_30_text_that_cannot_become_a_stop_is_not_held_back(chains: Chains) -> None:
    """With a stop of 200 characters that never occurs, each token's text comes with it, and the text is the same."""
    for stop in ("#" * 200, chains.text("english")[:20] + "#" * 180):
        sample = chains.say("english", stop=[stop])
        assert (sample.text, sample.reason) == (chains.text("english"), STOP)
        if stop[0] == "#":
            tokens = text = 0
            for chunk, count in zip(sample.chunks, sample.token_counts, strict=True):
                tokens, text = tokens + count, text + len(chunk)
                assert text == len(chains.text("english", tokens))


def test_row_30_the_first_half_of_a_stop_at_the_very_end_is_delivered(chains: Chains) -> None:
    """What was held back comes out whole when the text ends, by end of sequence or by length."""
    assert chains.say("half", stop=["END-OF-FILE"]).text == "we sail north END-OF"
    short = chains.say("half", stop=["END-OF-FILE"], new=3)
    assert (short.text, short.reason) == ("we sail north END", LENGTH)


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_row_31_no_character_is_lost_or_split(chains: Chains, name: str) -> None:
    """Joined chunks equal the one-shot decode at every length; U+FFFD only where the bytes are invalid or cut."""
    whole = chains.say(name)
    assert whole.text == chains.text(name)
    assert ("\ufffd" in whole.text) == (name in ("invalid", "cut"))
    for count in range(1, len(chains.pieces[name]) + 1):
        sample = chains.say(name, new=count)
        assert sample.text == chains.text(name, count)
        assert sample.reason in (LENGTH, STOP)
        for chunk in sample.chunks[:-1]:
            assert "\ufffd" not in chunk or name == "invalid"


def test_row_31_a_stop_string_may_lie_inside_split_characters(chains: Chains) -> None:
    """A stop string of characters whose bytes come in several tokens is found all the same."""
    sample = chains.say("korean", stop=["세계"])
    assert (sample.text, sample.stop) == ("안녕하세요, ", "세계")


@pytest.mark.parametrize("count", [1, 2, 16])
@pytest.mark.parametrize("samples", [1, 2])
def test_row_32_the_last_tokens_arrive_before_the_end(chains: Chains, count: int, samples: int) -> None:
    """max_tokens 1, 2 and B, one and two samples: joined text is whole; one finish a sample, then the summary."""
    request = make_request([chains.starts["english"]], new=count, n=samples, temperature=1.0, seed=1)
    result = chains.node.generate(request)  # the client refuses any stream that breaks the order
    assert len(result.samples) == samples
    for sample in result.samples.values():
        assert (sample.text, len(sample.token_ids)) == (chains.text("english", count), count)
        assert sample.reason == LENGTH


def test_row_32_a_stop_on_the_last_token(chains: Chains) -> None:
    """A stop string that ends with the very last allowed token is a stop, with the text before it."""
    sample = chains.say("english", new=5, stop=["f"])
    assert (sample.text, sample.reason, sample.stop) == ("The quick brown ", STOP, "f")
    request = make_request([chains.starts["english"]], new=5, n=2, temperature=1.0, seed=1, stop=["own f"])
    for item in chains.node.generate(request).samples.values():
        assert (item.text, item.reason, item.stop) == ("The quick br", STOP, "own f")
