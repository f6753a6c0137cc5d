"""Administration of groups: lists of groups, consumers and dead letters; settings, seek, delete.

What may take long is work in pieces (see ports/work.py): groups may go, and others come, between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from qmq.broker.delay.items import by_prefix
from qmq.broker.delivery.order.blocked import blocked_slots, rows_of, with_details
from qmq.broker.delivery.order.places import current_order
from qmq.broker.delivery.pull import Delivery
from qmq.broker.error_log.dead_letters import chosen
from qmq.broker.error_log.error_log import RetryItem, unpacked
from qmq.broker.find.trace.places import id_of
from qmq.broker.groups.group import Group, resolve_start
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.lag import oldest_us, ready, waiting
from qmq.broker.groups.member import Member
from qmq.broker.groups.message_ranges import RunPart, parts_of
from qmq.broker.groups.name_order import NameOrder
from qmq.broker.groups.order_slots import OrderSlots
from qmq.broker.groups.settings import ResolvedSettings, members_of, settings_of, unknown_group
from qmq.broker.groups.time_starts import TimeStarts
from qmq.broker.ports.commands import Now
from qmq.broker.ports.rights import Rights
from qmq.broker.ports.work import NUMBERS_A_UNIT, Work
from qmq.broker.startup.replay import GroupReplay
from qmq.errors import BadBatch, InvalidOption, StorageError
from qmq.format.private import origin_subject
from qmq.names import check_group_or_member, check_prefix
from qmq.net.protocol.types import BROADCAST
from qmq.storage.store import NotInMemory, Store

#: Actions that change nothing. The changes of all others are on disk before the answer.
LOOKS: Final = frozenset({"groups", "consumers", "waiting", "dead_letters"})
#: Actions on dead letters, which are done over several turns.
LETTERS: Final = frozenset({"redrive", "delete_dead"})
#: Rows of one answer.
MOST_ROWS: Final = 1_000
#: Dead letters that are looked at for one answer: a client may be allowed to see few of them.
MOST_LOOKED_AT: Final = 10_000
#: The work for the groups of one answer, most of it for their subjects (but one group in any case).
MOST_WORK: Final = 1_000_000 // NUMBERS_A_UNIT
#: The work of a row of a group, of 100 consumers, of a dead letter, and of a change of a group.
_GROUP_WORK: Final = 150
_CONSUMERS: Final = 100
_CONSUMERS_WORK: Final = 400
_LETTER_WORK: Final = 100
_LETTERS: Final = 64
_CHANGE_WORK: Final = 250

Fields = dict[str, Any]


class AdminCommands:
    """The actions of ``client.admin``. Every method takes the fields of a request and returns those of its answer."""

    def __init__(
        self, store: Store, delivery: Delivery, changes: GroupReplay, delayed: Mapping[str, int], order: NameOrder,
        times: TimeStarts,
    ) -> None:  # fmt: skip
        """*delayed* is the number of delayed messages by subject."""
        self._store = store
        self._order = order
        self._times = times
        self._delivery = delivery
        self._changes = changes
        self._delayed = delayed
        self._actions: dict[str, Callable[[Fields, Now, Rights | None], Fields | Work[Fields]]] = {
            "groups": self._groups,
            "consumers": self._consumers,
            "waiting": self._waiting,
            "set_group": self._set_group,
            "seek_group": self._seek_group,
            "delete_group": self._delete_group,
            "dead_letters": self._dead_letters,
            "handled": self._handled,
            "leave": self._leave,
        }

    def do(self, action: str, fields: Fields, now: Now, rights: Rights | None = None) -> Fields | Work[Fields]:
        """Carry out an action, which *rights* allow, or return the work of it; rows that they do not allow are left
        out.

        Both raise UnknownGroup, InvalidOption, StorageError, and NotInMemory before any change."""
        method = self._actions.get(action)
        if method is None:
            known = ", ".join([*self._actions, "info", "resend", *sorted(LETTERS)])
            raise InvalidOption(f"the broker knows no action {action!r:.40}; it knows {known}")
        return method(fields, now, rights)

    def _group(self, fields: Fields) -> tuple[Group, Ledger]:
        name = check_group_or_member(fields.get("group", ""))
        groups = self._delivery.subscriptions.groups
        group = groups.get(name)
        if group is None or group.ledger is None:
            raise unknown_group(name, groups)
        return group, group.ledger

    def _all(self, fields: Fields) -> list[tuple[Group, Ledger]]:
        """Return the named group, or the groups of all members of a broadcast group."""
        groups = self._delivery.subscriptions.groups
        members = members_of(name, groups) if isinstance(name := fields.get("group"), str) else []
        return [self._group({"group": one}) for one in members] or [self._group(fields)]

    def info(self) -> Fields:
        """Return the counts of the whole broker that the action info gives."""
        groups = self._delivery.subscriptions.groups.values()
        return {
            "subjects": self._store.subjects.name_count,
            "groups": len(groups),
            "consumers": sum(group.consumers_there() for group in groups),
        }

    # --- lists -------------------------------------------------------------------------------------------------------

    def _groups(self, fields: Fields, now: Now, rights: Rights | None) -> Work[Fields]:
        groups, after = self._delivery.subscriptions.groups, _text(fields, "after")
        is_one = fields.get("group") is not None
        wanted = groups if not is_one else (str(group.name) for group, _ in self._all(fields))
        names = sorted(name for name in wanted if name > after and (rights is None or rights.may_join(name)))
        yield 1 + len(names) // 2
        yield from self._order.caught_up()
        delayed = yield from by_prefix(self._delayed)
        rows, work = list[Fields](), 0
        for name in names:
            group = groups.get(name)
            if group is None or group.ledger is None:
                continue  # it was deleted meanwhile
            row = self._group_row(group, group.ledger, delayed, rights, details=is_one)
            while True:
                try:
                    piece = next(row)
                except StopIteration as done:
                    rows.append(done.value)
                    break
                work += piece
                yield piece
            if len(rows) == MOST_ROWS or work >= MOST_WORK:
                return {"rows": rows, "after": name if name != names[-1] else None}
        return {"rows": rows, "after": None}

    def _group_row(
        self, group: Group, ledger: Ledger, delayed: Mapping[str, int], rights: Rights | None, *, details: bool
    ) -> Work[Fields]:
        """Return the row of a group; *delayed* is by prefix. The *details* of its blocked slots take reads."""
        found = yield from ready(self._store, group, self._order, self._times)
        oldest = yield from oldest_us(self._store, group)
        yield _GROUP_WORK
        blocked = (with_details if details else blocked_slots)(self._store, group)
        members, follows = ledger.members.values(), group.outermost()
        return {
            "group": group.name,
            "mode": group.mode,
            "follows": follows,
            "consumers": group.consumers_there(),
            "ready": found.messages,
            "ready_exact": found.exact,
            "oldest_us": oldest,
            "in_flight": sum(member.in_flight.count for member in members),
            "in_retry": ledger.retries.count,
            "dead": len(ledger.dead),
            "skipped": group.skipped,
            "filtered": ledger.filtered,
            "delayed": sum(delayed.get(prefix, 0) for prefix in follows),
            "blocked": rows_of([one for one in blocked if _may_show(rights, one.subject)]),
            "settings": ledger.settings._asdict(),
        }

    def _consumers(self, fields: Fields, now: Now, rights: Rights | None) -> Work[Fields]:
        after, members = _text(fields, "after"), list[tuple[OrderSlots | None, Member]]()
        for done, (group, ledger) in enumerate(self._all(fields), 1):
            order = current_order(self._store, group)
            members += [(order, member) for member in ledger.by_name.values() if member.name > after]
            if done % _CONSUMERS == 0:
                yield _CONSUMERS_WORK
        members.sort(key=lambda one: one[1].name)
        yield 1 + len(members) // 4
        rows = list[Fields]()
        for order, member in members[:MOST_ROWS]:
            rows.append(_consumer_row(order, member, now))
            if len(rows) % _CONSUMERS == 0:
                yield _CONSUMERS_WORK
        return {"rows": rows, "after": members[MOST_ROWS - 1][1].name if len(members) > MOST_ROWS else None}

    def _waiting(self, fields: Fields, now: Now, rights: Rights | None) -> Work[Fields]:
        group, first = self._group(fields)[0], _whole(fields, "after", 0)
        rows, after = yield from waiting(self._store, group, self._times, first, MOST_ROWS)
        return {"rows": [row._asdict() for row in rows if _may_show(rights, row.subject)], "after": after}

    # --- changes -----------------------------------------------------------------------------------------------------

    def _set_group(self, fields: Fields, now: Now, rights: Rights | None) -> Work[Fields]:
        found, given, follows = self._all(fields), fields.get("settings", {}), fields.get("follows")
        if type(given) is not dict or not (given or follows is not None):
            raise InvalidOption("give the settings that are to change, or what the group is to follow")
        subscriptions = self._delivery.subscriptions
        prefixes = [] if follows is None else _prefixes(follows)
        begin = resolve_start(self._store, None, "new" if found[0][0].mode == BROADCAST else "first")
        for group, ledger in found:
            settings_of(ledger.settings, given)
            if follows is not None:
                subscriptions.check_follows(group, prefixes)
            yield _CHANGE_WORK
        for group, ledger in self._left(found):
            if given:
                self._take_settings(ledger, settings_of(ledger.settings, given), now)
            if follows is not None:
                self._delivery.set_follows(group, prefixes, begin)
            yield _CHANGE_WORK
        group, ledger = found[0]
        return {"settings": ledger.settings._asdict(), "follows": group.outermost()}

    def _left(self, groups: Iterable[tuple[Group, Ledger]]) -> Iterator[tuple[Group, Ledger]]:
        """Yield those groups that are not deleted by then."""
        known = self._delivery.subscriptions.groups
        return ((group, ledger) for group, ledger in groups if known.get(str(group.name)) is group)

    def _take_settings(self, ledger: Ledger, settings: ResolvedSettings, now: Now) -> None:
        has_other_time = settings.ack_deadline_us != ledger.settings.ack_deadline_us
        ledger.set(settings)
        if has_other_time:
            self._delivery.tracker.ack_deadlines.changed(ledger, now)
        self._delivery.tracker.members.look(ledger)  # a wider window has room for pulls that wait for it

    def _seek_group(self, fields: Fields, now: Now, rights: Rights | None) -> Work[Fields]:
        found = self._all(fields)
        begin = resolve_start(self._store, _seek_start(fields.get("to")), "first")
        for group, _ in self._left(found):
            self._changes.seek(group, begin, now.wall_us, clear_retries=bool(fields.get("clear_retries")))
            yield _CHANGE_WORK
        return {}

    def _delete_group(self, fields: Fields, now: Now, rights: Rights | None) -> Work[Fields]:
        for group, _ in self._left(self._all(fields)):
            self._changes.delete(group)
            yield _CHANGE_WORK
        return {}

    def _handled(self, fields: Fields, now: Now, rights: Rights | None) -> Fields:
        """Take late acks from a consumer's client; the consumer itself may be gone."""
        _, ledger = self._group(fields)
        member, numbers = ledger.by_name.get(_text(fields, "consumer")), _numbers(fields, "handled")
        if len(numbers) % 2:
            raise InvalidOption("handled must be pairs of a first delivery sequence and the one behind the last")
        known = _whole(fields, "since_us", 0), _whole(fields, "generation", 0)
        if member is None or (member.since_us, self._store.groups.generation) != known:
            return {"taken": False}
        ledger.handled_before(member, tuple(numbers), now.wall_us)
        self._delivery.tracker.members.look(ledger)
        return {"taken": True}

    def _leave(self, fields: Fields, now: Now, rights: Rights | None) -> Fields:
        """Let a consumer leave late, whose client had lost the connection before."""
        _, ledger = self._group(fields)
        member, nonce = ledger.by_name.get(_text(fields, "consumer")), fields.get("nonce")
        if type(nonce) is not bytes or not nonce:
            raise InvalidOption("nonce must be that of the SUBSCRIBE with which the consumer joined")
        if member is None or not member.is_there or member.nonce != nonce:
            return {"left": False}
        self._delivery.tracker.members.leave(ledger, member, now)
        return {"left": True}

    # --- dead letters ------------------------------------------------------------------------------------------------

    def _dead_letters(self, fields: Fields, now: Now, rights: Rights | None) -> Work[Fields]:
        group, ledger = self._group(fields)
        after, limit = _whole(fields, "after", 0), min(max(_whole(fields, "limit", MOST_ROWS), 1), MOST_ROWS)
        looked, goes_on = 0, False
        rows, last = list[Fields](), 0
        began = len(ledger.dead), ledger.dead.next_number
        for letter in _letters_from(ledger, after):
            goes_on = len(rows) == limit or looked == MOST_LOOKED_AT
            if goes_on:
                break
            try:
                named = self._named(group, letter.messages)
            except NotInMemory:
                if not rows:
                    raise
                goes_on = True
                break
            last, looked = letter.number, looked + 1
            yield _LETTER_WORK
            if not _may_show(rights, named["subject"]):
                continue
            rows.append(
                {
                    "number": letter.number,
                    "attempts": letter.attempt,
                    "session_expiries": letter.session_expiries,
                    "reason": letter.reason,
                    "died_at_us": letter.due_us,
                    **named,
                }
            )
        if (len(ledger.dead), ledger.dead.next_number) != began:
            # Some may have gone, or have another number since their messages were carried forward.
            there = set(chosen(ledger.dead, [row["number"] for row in rows])["number"].tolist())
            rows = [row for row in rows if row["number"] in there]
        return {"rows": rows, "after": last if goes_on else None, "messages": len(ledger.dead)}

    def _named(self, group: Group, messages: Any) -> Fields:
        """Return id, subject and sequence of a message, each None where it cannot be read. Raises NotInMemory."""
        store = self._store
        try:
            for part in parts_of(store, group, messages):
                entry, start = (part.entry, part.start) if isinstance(part, RunPart) else (part.rows[0].item(), 0)
                return {
                    "id": id_of(self._store, part.partition, entry, start),
                    "subject": origin_subject(store.subjects.name(entry[3])),
                    "sequence": entry[0] + start,
                }
        except (StorageError, BadBatch):
            pass
        return {"id": None, "subject": None, "sequence": None}

    def dead_of(self, fields: Fields) -> tuple[Ledger, list[int] | None]:
        """Return ledger and numbers of requested dead letters, None for all. Raises UnknownGroup and InvalidOption."""
        return self._group(fields)[1], _letters(fields)


