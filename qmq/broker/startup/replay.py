"""Groups that go elsewhere or go away, and the time since the last checkpoint, told again by the pull log."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import msgpack

from qmq.broker.delivery.at_most_once import may_lack_reserves
from qmq.broker.delivery.pull import Delivery
from qmq.broker.delivery.wakeups import Arrivals
from qmq.broker.groups.group import Begin, Group, Start
from qmq.broker.groups.in_flight import MessageRange, unflat
from qmq.broker.groups.modes import MOST_ONCE
from qmq.broker.journal.record_types import Kind
from qmq.broker.retention import advance_groups as moving
from qmq.broker.startup.doubled import doubled
from qmq.broker.startup.unnamed import name_again
from qmq.broker.startup.untold import Untold
from qmq.errors import UnknownGroup
from qmq.storage.store import Store

#: So many ranges are in one record.
_MOST_RANGES: Final = 1_000
#: No consumer pulls so many messages within the time that can be lost.
_UNSEEN: Final = 1 << 26


class Changes:
    """What befalls whole groups."""

    def __init__(self, store: Store, delivery: Delivery) -> None:
        self._store = store
        self._delivery = delivery
        self._handing = delivery.handing
        self._subscriptions = delivery.subscriptions
        self._arrivals: Arrivals = delivery.arrivals

    def seek(self, group: Group, begin: Begin, *, clear_retries: bool) -> None:
        """Have a group go on elsewhere: what is held is dropped, and late verdicts on it are refused."""
        assert group.ledger is not None
        fields = [group.ledger.number, tuple(begin.start), begin.places, clear_retries]
        self._store.groups.stage(Kind.SEEK, msgpack.packb(fields))
        self._seek(group, begin, clear_retries)

    def _seek(self, group: Group, begin: Begin, clear_retries: bool) -> None:
        assert group.ledger is not None
        group.seek(begin)
        self._handing.drop(group.ledger, clear_retries=clear_retries)
        self._arrivals.make_ready(group.followings.values())

    def delete(self, group: Group) -> None:
        """Forget a group; who waits for it is told."""
        assert group.ledger is not None
        self._store.groups.stage(Kind.DELETE, msgpack.packb([group.ledger.number]))
        self._delete(group)

    def _delete(self, group: Group) -> None:
        assert group.ledger is not None
        for subscription in self._subscriptions.of(group):
            self._delivery.refuse_pulls(subscription, UnknownGroup(f"group {group.name!r} was deleted"))
        self._handing.forget(group.ledger)
        self._subscriptions.forget(group)

    def replay(self) -> None:
        """Do what the pull log says of the time since the checkpoint; what it cannot tell is handed out again."""
        files, untold = self._store.groups, Untold(self._store)
        holes, records = deque(files.holes), files.take_records()
        for record in records:
            if holes and holes[0].end <= record.position:
                holes.popleft()
                untold.begin(self._subscriptions.groups.values())
            number, *fields = msgpack.unpackb(record.payload, strict_map_key=False)
            if not record.counts and record.kind != Kind.RESERVE:
                continue  # what a block has is not handed out again even so
            if record.kind == Kind.GROUP:
                self._replay_group(untold, number, *fields)
                continue
            known = self._subscriptions.by_ledger.get(number)
            if known is not None:
                self._replay_record(untold, known, record.kind, fields)
        if holes:
            untold.begin(self._subscriptions.groups.values())
        self._hand_out(untold)
        if files.torn or files.holes:
            name_again(self._store, list(self._subscriptions.groups.values()), self._handing.now.wall_us)
        self._let_go(untold)
        if files.generations_since:
            for ledger in self._handing.ledgers.values():
                ledger.skip_sequences(files.generations_since * _UNSEEN)
        lost = files.is_rotten and may_lack_reserves(files.holes, files.torn, records)
        self._delivery.most_once.resume(self._subscriptions.groups.values(), lost=lost)
        self._handing.restored()

    def _replay_record(self, untold: Untold, group: Group, kind: int, fields: list[Any]) -> None:
        if kind == Kind.SEEK:
            start, places, clear_retries = fields
            self._seek(group, self._begin(start, places), clear_retries)
            untold.settle(group)
        elif kind == Kind.DELETE:
            untold.settle(group)
            self._delete(group)
        elif kind == Kind.RESERVE:
            self._delivery.most_once.replay(group, *fields)
        elif kind == Kind.UNFOLLOW:
            for following in group.unfollow(*fields):
                self._arrivals.unwatch(following)
        elif kind == Kind.MOVED:
            moving.replay(self._store, group, *fields)
        elif kind in (Kind.PULL, Kind.AGAIN) and not untold.takes(group, _ranges(kind, fields)):
            pass  # that it follows this is lost: it begins there anew
        elif self._handing.replay(group, kind, fields):
            untold.told(group, _ranges(kind, fields))
            if kind == Kind.UNTOLD and fields[-2]:
                untold.settle(group)

    def _hand_out(self, untold: Untold) -> None:
        """Have what nobody can tell of handed out again. That is a record too: once is enough."""
        for group in untold.groups():
            assert group.ledger is not None
            found = untold.missing(group) if group.mode != MOST_ONCE else []
            for at in range(0, max(len(found), 1), _MOST_RANGES):
                last = at + _MOST_RANGES >= len(found)
                group.ledger.untold(found[at : at + _MOST_RANGES], self._handing.now.wall_us, last=last)

    def _let_go(self, untold: Untold) -> None:
        """That somebody has left, or a group gone elsewhere, may be lost: who was given a message last holds it."""
        for group in untold.groups():
            assert group.ledger is not None
            for member, sequence in doubled(self._store, group):
                group.ledger.ack(member, [sequence, sequence + 1])

    def _replay_group(
        self, untold: Untold, number: int, name: str, mode: str, prefix: str, ordinal: int, start: list[Any],
        places: list[int],
    ) -> None:  # fmt: skip
        """A group was made, or began to follow a prefix."""
        group = self._subscriptions.groups.get(name)
        if group is not None and group.ledger is not None and group.ledger.number != number:
            untold.settle(group)
            self._delete(group)  # the record of that is lost
            group = None
        if group is None:
            group = self._subscriptions.add(name, mode)
            self._handing.revive(group, number)
            self._subscriptions.by_ledger[number] = group
        if prefix not in group.followings:
            following = group.follow(prefix, self._begin(start, places), ordinal)
            self._arrivals.watch(following)
            untold.follows(group, following)

    def _begin(self, start: list[Any], places: list[int]) -> Begin:
        scan = [self._store.row_at_position(partition, place) for partition, place in enumerate(places)]
        return Begin(Start(*start), scan, places)


def _ranges(kind: int, fields: list[Any]) -> list[MessageRange]:
    """What a record says was given to a consumer, or is handed out again."""
    if kind == Kind.PULL:
        return unflat(fields[-1])
    if kind == Kind.AGAIN:
        return [MessageRange(*messages[1:7]) for messages in fields[-1]]
    return unflat(fields[1]) if kind == Kind.UNTOLD else []
