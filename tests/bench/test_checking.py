"""Comparing messages received and sent: each checker is shown the faults that it must find."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from qmq import connect
from qmq.bench import checking, receiving, sending
from qmq.bench.checking import Cycle, SentLedger, compare
from qmq.bench.context import Bench
from qmq.bench.processes import BrokerProcess
from qmq.bench.raw import bodies_of, body_of
from qmq.bench.values import BenchFailed
from tests.bench.conftest import no_gate

Read = Callable[[str, str, int], Awaitable[dict[str, Any]]]
WRONG = "is not what was sent"


def test_the_first_difference_is_told() -> None:
    compare([1, 2, 3], [1, 2, 3], 0)
    with pytest.raises(BenchFailed, match="message 12, of c, is not what was sent: 9 instead of 3"):
        compare([1, 2, 9], [1, 2, 3], 10, ["a", "b", "c"])
    with pytest.raises(BenchFailed, match="message 11 is not what was sent: 2 instead of None"):
        compare([1, 2], [1], 10)


def test_a_cycle_goes_on_from_any_place() -> None:
    expected = bodies_of(10, 20)
    cycle = Cycle(expected, 21)
    cycle.check(expected[:7])
    cycle.check(expected[7:] + expected + expected[:8])
    assert cycle.came == 28
    with pytest.raises(BenchFailed, match=f"message 29 {WRONG}"):
        cycle.check([expected[8], expected[8]])


def ledger() -> SentLedger:
    made = SentLedger()
    made.expect("a", 3, [b"1", b"2"])
    made.expect("b", 1, [b"1"])
    return made


def test_a_ledger_takes_subjects_in_any_order() -> None:
    one = ledger()
    one.check(["a", "b"], [b"1", b"1"])
    one.check(["a", "a"], [b"2", b"1"])
    assert one.came == one.messages == 4


@pytest.mark.parametrize(
    ("subjects", "found"),
    [
        ("aa", [b"1", b"1"]),  # doubled
        ("aa", [b"2", b"1"]),  # out of order, or the first one lost
        ("ab", [b"1", b"2"]),  # in another subject
        ("bb", [b"1", b"1"]),  # more than were sent
        ("ac", [b"1", b"1"]),  # in a subject that nobody sent to
    ],
)
def test_a_ledger_knows_what_was_sent_to_each(subjects: str, found: list[bytes]) -> None:
    with pytest.raises(BenchFailed, match=WRONG):
        ledger().check(list(subjects), found)


# ---------------------------------------------------------------------------------------------------------------------
# What reads bodies that go round, of one subject

MESSAGES, COUNT, SIZE = 2_500, 500, 60


async def pull(url: str, subject: str, messages: int) -> dict[str, Any]:
    return await receiving.pull(
        no_gate, url=url, prefix=subject, size=SIZE, count=COUNT, messages=messages, max_count=700
    )


async def pull_batch(url: str, subject: str, messages: int) -> dict[str, Any]:
    return await receiving.pull_batch(no_gate, url=url, prefix=subject, messages=messages, max_count=700)


async def async_for(url: str, subject: str, messages: int) -> dict[str, Any]:
    return await receiving.async_for(no_gate, url=url, prefix=subject, size=SIZE, count=COUNT, messages=messages)


async def cycles(url: str, subject: str, messages: int) -> dict[str, Any]:
    return await checking.cycles(no_gate, url=url, subject=subject, size=SIZE, count=COUNT, messages=messages)


COMPARE = pytest.mark.parametrize("read", [pull, async_for, cycles])
COUNTS = pytest.mark.parametrize("read", [pull, pull_batch, async_for, cycles])


async def send(broker: BrokerProcess, subject: str, bodies: list[bytes]) -> None:
    async with connect(broker.url, durability="append") as client:
        await client.send_many(subject, bodies)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for missing messages."""
    monkeypatch.setattr(checking, "SILENCE_S", 0.2)
    monkeypatch.setattr(receiving, "SILENCE_S", 0.2)
    monkeypatch.setattr(receiving, "LATE_S", 0.2)


