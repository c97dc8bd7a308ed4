"""One frozen configuration for every process: flag, then `TESSERA_*` environment, then TOML file, then default.

Loaded once at start. No other module reads the environment for options.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.addresses import check_host_port, check_listen
from common.arguments import CommandParser
from common.devices import CPU, parse_device
from common.faults import NAMES as FAULT_NAMES
from common.faults import Faults, parse_faults
from common.layout import DENSE_DTYPES, GROUPED_DTYPES, KV_DTYPES, MAX_BLOCK_TOKENS
from common.logs import LEVELS
from common.paths import StatePaths, default_state_dir, packed_dir

DTYPES = (*DENSE_DTYPES, *GROUPED_DTYPES)
PROCESSES = ("up", "cachemgr", "decoder", "gateway")
DEFAULT_DTYPE = "bfloat16"
DEFAULT_CHUNK_TOKENS = 512
DEFAULT_POOL_BYTES = 2 * 1024**3
DEFAULT_DRAFT_KV_BYTES = 256 * 1024**2
DEFAULT_LEASE_SECONDS = 10.0
DEFAULT_GRACE_SECONDS = 5.0
DEFAULT_MAX_KEPT = 256
MIN_LEASE_SECONDS = 0.5
MIN_POOL_BLOCKS = 2
MAX_SIZE_BYTES = 1024 * 1024**4


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a node; each process reads what concerns it."""

    state_dir: Path
    model: Path | None = None
    model_name: str | None = None
    draft_model: Path | None = None
    draft_kv_bytes: int = DEFAULT_DRAFT_KV_BYTES
    pool_blocks: int | None = None
    pool_bytes: int | None = None
    block_tokens: int = 16
    device: str = CPU
    arena_handles: str = "fd"
    dtype: str = DEFAULT_DTYPE
    kv_dtype: str | None = None
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    mixed_chunk_tokens: int | None = None
    max_batch: int = 32
    prefix_cache: bool = True
    decoders: int = 1
    decoder_index: int = 0
    threads: int = 0
    weights_cache: Path | None = None
    max_queue: int = 256
    max_queue_total: int | None = None
    window_tokens: int = 256
    max_context: int | None = None
    adapters_dir: Path | None = None
    max_adapters: int = 16
    listen: str = "127.0.0.1:50051"
    insecure_listen: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    admin_listen: str | None = None
    drain_seconds: float = 20.0
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    max_kept: int = DEFAULT_MAX_KEPT
    log_level: str = "info"
    faults: Faults = field(default_factory=Faults)

    @property
    def mixed_tokens(self) -> int:
        """Tokens of one step in which decodes run; never more than those of one without."""
        default = max(16, self.chunk_tokens // 2)
        return min(self.chunk_tokens, default if self.mixed_chunk_tokens is None else self.mixed_chunk_tokens)

    @property
    def adapters_path(self) -> Path:
        """The folder of adapters."""
        return StatePaths(self.state_dir).adapters_dir if self.adapters_dir is None else self.adapters_dir

    @property
    def queue_total(self) -> int:
        """Requests of all tenants that may wait in a decoder; never less than those of one."""
        return max(self.max_queue, 4 * self.max_queue if self.max_queue_total is None else self.max_queue_total)


@dataclass(frozen=True, slots=True)
class _Option:
    name: str
    parse: Callable[[str], Any]
    help: str
    metavar: str = "VALUE"
    switch: bool = False


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text[:40]!r} is no whole number in {low}..{high}") from None
        if not low <= value <= high:
            raise ValueError(f"{value} is outside {low}..{high}")
        return value

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text[:40]!r} is no number of seconds in 0..86400") from None
    if not 0 <= value <= 86_400:
        raise ValueError(f"{text} is outside 0..86400 seconds")
    return value


def _lease(text: str) -> float:
    value = _seconds(text)
    if value < MIN_LEASE_SECONDS:
        raise ValueError(f"{text} is outside {MIN_LEASE_SECONDS}..86400 seconds")
    return value


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"{text!r} is not one of {', '.join(allowed)}")
        return text

    return parse


def _power_of_two(text: str) -> int:
    value = _whole(1, MAX_BLOCK_TOKENS)(text)
    if value & (value - 1):
        raise ValueError(f"{value} is no power of two; allowed are 1, 2, 4 and so on up to {MAX_BLOCK_TOKENS}")
    return value


