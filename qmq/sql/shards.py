"""The database side of a relay: it takes a shard, reads the rows that wait there, and records their outcomes.

All of it is plain SQL over an ``Executor``, so that it works over SQLAlchemy and over Django alike. A shard has one
owner at a time. Where the database can skip locked rows, the owner holds a lock on the shard's row for as long as its
transaction, which the database ends when the owner stays silent for longer than its lease; elsewhere (SQLite) the
owner's name and the end of its lease stand in the row.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from qmq.errors import DatabaseFailed
from qmq.sql.rows import PARKED, READY, SENT, SHARDS, OutboxRow

#: The version of the tables that this program knows.
KNOWN_VERSION: Final = 1
_MOST_REASON: Final = 2_000
_CLEANED_AT_ONCE: Final = 500

_BUSY_SHARDS: Final = f"""
    SELECT shard FROM qmq_outbox_shards WHERE EXISTS (
        SELECT 1 FROM qmq_outbox WHERE qmq_outbox.state = {READY} AND qmq_outbox.shard = qmq_outbox_shards.shard)
"""
_LAST_CLAIM: Final = "SELECT claimed_at_us, claimed_to, owner FROM qmq_outbox_shards WHERE shard = :shard"
_LOCK: Final = f"{_LAST_CLAIM} FOR UPDATE SKIP LOCKED"
#: A setting within the transaction costs no further round trip there.
_LOCK_WITH_LEASE: Final = """
    SELECT claimed_at_us, claimed_to, owner, set_config('idle_in_transaction_session_timeout', :lease, true)
    FROM qmq_outbox_shards WHERE shard = :shard FOR UPDATE SKIP LOCKED
"""
_LEASE: Final = """
    UPDATE qmq_outbox_shards SET owner = :owner, lease_until_us = :until
    WHERE shard = :shard AND (owner IS NULL OR owner = :owner OR lease_until_us < :now)
"""
_LEASED: Final = """
    SELECT 1 FROM qmq_outbox_shards WHERE shard = :shard AND owner IS NOT NULL AND owner <> :owner
    AND lease_until_us >= :now
"""
_ROWS: Final = f"""
    SELECT id, uid, subject, body, options, created_at_us, attempted_at_us FROM qmq_outbox
    WHERE state = {READY} AND shard = :shard ORDER BY id LIMIT :most
"""
_UNNOTED: Final = f"""
    SELECT id FROM qmq_outbox
    WHERE state = {READY} AND shard = :shard AND id <= :to AND attempted_at_us IS NULL ORDER BY id
"""
_OLD_SENT: Final = f"""
    SELECT id, sent_at_us FROM qmq_outbox WHERE state = {SENT} AND shard = :shard ORDER BY id LIMIT {_CLEANED_AT_ONCE}
