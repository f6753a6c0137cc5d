"""qmq/cli/manage/completion.py: shells complete commands, options, and names that the broker has."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import qmq
from tests.broker_process import BrokerProcess, broker_process
from tests.certificates import TlsFilesOfTests
from tests.cli.commands import qmq as run


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_process(tmp_path_factory.mktemp("completion")) as broker:
        with qmq.connect_sync(broker.url) as client:
            for subject in ("shop.order.paid", "shop.order.created", "shop.mail", "hotel"):
                client.send(subject, b"x")
            for group in ("billing", "billing-test", "analytics"):
                with client.subscribe("shop.", group=group):
                    pass
        yield broker


def completed(words: str, server: str) -> list[str]:
    """Return the completions of a line, of which the last word, which may be empty, is not complete."""
    environment = {
        **os.environ, "COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_QMQ_COMPLETE": "bash_complete",
        "QMQ_SERVER": server,
    }  # fmt: skip
    code = "import sys; sys.argv[0] = 'qmq'; from qmq.cli.main import cli; cli(prog_name='qmq')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("qmq gr", ["groups"]),
        ("qmq groups sh", ["show"]),
        ("qmq groups show ", ["analytics", "billing", "billing-test"]),
        ("qmq groups show bill", ["billing", "billing-test"]),
        ("qmq consumers bill", ["billing", "billing-test"]),
        ("qmq dead-letters list an", ["analytics"]),
        ("qmq consume shop. --group b", ["billing", "billing-test"]),
        ("qmq consume sh", ["shop."]),
        ("qmq consume shop.", ["shop.mail", "shop.order."]),
        ("qmq produce shop.o", ["shop.order.created", "shop.order.paid"]),
        ("qmq peek ho", ["hotel"]),
        ("qmq ping --js", ["--json"]),
        ("qmq to", ["top", "tokens"]),
        ("qmq top --on", ["--once"]),
    ],
)
def test_names_come_from_the_broker(broker: BrokerProcess, words: str, names: list[str]) -> None:
    assert completed(words, broker.url) == names


def test_ids_of_dead_letters_are_completed(broker: BrokerProcess) -> None:
    with qmq.connect_sync(broker.url) as client, client.subscribe("bad.", group="bad") as consumer:
        client.send_many("bad.a", [b"1", b"2"])
        messages = consumer.pull(min_count=2)
        for message in messages:
            message.reject("no such address")
    ids = sorted(message.id for message in messages)
    assert completed("qmq dead-letters redrive bad ", broker.url) == ids
    assert completed("qmq dead-letters delete bad f00f", broker.url) == []


def test_nothing_is_said_where_no_broker_answers() -> None:
    assert completed("qmq groups show b", "qmq://127.0.0.1:1") == []
    assert completed("qmq groups show b", "http://nonsense") == []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert completed("qmq groups show b", f"127.0.0.1:{silent.getsockname()[1]}") == []
        assert time.monotonic() - began < 30


@pytest.mark.parametrize(("shell", "word"), [("bash", "complete"), ("zsh", "compdef"), ("fish", "complete")])
def test_each_shell_has_a_script(shell: str, word: str) -> None:
    done = run("completion", shell)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "_QMQ_COMPLETE" in done.stdout
    assert word in done.stdout
    assert run("completion", "tcsh").exit_code == 2


def test_bash_takes_the_script(broker: BrokerProcess, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    lines = f"""
        PATH={Path(sys.executable).parent}:$PATH
        eval "$(qmq completion bash)"
        COMP_WORDS=(qmq groups show bill) COMP_CWORD=3
        _qmq_completion qmq
        echo "${{COMPREPLY[@]}}"
    """
    environment = {**os.environ, "QMQ_SERVER": broker.url}
    done = subprocess.run([bash, "-c", lines], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "billing billing-test"


def test_names_of_a_broker_with_tls_are_completed(tmp_path: Path) -> None:
    files = TlsFilesOfTests.make(tmp_path / "tls")
    with broker_process(tmp_path / "data", **files.settings) as broker:
        with qmq.connect_sync(broker.url, tls_ca=files.authority.ca) as client:
            client.send("shop.mail", b"x")
        assert completed(f"qmq peek --tls-ca {files.authority.ca} sh", broker.url) == ["shop."]
        assert completed("qmq peek sh", broker.url) == []
