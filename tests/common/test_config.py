"""Options: precedence of their sources, and refusals that name the option."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.config import DTYPES, Options, build_parser, load_options
from common.layout import KV_DTYPES


def load(*flags: str, **environ: str) -> Options:
    """Options of `tessera up` with these flags and this environment."""
    return load_options(build_parser("up").parse_args(flags), {"HOME": "/home/x", **environ})


def test_defaults_need_nothing() -> None:
    """With no flag, file or variable every option has a value, and no fault is on."""
    options = load()
    assert options.block_tokens == 16
    assert options.prefix_cache is True
    assert options.state_dir == Path("/home/x/.local/state/tessera")
    assert options.faults == type(options.faults)()


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    """The nearest source wins, option by option."""
    file = tmp_path / "node.toml"
    file.write_text('max_batch = 3\nchunk_tokens = 64\ndtype = "float32"\nprefix_cache = false\n')
    options = load("--config", str(file), "--max-batch", "5", TESSERA_CHUNK_TOKENS="128", TESSERA_MAX_BATCH="4")
    assert (options.max_batch, options.chunk_tokens, options.dtype) == (5, 128, "float32")
    assert options.prefix_cache is False


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--block-tokens", "12"], "--block-tokens: 12 is no power of two; allowed are 1, 2, 4 and so on up to 256"),
        (["--max-batch", "0"], "--max-batch: 0 is outside 1..1024"),
        (["--max-batch", "many"], "--max-batch: 'many' is no whole number in 1..1024"),
        (["--pool-bytes", "lots"], "no size"),
        (["--pool-bytes", "1025T"], "--pool-bytes: '1025T' is too large; allowed are sizes up to 1024T"),
        (["--pool-bytes", "1e20T"], "too large"),
        (["--dtype", "int3"], "float32, bfloat16"),
        (["--pool-blocks", "8", "--pool-bytes", "1G"], "exclude"),
        (["--mixed-chunk-tokens", "513"], "--mixed-chunk-tokens 513 is above --chunk-tokens 512"),
        (["--mixed-chunk-tokens", "33", "--chunk-tokens", "32"], "--chunk-tokens 32"),
        (["--fault", "step_delay=1"], "refused without --test-faults"),
        (["--test-faults", "--fault", "meteor=1"], "unknown knob"),
        (["--test-faults", "--fault", "step_delay=nan"], "outside"),
        (["--tls-cert", "a.pem"], "go together"),
        (["--kv-dtype", "float64"], "--kv-dtype: 'float64'"),
        (["--state-dir", ""], "--state-dir: is empty"),
        (["--model", ""], "--model: is empty"),
        (["--model", "~nobody-of-that-name/x"], "--model: '~nobody-of-that-name/x'"),
        (["--listen", "foo"], "--listen: 'foo' is no address; allowed is host:port"),
        (["--listen", "127.0.0.1:99999"], "--listen: '127.0.0.1:99999': port 99999 is outside 0..65535"),
        (["--listen", "127.0.0.1:-1"], "--listen: '127.0.0.1:-1' is no address"),
        (["--listen", "::1:50051"], "in brackets"),
        (["--listen", "http://localhost:1"], "is no address"),
        (["--listen", ":50051"], "is no address"),
        (["--listen", "unix:"], "names no path"),
        (["--admin-listen", "unix:/x"], "--admin-listen: 'unix:/x' is no address"),
        (["--config", "/nowhere/node.toml"], "--config: /nowhere/node.toml cannot be read: No such file or directory"),
        (["--config", ""], "--config: "),
        (["--drain-seconds", "nan"], "outside"),
        (["--drain-seconds", "1m"], "--drain-seconds: '1m' is no number of seconds in 0..86400"),
    ],
)
def test_bad_values_are_refused_by_name(flags: list[str], said: str) -> None:
    """A wrong value names its option and what is allowed."""
    with pytest.raises(ValueError, match=re.escape(said)):
        load(*flags)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:50051", "localhost:1", "0.0.0.0:65535", "unix:/tmp/x"])
def test_addresses_that_can_be_listened_at(address: str) -> None:
    """Hosts with a port, IPv6 in brackets and Unix sockets are taken as they are."""
    assert load("--listen", address).listen == address


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_every_pair_of_dtypes_is_accepted(dtype: str, kv_dtype: str) -> None:
    """Each type of keys and values is served beside each type of weights; unset leaves it to the weights."""
    options = load("--dtype", dtype, "--kv-dtype", kv_dtype)
    assert (options.dtype, options.kv_dtype) == (dtype, kv_dtype)
    assert load("--dtype", dtype).kv_dtype is None


@pytest.mark.parametrize(("data", "said"), [(b"a = '\xff'", "is no UTF-8"), (b"a = ", "node.toml: ")])
def test_a_broken_file_is_named_with_its_source(tmp_path: Path, data: bytes, said: str) -> None:
    """Bytes that are no UTF-8, or no TOML, are refused with the path and where it came from."""
    file = tmp_path / "node.toml"
    file.write_bytes(data)
    for source, arguments, environ in (
        ("--config", ["--config", str(file)], {}),
        ("TESSERA_CONFIG", [], {"TESSERA_CONFIG": str(file)}),
    ):
        with pytest.raises(ValueError, match=re.escape(said)) as caught:
            load(*arguments, **environ)
        assert str(caught.value).startswith(f"{source}: {file}")


def test_unknown_name_in_the_file_is_refused(tmp_path: Path) -> None:
    """A misspelt name in the file is not ignored."""
    file = tmp_path / "node.toml"
    file.write_text("max_bacth = 3\n")
    with pytest.raises(ValueError, match="unknown option 'max_bacth'"):
        load("--config", str(file))


@pytest.mark.parametrize(
    ("text", "size"),
    [("512M", 512 * 1024**2), ("2GiB", 2 * 1024**3), ("4096", 4096), ("1.5k", 1536), ("1024T", 1024**5)],
)
def test_sizes(text: str, size: int) -> None:
    """Sizes are bytes, or numbers with a binary unit."""
    assert load("--pool-bytes", text).pool_bytes == size


def test_faults_need_their_flag() -> None:
    """With the flag, knobs are read from flags and environment alike."""
    options = load("--test-faults", "--fault", "weak_hash=4", TESSERA_FAULTS="step_delay=0.5 delay=acquire:0.1")
    assert options.faults.weak_hash_bits == 4
    assert options.faults.step_delay_seconds == 0.5
    assert options.faults.delay_message == {"acquire": 0.1}


def test_a_lease_has_a_length() -> None:
    """Leases and grace are read by name; a lease too short to be renewed in is refused."""
    options = load("--lease-seconds", "2.5", TESSERA_GRACE_SECONDS="0")
    assert (options.lease_seconds, options.grace_seconds) == (2.5, 0.0)
    with pytest.raises(ValueError, match="--lease-seconds"):
        load("--lease-seconds", "0.1")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("cpu", "cpu"),
        ("auto", "auto"),
        ("cuda", "cuda"),
        ("cuda:GPU-0A1B2C3D-0000-1111-2222-333344445555", "cuda:GPU-0a1b2c3d-0000-1111-2222-333344445555"),
        ("cuda:0a1b2c3d-0000-1111-2222-333344445555", "cuda:GPU-0a1b2c3d-0000-1111-2222-333344445555"),
    ],
)
def test_a_gpu_is_named_by_its_uuid(text: str, parsed: str) -> None:
    """Both ways to write a UUID mean the same device."""
    assert load("--device", text).device == parsed


@pytest.mark.parametrize("text", ["cuda:0", "cuda:", "gpu", "cpu:0", "cuda:GPU-1234", "CUDA"])
def test_a_device_without_a_uuid_is_refused_by_name(text: str) -> None:
    """A number is no name of a GPU: processes number them differently."""
    with pytest.raises(ValueError, match=r"--device: .* is not cpu, cuda, auto or cuda:<UUID>"):
        load("--device", text)


def test_packed_weights_lie_in_the_cache_folder_unless_said_otherwise() -> None:
    """By XDG, at the path that is named, or nowhere."""
    assert load().weights_cache is not None and str(load().weights_cache).endswith("tessera/packed")
    assert load("--weights-cache", "/x/y").weights_cache == Path("/x/y")
    assert load("--weights-cache", "none").weights_cache is None
