"""Addresses of brokers: `qmq://host:port`, by TLS `qmqs://host:port`, or several of them separated by commas."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from qmq.errors import InvalidOption
from qmq.names import MAX_TOKEN_BYTES

DEFAULT_PORT: Final = 20881
DEFAULT_URL: Final = f"qmq://127.0.0.1:{DEFAULT_PORT}"
#: The longest token: a name and a secret.
_MAX_TOKEN: Final = 1_024
#: The beginnings of URLs of brokers: for plain connections, and for those by TLS.
BROKER_SCHEMES: Final = ("qmq://", "qmqs://")
_SCHEMES: Final = (*BROKER_SCHEMES, "file://", "hdfs://")


class TlsFiles(NamedTuple):
    """The paths of a client's PEM files: the CAs that it trusts (empty: those of the system), and its own certificate
    with its key (empty: none).
    """

    ca: str = ""
    cert: str = ""
    key: str = ""


#: The environment variables that name the files, in the order of TlsFiles.
TLS_VARIABLES: Final = ("QMQ_TLS_CA", "QMQ_TLS_CERT", "QMQ_TLS_KEY")


class TokenText(str):
    """A token, NAME:SECRET, or nothing. Errors and logs that show it as a value show no secret."""

    __slots__ = ()

    def __repr__(self) -> str:
        if ":" not in self:
            return "TokenText(...)" if self else "TokenText('')"
        return f"TokenText({self.name!r}, ...)"

    @property
    def name(self) -> str:
        """The name of the token."""
        return self.partition(":")[0]


NO_TOKEN: Final = TokenText()


class NoToken(NamedTuple):
    """A value of a type that no token has."""

    type_name: str


def hidden(token: object) -> TokenText | NoToken | None:
    """Return *token* so that no traceback shows it, also if it is a wrong one: those with values show arguments."""
    if token is None or isinstance(token, NoToken):
        return token
    return TokenText(token) if isinstance(token, str) else NoToken(type(token).__name__)


class Address(NamedTuple):
    """The address of one broker. ``tls``: the files of a connection by TLS; None: a plain connection. ``token``: what
    lets the client in there, if it needs one; ``token_file``: the file that has it, if it came from one.
    """

    host: str
    port: int
    tls: TlsFiles | None = None
    token: TokenText = NO_TOKEN
    token_file: str = ""

    def refreshed(self) -> Address:
        """Return the address with the token that its file has now; as it is if there is no file, or none with a
        token.
        """
        if self.token_file:
            with suppress(InvalidOption):
                return self._replace(token=_checked(read_token(self.token_file), self.token_file))
        return self

    @property
    def sender_bytes(self) -> int:
        """The bytes that a batch leaves for the name of the token, or of that for which a client certificate stands."""
        has_cert = self.tls is not None and self.tls.cert
        return len(self.token.name) if self.token or not has_cert else MAX_TOKEN_BYTES

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def tls_name(self) -> str:
        """The host as certificates name it: without the dot at the end of a complete name, and without IPv6's scope."""
        return self.host.partition("%")[0].removesuffix(".")

    @property
    def url(self) -> str:
        """The address as a URL."""
        return f"{BROKER_SCHEMES[self.tls is not None]}{self}"


