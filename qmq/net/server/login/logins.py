"""The tokens of a broker, and how clients log in by them. No I/O: the daemon reads the file of tokens.

A token is the text ``NAME:SECRET``. A secret has 256 random bits, so the broker keeps only its SHA-256: nobody guesses
the secret from that, and a slow hash would cost the broker time for nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, NamedTuple

from qmq.broker.ports.rights import Rights
from qmq.errors import ConnectionLost, QmqError, Unauthorized

#: Compared in the place of the secrets of a token that does not exist, so that this takes as long.
_NO_SECRETS: Final = (bytes(32),)


class Token(NamedTuple):
    """A token: its rights, which have its name; the SHA-256 of its one or two secrets, none where only a client
    certificate stands for it; and when it expires, in microseconds since 1970.
    """

    rights: Rights
    secrets: tuple[bytes, ...]
    expires_us: int | None = None


class Login(NamedTuple):
    """A connection's login: its rights, and the hash of the secret that it gave; empty for a certificate."""

    rights: Rights
    secret: bytes


class Logins:
    """Checks tokens. Without tokens (None) every client is let in and may do everything."""

    def __init__(self, tokens: Mapping[str, Token] | None = None) -> None:
        self._tokens = tokens
        #: When each token was last used to log in, in microseconds since 1970.
        self.used: dict[str, int] = {}

    @property
    def has_tokens(self) -> bool:
        """Whether clients need a token."""
        return self._tokens is not None

    @property
    def names(self) -> frozenset[str]:
        """The names of the tokens."""
        return frozenset(self._tokens or ())

    def replace(self, tokens: Mapping[str, Token]) -> None:
        """Take other tokens from now on."""
        self._tokens = tokens

    def next_expiry_us(self, now_us: int) -> int | None:
        """Return when the next token expires that has not yet; None for never."""
        ends = (token.expires_us for token in (self._tokens or {}).values() if token.expires_us is not None)
        return min((end for end in ends if end > now_us), default=None)

    def log_in(self, given: str, certificate: str, now_us: int) -> Login | None:
        """Return the login of a client that gives this token, or whose checked certificate has this name; None if no
        token is needed. Raises Unauthorized.
        """
        tokens = self._tokens
        if tokens is None:
            return None
        if given:
            name, _, secret = given.partition(":")
            token, digest = tokens.get(name), hashlib.sha256(secret.encode(errors="replace")).digest()
            if not _matches(_NO_SECRETS if token is None else token.secrets, digest) or token is None:
                raise Unauthorized("this token is wrong, or was revoked: give a token that `qmq tokens list` shows")
        elif certificate:
            name, digest = certificate, b""
            token = tokens.get(name)
            if token is None:
                raise Unauthorized(
                    f"no token has the name {name!r:.100} of this client certificate: "
                    "create one with `qmq tokens create`, or give another token"
                )
        else:
            raise Unauthorized("this broker lets in clients with a token only: give token=, QMQ_TOKEN or --token-file")
        if token.expires_us is not None and token.expires_us <= now_us:
            raise _expired(name, token.expires_us)
        self.used[name] = now_us
        return Login(token.rights, digest)

    def look_at(self, login: Login | None, now_us: int) -> Login | QmqError:
        """Return the login as it is with the present tokens, or the error with which its connection ends."""
        if login is None:
            return Unauthorized(
                "this broker lets in clients with a token only by now: give token=, QMQ_TOKEN or --token-file"
            )
        name, tokens = login.rights.name, self._tokens
        token = None if tokens is None else tokens.get(name)
        if token is None:
            return Unauthorized(f"token {name!r} was revoked")
        if token.expires_us is not None and token.expires_us <= now_us:
            return _expired(name, token.expires_us)
        if login.secret and not _matches(token.secrets, login.secret):
            return Unauthorized(f"this secret of token {name!r} has ended: use the one that replaces it")
        if token.rights is not login.rights and not token.rights.covers(login.rights):
            return ConnectionLost(f"token {name!r} has other rights by now: connect again")
        return Login(token.rights, login.secret)


def _matches(secrets: tuple[bytes, ...], digest: bytes) -> bool:
    """Return whether one of the hashes is that digest; the time that this takes does not tell which bytes differ."""
    return sum(hmac.compare_digest(secret, digest) for secret in secrets) > 0


def _expired(name: str, expires_us: int) -> Unauthorized:
    at = datetime.fromtimestamp(expires_us // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Unauthorized(f"token {name!r} has expired at {at}: `qmq tokens create` makes another")
