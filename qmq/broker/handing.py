"""Handing of messages to the consumers of groups: who gets what next, as records of the pull log and as answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgpack
import numpy as np

from qmq.broker.carrying import Carrier, Many, Some
from qmq.broker.commands import Buffer, HandBack, Heartbeat, Now, Place, Pull, Subscribe
from qmq.broker.groups import Following, Group, Subscription
from qmq.broker.held import HeldRange, MessageRange
from qmq.broker.ledger import GroupSettings, Kind, Leaving, Ledger, Member, Verdict, unflat
from qmq.broker.members import Members, Offer, What
from qmq.broker.ranges import Parts, parts_of, ranges_of
from qmq.broker.retries import Taken
from qmq.errors import InvalidOption
from qmq.format.layout import ENTRY_DTYPE
from qmq.storage.store import NotAtHand, Store

#: Stretches of pull sequences that one answer has, at most.
MOST_RANGES: Final = 1_000
#: Messages that one answer has of those that are handed out again, at most.
MOST_AGAIN: Final = 4_096


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
        #: Messages that could not be read when they were to be handed out, and are passed.
        self.lost = 0

    # --- groups and consumers ----------------------------------------------------------------------------------------

    def ledger_of(self, group: Group) -> Ledger:
        """The group's ledger; made when it has none."""
        if group.ledger is None:
            group.ledger = self._make(self._next_number)
            self._next_number += 1
        return group.ledger

    def _make(self, number: int) -> Ledger:
        files = self._store.groups
        ledger = self.ledgers[number] = Ledger(number, files.retries(number), files.dead(number), files.stage)
        return ledger

    def join(self, command: Subscribe, group: Group) -> Member:
        """Be a consumer of the group. Raises InvalidOption for settings that it cannot have."""
        ledger = self.ledger_of(group)
        if command.settings and not ledger.members:
            ledger.set(settings_of(ledger.settings, dict(command.settings)))
        member = ledger.join(command.consumer, command.nonce, command.transient, self.now.wall_us)
        self.members.joined(ledger, member, command.client, self.now)
        self.members.look(ledger)
        return member

    def place(self, member: Member) -> Place:
        """What its client is told."""
        held = member.held
        return Place(
            member.number, member.incarnation, held.frontier, held.next_sequence, self._store.groups.generation
        )

    def leave(self, subscription: Subscription) -> None:
        """A consumer leaves by itself: what it holds is handed out again at once."""
        ledger, member = subscription.group.ledger, subscription.member
        if ledger is None or member is None or member.incarnation != subscription.incarnation:
            return
        ledger.leave(member, Leaving.LEFT, self.now.wall_us)
        self.members.left(ledger, member)

    def drop(self, ledger: Ledger, *, clear_retries: bool) -> None:
        """A group goes elsewhere: what is held is dropped."""
        members = [member for member in ledger.members.values() if not member.closed]
        ledger.drop_held(self.now.wall_us, clear_retries=clear_retries)
        for member in members:
            self.members.left(ledger, member)

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
        if len(intervals) % 2 or any(start >= end for start, end in zip(intervals[::2], intervals[1::2], strict=True)):
            raise InvalidOption("acknowledgements are pairs of a first pull sequence and the one behind the last")
        refused = ledger.ack(member, list(intervals))
        if self.members.clears(ledger, member):
            self.members.look(ledger)
        return refused

    def hand_back(self, subscription: Subscription, command: HandBack) -> None:
        """These come back. Raises Fenced and InvalidOption."""
        ledger, member = self._caller(subscription)
        if command.verdict not in tuple(Verdict):
            raise InvalidOption(
                f"verdict {command.verdict} is none of {', '.join(one.name.lower() for one in Verdict)}"
            )
        ledger.hand_back(
            member, command.start, command.end, Verdict(command.verdict), command.reason, command.delay_us,
            self.now.wall_us,
        )  # fmt: skip
        self.members.look(ledger)

    def _caller(self, subscription: Subscription) -> tuple[Ledger, Member]:
        ledger, member = subscription.group.ledger, subscription.member
        if ledger is None or member is None:
            raise InvalidOption("who follows alone has nothing to acknowledge or hand back")
        ledger.member(member.number, subscription.incarnation)
        member.seen_us = self.now.monotonic_us
        return ledger, member

    # --- what a pull is to get ---------------------------------------------------------------------------------------

    def offer(self, subscription: Subscription, pull: Pull) -> Offer | None:
        """What that pull is to get; None for one who follows alone. Raises Fenced and InvalidOption."""
        if subscription.member is None:
            return None
        ledger, member = self._caller(subscription)
        expected = member.held.next_sequence if pull.expected is None else pull.expected
        if expected > member.held.next_sequence:
            raise InvalidOption(
                f"a pull of consumer {member.name!r} expects pull sequence {expected}; the next one is "
                f"{member.held.next_sequence}"
            )
        return self.members.offer(ledger, member, expected, self.now)

    def is_due(self, subscription: Subscription) -> bool:
        """Something waits that any consumer of its group may have."""
        ledger = subscription.group.ledger
        return ledger is not None and ledger.retries.is_due

    def gave(self, subscription: Subscription, parts: Parts, size: int) -> tuple[int, int]:
        """A pull is answered with messages that are handed out for the first time: their pull sequences."""
        ledger, member = _ledger_and_member(subscription)
        followings = subscription.followings
        exact = followings[0] if len(followings) == 1 and followings[0].exact else None
        ranges = ranges_of(parts, exact.subject(self._store) if exact is not None else None)
        ledger.was_again = False
        pull = ledger.pulled(member, ranges, size, self.now.wall_us, self._where(subscription))
        return pull.first, pull.first + pull.total

    def give_again(self, subscription: Subscription, offer: Offer, pull: Pull) -> Answer | None:
        """What a pull gets that has been handed out before; None when there is nothing. Raises NotAtHand."""
        ledger, member = _ledger_and_member(subscription)
        max_count, max_bytes = min(pull.max_count, offer.max_count), min(pull.max_bytes, offer.max_bytes)
        if offer.what is What.HELD:
            assert pull.expected is not None
            return self.carry(subscription, pull.expected, member.held.next_sequence, max_count, max_bytes)
        taken = self._take(ledger, offer.what, max_count)
        try:
            fits = self._fitting(taken, max_bytes)
        except NotAtHand:
            ledger.retries.put_back(taken)
            raise
        if not taken:
            return None
        if offer.what is What.AGAIN and fits < sum(one.total for one in taken):
            ledger.retries.put_back(taken)
            taken = ledger.retries.take(fits)
        ledger.was_again = True
        given = ledger.pulled_again(member, taken, max_bytes, self.now.wall_us)
        return self.carry(subscription, given.first, given.first + given.total, given.total, max_bytes)

    def _take(self, ledger: Ledger, what: What, max_count: int) -> list[Taken]:
        if what is What.ALONE:
            return [ledger.retries.take_alone()]
        return ledger.retries.take(min(max_count, MOST_AGAIN))

    def _fitting(self, taken: list[Taken], max_bytes: int) -> int:
        """How many messages of these an answer has room for, one at least. Raises NotAtHand."""
        count = size = 0
        for one in taken:
            for part in self._at_hand(one.held.messages):
                messages, more = _extent(part)
                if size + more > max_bytes:
                    return max(count + int(messages * (max_bytes - size) / more), 1)
                count, size = count + messages, size + more
        return max(count, 1)

    def carry(self, subscription: Subscription, start: int, end: int, max_count: int, max_bytes: int) -> Answer:
        """The messages that a consumer holds of the pull sequences [start, end), as many as fit. Raises NotAtHand.

        Those that cannot be read any more are rejected: they go to the dead letters.
        """
        _, member = _ledger_and_member(subscription)
        answer = Answer([], 0, [])
        for low, high in member.held.unhandled(start):
            sequence = low
            for held in member.held.between(low, min(high, end)):
                if max_count <= 0 or answer.size >= max_bytes or len(answer.ranges) >= MOST_RANGES:
                    return answer
                messages = held.messages.part(0, min(held.messages.total, max_count))
                parts = self._at_hand(messages)
                size = sum(_extent(part)[1] for part in parts)
                if answer.size + size > max_bytes and answer.ranges:
                    return answer
                self._carry_range(subscription, answer, sequence, held._replace(messages=messages), parts)
                max_count -= messages.total
                sequence += held.messages.total
        return answer

    def _carry_range(
        self, subscription: Subscription, answer: Answer, sequence: int, held: HeldRange, parts: Parts
    ) -> None:
        carrier = Carrier(self._store, [])
        buffers = carrier.carry(parts)
        if carrier.left_out or sum(_extent(part)[0] for part in parts) < held.messages.total:
            self._carry_each(subscription, answer, sequence, held)
            return
        answer.add(buffers, sequence, held.messages.total, held.attempt)

    def _carry_each(self, subscription: Subscription, answer: Answer, sequence: int, held: HeldRange) -> None:
        """Something of it cannot be read: find out what, and reject that."""
        ledger, member = _ledger_and_member(subscription)
        for at in range(held.messages.total):
            carrier = Carrier(self._store, [])
            parts = parts_of(self._store, held.messages.part(at, at + 1))
            buffers = carrier.carry(parts)
            if buffers and not carrier.left_out:
                answer.add(buffers, sequence + at, 1, held.attempt)
                continue
            self.lost += 1
            if not parts:  # it went with the power, before it was on disk
                ledger.ack(member, [sequence + at, sequence + at + 1])
                continue
            ledger.hand_back(
                member, sequence + at, sequence + at + 1, Verdict.REJECT, "it cannot be read any more", None,
                self.now.wall_us,
            )  # fmt: skip

    def _at_hand(self, messages: MessageRange) -> Parts:
        """The parts of a range, all of them in memory. Raises NotAtHand."""
        store, parts = self._store, parts_of(self._store, messages)
        for part in parts:
            if isinstance(part, Some):
                positions, sizes = np.array([part.entry[1]]), np.array([part.entry[10]])
            else:
                positions, sizes = part.rows["position"].astype(np.int64), part.rows["batch_size"].astype(np.int64)
            if store.count_at_hand(part.partition, positions, sizes) < len(positions):
                raise NotAtHand(store.read_of(part.partition, positions, sizes, onward=False))
        return parts

    def _where(self, subscription: Subscription) -> list[Any]:
        """How far the scans of what it follows have come: [prefix, place by partition] each."""
        visible = [self._visible(partition) for partition in range(self._store.partitions)]
        scans = [following for following in subscription.followings if not following.exact]
        return [[following.prefix, following.places_now(self._store, visible)] for following in scans]

    # --- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: Now) -> None:
        """Have lapse who is silent, wake who waits for what is due."""
        self.now = now
        self.members.tick(now)

    def next_deadline_us(self) -> int | None:
        """When ``tick`` has something to do."""
        return self.members.next_deadline_us(self.now)

    # --- start -------------------------------------------------------------------------------------------------------

    def restore(self, group: Group, number: int, fields: dict[str, Any]) -> None:
        """Take over a group's ledger as a checkpoint kept it."""
        group.ledger = self._make(number)
        group.ledger.restore(fields)
        self._next_number = max(self._next_number, number + 1)

    def revive(self, group: Group, number: int) -> None:
        """A record says that the group was made."""
        group.ledger = self._make(number)
        self._next_number = max(self._next_number, number + 1)

    def follows(self, group: Group, following: Following) -> None:
        """A group begins to follow a prefix."""
        if group.name is not None:
            fields = [self.ledger_of(group).number, group.name, following.prefix, following.start, following.places]
            self._store.groups.stage(Kind.GROUP, msgpack.packb(fields))

    def replay(self, group: Group, kind: int, fields: list[Any]) -> None:
        """Do what a record says."""
        ledger = group.ledger
        assert ledger is not None
        if kind == Kind.PULL:
            _, _, _, _, where, flat = fields
            self._replay_cursors(group, where, unflat(flat))
        ledger.replay(kind, fields)

    def _replay_cursors(self, group: Group, where: list[Any], ranges: list[MessageRange]) -> None:
        """Move the group behind what it was given."""
        for messages in ranges:
            for part in parts_of(self._store, messages):
                rows = part.rows if isinstance(part, Many) else np.array([part.entry], ENTRY_DTYPE)
                ends = rows["first_sequence"] + (rows["count"] if isinstance(part, Many) else part.stop)
                cursors = group.cursors.upto(int(rows["subject"].max()) + 1)
                np.maximum.at(cursors, rows["subject"], ends)
        for prefix, places in where:
            following = group.followings[prefix]
            following.scan[:] = [self._store.row_at_position(number, place) for number, place in enumerate(places)]
            following.places[:] = places
        group.dirty = True

    def restored(self) -> None:
        """All is told: the consumers get their time from now on."""
        self.members.restore(self.ledgers.values(), self.now)


