"""Connections that break, answers that do not arrive, brokers that end between storing and answering."""

from __future__ import annotations

import asyncio
import errno
import random
import time
from itertools import product
from pathlib import Path
from typing import Final

import pytest

import qmq
from qmq.net.client import broker_link as link
from qmq.net.client.options import Durability
from qmq.net.client.producer import window as sending
from qmq.net.protocol.frames import FLUSH, FrameKind
from tests.broker_process import running
from tests.fake_disk import FakeDisk
from tests.faults.brokers import broker_in, stored, until
from tests.faults.ledger import Ledger, drain, fresh_seed
from tests.faults.proxy import TO_BROKER, TO_CLIENT, Fault, Passing, Proxy, SeededFaults, swallow_answers
from tests.net.frames import RawClient, batch, frame, sent_fields

DURABILITIES: Final[tuple[Durability, ...]] = ("append", "flush")
WHERE: Final = ("before", "within", "after")
#: After which sends that are to fail do: a slow machine connects again, and is answered, in less.
LONG_TIMEOUT_S: Final = 4.0


@pytest.fixture(autouse=True)
def back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients come back at once even where their last connection was a short one: more faults in less time."""
    monkeypatch.setattr(link, "GOOD_AFTER", 0.0)


class OneCut:
    """Cuts one frame of the connection that is there, and maybe one of the next; then lets everything pass."""

    def __init__(self) -> None:
        self._cuts: list[tuple[str, FrameKind, int | str]] = []
        self.struck = 0

    def arm(self, *cuts: tuple[str, FrameKind, int | str]) -> None:
        """Cut the first frame of that direction and kind: after so many bytes, or before, within, after it."""
        self._cuts = list(cuts)

    @property
    def is_done(self) -> bool:
        return not self._cuts

    def __call__(self, passing: Passing) -> Fault | None:
        if not self._cuts or self._cuts[0][:2] != (passing.direction, passing.kind):
            return None
        where = self._cuts.pop(0)[2]
        self.struck += 1
        if isinstance(where, str):
            where = {"before": 0, "within": passing.size // 2, "after": passing.size}[where]
        return Fault("reset" if self.struck % 2 else "close", min(where, passing.size))


async def test_a_cut_at_any_byte_of_a_send_or_its_answer_neither_loses_nor_doubles(tmp_path: Path) -> None:
    ledger, plan = Ledger(), OneCut()
    async with (
        broker_in(tmp_path / "data") as broker,
        Proxy(int(broker.url.rpartition(":")[2]), plan) as proxy,
        qmq.connect(proxy.url, durability="append") as client,
    ):
        for direction, kind, bytes_to_cut in ((TO_BROKER, FrameKind.SEND, 230), (TO_CLIENT, FrameKind.SENT, 53)):
            for position in range(bytes_to_cut):
                entry = ledger.open("a.b", 40, "key")
                plan.arm((direction, kind, position))
                ledger.acknowledged([entry], [await client.send("a.b", entry.body, key="key")])
                assert plan.is_done, f"nothing was cut at byte {position} of {kind.name}"
        ledger.check(await drain(broker.url, "all"))
        assert broker.stop() == 0
    print(f"{plan.struck} cuts")


class LostAnswer:
    """Loses the first answer to a send, and keeps the client away until ``lets_in``."""

    def __init__(self) -> None:
        self.is_lost = self.lets_in = False

    def __call__(self, passing: Passing) -> Fault | None:
        if passing.kind == FrameKind.SENT and not self.is_lost:
            self.is_lost = True
            return Fault("reset", 0)
        return Fault("close", 0) if self.is_lost and not self.lets_in else None


@pytest.mark.parametrize("others", [4, 30])
async def test_a_send_of_a_forgotten_producer_is_never_stored_twice(tmp_path: Path, others: int) -> None:
    plan = LostAnswer()
    async with (
        running(tmp_path / "data", max_producers=20) as broker,
        Proxy(broker.address[1], plan) as proxy,
        qmq.connect(proxy.url, durability="append") as client,
    ):
        sending = asyncio.create_task(client.send("a.b", b"once"))
        await until(lambda: plan.is_lost, "the answer is lost")
        for _ in range(others):
            async with qmq.connect(broker.url, durability="append") as other:
                await other.send("a.c", b"x")
        plan.lets_in = True
        if others < 20:
            assert (await sending).sequence == 0
        else:
            with pytest.raises(qmq.SendFailed, match="may have forgotten this one"):
                await sending
        await client.send("a.b", b"next")
        assert [message.body async for message in client.find("a.b")] == [b"once", b"next"]


async def test_a_cut_of_the_frames_that_connect_again_is_borne(tmp_path: Path) -> None:
    ledger, plan = Ledger(), OneCut()
    hello = product((TO_BROKER,), (FrameKind.HELLO,), WHERE)
    welcome = product((TO_CLIENT,), (FrameKind.WELCOME,), WHERE)
    again = product((TO_BROKER,), (FrameKind.SEND,), WHERE)
    answer = product((TO_CLIENT,), (FrameKind.SENT,), WHERE)
    second = [*hello, *welcome, *again, *answer]
    async with (
        broker_in(tmp_path / "data") as broker,
        Proxy(int(broker.url.rpartition(":")[2]), plan) as proxy,
        qmq.connect(proxy.url) as client,
    ):
        for first, then in product(
            ((TO_BROKER, FrameKind.SEND, "after"), (TO_CLIENT, FrameKind.SENT, "before")), second
        ):
            entry = ledger.open("a.b")
            plan.arm(first, then)
            receipt = await client.send("a.b", entry.body)
            ledger.acknowledged([entry], [receipt])
            if (
                then[1] is FrameKind.HELLO or then[2] != "after"
            ):  # what comes after the answer has nothing left to break
                assert plan.is_done, (first, then)
        ledger.check(await drain(broker.url, "all"))
    print(f"{plan.struck} cuts")


@pytest.mark.parametrize("number", range(2))
async def test_connections_that_break_anywhere_neither_lose_nor_double(tmp_path: Path, number: int) -> None:
    seed = fresh_seed() + number
    ledger, chance = Ledger(), random.Random(seed)
    received: list[qmq.Message] = []

    async def produce(url: str) -> None:
        async with qmq.connect(url) as client:
            for _ in range(30):
                entries = [ledger.open(chance.choice("abc"), chance.choice((20, 500, 100_000))) for _ in range(4)]
                sends = [
                    client.send(entry.subject, entry.body, durability=chance.choice(("flush", "append")))
                    for entry in entries
                ]
                ledger.acknowledged(entries, await asyncio.gather(*sends))
                entries = [ledger.open("d", 50) for _ in range(chance.randrange(1, 300))]
                ledger.acknowledged(entries, await client.send_many("d", [entry.body for entry in entries]))

    async def follow(url: str) -> None:
        async with qmq.connect(url) as client, client.subscribe("", start="first") as consumer:
            while True:
                received.extend(await consumer.pull(max_count=1_000))

    plan = SeededFaults(seed, cut=0.06, delay=0.05, spared=4)
    async with broker_in(tmp_path / "data") as broker:
        async with Proxy(int(broker.url.rpartition(":")[2]), plan) as proxy, asyncio.TaskGroup() as consuming:
            follower = consuming.create_task(follow(proxy.url))
            async with asyncio.TaskGroup() as producing:
                for _ in range(3):
                    producing.create_task(produce(proxy.url))
            proxy.plan = None
            await until(lambda: len(received) >= len(ledger.entries), "the consumer has everything")
            follower.cancel()
        ledger.check(received)
        ledger.check(await drain(broker.url, "all"))
        assert broker.stop() == 0
    cuts = sum(count for (what, *_), count in proxy.struck.items() if what != "delay")
    lost = sum(count for (what, _, kind, _), count in proxy.struck.items() if what != "delay" and kind == "SENT")
    print(f"{cuts} cuts, {lost} of them of answers to sends; {proxy.struck.total() - cuts} delays")
    assert lost


# ---------------------------------------------------------------------------------------------------------------------
# Repeats


async def test_a_send_that_was_stored_is_not_stored_again_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "AT_ONCE", 64)
    ledger = Ledger()
    async with (
        broker_in(tmp_path / "data") as broker,
        Proxy(int(broker.url.rpartition(":")[2])) as proxy,
        qmq.connect(proxy.url) as client,
    ):
        first = ledger.open("a.b")
        ledger.acknowledged([first], [await client.send("a.b", first.body)])
        proxy.plan = swallow_answers
        sends, entries = [], []
        for number in range(40):  # each a batch of its own, in flight behind the one before
            entries.append(entry := ledger.open(f"a.{number % 3}", 200))
            send = client.send(entry.subject, entry.body, durability=DURABILITIES[number // 20])
            sends.append(asyncio.create_task(send))
            await until(lambda: _swallowed(proxy) == len(entries), "the broker has answered")
        killed_us = time.time_ns() // 1_000
        broker.kill()
        assert not any(send.done() for send in sends)
        proxy.plan = None
        await asyncio.to_thread(broker.start)
        receipts = await asyncio.gather(*sends)
        assert all(receipt.stored_at_us < killed_us for receipt in receipts), "they were stored before the kill"
        ledger.acknowledged(entries, receipts)
        ledger.check(await drain(broker.url, "all"))


async def test_unique_sends_get_the_same_receipts_when_their_answers_are_lost(tmp_path: Path) -> None:
    """The broker stores them without the repeats, and is killed before the client knows."""
    async with (
        broker_in(tmp_path / "data") as broker,
        Proxy(int(broker.url.rpartition(":")[2])) as proxy,
        qmq.connect(proxy.url) as client,
    ):
        old = await client.send("a.b", b"old", unique="old")
        proxy.plan = swallow_answers
        texts = ["old", "new", "new", "other"]
        send = asyncio.create_task(client.send_many("a.b", [b"1", b"2", b"3", b"4"], unique=texts))
        await until(lambda: _swallowed(proxy) == 1, "the broker has answered")
        killed_us = time.time_ns() // 1_000
        broker.kill()
        proxy.plan = None
        await asyncio.to_thread(broker.start)
        receipts = await send
        assert [receipt.duplicate for receipt in receipts] == [True, False, True, False]
        assert (receipts[0].id, receipts[2].id) == (old.id, receipts[1].id)
        assert all(receipt.stored_at_us < killed_us for receipt in receipts), "they were stored before the kill"
        assert [message.body async for message in client.find("a.b")] == [b"old", b"2", b"4"]


def _swallowed(proxy: Proxy) -> int:
    return proxy.struck["swallow", TO_CLIENT, "SENT", ""]


async def test_the_same_batch_at_once_on_two_connections_is_stored_once(tmp_path: Path) -> None:
    flags = [pair for pair in ((0, 0), (FLUSH, FLUSH), (0, FLUSH), (FLUSH, 0)) for _ in range(10)]
    batches = [batch(b"%d" % number, b"x" * 100, sequence=2 * number) for number in range(len(flags))]
    async with broker_in(tmp_path / "data") as broker:
        address = ("127.0.0.1", int(broker.url.rpartition(":")[2]))
        told = []
        for _ in range(2):
            clients = [await RawClient.connect(address) for _ in range(2)]
            for number, (content, pair) in enumerate(zip(batches, flags, strict=True)):
                for client, flag in zip(clients, pair, strict=True):
                    client.send(frame(FrameKind.SEND, 10 + number, content, flags=flag))
                one, other = [sent_fields(await client.read()) for client in clients]
                assert one == other
                told.append(one)
            for client in clients:
                await client.close()
            broker.kill()
            await asyncio.to_thread(broker.start)
        assert told[: len(flags)] == told[len(flags) :], "a restart changed what was told"
        messages = await drain(broker.url, "all")
        assert [message.body for message in messages[::2]] == [b"%d" % number for number in range(len(flags))]
        assert [message.sequence for message in messages] == list(range(2 * len(flags)))


async def test_one_producer_in_two_processes_is_told_and_makes_no_double(tmp_path: Path) -> None:
    """Two clients under one producer name number alike, so equal bodies would be taken for repeats."""
    async with broker_in(tmp_path / "data") as broker:
        async with qmq.connect(broker.url, producer="job") as one, qmq.connect(broker.url, producer="other"):
            await one.send("a", b"one")
            with pytest.raises(
                qmq.ProducerInUse, match=r"producer 'job' at 127.*give each client a producer of its own"
            ):
                async with qmq.connect(broker.url, producer="job"):
                    pass
            await one.send("a", b"one")
        async with qmq.connect(broker.url, producer="job") as other:
            await other.send("a", b"one")
        assert [message.body for message in await drain(broker.url, "all")] == [b"one"] * 3


async def test_a_client_keeps_its_producer_while_its_old_connection_is_half_dead(tmp_path: Path) -> None:
    async with (
        broker_in(tmp_path / "data") as broker,
        qmq.connect(broker.url, producer="job") as client,
    ):
        await client.send("a", b"before")
        (link,) = client._brokers.links
        old = link.connection
        assert old is not None
        link.lost(old, qmq.ConnectionLost("only this side knows"))  # the broker has it open still
        assert (await client.send("a", b"after")).sequence == 1
        with pytest.raises(qmq.ProducerInUse):
            async with qmq.connect(broker.url, producer="job"):
                pass
        assert not old.closed
        old.close()
        await old.wait_closed()
        with pytest.raises(qmq.ProducerInUse):
            async with qmq.connect(broker.url, producer="job"):
                pass


async def test_the_same_body_twice_on_purpose_stays_two_messages(tmp_path: Path) -> None:
    plan = OneCut()
    async with (
        broker_in(tmp_path / "data") as broker,
        Proxy(int(broker.url.rpartition(":")[2]), plan) as proxy,
        qmq.connect(proxy.url) as client,
    ):
        sent = 0
        for where in WHERE:
            for direction, kind in ((TO_BROKER, FrameKind.SEND), (TO_CLIENT, FrameKind.SENT)):
                plan.arm((direction, kind, where))
                first = await client.send("a", b"same", key="k")
                second = await client.send("a", b"same", key="k")
                assert first.id != second.id
                sent += 2
        together = await asyncio.gather(*(client.send("a", b"same", key="k") for _ in range(10)))
        many = await client.send_many("a", [b"same"] * 10)
        assert len({receipt.id for receipt in (*together, *many)}) == 20
        messages = await drain(broker.url, "all")
        assert len(messages) == sent + 20
        assert {message.body for message in messages} == {b"same"}


# ---------------------------------------------------------------------------------------------------------------------
# Giving up


async def test_a_send_whose_answers_stay_lost_is_unknown_and_at_most_one_message(tmp_path: Path) -> None:
    ledger = Ledger()
    async with (
        broker_in(tmp_path / "data") as broker,
        Proxy(int(broker.url.rpartition(":")[2])) as proxy,
        qmq.connect(proxy.url, send_timeout=LONG_TIMEOUT_S) as client,
    ):
        first = ledger.open("a")
        ledger.acknowledged([first], [await client.send("a", first.body)])
        proxy.plan = swallow_answers
        one, many = ledger.open("a", key="k"), [ledger.open("b") for _ in range(3)]
        began = time.monotonic()
        send = asyncio.create_task(client.send("a", one.body, key="k"))
        send_many = asyncio.create_task(client.send_many("b", [entry.body for entry in many]))
        unawaited = [ledger.open("c", key=key) for key in (None, "x")]
        tickets = [client.send_nowait("c", entry.body, key=entry.key) for entry in unawaited]
        with pytest.raises(qmq.SendUnknown) as caught:
            await send
        assert time.monotonic() - began >= LONG_TIMEOUT_S
        ledger.failed([one], caught.value)
        with pytest.raises(qmq.SendUnknown) as caught:
            await send_many
        ledger.failed(many, caught.value)
        with pytest.raises(qmq.SendUnknown) as caught:
            await client.flush()
        assert [failure.ticket for failure in caught.value.failures] == tickets
        for failure, entry in zip(caught.value.failures, unawaited, strict=True):
            entry.state = failure.outcome
        await client.flush()  # each failure is reported once
        proxy.plan = None
        later = ledger.open("a")
        ledger.acknowledged([later], [await client.send("a", later.body)])
        assert ledger.count("unknown") == 6
        ledger.check(await drain(broker.url, "all"))


async def test_a_send_to_a_broker_that_dies_before_the_answer_is_unknown_and_one_that_never_left_is_refused(
    tmp_path: Path,
) -> None:
    ledger = Ledger()
    async with (
        broker_in(tmp_path / "data") as broker,
        Proxy(int(broker.url.rpartition(":")[2])) as proxy,
        qmq.connect(proxy.url, send_timeout=LONG_TIMEOUT_S) as client,
    ):
        proxy.plan = swallow_answers
        written = ledger.open("a")
        send = asyncio.create_task(client.send("a", written.body))
        await stored(broker.url, 1)
        broker.kill()
        await until(lambda: client._brokers.connection is None, "the client has seen that the broker is gone")
        waiting = ledger.open("a")
        with pytest.raises(qmq.SendFailed) as caught:
            await client.send("a", waiting.body)
        assert not isinstance(caught.value, qmq.SendUnknown)
        assert "127.0.0.1" in str(caught.value)
        ledger.failed([waiting], caught.value)
        with pytest.raises(qmq.SendUnknown) as unknown:
            await send
        ledger.failed([written], unknown.value)
        assert (written.state, waiting.state) == ("unknown", "refused")
        await asyncio.to_thread(broker.start)
        proxy.plan = None
        ledger.check(await drain(broker.url, "all"))


async def test_a_silent_broker_is_left_and_what_it_stored_is_not_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers stop, and the connection stays: the client takes it for dead and asks again on another one."""
    monkeypatch.setattr(link, "_TICK", 0.05)
    ledger = Ledger()
    async with (
        broker_in(tmp_path / "data") as broker,
        Proxy(int(broker.url.rpartition(":")[2])) as proxy,
        qmq.connect(proxy.url) as client,
    ):
        proxy.plan = lambda passing: swallow_answers(passing) if not passing.connection else None
        entries = [ledger.open("a") for _ in range(10)]
        sending = asyncio.create_task(client.send_many("a", [entry.body for entry in entries]))
        await until(lambda: _swallowed(proxy) == 1, "the broker has answered")
        monkeypatch.setattr(link, "SILENCE", 0.2)
        await until(lambda: proxy.connections == 2, "the client asks on another connection")
        monkeypatch.setattr(link, "SILENCE", 60.0)  # that one is given its time
        ledger.acknowledged(entries, await sending)
        ledger.check(await drain(broker.url, "all"))


