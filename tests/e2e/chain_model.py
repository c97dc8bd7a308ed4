"""A model that says a given text: each token is followed, greedily, by the next one of its chain.

For tests of text: they choose where token edges lie, inside characters or not. The weights are a real Llama whose
layers add nothing, so the last token alone decides; the logits of the next token stand far above the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_models import SPECIAL_TOKENS, make_tiny_llama

EOS_ID = 2
FIRST_ID = len(SPECIAL_TOKENS)
HIDDEN = 128


def _byte_characters() -> dict[int, str]:
    """The printable stand-in of every byte in a byte-level vocabulary (GPT-2)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in kept}
    missing = [byte for byte in range(256) if byte not in table]
    return table | {byte: chr(256 + i) for i, byte in enumerate(missing)}


def make_chain_model(directory: Path, chains: Mapping[str, Sequence[bytes]]) -> dict[str, int]:
    """Write the model; returns for each chain the token to prompt with.

    A chain is the pieces that follow its start, then the end-of-sequence token. A piece may occur once in all chains,
    as one token has one follower. Raises ValueError where one occurs twice.
    """
    make_tiny_llama(directory, hidden=HIDDEN, heads=4, kv_heads=2, vocab=1024)
    characters = _byte_characters()
    vocabulary = {name: index for index, name in enumerate(SPECIAL_TOKENS)}
    vocabulary |= {character: FIRST_ID + byte for byte, character in sorted(characters.items())}
    used: set[bytes] = set()
    follower: dict[int, int] = {}
    starts: dict[str, int] = {}
    for name, pieces in chains.items():
        start = f"start-{name}"
        vocabulary[start] = len(vocabulary)
        starts[name] = last = vocabulary[start]
        for piece in pieces:
            if piece in used:
                raise ValueError(f"{piece!r} occurs twice")
            used.add(piece)
            token = vocabulary.setdefault("".join(characters[byte] for byte in piece), len(vocabulary))
            follower[last], last = token, token
        follower[last] = EOS_ID
    if len(vocabulary) > 1024:
        raise ValueError(f"{len(vocabulary)} tokens; the model has 1024")
    vocabulary |= {f"unused-{index}": index for index in range(len(vocabulary), 1024)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_weights(directory / "model.safetensors", follower)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": EOS_ID}))
    return starts


def _write_weights(path: Path, follower: Mapping[int, int]) -> None:
    tensors = load_file(str(path))
    signs = np.random.default_rng(7).choice([-1.0, 1.0], size=(1024, HIDDEN)).astype(np.float32)
    head = np.zeros((1024, HIDDEN), dtype=np.float32)
    for token in range(1024):
        head[follower.get(token, EOS_ID)] += signs[token] if token in follower else 0.0
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensor)
        elif name.endswith("norm.weight"):
            tensors[name] = np.ones_like(tensor)
    tensors["model.embed_tokens.weight"], tensors["lm_head.weight"] = signs, head
    save_file(tensors, str(path), metadata={"format": "pt"})