def parse_size(text: str) -> int:
    """Bytes of `512M`, `2G` or a plain number, up to `1024T`. Raises ValueError saying what is allowed."""
    units = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
    body = text.strip().lower().removesuffix("ib").removesuffix("b")
    scale = units.get(body[-1:], 1)
    try:
        value = int(float(body[:-1] if scale > 1 else body) * scale)
    except (ValueError, OverflowError):
        raise ValueError(f"{text[:40]!r} is no size; write bytes, or 512M, 2G") from None
    if value < 1:
        raise ValueError(f"{text[:40]!r} is no positive size")
    if value > MAX_SIZE_BYTES:
        raise ValueError(f"{text[:40]!r} is too large; allowed are sizes up to {MAX_SIZE_BYTES >> 40}T")
    return value


def _boolean(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in values:
        raise ValueError(f"{text!r} is not one of true, false")
    return values[text.lower()]


def _path(text: str) -> Path:
    if not text:
        raise ValueError("is empty; give a path")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~name of nobody
        raise ValueError(f"{text!r}: {error}") from None


def _folder_or_none(text: str) -> Path | None:
    return None if text == "none" else _path(text)


_OPTIONS = (
    _Option("state_dir", _path, "keys, sockets and the tenant database", "DIR"),
    _Option("model", _path, "a GGUF file or a Hugging Face directory", "PATH"),
    _Option("model_name", str, "name of the model for clients (default: from the path)", "NAME"),
    _Option("draft_model", _path, "a smaller model of the same vocabulary that guesses tokens ahead", "PATH"),
    _Option("draft_kv_bytes", parse_size, "its keys and values in each decoder, at most (default 256M)", "SIZE"),
    _Option("pool_blocks", _whole(MIN_POOL_BLOCKS, 2**31 - 2), "usable blocks of the pool", "N"),
    _Option("pool_bytes", parse_size, "size of the pool instead, for example 2G (the default)", "SIZE"),
    _Option("block_tokens", _power_of_two, "tokens in a block, a power of two (default 16)", "N"),
    _Option("device", parse_device, "where blocks lie: cpu (default), cuda, cuda:<UUID> or auto", "DEVICE"),
    _Option("arena_handles", _choice("fd", "ipc"), "how GPU memory is shared: fd (default), or the older ipc", "KIND"),
    _Option(
        "dtype",
        _choice(*DTYPES),
        "weights: bfloat16 (default) or float32; on a CPU also int8, or file: as many bits as the GGUF file has",
        "DTYPE",
    ),
    _Option(
        "kv_dtype",
        _choice(*KV_DTYPES),
        "stored keys and values (default float16; float32 beside float32); on a CPU each "
        "pair with --dtype has kernels of its own, which compile for 6 to 20 s when it is first started",
        "DTYPE",
    ),
    _Option("chunk_tokens", _whole(16, 65_536), "prefill tokens in one step (default 512)", "N"),
    _Option("mixed_chunk_tokens", _whole(16, 65_536), "tokens of a step with decodes (default: half of those)", "N"),
    _Option("max_batch", _whole(1, 1024), "sequences that run at once (default 32)", "N"),
    _Option("prefix_cache", _boolean, "reuse cached prefixes (default true)", "BOOL", switch=True),
    _Option("decoders", _whole(1, 64), "decoder processes (default 1)", "N"),
    _Option("decoder_index", _whole(0, 63), "number of this decoder (default 0)", "N"),
    _Option("threads", _whole(0, 1024), "compute threads of a decoder (default 0: all cores)", "N"),
    _Option("weights_cache", _folder_or_none, "packed weights that decoders share, or none (default: ~/.cache)", "DIR"),
    _Option("max_queue", _whole(1, 1_000_000), "requests of a tenant that may wait in a decoder (default 256)", "N"),
    _Option("max_queue_total", _whole(1, 1_000_000), "requests of all that may wait (default: 4 x max-queue)", "N"),
    _Option("window_tokens", _whole(1, 1_000_000), "tokens a sample may run ahead of its reader (default 256)", "N"),
    _Option("max_context", _whole(2, 10_000_000), "bound of prompt and answer (default: the model's)", "N"),
    _Option("adapters_dir", _path, "LoRA adapters by name (default: adapters in the state directory)", "DIR"),
    _Option("max_adapters", _whole(1, 1024), "LoRA adapters that a decoder holds in memory (default 16)", "N"),
    _Option("listen", check_listen, "public gRPC address (default 127.0.0.1:50051)", "HOST:PORT"),
    _Option("insecure_listen", _boolean, "allow a plaintext listener beyond loopback", "BOOL", switch=True),
    _Option("tls_cert", _path, "certificate chain of the public listener, PEM", "FILE"),
    _Option("tls_key", _path, "private key of the public listener, PEM", "FILE"),
    _Option("admin_listen", check_host_port, "also serve the admin RPC on this loopback TCP address", "HOST:PORT"),
    _Option("drain_seconds", _seconds, "time for running requests at shutdown (default 20)", "SECONDS"),
    _Option("lease_seconds", _lease, "silence after which a decoder's leases are over (default 10)", "SECONDS"),
    _Option("grace_seconds", _seconds, "time for a decoder whose stream broke to come back (default 5)", "SECONDS"),
    _Option("max_kept", _whole(0, 1_000_000), "conversations that a tenant may have kept (default 256)", "N"),
    _Option("log_level", _choice(*LEVELS), "debug, info (default), warning or error", "LEVEL"),
)


def build_parser(process: str) -> argparse.ArgumentParser:
    """The parser of one process (`up`, `cachemgr`, `decoder` or `gateway`); all take the same options."""
    if process not in PROCESSES:
        raise ValueError(f"process is {process!r}; allowed are {', '.join(PROCESSES)}")
    parser = CommandParser(prog=f"tessera {process}", allow_abbrev=False)
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every option to `parser`; unset ones stay None so that environment and file can speak."""
    for option in _OPTIONS:
        flag = "--" + option.name.replace("_", "-")
        if option.name == "prefix_cache":
            parser.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_const", const="false",
                                help="neither read nor store prefixes")  # fmt: skip
        elif option.switch:
            parser.add_argument(flag, dest=option.name, action="store_const", const="true", help=option.help)
        else:
            parser.add_argument(flag, dest=option.name, metavar=option.metavar, help=option.help)
    parser.add_argument("--config", metavar="FILE", help="TOML file with the same names (underscores)")
    parser.add_argument("--test-faults", action="store_true", help="allow --fault (for tests alone)")
    parser.add_argument("--fault", action="append", default=[], metavar="NAME=VALUE", help=f"knobs: {FAULT_NAMES}")


def load_options(namespace: argparse.Namespace, environ: Mapping[str, str]) -> Options:
    """Merge flags, `TESSERA_*`, the TOML file and defaults. Raises ValueError with the option and its source."""
    source = "--config" if namespace.config is not None else "TESSERA_CONFIG"
    file_values = _read_file(source, namespace.config if namespace.config is not None else environ.get(source) or None)
    values: dict[str, Any] = {"state_dir": default_state_dir(environ), "weights_cache": packed_dir(environ)}
    for option in _OPTIONS:
        flag, variable = getattr(namespace, option.name, None), f"TESSERA_{option.name.upper()}"
        if flag is not None:
            text, source = flag, "--" + option.name.replace("_", "-")
        elif environ.get(variable):
            text, source = environ[variable], variable
        elif option.name in file_values:
            raw = file_values[option.name]
            text, source = str(raw).lower() if isinstance(raw, bool) else str(raw), f"{option.name} in the TOML file"
        else:
            continue
        try:
            values[option.name] = option.parse(text)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    if values.get("pool_blocks") is not None and values.get("pool_bytes") is not None:
        raise ValueError("--pool-blocks and --pool-bytes exclude each other")
    if (values.get("tls_cert") is None) != (values.get("tls_key") is None):
        raise ValueError("--tls-cert and --tls-key go together")
    if values.get("decoder_index", 0) >= values.get("decoders", 1) and values.get("decoders") is not None:
        raise ValueError(f"--decoder-index {values['decoder_index']} is outside 0..{values['decoders'] - 1}")
    chunk, mixed = values.get("chunk_tokens", DEFAULT_CHUNK_TOKENS), values.get("mixed_chunk_tokens")
    if mixed is not None and mixed > chunk:
        raise ValueError(f"--mixed-chunk-tokens {mixed} is above --chunk-tokens {chunk}, which bounds every step")
    values["faults"] = parse_faults(_fault_specs(namespace, environ), enabled=_faults_enabled(namespace, environ))
    return Options(**values)


def _faults_enabled(namespace: argparse.Namespace, environ: Mapping[str, str]) -> bool:
    return bool(namespace.test_faults) or _boolean(environ.get("TESSERA_TEST_FAULTS") or "false")


def _fault_specs(namespace: argparse.Namespace, environ: Mapping[str, str]) -> Sequence[str]:
    return [*namespace.fault, *(environ.get("TESSERA_FAULTS") or "").split()]


def _read_file(source: str, path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = tomllib.loads(_path(path).read_bytes().decode())
    except OSError as error:
        raise ValueError(f"{source}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: {path} is no UTF-8: byte {error.start}") from None
    except ValueError as error:
        raise ValueError(f"{source}: {path}: {error}") from None
    known = {option.name for option in _OPTIONS}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"{source}: {path}: unknown option {unknown[0]!r}; allowed are {', '.join(sorted(known))}")
    return values
