"""What is wrong with a node's options is said before anything starts: one line, status 2; what is right passes."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path

import pytest

from cli.__main__ import main
from cli.errors import CommandError
from cli.preflight import check_options
from common.config import build_parser, load_options
from common.cuda_driver import open_gpu
from common.devices import CUDA
from common.errors import FailedPrecondition
from common.memory import machine_bytes
from tests.cli.test_failures import make_certificate, needs_openssl

CORES = len(os.sched_getaffinity(0))
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}
BLOCK_BYTES = 4 * 2 * 2 * 8 * 16 * 2  # layers, keys and values, key heads, head size, tokens, bfloat16


def have_driver() -> bool:
    """Whether this machine has a GPU that could be opened."""
    try:
        return open_gpu(CUDA) is not None
    except FailedPrecondition:
        return False


def directory(folder: Path, config: object = CONFIG) -> Path:
    """A Hugging Face directory that a look from outside finds nothing wrong with."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


def gguf(path: Path, family: bytes = b"llama", **numbers: int) -> Path:
    """A GGUF header with some numbers of the family "llama", which it says it is, or another."""
    fields = b""
    for name, value in numbers.items():
        key = b"llama." + name.replace("__", ".").encode()
        fields += struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, value)
    key = b"general.architecture"
    fields += struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(family)) + family
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(numbers) + 1) + fields)
    return path


def refusal(*flags: str) -> str:
    """What is said about these options; empty where nothing is wrong."""
    options = load_options(build_parser("up").parse_args(flags), {"HOME": "/nowhere"})
    try:
        check_options(options)
    except CommandError as error:
        assert error.status == 2
        assert "\n" not in error.message
        return error.message
    return ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--listen", "0.0.0.0:50051"], "--listen: 0.0.0.0:50051 is beyond loopback"),
        (["--listen", "0.0.0.0:50051", "--insecure-listen"], ""),
        (["--listen", "[::1]:50051"], ""),
        (["--listen", "unix:/tmp/x"], ""),
        (["--listen", "unix:/nowhere/x"], "--listen: there is no folder /nowhere for the socket"),
        (["--listen", f"unix:/tmp/{'x' * 103}"], "allowed are 107 bytes"),
        (["--listen", f"unix:/tmp/{'x' * 102}"], ""),
        (["--admin-listen", "127.0.0.1:50051"], "--admin-listen: 127.0.0.1:50051 is the address of --listen"),
        (["--admin-listen", "127.0.0.1:1", "--listen", "0.0.0.0:1", "--insecure-listen"], "is the address of --listen"),
        (["--admin-listen", "127.0.0.1:1", "--listen", "[::1]:1"], ""),
        (["--adapters-dir", "/dev/null"], "--adapters-dir: /dev/null is no directory"),
        (["--adapters-dir", "/nowhere"], ""),
        (["--admin-listen", "10.0.0.1:50052"], "--admin-listen: 10.0.0.1:50052 is beyond loopback"),
        (["--admin-listen", "localhost:50052"], ""),
        (["--tls-cert", "/nowhere/c", "--tls-key", "/nowhere/k"], "--tls-cert: /nowhere/c cannot be read"),
        (["--threads", str(CORES + 1)], f"--threads: {CORES + 1} is outside 0..{CORES}"),
        (["--threads", str(CORES)], ""),
    ],
)
def test_listeners_and_threads(flags: list[str], said: str) -> None:
    """Beyond this machine without TLS, certificates that are not there, more threads than CPUs."""
    found = refusal(*flags)
    assert said in found
    assert bool(said) == bool(found)


def test_the_bits_of_a_file_need_a_file(tmp_path: Path) -> None:
    """`--dtype file` beside a directory is refused before a process starts; other types, and a GGUF file, are not."""
    model = str(directory(tmp_path / "m"))
    assert refusal("--model", model, "--dtype", "file").startswith("--dtype: file is for GGUF files, and ")
    assert not refusal("--model", model, "--dtype", "int8")
    assert not refusal("--model", str(gguf(tmp_path / "m.gguf", block_count=4)), "--dtype", "file")


