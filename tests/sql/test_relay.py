"""The relay: claims by state, in order, by one relay a shard; what is killed or frozen between sends nothing twice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa

import qmq
from qmq.errors import (
    ConnectionLost,
    DatabaseFailed,
    Forbidden,
    MessageTooLarge,
    SendFailed,
    SendFailure,
    SendUnknown,
    StorageFull,
)
from qmq.sql import Outbox, shards
from qmq.sql.databases import EngineDatabase
from qmq.sql.relay import ClientSender, Relay, SyncClientSender
from qmq.sql.rows import SHARDS, OutboxRow
from qmq.sql.shards import Executor, Owner, RowOutcomes
from tests.sql.boxes import HOUR_US, RecordingSender, drain, engine_with_tables, executor_of, relay_of, states
from tests.sql.servers import Database, MariaDB, PostgreSQL, Server, leaking_sockets, sqlite_database

outbox = Outbox()
ONE, OTHER = Owner("one", 15.0), Owner("other", 15.0)
NOW_US = 1_800_000_000_000_000


@pytest.fixture
def engine(database: Database) -> Iterator[sa.Engine]:
    """An engine of each database, in turn."""
    engine = engine_with_tables(database)
    yield engine
    engine.dispose()


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = engine_with_tables(sqlite_database(tmp_path))
    yield engine
    engine.dispose()


@pytest.fixture(params=["mariadb", "postgresql"])
def server_engine(request: pytest.FixtureRequest) -> Iterator[sa.Engine]:
    """An engine of each database that has several writers at once."""
    server: Server = request.getfixturevalue(request.param)
    engine = engine_with_tables(server.database())
    yield engine
    engine.dispose()


def write(engine: sa.Engine, *bodies: bytes, key: str | None = "k") -> None:
    with engine.begin() as tx:
        for body in bodies:
            outbox.send(tx, "shop.order", body, key=key)


# ---------------------------------------------------------------------------------------------------------------------
# Claims by state


def test_a_row_that_commits_late_is_sent_and_holds_up_none(server_engine: sa.Engine) -> None:
    """Row 1 is not committed, row 2 is, and is sent; then row 1 commits. A rolled back row leaves a gap of ids."""
    sender = RecordingSender()
    with server_engine.connect() as late:
        outbox.send(late, "shop.order", b"row 1", key="k")
        with server_engine.connect() as undone:
            outbox.send(undone, "shop.order", b"a gap", key="k")
            undone.rollback()
        write(server_engine, b"row 2")
        assert drain(server_engine, sender)
        assert sender.sent == [b"row 2"]
        late.commit()
    assert drain(server_engine, sender)
    assert sender.sent == [b"row 2", b"row 1"]


def test_a_relay_that_sends_blocks_no_writer(server_engine: sa.Engine) -> None:
    """Not of its own shard, nor one of REPEATABLE READ, whose locks of gaps would be in the way."""
    write(server_engine, b"1", b"2")
    sender = RecordingSender()

    def write_more(rows: Sequence[OutboxRow]) -> None:
        sender.before = lambda rows: None
        with server_engine.connect().execution_options(isolation_level="REPEATABLE READ") as tx:
            if tx.dialect.name == "mysql":
                tx.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = 1")
            outbox.send(tx, "shop.order", b"3", key="k")
            tx.commit()

    sender.before = write_more
    assert drain(server_engine, sender)
    assert sender.sent == [b"1", b"2", b"3"]


def test_polling_and_cleaning_use_the_index_whatever_was_sent(engine: sa.Engine) -> None:
    rows = [
        {"uid": f"{number:032}", "shard": number % SHARDS, "state": 1, "subject": "s", "body": b"", "created_at_us": 0,
         "sent_at_us": 0} for number in range(4_000)
    ]  # fmt: skip
    with engine.begin() as tx:
        names = ", ".join(rows[0])
        values = ", ".join(f":{name}" for name in rows[0])
        tx.execute(sa.text(f"INSERT INTO qmq_outbox ({names}) VALUES ({values})"), rows)
    write(engine, b"1")
    explain = "EXPLAIN QUERY PLAN" if engine.dialect.name == "sqlite" else "EXPLAIN"
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE TABLE qmq_outbox" if engine.dialect.name == "mysql" else "ANALYZE")
        for statement in (shards._BUSY_SHARDS, shards._ROWS, shards._OLD_SENT):
            plan = str(connection.execute(sa.text(f"{explain} {statement}"), {"shard": 3, "most": 500}).fetchall())
            assert "qmq_outbox_state" in plan or "qmq_outbox_state" in plan.replace("'", ""), plan
            assert "Seq Scan on qmq_outbox " not in plan


# ---------------------------------------------------------------------------------------------------------------------
# One relay a shard


def test_a_shard_has_one_relay_and_the_next_goes_on_behind_it(engine: sa.Engine) -> None:
    write(engine, b"1", b"2", b"3")
    with engine.connect() as first, engine.connect() as second:
        one, other = executor_of(first), executor_of(second)
        (shard,) = shards.busy_shards(one)
        taken = shards.claim(one, shard, ONE, 2, HOUR_US, NOW_US)
        assert taken is not None
        assert [row.body for row in taken.rows] == [b"1", b"2"]
        assert shards.claim(other, shard, OTHER, 2, HOUR_US, NOW_US) is None
        ids = [row.id for row in taken.rows]
        shards.finish(one, taken, RowOutcomes(ids, {}, []), ONE, keeps=True, first_try_us=NOW_US, now_us=NOW_US)
        taken = shards.claim(other, shard, OTHER, 2, HOUR_US, NOW_US)
        assert taken is not None
        assert [row.body for row in taken.rows] == [b"3"]
        other.rollback()


def test_a_relay_that_lost_its_shard_within_its_claim_sends_nothing(server_engine: sa.Engine) -> None:
    """Between the commit of its claim and its lock another relay sends all."""
    write(server_engine, b"1", b"2")
    with server_engine.connect() as first, server_engine.connect() as second:
        one, other = executor_of(first), executor_of(second)
        (shard,) = shards.busy_shards(one)
        commit = one.commit

        def commit_and_lose() -> None:
            commit()
            taken = shards.claim(other, shard, OTHER, 10, HOUR_US, NOW_US + 1)
            assert taken is not None
            ids = [row.id for row in taken.rows]
            shards.finish(other, taken, RowOutcomes(ids, {}, []), OTHER, keeps=True, first_try_us=NOW_US, now_us=NOW_US)

        one.commit = commit_and_lose  # type: ignore[method-assign]
        assert shards.claim(one, shard, ONE, 10, HOUR_US, NOW_US) is None
    assert states(server_engine) == {b"1": 1, b"2": 1}


def test_two_relays_share_the_shards(engine: sa.Engine) -> None:
    for number in range(40):
        write(engine, b"%d" % number, key=str(number))
    senders = RecordingSender(most=1), RecordingSender(most=1)

    async def both() -> None:
        relays = [relay_of(engine, sender, poll=0.01) for sender in senders]
        tasks = [asyncio.create_task(relay.run()) for relay in relays]
        await until(lambda: sum(len(sender.sent) for sender in senders) == 40)
        for relay in relays:
            relay.stop()
        await asyncio.gather(*tasks)

    asyncio.run(both())
    assert sorted(map(int, senders[0].sent + senders[1].sent)) == list(range(40))


def test_a_frozen_relay_loses_its_shard_on_sqlite_by_its_lease(sqlite: sa.Engine) -> None:
    write(sqlite, b"1", b"2")
    with sqlite.connect() as first, sqlite.connect() as second:
        one, other = executor_of(first), executor_of(second)
        (shard,) = shards.busy_shards(one)
        frozen = shards.claim(one, shard, ONE, 10, HOUR_US, NOW_US)
        assert frozen is not None
        assert shards.claim(other, shard, OTHER, 10, HOUR_US, NOW_US + 14_000_000) is None
        taken = shards.claim(other, shard, OTHER, 10, HOUR_US, NOW_US + 16_000_000)
        assert taken is not None
        ids = [row.id for row in taken.rows]
        shards.finish(other, taken, RowOutcomes(ids, {}, []), OTHER, keeps=True, first_try_us=NOW_US, now_us=NOW_US)
        # what the frozen one notes late changes nothing of what is settled
        late = RowOutcomes([], {ids[0]: "refused"}, [ids[1]])
        shards.finish(one, frozen, late, ONE, keeps=True, first_try_us=NOW_US, now_us=NOW_US)
    assert states(sqlite) == {b"1": 1, b"2": 1}


@pytest.mark.parametrize("name", ["mariadb", "postgresql"])
async def test_a_relay_that_is_frozen_longer_than_its_lease_sends_nothing_twice(
    request: pytest.FixtureRequest, name: str, broker_url: str
) -> None:
    """Frozen between its claim and its send; the other one goes on behind it, and its late sends are repeats."""
    server: Server = request.getfixturevalue(name)
    engine = engine_with_tables(server.database())
    subject = f"frozen.{name}"
    with engine.begin() as tx:
        for number in range(3):
            outbox.send(tx, subject, b"%d" % number, order_key="k")
    async with qmq.connect(broker_url) as client:
        real = ClientSender(client, 60)
        begun, thawed = asyncio.Event(), asyncio.Event()

        class Frozen(RecordingSender):
            async def send(self, rows: Sequence[OutboxRow]) -> list[BaseException | None]:
                begun.set()
                await thawed.wait()
                return await real.send(rows)

        frozen = Relay(EngineDatabase(engine), Frozen(), lease=1.0)
        freezing = asyncio.create_task(frozen.drain())
        await begun.wait()
        other = Relay(EngineDatabase(engine), real, lease=1.0)
        async with asyncio.timeout(60):
            while set((await asyncio.to_thread(states, engine)).values()) != {1}:
                await other.drain()
                await asyncio.sleep(0.02)
        with engine.begin() as tx:
            outbox.send(tx, subject, b"3", order_key="k")
        assert await other.drain()
        thawed.set()
        with leaking_sockets(), pytest.raises(DatabaseFailed):
            await freezing
        async with client.subscribe(subject, group=f"frozen-{name}") as consumer:
            bodies: list[bytes] = []
            while len(bodies) < 4:
                for message in await consumer.pull(timeout=60):
                    async with message:
                        bodies.append(message.body)
            assert await consumer.pull(timeout=0.05) == []
    with leaking_sockets():
        engine.dispose()
    assert bodies == [b"0", b"1", b"2", b"3"]


# ---------------------------------------------------------------------------------------------------------------------
# Sent, and not noted


async def test_a_row_that_was_sent_and_not_noted_is_one_message(sqlite: sa.Engine, broker_url: str) -> None:
    with sqlite.begin() as tx:
        outbox.send(tx, "unnoted", b"1", key="k")
        outbox.send(tx, "unnoted", b"1", key="k")  # the same bytes, another message
    for _ in range(2):  # the relay is killed behind the send, twice
        async with qmq.connect(broker_url) as client:
            with sqlite.connect() as connection:
                executor = executor_of(connection)
                (shard,) = shards.busy_shards(executor)
                taken = shards.claim(executor, shard, ONE, 500, HOUR_US, time.time_ns() // 1_000)
                assert taken is not None
                assert await ClientSender(client, 60).send(taken.rows) == [None, None]
                executor.rollback()
            with sqlite.begin() as tx:
                tx.exec_driver_sql("UPDATE qmq_outbox_shards SET owner = NULL")
    async with qmq.connect(broker_url) as client:
        assert await Relay(EngineDatabase(sqlite), ClientSender(client, 60)).drain()
        async with client.subscribe("unnoted", group="unnoted") as consumer:
            assert [message.sequence async for message in taking(consumer, 2)] == [0, 1]
            assert await consumer.pull(timeout=0.05) == []


async def taking(consumer: qmq.Consumer, count: int) -> AsyncIterator[qmq.Message]:
    while count:
        for message in await consumer.pull(max_count=count, timeout=60):
            async with message:
                count -= 1
                yield message


def test_rows_that_the_broker_may_have_forgotten_are_parked_not_doubled(sqlite: sa.Engine) -> None:
    """A relay claimed them, was killed, and the next one comes only when brokers know the rows no more."""
    write(sqlite, b"maybe sent")
    with sqlite.connect() as connection:
        executor = executor_of(connection)
        (shard,) = shards.busy_shards(executor)
        now_us = time.time_ns() // 1_000
        assert shards.claim(executor, shard, ONE, 10, HOUR_US, now_us) is not None
        executor.rollback()
        for owner, later_us in ((ONE, HOUR_US // 2), (ONE, 2 * HOUR_US)):
            taken = shards.claim(executor, shard, owner, 10, HOUR_US, now_us + later_us)
            assert taken is not None
            doubtful = set(taken.doubtful)
            executor.rollback()
            if later_us < HOUR_US:
                assert not doubtful
    assert doubtful == {1}
    # written after the claim that did not end: never tried, so never in doubt
    write(sqlite, b"new")
    with sqlite.connect() as connection:
        executor = executor_of(connection)
        taken = shards.claim(executor, shard, ONE, 10, HOUR_US, now_us + 9 * HOUR_US)
        assert taken is not None
        assert taken.doubtful == {1}
        assert [row.id for row in taken.rows] == [1, 2]


def test_a_row_in_doubt_is_parked_with_what_to_do(sqlite: sa.Engine) -> None:
    write(sqlite, b"1", b"2")
    with sqlite.begin() as tx:
        tx.exec_driver_sql("UPDATE qmq_outbox SET attempted_at_us = 5 WHERE id = 1")
    sender = RecordingSender()
    assert drain(sqlite, sender)
    assert sender.sent == [b"2"]
    with sqlite.connect() as connection:
        (parked,) = shards.parked_rows(executor_of(connection), 10)
        assert "the broker may have it" in parked.reason
        assert shards.retry(executor_of(connection), None) == 1
    assert drain(sqlite, sender)
    assert sender.sent == [b"2", b"1"]


async def test_what_could_not_be_noted_is_noted_and_not_sent_again(sqlite: sa.Engine) -> None:
    write(sqlite, b"1")
    sender = RecordingSender()
    relay = relay_of(sqlite, sender)
    with sqlite.begin() as tx:
        tx.exec_driver_sql("CREATE TRIGGER full BEFORE UPDATE ON qmq_outbox BEGIN SELECT RAISE(FAIL, 'full'); END")
    with pytest.raises(DatabaseFailed, match="full"):
        await relay.drain()
    with sqlite.begin() as tx:
        tx.exec_driver_sql("DROP TRIGGER full")
    assert await relay.drain()
    assert sender.sent == [b"1"]
    assert states(sqlite) == {b"1": 1}


# ---------------------------------------------------------------------------------------------------------------------
# Errors


async def test_of_rows_that_go_by_one_call_only_the_bad_one_is_parked(sqlite: sa.Engine, broker_url: str) -> None:
    with sqlite.begin() as tx:
        for number in range(3):
            outbox.send(tx, "by-one-call", b"%d" % number, key=str(number))
        outbox.send(tx, "by-one-call", bytes(5 << 20), key="large")
        for number in range(3, 6):
            outbox.send(tx, "by-one-call", b"%d" % number, order_key="o", keys=["a", "b"])
        outbox.send(tx, "by-one-call", b"6", order_key="o", tags=["eu"])
        tx.exec_driver_sql("UPDATE qmq_outbox SET shard = 3")
    async with qmq.connect(broker_url) as client:
        assert await Relay(EngineDatabase(sqlite), ClientSender(client, 60)).drain()
        async with client.subscribe("by-one-call", group="by-one-call") as consumer:
            found = [(message.body, message.keys, message.order_key) async for message in taking(consumer, 7)]
    assert sorted(found) == [
        *((b"%d" % number, (str(number),), None) for number in range(3)),
        *((b"%d" % number, ("a", "b"), "o") for number in range(3, 6)),
        (b"6", (), "o"),
    ]
    with sqlite.connect() as connection:
        (parked,) = shards.parked_rows(executor_of(connection), 10)
    assert parked.reason.startswith("message_too_large: ")


def refused(error: qmq.QmqError) -> SendFailed:
    return SendFailed("1 message was not sent", [SendFailure(0, "shop.order", None, error, "refused")])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MessageTooLarge("over 4 MiB"), "message_too_large: over 4 MiB"),
        (refused(MessageTooLarge("over 4 MiB")), "message_too_large: over 4 MiB"),
        (refused(Forbidden("no right")), "forbidden: no right"),
        (TypeError("a bad option"), "TypeError: a bad option"),
    ],
)
def test_a_row_that_can_never_be_sent_is_parked_and_blocks_nobody(
    engine: sa.Engine, error: Exception, reason: str
) -> None:
    write(engine, b"1", b"bad", b"2")
    sender = RecordingSender({b"bad": error})
    assert drain(engine, sender)
    assert sender.sent == [b"1", b"2"]
    with engine.connect() as connection:
        executor = executor_of(connection)
        assert shards.backlog(executor, counts_sent=True) == (0, None, 1, 2)
        (parked,) = shards.parked_rows(executor, 10)
        assert parked.reason == reason
        sender.errors.clear()
        assert shards.retry(executor, []) == 0
        assert shards.retry(executor, [parked.id]) == 1
    assert drain(engine, sender)
    assert sender.sent == [b"1", b"2", b"bad"]


@pytest.mark.parametrize(
    "error",
    [
        refused(StorageFull("full")), SendUnknown("lost"), ConnectionLost("away"), TimeoutError("late"), OSError("odd"),
        refused(qmq.Unauthorized("expired")),
    ],
)  # fmt: skip
def test_a_row_that_fails_for_now_stays_and_is_tried_again(sqlite: sa.Engine, error: Exception) -> None:
    write(sqlite, b"1", b"2")
    sender = RecordingSender({b"1": error, b"2": error})
    assert not drain(sqlite, sender)
    assert states(sqlite) == {b"1": 0, b"2": 0}
    sender.errors.clear()
    assert drain(sqlite, sender)
    assert sender.sent == [b"1", b"2"]


def test_a_broker_that_is_away_costs_bounded_memory_and_few_tries(sqlite: sa.Engine) -> None:
    with sqlite.begin() as tx:
        for number in range(1_000):
            outbox.send(tx, "shop.order", b"%d" % number, key=str(number))
    sender = RecordingSender({b"%d" % number: ConnectionLost("away") for number in range(1_000)}, most=20)
    assert not drain(sqlite, sender)
    assert [len(rows) for rows in sender.tries] == [20]
    sender.errors.clear()
    assert drain(sqlite, sender)
    assert len(sender.sent) == 1_000
    assert max(map(len, sender.tries)) == 20


async def test_a_send_without_an_answer_gives_its_shard_back(sqlite: sa.Engine) -> None:
    class Silent:
        async def send(self, *arguments: object, **options: object) -> None:
            await asyncio.Event().wait()

    write(sqlite, b"1")
    relay = Relay(EngineDatabase(sqlite), ClientSender(Silent(), 0.01))  # type: ignore[arg-type]
    assert not await relay.drain()
    assert relay.counts.last_error == "no answer in time"
    sender = RecordingSender()
    assert await asyncio.to_thread(drain, sqlite, sender)
    assert sender.sent == [b"1"]


def test_a_client_without_asyncio_tries_no_further_row_in_vain() -> None:
    class Away:
        tries = 0

        def send(self, *arguments: object, **options: object) -> None:
            self.tries += 1
            raise ConnectionLost("away")

    client = Away()
    sender = SyncClientSender(client, -1)  # type: ignore[arg-type]
    row = OutboxRow(1, "u", "s", b"", None, 0, None)
    outcomes = asyncio.run(sender.send([row, row]))
    assert all(isinstance(outcome, TimeoutError) for outcome in outcomes)
    assert client.tries == 0
    outcomes = asyncio.run(SyncClientSender(client, 60).send([row]))  # type: ignore[arg-type]
    assert isinstance(outcomes[0], ConnectionLost)


# ---------------------------------------------------------------------------------------------------------------------
# The database


def test_a_database_that_goes_away_is_waited_for() -> None:
    with PostgreSQL() as server:
        database = server.database()
        engine_with_tables(database).dispose()
        engine = sa.create_engine(database.url, poolclass=sa.NullPool)
        sender = RecordingSender()

        async def main() -> None:
            relay = relay_of(engine, sender, poll=0.02)
            task = asyncio.create_task(relay.run())
            await asyncio.to_thread(write, engine, b"1")
            await until(lambda: sender.sent == [b"1"])
            await asyncio.to_thread(server.kill)
            await until(lambda: relay.counts.database_errors > 0)
            assert "the database says" in relay.counts.last_error
            await asyncio.to_thread(server.start)
            await asyncio.to_thread(write, engine, b"2")
            await until(lambda: sender.sent == [b"1", b"2"])
            relay.stop()
            await task

        asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # the relay tells nobody
            await asyncio.sleep(0.005)


async def test_tables_that_do_not_fit_are_refused(database: Database) -> None:
    engine = sa.create_engine(database.url)
    relay = relay_of(engine, RecordingSender())
    with pytest.raises(DatabaseFailed, match="make the tables"):
        await relay.check()
    engine_with_tables(database).dispose()
    await relay.check()
    for statement, reason in (
        ("UPDATE qmq_sql_version SET version = 2", "have version 2; this program knows version 1"),
        ("DELETE FROM qmq_sql_version", "have no version"),
        ("INSERT INTO qmq_sql_version VALUES (1)", ""),
        ("DELETE FROM qmq_outbox_shards WHERE shard = 3", "has 15 rows; it must have 16"),
    ):
        with engine.begin() as tx:
            tx.exec_driver_sql(statement)
        if reason:
            with pytest.raises(DatabaseFailed, match=reason):
                await relay.check()
    engine.dispose()


def test_a_read_only_database_is_named(tmp_path: Path) -> None:
    database = sqlite_database(tmp_path)
    engine = engine_with_tables(database)
    write(engine, b"1")
    engine.dispose()
    read_only = sa.create_engine(f"sqlite:///file:{tmp_path}/test.sqlite?mode=ro&uri=true")
    sender = RecordingSender()
    with pytest.raises(DatabaseFailed, match="readonly"):
        drain(read_only, sender)
    assert sender.sent == []
    read_only.dispose()


# ---------------------------------------------------------------------------------------------------------------------
# Old rows


def test_sent_rows_go_in_small_steps(engine: sa.Engine) -> None:
    rows = [
        {"uid": f"{number:032}", "shard": 3, "state": 1 + (number == 7), "subject": "s", "body": b"",
         "created_at_us": 0, "sent_at_us": number} for number in range(1_200)
    ]  # fmt: skip
    with engine.begin() as tx:
        values = ", ".join(f":{name}" for name in rows[0])
        tx.execute(sa.text(f"INSERT INTO qmq_outbox ({', '.join(rows[0])}) VALUES ({values})"), rows)
    with engine.connect() as first, engine.connect() as second:
        one, other = executor_of(first), executor_of(second)

        def clean(executor: Executor, owner: Owner) -> int:
            return shards.clean(executor, 3, owner, sent_before_us=1_100, now_us=NOW_US)

        assert clean(one, ONE) == 500
        if engine.dialect.name != "sqlite":  # another relay has the shard
            assert shards._take(other, 3, OTHER, NOW_US) is not None
            assert clean(one, ONE) == 0
            other.rollback()
        assert [clean(one, ONE) for _ in range(3)] == [500, 99, 0]
        assert shards.backlog(one, counts_sent=True) == (0, None, 1, 100)


async def test_a_relay_cleans_what_is_old(sqlite: sa.Engine) -> None:
    write(sqlite, b"1")
    with sqlite.begin() as tx:
        tx.exec_driver_sql("INSERT INTO qmq_inbox VALUES ('g', 'a', 5)")
        tx.exec_driver_sql(f"INSERT INTO qmq_inbox VALUES ('g', 'b', {time.time_ns()})")
    relay = relay_of(sqlite, RecordingSender(), keep=1e-6)
    assert await relay.drain()
    relay._was_cleaned_at = 0
    assert await relay.drain()
    assert relay.counts.cleaned == 2
    assert states(sqlite) == {}
    with sqlite.connect() as connection:
        assert connection.execute(sa.text("SELECT message_id FROM qmq_inbox")).fetchall() == [("b",)]
    write(sqlite, b"2")
    await relay_of(sqlite, RecordingSender(), keep=0).drain()
    assert states(sqlite) == {}


# ---------------------------------------------------------------------------------------------------------------------
# Waking


def test_a_relay_that_waits_is_woken(sqlite: sa.Engine) -> None:
    sender = RecordingSender()

    async def main() -> None:
        relay = relay_of(sqlite, sender, poll=3_600)
        task = asyncio.create_task(relay.run())
        await until(lambda: relay.counts.rounds > 10)  # it has looked often, and would look again in an hour
        await asyncio.to_thread(write, sqlite, b"1")
        threading.Thread(target=relay.wake).start()
        await until(lambda: sender.sent)
        relay.stop()
        await task

    asyncio.run(main())
    assert sender.sent == [b"1"]


def test_mariadb_skips_locked_rows(mariadb: MariaDB) -> None:
    engine = sa.create_engine(mariadb.database().url)
    with engine.connect() as connection:
        assert executor_of(connection).skips_locked
    engine.dispose()
