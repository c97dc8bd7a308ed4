"""Tokenizers from GGUF files and directories, against independent readers of the same files."""

from __future__ import annotations

import json
import os
import random
import struct
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.errors import InvalidArgument
from common.gguf_metadata import read_metadata
from common.paths import models_dir
from gateway.chat import ChatTemplate, Turn
from gateway.gguf_tokenizer import build_from_gguf
from gateway.tokenizer import ModelTokenizer, load_tokenizer
from tests.gateway.support import tiny_tokenizer
from tests.tiny_models import make_tiny_llama

DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = [
    "Hello world, it's we'll DON'T can't",
    "   leading and   inner   spaces \n\n\n and\ttabs\t\t ",
    "def f(x):\n    return x ** 2 + 10_000  # no comment\n\n\n",
    "안녕하세요 세계 한국어 텍스트",
    "👨‍👩‍👧‍👦 🇰🇷 🏳️‍🌈 e\u0301 \u200b\ufeff",
    "naïve façade Ærøskøbing Здравствуй мир שלום مرحبا 你好，世界！",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|><repo_name><|endoftext|> < |im_start|>",
    "a\u00a0b\u3000c\u2028d\r\ne\x00f\x7f",
    "1234567890 3.14159 1,000,000 0x1F a1b2c3",
    "",
]
OTHER_DIGITS = "²³½ ٣٤ Ⅷ ⅷ 三 ①"


def demo_model() -> Path:
    """The demo model's file, or a skip with the reason."""
    named = os.environ.get("TESSERA_DEMO_MODEL")
    path = Path(named) if named else models_dir(os.environ) / DEMO_FILE
    if not path.is_file():
        pytest.skip(f"the demo model is not at {path}; `tessera model fetch` gets it")
    return path


@pytest.fixture(scope="module")
def demo() -> ModelTokenizer:
    return load_tokenizer(demo_model())


@pytest.fixture(scope="module")
def oracle() -> Any:
    transformers = pytest.importorskip("transformers")
    path = demo_model()
    reader = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # transformers leaves out the split of digits that this model was trained with; its own class for it is the oracle.
    reader.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return reader


def varied_texts() -> list[str]:
    """Random texts of words, digits, whitespace, code and several scripts; the seed is fixed."""
    source = random.Random(11)
    pieces = [
        *TEXTS[:-1],
        OTHER_DIGITS,
        *(chr(source.randrange(0x20, 0xD7FF)) for _ in range(300)),
        " ",
        "\n",
        "  ",
        "'s",
    ]
    return ["".join(source.choices(pieces, k=source.randrange(1, 12))) for _ in range(300)]


def test_the_demo_model_tokenizes_as_transformers_does(demo: ModelTokenizer, oracle: Any) -> None:
    """Ids equal those of an independent reader of the same file, for fixed and random texts."""
    for text in [*TEXTS, OTHER_DIGITS, *varied_texts()]:
        assert demo.encode(text, add_special_tokens=True) == oracle(text)["input_ids"], repr(text)


def test_the_demo_model_detokenizes_as_transformers_does(demo: ModelTokenizer, oracle: Any) -> None:
    """Text of encoded and of random ids equals the independent reader's."""
    source = random.Random(12)
    randoms = [[source.randrange(demo.vocab_size) for _ in range(40)] for _ in range(100)]
    for ids in [*(demo.encode(text, add_special_tokens=True) for text in TEXTS), *randoms]:
        expected = oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert demo.decode(ids) == expected


def test_the_demo_model_names_its_tokens_and_template(demo: ModelTokenizer) -> None:
    """Special tokens, end and chat template come from the file."""
    assert demo.vocab_size == 49152
    assert demo.special_tokens["eos_token"] == "<|im_end|>"
    assert demo.eos_token_ids == (2,)
    assert demo.chat_template is not None
    assert "<|im_start|>" in demo.chat_template


def test_a_conversation_becomes_the_prompt_that_transformers_makes(demo: ModelTokenizer, oracle: Any) -> None:
    """The rendered chat template equals the independent reader's, with and without a system message."""
    template = ChatTemplate(demo.chat_template or "", demo.special_tokens, now=datetime.now, max_characters=10_000)
    for turns in ([Turn("user", "hi {{ x }}")], [Turn("system", "s"), Turn("user", "안녕"), Turn("assistant", "")]):
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(turns) == expected


def test_the_metadata_equals_that_of_the_gguf_package() -> None:
    """Our reader of the header finds every field and value that the reference reader finds."""
    gguf = pytest.importorskip("gguf")
    path = demo_model()
    reader = gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert read_metadata(path) == expected


def fields(**changes: object) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary with a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet, "12", "123", "ab", "Ġa", "<user>"]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["1 2", "12 3", "a b", "Ġ a"],
        "tokenizer.ggml.token_type": [3, 3, *([1] * (len(tokens) - 3)), 4],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return values | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def pieces(pre: str, text: str) -> list[str]:
    """The token strings of `text`, without special tokens."""
    tokenizer = build_from_gguf(fields(pre=pre)).tokenizer
    return list(tokenizer.encode(text, add_special_tokens=False).tokens)


def test_each_pre_tokenizer_splits_digits_as_its_models_do() -> None:
    """gpt-2 keeps runs of digits, llama-bpe takes three at most, smollm and qwen2 take one at a time."""
    assert pieces("gpt-2", "1231")[0] == "123"
    assert pieces("llama-bpe", "121231") == ["12", "1", "2", "3", "1"]
    assert pieces("smollm", "123") == pieces("qwen2", "123") == ["1", "2", "3"]
    assert pieces("default", "12 ab") == ["12", "Ġ", "ab"]


