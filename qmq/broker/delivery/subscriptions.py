"""All groups by name, and the subscriptions of their consumers and of solo consumers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack

from qmq.broker.delivery.tracker import DeliveryTracker
from qmq.broker.delivery.wakeups import Arrivals
from qmq.broker.groups.accounts import Accounts
from qmq.broker.groups.group import (
    Group,
    GroupStart,
    SubjectFilter,
    Subscription,
    check_count,
    check_followed,
    follows_none,
    is_exact,
    resolve_start,
)
from qmq.broker.groups.member import Member
from qmq.broker.groups.settings import ResolvedSettings, check_mode, differing, group_of, settings_of, unknown_group
from qmq.broker.journal.durable_replies import DurableReplies
from qmq.broker.ports.commands import Subscribe
from qmq.broker.ports.effects import Effect, Subscribed
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.ports.work import Work
from qmq.errors import InvalidOption, QmqError, TooManyConsumers, TooManyGroups, UnknownGroup, UnknownSubscription
from qmq.names import MEMBER_MARK, check_consumer, check_prefix, takes
from qmq.net.protocol.types import AGAIN, AT_MOST_ONCE, BROADCAST, FOLLOW, LOOK, ConsumerState
from qmq.storage.store import NotInMemory, Store

#: The work of packing a group, and of 64 that have not changed.
_PACK_WORK: Final = 60
_LOOKED: Final = 64
_LOOKED_WORK: Final = 16
#: Rows that are read to see whether messages wait for a group that follows more.
_MOST_ROWS: Final = 1 << 16


class Subscriptions:
    """The registry of subscriptions, by connection and number, and of groups, by name."""

    def __init__(
        self, store: Store, limits: BrokerLimits, effects: list[Effect], arrivals: Arrivals, tracker: DeliveryTracker,
        durable: DurableReplies,
    ) -> None:  # fmt: skip
        self._store = store
        self._limits = limits
        self._effects = effects
        self._arrivals = arrivals
        #: Groups that follow again what they have followed before, in the segment that is leaving, too.
        self.gone_back: list[Group] = []
        #: Prefixes and subjects that were followed since somebody has set this.
        self.followed_since: set[str] | None = None
        self._tracker = tracker
        self._durable = durable
        self.groups: dict[str, Group] = {}
        self.by_ledger: dict[int, Group] = {}
        #: The check that what became of the messages of groups adds up.
        self.accounts = Accounts(store, self.groups)
        #: The number of member groups of each broadcast group.
        self.broadcasts: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self.by_number: dict[tuple[int, int], Subscription] = {}
        self._by_connection: dict[int, set[int]] = {}
        self._by_name: dict[tuple[int, str, str, bytes], Subscription] = {}

    def replaced(self, command: Subscribe) -> Subscription | None:
        """Return the subscription that a new one replaces: the same consumer comes again on its connection."""
        if type(command.group) is not str or type(command.consumer) is not str:
            return None  # join refuses it
        return self._by_name.get((command.connection, command.group, command.consumer, command.nonce))

    def join(self, command: Subscribe) -> None:
        """Join a group, made when it is new, or add a solo consumer. Nothing has changed when this raises
        NotInMemory.
        """
        mine = self._by_connection.setdefault(command.connection, set())
        if len(mine) >= self._limits.max_consumers_per_connection:
            raise TooManyConsumers(
                f"this client has {len(mine)} consumers, the most that one may have "
                "(max_consumers_per_connection); use another client, or raise the bound"
            )
        if not command.prefixes:
            raise InvalidOption("a subscription names no prefix; give at least one, '' for everything")
        for prefix in command.prefixes:
            check_prefix(prefix)
        check_consumer(command.consumer)
        name, given = group_of(command), dict(command.settings)
        base = self.groups.get(command.group or "")
        check_mode(command, base.mode if base is not None else None, self.broadcasts)
        settings: ResolvedSettings | None = settings_of(ResolvedSettings(), given)
        known = self.groups.get(name) if name is not None else None
        if known is not None or not given:
            settings = None
        asked, command = command.prefixes, self._narrowed(command, known)
        check_followed(command, known, self._limits.max_prefixes)
        default = "new" if command.group is None or command.mode == BROADCAST else "first"
        begin = resolve_start(self._store, command.start, default)  # before any change: it may raise NotInMemory
        group = self._group(name, command.mode)
        filters = []
        for prefix in dict.fromkeys(command.prefixes):
            subject_filter = group.filters.get(prefix) or self._follow(group, prefix, begin, settings)
            settings = None
            filters.append(subject_filter)
            self._arrivals.watch(subject_filter)
        number = next(self._numbers)
        mine.add(number)
        subscription = Subscription(number, command.connection, command.consumer, group, filters, asked)
        self.by_number[command.connection, number] = subscription
        group.subscriptions[command.connection, number] = subscription
        if command.group is not None and command.nonce:
            subscription.name = command.connection, command.group, command.consumer, command.nonce
            self._by_name[subscription.name] = subscription
        try:
            self._begin(subscription, command)
        except QmqError:  # another program has taken the consumer over, or there are too many
            self.leave(subscription)
            raise
        start = filters[0].start
        start_us = None
        if group.name is None and start.kind == "time":
            start_us = min([start.value, *hidden_since(self._store)])
        answer = Subscribed(command.connection, command.request, number, start_us, *self._state_of(subscription, given))
        if group.name is None or self._durable.has(group.ticket):
            self._effects.append(answer)
        else:  # a group that was not on disk would be lost with the power
            self._durable.answer(answer)

    def _narrowed(self, command: Subscribe, group: Group | None) -> Subscribe:
        """Leave out prefixes that a subscription may not add to its group. Raises UnknownGroup and InvalidOption."""
        if command.asks == LOOK and group is None:
            error = unknown_group(str(command.group), self.groups)
            raise UnknownGroup(f"{error}; looking makes no group: use a solo consumer to see messages without one")
        if group is None or command.asks == FOLLOW or (command.asks == AGAIN and not group.ended):
            return command
        within = group.within(command.prefixes)
        if not within:
            raise follows_none(group, command.prefixes)
        return command._replace(prefixes=tuple(within))

    def _follow(
        self, group: Group, prefix: str, begin: GroupStart, settings: ResolvedSettings | None = None
    ) -> SubjectFilter:  # fmt: skip
        """Have a group follow a prefix, from where it is or was in these subjects, else from *begin* on; *settings* are
        those of a group that is made now.
        """
        known = group.covering(prefix) or group.left_at(prefix)
        if known is not None:
            row_cursors, positions = known.first_cursors()
            firsts = [part.consumer_log.first_row for part in self._store.partitions]
            begin = GroupStart(known.start, list(map(max, row_cursors, firsts)), positions)
        else:
            begin = self._before_waiting(group, prefix, begin)
        if self._store.leaving is not None and (known is not None or not is_exact(prefix)):
            self.gone_back.append(group)  # with a new prefix, the filters within it
        subject_filter = group.follow(prefix, begin)
        self._tracker.follows(group, subject_filter, settings)
        group.ticket = self._durable.ticket()
        self._arrivals.watch(subject_filter)
        if self.followed_since is not None:
            self.followed_since.add(prefix)
        return subject_filter

    def _before_waiting(self, group: Group, prefix: str, begin: GroupStart) -> GroupStart:
        """Return where a new prefix begins: before what waits in the prefixes within it. If it began later, its first
        message of a subject would move the cursor of that subject past what waits there.
        """
        if begin.start.kind != "time" or is_exact(prefix):
            return begin
        firsts = [part.consumer_log.first_row for part in self._store.partitions]
        within = [narrow for narrow in group.filters.values() if takes((prefix,), narrow.prefix)]
        waiting = [narrow for narrow in within if self._has_waiting(narrow)]
        starts = [*(narrow.start for narrow in waiting), begin.start]
        start = min(starts, key=lambda start: start.value if start.kind == "time" else 0)
        for narrow in waiting:
            rows, positions = narrow.first_cursors()
            rows = list(map(max, rows, firsts))  # a filter of one subject does not move its own
            begin = begin._replace(
                row_cursors=list(map(min, begin.row_cursors, rows)),
                positions=list(map(min, begin.positions, positions)),
            )
        return begin._replace(start=start)

    def _has_waiting(self, base: SubjectFilter) -> bool:
        """Return whether messages of a filter wait; True, too, where more rows would have to be read to know."""
        base.find_lanes(self._store)
        for subject_filter in base.with_lanes():
            if not subject_filter.has_more(self._store):
                continue
            if subject_filter.exact:
                return True
            matches = subject_filter.matches(self._store)
            for part, row in zip(self._store.partitions, subject_filter.row_cursors, strict=True):
                try:
                    rows = part.consumer_log.rows(row, _MOST_ROWS)
                except NotInMemory:
                    return True
                if matches is None or len(rows) == _MOST_ROWS or matches[rows["subject"]].any():
                    return True
        return False

    def set_follows(self, group: Group, prefixes: Sequence[str], begin: GroupStart) -> None:
        """Have a group follow exactly *prefixes*, new ones from *begin* on.

        Its consumers then take what lies both in *prefixes* and in what they asked for.
        """
        for prefix in prefixes:
            if prefix not in group.filters:
                self._follow(group, prefix, begin)
        ended = group.unfollow([prefix for prefix in group.filters if not takes(prefixes, prefix)])
        for subject_filter in ended:
            self._arrivals.unwatch(subject_filter)
        if ended:
            self._tracker.unfollows(group, ended)
        for subscription in self.of(group):
            subscription.filters = [
                group.filters.get(prefix) or self._follow(group, prefix, begin)
                for prefix in group.within(subscription.asked)
            ]
            subscription.share, subscription.plain_at = None, -1

    def check_follows(self, group: Group, prefixes: Sequence[str]) -> None:
        """Raise InvalidOption where the group may not follow *prefixes*."""
        stay = {prefix for prefix in group.filters if takes(prefixes, prefix)}
        check_count(str(group.name), stay.union(prefixes), group, self._limits.max_prefixes)

    def _begin(self, subscription: Subscription, command: Subscribe) -> None:
        """Take the consumer into its group."""
        group = subscription.group
        if group.name is None:
            return
        if group.mode != AT_MOST_ONCE:
            member = subscription.member = self._tracker.join(command, group)
            subscription.epoch = member.epoch
            self._tracker.keep_order(subscription)
        else:
            group.readers += 1

    def _state_of(
        self, subscription: Subscription, given: dict[str, Any]
    ) -> tuple[ConsumerState | None, tuple[str, ...], tuple[tuple[str, Any], ...], int, tuple[int, ...]]:
        """Return the consumer's state and of the group its tags, which of the *given* settings differ in it, its
        max_attempts and its retry_delays_us.
        """
        ledger, member = subscription.group.ledger, subscription.member
        if ledger is None:
            return None, (), (), 0, ()
        consumer_state = self._tracker.consumer_state(member) if member is not None else None
        settings = ledger.settings
        different = tuple(differing(given, settings).items())
        return consumer_state, settings.tags, different, settings.max_attempts, settings.retry_delays_us

    def _group(self, name: str | None, mode: str) -> Group:
        if name is None:
            return Group(None)
        group = self.groups.get(name)
        if group is None:
            if len(self.groups) >= self._limits.max_groups:
                raise TooManyGroups(f"there are {len(self.groups)} groups, the most this broker keeps (max_groups)")
            group = self.add(name, mode)
            self.by_ledger[self._tracker.ledger_of(group).number] = group
        return group

    def add(self, name: str, mode: str) -> Group:
        """Add a new group."""
        group = self.groups[name] = Group(name, mode)
        if mode == BROADCAST:
            self.broadcasts[name.partition(MEMBER_MARK)[0]] += 1
        return group

    def of(self, group: Group) -> list[Subscription]:
        """Return the subscriptions of a group."""
        return list(group.subscriptions.values())

    def of_connection(self, connection: int) -> list[Subscription]:
        """Return the subscriptions of a connection."""
        return [self.by_number[connection, number] for number in self._by_connection.get(connection, ())]

    def solo(self) -> list[Group]:
        """Return the groups of solo consumers."""
        return [subscription.group for subscription in self.by_number.values() if subscription.group.name is None]

    def forget(self, group: Group) -> None:
        """Remove a deleted group; its subscriptions get errors from now on."""
        assert group.name is not None
        assert group.ledger is not None
        for subject_filter in group.filters.values():
            self._arrivals.unwatch(subject_filter)
        del self.groups[group.name], self.by_ledger[group.ledger.number]
        if group.mode == BROADCAST:
            broadcast = group.name.partition(MEMBER_MARK)[0]
            self.broadcasts[broadcast] -= 1
            if not self.broadcasts[broadcast]:
                del self.broadcasts[broadcast]

    def connected(self) -> list[Member]:
        """Return the consumers of groups whose connections are open."""
        return [one.member for one in self.by_number.values() if one.member is not None]

    def known(self, connection: int, number: int) -> Subscription:
        """Return a subscription, also of a deleted group. Raises UnknownSubscription."""
        subscription = self.by_number.get((connection, number))
        if subscription is None:
            raise UnknownSubscription(f"this connection has no subscription {number}; subscribe first")
        return subscription

    def get(self, connection: int, number: int) -> Subscription:
        """Return a subscription. Raises UnknownSubscription, and UnknownGroup when its group was deleted."""
        subscription = self.known(connection, number)
        name = subscription.group.name
        if name is not None and self.groups.get(name) is not subscription.group:
            raise UnknownGroup(f"group {name!r} was deleted")
        return subscription

    def leave(self, subscription: Subscription) -> None:
        """Remove a subscription."""
        del self.by_number[subscription.connection, subscription.number]
        self._by_connection[subscription.connection].discard(subscription.number)
        if subscription.name is not None and self._by_name.get(subscription.name) is subscription:
            del self._by_name[subscription.name]
        group = subscription.group
        del group.subscriptions[subscription.connection, subscription.number]
        if group.name is None:
            for subject_filter in subscription.filters:
                self._arrivals.unwatch(subject_filter)
        elif group.mode == AT_MOST_ONCE:
            group.readers -= 1

    def disconnected(self, connection: int) -> None:
        """Remove all subscriptions of a connection."""
        for number in list(self._by_connection.get(connection, ())):
            self.leave(self.by_number[connection, number])
        self._by_connection.pop(connection, None)

    def pack_changed(self, visible: Callable[[], list[int]]) -> Work[None]:
        """Pack the groups that have changed, so that ``packed`` is quick; *visible* returns what that takes."""
        for looked, group in enumerate(list(self.groups.values()), 1):
            if group.is_changed() and self.groups.get(str(group.name)) is group:
                self._packed(group, visible())
                yield _PACK_WORK
            if looked % _LOOKED == 0:
                yield _LOOKED_WORK

    def packed(self, visible: list[int]) -> bytes:
        """Return the groups by name, packed for the checkpoint."""
        header = msgpack.Packer().pack_map_header(len(self.groups))
        rows = [  # a call of each group would take 10 ms for 10,000 that have not changed
            self._packed(group, visible)
            if group.dirty or (ledger := group.ledger) is None or ledger.changed or ledger.retries.changed
            else group.row
            for group in self.groups.values()
        ]
        return b"".join([header, *rows])

    def _packed(self, group: Group, visible: list[int]) -> bytes:
        self.accounts.look(group)
        return group.packed(self._store, visible)

    def restore(self, packed: dict[str, Any]) -> None:
        """Restore the groups from what ``packed`` returned."""
        for name, (number, come, ledger) in packed.items():
            fields = msgpack.unpackb(come, strict_map_key=False)
            group = self.add(name, fields["mode"])
            group.restore(self._store, fields, come)
            self.by_ledger[number] = group
            packed_ledger = msgpack.unpackb(ledger, strict_map_key=False)
            packed_ledger.setdefault("filtered", fields.get("filtered", 0))  # where an older checkpoint has it
            self._tracker.restore(group, number, packed_ledger)
            for subject_filter in group.filters.values():
                self._arrivals.watch(subject_filter)


def hidden_since(store: Store) -> list[int]:
    """Return the stamp of the first batch that is not visible yet, of each partition that has one."""
    if len(store.partitions) == 1:
        return []
    stamps = (part.consumer_log.hidden_since() for part in store.partitions)
    return [stamp for stamp in stamps if stamp is not None]
