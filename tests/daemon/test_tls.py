"""A broker with TLS: its address, a certificate that is renewed while it serves, and files that it cannot use."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import qmq
from qmq.errors import InvalidOption, TlsFailed
from qmq.settings import load
from tests.broker_process import broker_process, running
from tests.certificates import Authority, TlsFilesOfTests
from tests.cli.commands import qmq as command
from tests.faults.brokers import until


def test_a_process_says_that_clients_connect_by_tls(tmp_path: Path) -> None:
    files = TlsFilesOfTests.make(tmp_path / "tls")
    with broker_process(tmp_path / "data", **files.settings) as broker:
        assert broker.ready_line.startswith("ready on qmqs://127.0.0.1:")
        done = command("ping", "--tls-ca", str(files.authority.ca), server=broker.url)
        assert (done.exit_code, done.stderr) == (0, "")
        assert command("info", "--tls-ca", str(files.authority.ca), server=broker.url).exit_code == 0
        assert "is not trusted" in command("ping", server=broker.url).stderr
        assert broker.stop() == 0
        assert "the certificate in" in broker.log()


async def test_new_connections_get_a_renewed_certificate_and_old_ones_live(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    issued = old.issue()
    async with (
        running(tmp_path / "data", tls_cert=issued.cert, tls_key=issued.key) as broker,
        qmq.connect(broker.url, tls_ca=old.ca) as client,
    ):
        await client.send("a.b", b"before")
        good = new.issue()
        issued.cert.write_text("no certificate")
        await until(lambda: "the old certificate stays" in caplog.text, "the broker has seen the broken file")
        assert str(issued.cert) in caplog.text
        assert await connects(broker.url, old.ca)
        good.key.replace(issued.key)
        good.cert.replace(issued.cert)
        await until(lambda: caplog.text.count("new connections get") == 2, "the broker has taken the new files")
        assert await connects(broker.url, new.ca)
        assert not await connects(broker.url, old.ca)
        await client.send("a.b", b"on the old connection")


async def connects(url: str, ca: Path) -> bool:
    try:
        async with qmq.connect(url, tls_ca=ca) as client:
            await client.send("a.b", b"x")
    except TlsFailed:
        return False
    return True


@pytest.mark.parametrize(
    ("assignments", "why"),
    [
        (["tls_cert=c.pem"], "tls_cert = 'c.pem' (--set) is not allowed; give tls_key as well"),
        (["tls_key=c.key"], "tls_key = 'c.key' (--set) is not allowed; give tls_cert as well"),
        (["tls_client_ca=c.pem"], "tls_client_ca = 'c.pem' (--set) is not allowed; give tls_cert and tls_key as well"),
        (["tls_cert=", "tls_key=c.key"], "tls_cert = '' (--set) is not allowed; give the path of a PEM file"),
    ],
)
def test_files_are_given_together(assignments: list[str], why: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        load(None, assignments)
    assert str(caught.value).startswith(why)


def test_a_broker_does_not_start_with_files_that_it_cannot_use(tmp_path: Path) -> None:
    issued = Authority(tmp_path / "tls").issue()
    issued.key.unlink()
    files = ["--set", f"tls_cert={issued.cert}", "--set", f"tls_key={issued.key}"]
    done = command("serve", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0", *files)
    assert done.exit_code == 2
    assert f"{issued.key}: No such file or directory" in done.stderr
    assert not (tmp_path / "data").exists()
