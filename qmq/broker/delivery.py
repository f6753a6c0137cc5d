"""The pull path: subscriptions, pulls, parked pulls and who is woken by an arrival."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from qmq.broker.commands import Effect, Messages, Pull, Refused, Subscribe, Subscribed, Withdraw
from qmq.broker.groups import Following, Group, Subscription, Waiting, resolve_start
from qmq.broker.limits import BrokerLimits
from qmq.broker.selection import FEW_ROWS, Selection
from qmq.errors import InvalidOption, Overloaded, QmqError, TooManyGroups, UnknownSubscription
from qmq.format.batch import EntryRow
from qmq.names import check_consumer, check_group, check_prefix
from qmq.storage.store import Store

#: An arrival of more rows than this in one turn is looked at by columns, a piece at a time.
_ROWS_AT_ONCE = 65_536


class Delivery:
    """Hands out messages. Everything it has to say goes to *effects*."""

    def __init__(self, store: Store, limits: BrokerLimits, effects: list[Effect]) -> None:
        self._store = store
        self._limits = limits
        self._effects = effects
        self.groups: dict[str, Group] = {}
        self.damaged: list[QmqError] = []  # what could not be read of late; the wiring logs and empties it
        self._numbers = itertools.count(1)
        self._subscriptions: dict[tuple[int, int], Subscription] = {}
        self._by_connection: dict[int, set[int]] = {}
        self._parked: dict[int, dict[int, Waiting]] = {}  # by connection, by pull request; none of them empty
        self._parked_count = 0
        self._deadlines: list[tuple[int, int, Waiting]] = []
        self._followings: dict[str, list[Following]] = {}  # by prefix, of groups with subscriptions or parked pulls
        self._watchers: dict[int, list[Following]] = {}  # by subject number: who is to look at an arrival
        self._seen = [store.visible_row(partition) for partition in range(store.partitions)]
        self._ready: dict[int, Following] = {}  # to be served at the end of the turn, by id

    # --- subscriptions -----------------------------------------------------------------------------------------------

    def subscribe(self, command: Subscribe) -> None:
        """Join a group (made now, if it is new) or follow alone."""
        mine = self._by_connection.setdefault(command.connection, set())
        if len(mine) >= self._limits.max_subscriptions:
            raise Overloaded(f"this connection has {len(mine)} subscriptions, the most one may have; use another")
        if not command.prefixes:
            raise InvalidOption("a subscription names no prefix; give at least one, '' for everything")
        for prefix in command.prefixes:
            check_prefix(prefix)
        check_consumer(command.consumer)
        if command.group is not None:
            check_group(command.group)
        self._check_prefixes(command)
        group = self._group(command.group)
        default = "last" if group.name is None else "first"
        followings = []
        for prefix in dict.fromkeys(command.prefixes):
            following = group.followings.get(prefix)
            if following is None:
                wider = group.covering(prefix)
                if wider is None:
                    start, scan = resolve_start(self._store, command.start, default)
                else:  # the group is in these subjects already: it goes on where it is
                    start, scan = wider.start, list(wider.scan)
                following = group.follow(prefix, start, scan)
            followings.append(following)
            watched = self._followings.setdefault(prefix, [])
            if following not in watched:
                watched.append(following)
                self._watchers.clear()
        number = next(self._numbers)
        mine.add(number)
        self._subscriptions[command.connection, number] = Subscription(
            number, command.connection, command.consumer, group, followings
        )
        begin = followings[0].start
        start_us = None
        if group.name is None and begin.kind == "time":
            start_us = min([begin.value, *self._hidden_since()])
        self._effects.append(Subscribed(command.connection, command.request, number, start_us))

    def _check_prefixes(self, command: Subscribe) -> None:
        """A group keeps its prefixes for good, so there is a most of them."""
        prefixes = set(command.prefixes)
        group = self.groups.get(command.group) if command.group is not None else None
        if group is not None:
            self._check_wider(command, group)
            prefixes |= group.followings.keys()
        most = self._limits.max_prefixes
        if len(prefixes) > most:
            who = command.group or "this consumer"
            raise InvalidOption(
                f"{who} would follow {len(prefixes)} prefixes and subjects, at most {most} are allowed; "
                "follow a prefix that takes many of them"
            )

    def _check_wider(self, command: Subscribe, group: Group) -> None:
        """A later start would pass what the group has not taken yet of the subjects that it follows within a prefix."""
        if command.start in (None, "first"):
            return
        for prefix in set(command.prefixes) - group.followings.keys():
            if prefix and not prefix.endswith("."):
                continue
            within = next((known for known in group.followings if known.startswith(prefix)), None)
            if within is not None:
                raise InvalidOption(
                    f"group {group.name} follows {within!r} already, so the wider {prefix!r} can only start at "
                    "'first': a later start would skip what the group has not taken yet; leave start out"
                )

    def _group(self, name: str | None) -> Group:
        if name is None:
            return Group(None)
        group = self.groups.get(name)
        if group is None:
            if len(self.groups) >= self._limits.max_groups:
                raise TooManyGroups(f"there are {len(self.groups)} groups, the most this broker keeps (max_groups)")
            group = self.groups[name] = Group(name)
        return group

    def unsubscribe(self, connection: int, number: int) -> None:
        """Leave; parked pulls of it are answered with nothing."""
        subscription = self._subscription(connection, number)
        for waiting in list(self._parked.get(connection, {}).values()):
            if waiting.subscription is subscription:
                self._answer_empty(waiting)
        self._drop(subscription)

    def _drop(self, subscription: Subscription) -> None:
        del self._subscriptions[subscription.connection, subscription.number]
        self._by_connection[subscription.connection].discard(subscription.number)
        group = subscription.group
        if group.name is None:
            for following in subscription.followings:
                watched = self._followings[following.prefix]
                watched.remove(following)
                if not watched:
                    del self._followings[following.prefix]
            self._watchers.clear()

    def disconnected(self, connection: int) -> None:
        """A connection is gone: so are its pulls and subscriptions."""
        for waiting in list(self._parked.get(connection, {}).values()):
            self._unpark(waiting)
        for number in list(self._by_connection.get(connection, ())):
            self._drop(self._subscriptions[connection, number])
        self._by_connection.pop(connection, None)

    def _subscription(self, connection: int, number: int) -> Subscription:
        subscription = self._subscriptions.get((connection, number))
        if subscription is None:
            raise UnknownSubscription(f"this connection has no subscription {number}; subscribe first")
        return subscription

    # --- pulls -------------------------------------------------------------------------------------------------------

    def pull(self, pull: Pull, now_us: int) -> None:
        """Answer a pull at once, or park it."""
        subscription = self._subscription(pull.connection, pull.subscription)
        if not pull.max_count >= 1 or pull.min_count > pull.max_count or not pull.max_bytes:
            raise InvalidOption(
                f"a pull asks for {pull.min_count} to {pull.max_count} messages in {pull.max_bytes} bytes; "
                "ask for at least one message and one byte, and no minimum above the maximum"
            )
        parked = self._parked.get(pull.connection, {})
        if pull.request in parked:
            raise InvalidOption(f"request {pull.request} is parked already; number requests anew")
        waiting = Waiting(pull, subscription, now_us + pull.timeout_ms * 1_000)
        if self._serve(waiting, final=not pull.timeout_ms) is None:
            return
        if len(parked) >= self._limits.max_parked_pulls:
            raise Overloaded(
                f"{self._limits.max_parked_pulls} pulls of this connection are parked, the most it may have; "
                "wait for an answer, or use another connection"
            )
        self._park(waiting)

    def _park(self, waiting: Waiting) -> None:
        pull = waiting.pull
        self._parked.setdefault(pull.connection, {})[pull.request] = waiting
        self._parked_count += 1
        for following in waiting.subscription.followings:
            following.waiting[id(waiting)] = waiting
        heapq.heappush(self._deadlines, (waiting.deadline_us, id(waiting), waiting))

    def _unpark(self, waiting: Waiting) -> None:
        pull = waiting.pull
        waiting.done = True
        parked = self._parked.get(pull.connection)
        if parked is None or parked.pop(pull.request, None) is None:
            return
        self._parked_count -= 1
        if not parked:
            del self._parked[pull.connection]
        for following in waiting.subscription.followings:
            following.waiting.pop(id(waiting), None)
        if len(self._deadlines) > 64 and len(self._deadlines) > 4 * self._parked_count:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
            heapq.heapify(self._deadlines)

    def withdraw(self, command: Withdraw) -> None:
        """Answer a parked pull now, with what is there; one that was answered already needs nothing."""
        waiting = self._parked.get(command.connection, {}).get(command.pull_request)
        if waiting is not None:
            self._answer_empty(waiting)

    def _answer_empty(self, waiting: Waiting) -> None:
        self._unpark(waiting)
        left_us = self._left_us(waiting.subscription)
        self._effects.append(Messages(waiting.pull.connection, waiting.pull.request, [], 0, 0, left_us))

    def refuse_parked(self, error: QmqError) -> None:
        """Answer every parked pull with an error: the broker stops."""
        for waiting in [waiting for parked in self._parked.values() for waiting in parked.values()]:
            self._unpark(waiting)
            self._effects.append(Refused(waiting.pull.connection, waiting.pull.request, error))

    def parked(self) -> int:
        """Pulls that wait."""
        return self._parked_count

    def _need(self, pull: Pull) -> int:
        """How many messages a pull waits for."""
        return min(max(pull.min_count, 1), self._limits.max_pull_count)

    def _serve(self, waiting: Waiting, final: bool) -> int | None:
        """Answer the pull when enough is ready (``final``: with whatever is ready). None when it was answered, else
        how many messages were ready.
        """
        pull, subscription = waiting.pull, waiting.subscription
        need = 1 if final else self._need(pull)
        max_count = min(pull.max_count, self._limits.max_pull_count)
        selection = Selection(self._store, max_count, min(pull.max_bytes, self._limits.max_pull_bytes), need)
        followings = subscription.followings
        turn = (subscription.turn + 1) % len(followings)
        for following in itertools.chain(followings[turn:], followings[:turn]):
            selection.take(following)
            if selection.full:
                break
        if selection.full and not selection.count:
            self._ready.update((id(following), following) for following in followings)  # much to pass over: go on later
        if not final and selection.count < need and not (selection.full and selection.count):
            if selection.count:
                selection.take_back()  # else all that was passed is for others, and need not be looked at again
            return selection.count
        buffers = selection.buffers(self.damaged)
        if selection.count and not buffers and not final:
            # Nothing of it could be read; it was named, and what comes after it is waited for.
            self._ready.update((id(following), following) for following in followings)
            return 0
        self._unpark(waiting)
        if selection.count:  # so that each is the first of one of as many answers that bring something
            subscription.turn = turn
        size = sum(map(len, buffers))
        left_us = self._left_us(subscription)
        self._effects.append(Messages(pull.connection, pull.request, buffers, size, selection.count, left_us))
        return None

    def _left_us(self, subscription: Subscription) -> int | None:
        """Nothing stored before that time is still to come; None where order of time is what it comes in anyway."""
        if subscription.group.name is not None or self._store.partitions == 1:
            return None
        ahead = [
            self._store.read_entry(partition, row)[2]
            for following in subscription.followings
            if not following.exact
            for partition, row in enumerate(following.scan)
            if row < self._store.visible_row(partition)
        ]
        return min([*ahead, *self._hidden_since()], default=None)

    def _hidden_since(self) -> list[int]:
        """When the first batch was stored that cannot be read yet, of each partition that has one."""
        if self._store.partitions == 1:
            return []
        stamps = (self._store.hidden_since(partition) for partition in range(self._store.partitions))
        return [stamp for stamp in stamps if stamp is not None]

    # --- arrivals and time -------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Look at what became visible since the last turn, and serve the parked pulls that it is for."""
        for partition in range(self._store.partitions):
            self._look(partition)
        if self._ready:
            ready, self._ready = self._ready, {}
            for following in ready.values():
                self._serve_waiting(following)
                following.arrived.clear()

    def unfinished(self) -> bool:
        """True when a pull stopped looking at a bound and goes on in the next turn."""
        return any(following.waiting for following in self._ready.values())

    def _look(self, partition: int) -> None:
        store = self._store
        row, visible = self._seen[partition], store.visible_row(partition)
        self._seen[partition] = visible
        if row == visible or not self._parked:
            return
        if visible - row <= FEW_ROWS:
            for number in range(row, visible):
                self._wake_by(partition, store.read_entry(partition, number))
            return
        while row < visible:
            rows = store.rows(partition, row, min(visible - row, _ROWS_AT_ONCE))
            self._wake(np.unique(rows["subject"]).tolist())
            row += len(rows)

    def _wake(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for following in self._watching(number):
                if following.waiting:
                    self._ready[id(following)] = following

    def _wake_by(self, partition: int, entry: EntryRow) -> None:
        """One row arrived: who follows its subject exactly is handed it, so that it need not be looked up."""
        for following in self._watching(entry[3]):
            if following.waiting:
                self._ready[id(following)] = following
                if following.exact:
                    following.arrived.append((partition, entry))

    def _watching(self, number: int) -> list[Following]:
        """Who follows that subject: exactly, by each of its prefixes, or everything."""
        watchers = self._watchers.get(number)
        if watchers is None:
            if len(self._watchers) > 200_000:
                self._watchers.clear()
            watchers = self._watchers[number] = self._find_watchers(number)
        return watchers

    def _find_watchers(self, number: int) -> list[Following]:
        name = self._store.subject_name(number)
        found = [*self._followings.get("", ()), *self._followings.get(name, ())]
        end = name.find(".")
        while end >= 0:
            found += self._followings.get(name[: end + 1], ())
            end = name.find(".", end + 1)
        return found

    def _serve_waiting(self, following: Following) -> None:
        """Serve who waits for it, longest first, as long as it has something."""
        ready: int | None = None  # so many were not enough for one who waits for nothing else
        for waiting in _longest_first(following.waiting):
            alone = len(waiting.subscription.followings) == 1
            if alone and ready is not None and ready < self._need(waiting.pull):
                continue
            found = self._serve(waiting, final=False)
            if found == 0 or not self._has_more(following):
                return
            if alone and found is not None:
                ready = found

    def _has_more(self, following: Following) -> bool:
        store = self._store
        if not following.exact:
            return any(row < store.visible_row(partition) for partition, row in enumerate(following.scan))
        number = following.subject(store)
        if number is None:
            return False
        return bool(following.group.cursors.upto(number + 1)[number] < store.ends[number])

    def tick(self, now_us: int) -> None:
        """Answer the parked pulls whose time is up."""
        while self._deadlines and (self._deadlines[0][0] <= now_us or self._deadlines[0][2].done):
            waiting = heapq.heappop(self._deadlines)[2]
            if not waiting.done:
                self._serve(waiting, final=True)

    def next_deadline_us(self) -> int | None:
        """When tick has something to do, as far as known."""
        return self._deadlines[0][0] if self._deadlines else None

    # --- checkpoint --------------------------------------------------------------------------------------------------

    def packed(self, visible: list[int]) -> dict[str, Any]:
        """For the checkpoint: the groups by name."""
        return {name: group.packed(self._store, visible) for name, group in self.groups.items()}

    def restore(self, packed: dict[str, Any]) -> None:
        """Take over what ``packed`` gave."""
        for name, fields in packed.items():
            group = self.groups[name] = Group(name)
            group.restore(self._store, fields)
            for following in group.followings.values():
                self._followings.setdefault(following.prefix, []).append(following)


def _longest_first(waiting: OrderedDict[int, Waiting]) -> Iterator[Waiting]:
    """All of them; each that is answered leaves, so that the many behind it cost nothing."""
    while waiting:
        first = next(iter(waiting.values()))
        yield first
        if not first.done:
            yield from list(waiting.values())[1:]
            return
