"""The bound of subjects: what counts, and that no token uses up the room of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.broker.ports.commands import Connected
from qmq.broker.ports.effects import Refused, Sent
from qmq.broker.ports.rights import Rights
from qmq.broker.publish import publish
from qmq.broker.retention import idle_subjects
from qmq.errors import TooManySubjects
from qmq.format.layout import LANE_ORDERED
from qmq.format.source import NO_ADDRESS
from qmq.storage import store
from tests.broker.harness import Driven
from tests.broker.retention.test_retention import driven_in, settle

HOUR_MS = 3_600_000


def added(driven: Driven, connection: int, prefix: str, most: int) -> int:
    """Send to new subjects of a prefix; return how many were taken before one was refused."""
    for number in range(most):
        (said,) = driven.do(driven.send_command({f"{prefix}{number}": [b"x"]}, connection=connection))
        if isinstance(said, Refused):
            assert isinstance(said.error, TooManySubjects)
            assert f"{prefix!r}, by which token" in str(said.error)
            return number
    return most


def with_tokens(driven: Driven) -> None:
    for connection, prefix in enumerate(("a.", "b.", "c."), 1):
        driven.do(Connected(connection, NO_ADDRESS, Rights(prefix[0], produce=[prefix])))
    driven.do(Connected(9, NO_ADDRESS, Rights("all", produce=[""])))


def test_a_token_leaves_room_for_the_subjects_of_others(tmp_path: Path) -> None:
    driven = Driven(tmp_path, max_subjects=16)
    with_tokens(driven)
    counts = [added(driven, connection, prefix, 16) for connection, prefix in ((1, "a."), (2, "b."), (3, "c."))]
    assert counts == [8, 4, 2]
    assert added(driven, 1, "a.", 8) == 8, "they exist"
    for number in range(2):  # a token for everything, and a client without one, take all that is left
        driven.do(driven.send_command({f"d.{number}": [b"x"]}, connection=9))
    (refused,) = driven.do(driven.send_command({"d.2": [b"x"]}, connection=10))
    assert isinstance(refused, Refused)
    assert "there are 16 subjects" in str(refused.error)
    driven.close()


def test_a_token_leaves_room_for_the_slots_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (store, publish):
        monkeypatch.setattr(module, "MOST_LANES", 8)
    driven = Driven(tmp_path)
    with_tokens(driven)
    for connection, name, most in ((1, "a.x", 4), (2, "b.x", 2)):
        driven.do(driven.send_command({name: [b"x"]}, connection=connection))
        for slot in range(most + 1):
            command = driven.send_command({name: [b"x"]}, connection=connection, lane=LANE_ORDERED + slot)
            (said,) = driven.do(command)
            assert isinstance(said, Sent if slot < most else Refused), said
    driven.close()


def test_subjects_whose_messages_are_gone_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor before they are forgotten."""
    monkeypatch.setattr(idle_subjects, "LOOK_US", 1_000 * HOUR_MS * 1_000)
    driven = driven_in(tmp_path, max_subjects=2)
    for number in range(8):  # four times as many may be known
        command = driven.send_command({f"s.{number}": [b"x" * 900] * 3})
        (said,) = driven.do(command)
        if number >= 2 and number % 2 == 0:
            assert isinstance(said, Refused), said
            driven.advance(2 * HOUR_MS)
            driven.store.partitions[0].seal()
            settle(driven)
            driven.change_producer()
            (said,) = driven.do(driven.send_command({f"s.{number}": [b"x" * 900] * 3}))
        assert isinstance(said, Sent), said
    driven.restart()
    driven.advance(2 * HOUR_MS)
    driven.store.partitions[0].seal()
    settle(driven)
    (said,) = driven.do(driven.send_command({"s.8": [b"x"]}))
    assert isinstance(said, Refused)
    assert "8 subjects" in str(said.error)
    driven.close()
