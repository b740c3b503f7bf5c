"""Addresses of a server: `host:port`."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of `host:port`. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 1 << 16:
        raise ValueError(f"{text!r} is no HOST:PORT, such as 10.0.0.7:7700")
    return host.strip("[]"), int(port)