def test_qwen2_composes_unicode_first() -> None:
    """A decomposed character becomes the composed one for qwen2, and stays as it is for gpt-2."""
    decomposed = "e\u0301"
    assert pieces("qwen2", decomposed) == pieces("qwen2", "é")
    assert pieces("gpt-2", decomposed) != pieces("gpt-2", "é")


def test_bos_is_added_as_the_file_says() -> None:
    """add_bos_token decides; where it is absent, the pre-tokenizer's models do."""

    def first(**changes: object) -> int:
        return int(build_from_gguf(fields(**changes)).tokenizer.encode("ab").ids[0])

    assert first(add_bos_token=True) == first(pre="llama-bpe") == 0
    assert first(add_bos_token=False, pre="llama-bpe") == first() != 0


def test_user_defined_tokens_are_text_and_control_tokens_are_not() -> None:
    """A token of the user-defined type is matched whole and shown; control tokens are matched whole and skipped."""
    built = build_from_gguf(fields())
    tokenizer = ModelTokenizer(
        built.tokenizer, special_tokens=built.special_tokens, eos_token_ids=built.eos_token_ids, chat_template=None
    )
    ids = tokenizer.encode("ab<user></s>", add_special_tokens=False)
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "ab<user>"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "llama"}, "scores"),
        ({"model": "bert"}, "'bert'"),
        ({"pre": "no-such-rules"}, "'no-such-rules'"),
        ({"tokens": []}, "tokens"),
        ({"merges": None}, "merges"),
        ({"merges": ["ab"]}, "merge"),
        ({"merges": ["zz yy"]}, "merges"),
        ({"token_type": [1]}, "token_type"),
        ({"eos_token_id": 10**6}, "eos_token_id"),
    ],
)
def test_a_vocabulary_that_is_not_served_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    """Another kind, unknown rules and broken lists are never half-loaded."""
    with pytest.raises(InvalidArgument, match=named):
        build_from_gguf(fields(**changes))


def header(body: bytes, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQ", version, 0) + body


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        header(b"", magic=b"GGML"),
        header(struct.pack("<Q", 0), version=1),
        header(struct.pack("<Q", 2**60)),
        header(struct.pack("<Q", 1) + struct.pack("<Q", 2**60)),
        header(struct.pack("<QQ", 1, 1) + b"k" + struct.pack("<I", 99)),
        header(struct.pack("<QQ", 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**40)),
        header(struct.pack("<QQ", 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 3) + struct.pack("<Q", 2**62)),
        header(struct.pack("<QQ", 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1)),
    ],
)
def test_a_broken_file_is_refused_before_anything_is_allocated(tmp_path: Path, content: bytes) -> None:
    """Truncated files, wild lengths and unknown types end in INVALID_ARGUMENT."""
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(InvalidArgument):
        read_metadata(file)


def test_a_directory_loads_as_transformers_loads_it(tmp_path: Path) -> None:
    """tokenizer.json, its configuration and its template are read as transformers reads them."""
    transformers = pytest.importorskip("transformers")
    directory = make_tiny_llama(tmp_path / "m", layers=1, hidden=16, heads=1, kv_heads=1)
    ours, theirs = load_tokenizer(directory), transformers.AutoTokenizer.from_pretrained(str(directory))
    for text in [*TEXTS, OTHER_DIGITS]:
        assert ours.encode(text, add_special_tokens=True) == theirs(text)["input_ids"]
    assert ours.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert ours.eos_token_ids == (2,)
    assert ours.chat_template == theirs.chat_template


def test_the_ends_of_the_generation_config_come_first(tmp_path: Path) -> None:
    """eos ids are those of generation_config.json where it lists them; a template file wins over the configuration."""
    directory = make_tiny_llama(tmp_path / "m", layers=1, hidden=16, heads=1, kv_heads=1)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    loaded = load_tokenizer(directory)
    assert loaded.eos_token_ids == (0, 2)
    assert loaded.chat_template == "{{ messages[0].content }}"


def test_a_path_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """Nothing, an empty directory and a broken tokenizer.json are refused."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "broken"):
        with pytest.raises(InvalidArgument):
            load_tokenizer(path)


def sentencepiece() -> ModelTokenizer:
    """A tokenizer that puts a space before a text and a BOS before that, with a token for each byte."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcd", "\u2581a", "ab"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocabulary, merges=[("\u2581", "a"), ("a", "b")], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return ModelTokenizer(tokenizer, special_tokens={}, eos_token_ids=(), chat_template=None)


@pytest.mark.parametrize("text", ["a", " a", "  a", "ab cd", " ab", "\nab", "\u00e9", "\n", " "])
def test_text_that_goes_on_gets_no_beginning_of_its_own(text: str) -> None:
    """Joined to what came before, the text is what both say: no BOS, no space that was not there."""
    made = sentencepiece()
    before = made.encode("cd", add_special_tokens=True)
    joined = [*before, *made.encode_continuation(text)]
    assert made.decode(joined) == "cd" + text
    assert joined.count(1) == 1
    assert made.encode(text, add_special_tokens=True)[0] == 1, "positive control: a text that stands alone begins so"


def test_no_text_has_fewer_tokens_than_the_bound_says() -> None:
    """The bound on a prompt's bytes never refuses what fits."""
    tokenizer = tiny_tokenizer()
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(text.encode()) <= len(ids) * tokenizer.max_bytes_per_token
