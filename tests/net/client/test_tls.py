"""Clients that connect by TLS: what they trust, what they show, and how they say that it cannot work."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

import qmq
from qmq.errors import ConnectionLost, InvalidOption, TlsFailed
from qmq.net.client import broker_link
from qmq.net.client.address import Address, TlsFiles, parse_url, tls_files
from qmq.net.client.blocking import ping
from qmq.net.client.log_reader import LogReader
from qmq.net.client.restore import RestoreTarget
from qmq.net.client.tls import context
from qmq.net.client.tls.failures import connect_error
from tests.broker_process import running
from tests.certificates import Authority, Issued, TlsFilesOfTests
from tests.faults.brokers import until

on_both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
Run = Callable[[Coroutine[Any, Any, None]], None]


@asynccontextmanager
async def tls_broker(path: Path, server: Issued, **settings: Any) -> AsyncIterator[str]:
    async with running(path / "data", tls_cert=server.cert, tls_key=server.key, **settings) as broker:
        yield broker.url


async def send_one(url: str, **options: Any) -> None:
    async with qmq.connect(url, **options) as client:
        await client.send("a.b", b"x")


@on_both_loops
def test_messages_of_all_sizes_go_both_ways(tmp_path: Path, run: Run) -> None:
    files = TlsFilesOfTests.make(tmp_path / "tls")
    bodies = [bytes([size % 251]) * size for size in (0, 1, 100, 16_383, 16_384, 16_385, 100_000, 3_000_000)]

    async def main() -> None:
        async with tls_broker(tmp_path, files.server) as url, qmq.connect(url, tls_ca=files.authority.ca) as client:
            assert url.startswith("qmqs://")
            for body in bodies:
                await client.send("a.b", body)
            await client.send_many("a.b", [b"x" * 100] * 50_000)
            async with client.subscribe("a.", group="g") as consumer:
                found: list[bytes] = []
                while len(found) < len(bodies) + 50_000:
                    batch = await consumer.pull_batch(20_000, timeout=60)
                    found += [message.body for message in batch]
                    batch.ack()
            assert found == bodies + [b"x" * 100] * 50_000

    run(main())


def test_a_program_without_asyncio_uses_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = TlsFilesOfTests.make(tmp_path / "tls")
    monkeypatch.setenv("QMQ_TLS_CA", str(files.authority.ca))

    async def main() -> None:
        async with tls_broker(tmp_path, files.server) as url:
            await asyncio.to_thread(use, url)

    def use(url: str) -> None:
        with qmq.connect_sync(url) as client:
            client.send("a.b", b"x")
            with client.subscribe("a.", group="g") as consumer:
                (message,) = consumer.pull(1, timeout=60)
                message.ack()
        address = parse_url(url)[0]
        assert ping(address, 60).version
        reader = LogReader(address)
        _, (span,) = reader.segments(0)
        assert b"a.b" in reader.read(0, span.base, span.end - span.base)
        reader.close()

    asyncio.run(main())


def test_a_restore_and_heartbeats_connect_by_tls(tmp_path: Path) -> None:
    files = TlsFilesOfTests.make(tmp_path / "tls")

    async def main() -> None:
        async with tls_broker(tmp_path, files.server, session_timeout_ms=600) as url:
            target = await RestoreTarget.open(parse_url(url, tls_files(files.authority.ca))[0])
            await target.close()
            async with qmq.connect(url, tls_ca=files.authority.ca) as client:
                await client.send("a.b", b"x")
                async with client.subscribe("a.", group="g") as consumer:
                    (message,) = await consumer.pull(1, timeout=60)
                    beats = client._brokers.links[0]._heartbeat
                    assert beats is not None
                    first = beats._heard_at
                    await asyncio.to_thread(_until, lambda: beats._heard_at > first + 1.0)  # longer than the session
                    message.ack()
                    await consumer.flush()  # not fenced

    asyncio.run(main())


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


REFUSED = {
    "untrusted": "is not trusted: .*; tls_ca .*other/ca.pem does not have the CA that signed it: give its CA",
    "unknown to the system": "is not trusted: .*; this system does not trust the CA that signed it: give its CA",
    "another name": "is for another name: .*127.0.0.1.*; it is for broker.shop, 10.0.0.7: connect to a name in it",
    "expired": "has expired: renew it",
    "not asked": "asks for a client certificate: give tls_cert and tls_key",
    "unknown client": "refuses the client's certificate: its CA is not the one in tls_client_ca of the broker",
    "expired client": "refuses the client's certificate: it has expired",
}


@pytest.mark.parametrize("how", REFUSED)
@on_both_loops
def test_a_connection_without_trust_fails_at_once_and_says_why(tmp_path: Path, how: str, run: Run) -> None:
    authority, other = Authority(tmp_path / "tls"), Authority(tmp_path / "other")
    server, options, settings = authority.issue(), dict[str, Any](tls_ca=authority.ca), dict[str, Any]()
    match how:
        case "untrusted":
            options["tls_ca"] = other.ca
        case "another name":
            server = authority.issue("broker.shop", "10.0.0.7")
        case "unknown to the system":
            del options["tls_ca"]
        case "expired":
            server = authority.issue(ends_in_days=-2)
        case "not asked":
            settings["tls_client_ca"] = authority.ca
        case "unknown client":
            settings["tls_client_ca"] = authority.ca
            options["tls_cert"], options["tls_key"] = other.issue("c", file="client")
        case "expired client":
            settings["tls_client_ca"] = authority.ca
            options["tls_cert"], options["tls_key"] = authority.issue("c", file="client", ends_in_days=-2)

    async def main() -> None:
        async with tls_broker(tmp_path, server, **settings) as url:
            with pytest.raises(TlsFailed, match=REFUSED[how]) as caught:
                await send_one(url, wait=600, **options)  # not tried again
            assert not caught.value.retryable
            address = parse_url(url, tls_files(**{key.removeprefix("tls_"): path for key, path in options.items()}))[0]
            with pytest.raises(TlsFailed, match=REFUSED[how]):
                await asyncio.to_thread(ping, address, 60)
            reader = LogReader(address, give_up_after=600)
            with pytest.raises(TlsFailed, match=REFUSED[how]):
                await asyncio.to_thread(lambda: reader.store_id)

    run(main())


def test_a_ca_without_key_usage_is_trusted_by_every_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, create = Authority(tmp_path / "tls"), ssl.create_default_context
    authority.drop_key_usage()

    def create_as_of_python_3_13(*args: Any, **options: Any) -> ssl.SSLContext:
        context = create(*args, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", create_as_of_python_3_13)

    async def main() -> None:
        async with tls_broker(tmp_path, authority.issue()) as url:
            await send_one(url, tls_ca=authority.ca)

    asyncio.run(main())


def test_an_error_blames_trust_only_where_trust_is_missing() -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = 92, "CA cert does not include key usage extension"
    said = str(connect_error(error, "127.0.0.1:1", TlsFiles("/ca.pem")))
    assert said == (
        "the certificate of the broker at 127.0.0.1:1 is not acceptable: CA cert does not include key usage extension: "
        "issue it anew, or the CA that signed it, if that is meant"
    )


@on_both_loops
def test_both_sides_say_at_once_that_only_one_speaks_tls(tmp_path: Path, run: Run) -> None:
    files = TlsFilesOfTests.make(tmp_path / "tls")

    async def main() -> None:
        async with tls_broker(tmp_path, files.server) as url:
            plain = url.replace("qmqs://", "qmq://")
            with pytest.raises(TlsFailed, match="by TLS only: connect with qmqs:// instead of qmq://"):
                await send_one(plain, wait=600)
            with pytest.raises(TlsFailed, match="by TLS only"):
                await asyncio.to_thread(ping, parse_url(plain)[0], 60)
        async with running(tmp_path / "plain") as broker:
            secure = broker.url.replace("qmq://", "qmqs://")
            with pytest.raises(TlsFailed, match="does not speak TLS: use qmq://"):
                await send_one(secure, wait=600, tls_ca=files.authority.ca)
            with pytest.raises(TlsFailed, match="does not speak TLS: use qmq://"):
                await asyncio.to_thread(ping, parse_url(secure)[0], 60)

    run(main())


def test_the_name_in_a_client_certificate_is_known_to_the_broker(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    server = authority.issue()
    client = authority.issue("billing.shop", common_name="billing", file="client")

    async def main() -> None:
        data = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": authority.ca}
        async with (
            running(tmp_path / "data", **data) as broker,
            qmq.connect(broker.url, tls_ca=authority.ca, tls_cert=client.cert, tls_key=client.key),
        ):
            assert [one.certificate_name for one in broker.server._connections.values()] == ["billing"]

    uvloop.run(main())


def test_a_connected_client_tries_for_a_while_and_then_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that comes back with a certificate that nobody trusts may be about to get a better one."""
    authority, other = Authority(tmp_path / "tls"), Authority(tmp_path / "other")
    monkeypatch.setattr(broker_link, "TLS_TRIES_S", 600.0)

    async def main() -> None:
        broker = running(tmp_path / "data", tls_cert=authority.issue().cert, tls_key=authority.issue().key)
        running_broker = await broker.__aenter__()
        url, port = running_broker.url, running_broker.address[1]
        client = await qmq.connect(url, tls_ca=authority.ca)
        await client.send("a.b", b"x")
        await broker.__aexit__(None, None, None)
        bad, good = other.issue(), authority.issue()
        listen = {"listen": f"127.0.0.1:{port}"}
        async with running(tmp_path / "data", tls_cert=bad.cert, tls_key=bad.key, **listen):
            await until(lambda: "is not trusted" in caplog.text, "the client has met the bad certificate")
        async with running(tmp_path / "data", tls_cert=good.cert, tls_key=good.key, **listen):
            await client.send("a.b", b"x")
            monkeypatch.setattr(broker_link, "TLS_TRIES_S", 0.0)
        async with running(tmp_path / "data", tls_cert=bad.cert, tls_key=bad.key, **listen):
            await until(lambda: not client._brokers.is_open, "the client has ended")
        with pytest.raises(TlsFailed, match="is not trusted"):
            await client.send("a.b", b"x")

    uvloop.run(main())