"""


class Executor(Protocol):
    """Runs statements on one connection, in transactions. Values are named ``:so`` in a statement."""

    dialect: str
    skips_locked: bool

    def rows(self, statement: str, **values: Any) -> Sequence[Sequence[Any]]:
        """Return the rows of a query."""

    def change(self, statement: str, **values: Any) -> int:
        """Run a statement that changes rows; return how many."""

    def change_plain(self, statement: str) -> int:
        """Run a statement without values, which will not come again."""

    def commit(self) -> None:
        """End the transaction."""

    def rollback(self) -> None:
        """Undo the transaction."""


class Owner(NamedTuple):
    """A relay as the database knows it, and for how many seconds it keeps a shard without a sign of life."""

    name: str
    lease: float


class ClaimedRows(NamedTuple):
    """A shard that a relay has, and the rows that it sends next. ``doubtful``: those of which nobody knows whether the
    broker has them, since when they were tried is longer ago than the broker remembers.
    """

    shard: int
    rows: list[OutboxRow]
    doubtful: frozenset[int]


class RowOutcomes(NamedTuple):
    """The outcomes of a claim's rows, by id: rows that are stored, rows that can never be sent and why, and rows that
    were tried in vain.
    """

    sent: list[int]
    refused: dict[int, str]
    failed: list[int]


def check_tables(executor: Executor) -> None:
    """Raise DatabaseFailed where the tables are of another version; the error of the database where there are none."""
    versions = [row[0] for row in executor.rows("SELECT version FROM qmq_sql_version")]
    shards = executor.rows("SELECT count(*) FROM qmq_outbox_shards")[0][0]
    executor.rollback()
    if versions != [KNOWN_VERSION]:
        has = f"version {', '.join(map(str, versions))}" if versions else "no version"
        raise DatabaseFailed(
            f"the tables of QMQ in this database have {has}; this program knows version {KNOWN_VERSION}: use the "
            "program that fits the tables, or change them as its CHANGELOG says"
        )
    if shards != SHARDS:
        raise DatabaseFailed(
            f"the table qmq_outbox_shards has {shards} rows; it must have {SHARDS}: insert them, as `qmq sql ddl` shows"
        )


def busy_shards(executor: Executor) -> list[int]:
    """Return the shards in which rows wait, in random order, so that several relays begin at different ones."""
    shards = [row[0] for row in executor.rows(_BUSY_SHARDS)]
    executor.rollback()
    random.shuffle(shards)
    return shards


def claim(
    executor: Executor, shard: int, owner: Owner, most: int, remembered_us: int, now_us: int
) -> ClaimedRows | None:
    """Take a shard with up to *most* of its rows; None if another relay has it, or nothing waits there.

    *remembered_us* is how long after a try a broker surely knows the row again.
    """
    last = _take(executor, shard, owner, now_us)
    if last is None:
        executor.rollback()
        return None
    if last.claimed_at_us:
        _note_tries(executor, shard, last)
    rows = [OutboxRow(*row) for row in executor.rows(_ROWS, shard=shard, most=most)]
    # On disk before the first send: who finds the shard like this cannot know which of these rows were sent.
    executor.change(
        "UPDATE qmq_outbox_shards SET owner = :owner, claimed_at_us = :now, claimed_to = :to WHERE shard = :shard",
        owner=owner.name, now=now_us if rows else 0, to=rows[-1].id if rows else 0, shard=shard,
    )  # fmt: skip
    if not rows:
        _release(executor, shard, owner)
        return None
    executor.commit()
    # Another relay may have had the shard for a moment, or all it takes to send these rows.
    if executor.skips_locked and _take(executor, shard, owner, now_us) != (now_us, rows[-1].id, owner.name):
        executor.rollback()
        return None
    doubtful = frozenset(
        row.id for row in rows if row.attempted_at_us is not None and now_us - row.attempted_at_us > remembered_us
    )
    return ClaimedRows(shard, rows, doubtful)


class _LastClaim(NamedTuple):
    """When rows of a shard were claimed last, and up to which id, if that claim did not end; else 0; and by whom."""

    claimed_at_us: int
    claimed_to: int
    owner: str | None


def _take(executor: Executor, shard: int, owner: Owner, now_us: int) -> _LastClaim | None:
    """Return the last claim of the shard, or None if another relay has it."""
    if not executor.skips_locked:
        if executor.rows(_LEASED, owner=owner.name, shard=shard, now=now_us):
            return None  # found out without the lock that writers of SQLite wait for
        until = now_us + int(owner.lease * 1e6)
        if not executor.change(_LEASE, owner=owner.name, until=until, shard=shard, now=now_us):
            return None
        found = executor.rows(_LAST_CLAIM, shard=shard)
    elif executor.dialect == "postgresql":
        found = executor.rows(_LOCK_WITH_LEASE, shard=shard, lease=f"{int(owner.lease * 1_000)}ms")
    else:
        found = executor.rows(_LOCK, shard=shard)
    return _LastClaim(int(found[0][0]), int(found[0][1]), found[0][2]) if found else None


def _note_tries(executor: Executor, shard: int, last: _LastClaim) -> None:
    """Note when the rows of a claim that did not end may have been sent.

    MariaDB and MySQL lock what a statement looks at, also rows of transactions that are open, so ids come first.
    """
    ids = [row[0] for row in executor.rows(_UNNOTED, shard=shard, to=last.claimed_to)]
    if ids:
        executor.change_plain(
            f"{_update(executor)} SET attempted_at_us = {int(last.claimed_at_us)} WHERE id IN {_listed(ids)}"
        )


def finish(
    executor: Executor, taken: ClaimedRows, outcomes: RowOutcomes, owner: Owner, *, keeps: bool, first_try_us: int,
    now_us: int,
) -> None:  # fmt: skip
    """Note what became of the rows of a claim, and give the shard back. Sent rows are deleted unless it *keeps* them.

    *first_try_us* is when those that failed were tried.
    """
    is_ready = f"state + 0 = {READY}"  # never by the index of states, which would lock other rows in MariaDB
    if outcomes.sent:
        ids = _listed(outcomes.sent)
        if keeps:
            change = f"{_update(executor)} SET state = {SENT}, sent_at_us = {int(now_us)}"
        else:
            change = _delete(executor)
        executor.change_plain(f"{change} WHERE id IN {ids} AND {is_ready}")
    for number, reason in outcomes.refused.items():
        executor.change(
            f"UPDATE qmq_outbox SET state = {PARKED}, reason = :reason WHERE id = :id AND {is_ready}",
            reason=reason[:_MOST_REASON], id=number,
        )  # fmt: skip
    if outcomes.failed:
        executor.change_plain(
            f"{_update(executor)} SET attempted_at_us = {int(first_try_us)} "
            f"WHERE id IN {_listed(outcomes.failed)} AND {is_ready} AND attempted_at_us IS NULL"
        )
    if not executor.skips_locked:  # else the lock says whose it is
        is_own = executor.rows("SELECT owner FROM qmq_outbox_shards WHERE shard = :shard", shard=taken.shard)
        if is_own and is_own[0][0] != owner.name:
            executor.commit()
            return
    executor.change("UPDATE qmq_outbox_shards SET claimed_at_us = 0 WHERE shard = :shard", shard=taken.shard)
    _release(executor, taken.shard, owner)


def _release(executor: Executor, shard: int, owner: Owner) -> None:
    """Give a shard back, and commit."""
    if not executor.skips_locked:
        executor.change(
            "UPDATE qmq_outbox_shards SET owner = NULL WHERE shard = :shard AND owner = :owner",
            shard=shard, owner=owner.name,
        )  # fmt: skip
    executor.commit()


def _update(executor: Executor) -> str:
    """Return how an UPDATE of rows by their ids begins. MariaDB and MySQL may else look at, and lock, all rows."""
    return "UPDATE qmq_outbox FORCE INDEX (PRIMARY)" if executor.dialect == "mysql" else "UPDATE qmq_outbox"


def _delete(executor: Executor) -> str:
    if executor.dialect == "mysql":
        return "DELETE qmq_outbox FROM qmq_outbox FORCE INDEX (PRIMARY)"
    return "DELETE FROM qmq_outbox"


def clean(executor: Executor, shard: int, owner: Owner, *, sent_before_us: int, now_us: int) -> int:
    """Delete up to 500 of a shard's rows that were sent before a time; return how many; 0 if another relay has it."""
    old = [row for row in executor.rows(_OLD_SENT, shard=shard) if row[1] is None or row[1] < sent_before_us]
    executor.rollback()
    if not old:
        return 0
    if _take(executor, shard, owner, now_us) is None:
        executor.rollback()
        return 0
    ids = _listed(sorted(row[0] for row in old))
    count = executor.change_plain(f"{_delete(executor)} WHERE id IN {ids} AND state + 0 = {SENT}")
    _release(executor, shard, owner)
    return count