def tls_files(
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> TlsFiles:
    """Return the files of a client: the arguments that are given, else what the environment variables name.

    Raises InvalidOption if only one of certificate and key is there.
    """
    found = [
        os.environ.get(variable, "") if path is None else os.fspath(path)
        for variable, path in zip(TLS_VARIABLES, (ca, cert, key), strict=True)
    ]
    files = TlsFiles(*found)
    if bool(files.cert) != bool(files.key):
        raise InvalidOption(
            "a client certificate needs tls_cert and tls_key, and only one of them is given; a file that has both may "
            "be named twice"
        )
    return files


def token_of(token: object, token_file: str | os.PathLike[str] | None = None) -> TokenText:
    """Return the token of a client: *token* or that in *token_file*, else that of QMQ_TOKEN, else that in the file
    QMQ_TOKEN_FILE.

    Raises InvalidOption, which does not show it, nor does a frame of its traceback.
    """
    whence, found = "token", hidden(token)
    del token
    if found is None and (path := token_file_of(found, token_file)):
        whence, found = path, read_token(path)
    elif found is None:
        whence, found = "QMQ_TOKEN", TokenText(os.environ.get("QMQ_TOKEN", ""))
    elif token_file is not None:
        raise InvalidOption("give either token or token_file, not both")
    if isinstance(found, NoToken):
        raise InvalidOption(f"token must be a text NAME:SECRET, not {found.type_name}")
    return _checked(found, whence)


def token_file_of(token: object, token_file: str | os.PathLike[str] | None = None) -> str:
    """Return the path of the file from which ``token_of`` takes the token; empty if it takes it from none."""
    if token is not None:
        return ""
    if token_file is not None:
        return os.fspath(token_file)
    return "" if os.environ.get("QMQ_TOKEN") else os.environ.get("QMQ_TOKEN_FILE", "")


def _checked(token: TokenText, whence: str) -> TokenText:
    token = TokenText(token.strip())
    if token and not _is_token(token):
        raise InvalidOption(f"{whence} is no token: give it as `qmq tokens create` has shown it, NAME:SECRET")
    return token


def _is_token(text: str) -> bool:
    name, _, secret = text.partition(":")
    return bool(name and secret) and text.isascii() and text.isprintable() and len(text) <= _MAX_TOKEN


def read_token(path: str) -> TokenText:
    """Return the token in a file. Raises InvalidOption, also for an empty file: without a token more may be open."""
    try:
        with open(path, encoding="ascii") as file:
            token = TokenText(file.read(_MAX_TOKEN + 2))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise InvalidOption(f"the token in {path} cannot be read: {reason}; write NAME:SECRET into it") from None
    if not token.strip():
        raise InvalidOption(f"{path} has no token; write NAME:SECRET into it, as `qmq tokens create` shows it")
    return token


def parse_url(
    url: str, tls: TlsFiles | None = None, token: TokenText | None = None, token_file: str = ""
) -> list[Address]:
    """Return the addresses in *url*, in its order. A part without a scheme has that of the part before it.

    Addresses with ``qmqs://`` get the files *tls*, all get *token* (of *token_file*, if it is from one); without these
    what the environment names. Raises InvalidOption.

    >>> [str(address) for address in parse_url("qmq://10.0.0.1:20881,10.0.0.2")]
    ['10.0.0.1:20881', '10.0.0.2:20881']
    """
    if not isinstance(url, str):
        raise InvalidOption(f"the address of a broker must be a str, not {type(url).__name__}")
    found: list[Address] = []
    scheme = "qmq"
    if token is None:
        token, token_file = token_of(None), token_file_of(None)
    for part in url.split(","):
        scheme, address = _parse_one(part.strip(), url, scheme)
        if scheme == "qmqs":
            tls = tls_files() if tls is None else tls
            address = address._replace(tls=tls)
        found.append(address._replace(token=token, token_file=token_file))
    return found


def check_used(addresses: Iterable[Address], given: Mapping[str, object]) -> None:
    """Raise InvalidOption if files of TLS are *given* by name, and no address is reached by TLS."""
    names = [name for name, value in given.items() if value is not None]
    if names and all(address.tls is None for address in addresses):
        raise InvalidOption(f"{names[0]} is given, but no address begins with qmqs://: these connections are plain")


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


def _parse_one(part: str, url: str, before: str) -> tuple[str, Address]:
    """Return scheme and address of *part*; *before* is the scheme of the part before it."""
    scheme, separator, rest = part.partition("://")
    try:
        if separator and f"{scheme}://" not in BROKER_SCHEMES:
            raise ValueError("the scheme is neither qmq nor qmqs")
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
            "or several of that form separated by commas; with TLS qmqs://"
        ) from None
    return scheme if separator else before, Address(parts.hostname, DEFAULT_PORT if port is None else port)


def _is_host(name: str) -> bool:
    """Return whether the system can look up *name*: it has no empty and no long labels."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True
