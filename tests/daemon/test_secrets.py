"""Secrets stand nowhere but in the file that has them: looked for in processes, logs, errors and files."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import qmq
from qmq.tokens import TokenEntry, change_tokens, hash_of, new_secret
from tests.broker_process import BrokerProcess, executed
from tests.cli.commands import qmq_process

TIMEOUT_S = 60


def seen_of(pid: int) -> bytes:
    """Return what others on a machine see of a process of theirs: its arguments, its environment, its name."""
    return b"\n".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ", "comm", "status"))


@contextmanager
def started(broker: BrokerProcess) -> Iterator[BrokerProcess]:
    """Start a broker; it is gone at the end."""
    try:
        broker.start()
        yield broker
    finally:
        broker.close()


def use_until_it_ends(url: str, token: str, path: Path, texts: dict[str, bytes]) -> None:
    """Ask with a token, end it, and ask until the broker refuses. Raises Unauthorized."""
    with qmq.connect_sync(url, token=token) as client:
        texts["a client"] = repr(client.admin.info()).encode()
        heir = TokenEntry(admin=True, secrets=(hash_of(new_secret()),))
        change_tokens(path, lambda _: {"heir": heir})
        while True:
            client.admin.info()


def ended(*arguments: str) -> tuple[int, bytes]:
    """Run a command; return its exit code and all that it prints."""
    with qmq_process(*arguments) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, out + err


def test_a_secret_is_shown_once_and_is_in_no_process_log_error_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setenv("QMQ_STATE_DIR", str(tmp_path / "state"))
    for name in ("QMQ_TOKEN", "QMQ_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    data = tmp_path / "data"
    monkeypatch.setenv("QMQ_TOKENS_FILE", str(data / "tokens.toml"))
    code, created = ended("tokens", "create", "ops", "--admin", "--json")
    assert code == 0
    token = str(json.loads(created.splitlines()[0])["token"])
    secret = token.partition(":")[2].encode()
    assert created.count(secret) == 1
    (tmp_path / "secret").mkdir()
    file = tmp_path / "secret" / "token"
    file.write_text(token)
    wrong = tmp_path / "secret" / "wrong"
    wrong.write_text(f"nobody:{secret.decode()}")
    texts: dict[str, bytes] = {}

    with started(BrokerProcess(data, executed, log_level="debug")) as broker:
        at = ("--server", broker.url)
        texts["the broker"] = seen_of(broker.pid)
        with qmq_process("consume", "shop.", "--group", "g", *at, "--token-file", str(file)) as consumer:
            assert ended("produce", "shop.a", "body", *at, "--token-file", str(file))[0] == 0
            assert consumer.stdout is not None
            assert b"body" in consumer.stdout.readline()
            texts["a command"] = seen_of(consumer.pid)
            change_tokens(data / "tokens.toml", lambda tokens: {"owner": tokens["ops"]})  # of another name, so it ends
            token = f"owner:{secret.decode()}"
            file.write_text(token)
            more = ("produce", "shop.a", "more", *at, "--token-file", str(file))
            assert any(ended(*more)[0] == 0 for _ in range(20)), "the broker looks at the file once a second"
            line = consumer.stdout.readline()
            assert b"more" in line, consumer.communicate()
        for command in (("info", "--json"), ("doctor",), ("tokens", "list", "--json"), ("groups",)):
            options = () if command[0] == "tokens" else (*at, "--token-file", str(file))
            texts[" ".join(command)] = ended(*command, *options)[1]
        for command in (("ping",), ("groups",), ("produce", "shop.a", "x"), ("find", "shop.")):
            code, texts[f"{command[0]} with a wrong token"] = ended(*command, *at, "--token-file", str(wrong))
            assert code == 1
        try:
            with qmq.connect_sync(broker.url, token=wrong.read_text()):
                pass
        except qmq.Unauthorized:
            texts["an error"] = traceback.format_exc().encode()
        with pytest.raises(qmq.Unauthorized) as caught:
            use_until_it_ends(broker.url, token, data / "tokens.toml", texts)
        texts["an error of a token that ended"] = repr(caught.value).encode()
        assert broker.logs("login")
        texts["the log"] = broker.log().encode()
    texts["the log of clients"] = caplog.text.encode()
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.parent != file.parent:
            texts[str(path)] = path.read_bytes()
    assert "an error" in texts
    assert [name for name, text in texts.items() if secret in text] == []


def values_in_frames(error: BaseException) -> list[str]:
    """Return the values of all frames below the caller's, as tools show them that report errors."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    return [repr(value) for frame in frames for value in frame.f_locals.values()]


@pytest.mark.parametrize("wrong", ["qmq_secret", ":qmq_secret", "a:qmq_secret\u017e", b"a:qmq_secret", ["qmq_secret"]])
@pytest.mark.parametrize("connect", [qmq.connect, qmq.connect_sync])
def test_no_frame_shows_a_wrong_token(connect: Any, wrong: Any) -> None:
    with pytest.raises(qmq.InvalidOption) as caught:
        connect("qmq://127.0.0.1:1", token=wrong)
    assert "token" in str(caught.value)
    assert [value for value in values_in_frames(caught.value) if "qmq_secret" in value] == []


@pytest.mark.parametrize("variable", ["QMQ_TOKEN", "QMQ_TOKEN_FILE"])
def test_no_frame_shows_a_wrong_token_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    file = tmp_path / "token"
    file.write_text("qmq_secret")
    monkeypatch.delenv("QMQ_TOKEN", raising=False)
    monkeypatch.setenv(variable, "qmq_secret" if variable == "QMQ_TOKEN" else str(file))
    with pytest.raises(qmq.InvalidOption) as caught:
        qmq.connect("qmq://127.0.0.1:1")
    assert [value for value in values_in_frames(caught.value) if "qmq_secret" in value] == []


def test_a_token_on_the_command_line_is_warned_of(tmp_path: Path) -> None:
    code, told = ended("ping", "--server", "qmq://127.0.0.1:1", "--token", "ops:qmq_secret")
    assert code == 1
    assert b"--token can be seen in the list of processes; use QMQ_TOKEN or --token-file" in told
    assert b"qmq_secret" not in told
