"""Certificates for tests, by an authority of their own, and the switch that has a test run over TLS."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

#: The names that clients use for a broker on this machine.
LOCAL = ("127.0.0.1", "localhost", "::1")


class Issued(NamedTuple):
    """The PEM files of a certificate and of its key."""

    cert: Path
    key: Path


class Authority:
    """A CA. ``ca`` is the file by which others trust it."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        from trustme import CA  # takes a tenth of a second to import, and most tests need none

        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._ca = CA(organization_name=name)
        self.ca = directory / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.ca))

    def drop_key_usage(self) -> None:
        """Make the certificate of the CA anew, as many are made by hand: it does not say what its key is for."""
        from cryptography import x509
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import Encoding

        old = self._ca._certificate
        kept = [extension for extension in old.extensions if type(extension.value) is not x509.KeyUsage]
        builder = x509.CertificateBuilder(
            old.issuer, old.subject, old.public_key(), old.serial_number, old.not_valid_before_utc,
            old.not_valid_after_utc, kept,
        )  # fmt: skip
        self.ca.write_bytes(builder.sign(self._ca._private_key, SHA256()).public_bytes(Encoding.PEM))

    def issue(
        self, *names: str, common_name: str | None = None, file: str = "server", ends_in_days: int | None = None
    ) -> Issued:
        """Write a certificate for these names. With *ends_in_days* below 0 it is not valid any more."""
        times: dict[str, Any] = {}
        if ends_in_days is not None:
            now = datetime.now(UTC)
            times = {"not_before": now - timedelta(days=90), "not_after": now + timedelta(days=ends_in_days)}
        made = self._ca.issue_cert(*(names or LOCAL), common_name=common_name, **times)
        issued = Issued(self._directory / f"{file}.pem", self._directory / f"{file}.key")
        issued.cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        issued.key.write_bytes(made.private_key_pem.bytes())
        return issued


class TlsFilesOfTests(NamedTuple):
    """The files of a broker and its clients."""

    authority: Authority
    server: Issued

    @classmethod
    def make(cls, directory: Path) -> Self:
        """Issue a certificate for a broker on this machine."""
        authority = Authority(directory)
        return cls(authority, authority.issue())

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a broker."""
        return {"tls_cert": str(self.server.cert), "tls_key": str(self.server.key)}

    @contextmanager
    def trusted(self) -> Iterator[None]:
        """Have all clients in the block, and those of processes that it starts, trust the authority."""
        before = os.environ.get("QMQ_TLS_CA")
        os.environ["QMQ_TLS_CA"] = str(self.authority.ca)
        try:
            yield
        finally:
            if before is None:
                del os.environ["QMQ_TLS_CA"]
            else:
                os.environ["QMQ_TLS_CA"] = before


#: The files by which all brokers and clients of a test are connected; None: they are connected without TLS.
_active: TlsFilesOfTests | None = None


def active() -> TlsFilesOfTests | None:
    """Return the files that brokers of tests use now."""
    return _active


@contextmanager
def over_tls(directory: Path) -> Iterator[TlsFilesOfTests]:
    """Have the brokers that start in the block take connections by TLS only, and clients trust them."""
    global _active
    before = _active
    _active = TlsFilesOfTests.make(directory)
    try:
        with _active.trusted():
            yield _active
    finally:
        _active = before


def where_asked(directory: Path) -> AbstractContextManager[TlsFilesOfTests | None]:
    """Run over TLS in the block if the switch says so: the environment variable QMQ_TEST_TLS is set."""
    return over_tls(directory) if os.environ.get("QMQ_TEST_TLS") else nullcontext()


def server_context(files: TlsFilesOfTests) -> ssl.SSLContext:
    """Return a context for a server of a test's own, such as a proxy."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files.server)
    return context


def client_context(files: TlsFilesOfTests) -> ssl.SSLContext:
    """Return a context that trusts the broker, for a client of a test's own."""
    return ssl.create_default_context(cafile=files.authority.ca)
