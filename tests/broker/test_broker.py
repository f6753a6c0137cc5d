"""Every command goes to the part that takes it, and every read back to the part that asked for it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from qmq.broker.ports.commands import (
    Command,
    Find,
    Get,
    HandOver,
    Pull,
    ReadDone,
    ReadLog,
    Restore,
    Send,
    TraceConsumer,
    TraceMessage,
)
from qmq.broker.ports.effects import Asker, Refused, first_number
from qmq.errors import BrokerStopping
from qmq.net.protocol.selection import Selection
from tests.broker.harness import Driven


def test_there_is_somebody_for_each(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    handling = driven.broker._dispatch
    assert set(handling._take) == set(get_args(Command)) - {Send}
    assert set(handling._read_done) == set(Asker)
    driven.close()


def test_a_read_that_nobody_asked_for_is_a_fault(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    with pytest.raises(KeyError):
        driven.broker.handle(ReadDone(first_number(Asker.REPORTS) + 5, None), driven.now)
    driven.close()


def test_a_broker_that_stops_begins_nothing(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    subscription = driven.subscribe("a.")
    driven.broker.stop()
    begun = [
        driven.send_command({"a.x": [b"1"]}),
        driven.pull_command(subscription),
        HandOver(1, driven.request(), memoryview(b""), "g", 1, 1, None, ""),
        Restore(1, driven.request(), memoryview(b"")),
        ReadLog(1, driven.request(), 0, 0, 1),
        Get(1, driven.request(), bytes(16)),
        Find(1, driven.request(), Selection()),
        TraceMessage(1, driven.request(), bytes(16)),
        TraceConsumer(1, driven.request(), "c"),
    ]
    assert {type(one) for one in begun} == {
        Send,
        Pull,
        HandOver,
        Restore,
        ReadLog,
        Get,
        Find,
        TraceMessage,
        TraceConsumer,
    }
    said = driven.do(*begun)
    assert [type(one) for one in said] == [Refused] * 9
    assert all(type(one.error) is BrokerStopping for one in said if isinstance(one, Refused))
    driven.close()
