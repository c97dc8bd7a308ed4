"""Files that a command is told to read: credentials and certificates. What is wrong with one is told with its option.

The messages name the whole path, and never anything of the content.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from cli.errors import EXIT_USAGE, CommandError
from common.credentials import read_secret
from common.errors import TesseraError


def read_key(path: Path, option: str | None, if_absent: str) -> str:
    """The credential in `path`. `option` is the flag that named it; None: nobody did, and `if_absent` says what to do.

    Raises CommandError, with status 2 where a flag names the file or its content is unsafe.
    """
    label = str(path) if option is None else f"{option} {path}"
    try:
        path.stat()
        return read_secret(path)
    except FileNotFoundError:
        if option is None:
            raise CommandError(f"no key at {path}. {if_absent}") from None
        raise CommandError(f"{label}: there is no such file", EXIT_USAGE) from None
    except TesseraError as error:
        raise CommandError(f"{label}: {error.message}", EXIT_USAGE) from None
    except OSError as error:
        raise CommandError(f"{label}: {error.strerror}", EXIT_USAGE) from None


def read_authority(path: Path | None) -> bytes | None:
    """The PEM certificates of `--tls-ca`, None for None. Raises CommandError where there is none in the file."""
    if path is None:
        return None
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CommandError(f"--tls-ca {path}: {error.strerror}", EXIT_USAGE) from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise CommandError(f"--tls-ca {path}: holds no PEM certificate", EXIT_USAGE) from None
    return data
