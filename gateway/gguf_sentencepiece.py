"""A SentencePiece vocabulary of a GGUF file (`tokenizer.ggml.model` is "llama"): byte-pair merges ranked by score.

The format has scores in place of merges: of two neighbouring symbols those are joined first whose union has the highest
score. Owns the order of merges that follows from them. Called by `gguf_tokenizer.py`, which adds the special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, normalizers

from common.errors import InvalidArgument

NORMAL: Final = 1  # a piece that merges make; all other types are found whole, or are bytes
SPACE_MARK: Final = "\u2581"


def build_sentencepiece(fields: Mapping[str, Any], tokens: list[str], vocabulary: Mapping[str, int]) -> Tokenizer:
    """The tokenizer without special tokens. Raises InvalidArgument, `model`, where lists lack or do not fit.

    Characters without a token become their bytes' tokens, as SentencePiece's byte fallback has it.
    """
    scores, types = (_list_of(fields, name, len(tokens)) for name in ("scores", "token_type"))
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
    if missing:
        raise InvalidArgument("model", f"its vocabulary has no token for {len(missing)} of the 256 bytes")
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise InvalidArgument("model", "tokenizer.ggml.unknown_token_id is outside the vocabulary")
    pairs = rank_merges(tokens, scores, types)
    model = models.BPE(
        vocab=dict(vocabulary), merges=pairs, byte_fallback=True, fuse_unk=True, unk_token=tokens[unknown]
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE_MARK)
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _list_of(fields: Mapping[str, Any], name: str, count: int) -> list[Any]:
    values = fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or len(values) != count:
        raise InvalidArgument("model", f"tokenizer.ggml.{name} does not fit tokenizer.ggml.tokens")
    return values


def rank_merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every pair of pieces whose union is a piece, the highest score of the union first.

    Pieces of equal union are ordered by their ids, which keeps the order of the converters of `transformers`.
    """
    pieces = {token: index for index, token in enumerate(tokens) if types[index] == NORMAL}
    ranked: list[tuple[float, int, int]] = []
    for token, index in pieces.items():
        score = -scores[index]
        for place in range(1, len(token)):
            left = pieces.get(token[:place])
            if left is not None:
                right = pieces.get(token[place:])
                if right is not None:
                    ranked.append((score, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, left, right in ranked]
