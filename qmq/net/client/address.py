"""Addresses of brokers: `qmq://host:port`, or several of them separated by commas."""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import urlsplit

from qmq.errors import InvalidOption

DEFAULT_PORT: Final = 20881
DEFAULT_URL: Final = f"qmq://127.0.0.1:{DEFAULT_PORT}"
_SCHEMES: Final = ("qmq://", "file://", "hdfs://")


class Address(NamedTuple):
    """The address of one broker."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> list[Address]:
    """Return the addresses in *url*, in its order. Raises InvalidOption.

    >>> [str(address) for address in parse_url("qmq://10.0.0.1:20881,10.0.0.2")]
    ['10.0.0.1:20881', '10.0.0.2:20881']
    """
    if not isinstance(url, str):
        raise InvalidOption(f"the address of a broker must be a str, not {type(url).__name__}")
    return [_parse_one(part.strip(), url) for part in url.split(",")]


def shown_url(url: str) -> str:
    """Return *url* for errors and logs: without user, password and query.

    >>> shown_url("hdfs://me:secret@name:8020/archive?token=x")
    'hdfs://...@name:8020/archive?...'
    """
    # A password may have any character, so everything before the last @ may belong to one.
    head, at, tail = url.rpartition("@")
    if at:
        scheme = next((scheme for scheme in _SCHEMES if head.startswith(scheme)), "")
        url = f"{scheme}...@{tail}"
    before, question, _ = url.partition("?")
    return f"{before}?..." if question else before


def shown_location(location: str) -> str:
    """Return the location of an archive for errors and logs: a path as it is, a URL as ``shown_url``."""
    _, is_url, rest = location.partition("://")
    authority = rest.partition("/")[0]
    _, has_port, port = authority.rpartition(":")
    may_have_password = "@" in authority or (has_port and not port.isdigit())
    return shown_url(location) if is_url and may_have_password else location


def _parse_one(part: str, url: str) -> Address:
    scheme, separator, rest = part.partition("://")
    try:
        if separator and scheme != "qmq":
            raise ValueError("the scheme is not qmq")
        if "@" in part:
            raise ValueError("it has a user or a password, which brokers do not use")
        try:
            parts = urlsplit(f"//{rest if separator else part}")
        except ValueError:
            raise ValueError("host and port cannot be read") from None
        if not parts.hostname or parts.path not in ("", "/") or parts.query or parts.fragment:
            raise ValueError("give host and port only")
        if not _is_host(parts.hostname):
            raise ValueError("the host is not a valid host name")
        try:
            port = parts.port
        except ValueError:
            raise ValueError("the port is not a number from 1 to 65535") from None
        if port == 0:
            raise ValueError("port 0 cannot be connected to")
    except ValueError as error:
        which = f" ({part!r})" if part != url and "@" not in url and "?" not in url else ""
        raise InvalidOption(
            f"{shown_url(url)!r} is not the address of a broker{which}: {error}; use {DEFAULT_URL}, "
            "or several of that form separated by commas"
        ) from None
    return Address(parts.hostname, DEFAULT_PORT if port is None else port)


def _is_host(name: str) -> bool:
    """Return whether the system can look up *name*: it has no empty and no long labels."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True
