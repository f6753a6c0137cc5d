"""Say in words why a connection by TLS could not be made.

A client that does not trust the broker, or that the broker does not trust, gets TlsFailed, which is not retryable. A
connection that ended within the handshake without such a reason was lost, like any other.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Final

from qmq.errors import ConnectionLost, QmqError, TlsFailed
from qmq.net.client.address import TlsFiles

#: Codes of OpenSSL for a certificate that was refused (X509_V_ERR_...).
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
#: No issuer that is trusted, with or without the certificates that the broker has sent.
_UNTRUSTED: Final = (2, 18, 19, 20, 21)
_WRONG_NAMES: Final = (62, 64)  # of a host, of an IP address
#: Names of a certificate that an error shows.
_MOST_NAMES: Final = 10
#: Reasons of OpenSSL for bytes that are no TLS.
_NO_TLS: Final = frozenset(("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"))
#: Alerts by which a broker asks for a client certificate; with TLS 1.2 it says handshake failure.
_WANTED: Final = frozenset(("TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE"))
#: Alerts by which a broker refuses the client's certificate, and in words why.
_REFUSED: Final = {
    "TLSV1_ALERT_UNKNOWN_CA": "its CA is not the one in tls_client_ca of the broker",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "it was revoked",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it is not acceptable",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it is not meant for clients",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it is not acceptable",
    "TLSV1_ALERT_ACCESS_DENIED": "it has no access",
    "TLSV1_ALERT_DECRYPT_ERROR": "its signature is wrong",
}
#: Reasons for two sides that have no version, or no cipher, in common.
_NOTHING_IN_COMMON: Final = frozenset(
    (
        "TLSV1_ALERT_PROTOCOL_VERSION",
        "UNSUPPORTED_PROTOCOL",
        "NO_PROTOCOLS_AVAILABLE",
        "TLSV1_ALERT_INSUFFICIENT_SECURITY",
    )
)


def is_of_name(error: OSError) -> bool:
    """Return whether the broker's certificate was refused for its names alone."""
    return isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _WRONG_NAMES


def connect_error(error: OSError, address: str, tls: TlsFiles, names: Sequence[str] = ()) -> QmqError:
    """Return the error of QMQ for one that ended the connection to *address* before WELCOME came. *tls*: the files of
    the client; *names*: those in the broker's certificate, where they were the reason.
    """
    if not isinstance(error, ssl.SSLError):
        return ConnectionLost(f"{address}: {error.strerror or str(error) or 'the connection was closed'}")
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsFailed(f"the certificate of the broker at {address} {_of_certificate(error, tls, names)}")
    reason = error.reason or ""
    if reason in _NO_TLS:
        return TlsFailed(f"the broker at {address} does not speak TLS: use qmq://, or give it tls_cert and tls_key")
    if reason in _WANTED and not tls.cert:
        return TlsFailed(f"the broker at {address} asks for a client certificate: give tls_cert and tls_key")
    if reason in _REFUSED or reason in _WANTED:
        why = _REFUSED.get(reason, "it is not acceptable")
        return TlsFailed(f"the broker at {address} refuses the client's certificate: {why}; see the broker's log")
    if reason in _NOTHING_IN_COMMON:
        return TlsFailed(f"the broker at {address} and this client have no version of TLS in common: {reason}")
    return ConnectionLost(f"{address}: {error.reason or error.strerror or error}")


def _of_certificate(error: ssl.SSLCertVerificationError, tls: TlsFiles, names: Sequence[str]) -> str:
    code, why = error.verify_code, error.verify_message.removesuffix(".")
    if code == _EXPIRED:
        return "has expired: renew it (the broker takes new files without a restart), or set this machine's clock right"
    if code == _NOT_YET_VALID:
        return "is not valid yet: set the clocks of both machines right"
    if code in _WRONG_NAMES:
        found = f"it is for {', '.join(names[:_MOST_NAMES])}" if names else "it has no such name"
        return f"is for another name: {why}; {found}: connect to a name in it, or issue one with this name"
    if code not in _UNTRUSTED:
        return f"is not acceptable: {why}: issue it anew, or the CA that signed it, if that is meant"
    trusted = f"tls_ca {tls.ca} does not have" if tls.ca else "this system does not trust"
    return f"is not trusted: {why}; {trusted} the CA that signed it: give its CA with tls_ca"
