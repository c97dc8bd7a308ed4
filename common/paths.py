"""Where a node keeps its state and sockets. The only module that knows file names below the state directory."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import FailedPrecondition
from common.kept_sockets import kept_path
from common.logs import get_logger

SOCKET_PATH_BYTES = 107  # sun_path holds 108 with its terminating zero


@dataclass(frozen=True, slots=True)
class StatePaths:
    """File names below one state directory."""

    state_dir: Path

    @property
    def run_dir(self) -> Path:
        """Folder of the sockets, mode 0700."""
        return self.state_dir / "run"

    @property
    def logs_dir(self) -> Path:
        """Folder of the logs that the supervisor writes."""
        return self.state_dir / "logs"

    @property
    def adapters_dir(self) -> Path:
        """LoRA adapters, one entry a name; made by `tessera adapter add`."""
        return self.state_dir / "adapters"

    @property
    def cachemgr_socket(self) -> Path:
        """CacheService and CredentialService."""
        return self.run_dir / "cachemgr.sock"

    @property
    def arena_socket(self) -> Path:
        """Hands the arena's fd over."""
        return self.run_dir / "arena.sock"

    @property
    def weights_socket(self) -> Path:
        """Hands weights in GPU memory over, and holds them while a decoder is connected."""
        return self.run_dir / "weights.sock"

    @property
    def index_journal(self) -> Path:
        """What the cache manager has published, for the one after it; mode 0600."""
        return self.run_dir / "index.journal"

    @property
    def admin_socket(self) -> Path:
        """AdminService."""
        return self.run_dir / "admin.sock"

    @property
    def endpoint_file(self) -> Path:
        """Where a running `tessera up` can be called: an address, and on a second line the certificate to trust."""
        return self.run_dir / "endpoint"

    @property
    def phase_file(self) -> Path:
        """What a `tessera up` that starts or drains is doing, and its process."""
        return self.run_dir / "phase"

    @property
    def unshown_key_mark(self) -> Path:
        """There while the default tenant's key has not been shown on a terminal yet."""
        return self.run_dir / "key-unshown"

    def decoder_socket(self, index: int) -> Path:
        """DecodeService of decoder `index`."""
        return self.run_dir / f"decoder-{index}.sock"

    def decoder_lock(self, index: int) -> Path:
        """Locked by the one decoder with this index."""
        return self.run_dir / f"decoder-{index}.lock"

    @property
    def default_key(self) -> Path:
        """Key of the default tenant."""
        return self.state_dir / "default.key"

    @property
    def admin_key(self) -> Path:
        """Credential of the admin RPC."""
        return self.state_dir / "admin.key"

    @property
    def reader_key(self) -> Path:
        """Credential of the admin RPC that changes nothing."""
        return self.state_dir / "reader.key"

    @property
    def audit_log(self) -> Path:
        """What was done by the admin RPC."""
        return self.state_dir / "audit.log"

    @property
    def internal_key(self) -> Path:
        """Credential between the processes of the node."""
        return self.state_dir / "internal.key"

    @property
    def tenants_db(self) -> Path:
        """Tenants and salted key hashes."""
        return self.state_dir / "tenants.db"

    @property
    def lock_file(self) -> Path:
        """Locked by the one cache manager of this state directory."""
        return self.state_dir / "cachemgr.lock"

    def check(self) -> None:
        """Raises FailedPrecondition, and changes nothing, where a socket path would be too long, and where the state
        directory is another user's or others may write to it.

        Another user's is refused to root as well, which could write there: what it made would be closed to the owner.
        """
        longest = os.fsencode(kept_path(self.decoder_socket(99)))
        if len(longest) > SOCKET_PATH_BYTES:
            raise FailedPrecondition(
                f"state directory is too long for a Unix socket: {len(longest)} bytes with the socket's name, "
                f"allowed are {SOCKET_PATH_BYTES}; choose a shorter --state-dir"
            )
        try:
            found = self.state_dir.stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unusable(error) from error
        if not stat.S_ISDIR(found.st_mode):
            raise FailedPrecondition(f"--state-dir {self.state_dir} cannot be used: it is no directory; name another")
        if found.st_uid != os.geteuid():
            raise FailedPrecondition(
                f"--state-dir {self.state_dir} belongs to user {found.st_uid}, and this is user {os.geteuid()}; run as "
                "its user, or choose another --state-dir"
            )
        if (mode := stat.S_IMODE(found.st_mode)) & 0o022:
            raise FailedPrecondition(
                f"--state-dir {self.state_dir} has mode {mode:04o}: others may write to it; chmod it to 0700"
            )

    def prepare(self) -> None:
        """Make the folders, mode 0700; `run` and `logs` get it back where it is wider.

        Raises FailedPrecondition as `check`, and where the folders cannot be made. A state directory that others may
        only read is warned of: what it holds is private.
        """
        self.check()
        try:
            self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = stat.S_IMODE(self.state_dir.stat().st_mode)
            if mode & 0o077:
                get_logger().warning("state_dir_open", mode=f"{mode:04o}", remedy="chmod it to 0700")
            for folder in (self.run_dir, self.logs_dir):
                folder.mkdir(mode=0o700, exist_ok=True)
                if stat.S_IMODE(folder.stat().st_mode) != 0o700:
                    folder.chmod(0o700)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> FailedPrecondition:
        return FailedPrecondition(
            f"--state-dir {self.state_dir} cannot be used: {error.strerror}; choose a folder that is yours to write"
        )


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """`$XDG_STATE_HOME/tessera`, or `~/.local/state/tessera`."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path(environ.get("HOME", "~")).expanduser() / ".local" / "state") / "tessera"


def models_dir(environ: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/tessera/models`, or `~/.cache/tessera/models`: where fetched models lie."""
    return _cache_dir(environ) / "models"


def packed_dir(environ: Mapping[str, str]) -> Path:
    """`packed` beside it: weights as the CPU's kernels read them, which decoders share."""
    return _cache_dir(environ) / "packed"


def _cache_dir(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(environ.get("HOME", "~")).expanduser() / ".cache") / "tessera"
