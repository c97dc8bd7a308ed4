"""Ids to text, one at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.detokenizer import ByteDetokenizer, WindowDetokenizer
from gateway.tokenizer import ModelTokenizer
from tests.gateway.support import tiny_tokenizer

SAMPLES = ["안녕하세요 세계", "👨‍👩‍👧‍👦 family", "naïve café", "plain ascii", "日本語のテキスト", "e\u0301\u200d"]


def chunks_of(tokenizer: ModelTokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = tokenizer.new_detokenizer()
    return [*(detokenizer.feed(index) for index in ids), detokenizer.flush()]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=6), max_size=20))
def test_chunks_of_any_bytes_join_to_the_one_shot_decode(pieces: list[bytes]) -> None:
    """Row 31: whatever bytes the tokens hold, joined chunks equal decoding all bytes at once."""
    detokenizer = ByteDetokenizer(lambda index: pieces[index])
    out = "".join(detokenizer.feed(index) for index in range(len(pieces))) + detokenizer.flush()
    assert out == b"".join(pieces).decode("utf-8", "replace")


@settings(deadline=None)
@given(st.text(max_size=40), st.data())
def test_no_chunk_splits_a_character_of_valid_text(text: str, data: st.DataObject) -> None:
    """Row 31: valid text cut at any bytes never shows U+FFFD before its end, and each chunk is whole characters."""
    encoded = text.replace("\ufffd", "").encode("utf-8", "ignore")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(encoded)), max_size=12)) | {0, len(encoded)})
    pieces = [encoded[a:b] for a, b in itertools.pairwise(cuts)]
    detokenizer = ByteDetokenizer(lambda index: pieces[index])
    out = [detokenizer.feed(index) for index in range(len(pieces))]
    assert "".join(out).encode() == encoded
    assert detokenizer.flush() == ""
    assert all("\ufffd" not in chunk for chunk in out)


@settings(deadline=None)
@given(st.lists(st.integers(0, 511), max_size=40))
def test_streamed_text_equals_the_librarys_decode(ids: list[int]) -> None:
    """For any ids of a byte-level tokenizer, streamed text, our decode and the library's decode are equal."""
    tokenizer = tiny_tokenizer()
    joined = "".join(chunks_of(tokenizer, ids))
    assert joined == tokenizer.decode(ids) == tokenizer._library_decode(ids)


@pytest.mark.parametrize("text", SAMPLES)
def test_text_survives_encoding_and_streaming(text: str) -> None:
    """Korean, ZWJ emoji and combining marks come back as they went in."""
    ids = tiny_tokenizer().encode(text, add_special_tokens=False)
    assert "".join(chunks_of(tiny_tokenizer(), ids)) == text


def test_a_cut_character_shows_as_one_replacement_at_the_end_only() -> None:
    """Row 31: max_tokens inside a character gives one U+FFFD, with the flush; invalid bytes give theirs at once."""
    data = "한".encode()
    detokenizer = ByteDetokenizer(lambda index: data[index : index + 1])
    assert [detokenizer.feed(0), detokenizer.feed(1), detokenizer.flush()] == ["", "", "\ufffd"]
    broken = ByteDetokenizer(lambda index: b"\xff")
    assert broken.feed(0) == "\ufffd"


def test_special_tokens_add_no_text() -> None:
    """Special tokens are skipped, and a character around one is not held up."""
    tokenizer = tiny_tokenizer()
    ids = [1, *tokenizer.encode("hi", add_special_tokens=False), 2]
    assert "".join(chunks_of(tokenizer, ids)) == "hi"


def _sentencepiece() -> ModelTokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581hello", "\u2581world", "a", "한"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return ModelTokenizer(tokenizer, special_tokens={}, eos_token_ids=(), chat_template=None)


def test_sentencepiece_tokens_stream_by_their_bytes() -> None:
    """Byte-fallback tokens join to characters, marks to spaces, and the first space of the text is dropped."""
    tokenizer = _sentencepiece()
    emoji = [1 + byte for byte in "🙂".encode()]
    ids = [258, *emoji, 259, 257, 261]
    out = chunks_of(tokenizer, ids)
    assert "".join(out) == tokenizer._library_decode(ids) == "hello🙂 world 한"
    assert out[:5] == ["hello", "", "", "", "🙂"]


@settings(deadline=None)
@given(st.lists(st.sampled_from(["\u2581ab", "c", "\u2581", "##x", "é", "\ufffd"]), max_size=30))
def test_any_other_decoder_streams_through_a_window(pieces: list[str]) -> None:
    """For a decoder that is not of bytes, joined chunks equal its decode of all tokens."""

    def decode(ids: Sequence[int]) -> str:
        return "".join(pieces[index].replace("\u2581", " ") for index in ids).removeprefix(" ")

    detokenizer = WindowDetokenizer(decode)
    out = "".join(detokenizer.feed(index) for index in range(len(pieces))) + detokenizer.flush()
    assert out == decode(range(len(pieces)))
