"""The file of tokens: who may do what at a broker. `qmq tokens` changes it, and people may; the broker watches it.

It is TOML, one table a token, so that a person can read and write it and a wrong line can be named. A token is the text
``NAME:SECRET``; the file has the SHA-256 of its secret, or of two while they are rotated::

    [billing]
    produce = ["shop.payment."]
    consume = ["shop.order."]
    group = ["billing"]
    expires = 2027-01-31T00:00:00Z
    secrets = ["sha256:9f86d081..."]
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from qmq import ownership
from qmq.errors import InvalidName, InvalidOption
from qmq.names import check_prefix, check_token

#: The file in a data directory, unless the setting tokens_file names another.
TOKENS_NAME: Final = "tokens.toml"
#: The file with the times at which tokens were last used, in the data directory.
USED_NAME: Final = "tokens-used.json"
#: Two at a time, so that programs can take the new one before the old one ends.
MOST_SECRETS: Final = 2
#: Random bytes of a secret, and how it begins, by which tools that look for leaked secrets know it.
_SECRET_BYTES: Final = 32
_SECRET_PREFIX: Final = "qmq_"
_HASH_PREFIX: Final = "sha256:"
_HASH: Final = re.compile(rf"{_HASH_PREFIX}[0-9a-f]{{64}}", re.ASCII)
#: The broker keeps its old rules rather than read a larger file.
_MOST_BYTES: Final = 16 << 20
_HEAD: Final = """\
# The tokens of a QMQ broker. `qmq tokens` rewrites this file, without comments that were added; the broker takes
# changes within a second. Rights are prefixes: "shop." is every name that begins so, "shop" that name, "" all.
"""


def _prefix(value: str) -> str:
    try:
        return check_prefix(value)
    except InvalidName as error:
        raise ValueError(str(error)) from None


def _hash(value: str) -> str:
    if not _HASH.fullmatch(value):
        raise ValueError(f"a secret is kept as {_HASH_PREFIX} and 64 hex digits; `qmq tokens rotate` makes one")
    return value


_Prefixes = Annotated[tuple[Annotated[str, AfterValidator(_prefix)], ...], Field(strict=False)]
_Hashes = Annotated[tuple[Annotated[str, AfterValidator(_hash)], ...], Field(strict=False, max_length=MOST_SECRETS)]


class TokenEntry(BaseModel):
    """A token as the file has it. Without ``secrets`` only a client certificate of its name stands for it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    produce: _Prefixes = ()
    consume: _Prefixes = ()
    group: _Prefixes = ()
    browse: _Prefixes = ()
    admin: bool = False
    created: AwareDatetime | None = None
    expires: AwareDatetime | None = None
    secrets: _Hashes = ()

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The SHA-256 of each secret."""
        return tuple(bytes.fromhex(text.removeprefix(_HASH_PREFIX)) for text in self.secrets)

    @property
    def expires_us(self) -> int | None:
        """When it expires, in microseconds since 1970; None for never."""
        if self.expires is None:
            return None
        return (self.expires - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


Tokens = dict[str, TokenEntry]
_TOKENS: Final = TypeAdapter(Tokens)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_tokens(path: Path) -> Tokens:
    """Return the tokens of a file by name. Raises InvalidOption, which names the line, and OSError."""
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise InvalidOption(f"{path} has more than {_MOST_BYTES >> 20} MiB: no file of tokens is so large")
    return parse_tokens(data, str(path))


def parse_tokens(data: bytes, name: str) -> Tokens:
    """Return the tokens of the text of a file, checked as a whole; *name* is the file's, for errors.

    Raises InvalidOption, which names the line and none of its secrets.
    """
    try:
        text = data.decode()
        found = tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidOption(f"{name}, line {line}: this is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidOption(f"{name} is not TOML: {error}") from None
    for key in found:
        try:
            check_token(key)
        except InvalidName as error:
            raise InvalidOption(f"{name}, line {_line_of(text, (key,))}: {error}") from None
    try:
        return _TOKENS.validate_python(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = tuple(map(str, first["loc"]))
        what = ".".join(where[:2])
        message = {
            "extra_forbidden": f"there is no such key; a token has {', '.join(TokenEntry.model_fields)}",
            "too_long": f"a token has at most {MOST_SECRETS} secrets",
            "tuple_type": 'write a list, as in ["shop."]',
        }.get(first["type"], first["msg"].removeprefix("Value error, "))
        raise InvalidOption(f"{name}, line {_line_of(text, where)}: {what}: {message}") from None


def _line_of(text: str, where: tuple[str, ...]) -> int:
    """Return the number of the line that has a token's key, or else its head; 1 if neither is found."""
    head = re.compile(rf"\s*\[\s*[\"']?{re.escape(where[0])}[\"']?\s*\]|\s*[\"']?{re.escape(where[0])}[\"']?\s*[=.]")
    key = re.compile(rf"\s*[\"']?{re.escape(where[1])}[\"']?\s*=") if len(where) > 1 else None
    at = 0
    for number, line in enumerate(text.splitlines(), 1):
        if at and key is None:
            break
        if at and line.lstrip().startswith("["):
            break
        if at and key is not None and key.match(line):
            return number
        if not at and head.match(line):
            at = number
    return at or 1


