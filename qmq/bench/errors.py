"""What can go wrong in a measurement."""

from __future__ import annotations

from qmq.errors import QmqError


class BenchFailed(QmqError):
    """A process of the bench ended early, or what was moved is not what was sent: no number of it counts."""

    code = "bench_failed"
