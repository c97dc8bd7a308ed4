"""Loading: a model is loaded completely or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from common.config import DTYPES
from common.errors import InvalidArgument
from common.layout import KV_DTYPES
from decoder.cache_key import cache_key
from decoder.weights import load_model
from decoder.weights.loader import limit_context
from decoder.weights.source import _BLOCK_TYPES, HuggingFaceSource, _dequantize, open_source
from tests.decoder.model_rig import run_prompt
from tests.tiny_models import make_tiny_llama


def _change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model_type": "mamba"}, "architecture"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "short_factor"),
        ({"model_type": "gemma3"}, "vision encoder"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention", "chunked_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_heads"),
        ({"head_dim": 24}, "head_dim"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"intermediate_size": -1}, "intermediate_size"),
        ({"hidden_size": "many"}, "config"),
    ],
)
def test_unserved_configuration_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], name: str) -> None:
    """A setting this build does not serve ends the load with an error that names it."""
    path = make_tiny_llama(tmp_path / "tiny")
    _change_config(path, **changes)
    with pytest.raises(InvalidArgument, match=name):
        load_model(path, "float32", 16)


def test_a_context_beyond_the_model_is_refused_with_its_longest(tmp_path: Path) -> None:
    """The longest context itself is served, one token more is refused with the number; dynamic scaling serves more."""
    path = make_tiny_llama(tmp_path / "tiny")
    config = open_source(path).config
    most = config.max_position
    assert limit_context(config, most).max_position == most
    assert limit_context(config, 0) == config
    with pytest.raises(InvalidArgument, match=rf"max_context: is {most + 1}; .* at most {most} tokens"):
        limit_context(config, most + 1)
    rope = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": most}
    _change_config(path, rope_scaling=rope)
    dynamic = open_source(path).config
    assert limit_context(dynamic, 2 * most).max_position == 2 * most
    with pytest.raises(InvalidArgument, match=f"at most {2 * most} tokens"):
        limit_context(dynamic, 2 * most + 1)


def test_missing_key_is_named(tmp_path: Path) -> None:
    """A configuration without a needed key is refused and the key is named."""
    path = make_tiny_llama(tmp_path / "tiny")
    config = json.loads((path / "config.json").read_text())
    del config["intermediate_size"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match="intermediate_size"):
        load_model(path, "float32", 16)


@pytest.mark.parametrize("fault", ["missing", "shape", "extra", "integer"])
def test_wrong_tensor_is_named(tmp_path: Path, fault: str) -> None:
    """A missing, misshapen, unknown or oddly typed tensor ends the load with its name."""
    path = make_tiny_llama(tmp_path / "tiny")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "shape":
        tensors[name] = np.ascontiguousarray(tensors[name].T)
    elif fault == "integer":
        tensors[name] = tensors[name].astype(np.int32)
    else:
        name = "model.layers.1.self_attn.k_proj.bias"
        tensors[name] = np.zeros(32, np.float32)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(InvalidArgument, match=name.replace(".", r"\.")):
        load_model(path, "float32", 16)


def test_index_cannot_leave_the_directory(tmp_path: Path) -> None:
    """A shard index that names a file elsewhere is refused."""
    path = make_tiny_llama(tmp_path / "tiny", num_shards=2)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../other.safetensors"}}))
    with pytest.raises(InvalidArgument, match="other"):
        load_model(path, "float32", 16)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 10])
def test_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file that is not GGUF is an InvalidArgument and no crash."""
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(InvalidArgument):
        load_model(tmp_path / "model.gguf", "float32", 16)
    path = make_tiny_llama(tmp_path / "tiny")
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidArgument):
        load_model(path, "float32", 16)


def test_other_paths_and_types_are_refused(tmp_path: Path) -> None:
    """A path that is neither, a dtype and a KV dtype this build does not serve are refused."""
    with pytest.raises(InvalidArgument):
        open_source(tmp_path / "absent")
    path = make_tiny_llama(tmp_path / "tiny")
    with pytest.raises(InvalidArgument, match="dtype"):
        load_model(path, "float16", 16)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="kv_dtype"):
        load_model(path, "float32", 16, kv_dtype="float64")


