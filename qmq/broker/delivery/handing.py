"""Handing of messages to the consumers of groups: who gets what next, as records of the pull log and as answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgpack
import numpy as np

from qmq.broker.delivery.ack_deadline import Overdue
from qmq.broker.delivery.eligibility import Share, share_of
from qmq.broker.delivery.encode import Many
from qmq.broker.delivery.redeliver import Redelivery, ledger_and_member
from qmq.broker.error_log.error_log import PASSED_AFTER_US
from qmq.broker.groups.group import Following, Group, Subscription
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.in_flight import MessageRange, unflat
from qmq.broker.groups.member import Member
from qmq.broker.groups.membership import NOTHING_WAITS, Members, Offer, Waits
from qmq.broker.groups.message_ranges import Parts, parts_of, ranges_of
from qmq.broker.groups.settings import BROADCAST
from qmq.broker.journal.record_types import MOST_RANGES_A_RECORD, Kind, Verdict
from qmq.broker.ports.commands import Back, Heartbeat, Now, Pull, Subscribe
from qmq.broker.ports.effects import Place
from qmq.errors import InvalidOption
from qmq.format.layout import ENTRY_DTYPE, MAX_DELAY_SHOWN, MAX_DELAY_US
from qmq.storage.store import Store

EXPIRED_REASON: Final = "expired"


class Handing:
    """The ledgers of all groups, by number, and what the pull path needs of them."""

    def __init__(
        self, store: Store, lapse_us: int, wake: Callable[[Ledger], None], visible: Callable[[int], int]
    ) -> None:
        """*visible* tells up to which position a partition's messages may be pulled."""
        self._store = store
        self._visible = visible
        self.members = Members(lapse_us, wake)
        self.ledgers: dict[int, Ledger] = {}
        self._next_number = 1
        self.now = Now(0, 0)
        self.overdue = Overdue()
        self.redelivery = Redelivery(store)

    # --- groups and consumers ----------------------------------------------------------------------------------------

    def ledger_of(self, group: Group) -> Ledger:
        """The group's ledger; made when it has none."""
        if group.ledger is None:
            group.ledger = self._make(self._next_number, group.mode)
            self._next_number += 1
        return group.ledger

    def _make(self, number: int, mode: str) -> Ledger:
        files = self._store.groups
        ledger = self.ledgers[number] = Ledger(
            number, files.retries(number), files.dead(number), files.stage, keeps_absent=mode == BROADCAST
        )
        return ledger

    def join(self, command: Subscribe, group: Group) -> Member:
        """Be a consumer of the group."""
        ledger = self.ledger_of(group)
        known = command.known
        if known is not None and known.generation != self._store.groups.generation:
            known = known._replace(handled=())  # pull sequences may mean something else
        before = ledger.by_name.get(command.consumer)
        was_leaving = before is not None and before.leaving
        member = ledger.join(
            command.consumer, command.nonce, command.transient, self.now.wall_us, command.client, known
        )
        if before is not None and before.leaving and not was_leaving:
            self.members.leaves(ledger, before)
        self.members.joined(ledger, member, command.client, self.now)
        self.members.look(ledger)
        return member

    def place(self, member: Member) -> Place:
        """What its client is told."""
        held = member.held
        return Place(
            member.number, member.incarnation, held.frontier, held.next_sequence, self._store.groups.generation,
            member.since_us,
        )  # fmt: skip

    def leave(self, subscription: Subscription) -> None:
        """A consumer leaves by itself: what it holds is handed out again at once."""
        ledger, member = subscription.group.ledger, subscription.member
        if ledger is None or member is None or member.incarnation != subscription.incarnation:
            return
        self.members.leave(ledger, member, self.now)

    def drop(self, ledger: Ledger, *, clear_retries: bool) -> None:
        """A group goes elsewhere: what is held is dropped."""
        members = [member for member in ledger.members.values() if not member.closed]
        ledger.drop_held(self.now.wall_us, clear_retries=clear_retries)
        self.members.left(ledger, *members)

    def forget(self, ledger: Ledger) -> None:
        """A group is deleted."""
        self.drop(ledger, clear_retries=True)
        del self.ledgers[ledger.number]
        self._store.groups.forget(ledger.number)

    def heartbeat(self, command: Heartbeat) -> None:
        """A client's process lives."""
        self.members.heartbeat(command.client, command.stalled_us, self.now)

    def ack(self, subscription: Subscription, intervals: tuple[int, ...]) -> int:
        """These are handled; returns how many had to be refused. Raises Fenced and InvalidOption."""
        ledger, member = self._caller(subscription)
        if not _are_pairs(intervals):
            raise InvalidOption("acknowledgements are pairs of a first pull sequence and the one behind the last")
        refused = ledger.ack(member, list(intervals))
        if not ledger.retries.is_empty and self.members.clears(ledger, member):
            self.members.look(ledger)
        return refused

    def hand_back(self, subscription: Subscription, backs: Sequence[Back]) -> list[int]:
        """These come back; returns the numbers of those that had to be refused. Raises Fenced and InvalidOption."""
        ledger, member = self._caller(subscription)
        if len(backs) > MOST_RANGES_A_RECORD:
            raise InvalidOption(f"at most {MOST_RANGES_A_RECORD:,} stretches are handed back at once")
        for verdict in {back.verdict for back in backs}:
            if verdict not in tuple(Verdict):
                raise InvalidOption(f"verdict {verdict} is none of {', '.join(one.name.lower() for one in Verdict)}")
        if max(back.delay_us or 0 for back in backs) > MAX_DELAY_US:
            raise InvalidOption(f"a message comes again after {MAX_DELAY_SHOWN} at most")
        refused = ledger.hand_back(member, backs, self.now.wall_us)
        self.members.look(ledger)
        return refused

    def _caller(self, subscription: Subscription) -> tuple[Ledger, Member]:
        ledger, member = subscription.group.ledger, subscription.member
        if ledger is None or member is None:
            raise InvalidOption("who follows alone, or takes part in a most_once group, has nothing to hand back")
        ledger.member(member.number, subscription.incarnation)
        member.seen_us = self.now.monotonic_us
        return ledger, member

    # --- what a pull is to get ---------------------------------------------------------------------------------------

    def offer(self, subscription: Subscription, pull: Pull) -> Offer | None:
        """What that pull is to get; None for one who follows alone. Raises Fenced and InvalidOption."""
        if subscription.member is None:
            return None
        ledger, member = self._caller(subscription)
        retries = ledger.retries
        expected = member.held.next_sequence if pull.expected is None else pull.expected
        if expected > member.held.next_sequence:
            raise InvalidOption(
                f"a pull of consumer {member.name!r} expects pull sequence {expected}; the next one is "
                f"{member.held.next_sequence}"
            )
        now_us = self.now.wall_us
        if not retries.load(now_us):
            if not retries.is_more_due(now_us):
                return self.members.offer(ledger, member, expected, NOTHING_WAITS)
            self.members.look_at(ledger, now_us)
        share = share_of(self._store, subscription)
        if share is None:
            waiting = Waits(retries.is_due, retries.is_due_alone)
        else:
            waiting = self._waits_for(ledger, share)
        return self.members.offer(ledger, member, expected, waiting)

    def _waits_for(self, ledger: Ledger, share: Share) -> Waits:
        """What waits for a consumer that takes only some of what its group does."""
        retries, now_us = ledger.retries, self.now.wall_us
        found = Waits(share.has_any(retries.due), share.has_any(retries.due_alone))
        if any(found) or not retries.is_more_due(now_us):
            return found
        if retries.pass_over(now_us):
            self.members.look(ledger)
            return Waits(share.has_any(retries.due), share.has_any(retries.due_alone))
        self.members.look_at(ledger, now_us + PASSED_AFTER_US)
        return found

    def is_due(self, subscription: Subscription) -> bool:
        """Something waits that it may have, holding others."""
        ledger = subscription.group.ledger
        if ledger is None or not ledger.retries.is_due:
            return False
        share = share_of(self._store, subscription)
        return share is None or share.has_any(ledger.retries.due)

    def gave(self, subscription: Subscription, parts: Parts, size: int) -> tuple[int, int]:
        """A pull is answered with messages that are handed out for the first time: their pull sequences."""
        ledger, member = ledger_and_member(subscription)
        ranges = ranges_of(self._store, parts, subscription.followings)
        ledger.was_again = False
        start = member.held.next_sequence
        while len(ranges) > MOST_RANGES_A_RECORD:
            ledger.pulled(member, ranges[:MOST_RANGES_A_RECORD], 0, self.now.wall_us, [])
            del ranges[:MOST_RANGES_A_RECORD]
        ledger.pulled(member, ranges, size, self.now.wall_us, self._where(subscription))
        self.overdue.given(ledger, member, self.now)
        return start, member.held.next_sequence

    def gave_again(self, subscription: Subscription) -> None:
        """A pull is answered with messages that have been handed out before."""
        self.overdue.given(*ledger_and_member(subscription), self.now)

    def expire(self, subscription: Subscription, intervals: list[tuple[int, int]]) -> None:
        """What a consumer was given is past its expiry: it is dead."""
        ledger, member = ledger_and_member(subscription)
        backs = [Back(start, end, Verdict.REJECT, None, EXPIRED_REASON) for start, end in intervals]
        ledger.hand_back(member, backs, self.now.wall_us)

    def _where(self, subscription: Subscription) -> list[Any]:
        """How far the scans of what it follows have come: [prefix, place by partition] each."""
        scans = [following for following in subscription.followings if not following.exact]
        if not scans:
            return []
        visible = [self._visible(partition) for partition in range(self._store.partitions)]
        return [[following.prefix, following.places_now(self._store, visible)] for following in scans]

    # --- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: Now) -> None:
        """Have lapse who is silent, wake who waits for what is due."""
        self.now = now
        self.members.tick(now)
        for ledger in self.overdue.tick(now):
            self.members.look(ledger)

    def next_deadline_us(self) -> int | None:
        """When ``tick`` has something to do."""
        deadlines = self.members.next_deadline_us(self.now), self.overdue.next_deadline_us()
        return min((one for one in deadlines if one is not None), default=None)

    # --- start -------------------------------------------------------------------------------------------------------

    def restore(self, group: Group, number: int, fields: dict[str, Any]) -> None:
        """Take over a group's ledger as a checkpoint kept it."""
        group.ledger = self._make(number, group.mode)
        group.ledger.restore(fields)
        self._next_number = max(self._next_number, number + 1)

    def revive(self, group: Group, number: int) -> None:
        """A record says that the group was made."""
        group.ledger = self._make(number, group.mode)
        self._next_number = max(self._next_number, number + 1)

    def follows(self, group: Group, following: Following) -> None:
        """A group begins to follow a prefix."""
        if group.name is not None:
            fields = [self.ledger_of(group).number, group.name, group.mode, following.prefix, following.ordinal]
            self._store.groups.stage(Kind.GROUP, msgpack.packb([*fields, following.start, following.places]))

    def unfollows(self, group: Group, ended: Iterable[Following]) -> None:
        """A group follows these no more."""
        fields = [self.ledger_of(group).number, [following.prefix for following in ended]]
        self._store.groups.stage(Kind.UNFOLLOW, msgpack.packb(fields))

    def replay(self, group: Group, kind: int, fields: list[Any]) -> None:
        """Do what a record says, but for one of a consumer of whom nothing is known."""
        ledger = group.ledger
        assert ledger is not None
        if ledger.replay(kind, fields) and kind == Kind.PULL:
            _, _, _, _, where, flat = fields
            self._replay_cursors(group, where, unflat(flat))

    def _replay_cursors(self, group: Group, where: list[Any], ranges: list[MessageRange]) -> None:
        """Move the group behind what it was given."""
        for messages in ranges:
            for part in parts_of(self._store, group, messages):
                rows = part.rows if isinstance(part, Many) else np.array([part.entry], ENTRY_DTYPE)
                ends = rows["first_sequence"] + (rows["count"] if isinstance(part, Many) else part.stop)
                cursors = group.cursors.upto(int(rows["subject"].max()) + 1)
                np.maximum.at(cursors, rows["subject"], ends)
        for prefix, places in where:
            following = group.followings.get(prefix)
            if following is not None:
                following.scan[:] = [self._store.row_at_position(number, place) for number, place in enumerate(places)]
                following.places[:] = places
        group.dirty = True

    def restored(self) -> None:
        """All is told: the consumers get their time from now on."""
        self.members.restore(self.ledgers.values(), self.now)
        self.overdue.restore(self.ledgers.values(), self.now)


def _are_pairs(intervals: tuple[int, ...]) -> bool:
    """Starts, each with an end behind it."""
    if len(intervals) == 2:
        return intervals[0] < intervals[1]
    starts, ends = intervals[::2], intervals[1::2]
    return len(starts) == len(ends) and all(map(int.__lt__, starts, ends))
