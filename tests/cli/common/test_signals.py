"""qmq/cli/common/signals.py: Ctrl-C and SIGTERM end a command silently while it is loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from qmq.cli.common.signals import ending_at_once, noting_hangups

#: Sends itself the signal in the middle of an import: of click, as the command begins, or of a command's module.
LOADING = """
import os, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Interrupting())
from qmq.cli.main import cli
cli(["subjects", "--server", "qmq://127.0.0.1:1"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["click", "qmq.cli.manage.subjects"])
def test_a_signal_in_the_middle_of_an_import_leaves_no_traceback(name: str, number: signal.Signals) -> None:
    code = LOADING.format(name=name, number=int(number))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", -number)


def test_handlers_are_put_back_and_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)
    try:
        with ending_at_once():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is before[1]
    finally:
        signal.signal(signal.SIGINT, before[0])


def test_in_another_thread_it_changes_nothing() -> None:
    seen = []

    def load() -> None:
        with ending_at_once():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_a_hangup_is_noted_and_ends_nothing() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with noting_hangups() as hung_up:
        assert not hung_up()
        signal.raise_signal(signal.SIGHUP)
        assert hung_up()
    assert signal.getsignal(signal.SIGHUP) == before
