"""The text side of a model: text to ids, ids to text, and its chat template; from a GGUF file or a directory.

Owns the agreement between encode and decode: a sample's streamed text and the one-shot decode of its ids come from
the same bytes. Holds no request; safe to call from several threads. Called by `gateway/prompts.py`,
`gateway/generation.py` and `gateway/service.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from common.errors import InvalidArgument, Unimplemented
from common.gguf_metadata import read_metadata
from gateway.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from gateway.gguf_tokenizer import build_from_gguf

_SPECIAL_ROLES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_SPACE_MARK: Final = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES: Final = _byte_alphabet()


class ModelTokenizer:
    """Encoding and decoding for one model.

    `vocab_size` counts the ids that have a token; no text of n bytes has fewer than n / `max_bytes_per_token` tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int],
        chat_template: str | None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = len(vocabulary)
        longest = max((len(token.encode()) for token in vocabulary), default=1)
        # A normalizer may shorten text; by how much is not known, so its bound is wider.
        self.max_bytes_per_token = longest if tokenizer.normalizer is None else 4 * longest
        added = tokenizer.get_added_tokens_decoder()
        self._skipped = {index for index, token in added.items() if token.special}
        self._literal = {index: token.content.encode() for index, token in added.items() if not token.special}
        decoder = tokenizer.decoder
        state: Any = {} if decoder is None else json.loads(decoder.__getstate__())
        self._style = _decoder_style(state)
        # Such a tokenizer puts a space before a text, which its decoder takes away again.
        self._prefixed = self._style == "sentencepiece" and len(state["decoders"]) == 4
        self._cache: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`; special tokens in it are recognised. With `add_special_tokens`, a BOS as the model says.

        Long texts take a while; other threads run meanwhile, as the library lets go of the GIL for batches alone.
        """
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of `text` as it stands after other text: no BOS, and no space such as models put before a beginning."""
        ids = self.encode(text, add_special_tokens=False)
        if self._style != "sentencepiece" or not self._prefixed or not text:
            return ids
        line = self.encode("\n", add_special_tokens=False)
        whole = self.encode(f"\n{text}", add_special_tokens=False)
        return whole[len(line) :] if whole[: len(line)] == line else ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of all ids at once; special tokens are skipped, broken UTF-8 becomes U+FFFD."""
        detokenizer = self.new_detokenizer()
        if isinstance(detokenizer, ByteDetokenizer):
            pieces = [detokenizer.feed(index) for index in ids]
            return "".join(pieces) + detokenizer.flush()
        return self._library_decode(list(ids))

    def new_detokenizer(self) -> Detokenizer:
        """The incremental decoder of one sample."""
        if self._style == "bytes":
            return ByteDetokenizer(self._token_bytes)
        if self._style == "sentencepiece":
            return ByteDetokenizer(self._token_bytes, strip_space=self._prefixed)
        return WindowDetokenizer(self._library_decode)

    def all_token_bytes(self) -> list[bytes]:
        """The bytes of every id in order, empty for special tokens. Raises Unimplemented where tokens are no bytes."""
        if self._style == "other":
            raise Unimplemented(
                "output.constraint: the tokens of this model's tokenizer are no byte strings",
                reason="FIELD_UNIMPLEMENTED",
                metadata={"field": "output.constraint"},
            )
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        return [self._token_bytes(index) for index in range(highest + 1)]

    def _library_decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _token_bytes(self, index: int) -> bytes:
        known = self._cache.get(index)
        if known is None:
            known = self._cache[index] = self._find_bytes(index)
        return known

    def _find_bytes(self, index: int) -> bytes:
        if index in self._skipped:
            return b""
        if index in self._literal:
            return self._literal[index]
        token = self._tokenizer.id_to_token(index) if 0 <= index < 2**31 else None
        if token is None:
            return b""
        if self._style == "sentencepiece":
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                try:
                    return bytes([int(token[3:5], 16)])
                except ValueError:
                    return str(token).encode()
            return str(token).replace(_SPACE_MARK, " ").encode()
        try:
            return bytes(_BYTES[character] for character in token)
        except KeyError:
            return str(token).encode()


def _decoder_style(decoder: Any) -> str:
    """How a tokenizer's decoder joins tokens: "bytes", "sentencepiece" or "other"."""
    if not isinstance(decoder, dict):
        return "other"
    if decoder.get("type") == "ByteLevel":
        return "bytes"
    parts = decoder.get("decoders") if decoder.get("type") == "Sequence" else None
    if not isinstance(parts, list):
        return "other"
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return "bytes"
    replaces = kinds[:3] == ["Replace", "ByteFallback", "Fuse"]
    strips = not kinds[3:] or (
        kinds[3:] == ["Strip"] and (parts[3]["content"], parts[3]["start"], parts[3]["stop"]) == (" ", 1, 0)
    )
    if replaces and strips and parts[0]["pattern"] == {"String": _SPACE_MARK} and parts[0]["content"] == " ":
        return "sentencepiece"
    return "other"


def load_tokenizer(path: Path) -> ModelTokenizer:
    """The tokenizer of a model on disk. Raises InvalidArgument, `model`, if it is absent, broken or not served."""
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        vocabulary = build_from_gguf(read_metadata(path))
        return ModelTokenizer(
            vocabulary.tokenizer,
            special_tokens=vocabulary.special_tokens,
            eos_token_ids=vocabulary.eos_token_ids,
            chat_template=vocabulary.chat_template,
        )
    raise InvalidArgument("model", f"{path.name!r} is neither a GGUF file nor a directory")


def _from_directory(directory: Path) -> ModelTokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise InvalidArgument("model", "the directory holds no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises no other kind
        raise InvalidArgument("model", f"tokenizer.json is not readable: {error}") from error
    config = _read_json(directory / "tokenizer_config.json")
    special = {role: text for role in _SPECIAL_ROLES if (text := _content(config.get(role))) is not None}
    ends = _read_json(directory / "generation_config.json").get("eos_token_id")
    if ends is None:
        ends = _read_json(directory / "config.json").get("eos_token_id")
    if ends is None and "eos_token" in special:
        ends = tokenizer.token_to_id(special["eos_token"])
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return ModelTokenizer(
        tokenizer,
        special_tokens=special,
        eos_token_ids=[int(index) for index in ids],
        chat_template=_template(directory, config),
    )


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _content(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument("model", f"{path.name} is not readable JSON") from error
    if not isinstance(values, dict):
        raise InvalidArgument("model", f"{path.name} holds no object")
    return values
