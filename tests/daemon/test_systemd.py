"""qmq/daemon/systemd.py: what goes to the socket of NOTIFY_SOCKET, and what does not."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from qmq.daemon.systemd import ServiceManager


def test_notices_are_datagrams_of_lines(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    environment = {"NOTIFY_SOCKET": address, "OTHER": "stays"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(address)
        manager = ServiceManager(environment)
        manager.ready("serving")
        manager.stopping()
        assert [receiver.recv(4096) for _ in range(2)] == [b"READY=1\nSTATUS=serving", b"STOPPING=1"]
    assert environment == {"OTHER": "stays"}, "no child process of the broker speaks for it"


def test_a_socket_in_the_abstract_namespace() -> None:
    name = f"qmq-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{name}")
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).watchdog()
        assert receiver.recv(4096) == b"WATCHDOG=1"


def test_a_manager_that_does_not_listen_harms_nothing(tmp_path: Path) -> None:
    for environment in ({}, {"NOTIFY_SOCKET": str(tmp_path / "nobody")}):
        manager = ServiceManager(environment)
        manager.ready("serving")
        assert manager.watchdog_s is None


@pytest.mark.parametrize(
    ("watchdog", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_fed_when_it_is_asked_for(watchdog: dict[str, str], seconds: float | None) -> None:
    assert ServiceManager({"NOTIFY_SOCKET": "@nobody", **watchdog}).watchdog_s == seconds
