"""Claims of producers: each belongs to one connected client."""

from __future__ import annotations

from pathlib import Path

from qmq.broker.ports.commands import Claim, Disconnected
from qmq.broker.ports.effects import Claimed, Refused
from qmq.errors import ProducerInUse
from tests.broker.harness import Driven

JOB, OTHER = b"j" * 16, b"o" * 16
ONE, TWO = b"1" * 16, b"2" * 16


def claims(driven: Driven, connection: int, producer_id: bytes, client: bytes) -> bool:
    """Return whether the broker lets that client have that producer."""
    request = driven.request()
    (answer,) = driven.do(Claim(connection, request, producer_id, client))
    if isinstance(answer, Refused):
        assert isinstance(answer.error, ProducerInUse)
        assert not answer.error.retryable
        return False
    assert answer == Claimed(connection, request)
    return True


def test_a_producer_belongs_to_one_connected_client(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    assert claims(driven, 1, JOB, ONE)
    assert claims(driven, 1, JOB, ONE), "again is no harm"
    assert not claims(driven, 2, JOB, TWO)
    assert claims(driven, 2, OTHER, TWO)
    driven.do(Disconnected(2))
    assert not claims(driven, 3, JOB, TWO)
    driven.do(Disconnected(1))
    assert claims(driven, 3, JOB, TWO)
    assert not claims(driven, 4, JOB, ONE)
    driven.close()


def test_a_client_keeps_its_producer_on_its_next_connection(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    assert claims(driven, 1, JOB, ONE)
    assert claims(driven, 2, JOB, ONE)
    driven.do(Disconnected(1))
    assert not claims(driven, 3, JOB, TWO), "the old connection had it no more"
    driven.do(Disconnected(2))
    assert claims(driven, 3, JOB, TWO)
    driven.close()


def test_a_connection_has_one_producer_at_a_time(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    assert claims(driven, 1, JOB, ONE)
    assert claims(driven, 1, OTHER, ONE)
    assert claims(driven, 2, JOB, TWO)
    assert not claims(driven, 2, OTHER, TWO)
    assert not claims(driven, 1, JOB, ONE)
    assert claims(driven, 3, OTHER, ONE), "what was refused changes nothing"
    driven.close()