def _letters_from(ledger: Ledger, after: int) -> Iterator[RetryItem]:
    """Yield the dead letters behind number *after*, block by block: others may go meanwhile. Raises StorageError."""
    while (items := next((block for block in ledger.dead.after(after) if len(block)), None)) is not None:
        for start in range(0, len(items), _LETTERS):
            yield from unpacked(items[start : start + _LETTERS])
        after = int(items["number"].max())


def _consumer_row(order: OrderSlots | None, member: Member, now: Now) -> Fields:
    return {
        "consumer": member.name,
        "program": member.program,
        "epoch": member.epoch,
        "online": member.is_there,
        "in_flight": member.in_flight.count,
        "in_flight_since_us": member.in_flight.pulls[0].taken_us if member.in_flight.pulls else None,
        "pulled_us": member.pulled_us or None,
        "silent_us": now.monotonic_us - member.seen_us,
        "stalled_us": member.stalled_us,
        "quarantined": member.quarantined,
        "order_slots": 0 if order is None else order.count_of(member.number),
    }


def _may_show(rights: Rights | None, subject: str | None) -> bool:
    """Return whether the client may learn of messages of a subject, which may be unknown, in a group of its own."""
    if rights is None or rights.is_admin:
        return True
    return subject is not None and (rights.may_consume(subject) or rights.may_browse(subject))