def test_changed_files_are_read_again_and_broken_ones_leave_the_old(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue(file="client")
    files = TlsFiles(str(authority.ca), str(issued.cert), str(issued.key))
    first = context.context_of(files)
    assert context.context_of(files) is first
    authority.issue(file="client")
    second = context.context_of(files)
    assert second is not first
    issued.key.write_text("broken")
    with caplog.at_level(logging.ERROR):
        assert context.context_of(files) is second
        assert context.context_of(files) is second
    assert caplog.text.count("TLS goes on with the files read before: tls_cert") == 1
    assert str(issued.key) in caplog.text


@pytest.mark.parametrize("wrong", ["ca", "cert", "key"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, wrong: str) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue(file="client")
    paths = {"ca": str(authority.ca), "cert": str(issued.cert), "key": str(issued.key)}
    paths[wrong] = str(tmp_path / "none")
    with pytest.raises(InvalidOption, match=str(tmp_path / "none")):
        context.context_of(TlsFiles(**paths))


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("qmq://a", {"tls_ca": "ca.pem"}, "tls_ca is given, but no address begins with qmqs://"),
        ("qmqs://a", {"tls_cert": "c.pem"}, "needs tls_cert and tls_key, and only one of them is given"),
        ("qmqs://a", {"tls_key": "c.key"}, "needs tls_cert and tls_key, and only one of them is given"),
    ],
)
def test_options_that_do_not_fit_are_refused_at_once(url: str, options: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        qmq.connect(url, **options)  # type: ignore[arg-type]  # paths only


def test_the_environment_names_files_where_no_argument_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CA", "CERT", "KEY"):
        monkeypatch.setenv(f"QMQ_TLS_{name}", f"/env/{name}")
    assert parse_url("qmq://a")[0].tls is None
    assert parse_url("qmqs://a")[0].tls == TlsFiles("/env/CA", "/env/CERT", "/env/KEY")
    assert tls_files(ca=Path("/own")) == TlsFiles("/own", "/env/CERT", "/env/KEY")
    qmq.connect("qmq://a")  # a variable is for those that use it


def test_an_address_without_a_scheme_has_that_of_the_one_before() -> None:
    addresses = parse_url("a,qmqs://b:1,c,qmq://d,e")
    assert [address.url for address in addresses] == [
        "qmq://a:20881", "qmqs://b:1", "qmqs://c:20881", "qmq://d:20881", "qmq://e:20881",
    ]  # fmt: skip


def test_a_broker_that_ends_in_the_handshake_is_tried_again() -> None:
    """Without a reason of TLS it is a connection that was lost."""

    async def main() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        with pytest.raises(ConnectionLost) as caught:
            await send_one(f"qmqs://{host}:{port}")
        assert caught.value.retryable
        with pytest.raises(ConnectionLost):
            await asyncio.to_thread(ping, Address(host, port, TlsFiles()), 60)
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_importing_the_client_loads_no_tls() -> None:
    code = "import sys, qmq, qmq.net.client.blocking; print('ssl' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