# ---------------------------------------------------------------------------------------------------------------------
# Disks


async def test_a_full_disk_refuses_sends_which_are_tried_again_until_there_is_room(tmp_path: Path) -> None:
    disk, ledger = FakeDisk("boot-1"), Ledger()
    async with running(tmp_path / "data", disk) as broker, qmq.connect(broker.url, send_timeout=60) as client:
        entries = [ledger.open("a") for _ in range(5)]
        ledger.acknowledged(entries, await client.send_many("a", [entry.body for entry in entries]))
        disk.fail_always("pwritev", errno.ENOSPC, ".messages")
        refused = disk.calls["pwritev"]
        more = [ledger.open("a") for _ in range(30)]
        sends = asyncio.gather(*(client.send("a", entry.body) for entry in more))
        await until(lambda: disk.calls["pwritev"] > refused + 3, "several tries were refused")
        assert len(await drain(broker.url, "meanwhile")) == 5, "reads go on"
        assert not sends.done()
        disk.heal()
        ledger.acknowledged(more, await sends)
        ledger.check(await drain(broker.url, "all"))


async def test_a_disk_that_stays_full_ends_in_an_error_that_names_it(tmp_path: Path) -> None:
    disk, ledger = FakeDisk("boot-1"), Ledger()
    async with (
        running(tmp_path / "data", disk) as broker,
        qmq.connect(broker.url, send_timeout=LONG_TIMEOUT_S) as client,
    ):
        disk.fail_always("pwritev", errno.ENOSPC, ".messages")
        entry, unawaited = ledger.open("a", key="k"), ledger.open("a")
        client.send_nowait("a", unawaited.body)
        with pytest.raises(qmq.SendFailed, match="No space left on device") as caught:
            await client.send("a", entry.body, key="k")
        assert not isinstance(caught.value, qmq.SendUnknown)
        assert isinstance(caught.value.__cause__, qmq.StorageFull)
        ledger.failed([entry], caught.value)
        with pytest.raises(qmq.SendFailed) as later:
            await client.flush()
        ledger.failed([unawaited], _numbered_from_zero(later.value))
        disk.heal()
        entry = ledger.open("a")
        ledger.acknowledged([entry], [await client.send("a", entry.body)])
        assert ledger.count("refused") == 2
        ledger.check(await drain(broker.url, "all"))


