"""Groups that go elsewhere or go away, and the time since the last checkpoint, told again by the pull log."""

from __future__ import annotations

from typing import Any

import msgpack

from qmq.broker.arrivals import Arrivals
from qmq.broker.delivery import Delivery
from qmq.broker.groups import Begin, Group, Start
from qmq.broker.kinds import Kind
from qmq.errors import UnknownGroup
from qmq.storage.store import Store


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
        """Do what the pull log says of the time since the checkpoint."""
        for record in self._store.groups.take_records():
            number, *fields = msgpack.unpackb(record.payload, strict_map_key=False)
            if record.kind == Kind.GROUP:
                self._replay_group(number, *fields)
                continue
            group = self._subscriptions.by_ledger.get(number)
            if group is None:
                continue
            if record.kind == Kind.SEEK:
                start, places, clear_retries = fields
                self._seek(group, self._begin(start, places), clear_retries)
            elif record.kind == Kind.DELETE:
                self._delete(group)
            elif record.kind == Kind.RESERVE:
                self._delivery.most_once.replay(group, *fields)
            else:
                self._handing.replay(group, record.kind, fields)
        files = self._store.groups
        self._delivery.most_once.resume(self._subscriptions.groups.values(), lost=files.is_rotten)
        self._handing.restored()

    def _replay_group(
        self, number: int, name: str, mode: str, prefix: str, start: list[Any], places: list[int]
    ) -> None:
        """A group was made, or began to follow a prefix."""
        group = self._subscriptions.groups.get(name)
        if group is None:
            group = self._subscriptions.add(name, mode)
            self._handing.revive(group, number)
            self._subscriptions.by_ledger[number] = group
        if prefix not in group.followings:
            self._arrivals.watch(group.follow(prefix, self._begin(start, places)))

    def _begin(self, start: list[Any], places: list[int]) -> Begin:
        scan = [self._store.row_at_position(partition, place) for partition, place in enumerate(places)]
        return Begin(Start(*start), scan, places)
