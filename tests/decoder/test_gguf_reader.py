"""The head of a GGUF file, and the digest of the tokenizer in it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from common.errors import InvalidArgument
from decoder.cache_key import tokenizer_digest
from decoder.weights.gguf_reader import GgufReader
from decoder.weights.source import GgufSource

TOKENS = [f"word {index}" for index in range(1000)]


def write(path: Path, **changed: Any) -> Path:
    """A file with a vocabulary of long and short arrays around its other fields."""
    values: dict[str, Any] = {"tokens": TOKENS, "types": list(range(1000)), "name": "tiny", "last": True, **changed}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", values["name"])
    writer.add_array("tokenizer.ggml.tokens", values["tokens"])
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.token_type", values["types"])
    writer.add_array("tokenizer.ggml.few", [1.5, 2.5])
    writer.add_bool("tokenizer.ggml.add_bos_token", values["last"])
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_fields_are_the_bytes_of_the_file(tmp_path: Path) -> None:
    """A long array, a short one and a scalar, the last field too, are what the plain reader finds piece by piece."""
    path = write(tmp_path / "a.gguf")
    plain = gguf.GGUFReader(path)
    wanted = {
        name: b"".join(part.tobytes() for part in field.parts[2:])  # behind the length of its name and the name
        for name, field in plain.fields.items()
        if name.startswith("tokenizer.")
    }
    assert len(wanted) == 4
    assert GgufReader(path).field_bytes("tokenizer.") == wanted
    assert len(GgufReader(path).fields["tokenizer.ggml.tokens"].parts) < len(TOKENS)


def test_the_digest_is_of_the_tokenizer_alone(tmp_path: Path) -> None:
    """One character of one word, one type and the last field each change it; the model's other fields do not."""
    first = tokenizer_digest(write(tmp_path / "a.gguf"))
    assert len(first) == 32
    assert tokenizer_digest(write(tmp_path / "b.gguf", name="renamed, and longer")) == first
    others = [
        {"tokens": [*TOKENS[:-1], "word x"]},
        {"types": [*range(999), 0]},
        {"last": False},
    ]
    digests = {tokenizer_digest(write(tmp_path / f"{index}.gguf", **other)) for index, other in enumerate(others)}
    assert len(digests | {first}) == 4


def test_a_large_vocabulary_costs_no_start(tmp_path: Path) -> None:
    """The digest of 50,000 words takes a small part of what the plain reader takes for them."""
    path = write(tmp_path / "a.gguf", tokens=[f"word {index}" for index in range(50_000)], types=list(range(50_000)))
    began = time.thread_time()
    gguf.GGUFReader(path)
    plain = time.thread_time() - began
    began = time.thread_time()
    tokenizer_digest(path)
    assert time.thread_time() - began < plain / 5


@pytest.mark.parametrize(
    ("behind", "damage"),
    [
        (b"tokenizer.ggml.tokens\x09\0\0\0\x08\0\0\0", b"\xff" * 8),  # how many words
        (b"tokenizer.ggml.tokens\x09\0\0\0\x08\0\0\0\xe8\x03\0\0\0\0\0\0", b"\0" * 7 + b"\x80"),  # of the first
        (b"tokenizer.ggml.token_type\x09\0\0\0\x05\0\0\0", b"\xff" * 8),  # how many types
        (b"general.name\x08\0\0\0\x04\0\0\0\0\0\0\0", b"\xff"),  # no UTF-8
    ],
)
def test_a_damaged_head_is_refused(tmp_path: Path, behind: bytes, damage: bytes) -> None:
    """A count, a length or a text that cannot be is an error of the file, whatever Python calls it."""
    path = write(tmp_path / "a.gguf")
    content = path.read_bytes()
    at = content.index(behind) + len(behind)
    path.write_bytes(content[:at] + damage + content[at + len(damage) :])
    with pytest.raises(InvalidArgument, match="is not a readable GGUF file"):
        GgufSource(path)
