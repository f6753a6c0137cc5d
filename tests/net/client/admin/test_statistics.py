"""client.admin.stats at real brokers: the counts agree with what a test has sent and acknowledged."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import qmq
from tests.broker_process import broker_process
from tests.net.several import put, several


async def test_counts_agree_with_what_was_sent_and_acknowledged(tmp_path: Path) -> None:
    with broker_process(tmp_path) as broker:
        async with qmq.connect(broker.url, name="counting") as client:
            for number in range(30):
                await client.send(f"shop.{number % 3}", b"x" * 50, durability="flush" if number % 2 else "append")
            await client.send_many("log.app", [b"line"] * 100)
            async with client.subscribe("shop.", group="billing") as consumer:
                for message in [await consumer.pull(1) for _ in range(10)]:
                    await message[0].ack()
            with pytest.raises(qmq.UnknownGroup):
                await client.admin.consumers("nobody")
            (found,) = await client.admin.stats()
        (billing,) = found.groups
        assert (billing.name, billing.follows, billing.ready, billing.delivered, billing.acked) == (
            "billing", ["shop."], 20, 10, 10,
        )  # fmt: skip
        assert billing.oldest_unacked is not None
        assert timedelta() <= found.at - billing.oldest_unacked < timedelta(minutes=5)
        assert found.received == 130
        assert {one.name: (one.subjects, one.messages, one.received) for one in found.subjects} == {
            "shop": (3, 30, 30), "log": (1, 100, 100),
        }  # fmt: skip
        assert found.handed_messages >= 10
        assert found.handed_bytes > 10 * 50
        assert found.refused == {"unknown_group": 1}
        assert found.connections == 1
        assert found.totals.acked == 10
        assert found.received_bytes > 30 * 50 + 400
        assert (found.subject_count, found.group_count) == (4, 1)
        assert found.durations["fsync"].count >= 1
        assert found.durations["send"].count >= 30
        assert 0 < (found.durations["send"].quantile(0.5) or 0) < 60
        assert 0 < found.memory_bytes < 1 << 30
        assert found.files > 5
        assert found.threads >= 5
        assert 0 < found.cpu < 60
        assert found.started_at < found.at <= datetime.now(UTC)


async def test_each_broker_has_its_own(tmp_path: Path) -> None:
    async with several(tmp_path) as brokers, qmq.connect(brokers.url) as client:
        await put(brokers.one(0), "a", [b"x"])
        await put(brokers.one(1), "b", [b"y", b"z"])
        found = {stats.broker: stats.received for stats in await client.admin.stats()}
    assert found == {brokers.address(0): 1, brokers.address(1): 2}


def test_a_sync_client_has_the_same(tmp_path: Path) -> None:
    with broker_process(tmp_path) as broker, qmq.connect_sync(broker.url) as client:
        client.send("a.b", b"x")
        (found,) = client.admin.stats()
    assert (found.received, [one.name for one in found.subjects]) == (1, ["a"])


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.001), (0.5, 0.001), (0.9, 0.004), (1.0, None)])
def test_a_quantile_is_the_bound_of_its_bucket(share: float, expected: float | None) -> None:
    histogram = qmq.Histogram(10, 0.5, [(0.0005, 0), (0.001, 5), (0.002, 8), (0.004, 9)])
    assert histogram.quantile(share) == expected
    assert qmq.Histogram(0, 0.0, [(0.001, 0)]).quantile(share) is None
