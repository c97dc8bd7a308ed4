"""A tokenizer from the metadata of a GGUF file: byte-level BPE with the pre-tokenizer that the file names, or
SentencePiece's BPE by scores (`gguf_sentencepiece.py`).

Owns the rule that a vocabulary is served exactly as its model was trained with, or refused by name: the pre-tokenizer
decides where words end, and a wrong one gives other ids without any error. Called by `gateway/tokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.errors import InvalidArgument
from gateway.gguf_sentencepiece import build_sentencepiece

# Token types of a GGUF vocabulary.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_WORDS_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_QWEN2: Final = _WORDS_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """Patterns applied one after another, each to the pieces of the one before; matches and gaps are pieces."""

    patterns: tuple[str, ...]
    compose: bool = False  # Unicode NFC first
    whole_words: bool = False  # a piece that is a token is taken whole, before any merge
    add_bos: bool = False  # where the file does not say


_PRE_TOKENIZERS: Final[Mapping[str, _PreTokenizer]] = {
    "gpt-2": _PreTokenizer((_WORDS_GPT2,)),
    "smollm": _PreTokenizer((r"\p{N}", _WORDS_GPT2)),
    "llama-bpe": _PreTokenizer((_WORDS_LLAMA3,), whole_words=True, add_bos=True),
    "qwen2": _PreTokenizer((_WORDS_QWEN2,), compose=True),
    # The pattern list that readers of GGUF apply where a file names none.
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _WORDS_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """What the file says about text: the tokenizer, its special tokens by role, and the chat template."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


def build_from_gguf(fields: Mapping[str, Any]) -> GgufVocabulary:
    """Build the tokenizer. Raises InvalidArgument, `model`, naming what this build does not serve."""
    kind = fields.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise InvalidArgument(
            "model",
            f"its vocabulary is of kind {kind!r}; served are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)",
        )
    tokens = _list_of(fields, "tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise InvalidArgument("model", "its vocabulary holds a token twice")
    if kind == "llama":
        tokenizer, add_bos = build_sentencepiece(fields, tokens, vocabulary), True
    else:
        tokenizer, add_bos = _build_byte_level(fields, vocabulary)
    _add_tokens(tokenizer, tokens, fields.get("tokenizer.ggml.token_type"))
    special = _special_tokens(fields, tokens)
    if fields.get("tokenizer.ggml.add_bos_token", add_bos) and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=None, special_tokens=[(bos, vocabulary[bos])]
        )
    ends = [fields.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    template = fields.get("tokenizer.chat_template")
    return GgufVocabulary(
        tokenizer=tokenizer,
        special_tokens=special,
        eos_token_ids=tuple(dict.fromkeys(int(end) for end in ends if end is not None)),
        chat_template=template if isinstance(template, str) else None,
    )


def _build_byte_level(fields: Mapping[str, Any], vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    """The tokenizer without special tokens, and whether a BOS is added where the file does not say."""
    name = str(fields.get("tokenizer.ggml.pre", "default"))
    rules = _PRE_TOKENIZERS.get(name)
    if rules is None:
        allowed = ", ".join(sorted(_PRE_TOKENIZERS))
        raise InvalidArgument("model", f"its pre-tokenizer is {name!r}; served are {allowed}")
    pairs = [_pair(merge) for merge in _list_of(fields, "merges")]
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=rules.whole_words, fuse_unk=False)
    except Exception as error:  # the library raises no other kind
        raise InvalidArgument("model", f"its merges do not fit its vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    if rules.compose:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rules.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rules.add_bos


def _list_of(fields: Mapping[str, Any], name: str) -> list[str]:
    values = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not values or not isinstance(values[0], str):
        raise InvalidArgument("model", f"it lacks tokenizer.ggml.{name}")
    return values


def _pair(merge: str) -> tuple[str, str]:
    # A byte-level token holds no space, so the first space after the first character parts the two.
    left, gap, right = merge.partition(" ")
    if not gap or not left or not right:
        raise InvalidArgument("model", "a merge is not two tokens")
    return left, right


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: object) -> None:
    if types is None:
        return
    if not isinstance(types, list) or len(types) != len(tokens):
        raise InvalidArgument("model", "tokenizer.ggml.token_type does not fit tokenizer.ggml.tokens")
    pairs = [pair for pair in zip(tokens, types, strict=True) if pair[1] in (_UNKNOWN, _CONTROL, _USER_DEFINED)]
    special = [AddedToken(token, special=True, normalized=False) for token, kind in pairs if kind != _USER_DEFINED]
    plain = [AddedToken(token, special=False, normalized=False) for token, kind in pairs if kind == _USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _special_tokens(fields: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {}
    for role, name in names.items():
        index = fields.get(f"tokenizer.ggml.{role}_token_id")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise InvalidArgument("model", f"tokenizer.ggml.{role}_token_id is outside the vocabulary")
        special[name] = tokens[index]
    return special
