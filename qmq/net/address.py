"""Where brokers are: `qmq://host:port`, several comma separated."""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import urlsplit

from qmq.errors import InvalidOption

DEFAULT_PORT: Final = 20881
DEFAULT_URL: Final = f"qmq://127.0.0.1:{DEFAULT_PORT}"


class Address(NamedTuple):
    """One broker."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> list[Address]:
    """The brokers that *url* names, in its order. Raises InvalidOption.

    >>> [str(address) for address in parse_url("qmq://10.0.0.1:20881,10.0.0.2")]
    ['10.0.0.1:20881', '10.0.0.2:20881']
    """
    if not isinstance(url, str):
        raise InvalidOption(f"the address of a broker must be a str, not {type(url).__name__}")
    return [_parse_one(part.strip(), url) for part in url.split(",")]


def _parse_one(part: str, url: str) -> Address:
    scheme, separator, rest = part.partition("://")
    try:
        if separator and scheme != "qmq":
            raise ValueError(f"the scheme is {scheme!r}")
        parts = urlsplit(f"//{rest if separator else part}")
        if not parts.hostname or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
            raise ValueError("give host and port only")
        if not _is_host(parts.hostname):
            raise ValueError("the host is no name that could be looked up")
        port = parts.port
        if port == 0:
            raise ValueError("port 0 is no port to connect to")
    except ValueError as error:
        raise InvalidOption(
            f"{part!r} in {url!r} is not the address of a broker: {error}; use {DEFAULT_URL}, "
            "or several of that form with commas between"
        ) from None
    return Address(parts.hostname, DEFAULT_PORT if port is None else port)


def _is_host(name: str) -> bool:
    """Whether the system can be asked for it: it has no empty and no long labels."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True