async def test_a_failed_sync_is_unknown_and_nothing_is_acknowledged_until_a_restart(tmp_path: Path) -> None:
    disk, ledger = FakeDisk(), Ledger()  # of this boot: nothing is lost but the sync
    async with running(tmp_path / "data", disk, checkpoint_ms=3_600_000) as broker, qmq.connect(broker.url) as client:
        first = ledger.open("a")
        ledger.acknowledged([first], [await client.send("a", first.body)])
        disk.fail("fdatasync")
        second, third = ledger.open("a"), [ledger.open("a") for _ in DURABILITIES]
        with pytest.raises(qmq.SendUnknown) as caught:
            await client.send("a", second.body)
        ledger.failed([second], caught.value)
        for entry, durability in zip(third, DURABILITIES, strict=True):
            with pytest.raises(qmq.SendFailed, match="until a restart") as refused:
                await client.send("a", entry.body, durability=durability)
            ledger.failed([entry], refused.value)
        # Reads go on; what was not synced is handed out too, but never acknowledged.
        assert [message.body for message in await drain_visible(broker.url)] == [first.body, second.body]
    async with running(tmp_path / "data") as broker, qmq.connect(broker.url) as client:
        fourth = ledger.open("a")
        ledger.acknowledged([fourth], [await client.send("a", fourth.body)])
        ledger.check(await drain(broker.url, "all"), contiguous=False)  # they go on past what may be gone


