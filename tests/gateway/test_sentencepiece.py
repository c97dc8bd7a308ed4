"""SentencePiece vocabularies of GGUF files, against a plain implementation of its merging by scores."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from common.errors import InvalidArgument
from gateway.gguf_tokenizer import build_from_gguf
from gateway.tokenizer import ModelTokenizer

MARK = "\u2581"
PIECES = (
    f"{MARK}the", "the", "th", f"{MARK}t", "he", "er", "re", f"{MARK}a", "an", "and", f"{MARK}and", "nd", "here",
    f"{MARK}there", "there", "aa", "aaa", "ab", "ba", "éé", "日本",
)  # fmt: skip
LETTERS = (MARK, "t", "h", "e", "r", "a", "n", "d", "b", "é", "日", "本")
WHOLE = ("  ", "   ", "\n", "\n\n", "<b>")


def make_fields(**changes: Any) -> dict[str, Any]:
    """Metadata of a small vocabulary: special tokens, whole tokens, bytes, pieces by score, and letters last."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn>", *WHOLE, *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [3, 3, 3, 2, 3, *(4 for _ in WHOLE), *(6 for _ in range(256)), *(1 for _ in PIECES + LETTERS)]
    order = list(PIECES)
    random.Random(3).shuffle(order)
    scores = [*(-1000.0 for _ in range(5 + len(WHOLE))), *(0.0 for _ in range(256))]
    scores += [-float(rank) for rank in range(len(PIECES) + len(LETTERS))]
    fields = {
        "model": "llama", "pre": "default", "tokens": [*tokens, *order, *LETTERS], "scores": scores,
        "token_type": types, "bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0,
        "add_space_prefix": False, **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def load(**changes: Any) -> ModelTokenizer:
    """The tokenizer of `make_fields`."""
    made = build_from_gguf(make_fields(**changes))
    return ModelTokenizer(
        made.tokenizer,
        special_tokens=made.special_tokens,
        eos_token_ids=made.eos_token_ids,
        chat_template=made.chat_template,
    )


def plain_encode(fields: dict[str, Any], text: str) -> list[int]:
    """Whole tokens first, the longest at each place; between them the best-scored neighbours join until none can."""
    tokens, scores, types = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    ids = {token: index for index, token in enumerate(tokens)}
    whole = sorted((token for token, kind in zip(tokens, types, strict=True) if kind in (2, 3, 4)), key=len)[::-1]
    found: list[int] = []
    rest = ""

    def flush() -> None:
        symbols = list(rest.replace(" ", MARK))
        if rest and fields["tokenizer.ggml.add_space_prefix"]:
            symbols.insert(0, MARK)
        while True:
            joined = [left + right for left, right in itertools.pairwise(symbols)]
            unions = [
                (scores[ids[union]], -place)
                for place, union in enumerate(joined)
                if union in ids and types[ids[union]] == 1
            ]
            if not unions:
                break
            place = -max(unions)[1]
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        for symbol in symbols:
            found.extend([ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()])

    while text:
        token = next((token for token in whole if text.startswith(token)), None)
        if token is None:
            rest, text = rest + text[0], text[1:]
            continue
        flush()
        rest, text = "", text[len(token) :]
        found.append(ids[token])
    flush()
    return found


@pytest.mark.parametrize("prefix", [False, True])
def test_ids_are_those_of_merging_by_scores(prefix: bool) -> None:
    """Ids of random texts with whole tokens, unknown characters and runs of spaces equal the plain implementation's."""
    tokenizer, fields = load(add_space_prefix=prefix), make_fields(add_space_prefix=prefix)
    source = random.Random(1)
    parts = [
        "the",
        "there",
        "and",
        "an",
        "a",
        " ",
        "  ",
        "     ",
        "\n",
        "\n\n\n",
        "<b>",
        "<turn>",
        "é",
        "日本",
        "🙂",
        "x",
        "b",
    ]
    for _ in range(400):
        text = "".join(source.choices(parts, k=source.randrange(1, 12)))
        assert tokenizer.encode(text, add_special_tokens=False) == plain_encode(fields, text), repr(text)


def test_text_comes_back() -> None:
    """Decoding gives the text again, whole and token by token, a leading space included; special tokens are skipped."""
    tokenizer = load()
    for text in (" there and  back\n\n", "🙂 日本<b>é", "a", " a"):
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids[0] == 2
        assert tokenizer.decode(ids) == text
        stream = tokenizer.new_detokenizer()
        assert "".join(stream.feed(index) for index in ids) + stream.flush() == text
    assert tokenizer.decode(tokenizer.encode("a<turn>b", add_special_tokens=False)) == "ab"
    assert tokenizer.encode_continuation(" the") == tokenizer.encode(" the", add_special_tokens=False)
    assert load(add_bos_token=False).encode("a", add_special_tokens=True) == tokenizer.encode(
        "a", add_special_tokens=False
    )


def test_a_prefixed_space_is_taken_away_again() -> None:
    """With a space before every text, decoding takes one away, and text that continues other text gets none."""
    tokens = make_fields()["tokenizer.ggml.tokens"]
    # Vocabularies with such a space have no token for a line's end, which becomes its byte.
    tokenizer = load(add_space_prefix=True, tokens=[token.replace("\n", "<line>") for token in tokens])
    ids = tokenizer.encode("the and", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the and"
    assert tokenizer.encode_continuation("the") == load().encode("the", add_special_tokens=False)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"scores": None}, "scores"),
        ({"scores": [0.0]}, "scores"),
        ({"token_type": None}, "token_type"),
        ({"unknown_token_id": 100_000}, "unknown_token_id"),
        ({"model": "t5"}, "t5"),
        ({"tokens": ["a", "b"], "scores": [0.0, 0.0], "token_type": [1, 1]}, "256 bytes"),
    ],
)
def test_broken_vocabulary_is_named(changes: dict[str, Any], name: str) -> None:
    """A list that lacks or does not fit is an InvalidArgument that names it."""
    with pytest.raises(InvalidArgument, match=name):
        build_from_gguf(make_fields(**changes))
