"""The connection of a restore to a broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq.errors import ConnectionLost, Fenced, InvalidOption
from qmq.format.layout import MESSAGE_ID
from qmq.net.client.address import parse_url
from qmq.net.client.restore import RestoreTarget
from tests.broker.transfer.test_restore import RUN, frame_of
from tests.broker_process import running_broker


async def test_what_is_stored_is_found_on_another_connection(tmp_path: Path) -> None:
    frame = frame_of(b"x", b"y")
    async with running_broker(tmp_path) as url:
        (address,) = parse_url(url)
        first = await RestoreTarget.open(address)
        with pytest.raises(Fenced):
            await first.store(bytes(frame))
        begun = await first.begin(RUN, None, None)
        assert (begun.found, begun.following) == ([], 0)
        (end,) = await first.store(bytes(frame))
        assert end > begun.ends[0]
        second = await RestoreTarget.open(address)
        again = await second.begin(RUN, None, begun.ends)
        assert (again.ends, again.following) == ([end], 2)
        ((_, _, places),) = again.found
        assert places[1] - places[0] == 2
        assert len(again.found[0][0]) == MESSAGE_ID.size - 10
        with pytest.raises(Fenced):
            await first.store(bytes(frame))
        with pytest.raises(InvalidOption):
            await second.begin(b"short", None, None)
        assert first.most_bytes > 1 << 20
        await first.close()
        await second.close()


async def test_an_error_names_the_address_of_an_unreachable_broker() -> None:
    (address,) = parse_url("qmq://127.0.0.1:1")
    with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1:1"):
        await RestoreTarget.open(address)
