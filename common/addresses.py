"""Addresses of listeners: `host:port` (IPv6 in brackets) or `unix:<path>`. Pure; for options, before a start."""

from __future__ import annotations

import ipaddress

MAX_PORT = 65_535


def split_host_port(text: str) -> tuple[str, int]:
    """Host (without brackets) and port of `host:port`. Raises ValueError with what is allowed."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    inner = host[1:-1] if bracketed else host
    if not colon or not inner or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{text!r} is no address; allowed is host:port, an IPv6 host in brackets")
    if any(letter.isspace() or letter == "/" for letter in inner) or (":" in inner) != bracketed:
        raise ValueError(f"{text!r} is no address; allowed is host:port, an IPv6 host in brackets")
    if int(port) > MAX_PORT:
        raise ValueError(f"{text!r}: port {port} is outside 0..{MAX_PORT}")
    return inner, int(port)


def check_listen(text: str) -> str:
    """`text` if it is `host:port` or `unix:<path>`. Raises ValueError with what is allowed."""
    if text.startswith("unix:"):
        if text == "unix:":
            raise ValueError("'unix:' names no path; allowed are host:port and unix:<path>")
        return text
    try:
        split_host_port(text)
    except ValueError as error:
        raise ValueError(f"{error}; or unix:<path>") from None
    return text


def check_host_port(text: str) -> str:
    """`text` if it is `host:port`. Raises ValueError with what is allowed."""
    split_host_port(text)
    return text


def is_local(address: str) -> bool:
    """Whether an address (`host:port` or `unix:<path>`) can be reached from this machine alone. Raises ValueError."""
    if address.startswith("unix:"):
        return True
    host, _ = split_host_port(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
