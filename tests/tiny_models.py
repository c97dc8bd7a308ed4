"""Tiny Llama models on disk, in the Hugging Face layout, for tests of every part that needs a model.

The weights are random but scaled so that greedy output depends on the whole context and does not settle on one
token. Equal arguments write equal bytes, so digests and tokens are reproducible. Never used by product code.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS_TOKEN = "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", EOS_TOKEN)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    "A tessera is one tile of a mosaic; here it is one block of keys and values that many readers share.",
    "The quick brown fox jumps over the lazy dog while the system prompt stays in the cache of the node.",
    "You are a helpful assistant. Answer the question of the user in a few short sentences and be exact.",
    "def main(arguments): return [value for value in arguments if value is not None and value > 0]",
    "Once upon a time there was a small machine with two cores which had to serve a large number of people.",
    "Numbers: 0 1 2 3 4 5 6 7 8 9 10 11 12 100 1000 10000; signs: , . ; : ! ? ( ) [ ] { } < > / = + - * _",
    "Prefill computes the prompt in chunks, decode adds one token per step, and eviction frees the oldest leaf.",
    "Please write a story about a river, a mountain, a library and the three friends who found a way home.",
)


def _train_tokenizer(vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly `vocab` ids; ids the corpus cannot fill become plain words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    missing = vocab - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"filler{index}" for index in range(missing)])
    return tokenizer


def make_tiny_llama(
    directory: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int | None = None,
    vocab: int = 512,
    max_position: int = 4096,
    rope_theta: float = 10000.0,
    tie_embeddings: bool = False,
    num_shards: int = 1,
    seed: int = 0,
) -> Path:
    """Write config.json, safetensors and a tokenizer into `directory` and return it.

    `vocab` is at least 259 (256 bytes and three special tokens). The end-of-sequence id is 2. With `num_shards`
    above one, the weights are split and described by `model.safetensors.index.json`.
    """
    if vocab < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab is {vocab}; a byte-level tokenizer needs at least {256 + len(SPECIAL_TOKENS)}")
    head_dim = head_dim or hidden // heads
    intermediate = intermediate or 2 * hidden
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "max_position_embeddings": max_position,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tie_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))

    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1.0 + 0.1 * random.standard_normal(hidden)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden, gain=np.sqrt(hidden)), "model.norm.weight": norm()}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": norm(),
            f"{prefix}self_attn.q_proj.weight": matrix(heads * head_dim, hidden, gain=1.5),
            f"{prefix}self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden, gain=1.5),
            f"{prefix}self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden, gain=2.0),
            # Strong branches, so that the context outweighs the last token in the residual stream.
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, heads * head_dim, gain=2.0),
            f"{prefix}post_attention_layernorm.weight": norm(),
            f"{prefix}mlp.gate_proj.weight": matrix(intermediate, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(intermediate, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, intermediate, gain=2.0),
        }
    if not tie_embeddings:
        tensors["lm_head.weight"] = matrix(vocab, hidden, gain=2.0)
    _save_shards(directory, tensors, num_shards)

    _train_tokenizer(vocab).save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": EOS_TOKEN,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    return directory


def _save_shards(directory: Path, tensors: dict[str, np.ndarray], num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    names = sorted(tensors)
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, str(directory / file_name), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
