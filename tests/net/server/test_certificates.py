"""Loading the server's certificate, and taking a renewed one or leaving it."""

from __future__ import annotations

import logging
import os
import ssl
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from qmq.errors import InvalidOption
from qmq.net.server.certificates import ServerCertificates
from tests.certificates import Authority


def look_twice(certificates: ServerCertificates) -> None:
    """New files count once they have stayed the same for two looks."""
    certificates.look()
    certificates.look()


def test_a_certificate_is_logged_with_its_names_and_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    issued = Authority(tmp_path).issue("broker.shop")
    with caplog.at_level(logging.INFO):
        context = ServerCertificates(*issued).context()
    assert context.verify_mode == ssl.CERT_NONE
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert f"the certificate in {issued.cert}, for broker.shop, valid until " in caplog.text


def test_with_a_client_ca_every_client_needs_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue("broker.shop")
    assert ServerCertificates(issued.cert, issued.key, authority.ca).context().verify_mode == ssl.CERT_REQUIRED


def test_a_renewed_certificate_is_taken_once_it_stays_the_same(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificates = ServerCertificates(*authority.issue())
    before = certificates.context()
    look_twice(certificates)
    assert certificates.context() is before
    authority.issue()
    certificates.look()
    assert certificates.context() is before  # they may still be written
    certificates.look()
    assert certificates.context() is not before


def test_files_that_are_replaced_one_after_another_are_taken_in_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path / "new")
    old, new = authority.issue(), other.issue()
    certificates = ServerCertificates(*old)
    before = certificates.context()
    os.replace(new.cert, old.cert)
    look_twice(certificates)
    look_twice(certificates)
    assert certificates.context() is before
    assert caplog.text.count("the old certificate stays: ") == 1
    assert f"tls_cert {old.cert} and tls_key {old.key} cannot be used: key values mismatch" in caplog.text
    os.replace(new.key, old.key)
    look_twice(certificates)
    assert certificates.context() is not before


@pytest.mark.parametrize("wrong", ["nothing", "no PEM", "expired", "gone"])
def test_a_broken_certificate_leaves_the_old_one_and_is_logged_with_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue()
    certificates = ServerCertificates(*issued)
    before = certificates.context()
    if wrong == "expired":
        authority.issue(ends_in_days=-3)
    elif wrong == "gone":
        issued.cert.unlink()
    else:
        issued.cert.write_text("" if wrong == "nothing" else "hello\n")
    look_twice(certificates)
    assert certificates.context() is before
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert str(issued.cert) in record.getMessage()
    authority.issue()
    look_twice(certificates)
    assert certificates.context() is not before


def test_an_expired_certificate_is_served_at_a_start_so_that_a_renewed_one_can_follow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue(ends_in_days=-1)
    certificates = ServerCertificates(*issued)
    assert f"the certificate in {issued.cert} is of no use: certificate has expired; clients refuse it" in caplog.text
    before = certificates.context()
    authority.issue()
    look_twice(certificates)
    assert certificates.context() is not before


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (None, "No such file or directory"),
        ("hello", "cannot be used: "),
        ("encrypted", "the key has a password"),
        ("other", "key values mismatch"),
    ],
)
def test_files_that_cannot_be_used_are_refused_at_the_start(tmp_path: Path, key: str | None, why: str) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue()
    if key is None:
        issued.key.unlink()
    elif key == "other":
        issued.key.write_bytes(authority.issue(file="other").key.read_bytes())
    elif key == "encrypted":
        plain = serialization.load_pem_private_key(issued.key.read_bytes(), None)
        issued.key.write_bytes(
            plain.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"secret"),
            )
        )
    else:
        issued.key.write_text(key)
    with pytest.raises(InvalidOption, match=why) as caught:
        ServerCertificates(*issued)
    assert str(issued.key) in str(caught.value)


def test_a_client_ca_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    issued = Authority(tmp_path).issue()
    with pytest.raises(InvalidOption, match=f"tls_client_ca {tmp_path}/none.pem cannot be used: .*No such file"):
        ServerCertificates(*issued, tmp_path / "none.pem")


def test_what_is_to_be_done_about_a_certificate_is_said(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue(ends_in_days=30)
    certificates = ServerCertificates(*issued)
    now = time.time()
    assert certificates.problem(now) is None
    day = 86_400
    assert certificates.problem(now + 17.5 * day) == (
        "warning",
        f"the certificate in {issued.cert} ends in 12 days: renew it",
    )
    level, text = certificates.problem(now + 31 * day) or ("", "")
    assert (level, text) == ("error", f"the certificate in {issued.cert} has expired: renew it, no client can connect")
    issued.cert.write_text("")
    look_twice(certificates)
    level, text = certificates.problem(now) or ("", "")
    assert level == "warning"
    assert text.startswith("the files of TLS were replaced, and the old certificate stays: tls_cert")
    authority.issue(ends_in_days=60)
    look_twice(certificates)
    assert certificates.problem(now + 31 * day) is None
    authority.issue(ends_in_days=-1)
    level, text = ServerCertificates(*issued).problem(now) or ("", "")
    assert (level, text.endswith("certificate has expired: renew it, no client can connect")) == ("error", True)
