"""The certificate of the server: loaded, checked by a handshake with itself, and loaded again when its files change.

New files replace the old ones only if a client that trusts the certificate could connect with them now. Files may be
replaced one after another: they count once they have stayed the same for two looks.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from qmq.errors import InvalidOption

log = logging.getLogger("qmq.server")

#: Seconds between two looks at the files.
LOOK_S: Final = 1.0
#: A certificate that ends in fewer seconds is a problem that the broker reports.
SOON_S: Final = 14 * 86_400
_DAY_S: Final = 86_400
#: Flights of a handshake with itself, at most.
_FLIGHTS: Final = 10
_EXPIRED: Final = (9, 10)  # codes of OpenSSL: not yet, and no longer valid


class ServerCertificates:
    """The TLS context for new connections, from a certificate, its key, and the CA of client certificates if they are
    wanted.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        """Load the files. Raises InvalidOption if they cannot be used; an expired certificate is served, and logged."""
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._state = self._seen = self._look_at_files()
        self._ends_at: float | None = None  # in seconds since 1970; None: its time is over or has not come
        self._refused = ""  # why new files were not taken
        self._context, self._wrong = self._load()
        if self._wrong:
            log.error("%s; clients refuse it: renew it, new files are taken without a restart", self._wrong)

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        return self._context

    def problem(self, now: float) -> tuple[str, str] | None:
        """Return the level and the text of what somebody should do about the certificate at *now*, in seconds."""
        if self._ends_at is None:
            return "error", f"{self._wrong}: renew it, no client can connect"
        if self._ends_at <= now:
            return "error", f"the certificate in {self._cert} has expired: renew it, no client can connect"
        if self._refused:
            return "warning", f"the files of TLS were replaced, and the old certificate stays: {self._refused}"
        if self._ends_at - now < SOON_S:
            days = int((self._ends_at - now) // _DAY_S)
            return "warning", f"the certificate in {self._cert} ends in {days} days: renew it"
        return None

    def look(self) -> None:
        """Take files that have changed. If they cannot be used, the old ones stay, and the log says why."""
        state = self._look_at_files()
        settled, self._seen = state == self._seen, state
        if state == self._state or not settled:
            return
        self._state, ends_at = state, self._ends_at
        try:
            context, wrong = self._load()
            if wrong:
                raise InvalidOption(wrong)
        except InvalidOption as error:
            log.error("the old certificate stays: %s", error)
            self._refused, self._ends_at = str(error), ends_at
        else:
            self._context, self._refused, self._wrong = context, "", ""

    def _load(self) -> tuple[ssl.SSLContext, str]:
        """Return the context of the files, and why clients refuse it if its time is over or has not come. Raises
        InvalidOption.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Sessions are not resumed: a client that was refused since, or uses an old certificate, would get in.
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
        context.num_tickets = 0
        try:
            context.load_cert_chain(self._cert, self._key, password=_refuse_password)
        except (OSError, ValueError) as error:
            why = _reason(error, self._cert, self._key)
            raise InvalidOption(
                f"tls_cert {self._cert} and tls_key {self._key} cannot be used: {why}; "
                "give PEM files of a certificate (with its intermediate ones) and of its key, without a password"
            ) from None
        wrong, shown = "", ""
        try:
            fields = _shake_hands(context, self._cert)
            shown, self._ends_at = _shown(fields), ssl.cert_time_to_seconds(fields["notAfter"])
        except ssl.SSLCertVerificationError as error:
            wrong = f"the certificate in {self._cert} is of no use: {error.verify_message}"
            if error.verify_code not in _EXPIRED:
                raise InvalidOption(f"{wrong}; give one for a server") from None
        except (OSError, ValueError) as error:
            raise InvalidOption(f"the certificate in {self._cert} is of no use: {_reason(error, self._cert)}") from None
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ValueError) as error:
                raise InvalidOption(
                    f"tls_client_ca {self._client_ca} cannot be used: {_reason(error, self._client_ca)}; give a PEM "
                    "file of the CAs of client certificates"
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED
        if not wrong:
            log.info("new connections get the certificate in %s, %s", self._cert, shown)
        return context, wrong

    def _look_at_files(self) -> tuple[tuple[int, int, int], ...]:
        found: list[tuple[int, int, int]] = []
        for path in (self._cert, self._key, *(() if self._client_ca is None else (self._client_ca,))):
            try:
                state = os.stat(path)
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((state.st_ino, state.st_size, state.st_mtime_ns))
        return tuple(found)


def _shake_hands(context: ssl.SSLContext, cert: Path) -> dict[str, Any]:
    """Shake hands with a client that trusts the certificate; return its fields. Raises SSLError."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself may be what is trusted
    trusting.load_verify_locations(cert)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(down, up)
    server = context.wrap_bio(up, down, server_side=True)
    for _ in range(_FLIGHTS):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            if side is client:
                return client.getpeercert() or {}
    raise ValueError("no handshake comes about")


def _shown(fields: dict[str, Any]) -> str:
    names: Sequence[tuple[str, str]] = fields.get("subjectAltName", ())
    return f"for {', '.join(value for _, value in names) or 'no name'}, valid until {fields.get('notAfter', '?')}"


def _refuse_password() -> str:
    """Refuse an encrypted key: without this the library would ask on the terminal."""
    raise ValueError("the key has a password")


def _reason(error: Exception, *paths: Path) -> str:
    """Return what is wrong, with the file if it cannot be read: the library names none."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    if isinstance(error, OSError):
        for path in paths:
            try:
                path.open("rb").close()
            except OSError as own:
                return f"{path}: {own.strerror}"
        return error.strerror or str(error)
    return str(error)