# --- writing ----------------------------------------------------------------------------------------------------------


def change_tokens(path: Path, change: Callable[[Tokens], Tokens]) -> Tokens:
    """Replace a file by what *change* makes of its tokens, atomically, while no other process changes it; return that.

    Raises InvalidOption when the file cannot be read or written, and what *change* raises; then it stays as it is.
    """
    try:
        _make_directory(path.parent)
        with _locked(path.parent) as directory:
            try:
                before = read_tokens(path)
            except FileNotFoundError:
                before = {}
            tokens = change(dict(before))
            _replace(path, text_of(tokens).encode(), directory)
            return tokens
    except OSError as error:
        raise InvalidOption(
            f"the tokens in {path} cannot be changed: {error.strerror}; use the user of the broker, or --tokens-file"
        ) from None


def _make_directory(directory: Path) -> None:
    if not directory.is_dir():
        _make_directory(directory.parent)
        with suppress(FileExistsError):
            ownership.mkdir(directory, 0o700)


@contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Lock a directory of token files, and yield its descriptor. The system unlocks it when the process ends."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _replace(path: Path, data: bytes, directory: int) -> None:
    """Put a file with *data* in the place of *path*; on disk when this returns. It keeps the mode and the owner of the
    file before it; a new file has the owner of its directory, so that the broker can read what root has made.
    """
    path = path.resolve()  # a link stays, what it leads to is replaced
    try:
        state, mode = path.stat(), path.stat().st_mode & 0o777
    except FileNotFoundError:
        state, mode = path.parent.stat(), 0o600
    other = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(other, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, mode)
            if os.geteuid() == 0:
                os.fchown(descriptor, state.st_uid, state.st_gid)
            os.fsync(descriptor)
        os.replace(other, path)
    except BaseException:
        with suppress(OSError):
            other.unlink()
        raise
    os.fsync(directory)


def text_of(tokens: Mapping[str, TokenEntry]) -> str:
    """Return the text of a file with these tokens."""
    tables = [_HEAD]
    for name, entry in sorted(tokens.items()):
        lines = [f'["{name}"]' if "." in name else f"[{name}]"]
        for key in TokenEntry.model_fields:
            value = getattr(entry, key)
            if value:
                lines.append(f"{key} = {_toml(value)}")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def _toml(value: Any) -> str:
    """Return a value of a token as TOML; its texts are names and hashes, which need no escapes."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return "true" if value is True else f'"{value}"'


# --- secrets ----------------------------------------------------------------------------------------------------------


def new_secret() -> str:
    """Return a random secret of 256 bits."""
    return _SECRET_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def hash_of(secret: str) -> str:
    """Return the SHA-256 of a secret as the file has it."""
    return _HASH_PREFIX + hashlib.sha256(secret.encode()).hexdigest()


# --- times of use -----------------------------------------------------------------------------------------------------


def write_used(path: Path, used: Mapping[str, int]) -> None:
    """Write when each token was last used, with those that the file has from before a start. It is only for people, so
    a full disk or a crash may lose it.
    """
    with suppress(OSError):
        known = read_used(path) | dict(used)
        other = path.with_name(f".{path.name}")
        descriptor = ownership.open_file(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            json.dump(known, file)
        other.replace(path)


def read_used(path: Path) -> dict[str, int]:
    """Return when each token was last used, in microseconds since 1970, as far as *path* says it."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): at for name, at in found.items() if isinstance(at, int)} if isinstance(found, dict) else {}
