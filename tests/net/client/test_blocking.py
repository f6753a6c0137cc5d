"""qmq/net/client/blocking.py: a connection without asyncio. tests/cli/manage/test_ping.py has more of ``ping``."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from qmq.errors import ConnectionLost, InvalidOption, ProtocolError
from qmq.net.client.address import Address, parse_url
from qmq.net.client.blocking import answering_within, ping
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind
from tests.broker_process import broker_process


def test_a_broker_answers_in_turn(tmp_path: Path) -> None:
    with broker_process(tmp_path) as broker, answering_within(60, parse_url(broker.url)[0]) as connection:
        assert type(connection.welcome["store_id"]) is bytes
        with pytest.raises(InvalidOption, match="knows no action"):
            connection.ask(FrameKind.ADMINISTER, meta=frames.pack_meta({"action": "sing"}))
        answer = connection.ask(FrameKind.ADMINISTER, meta=frames.pack_meta({"action": "groups", "after": ""}))
        assert answer.kind == FrameKind.ADMINISTERED
        assert ping(parse_url(broker.url)[0], 60).round_trip > 0


def test_time_runs_over_all_answers() -> None:
    """One byte in time does not give the next one more time."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def trickle() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"\x30")
                while connection.recv(1_000):  # until the client has given up
                    pass

        thread = threading.Thread(target=trickle)
        thread.start()
        with pytest.raises(ConnectionLost, match=r"did not answer within 0\.2 s"):
            ping(Address(*server.getsockname()), 0.2)
        thread.join()


@pytest.mark.parametrize("answer", [b"", b"\x10\0\0\0\x81\0\0\0" + bytes(8), b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_is_no_broker_is_refused(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1_000)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises((ConnectionLost, ProtocolError)):
            ping(Address(*server.getsockname()), 60)
        thread.join()


def test_it_loads_little() -> None:
    code = "import qmq.net.client.blocking, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"asyncio", "numpy", "uvloop", "rich", "click"}.isdisjoint(loaded)
    assert "qmq.net.protocol.frames" in loaded
