"""Answers traces: one after another, each in small steps, and never two steps in a row.

A step takes 0.1 to 0.4 ms, and at least a millisecond passes before the next, so that sends and pulls wait for none of
them, however many traces are asked for. The pull log is read in a thread.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from qmq.broker.delay.delay import DelayedMessages, DelayedState
from qmq.broker.delivery.serve import blocking_reads
from qmq.broker.find.trace.consumers import ConsumerScan, rows_of
from qmq.broker.find.trace.events import events_of
from qmq.broker.find.trace.places import MessagePlace, find_place
from qmq.broker.find.trace.records import FileFacts, FoundRecords, RecordScan
from qmq.broker.find.trace.states import GroupMessage, GroupView, with_events
from qmq.broker.groups.group import Group
from qmq.broker.ports.commands import Now, ReadDone, TraceConsumer, TraceMessage
from qmq.broker.ports.effects import Asker, Effect, ReadWanted, ReadWork, Refused, Traced, failed, first_number
from qmq.broker.ports.rights import Rights
from qmq.errors import InvalidOption, Overloaded, QmqError, StorageError, UnknownMessage
from qmq.format.ids import MessageId
from qmq.format.layout import DELAY_PARTITION, MESSAGE_ID
from qmq.names import takes
from qmq.storage.store import ColdRead, NotInMemory, Store

#: Traces that wait, of all connections and of one.
MOST_WAITING: Final = 64
MOST_OF_ONE: Final = 8
#: Groups of one step; the time between two steps.
GROUPS_AT_ONCE: Final = 4
_PAUSE_US: Final = 1_000
#: Places of one message: itself and copies.
MOST_PLACES: Final = 1_024
#: Reads for one look, before it reads while everybody waits.
_MOST_READS: Final = 16

TraceCommand = TraceMessage | TraceConsumer
T = TypeVar("T")
Steps = Generator[ReadWork | None, None, T]


class MessageFacts(NamedTuple):
    """The facts of a message apart from groups: ``state`` is stored, delayed, cancelled or dropped."""

    state: str
    subject: str | None = None
    sequence: int | None = None
    stored_us: int | None = None
    due_us: int | None = None


class Traces:
    """The traces that clients have asked for."""

    def __init__(
        self, store: Store, groups: Mapping[str, Group], delaying: DelayedMessages, effects: list[Effect],
        rights: Mapping[int, Rights],
    ) -> None:  # fmt: skip
        """*rights* are those of the connections that have a token."""
        self._rights = rights
        self._store = store
        self._groups = groups
        self._delaying = delaying
        self._effects = effects
        self._waiting: deque[TraceCommand] = deque()
        self._by_connection: Counter[int] = Counter()
        self._current: TraceCommand | None = None
        self._steps: Steps[Traced] | None = None
        self._last_read = first_number(Asker.TRACE)
        self._read: ReadWork | None = None
        self._files = dict[int, FileFacts]()  # of the pull log, by base
        self._next_us = 0
        self._now = Now(0, 0)
        #: Errors of reads.
        self.damaged: list[StorageError] = []

    def trace(self, command: TraceMessage) -> None:
        """Begin a trace, or let it wait. Raises InvalidOption, UnknownMessage, Overloaded."""
        name = MessageId._make(MESSAGE_ID.unpack(command.message_id))
        if name.store_id != self._store.store_id and not command.places:
            raise UnknownMessage(
                f"message {name} is of store {name.store_id.hex()}; this is {self._store.store_id.hex()}"
            )
        if len(command.places) > MOST_PLACES:
            raise InvalidOption(f"a trace names at most {MOST_PLACES:,} copies, not {len(command.places):,}")
        self._add(command)

    def trace_consumer(self, command: TraceConsumer) -> None:
        """Begin the trace of a consumer, or let it wait. Raises Overloaded."""
        self._add(command)

    def _add(self, command: TraceCommand) -> None:
        if len(self._waiting) >= MOST_WAITING or self._by_connection[command.connection] >= MOST_OF_ONE:
            raise Overloaded(
                f"{self._by_connection[command.connection]} traces of this connection wait, and "
                f"{len(self._waiting)} in all; ask again when some are done"
            )
        self._by_connection[command.connection] += 1
        self._waiting.append(command)

    def disconnected(self, connection: int) -> None:
        """Forget the traces of a closed connection."""
        if self._by_connection.pop(connection, 0):
            self._waiting = deque(one for one in self._waiting if one.connection != connection)

    # --- steps --------------------------------------------------------------------------------------------------------

    def tick(self, now: Now) -> None:
        """Take the next step of the first trace."""
        if not (self._waiting or self._steps) or self._read is not None or now.monotonic_us < self._next_us:
            return
        self._now = now
        self._next_us = now.monotonic_us + _PAUSE_US
        if self._steps is None:
            self._current = self._waiting.popleft()
            if isinstance(self._current, TraceMessage):
                self._steps = self._run(self._current)
            else:
                self._steps = self._run_consumer(self._current)
        command = self._current
        assert command is not None
        try:
            read = next(self._steps)
        except StopIteration as done:
            self._end(command, done.value)
        except QmqError as error:
            self._end(command, Refused(command.connection, command.request, error))
        except Exception as error:
            self._end(command, failed(command.connection, command.request, error))
        else:
            if command.connection not in self._by_connection:
                self._steps = self._current = None  # nobody waits for the answer
            elif read is not None:
                self._read = read
                self._last_read += 1
                self._effects.append(ReadWanted(self._last_read, read))

    def _end(self, command: TraceCommand, answer: Effect) -> None:
        self._steps = self._current = None
        if self._by_connection[command.connection]:
            self._by_connection[command.connection] -= 1
            self._effects.append(answer)
        if not self._by_connection[command.connection]:
            del self._by_connection[command.connection]

    def read_done(self, done: ReadDone) -> None:
        """Go on after a read. The error of a read is met again by what needed it."""
        read, self._read = self._read, None
        if done.error is not None and isinstance(read, RecordScan):
            read.found.is_partial = True
        elif done.error is not None and isinstance(read, ConsumerScan):
            read.is_partial = True

    def next_deadline_us(self) -> int | None:
        """Return when ``tick`` has work; None for never."""
        return self._next_us if (self._waiting or self._steps) and self._read is None else None

    # --- one trace ----------------------------------------------------------------------------------------------------

    def _run(self, command: TraceMessage) -> Steps[Traced]:
        name = MessageId._make(MESSAGE_ID.unpack(command.message_id))
        places = yield from self._places(command, name)
        rights = self._rights.get(command.connection)
        if rights is None or "" in rights.browse:
            facts = yield from self._facts(name, places)
        else:
            places = [place for place in places if rights.may_browse(place.subject)]
            facts = yield from self._facts_within(rights, name, places)
        scan = RecordScan(self._store.groups.scan_pulls(facts.stored_us or 0), places, self._files)
        if places:
            yield scan
        rows, count, is_own = list[dict[str, Any]](), 0, name.store_id == self._store.store_id
        for group_name in sorted(self._groups):
            group = self._groups.get(group_name)
            if group is None or group.ledger is None:
                continue  # it was deleted meanwhile
            count += 1
            if is_own or any(place.belongs_to(group_name) for place in places):
                row = yield from self._row(group, facts, places, scan.found)
                rows.append({"group": group_name, **row})
            if count % GROUPS_AT_ONCE == 0:
                yield None
        return Traced(command.connection, command.request, facts._asdict(), rows, scan.found.is_partial)

    def _run_consumer(self, command: TraceConsumer) -> Steps[Traced]:
        """Return what the consumers of a name did, the oldest event first: rows of [kind, time, group, consumer,
        subject, first sequence, count, attempt, reason, id of the first message].
        """
        groups = {group.ledger.number: group for group in self._groups.values() if group.ledger is not None}
        members = dict[tuple[int, int], str]()
        for number, group in groups.items():
            assert group.ledger is not None
            for member in group.ledger.members.values():
                if command.name in (member.name, member.program):
                    members[number, member.number] = member.name
        files, since_us = self._store.groups, command.since_us
        scan = ConsumerScan(
            files.scan_pulls(0), files.scan_pulls(since_us), command.name, members, since_us, command.limit
        )
        yield scan
        rights, rows = self._rights.get(command.connection), list[list[Any]]()
        sees_all = rights is None or "" in rights.browse
        for event in scan.events:
            named = groups.get(event.group)
            if named is None or named.name is None or self._groups.get(named.name) is not named:
                continue  # it was deleted
            parts: list[Any] = [(None, None, 0, 0, None)]
            if event.ranges or event.unknown:
                parts = yield from self._reading(partial(rows_of, self._store, named, event))
            for subject, *fields, message_id in parts:
                if sees_all or (subject is not None and rights is not None and rights.may_browse(subject)):
                    head = [event.kind, event.time_us, named.name, event.consumer, subject]
                    rows.append([*head, *fields, event.reason, message_id])
            yield None
        return Traced(command.connection, command.request, {}, rows, scan.is_partial)

    def _places(self, command: TraceMessage, name: MessageId) -> Steps[list[MessagePlace]]:
        """Return the places of the message and of its copies that are kept, and have their batches in memory."""
        asked = list(command.places)
        if name.store_id == self._store.store_id and name.partition < DELAY_PARTITION:
            if name.partition >= len(self._store.partitions):
                partitions = len(self._store.partitions)
                raise UnknownMessage(f"message {name} is of partition {name.partition}; there are {partitions} here")
            asked.insert(0, (name.partition, name.position))
        found = dict[tuple[int, int], MessagePlace]()
        for partition, position in asked:
            place = yield from self._reading(partial(self._place_at, partition, position))
            if place is not None:
                found[partition, position] = place
        return list(found.values())

    def _place_at(self, partition: int, position: int) -> MessagePlace | None:
        """Return the place of the message at a position, whose batch is in memory then. Raises NotInMemory."""
        place = find_place(self._store, partition, position)
        if place is not None:
            cache, position, size = self._store.partitions[partition].page_cache, place.entry[1], place.entry[10]
            if not cache.has(position, size):
                raise NotInMemory(cache.read(np.array([position]), np.array([size]), onward=False))
        return place

    def _facts(self, name: MessageId, places: list[MessagePlace]) -> Steps[MessageFacts]:
        """Return what is known of the message. Raises UnknownMessage."""
        if places:
            first = next((place for place in places if place.is_shared), places[0])
            sequence = first.sequence if first.is_shared else None
            stored_us = min(place.entry[2] for place in places)
            return MessageFacts("stored", first.subject, sequence, stored_us)
        if name.partition < DELAY_PARTITION:
            log = self._store.partitions[name.partition].message_log
            if name.position >= log.spans()[0].base:
                raise UnknownMessage(f"there is no message {name}: no batch of this broker has that position")
            return MessageFacts("dropped")
        delayed = yield from self._delayed(name)
        if delayed is None:
            raise UnknownMessage(f"there is no delayed message {name}: it is not kept any more, or never was")
        return MessageFacts(delayed.state, delayed.subject, None, None, delayed.due_us)

    def _facts_within(self, rights: Rights, name: MessageId, places: list[MessagePlace]) -> Steps[MessageFacts]:
        """Return what is known of the message. Raises UnknownMessage, the same for one that the client may not see."""
        with suppress(UnknownMessage):
            facts = yield from self._facts(name, places)
            if facts.subject is not None and rights.may_browse(facts.subject):
                return facts
        raise UnknownMessage(f"there is no message {name}: it is not kept any more, or never was stored")

    def _delayed(self, name: MessageId) -> Steps[DelayedState | None]:
        tries = 0
        while True:
            try:
                return self._delaying.find(name, tries)
            except NotInMemory as missing:
                tries += 1
                yield missing.read
                assert self._store.delay_log is not None
                self.damaged += self._store.delay_log.finish_read(missing.read)

    def _row(
        self, group: Group, facts: MessageFacts, places: list[MessagePlace], found: FoundRecords
    ) -> Steps[dict[str, Any]]:
        """Return the state of the message in one group, and its events there."""
        assert group.name is not None
        if facts.state != "stored":
            subject = facts.subject
            follows = subject is None or takes(group.filters, subject)
            state = GroupMessage(facts.state if follows else "not_subscribed", due_us=facts.due_us)
            return {**state._asdict(), "events": []}
        mine = [place for place in places if place.belongs_to(group.name)]
        view = GroupView(self._store, group, mine, self._now.wall_us)
        for _ in range(_MOST_READS):
            try:
                for _ in view.look():
                    yield None
                break
            except NotInMemory as missing:
                yield from self._read_in(missing.read)
        else:
            with blocking_reads(self._store):
                for _ in view.look():
                    pass
        state = view.found
        events = yield from self._reading(
            lambda: events_of(self._store, group, mine, found, state.state, view.redriven_us)
        )
        if state.state == "dropped" and not takes(group.filters, facts.subject or ""):
            state = GroupMessage("not_subscribed")
        fields = with_events(state, events)._asdict()
        return {**fields, "events": [list(event[1:]) for event in events]}

    def _read_in(self, read: ColdRead) -> Steps[None]:
        """Have bytes of the message log read, and note the damage."""
        yield read
        self.damaged += self._store.finish_read(read)

    def _reading(self, look: Callable[[], T]) -> Steps[T]:
        """Return what *look* returns, after the reads that it needs."""
        for _ in range(_MOST_READS):
            try:
                return look()
            except NotInMemory as missing:
                yield from self._read_in(missing.read)
        with blocking_reads(self._store):
            return look()
