"""Settings of groups and modes, as a client takes them, and as a broker answers."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qmq
import qmq.testing
from qmq.errors import GroupMismatch, InvalidOption, UsageError
from qmq.net.client.group_settings import packed_settings, shown_settings, terms_of
from tests.broker_process import broker_process, running_broker

GIVEN: dict[str, Any] = {
    "max_attempts": 3,
    "retry_delays": (0.5, 2),
    "expire_after": 3600,
    "ack_deadline": 0.1,
    "tags": ["a", "b"],
}
PACKED = {
    "max_attempts": 3,
    "retry_delays_us": [500_000, 2_000_000],
    "expire_after_us": 3_600_000_000,
    "ack_deadline_us": 100_000,
    "tags": ["a", "b"],
}


#: Values that are no share.
WRONG_SHARES: list[Any] = [
    -0.1,
    1.1,
    -1,
    2,
    float("nan"),
    float("inf"),
    float("-inf"),
    "0.5",
    "",
    True,
    False,
    [0.1],
    1j,
]


def test_times_are_seconds_here_and_microseconds_there() -> None:
    assert packed_settings(GIVEN) == PACKED
    assert packed_settings(shown_settings(PACKED)) == PACKED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_attempts", "3"),
        ("max_attempts", 3.0),
        ("max_unacked", True),
        ("retry_delays", 5),
        ("retry_delays", "5"),
        ("retry_delays", [-1]),
        ("retry_delays", ["1x"]),
        ("expire_after", float("nan")),
        ("expire_after", float("inf")),
        ("ack_deadline", -0.1),
        ("ack_deadline", 1e9),
        *(("priority_share", value) for value in WRONG_SHARES),
        ("tags", "vip"),
        ("tags", [1]),
        ("colour", 1),
    ],
)
def test_what_no_setting_can_be_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidOption, match=name.removesuffix("s")):
        packed_settings({name: value})


def test_a_consumer_without_a_group_has_neither_mode_nor_settings() -> None:
    assert terms_of(None, "reliable", {"tags": None}).settings == {}
    for mode, settings in (("at_most_once", {}), ("broadcast", {}), ("reliable", {"tags": ["a"]})):
        with pytest.raises(InvalidOption, match="give a group"):
            terms_of(None, mode, settings)
    with pytest.raises(InvalidOption, match="reliable, at_most_once, broadcast"):
        terms_of("g", "often", {})


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of the client."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_new_group_is_as_asked_for_and_others_are_warned_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_broker(tmp_path) as url, qmq.connect(url) as client:
        with caplog.at_level(logging.WARNING):
            async with client.subscribe("a.", group="g", **GIVEN):
                (info,) = await client.admin.groups("g")
                assert {name: info.settings[name] for name in GIVEN} == GIVEN | {"retry_delays": [0.5, 2]}
            assert not warned(caplog)
            async with client.subscribe("a.", group="g", max_attempts=4, max_session_expiries=3):
                pass
        assert ["max_attempts=3" in message and "qmq groups set" in message for message in warned(caplog)] == [True]
        with pytest.raises(InvalidOption, match="from 1 to 65535"):
            async with client.subscribe("a.", group="h", max_attempts=0):
                pass
        with pytest.raises(GroupMismatch, match="is reliable"):
            async with client.subscribe("a.", group="g", mode="broadcast"):
                pass


async def test_each_consumer_of_a_broadcast_gets_every_message(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url, qmq.connect(url) as client:
        await client.send("a.x", b"before")
        async with (
            client.subscribe("a.", group="g", consumer="one", mode="broadcast") as one,
            client.subscribe("a.", group="g", consumer="two", mode="broadcast") as two,
        ):
            await client.send("a.x", b"after")
            for consumer in (one, two):
                (message,) = await consumer.pull(timeout=30)
                assert message.body == b"after"
                message.ack()
        assert sorted(info.name for info in await client.admin.groups()) == ["g@one", "g@two"]


def test_a_group_of_the_plain_client_has_settings_too(tmp_path: Path) -> None:
    with (
        broker_process(tmp_path) as broker,
        qmq.connect_sync(broker.url) as client,
        client.subscribe("a.", group="g", mode="broadcast", consumer="one", max_attempts=2) as consumer,
    ):
        client.send("a.x", b"1")
        assert [message.body for message in consumer.pull(timeout=30)] == [b"1"]


async def test_an_at_most_once_group_gets_each_message_once_and_acknowledges_none(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as url, qmq.connect(url) as client:
        await client.send_many("a.x", [b"%d" % number for number in range(10)])
        async with (
            client.subscribe("a.", group="g", mode="at_most_once") as one,
            client.subscribe("a.", group="g", mode="at_most_once") as two,
        ):
            got = []
            for consumer in (one, two):
                for message in await consumer.pull(5, 5, timeout=30):
                    async with message:
                        got.append(message.body)
                with pytest.raises(UsageError):
                    await message.nack()
                await consumer.flush()
            assert sorted(got) == [b"%d" % number for number in range(10)]
            assert await one.pull(timeout=0) == []


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with qmq.testing.broker() as broker:
        yield broker.url


@pytest.mark.parametrize("share", WRONG_SHARES)
async def test_a_share_that_is_none_is_refused(url: str, share: Any) -> None:
    says = rf"priority_share must be a number from 0 to 1, not {re.escape(repr(share))}"
    async with qmq.connect(url) as client:
        async with client.subscribe("a.", group="g"):
            pass
        with pytest.raises(UsageError, match=says):
            client.subscribe("a.", group="g", priority_share=share)
        with pytest.raises(UsageError, match=says):
            await client.admin.set_group("g", priority_share=share)
        with pytest.raises(UsageError, match="priority_share must be a number from 0 to 1, not None"):
            await client.admin.set_group("g", priority_share=None)  # type: ignore[arg-type]
        (group,) = await client.admin.groups("g")
        assert group.settings["priority_share"] == 0.1


@pytest.mark.parametrize("share", [0, 1, 0.0, 1.0, 0.25])
def test_shares_from_0_to_1_are_taken(share: float) -> None:
    assert packed_settings({"priority_share": share}) == {"priority_share": float(share)}