def clean_inbox(executor: Executor, now_us: int) -> int:
    """Delete up to 500 rows of the inbox whose time is over; return how many."""
    old = executor.rows(
        "SELECT group_name, message_id FROM qmq_inbox WHERE expires_at_us < :now "
        f"ORDER BY expires_at_us LIMIT {_CLEANED_AT_ONCE}",
        now=now_us,
    )
    executor.rollback()
    for group, message_id in old:
        executor.change(
            "DELETE FROM qmq_inbox WHERE group_name = :group AND message_id = :id AND expires_at_us < :now",
            group=group, id=message_id, now=now_us,
        )  # fmt: skip
    executor.commit()
    return len(old)


class Backlog(NamedTuple):
    """What an outbox has: rows that wait, the time at which the oldest of them was made, rows that are parked, and, if
    they were counted, rows that are sent.
    """

    ready: int
    oldest_us: int | None
    parked: int
    sent: int | None = None


def backlog(executor: Executor, *, counts_sent: bool = False) -> Backlog:
    """Count the rows. To count those that are sent reads an index entry of each."""
    ready, oldest = executor.rows(f"SELECT count(*), min(created_at_us) FROM qmq_outbox WHERE state = {READY}")[0]
    parked = executor.rows(f"SELECT count(*) FROM qmq_outbox WHERE state = {PARKED}")[0][0]
    sent = executor.rows(f"SELECT count(*) FROM qmq_outbox WHERE state = {SENT}")[0][0] if counts_sent else None
    executor.rollback()
    return Backlog(ready, None if oldest is None else int(oldest), parked, sent)


class ParkedRow(NamedTuple):
    """A row that was refused for good."""

    id: int
    subject: str
    created_at_us: int
    reason: str


def parked_rows(executor: Executor, most: int) -> list[ParkedRow]:
    """Return rows that are parked, of the first ones up to *most*."""
    rows = executor.rows(
        f"SELECT id, subject, created_at_us, reason FROM qmq_outbox WHERE state = {PARKED} "
        "ORDER BY shard, id LIMIT :most",
        most=most,
    )
    executor.rollback()
    return [ParkedRow(*row) for row in rows]


def retry(executor: Executor, ids: Sequence[int] | None) -> int:
    """Have parked rows sent again, those with these *ids* or all; return how many. They go behind no later row of
    their key: those were sent meanwhile.
    """
    where = "" if ids is None else f" AND id IN {_listed(ids)}"
    if ids is not None and not ids:
        return 0
    count = executor.change_plain(
        f"UPDATE qmq_outbox SET state = {READY}, reason = NULL, attempted_at_us = NULL WHERE state = {PARKED}{where}"
    )
    executor.commit()
    return count


def _listed(ids: Sequence[int]) -> str:
    return "(" + ", ".join(str(int(number)) for number in ids) + ")"
