"""An import: rows of a database become messages of one broker, each once.

Before a chunk of rows is sent, its ids are written to the state file; when the broker has stored it, that is written
with the next chunk. So after a kill only the rows of one chunk may be stored without a note of it, and every message
says by its properties which row it was: the import looks for those in the newest messages of their subjects, and sends
the rest. The producer's name keeps a second run of the same import out meanwhile.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import qmq
from qmq.errors import InvalidOption, ProducerInUse, RowRejected, SendFailed, SendUnknown, StorageFailed
from qmq.names import check_group, takes
from qmq.sql.importing.levels import Section, levels_of
from qmq.sql.importing.rows import IMPORT, IMPORT_ID, Row, RowColumns, RowId, text_of
from qmq.sql.importing.source import RowSource
from qmq.sql.importing.state import Chunk, ImportState, ImportStateFile

#: The rows of a chunk, and the bytes of their bodies; more only for one larger row.
CHUNK_ROWS: Final = 1_000
CHUNK_BYTES: Final = 8 << 20
#: The clock of the broker may differ by this from that of the import.
_CLOCKS: Final = timedelta(days=1)
#: A broker notices within this that a client was killed, whose name is free then.
_CLAIM_S: Final = 5.0
_PAUSE_S: Final = 0.1
#: What a broker has taken is on its disk, and to be seen, within this.
_VISIBLE_S: Final = 60.0
_NAME: Final = re.compile(r"[\w.-]{1,100}", re.ASCII)
_MOST_REASONS: Final = 5
#: Errors of the client that are about one message, whenever it is sent.
_OF_A_ROW: Final = (qmq.UsageError, qmq.MessageTooLarge, TypeError)

OnError = Literal["fail", "skip"]


@dataclass
class ImportSummary:
    """The counts of an import: of all its runs so far, and of the last one."""

    name: str
    imported: int
    rejected: int
    #: In this run.
    imported_now: int = 0
    rejected_now: int = 0
    #: The groups that begin where their offset was.
    groups: list[str] = field(default_factory=list)
    #: Rows of a dry run, by subject and priority.
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: The first reasons for which rows were rejected.
    reasons: list[str] = field(default_factory=list)
    #: Rows that are in the table, and were not when the ids around them were imported.
    late: int = 0


class RejectedRows:
    """The file of rows that were rejected: a JSON object a line."""

    def __init__(self, path: Path, size: int) -> None:
        """Cut off what belongs to rows that are to be looked at again, behind *size* bytes. Raises StorageFailed."""
        self._path = path
        with suppress(FileNotFoundError), self._raising(), path.open("r+b") as file:
            file.truncate(size)

    def add(self, row_id: RowId, reason: str, row: Row) -> None:
        """Add a row. Raises StorageFailed."""
        values = {name: _shown(value) for name, value in row.items()}
        line = json.dumps({"id": row_id, "reason": reason, "row": values}, ensure_ascii=False).encode() + b"\n"
        with self._raising(), self._path.open("ab") as file:
            file.write(line)

    def size(self) -> int:
        """Return its bytes."""
        return self._path.stat().st_size if self._path.exists() else 0

    def _raising(self) -> _Raising:
        return _Raising(self._path)


class _Raising:
    """Raises StorageFailed for an error of the system in its block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise StorageFailed(f"{self._path}: {error.strerror or error}") from error


@dataclass
class _HeldRow:
    """A row of a chunk: its message, or the reason for which it can be none."""

    id: RowId
    row: Row
    message: dict[str, Any] | None = None
    reason: str | None = None


