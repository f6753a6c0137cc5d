"""The command: where it may listen, how it ends, and brokers that go and come back."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import ssl
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from qmq import connect
from qmq.console.security import HEADERS, is_loopback
from qmq.console.serve import check_listen, listening_socket
from qmq.errors import InvalidOption, UsageError
from tests.broker_process import BrokerProcess, running_broker
from tests.certificates import TlsFilesOfTests, client_context, over_tls
from tests.cli.commands import qmq, qmq_process
from tests.console.consoles import Browser, running_console
from tests.daemon.test_token_file import Keys
from tests.net.several import several

SERVER = "qmq://127.0.0.1:20881"


def test_off_loopback_without_a_token_it_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QMQ_TOKEN", raising=False)
    for listen in ("0.0.0.0:20880", "10.0.0.5:20880", "[::]:20880", "console.example:20880"):
        with pytest.raises(UsageError, match="has no token, so nobody signs in"):
            check_listen(listen, SERVER, is_secure=True)
    for listen, host in (("127.0.0.1:0", "127.0.0.1"), ("[::1]:1", "::1"), ("localhost:1", "localhost")):
        assert check_listen(listen, SERVER, is_secure=False)[0] == host
    monkeypatch.setenv("QMQ_TOKEN", "console:secret")
    assert check_listen("0.0.0.0:20880", SERVER, is_secure=True) == ("0.0.0.0", 20880)
    for wrong in ("", "127.0.0.1", ":20880", "127.0.0.1:x", "127.0.0.1:70000", "[::1"):
        with pytest.raises(InvalidOption, match="must be HOST:PORT"):
            check_listen(wrong, SERVER, is_secure=True)


def test_off_loopback_without_tls_it_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("QMQ_TOKEN", "console:secret")
    check_listen("0.0.0.0:20880", SERVER, is_secure=False)
    assert "or put a proxy before it that takes TLS" in caplog.text


def test_the_host_of_all_addresses_is_that_of_both_families() -> None:
    with listening_socket("::", 0) as listening:
        port = listening.getsockname()[1]
        for host in ("::1", "127.0.0.1"):
            socket.create_connection((host, port)).close()


@pytest.mark.parametrize(
    ("host", "is_so"), [("127.8.8.8", True), ("::1", True), ("127.0.0.1.evil", False), ("", False)]
)
def test_loopback_is_told_by_the_name(host: str, is_so: bool) -> None:
    assert is_loopback(host) is is_so


async def test_every_answer_has_the_headers_and_a_foreign_name_is_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url, running_console(url) as console:
        browser = await console.browser()
        for path in ("/healthz", "/api/groups", "/nothing", "/api/openapi.json", "/api/nothing"):
            reply = await browser.ask("GET", path)
            assert {name: reply.headers[name] for name in HEADERS} == HEADERS
            assert reply.headers["cache-control"] == "no-store"
        assert (await browser.ask("GET", "/api/groups", host="evil.example")).status == 421
        assert (await browser.ask("POST", "/api/groups/g/delete", {"confirm": "g"}, x_csrf_token="")).status == 403
        for body, status in (({"confirm": "x" * (2 << 20)}, 413), ({"confirm": 1}, 400), ({"confirms": "g"}, 400)):
            assert (await browser.ask("POST", "/api/groups/g/delete", body)).status == status
        document = await browser.get("/api/openapi.json")
        assert {"/api/groups/{group}/redrive", "/api/messages/{id}/trace"} <= set(document["paths"])


def test_sigterm_ends_it_while_a_page_is_open(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data")
    try:
        url = broker.start()
        with qmq_process("console", "--listen", "127.0.0.1:0", "--server", url) as process:
            assert process.stdout is not None
            ready = process.stdout.readline().decode()
            port = int(ready.rstrip("/\n").rpartition(":")[2])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            with closing(connection):
                connection.request("GET", "/api/events")
                with connection.getresponse() as events:
                    assert events.readline() == b"retry: 2000\n"
                    process.send_signal(signal.SIGTERM)
                    assert events.read().count(b"event: snapshot") <= 60
            assert process.wait(60) == 0
            assert process.stderr is not None
            assert b"Traceback" not in process.stderr.read()
    finally:
        broker.close()


#: Runs `qmq` as if a package were not installed.
_WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from qmq.cli.main import cli
cli(sys.argv[2:])
"""


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "jinja2", "prometheus_client"])
def test_without_the_extra_it_says_how_to_install_it(package: str) -> None:
    command = [sys.executable, "-c", _WITHOUT, package, "console", "--listen", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"qmq: the console needs {package}: pip install 'qmq[console]'\n"


def test_a_variable_sets_the_format_of_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QMQ_LOG_FORMAT", "json")
    with qmq_process("console", "--listen", "127.0.0.1:0", "--server", "qmq://127.0.0.1:1") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready on http://127.0.0.1:")
        assert process.stderr is not None
        line = json.loads(process.stderr.readline())
        assert line["message"].startswith("showing qmq://127.0.0.1:1 on http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


async def test_by_tls_of_its_own_its_cookies_are_secure(tmp_path: Path) -> None:
    files = TlsFilesOfTests.make(tmp_path / "certificates")
    keys = Keys(tmp_path / "data" / "tokens.toml", {})
    ops = keys.add("ops", admin=True)
    token = tmp_path / "console.token"
    token.write_text(keys.add("console", browse=("",)))
    async with running_broker(tmp_path / "data") as url:
        arguments = ["--listen", "127.0.0.1:0", "--server", url, "--token-file", str(token)]
        pair = ["--tls-cert-file", str(files.server.cert), "--tls-key-file", str(files.server.key)]
        with qmq_process("console", *arguments, *pair) as process:
            assert process.stdout is not None
            ready = (await asyncio.to_thread(process.stdout.readline)).decode()
            assert ready.startswith("ready on https://127.0.0.1:")
            browser = Browser(int(ready.rstrip("/\n").rpartition(":")[2]), tls=client_context(files))
            reply = await browser.ask("POST", "/sign-in", {"token": ops}, form=True)
            cookie = reply.headers["set-cookie"]
            assert cookie.startswith("__Host-qmq=")
            assert {"secure", "httponly", "samesite=strict", "path=/"} <= set(cookie.lower().split("; "))
            assert reply.headers["strict-transport-security"] == "max-age=31536000"
            session = await browser.get("/api/session")
            assert (session["token"], session["admin"]) == ("ops", True)
            own = f"https://127.0.0.1:{browser.port}"
            browser.csrf = session["csrf"]
            assert (await browser.ask("POST", "/sign-out", {}, origin=own)).status == 303
            with pytest.raises(ssl.SSLCertVerificationError):
                await Browser(browser.port, tls=ssl.create_default_context()).ask("GET", "/healthz")
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--tls-cert-file", "{cert}"], "give --tls-cert-file and --tls-key-file, or none of them"),
        (["--tls-cert-file", "{cert}", "--tls-key-file", "{cert}"], "cannot be used"),
        (["--tls-cert-file", "{cert}", "--tls-key-file", "/nowhere"], "cannot be used"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_wrong_usage(arguments: list[str], error: str, tmp_path: Path) -> None:
    cert = TlsFilesOfTests.make(tmp_path).server.cert
    done = qmq("console", "--listen", "127.0.0.1:0", *(text.format(cert=cert) for text in arguments))
    assert done.exit_code == 2
    assert error in done.stderr


async def test_a_broker_goes_and_comes_back(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data")
    try:
        url = await asyncio.to_thread(broker.start)
        async with running_console(url) as console:
            browser = await console.browser()
            watch = console.app.state.watch
            async with connect(url) as client:
                await client.send("shop.order", b"x")
            await watch.newer_than(0)
            assert (await browser.ask("GET", "/readyz")).status == 200
            await asyncio.to_thread(broker.kill)
            while not watch.latest.away:
                watch.look()
                await watch.newer_than(watch.latest.number)
            assert (await browser.ask("GET", "/readyz")).status == 503
            assert (await browser.ask("GET", "/healthz")).status == 200
            assert list((await browser.get("/api/overview"))["away"]) == [url.rpartition("/")[2]]
            await asyncio.to_thread(broker.start)
            while watch.latest.away:
                watch.look()
                await watch.newer_than(watch.latest.number)
            assert [row["name"] for row in (await browser.get("/api/subjects"))["rows"]] == ["shop.order"]
    finally:
        broker.close()


async def test_two_brokers_of_which_one_is_away(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers, running_console(brokers.url) as console:
        browser = await console.browser()
        for number in range(2):
            async with connect(brokers.one(number)) as client, client.subscribe("shop.", group="billing"):
                await client.send("shop.order", b"x")
        watch = console.app.state.watch
        while len((await watch.recent(0)).groups["billing"].brokers) < 2:
            watch.look()
        (row,) = (await browser.get("/api/groups"))["rows"]
        assert row["ready"] == 2
        assert {one["broker"] for one in (await browser.get("/api/groups/billing"))["rows"]} == {
            brokers.address(0), brokers.address(1)
        }  # fmt: skip
        await brokers.stop(1)
        while not watch.latest.away:
            watch.look()
            await watch.newer_than(watch.latest.number)
        page = await browser.get("/api/groups")
        assert (page["rows"][0]["ready"], page["missed"]) == (1, [brokers.address(1)])


async def test_a_broker_by_tls(tmp_path: Path) -> None:
    with over_tls(tmp_path / "certificates"):
        async with running_broker(tmp_path / "data") as url, running_console(url) as console:
            browser: Browser = await console.browser()
            assert url.startswith("qmqs://")
            assert (await browser.get("/api/brokers"))["total"] == 1