class Answer:
    """What a pull is answered with: buffers, and the pull sequences of what is in them."""

    __slots__ = ("buffers", "ranges", "size")

    def __init__(self, buffers: list[Buffer], size: int, ranges: list[tuple[int, int, int]]) -> None:
        self.buffers = buffers
        self.size = size
        self.ranges = ranges

    def add(self, buffers: list[Buffer], sequence: int, count: int, attempt: int) -> None:
        """So many messages more, from that pull sequence on."""
        self.buffers += buffers
        self.size += sum(map(len, buffers))
        if self.ranges and self.ranges[-1][0] + self.ranges[-1][1] == sequence and self.ranges[-1][2] == attempt:
            first, before, _ = self.ranges[-1]
            self.ranges[-1] = first, before + count, attempt
        else:
            self.ranges.append((sequence, count, attempt))

    @property
    def messages(self) -> int:
        """How many it has."""
        return sum(count for _, count, _ in self.ranges)


def _ledger_and_member(subscription: Subscription) -> tuple[Ledger, Member]:
    ledger, member = subscription.group.ledger, subscription.member
    assert ledger is not None
    assert member is not None
    return ledger, member


def _extent(part: Some | Many) -> tuple[int, int]:
    """About how many messages and bytes a part has."""
    if isinstance(part, Some):
        count = part.stop - part.start
        return count, part.entry[9] * count // part.entry[4]
    return int(part.rows["count"].sum()), int(part.rows["run_size"].sum())


def settings_of(before: GroupSettings, given: dict[str, Any]) -> GroupSettings:
    """*before* with what is given. Raises InvalidOption."""
    unknown = given.keys() - set(GroupSettings._fields)
    if unknown:
        raise InvalidOption(
            f"a group has no setting {', '.join(sorted(unknown))}; it has {', '.join(GroupSettings._fields)}"
        )
    return before._replace(**given)
