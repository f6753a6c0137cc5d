"""Make the TLS contexts of clients from their files, and connect sockets by them.

A context is made again once its files have changed. If the new files cannot be used, the old context stays, and the log
says why: a client that runs does not end because somebody renews its certificate in two steps.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from qmq.errors import InvalidOption
from qmq.net.client.address import Address, TlsFiles
from qmq.net.client.dial import Route, dial, route_to
from qmq.net.client.tls.failures import connect_error, is_of_name

log = logging.getLogger("qmq.client")

#: Seconds for each step of asking for the names in a certificate.
_NAMES_S: Final = 2.0

_Signature = tuple[tuple[int, int, int], ...]


class _Made(NamedTuple):
    """A context, and the state of the files when it was made, or when they were last found to be of no use."""

    signature: _Signature
    context: ssl.SSLContext


_made: Final[dict[TlsFiles, _Made]] = {}


def context_of(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of a client with these files. Raises InvalidOption for files that cannot be used."""
    signature, before = _signature(files), _made.get(files)
    if before is not None and before.signature == signature:
        return before.context
    try:
        context = _make(files)
    except InvalidOption as error:
        if before is None:
            raise
        log.error("TLS goes on with the files read before: %s", error)
        context = before.context
    _made[files] = _Made(signature, context)
    return context


def wrap(sock: socket.socket, address: Address) -> socket.socket:
    """Return *sock*, which is connected to *address*, as a socket by TLS; close it if that fails. Raises QmqError."""
    assert address.tls is not None
    routes: list[Route] = []
    with suppress(OSError):  # the broker is gone
        routes = [route_to(sock.getpeername())]
    try:
        return context_of(address.tls).wrap_socket(sock, server_hostname=address.tls_name)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError) and not isinstance(error, TimeoutError):
            raise connect_error(error, str(address), address.tls, names_after(error, address, routes)) from error
        raise


def names_after(error: OSError, address: Address, routes: Sequence[Route]) -> list[str]:
    """Return the names in the certificate of a broker, if it was refused for them; else nothing. Waits for a second
    handshake, by *routes*, as the first one does not tell them.
    """
    if address.tls is None or not is_of_name(error):
        return []
    context = _make(address.tls)
    context.check_hostname = False  # the CA is checked, and nothing is sent
    try:
        with dial(routes, _NAMES_S) as sock, context.wrap_socket(sock) as tls:
            found = tls.getpeercert() or {}
    except OSError:
        return []
    return [str(name[1]) for name in found.get("subjectAltName", ())]


def _make(files: TlsFiles) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=files.ca or None)
    except (OSError, ValueError) as error:
        raise InvalidOption(f"tls_ca {files.ca} cannot be used: {_reason(error)}; give a PEM file of CAs") from None
    # Python 3.13 checks more than those before, and refuses CAs that they take: those without a key usage.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)
    if files.cert:
        try:
            context.load_cert_chain(files.cert, files.key, password=_refuse_password)
        except (OSError, ValueError) as error:
            raise InvalidOption(
                f"tls_cert {files.cert} and tls_key {files.key} cannot be used: {_reason(error)}; give PEM files of a "
                "certificate and its key, without a password"
            ) from None
    return context


def _refuse_password() -> str:
    """Refuse an encrypted key: without this the library would ask on the terminal."""
    raise ValueError("the key has a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _signature(files: TlsFiles) -> _Signature:
    """Return what changes with the files. Files that cannot be looked at count as gone."""
    found: list[tuple[int, int, int]] = []
    for path in filter(None, files):
        try:
            state = os.stat(path)
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((state.st_ino, state.st_size, state.st_mtime_ns))
    return tuple(found)
