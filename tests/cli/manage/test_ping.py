"""qmq/cli/manage/ping.py: it reports whether a broker answers, to people and to programs."""

from __future__ import annotations

import json
import re
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from qmq.cli.manage import ping
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from qmq.tokens import TokenEntry, change_tokens
from tests.broker_process import BrokerProcess, broker_process
from tests.certificates import Authority
from tests.cli.commands import qmq, qmq_process
from tests.net.frames import frame


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("ping")) as broker:
        yield broker


@pytest.fixture
def nobody() -> Iterator[str]:
    """Return an address on which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{one.getsockname()[1]}"


def test_a_broker_that_is_there_says_its_version(broker: BrokerProcess) -> None:
    done = qmq("ping", server=broker.url)
    assert (done.exit_code, done.stderr) == (0, "")
    assert re.fullmatch(r"127\.0\.0\.1:\d+: qmq 0\.\d+\.\d+, \d+\.\d\d ms\n", done.stdout)
    row = json.loads(qmq("ping", "--json", server=broker.url).stdout)
    assert row == {**row, "broker": broker.url.removeprefix("qmq://"), "reached": True}
    assert row["version"].startswith("0.")
    assert row["round_trip_ms"] > 0


def test_none_is_an_error_that_names_the_address(nobody: str) -> None:
    done = qmq("ping", server=nobody)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == f"qmq: {nobody}: Connection refused; is `qmq serve` running there?\n"


def test_each_of_several_is_asked(broker: BrokerProcess, nobody: str) -> None:
    done = qmq("ping", "--json", server=f"{nobody},{broker.url}")
    assert done.exit_code == 1
    assert [json.loads(line)["reached"] for line in done.stdout.splitlines()] == [False, True]
    assert nobody in done.stderr


def test_one_that_does_not_answer_is_not_there(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ping, "_TRY", 0.2)
    with broker_process(tmp_path) as frozen:
        frozen.send_signal(signal.SIGSTOP)
        done = qmq("ping", server=f"{frozen.url},{broker.url}")
        frozen.send_signal(signal.SIGCONT)
    assert done.exit_code == 1
    assert f"{frozen.url.removeprefix('qmq://')} did not answer within 0.2 s" in done.stderr
    assert broker.url.removeprefix("qmq://") in done.stdout


def test_it_waits_for_one_that_starts(tmp_path: Path) -> None:
    with broker_process(tmp_path) as broker:
        broker.kill()
        with qmq_process("ping", "--wait", "60", "--server", broker.url) as waiting:
            broker.start()
            out, err = waiting.communicate(timeout=60)
        assert (waiting.returncode, err) == (0, b"")
        assert out.startswith(f"{broker.url.removeprefix('qmq://')}: qmq ".encode())


def test_it_waits_no_longer_than_it_was_told(nobody: str) -> None:
    done = qmq("ping", "--wait", "0.3", server=nobody)
    assert done.exit_code == 1
    assert "Connection refused" in done.stderr


def test_what_is_no_broker_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1_000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        done = qmq("ping", "--wait", "60", server=f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert (done.exit_code, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1


# --- a broker that answers, and lets nobody in ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerProcess, Authority]]:
    """A broker that takes connections by TLS, and asks for a token."""
    directory = tmp_path_factory.mktemp("guarded")
    authority = Authority(directory / "tls")
    server = authority.issue()
    change_tokens(directory / "data" / "tokens.toml", lambda _: {"ops": TokenEntry(admin=True)})
    with broker_process(directory / "data", tls_cert=server.cert, tls_key=server.key) as broker:
        yield broker, authority


def test_a_broker_that_asks_for_a_token_is_there(guarded: tuple[BrokerProcess, Authority]) -> None:
    broker, authority = guarded
    done = qmq("ping", "--tls-ca", str(authority.ca), server=broker.url)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "a broker that asks for a token (--token-file)" in done.stdout
    row = json.loads(qmq("ping", "--json", "--tls-ca", str(authority.ca), server=broker.url).stdout)
    assert (row["reached"], row["version"], row["asks_for_token"]) == (True, None, True)


def test_one_that_refuses_a_token_is_a_failure(guarded: tuple[BrokerProcess, Authority], tmp_path: Path) -> None:
    broker, authority = guarded
    (tmp_path / "token").write_text("ops:wrong")
    done = qmq("ping", "--tls-ca", str(authority.ca), "--token-file", str(tmp_path / "token"), server=broker.url)
    assert (done.exit_code, done.stdout) == (1, "")
    assert re.fullmatch(r"qmq: 127\.0\.0\.1:\d+: this token is wrong, or was revoked: .*\n", done.stderr)
    assert "qmq serve" not in done.stderr


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("wrong CA", "tls_ca {directory}/other.pem does not have the CA that signed it: give its CA with tls_ca"),
        ("plain", "this broker takes connections by TLS only: connect with qmqs:// instead of qmq://"),
        ("by TLS", "does not speak TLS: use qmq://"),
    ],
)
@pytest.mark.parametrize(
    "command", [("ping",), ("groups",), ("produce", "shop.a", "x"), ("doctor",), ("find", "shop.")]
)
def test_each_command_says_what_is_wrong_with_tls_and_not_that_no_broker_runs(
    guarded: tuple[BrokerProcess, Authority],
    broker: BrokerProcess,
    tmp_path: Path,
    how: str,
    says: str,
    command: tuple[str, ...],
) -> None:
    ca = Authority(tmp_path, "other").ca
    url = {
        "wrong CA": guarded[0].url,
        "plain": guarded[0].url.replace("qmqs", "qmq"),
        "by TLS": broker.url.replace("qmq:", "qmqs:"),
    }[how]
    arguments = () if how == "plain" else ("--tls-ca", str(ca))
    done = qmq(*command, *arguments, server=url)
    told = " ".join((done.stdout + done.stderr).split())  # `doctor` prints it as a finding
    assert done.exit_code == 1
    assert says.format(directory=tmp_path) in told
    assert "qmq serve" not in told


# --- at the socket of the data directory ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker that takes nobody without a client certificate and a token."""
    directory = tmp_path_factory.mktemp("closed")
    authority = Authority(directory / "tls")
    server = authority.issue()
    change_tokens(directory / "data" / "tokens.toml", lambda _: {"ops": TokenEntry(admin=True)})
    settings = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": authority.ca}
    with broker_process(directory / "data", **settings) as broker:
        yield broker


