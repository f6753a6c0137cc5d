"""``qmq archive --seal``: have the broker of a data directory seal the segments that it writes."""

from __future__ import annotations

from pathlib import Path

from qmq import connect
from qmq.archive.data_directory import has_segments, is_live
from qmq.cli.common.connect import run
from qmq.errors import InvalidOption
from qmq.net.client.address import shown_url
from qmq.net.client.admin.results import SealedLog


def seal_source(source: Path, server: str, timeout: float) -> None:
    """Have the broker at *server* seal its segments, if a broker runs on *source*.

    Raises InvalidOption if that broker has another data directory; StorageError, and what a client raises.
    """
    if not is_live(source):
        return

    async def seal() -> list[SealedLog]:
        async with connect(server, admin_timeout=timeout) as client:
            return await client.admin.roll()

    rows = run(seal())
    # The segment that is now being written begins where the sealed one ends.
    if not has_segments(source, [(row.partition, row.end) for row in rows]):
        raise InvalidOption(
            f"the broker at {shown_url(server)} has another data directory than {source}; "
            "give the right one with --server"
        )