@COUNTS
async def test_what_was_sent_is_what_came(bench: Bench, broker: BrokerProcess, read: Read) -> None:
    subject = bench.prefix() + "x"
    await send(broker, subject, bodies_of(COUNT, SIZE) * (MESSAGES // COUNT))
    assert (await read(broker.url, subject, MESSAGES))["messages"] == MESSAGES


@COMPARE
@pytest.mark.parametrize("place", [0, 1_234, MESSAGES - 1])
async def test_one_wrong_body_is_found(bench: Bench, broker: BrokerProcess, read: Read, place: int) -> None:
    subject = bench.prefix() + "x"
    bodies = bodies_of(COUNT, SIZE) * (MESSAGES // COUNT)
    bodies[place] = bodies[place][:-1] + b"?"
    await send(broker, subject, bodies)
    with pytest.raises(BenchFailed, match=rf"message {place}\b.* {WRONG}"):
        await read(broker.url, subject, MESSAGES)


@COUNTS
async def test_one_too_few_is_found(bench: Bench, broker: BrokerProcess, read: Read, impatient: None) -> None:
    subject = bench.prefix() + "x"
    await send(broker, subject, (bodies_of(COUNT, SIZE) * (MESSAGES // COUNT))[:-1])
    with pytest.raises(BenchFailed, match=rf"messages were received, {MESSAGES} were sent"):
        await read(broker.url, subject, MESSAGES)


@COUNTS
@pytest.mark.parametrize("messages", [2_000, 2_100, MESSAGES - 1])  # some end where a pull does, some within one
async def test_more_than_was_sent_is_found(bench: Bench, broker: BrokerProcess, read: Read, messages: int) -> None:
    subject = bench.prefix() + "x"
    await send(broker, subject, bodies_of(COUNT, SIZE) * (MESSAGES // COUNT))
    with pytest.raises(BenchFailed, match=f"more was received|received, {messages} were sent|instead of None"):
        await read(broker.url, subject, messages)


async def test_a_stray_message_beside_is_found(bench: Bench, broker: BrokerProcess) -> None:
    prefix = bench.prefix()
    await send(broker, prefix + "x", bodies_of(COUNT, SIZE))
    await send(broker, prefix + "y", bodies_of(1, SIZE))
    with pytest.raises(BenchFailed, match=r"of .*\.y, is not what was sent|more was received: .* to .*\.y"):
        await cycles(broker.url, prefix + "x", COUNT)


# ---------------------------------------------------------------------------------------------------------------------
# Keys and properties, many subjects, schedules


@pytest.mark.parametrize("changed", ["body", "key", "price", "currency", "nothing"])
async def test_a_wrong_field_is_found(bench: Bench, broker: BrokerProcess, changed: str) -> None:
    subject = bench.prefix() + "x"
    sent: sending.Fields = "key and properties"
    options: dict[str, Any] = {"url": broker.url, "subject": subject, "size": 50, "messages": 1_000, "fields": sent}
    async with connect(broker.url, durability="append") as client:
        for number, (body, key, properties) in enumerate(sending.fields_of(50, sent)):
            fields = {"body": body, "key": key, **properties}
            if number == 777 and changed in fields:
                fields[changed] = b"?" if changed == "body" else "?"
            body, key = fields.pop("body"), fields.pop("key")
            client.send_nowait(subject, body, key=key, properties=fields)
    if changed == "nothing":
        assert (await checking.fields(no_gate, **options))["messages"] == 1_000
    else:
        with pytest.raises(BenchFailed, match=f"message 777, .* {WRONG}"):
            await checking.fields(no_gate, **options)


async def test_what_each_producer_sent_is_checked(bench: Bench, broker: BrokerProcess, impatient: None) -> None:
    prefix = bench.prefix()
    options = {"url": broker.url, "prefix": prefix, "size": 50, "count": 3}
    made = await sending.producers(no_gate, durability="append", clients=4, seconds=0.05, **options)
    sent = made["sent"]
    assert await checking.producers(no_gate, sent=sent, **options) == {"messages": sum(sent)}
    for wrong in ([*sent[:3], sent[3] - 3], [*sent[:3], sent[3] + 3], sent[:3], [*sent, 3]):
        with pytest.raises(BenchFailed):
            await checking.producers(no_gate, sent=wrong, **options)
    await send(broker, prefix + "000003", bodies_of(3, 50, 6))  # those of the one before
    with pytest.raises(BenchFailed, match=WRONG):
        await checking.producers(no_gate, sent=[*sent[:3], sent[3] + 3], **options)


@pytest.mark.parametrize("wrong", [{}, {"subjects": 49}, {"seed": 4}, {"messages": 1_999}, {"messages": 2_001}])
async def test_what_spray_sends_is_checked(
    bench: Bench, broker: BrokerProcess, wrong: dict[str, int], impatient: None
) -> None:
    options: dict[str, Any] = {
        "url": broker.url, "prefix": bench.prefix(), "subjects": 50, "size": 20, "messages": 2_000, "seed": 3,
    }  # fmt: skip
    sent = await sending.spray(no_gate, **options)
    assert (sent["messages"], sent["timed"]) == (2_050, 2_000)
    if wrong:
        with pytest.raises(BenchFailed):
            await checking.sprayed(no_gate, **{**options, **wrong})
    else:
        assert await checking.sprayed(no_gate, **options) == {"messages": 2_050}


async def test_a_wrong_body_among_sprayed_ones_is_found(bench: Bench, broker: BrokerProcess) -> None:
    prefix = bench.prefix()
    options: dict[str, Any] = {"url": broker.url, "prefix": prefix, "subjects": 5, "size": 20, "seed": 3}
    await sending.spray(no_gate, messages=100, **options)
    subject = sending.sprayed_subjects(prefix, 5, 101, 3)[1][100]
    await send(broker, subject, [body_of(99, 20)])
    with pytest.raises(BenchFailed, match=f"of {subject}, {WRONG}"):
        await checking.sprayed(no_gate, messages=101, **options)


@pytest.mark.parametrize("wrong", ["nothing", "order", "body", "missing", "more"])
async def test_arrivals_are_held_against_the_schedule(
    bench: Bench, broker: BrokerProcess, wrong: str, impatient: None
) -> None:
    subject = bench.prefix() + "x"
    bodies = [body_of(1_000_000 * number, 50) for number in range(5, 25)]
    if wrong == "order":
        bodies[7], bodies[8] = bodies[8], bodies[7]
    elif wrong == "body":
        bodies[7] = bodies[7][:-1] + b"?"
    elif wrong == "missing":
        bodies.pop()
    elif wrong == "more":
        bodies.append(bodies[-1])

    async with connect(broker.url, durability="append") as client:
        tasks = []

        def send_now(**_: object) -> None:
            tasks.append(asyncio.ensure_future(client.send_many(subject, bodies)))

        options: dict[str, Any] = {"url": broker.url, "size": 50, "rate": 1_000, "messages": 20, "skip": 2}
        arriving = receiving.arrivals(send_now, prefix=subject, **options)
        if wrong == "nothing":
            assert (await arriving)["first_due_ns"] == 5_000_000
        else:
            with pytest.raises(BenchFailed, match="sent"):
                await arriving
        await asyncio.gather(*tasks)
