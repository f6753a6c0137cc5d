"""The tables of running brokers, by the public client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa

import qmq
from qmq.sql.query.filters import NO_LIMITS, Limits
from qmq.sql.query.stored import Damage, StoredMessages, texts_of, times_us
from qmq.sql.query.tables import SCHEMAS, Reader, Scan, batches_of

#: Subjects of a filter that are looked for one by one; for more of them all messages are looked through.
_MOST_SUBJECTS: Final = 100
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: The last time that a search takes.
_END_US: Final = (datetime(9999, 12, 31, tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)

Row = dict[str, Any]


class LiveTables:
    """The tables of the brokers of a URL.

    Messages are read from the logs, as Spark does, unless the filter asks for keys or ids, which the brokers' indexes
    find at once, or the token may not read the logs: then they are searched for, below the prefix that the filter says.
    A broker that does not answer is an error, since counts without its part would be wrong.
    """

    def __init__(self, url: str, timeout: float, report: Callable[[Damage], None], unreadable: Callable[[int], None]):
        """*report* takes each place of a log that cannot be read, *unreadable* the count of such places in a search."""
        self._url = url
        self._client = qmq.connect_sync(url, admin_timeout=timeout)
        self._logs = StoredMessages(url, report)
        self._unreadable = unreadable

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def readers(self) -> dict[str, Reader]:
        """Return what reads each table."""
        return {
            "messages": self._messages,
            "subjects": self._table("subjects", self._subjects),
            "groups": self._table("groups", self._groups),
            "consumers": self._table("consumers", self._consumers),
            "dead_letters": self._table("dead_letters", self._dead_letters),
        }

    def _table(self, name: str, rows: Callable[[Scan], Iterator[Row]]) -> Reader:
        def read(scan: Scan) -> Iterator[pa.RecordBatch]:
            return batches_of(rows(scan), scan.schema)

        return read

    # --- messages ----------------------------------------------------------------------------------------------------

    def _messages(self, scan: Scan) -> Iterator[pa.RecordBatch]:
        ids, keys = (texts_of(scan.filter.of(name)) for name in ("message_id", "key"))
        if ids is not None:
            return batches_of(self._with_ids(ids), scan.schema)
        if keys is not None and all(keys):
            return batches_of(self._found(scan, sorted(keys)), scan.schema)
        self._client.admin.rights()
        self._check()  # a log of a broker that is away would be waited for much longer
        try:
            self._logs.open()
        except qmq.Forbidden:
            return batches_of(self._found(scan, [None]), scan.schema)
        return self._logs.read(scan)

    def _with_ids(self, ids: frozenset[str]) -> Iterator[Row]:
        for message_id in sorted(ids):
            try:
                message = self._client.get(message_id)
            except (qmq.UnknownMessage, qmq.UsageError):  # the latter: a text that is no id
                continue
            if message.sequence is not None:
                yield _message_row(message)

    def _found(self, scan: Scan, keys: Sequence[str | None]) -> Iterator[Row]:
        since_us, until_us = times_us(scan.filter.of("stored_at"))
        since_us, until_us = min(since_us, _END_US), min(until_us, _END_US)
        if since_us >= until_us:
            return
        since, until = (_EPOCH + timedelta(microseconds=us) for us in (since_us, until_us))
        for prefix in _prefixes(scan.filter.of("subject")):
            for key in keys:
                try:
                    finder = self._client.find(prefix, key=key, since=since, until=until, limit=None, stop_after=None)
                except qmq.UsageError:  # no message can have such a subject or key
                    continue
                for message in finder:
                    # Copies for one group have no sequence. A message with several keys is found by each.
                    if message.sequence is not None and key in (None, message.key):
                        yield _message_row(message)
                self._unreadable(finder.unreadable)
                if finder.missed:
                    raise qmq.BrokersMissed(f"no answer from {', '.join(finder.missed)}; its messages are missing")

    # --- others ------------------------------------------------------------------------------------------------------

    def _subjects(self, _: Scan) -> Iterator[Row]:
        for info in self._client.subjects():
            row = {name: getattr(info, name, None) for name in SCHEMAS["subjects"].names}
            if info.high or info.low or info.ordered:  # each lane has sequences of its own
                row |= {"first_sequence": None, "next_sequence": None}
            yield row | {"subject": info.name}
        self._check()

    def _groups(self, _: Scan) -> Iterator[Row]:
        for info in self._client.admin.groups():
            yield {"group_name": info.name, **asdict(info)}
        self._check()

    def _consumers(self, scan: Scan) -> Iterator[Row]:
        for group in self._names(scan):
            for info in self._client.admin.consumers(group):
                times = {"silent_s": info.silent, "stalled_s": info.stalled}
                yield {"group_name": group, "consumer": info.name, **asdict(info), **times}
            self._check()

    def _dead_letters(self, scan: Scan) -> Iterator[Row]:
        for group in self._names(scan):
            for letter in self._client.admin.dead_letters(group):
                yield {"group_name": group, "message_id": letter.id, **asdict(letter)}
            self._check()

    def _names(self, scan: Scan) -> list[str]:
        """Return the groups that a scan may want."""
        names = {info.name for info in self._client.admin.groups()}
        self._check()
        wanted = texts_of(scan.filter.of("group_name"))
        return sorted(names if wanted is None else names & wanted)

    def _check(self) -> None:
        """Raise BrokersMissed if a broker did not answer the last call."""
        missed = self._client.admin.missed
        if missed:
            raise qmq.BrokersMissed(f"no answer from {', '.join(missed)}; its rows are missing")


def _prefixes(subject: Limits) -> list[str]:
    """Return the prefixes and subjects to search, for what a filter says about subjects."""
    if subject.values is not None and len(subject.values) <= _MOST_SUBJECTS:
        return sorted(name for name in subject.values if _is_subject(name))
    return [subject.prefix[: subject.prefix.rfind(".") + 1]] if subject is not NO_LIMITS else [""]


def _is_subject(name: object) -> bool:
    """Whether messages may have this subject; a prefix would search others."""
    return isinstance(name, str) and bool(name) and not name.endswith(".")


def _message_row(message: qmq.StoredMessage) -> Row:
    row = {name: getattr(message, name, None) for name in SCHEMAS["messages"].names}
    return row | {"message_id": message.id, "properties": list(message.properties.items())}