def test_a_probe_at_the_data_directory_needs_neither_token_nor_certificate(closed: BrokerProcess) -> None:
    assert qmq("ping", server=closed.url).exit_code == 1
    done = qmq("ping", "--data-dir", str(closed.path), server="qmqs://elsewhere.example")
    assert (done.exit_code, done.stderr) == (0, "")
    assert re.fullmatch(rf"{closed.path}: qmq 0\.\d+\.\d+, \d+\.\d\d ms\n", done.stdout)
    row = json.loads(qmq("ping", "--json", "--data-dir", str(closed.path)).stdout)
    assert row == {**row, "broker": str(closed.path), "reached": True, "asks_for_token": False}
    assert row["version"].startswith("0.")


def test_the_socket_gives_one_line_and_no_rights(closed: BrokerProcess) -> None:
    path = closed.path / "ping"
    state = path.lstat()
    assert (stat.S_ISSOCK(state.st_mode), stat.S_IMODE(state.st_mode)) == (True, 0o600)
    hello = frame(FrameKind.HELLO, 1, meta={"protocol": frames.PROTOCOL_VERSION, "client": "stranger"})
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(20)
        stranger.connect(str(path))
        with suppress(BrokenPipeError):
            stranger.sendall(hello + frame(FrameKind.SUBJECTS, 2))
        received = b""
        with suppress(ConnectionResetError):
            while part := stranger.recv(4_096):
                received += part
    assert json.loads(received or "{}").keys() <= {"version"}


@pytest.mark.parametrize("name", ["data", "a-long-name" * 20])
def test_the_socket_comes_and_goes_with_its_broker(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    assert len(str(tmp_path / ("a-long-name" * 20))) > 108  # more than the path of a socket may have
    with broker_process(path) as broker:
        assert qmq("ping", "--data-dir", str(path)).exit_code == 0
        broker.kill()
        done = qmq("ping", "--data-dir", str(path))
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith(f"qmq: {path}: no broker serves this directory, or it still reads its files")
        assert stat.S_ISSOCK((path / "ping").lstat().st_mode)
        assert qmq("verify", str(path)).exit_code == 0
        with qmq_process("ping", "--wait", "60", "--data-dir", str(path)) as waiting:
            broker.start()
            assert waiting.wait(60) == 0
        broker.stop()
    assert not (path / "ping").exists()
    assert qmq("ping", "--data-dir", str(path)).exit_code == 1
    assert qmq("ping", "--data-dir", str(path / "nothing")).exit_code == 1


def test_a_broker_whose_loop_hangs_fails_a_probe_at_its_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ping, "_TRY", 0.2)
    with broker_process(tmp_path) as frozen:
        frozen.send_signal(signal.SIGSTOP)
        done = qmq("ping", "--data-dir", str(tmp_path))
        frozen.send_signal(signal.SIGCONT)
    assert done.exit_code == 1
    assert "the broker did not answer within 0.2 s" in done.stderr


def test_a_broker_serves_also_where_no_socket_can_be(tmp_path: Path) -> None:
    (tmp_path / "ping").write_bytes(b"of somebody else")
    with broker_process(tmp_path) as broker:
        assert broker.logs(f"probes with --data-dir {tmp_path} get no answer: Address already in use")
        assert qmq("ping", server=broker.url).exit_code == 0
        assert qmq("ping", "--data-dir", str(tmp_path)).exit_code == 1
    assert (tmp_path / "ping").read_bytes() == b"of somebody else"


def test_an_address_and_a_directory_are_too_much(tmp_path: Path) -> None:
    assert qmq("ping", "--data-dir", str(tmp_path), "--server", "qmq://127.0.0.1:1").exit_code == 2