async def drain_visible(url: str) -> list[qmq.Message]:
    """What can be pulled at once, where a broker also counts what it does not show."""
    async with qmq.connect(url) as client, client.subscribe("", group="visible", start="first") as consumer:
        return await consumer.pull(timeout=0)


def _numbered_from_zero(error: qmq.SendFailed) -> qmq.SendFailed:
    for index, failure in enumerate(error.failures):
        failure.ticket = index
    return error


# ---------------------------------------------------------------------------------------------------------------------
# Consumers alone


@pytest.mark.parametrize("pulls", [3, 4])  # so that the next one begins with the first subject, or with the other
async def test_one_who_follows_two_subjects_gets_the_one_that_had_not_come_yet_after_a_break(
    tmp_path: Path, pulls: int
) -> None:
    plan = OneCut()
    async with (
        running(tmp_path / "data") as broker,
        Proxy(broker.address[1], plan) as proxy,
        qmq.connect(broker.url, durability="append") as sender,
        qmq.connect(proxy.url) as client,
        client.subscribe("a", "b", start="first") as consumer,
    ):
        for number in range(pulls):
            await sender.send("a", b"%d" % number)
            assert [message.body for message in await consumer.pull(timeout=0)] == [b"%d" % number]
        await sender.send("b", b"first of b")
        await sender.send_many("a", [b"x"] * 5)
        bodies = [message.body for message in await consumer.pull(max_count=5, timeout=0)]
        plan.arm((TO_BROKER, FrameKind.PULL, "before"))
        while len(bodies) < 6:
            came = await consumer.pull(timeout=20)
            assert came, f"only {bodies} came"
            bodies += [message.body for message in came]
        assert plan.is_done
        assert sorted(bodies) == [b"first of b", *[b"x"] * 5]


