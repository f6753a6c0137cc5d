"""One bit turned over anywhere in an answer on its way, the disk being fine: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

import qmq
from qmq.net.protocol.frames import FRAME_SIZE, FrameKind
from tests.broker_process import running
from tests.fake_disk import FakeDisk
from tests.faults.proxy import TO_CLIENT, Fault, Passing, Proxy

SEED: Final = 5
FLIPS: Final = 150
TIMEOUT_S: Final = 60


class FlipOne:
    """A plan: the next answer with messages has one bit turned over: that one, else any behind its header."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.armed = False
        self.bit: int | None = None

    def __call__(self, passing: Passing) -> Fault | None:
        is_empty = passing.size == FRAME_SIZE
        if not self.armed or is_empty or passing.direction != TO_CLIENT or passing.kind != FrameKind.MESSAGES:
            return None
        self.armed = False
        bit = self._random.randrange(8 * FRAME_SIZE, 8 * passing.size) if self.bit is None else self.bit
        return Fault(passed=passing.size, flip=bit)


async def fill(url: str) -> list[tuple[str, bytes]]:
    """Batches of one run and of several, with keys and without; what each prefix gets lies in pieces or whole."""
    sent = list[tuple[str, bytes]]()
    async with qmq.connect(url) as client:
        for number in range(4):
            subject = f"a.{number % 2}"
            bodies = [b"%d-%d" % (number, index) for index in range(5)]
            await client.send_many(subject, bodies)
            sent += [(subject, body) for body in bodies]
            for name in ("a.x", "b.y", "a.x", "a.z"):
                client.send_nowait(name, b"%s-%d" % (name.encode(), number), key=f"key-{number}", tags=["t"])
            await client.flush()
            sent += [(name, b"%s-%d" % (name.encode(), number)) for name in ("a.x", "b.y", "a.x", "a.z")]
    return sent


@pytest.mark.parametrize("group", ["g", None])
@pytest.mark.parametrize(("prefix", "max_count"), [("", 100), ("a.", 100), ("a.0", 3)])
async def test_damage_on_the_way_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, max_count: int, group: str | None
) -> None:
    monkeypatch.setattr("qmq.net.client.broker_link.GOOD_AFTER", 0.0)  # else the waits between tries grow
    print(f"seed {SEED}")
    plan = FlipOne(SEED)
    async with running(tmp_path, FakeDisk(), scrub_bytes_per_s=0) as broker:
        sent = await fill(broker.url)
        expected = sorted(body for subject, body in sent if subject.startswith(prefix))
        async with Proxy(broker.address[1], plan) as proxy, qmq.connect(proxy.url) as client:
            for number in range(FLIPS):
                name = None if group is None else f"{group}-{number}"
                async with client.subscribe(prefix, group=name, start="first") as consumer:
                    plan.armed = True
                    got = list[bytes]()
                    async with asyncio.timeout(TIMEOUT_S):
                        while len(got) < len(expected):
                            got += [message.body for message in await consumer.pull(max_count)]
                    assert not plan.armed
                    assert sorted(got) == expected
                    assert consumer.damaged == 0
            print(dict(proxy.struck))
            assert proxy.struck["flip", TO_CLIENT, "MESSAGES", ""] == FLIPS
        assert broker.counters.damaged == {}
        assert broker.counters.sound_reports > FLIPS // 8


@pytest.mark.parametrize(("group", "first_bit"), [(None, 0), ("g", 1)])
async def test_a_damaged_frame_header_ends_the_connection_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str | None, first_bit: int
) -> None:
    """Every other bit: who follows alone misses nothing, a group at most what that frame and the next one had."""
    monkeypatch.setattr("qmq.net.client.consumer.pull.ROUND", 0.1)
    monkeypatch.setattr("qmq.net.client.consumer.pull.LATE", 0.1)
    monkeypatch.setattr("qmq.net.client.connection.STILL_AFTER", 0.1)
    monkeypatch.setattr("qmq.net.client.broker_link._TICK", 0.05)
    monkeypatch.setattr("qmq.net.client.broker_link.GOOD_AFTER", 0.0)  # else the waits between tries grow
    plan = FlipOne()
    async with running(tmp_path, FakeDisk(), scrub_bytes_per_s=0) as broker:
        sent = await fill(broker.url)
        expected = [body for subject, body in sent if subject.startswith("a.0")]
        missed = Counter[int]()
        async with Proxy(broker.address[1], plan) as proxy, qmq.connect(proxy.url) as client:
            for bit in range(first_bit, 8 * FRAME_SIZE, 2):
                name = f"{group}-{bit}" if group is not None else None
                async with client.subscribe("a.0", group=name, start="first") as consumer:
                    got = [message.body for message in await consumer.pull(2)]
                    plan.armed, plan.bit = True, bit
                    while got[-1] != expected[-1]:
                        got += [message.body for message in await consumer.pull(2)]
                    assert not plan.armed
                    missed[len(expected) - len(got)] += 1
                    assert got == (expected if group is None else [body for body in expected if body in got])
                    assert set(expected) - set(got) <= set(expected[2:6])
        print(dict(missed), dict(proxy.struck))
        assert proxy.struck["flip", TO_CLIENT, "MESSAGES", ""] == 4 * FRAME_SIZE
        assert missed[0]