class ImportRun:
    """One run of an import."""

    def __init__(
        self,
        source: RowSource,
        columns: RowColumns,
        name: str,
        *,
        query: str,
        state: ImportStateFile,
        rejected: Path,
        on_error: OnError = "fail",
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """*query* stands for what is imported: another one under this name is refused. *progress* takes the count of
        rows that this run has looked at.
        """
        if not _NAME.fullmatch(name):
            raise InvalidOption(f"--name {name!r:.80} has other characters than letters, digits, dots, - and _")
        self._source = source
        self._columns = columns
        self._name = name
        self._query = query
        self._file = state
        self._rejected_path = rejected
        self._on_error: OnError = on_error
        self._progress = progress or (lambda _: None)
        self._looked = 0
        self._state = ImportState.begin(name, query)
        self._summary = ImportSummary(name, 0, 0)
        #: Rows that were stored before a kill and are to be read again, and the subjects of their messages.
        self._stored: set[str] = set()
        self._stored_subjects: set[str] = set()
        #: What the token may look at; None: not asked yet.
        self._browse: tuple[str, ...] | None = None

    # --- a dry run ---------------------------------------------------------------------------------------------------

    def look(self, offsets_query: str | None, *, allow_repeats: bool = False) -> ImportSummary:
        """Look at the rows that a run would send, and send nothing. Raises InvalidOption, DatabaseFailed."""
        state = self._file.load()
        if state is None:
            state = self._begun(offsets_query, allow_repeats=allow_repeats)
        self._check_same(state)
        self._check_rows(state)
        summary = self._summary
        for level in state.levels:
            summary.groups += level.groups
            for section in level.sections:
                for row in self._source.rows(section, state.after.get(section.name, section.low)):
                    self._looked += 1
                    self._progress(self._looked)
                    try:
                        message = self._message_of(section, row)
                    except RowRejected as error:
                        self._note_rejected(self._columns.id_of(row), str(error))
                    else:
                        summary.imported_now += 1
                        summary.counts[message["subject"], message.get("priority", "normal")] += 1
        return summary

    # --- a run -------------------------------------------------------------------------------------------------------

    def run(
        self, server: str, offsets_query: str | None, follows: Sequence[str], *, allow_repeats: bool = False,
        skip_others: bool = False, timeout: float = 10.0,
    ) -> ImportSummary:  # fmt: skip
        """Send the rows that are missing, and make the groups, which follow *follows*.

        Raises InvalidOption; ProducerInUse if another run goes on; RowRejected for a row that can be no message,
        unless these are skipped; DatabaseFailed; StorageFailed for the files of the import; and as sends do. Whenever
        it ends, another run goes on from there.
        """
        found = self._file.load()
        with self._connected(server, timeout) as client:
            if found is None:
                found = self._begun(offsets_query, allow_repeats=allow_repeats)
                self._check_new(client, found)
                self._check_others(client, found, follows, skip_others=skip_others)
                self._file.save(found)
            self._check_same(found)
            self._check_rows(found)
            state = self._state = found
            self._summary.imported, self._summary.rejected = state.imported, state.rejected
            rejected = RejectedRows(self._rejected_path, state.rejected_bytes)
            if state.chunk is not None:
                self._stored = self._stored_of(client, state.chunk)
                self._stored_subjects = set(state.chunk.subjects)
            for level in state.levels:
                if not set(level.groups) <= set(state.groups):
                    self._check_others(client, state, follows, skip_others=skip_others)
                self._make_groups(client, level.groups, follows)
                for section in level.sections:
                    self._send_section(client, section, rejected)
            self._file.save(state)
            self._summary.late = self._late()
        self._summary.groups = state.groups
        return self._summary

    def _begun(self, offsets_query: str | None, *, allow_repeats: bool) -> ImportState:
        """Return the state of an import that begins now."""
        state = ImportState.begin(self._name, self._query)
        state.allow_repeats = allow_repeats
        self._check_rows(state)
        if offsets_query is not None:
            offsets = self._source.offsets(offsets_query)
            state.offsets = {group: list(pairs.items()) for group, pairs in offsets.items()}
            for group in offsets:
                check_group(group)
            levels_of(state.priorities, offsets, allow_repeats=allow_repeats)
        return state

    def _check_rows(self, state: ImportState) -> None:
        """Note the priorities that rows have now. Raises InvalidOption if a row has no id: no section would have it."""
        self._source.check_ids()
        state.priorities += [each for each in self._source.priorities() if each not in state.priorities]

    def _check_same(self, state: ImportState) -> None:
        """Raise InvalidOption if the import was begun with another query or other columns."""
        if state.name != self._name or state.query != self._query:
            raise InvalidOption(
                f"{self._file.path} is the state of import {state.name}, which was begun with other options: "
                f"{state.query}. Repeat it with these, or give another --name and --state for another import"
            )

    def _check_new(self, client: qmq.SyncClient, state: ImportState) -> None:
        """Raise InvalidOption if the broker knows this import, whose state is not here, or one of its groups."""
        if client.last_sequence() is not None:
            raise InvalidOption(
                f"import {self._name} has sent messages to this broker, and its state {self._file.path} is not there; "
                "name the file with --state, or begin another import with --name"
            )
        known = {info.name for info in client.admin.groups()} if state.offsets else set()
        there = sorted(known & state.offsets.keys())
        if there:
            raise InvalidOption(
                f"group {there[0]} exists already, so it cannot begin at its offset; delete it (qmq groups delete), or "
                "leave it out of --group-offsets"
            )

    def _check_others(
        self, client: qmq.SyncClient, state: ImportState, follows: Sequence[str], *, skip_others: bool
    ) -> None:
        """Raise InvalidOption if others have sent messages that a group, which begins now, would not get."""
        if not state.offsets:
            return
        there = {info.name: info.messages for prefix in follows for info in client.subjects(prefix)}
        others = sum(there.values()) - state.imported
        if others > state.others and not skip_others:
            raise InvalidOption(
                f"others have sent {others - state.others:,} messages to {', '.join(follows)}, which the groups of "
                "--group-offsets would not get, as they begin behind them. Let programs send there only when the "
                "import has run once; if the groups need not get these messages, give --skip-others"
            )
        state.others = max(state.others, others)

    def _connected(self, server: str, timeout: float) -> qmq.SyncClient:
        """Return a client whose producer nobody else uses."""
        client = qmq.connect_sync(server, producer=self._name, app="qmq import", failover_after=None,
                                  admin_timeout=timeout)  # fmt: skip
        ends = time.monotonic() + _CLAIM_S
        while True:
            try:
                return client.__enter__()
            except ProducerInUse:
                if time.monotonic() > ends:
                    raise
                time.sleep(_PAUSE_S)

    def _stored_of(self, client: qmq.SyncClient, chunk: Chunk) -> set[str]:
        """Return the ids of rows of a chunk that were stored before a kill. Raises QmqError if the broker does not show
        in time what it has taken.
        """
        ids = set(chunk.ids)
        last = client.last_sequence()
        taken = 0 if last is None else last + 1 - chunk.first  # None: hours ago, or nothing was taken
        ends = time.monotonic() + _VISIBLE_S
        while True:
            found = {id_text for subject in chunk.subjects for id_text in self._found(client, subject, ids)}
            if len(found) >= chunk.known + taken:  # what was taken last may still be on its way to the disk
                return found
            if time.monotonic() > ends:
                raise SendUnknown(
                    f"the broker took {chunk.known + taken} rows and shows {len(found)} of them; repeat this later"
                )
            time.sleep(_PAUSE_S)

    def _found(self, client: qmq.SyncClient, subject: str, ids: set[str]) -> Iterator[str]:
        """Yield those of some rows that the newest messages of a subject are."""
        since = datetime.fromisoformat(self._state.begun_at) - _CLOCKS
        for message in client.find(subject, since=since, newest=True, limit=None, stop_after=None):
            if message.properties.get(IMPORT) == self._name:
                id_text = message.properties.get(IMPORT_ID, "")
                if id_text not in ids:  # it was stored before these
                    break
                yield id_text

    def _make_groups(self, client: qmq.SyncClient, groups: Sequence[str], follows: Sequence[str]) -> None:
        """Make groups that begin with the next message that is sent."""
        for group in groups:
            if group not in self._state.groups:
                with client.subscribe(*follows, group=group, start="new") as consumer:
                    consumer.flush()
                self._state.groups.append(group)
                self._file.save(self._state)

    def _send_section(self, client: qmq.SyncClient, section: Section, rejected: RejectedRows) -> None:
        held, size = list[_HeldRow](), 0
        for row in self._source.rows(section, self._state.after.get(section.name, section.low)):
            held_row = _HeldRow(self._columns.id_of(row), row)
            held.append(held_row)
            try:
                held_row.message = self._message_of(section, row)
            except RowRejected as error:
                held_row.reason = str(error)
                if self._on_error == "fail":
                    break
            else:
                size += sum(map(len, (held_row.message["body"], *held_row.message["properties"].values())))
            if len(held) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                self._send(client, section, held, rejected)
                held, size = [], 0
        self._send(client, section, held, rejected)

    def _send(self, client: qmq.SyncClient, section: Section, held: list[_HeldRow], rejected: RejectedRows) -> None:
        """Send rows that are not stored already, and note all of them as done. Unless rows that can be no message are
        skipped, such a row raises RowRejected when those before it are stored.
        """
        state, rows = self._state, [row for row in held if row.message is not None]
        if rows:
            ids = {self._id_text(section, row.id) for row in rows} | self._stored
            subjects = {row.message["subject"] for row in rows if row.message is not None} | self._stored_subjects
            self._check_rights(client, subjects)
            last = client.last_sequence()
            first = 0 if last is None else last + 1
            state.chunk = Chunk(sorted(ids), sorted(subjects), len(self._stored), first)
            self._file.save(state)
        tickets = dict[int, _HeldRow]()
        for row in rows:
            if self._id_text(section, row.id) in self._stored:
                continue
            assert row.message is not None
            try:
                tickets[client.send_nowait(**row.message)] = row
            except _OF_A_ROW as error:
                row.reason = str(error)
                if self._on_error == "fail":
                    break
        self._flush(client, tickets)
        state.chunk = None
        refused = next((row for row in held if row.reason is not None), None)
        done = held if refused is None or self._on_error == "skip" else held[: held.index(refused)]
        self._stored -= {self._id_text(section, row.id) for row in done}
        for row in done:
            if row.reason is not None:
                self._note_rejected(row.id, row.reason)
                rejected.add(row.id, row.reason, row.row)
        self._note_done(section, done, rejected)
        if refused is not None and self._on_error == "fail":
            self._file.save(state)
            raise RowRejected(
                f"row {self._id_text(section, refused.id)}: {refused.reason}. All rows before it are imported; "
                "change it, or give --on-error skip, and repeat the import"
            )

    def _check_rights(self, client: qmq.SyncClient, subjects: set[str]) -> None:
        """Raise Forbidden if the token may not look at a subject: after a kill, nobody could say what was stored."""
        if self._browse is None:
            (rights,) = client.admin.rights()
            self._browse = ("",) if rights.admin else rights.browse
        hidden = sorted(subject for subject in subjects if not takes(self._browse, subject))
        if hidden:
            raise qmq.Forbidden(
                f"the token may not look at {hidden[0]}, which an import does after a kill to send no row twice; give "
                f"it the right to browse: qmq tokens create NAME --produce {hidden[0]} --browse {hidden[0]}"
            )

    def _flush(self, client: qmq.SyncClient, tickets: dict[int, _HeldRow]) -> None:
        """Wait until messages are stored, and note the rows that the broker refuses for good. Raises SendFailed."""
        try:
            client.flush()
        except SendFailed as error:
            for failure in error.failures:
                row = tickets.get(failure.ticket)
                if row is None or failure.outcome != "refused" or not isinstance(failure.error, _OF_A_ROW):
                    raise
                row.reason = str(failure.error)
            # Rows behind the first one that was refused may be stored: another run finds them.
            if not error.failures or self._on_error == "fail":
                raise

    def _note_done(self, section: Section, done: Sequence[_HeldRow], rejected: RejectedRows) -> None:
        if not done:
            return
        state, summary = self._state, self._summary
        imported = sum(row.reason is None for row in done)
        state.after[section.name] = done[-1].id
        state.passed[section.name] = state.passed.get(section.name, 0) + len(done)
        state.imported += imported
        state.rejected += len(done) - imported
        state.rejected_bytes = rejected.size()
        summary.imported, summary.rejected = state.imported, state.rejected
        summary.imported_now += imported
        self._looked += len(done)
        self._progress(self._looked)

    def _late(self) -> int:
        """Return how many rows were committed behind others with higher ids, and so were passed by."""
        late = 0
        for level in self._state.levels:
            for section in level.sections:
                after = self._state.after.get(section.name)
                if after is not None:
                    late += max(0, self._source.count(section, after) - self._state.passed.get(section.name, 0))
        return late

    def _message_of(self, section: Section, row: Row) -> dict[str, Any]:
        return self._columns.message_of(row, self._name, self._id_text(section, self._columns.id_of(row)))

    def _id_text(self, section: Section, row_id: RowId) -> str:
        """Return what names a row: with priorities, ids may be of different tables."""
        return str(row_id) if section.priority is None else f"{section.priority}:{row_id}"

    def _note_rejected(self, row_id: RowId, reason: str) -> None:
        self._summary.rejected_now += 1
        if len(self._summary.reasons) < _MOST_REASONS:
            self._summary.reasons.append(f"row {row_id}: {reason}")


def _shown(value: Any) -> Any:
    """Return a value of a rejected row as JSON has it."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    try:
        return text_of(value)
    except ValueError:
        return {"hex": bytes(value).hex()}