@pytest.mark.parametrize("ahead_s", [-3_600, 3_600])
async def test_one_who_follows_from_now_on_misses_nothing_whatever_its_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    plan, clock = OneCut(), time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: clock() + ahead_s * 1_000_000_000)
    async with (
        broker_in(tmp_path / "data") as broker,
        Proxy(int(broker.url.rpartition(":")[2]), plan) as proxy,
        qmq.connect(broker.url) as sender,
        qmq.connect(proxy.url) as client,
    ):
        await sender.send("a.b", b"before")
        async with client.subscribe("a.") as prefix, client.subscribe("a.b") as subject:
            for number, consumer in enumerate((prefix, subject)):
                assert await consumer.pull(timeout=0) == []
                plan.arm((TO_BROKER, FrameKind.PULL, "before"))
                await sender.send("a.b", b"%d" % number)
                expected = [b"%d" % before for before in range(number + 1)][-1 if consumer is prefix else 0 :]
                assert [message.body for message in await consumer.pull(timeout=20)] == expected
                assert plan.is_done


@pytest.mark.parametrize("following", [("",), ("a.", "b."), ("a.x", "b.x"), ("silent", "b.", "a.")])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_one_who_follows_several_partitions_misses_nothing_while_one_disk_is_slow(
    tmp_path: Path, following: tuple[str, ...], when: str
) -> None:
    """What lies on the slow disk was stored earlier and comes later than what lies on the other."""
    disk, plan = FakeDisk(), OneCut()
    async with (
        running(tmp_path / "data", disk, partitions=2, checkpoint_ms=3_600_000) as broker,
        Proxy(broker.address[1], plan) as proxy,
        qmq.connect(broker.url) as sender,
        qmq.connect(broker.url) as other,  # a client has at most two batches without an answer
        qmq.connect(proxy.url) as client,
        client.subscribe(*following, start="first") as consumer,
    ):
        await sender.send("a.x", b"a")
        await sender.send("b.x", b"b")
        came = await consumer.pull(min_count=2, timeout=20)
        disk.stall("fdatasync", "log-0")
        slow = [asyncio.create_task(sender.send("a.x", b"slow %d" % number)) for number in range(3)]
        await until(lambda: disk.stalled > 0, "the disk is slow")
        await other.send("b.x", b"quick", durability="append")
        came += await consumer.pull(timeout=20)
        assert [message.body for message in came[2:]] == [b"quick"]
        if when == "before":
            disk.go_on()
            await asyncio.gather(*slow)
            came += await consumer.pull(max_count=1, timeout=20)
        plan.arm((TO_BROKER, FrameKind.PULL, "before"))
        came += await consumer.pull(timeout=0.2)
        disk.go_on()
        await asyncio.gather(*slow)
        while len(came) < 6:
            more = await consumer.pull(timeout=20)
            assert more, f"only {came} came"
            came += more
        assert await consumer.pull(timeout=0) == []
        assert plan.is_done
        assert sorted(message.body for message in came) == [b"a", b"b", b"quick", b"slow 0", b"slow 1", b"slow 2"]