def test_a_pool_that_is_too_small_for_its_model_or_too_large_for_the_machine(tmp_path: Path) -> None:
    """Two blocks are the least: of both kinds of model, of either KV type; a number of blocks was checked before."""
    model = str(directory(tmp_path / "m"))
    sizes = {"block_count": 4, "attention__head_count": 8, "attention__head_count_kv": 2, "embedding_length": 64}
    for path in (model, str(gguf(tmp_path / "m.gguf", **sizes))):
        assert not refusal("--model", path, "--pool-bytes", str(2 * BLOCK_BYTES))
        said = refusal("--model", path, "--pool-bytes", str(2 * BLOCK_BYTES - 1))
        assert said.startswith(f"--pool-bytes: {2 * BLOCK_BYTES - 1} bytes are fewer than 2 blocks of {BLOCK_BYTES}")
        assert refusal("--model", path, "--kv-dtype", "float32", "--pool-bytes", str(2 * BLOCK_BYTES))
        assert not refusal("--model", path, "--pool-blocks", "2")
        assert not refusal("--model", path, "--pool-bytes", str(machine_bytes()))
        said = refusal("--model", path, "--pool-bytes", str(machine_bytes() + 1))
        assert said.startswith(f"--pool-bytes: {machine_bytes() + 1} bytes are more than the {machine_bytes()}")
        assert not refusal("--model", path)
        blocks = machine_bytes() // BLOCK_BYTES
        assert not refusal("--model", path, "--pool-blocks", str(blocks - 1))
        assert refusal("--model", path, "--pool-blocks", str(blocks)).startswith(f"--pool-blocks: {blocks} blocks of")
    values = json.loads((tmp_path / "m" / "config.json").read_text())
    for changes, layers in (
        ({"model_type": "gemma2"}, 1),
        ({"model_type": "qwen2", "use_sliding_window": True}, 1),
        ({"model_type": "qwen2", "sliding_window": 4096}, 4),  # which are switched off
        ({"model_type": "mistral", "sliding_window": 40}, 4),
    ):  # some layers may lie in window blocks: less than all of them are refused by the decoder alone
        mixed = str(directory(tmp_path / f"{changes['model_type']}{layers}", {**values, **changes}))
        least = 2 * BLOCK_BYTES * layers // 4
        assert not refusal("--model", mixed, "--pool-bytes", str(least)), changes
        assert refusal("--model", mixed, "--pool-bytes", str(least - 1)), changes
    vague = directory(tmp_path / "vague", {"model_type": "llama"})
    assert not refusal("--model", str(vague), "--pool-bytes", "1")  # the decoder says what is wrong with it


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("config", "config.json: No such file"),
        ("json", "config.json: is no JSON"),
        ("list", "config.json: is no object"),
        ("weights", "holds no weights"),
        ("tokenizer", "holds no tokenizer.json"),
    ],
)
def test_a_directory_that_is_no_model(tmp_path: Path, broken: str, said: str) -> None:
    """What is missing is named."""
    texts: dict[str, object] = {"json": "{", "list": []}
    model = directory(tmp_path / "m", texts.get(broken, CONFIG))
    missing = {"config": "config.json", "weights": "model.safetensors", "tokenizer": "tokenizer.json"}.get(broken)
    if missing:
        (model / missing).unlink()
    assert said in refusal("--model", str(model))


def test_a_family_that_is_not_served_is_named(tmp_path: Path) -> None:
    """With those that are, for either kind of model, the draft model's too."""
    other = str(directory(tmp_path / "m", {**CONFIG, "model_type": "mamba"}))
    for option in ("--model", "--draft-model"):
        said = refusal(option, other)
        assert said.startswith(f"{option}: {other}/config.json: its model_type is 'mamba'; served are llama, mistral")
        said = refusal(option, str(gguf(tmp_path / "m.gguf", b"mamba")))
        assert said.startswith(f"{option}: {tmp_path}/m.gguf: its architecture is 'mamba'; served are llama, qwen2")
        assert not refusal(option, str(gguf(tmp_path / "m.gguf")))


def test_a_context_that_the_model_does_not_have(tmp_path: Path) -> None:
    """Its own bound is named; scaled positions may make it longer, and that is left to the decoder."""
    model = str(directory(tmp_path / "m", {**CONFIG, "max_position_embeddings": 512}))
    for path in (model, str(gguf(tmp_path / "m.gguf", context_length=512))):
        assert not refusal("--model", path, "--max-context", "512")
        said = refusal("--model", path, "--max-context", "513")
        assert said == "--max-context: 513 is more than the 512 tokens that this model serves"
    scaled = {**CONFIG, "max_position_embeddings": 512, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    assert not refusal("--model", str(directory(tmp_path / "scaled", scaled)), "--max-context", "513")


@needs_openssl
def test_a_certificate_and_another_key(tmp_path: Path) -> None:
    """A pair is let through, a small key too; another key, or what is no PEM, is refused with both options."""
    (cert, key), (_, other) = make_certificate(tmp_path, "a"), make_certificate(tmp_path, "b")
    text = tmp_path / "text"
    text.write_text("no certificate\n", encoding="utf-8")
    assert not refusal("--tls-cert", str(cert), "--tls-key", str(key))
    for pair in ((cert, other), (text, key), (cert, text)):
        said = refusal("--tls-cert", str(pair[0]), "--tls-key", str(pair[1]))
        assert f"--tls-cert: {pair[0]} and --tls-key {pair[1]} are no PEM certificate" in said
    small = ["-newkey", "rsa:1024", "-nodes", "-subj", "/CN=s", "-days", "2", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", "req", "-x509", *small], check=True, capture_output=True, timeout=30)
    assert not refusal("--tls-cert", str(cert), "--tls-key", str(key))


@pytest.mark.skipif(have_driver(), reason="there is a GPU driver")
def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """It is missed before the cache manager starts; "auto" means the CPU then."""
    with pytest.raises(CommandError, match=r"^--device cuda: "):
        check_options(load_options(build_parser("up").parse_args(["--device", "cuda"]), {"HOME": "/nowhere"}))
    assert not refusal("--device", "auto")


def test_the_command_says_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is no model: status 2, one line, no process, no traceback."""
    monkeypatch.setattr("cli.up.Interrupts", object)  # the signals of this process stay as they are
    wrong = tmp_path / "notes.txt"
    wrong.write_text("GGML", encoding="utf-8")
    assert main(["up", "--model", str(wrong), "--state-dir", str(tmp_path / "s")]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert f"tessera up: --model: {wrong}: " in said.err
    assert not said.out
    assert not list((tmp_path / "s").glob("logs/*"))
