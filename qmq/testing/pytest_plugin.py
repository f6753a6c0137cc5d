"""The pytest fixture ``qmq_broker``. pytest imports this module at each start, so it imports nothing else of QMQ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from qmq.testing.local_broker import LocalBroker


@pytest.fixture
def qmq_broker() -> Iterator[LocalBroker]:
    """A real broker for one test, in a temporary directory; QMQ_SERVER is its URL. See ``qmq.testing.broker``."""
    from qmq.testing import broker

    with broker() as running:
        yield running