def _letters(fields: Fields) -> list[int] | None:
    """Return the numbers of the requested dead letters; None for all."""
    return None if fields.get("numbers") is None else _numbers(fields, "numbers")


def _numbers(fields: Fields, name: str) -> list[int]:
    numbers = fields.get(name)
    if type(numbers) is not list or not all(type(number) is int and number >= 0 for number in numbers):
        raise InvalidOption(f"{name} must be a list of whole numbers")
    return numbers


def _prefixes(follows: object) -> list[str]:
    """Return the prefixes that a group is to follow. Raises InvalidOption and InvalidName."""
    if type(follows) is not list or not follows:
        raise InvalidOption("give a list of at least one prefix or subject to follow, '' for everything")
    return list(dict.fromkeys(check_prefix(prefix) for prefix in follows))


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name, "")
    if type(value) is not str:
        raise InvalidOption(f"{name} must be a text, not {value!r:.40}")
    return value


def _whole(fields: Fields, name: str, default: int) -> int:
    value = fields.get(name, default)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise InvalidOption(f"{name} must be a whole number from 0, not {value!r:.40}")
    return value


def _seek_start(to: object) -> str | tuple[str, int]:
    """Return the start that a seek asks for. Raises InvalidOption."""
    match to:
        case "first" | "new":
            return str(to)
        case ["time" | "sequence" as kind, int(value)] if 0 <= value < 1 << 63 and type(value) is int:
            return str(kind), value
    raise InvalidOption(f"a seek goes to first, new, a time or a sequence, not to {to!r:.40}")
