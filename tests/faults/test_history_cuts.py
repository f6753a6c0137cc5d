"""The connections of readers of history, and of restores, are cut before, within and after every frame."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

import qmq
from qmq.errors import ConnectionLost
from qmq.net.client import log_reader as log_reading
from qmq.net.client.address import parse_url
from qmq.net.client.log_reader import LogReader
from qmq.net.protocol.frames import FrameKind
from tests.broker_process import running_broker
from tests.faults.proxy import Fault, Passing, Proxy
from tests.restore.archived import orders_archive, restoring

#: Where a frame is cut, as a share of it.
PLACES = (0.0, 0.5, 1.0)


class Cutting:
    """A plan that notes what passes, and cuts one frame once."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._first = 0
        self._cut: tuple[Passing, float] | None = None
        self.passed: list[Passing] = []
        proxy.plan = self

    def begin(self, cut: tuple[Passing, float] | None) -> None:
        """A session begins; in it that frame is cut there."""
        self._first, self._cut = self._proxy.connections, cut
        self.passed = []

    def __call__(self, passing: Passing) -> Fault | None:
        passing = passing._replace(connection=passing.connection - self._first)
        self.passed.append(passing)
        if self._cut is None or self._cut[0][:3] != passing[:3]:
            return None
        place, self._cut = self._cut[1], None
        return Fault("close", int(passing.size * place))

    def assert_all_cut(self, kinds: Iterable[FrameKind]) -> None:
        """Frames of these were cut before, within and after."""
        print(f"{sum(self._proxy.struck.values())} cuts: {dict(self._proxy.struck)}")
        missed = {(kind.name, where) for kind in kinds for where in ("before", "within", "after")}
        assert missed <= {(kind, where) for _, _, kind, where in self._proxy.struck}
        assert self._cut is None


def everything(url: str) -> list[bytes]:
    """All that a reader of history can be told."""
    reader = LogReader(parse_url(url)[0])
    try:
        _, spans = reader.segments(0)
        start, end = spans[0].base, spans[-1].end
        batches = b"".join(reader.batches(0, start, end))
        return [repr(spans).encode(), batches, reader.read(0, start, end - start)]
    finally:
        reader.close()


async def test_a_cut_at_any_frame_of_a_reader_is_borne(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reading, "PIECE_BYTES", 20_000)
    async with running_broker(tmp_path / "data") as url:
        async with qmq.connect(url) as client:
            for number in range(5):
                await client.send_many(f"a.{number}", [b"%d" % number * 10_000] * 2)
        wanted = await asyncio.to_thread(everything, url)
        async with Proxy(int(url.rpartition(":")[2])) as proxy:
            cutting = Cutting(proxy)
            cutting.begin(None)
            assert await asyncio.to_thread(everything, proxy.url) == wanted
            for passing in cutting.passed.copy():
                for place in PLACES:
                    cutting.begin((passing, place))
                    assert await asyncio.to_thread(everything, proxy.url) == wanted
            history = {
                FrameKind.SEGMENTS,
                FrameKind.SEGMENT_LIST,
                FrameKind.BATCHES,
                FrameKind.BATCH_LIST,
                FrameKind.READ_LOG,
                FrameKind.LOG_BYTES,
            }
            cutting.assert_all_cut({FrameKind.HELLO, FrameKind.WELCOME} | history)


async def test_a_cut_at_any_frame_of_a_restore_is_borne(tmp_path: Path) -> None:
    wanted, runs = orders_archive(tmp_path, 30), 1
    async with running_broker(tmp_path / "target") as url, Proxy(int(url.rpartition(":")[2])) as proxy:
        cutting = Cutting(proxy)
        cutting.begin(None)
        await restoring(tmp_path, proxy.url).run()
        for passing in cutting.passed.copy():
            for place in PLACES:
                cutting.begin((passing, place))
                try:  # since then: everything, and another restore than those before
                    await restoring(tmp_path, proxy.url, since_us=runs).run()
                except ConnectionLost:  # of the first connection
                    await restoring(tmp_path, proxy.url, since_us=runs).run()
                runs += 1
        cutting.assert_all_cut({FrameKind.HELLO, FrameKind.WELCOME, FrameKind.RESTORE, FrameKind.RESTORED})
        async with qmq.connect(url) as client:
            assert sum([info.messages async for info in client.subjects()]) == runs * len(wanted)