def test_digests_follow_content(tmp_path: Path) -> None:
    """Equal content gives equal digests under another name; one changed weight or setting changes its digest."""
    first = load_model(make_tiny_llama(tmp_path / "a"), "float32", 16).digests
    assert load_model(make_tiny_llama(tmp_path / "b"), "float32", 16).digests == first
    other = load_model(make_tiny_llama(tmp_path / "c", seed=1), "float32", 16).digests
    assert other.weights != first.weights
    assert other.position == first.position
    rope = load_model(make_tiny_llama(tmp_path / "d", rope_theta=5e5), "float32", 16).digests
    assert rope.position != first.position
    assert load_model(tmp_path / "a", "bfloat16", 16).digests.attention != first.attention


def test_pairs_of_dtypes_have_layouts_and_keys_of_their_own(tmp_path: Path) -> None:
    """The layout follows the type of keys and values alone; the cache key tells every served pair of types apart."""
    path = tmp_path / "tiny.gguf"
    _write_gguf(make_tiny_llama(tmp_path / "tiny"), path)
    models = [load_model(path, dtype, 16, kv) for dtype in DTYPES for kv in KV_DTYPES]  # type: ignore[arg-type]
    layouts = {model.layout.fingerprint() for model in models}
    assert len(layouts) == len(KV_DTYPES)
    keys = {cache_key(model, b"").SerializeToString(deterministic=True) for model in models}
    assert len(keys) == len(models) == len(DTYPES) * len(KV_DTYPES)
    for dtype, kv in (("float32", "float32"), ("bfloat16", "float16")):
        model = load_model(path, dtype, 16)  # type: ignore[arg-type]
        assert model.layout.dtype.value == kv
    again = load_model(path, "bfloat16", 16, kv_dtype="float32")
    assert cache_key(again, b"").SerializeToString(deterministic=True) in keys


def test_shards_equal_one_file(tmp_path: Path) -> None:
    """A sharded directory gives the logits of the single file."""
    prompt = np.arange(3, 40, dtype=np.int32)
    one = run_prompt(load_model(make_tiny_llama(tmp_path / "one"), "float32", 16), prompt)
    many = run_prompt(load_model(make_tiny_llama(tmp_path / "many", num_shards=3), "float32", 16), prompt)
    assert np.array_equal(one, many)


def _write_gguf(directory: Path, target: Path, **extra: Any) -> None:
    """The directory's model as an F32 GGUF file, queries and keys permuted as converters do."""
    source = HuggingFaceSource(directory)
    config = source.config
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_eos_token_id(2)
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name in source.shapes():
        array, stem = source.read(name), name.removesuffix(".weight")
        if stem.endswith(("q_proj", "k_proj")):
            heads = config.num_heads if stem.endswith("q_proj") else config.num_kv_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        parts = stem.split(".")
        short = top.get(stem) or f"blk.{parts[2]}.{names[parts[-1]]}"
        writer.add_tensor(f"{short}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_equals_directory(tmp_path: Path) -> None:
    """A GGUF file, with its permuted queries and keys, gives the logits of the directory it was made from."""
    directory = make_tiny_llama(tmp_path / "tiny")
    _write_gguf(directory, tmp_path / "tiny.gguf")
    prompt = np.arange(3, 60, dtype=np.int32)
    want = run_prompt(load_model(directory, "float32", 16), prompt)
    got = run_prompt(load_model(tmp_path / "tiny.gguf", "float32", 16), prompt)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_gguf_rope_scaling_is_refused(tmp_path: Path) -> None:
    """A GGUF file with rope scaling of an unknown kind is refused by name."""
    directory = make_tiny_llama(tmp_path / "tiny")
    _write_gguf(directory, tmp_path / "tiny.gguf", llama__rope__scaling__type="spiral")
    with pytest.raises(InvalidArgument, match=r"rope\.scaling"):
        load_model(tmp_path / "tiny.gguf", "float32", 16)


@pytest.mark.parametrize("name", _BLOCK_TYPES)
def test_dequantised_as_the_package_does(name: str) -> None:
    """Dequantising in large pieces gives bit for bit what the gguf package gives."""
    kind = gguf.GGMLQuantizationType[name]
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # Small bytes keep the scales finite; enough blocks for more than one piece.
    data = np.random.default_rng(0).integers(0, 60, (320, 8 * block_bytes)).astype(np.uint8)
    assert np.array_equal(_dequantize(data, kind).reshape(-1), gguf.dequantize(data, kind).reshape(-1))
