"""What the programs of one history know: which messages they sent, who was given each, and what became of it.

Whatever a consumer is given is held against the law at once, and against what the brokers count at the end. Programs
note what they are about to do before they do it, so that what another program sees of it never comes first.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from qmq import Message, Receipt, StoredMessage
from qmq.format.hashing import hash_bytes, tag_bits
from qmq.format.lanes import lane_of_key_hash
from qmq.names import takes

#: States of a message in hand. It is open until the program has decided; "...ing" until the broker has confirmed that.
OPEN: Final = "open"
ACKING, ACKED = "acking", "acked"
FAILING, FAILED = "failing", "failed"
REJECTING, REJECTED = "rejecting", "rejected"
#: It comes again: released, left behind by a consumer that has left, or behind an earlier one of its order key.
BACK: Final = "back"
#: Its consumer was killed: it comes again, or only if the broker has not heard of the ack.
LOST, MAYBE_LOST = "lost", "maybe lost"
_FINAL: Final = (ACKING, ACKED, REJECTING, REJECTED)
#: So many messages of a consumer that was killed come one by one; it may have had others that it had not reached.
_ALONE: Final = 1
#: Each time a broker does not answer in time, the next one may store another copy.
_MOST_COPIES: Final = 5
#: Seconds after which messages that no loop has reached may have been released by the client.
_STALE_S: Final = 0.8


@dataclass(slots=True, eq=False)
class Sent:
    """A message that a program sends."""

    number: int
    subject: str
    body: bytes
    key: str | None
    tags: tuple[str, ...]
    priority: str
    order_key: str | None
    expires: bool
    delay: float | None
    begun: int = 0
    more_keys: tuple[str, ...] = ()
    properties: dict[str, str] = field(default_factory=dict)
    #: By its unique text it is sent several times.
    unique: str | None = None
    #: How many receipts said that it is no duplicate.
    firsts: int = 0
    #: When it was known to be stored; None before.
    stored: int | None = None
    #: "open", "stored", "unknown" (the answer was lost) or "cancelled".
    state: str = "open"
    id: str | None = None
    #: Its sequence by the broker that stores it, once it is known.
    sequence: int | None = None
    #: When it was stored, if its receipt says so.
    stored_at: datetime | None = None
    #: It may be stored twice, as its receipt says.
    may_be_twice: bool = False
    #: It came from two brokers before its receipt said so.
    is_twice: bool = False

    def is_before(self, other: Sent) -> bool:
        """Return whether it is known to lie before another message of its slot."""
        if self.id is None or other.id is None or self.id[:12] != other.id[:12]:
            return False
        if self.stored_at is not None and other.stored_at is not None:
            return (self.stored_at, self.id) < (other.stored_at, other.id)
        if self.place != other.place or self.sequence is None or other.sequence is None:
            return False
        return self.sequence < other.sequence

    @property
    def slot(self) -> tuple[str, int] | None:
        """Broker and slot; None where it has none, or the broker is not known."""
        return None if self.id is None or self.order_key is None else (self.id[:12], lane_of(self.order_key))

    @property
    def place(self) -> tuple[str, str, str] | None:
        """Broker, subject and lane, in which its sequence is one of a row; None while they are not known."""
        return None if self.id is None else place_of(self.id, self)

    def __repr__(self) -> str:
        return f"message {self.number} ({self.subject} {self.order_key or self.priority} {self.sequence} {self.tags})"


@dataclass(slots=True, eq=False)
class Hand:
    """A message that a consumer was given."""

    sent: Sent
    session: Session
    attempt: int
    at: int
    state: str = OPEN
    #: When the program decided.
    ended: int = 0
    #: It went back with an earlier one of its slot.
    is_taken_back: bool = False
    #: The consumer that had it before was killed, so it comes alone.
    is_quarantined: bool = False

    def __repr__(self) -> str:
        return f"{self.state} at {self.session.name} as attempt {self.attempt}"


class Session:
    """One consumer from its subscription until it leaves. Its methods may be called in any thread."""

    def __init__(self, group: GroupRecord, name: str, *, has_threads: bool = False) -> None:
        """*has_threads*: several threads take its messages, so nobody knows in which order they came."""
        self.has_threads = has_threads
        self.group = group
        self.name = name
        self.hands: list[Hand] = []
        self.has_left = False
        group.record.note(f"{group.name} {name} entered")
        group.entered = min(group.entered, group.record.tick())
        self._last: dict[tuple[str, str, str], int] = {}
        self._taken_at = time.monotonic()

    def took(self, message: Message) -> Hand:
        """Note that the program was given a message."""
        with self.group.record.lock:
            return self._took(message)

    def _took(self, message: Message) -> Hand:
        group, record = self.group, self.group.record
        sent = record.of(message)
        if record.has_several_brokers and sent.state == "open" and sent.id not in (None, message.id):
            sent.is_twice = sent.may_be_twice = True
        if sent.sequence is None and sent.id is None:
            sent.id = message.id
        if sent.sequence is None:
            sent.sequence = message.sequence
        record.ids[message.id] = sent.number
        before = group.hands[sent.number]
        hand = Hand(sent, self, message.attempt, record.tick())
        record.check_content(sent, message)
        for problem in group.problems(hand, before):
            record.wrong(f"group {group.name}: {sent} came to {self.name} as attempt {hand.attempt}: {problem}")
        if not before and hand.attempt == 1:
            self._check_order(sent, message)
        before.append(hand)
        self.hands.append(hand)
        record.note(f"{group.name} {self.name} took {sent} attempt {hand.attempt}")
        record.count["taken"] += 1
        record.came()
        return hand

    def _check_order(self, sent: Sent, message: Message) -> None:
        """Messages of a subject and priority come in stored order, where none has failed or was given back."""
        group, now = self.group, time.monotonic()
        if now > self._taken_at + _STALE_S and group.mode != "solo":
            group.is_calm = False
        self._taken_at = now
        may_be_given_up = group.is_loose and group.record.has_late_frames  # for a connection that was lost
        if not group.is_calm or self.has_threads or may_be_given_up:
            return
        # Of one that is stored twice, this may be the other one, at another broker than its receipt says.
        place = place_of(message.id, sent)
        last = self._last.get(place, -1)
        if last >= message.sequence:
            group.record.wrong(f"group {group.name}: {sent}, {message.id}, came to {self.name} after {last}")
        self._last[place] = message.sequence
        group.record.count["order of a subject is checked"] += 1

    # --- what the program decides ------------------------------------------------------------------------------------

    def decides(self, hand: Hand, state: str) -> bool:
        """Note what the program is about to do with a message; return whether it still has it."""
        with self.group.record.lock:
            if hand.state != OPEN:
                return False
            hand.state, hand.ended = state, self.group.record.tick()
            self.group.record.note(f"{self.group.name} {self.name} {state} {hand.sent.number}")
            if state in (FAILING, BACK):
                self.group.is_calm = False
                self._return_behind(hand)
            return True

    def decides_all(self, hands: Iterable[Hand], state: str) -> list[Hand]:
        """Note what the program is about to do with several messages at once; return those that it still has."""
        with self.group.record.lock:
            mine = [hand for hand in hands if hand.state == OPEN]
            for hand in mine:
                hand.state, hand.ended = state, self.group.record.tick()
            self.group.record.note(f"{self.group.name} {self.name} {state} {[hand.sent.number for hand in mine]}")
            if state in (FAILING, BACK):
                self.group.is_calm = False
                for hand in mine:
                    self._return_behind(hand)
            return mine

    def _return_behind(self, hand: Hand) -> None:
        """What the consumer was given after a message of the same slot goes back with it."""
        if hand.sent.slot is None:  # without an order key, or nobody knows at which broker it lies now
            return
        for other in self.hands:
            is_behind = other.at > hand.at and other.sent.slot == hand.sent.slot and other.sent is not hand.sent
            if other.state == OPEN and is_behind:  # the same one came again after a loss of power
                other.state, other.ended, other.is_taken_back = BACK, self.group.record.tick(), True
                self.group.record.note(
                    f"{self.group.name} {self.name} back {other.sent.number} behind {hand.sent.number}"
                )
                self.group.record.count["back with an earlier one of its slot"] += 1

    def confirmed(self, *hands: Hand) -> None:
        """Note that the broker has what the program decided."""
        with self.group.record.lock:
            self.group.record.note(f"{self.group.name} {self.name} confirmed {[hand.sent.number for hand in hands]}")
            for hand in hands:
                hand.state = {ACKING: ACKED, FAILING: FAILED, REJECTING: REJECTED}.get(hand.state, hand.state)
            self.group.record.came()

    def flushed(self, acking: Iterable[Hand]) -> None:
        """Note that the broker has confirmed these acks."""
        self.confirmed(*(hand for hand in acking if hand.state == ACKING))

    def dies(self) -> None:
        """Note that the program is killed."""
        record = self.group.record
        with record.lock:
            self.has_left = True
            self.group.is_calm = False
            self.group.kills += 1
            record.note(f"{self.group.name} {self.name} is killed")
            for hand in self.hands:
                if hand.state in (OPEN, ACKING):
                    record.count["acks unknown at a kill"] += hand.state == ACKING
                    record.count["in hand at a kill"] += hand.state == OPEN
                    hand.state, hand.ended = LOST if hand.state == OPEN else MAYBE_LOST, record.tick()

    def leaves(self, *, fails: bool) -> None:
        """Note that the program is about to leave the consumer; with *fails* what it had has failed."""
        with self.group.record.lock:
            self.has_left = True
            self.group.record.note(f"{self.group.name} {self.name} leaves, fails {fails}")
            self.group.is_calm = False
            self.group.left[self.name] = self.group.record.tick()
            for hand in self.hands:
                if hand.state == OPEN:
                    hand.state, hand.ended = FAILING if fails else BACK, self.group.record.tick()


class GroupRecord:
    """What the consumers of one group were given."""

    def __init__(self, record: Record, name: str, prefixes: tuple[str, ...], **rules: Any) -> None:
        self.record = record
        self.name = name
        #: All that it has followed, and what it has followed from its beginning.
        self.prefixes = self.first_prefixes = prefixes
        self.mode: str = rules.get("mode", "reliable")
        self.max_attempts: int = rules.get("max_attempts", 16)
        self.expires: bool = rules.get("expires", False)
        #: Messages that were sent later come to it; those that were stored before the other tick do not.
        self.begins: int = rules.get("begins", 0)
        self.subscribed: int = rules.get("subscribed", 0)
        #: When its first consumer was there.
        self.entered: float = math.inf
        self.hands: dict[int, list[Hand]] = defaultdict(list)
        #: Whether everything was acknowledged so far, and in time: then all come in stored order.
        self.is_calm = True
        #: Messages that were given to somebody until this tick may come again, whatever was done with them.
        self.repeats_until: float = 0
        #: Somebody has sought, redriven or resent, or set what it follows.
        self.is_changed = False
        self.is_narrowed = False
        #: Consumers may lose what they have, by a seek, a deadline or another one of their id, and hear of it late.
        self.is_loose: bool = rules.get("is_loose", False)
        #: Messages that were sent before this tick may have been passed by a seek.
        self.lost_until: float = 0
        #: Retention may have removed messages that it has not taken.
        self.misses = False
        if rules.get("misses", False):
            self.may_miss()
        #: Messages below this sequence, too, also those that come later.
        self.least_sequence = 0
        #: All sets of tags that the group has had.
        self.tag_sets: list[tuple[str, ...]] = [rules.get("tags", ())]
        self.repeats_for_good = False
        self.is_restarted = False
        #: When a program that had this id has left by itself.
        self.left: dict[str, int] = {}
        #: How many of its consumers were killed, and how often one message may be alone with such a consumer.
        self.kills = 0
        self.max_session_expiries: int = rules.get("max_session_expiries", 3)
        self.deleted: Counter[int] = Counter()

    def follows(self, sent: Sent) -> bool:
        return takes(self.prefixes, sent.subject)

    def may_want(self, sent: Sent) -> bool:
        """Return whether a message has had tags of the group at some time."""
        return any(not tags or not set(tags).isdisjoint(sent.tags) for tags in self.tag_sets)

    def wants(self, sent: Sent) -> bool:
        """Return whether a message has had tags of the group all the time."""
        return all(not tags or not set(tags).isdisjoint(sent.tags) for tags in self.tag_sets)

    def is_filtered(self, sent: Sent) -> bool:
        """Return whether the broker sees that a message has none of the tags: it compares bits."""
        return not any(not tags or tag_bits(tags) & tag_bits(sent.tags) for tags in self.tag_sets)

    def may_expire(self, sent: Sent) -> bool:
        return sent.expires or self.expires

    def problems(self, hand: Hand, before: list[Hand]) -> Iterable[str]:
        """Say which laws it breaks that a consumer is given a message."""
        sent = hand.sent
        if not self.follows(sent):
            yield "the group does not follow it"
        if not self.may_want(sent):
            yield f"it has none of the tags {self.tag_sets}"
        if sent.stored is not None and sent.stored < self.subscribed and sent.delay is None:
            yield "it was stored before the group began"
        if sent.state == "cancelled" and not sent.may_be_twice:
            yield "it was cancelled"
        if before and self.mode in ("at_most_once", "solo"):
            if not sent.may_be_twice:
                yield f"it came before: {before}"
            return
        if before and sent.may_be_twice:
            return  # it may be the other one
        for other in before:
            # Where it is loose, a program may reach late what its client was given before another one took it.
            is_kept = other.state == OPEN or (other.state in _FINAL and other.at > self.repeats_until)
            if is_kept and not self.is_loose:
                yield f"it is {other}"
        if self.mode not in ("reliable", "broadcast") or self.is_changed or self.is_loose:
            return
        least = 1 + sum(other.state == FAILED for other in before)
        most = least + sum(other.state == FAILING for other in before)
        if not least <= hand.attempt <= most:
            yield f"it must be attempt {least} to {most} after {before}"
        yield from self._beside(hand, before)
        if sent.order_key is not None and self.mode == "reliable":
            yield from self._earlier(hand)

    def _beside(self, hand: Hand, before: list[Hand]) -> Iterable[str]:
        """What may have killed a consumer comes alone to another one."""
        last = before[-1] if before else None
        if last is not None and last.state in (LOST, MAYBE_LOST):
            self.record.count["came again after a kill"] += 1
            if last.session.name != hand.session.name and self.left.get(last.session.name, 0) < last.ended:
                hand.is_quarantined = True
                self.record.count["quarantined alone is checked"] += 1
        broker = str(hand.sent.id)[:12]
        for other in hand.session.hands:
            is_here = other.state == OPEN and str(other.sent.id)[:12] == broker
            if last is not None and self.hands[other.sent.number][-2:-1] and hand.is_quarantined:
                # A tenth of what one consumer had of a pull comes together at first.
                theirs = self.hands[other.sent.number][-2].session
                is_here = is_here and (theirs is not last.session or len(theirs.hands) <= _ALONE)
            if is_here and (hand.is_quarantined or other.is_quarantined):
                yield f"it came beside {other.sent}, {other}, and one of them may have killed a consumer"

    def may_die_alone(self) -> bool:
        """Return whether a message may be dead because its consumers were killed."""
        return self.kills > self.max_session_expiries

    def _earlier(self, hand: Hand) -> Iterable[str]:
        """A message waits for the earlier ones of its slot."""
        for sent in self.record.by_slot[lane_of(hand.sent.order_key or "")]:
            if not sent.is_before(hand.sent) or not (self.follows(sent) and self.wants(sent)) or self.may_expire(sent):
                continue
            if sent.may_be_twice or sent.begun < self.begins:
                continue
            if self.record.retains and (sent.begun < self.entered or self.record.has_several_brokers):
                continue  # it had gone, maybe, before somebody followed it there
            self.record.count["order of a slot is checked"] += 1
            self.record.count["order over subjects is checked"] += sent.subject != hand.sent.subject
            hands = self.hands[sent.number]
            if self.may_die_alone():
                continue
            if not hands:
                yield f"{sent} of its slot has not come"
                continue
            last = hands[-1]
            is_last = last.state in (FAILING, FAILED) and last.attempt >= self.max_attempts
            is_here = last.state == OPEN and last.session is hand.session
            if not (last.state in (*_FINAL, MAYBE_LOST) or is_last or is_here):
                yield f"{sent} of its slot is {last}"

    def change(self, *, seeks: bool = False, loses: bool = False) -> None:
        """Note that somebody begins to change what comes to the group; ``changed`` must follow. *loses*: it passes
        messages.
        """
        with self.record.lock:
            self.is_changed, self.is_calm, self.repeats_until = True, False, math.inf
            self.is_loose = self.is_loose or seeks
            if loses:
                self.lost_until = math.inf

    def changed(self, *, for_good: bool = False) -> None:
        """Note that the change is made; *for_good*: a message may have two lives from now on."""
        with self.record.lock:
            self.repeats_until = math.inf if for_good or self.repeats_for_good else self.record.tick()
            self.repeats_for_good = self.repeats_until == math.inf
            if self.lost_until and not self.misses:
                self.lost_until = self.record.tick()

    def may_miss(self) -> None:
        """Note that retention may remove messages that the group has not taken."""
        self.misses = self.is_changed = True
        self.lost_until = math.inf

    # --- the end -----------------------------------------------------------------------------------------------------

    def check(self, dead: Counter[int], reasons: dict[int, str], *, may_be_gone: bool = False) -> None:
        """Hold what was acknowledged, and what the broker has as dead letters, against what was sent. *may_be_gone*:
        retention has removed what no group followed.
        """
        prefixes = self.first_prefixes if may_be_gone else self.prefixes
        for sent in self.record.sent.values():
            if takes(prefixes, sent.subject) and sent.state == "stored":
                if may_be_gone and sent.id is None:
                    continue  # it may be a dead letter
                number = sent.number
                for problem in self._faults(sent, dead[number], reasons.get(number, ""), may_be_gone=may_be_gone):
                    history = (
                        f"{self.hands[sent.number]}, dead {dead[sent.number]}, deleted {self.deleted[sent.number]}"
                    )
                    self.record.wrong(f"group {self.name}: {sent}: {problem}: {history}")

    def _faults(self, sent: Sent, dead: int, reason: str, *, may_be_gone: bool) -> Iterable[str]:
        count, hands = self.record.count, self.hands[sent.number]
        if not self.may_want(sent):
            count["filtered"] += 1
            count["filtered by the client"] += not self.is_filtered(sent)
            if hands or (dead and self.is_filtered(sent) and not self.is_changed):
                yield "it has none of the group's tags"
            return
        if not self.wants(sent) or sent.begun < self.lost_until or (sent.sequence or 0) < self.least_sequence:
            return
        if sent.begun < self.begins:
            return
        if self.mode == "at_most_once":
            return  # it may be missed
        acked = sum(hand.state in (ACKING, ACKED) for hand in hands)
        ends = acked + dead + self.deleted[sent.number]
        may_be_acked = any(hand.state == MAYBE_LOST for hand in hands)
        # Nobody followed it yet, at that broker maybe, so retention may have removed it.
        was_early = sent.begun < self.entered or self.record.has_several_brokers
        if not ends and not may_be_acked and not (may_be_gone and (self.is_narrowed or was_early)):
            yield "it is lost"
        if ends > 1 and not (self.is_changed or self.is_loose or sent.may_be_twice):
            yield f"it has {ends} ends"
        is_free = dead or self.may_expire(sent) or self.is_changed or self.is_loose
        if hands and hands[-1].state in (OPEN, BACK, LOST) and not is_free:
            yield "it was given back, and has not come again"
        if dead and not (self.is_changed or self.is_loose or sent.may_be_twice):
            last = hands[-1] if hands else None
            count["expired"] += reason.startswith("expired")
            if last is None or last.state in (BACK, LOST, MAYBE_LOST) or last.attempt < self.max_attempts:
                is_rejected = last is not None and last.state in (REJECTING, REJECTED)
                is_killed = self.may_die_alone() and reason.startswith("its consumer fell silent")
                count["dead with its consumers"] += is_killed
                if not is_rejected and not self.may_expire(sent) and not is_killed:
                    yield f"it is dead: {reason}"
                if is_rejected and reason != "rejected":
                    yield f"it was rejected, and is dead: {reason}"


class Record:
    """All messages and groups of one history."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.count: Counter[str] = Counter()
        self.sent: dict[int, Sent] = {}
        self.by_slot: dict[int, list[Sent]] = defaultdict(list)
        self.groups: dict[str, GroupRecord] = {}
        #: The laws that were broken.
        self.wrongs: list[str] = []
        #: What happened, for one who looks for a cause.
        self.events: list[str] = []
        #: Whether frames come late, when their sender has long gone on.
        self.has_late_frames = False
        #: Whether retention removes what no group follows.
        self.retains = False
        #: Whether a message without a receipt yet may have gone to two brokers.
        self.has_several_brokers = False
        #: Functions that are called when something came.
        self.on_came: list[Callable[[], object]] = []
        #: The numbers of messages by their ids, of which one that may be stored twice has two.
        self.ids: dict[str, int] = {}
        self._ticks = 0
        self._tries: dict[tuple[str, str], int] = {}

    def tick(self) -> int:
        with self.lock:
            self._ticks += 1
            return self._ticks

    def first_try(self, group: str | None, consumer: str | None) -> int:
        """Return a tick before a consumer with an id first tried to subscribe; for others, before they try now."""
        with self.lock:
            now = self.tick()
            return now if group is None or consumer is None else self._tries.setdefault((group, consumer), now)

    def note(self, text: str) -> None:
        """Write down what happened, beside its time."""
        self.events.append(f"{self._ticks} {text}")

    def wrong(self, text: str) -> None:
        with self.lock:
            self.note(f"WRONG {text}")
            self.wrongs.append(text)
        self.came()

    def came(self) -> None:
        for call in self.on_came:
            call()

    # --- senders -----------------------------------------------------------------------------------------------------

    def begin(self, sent: Sent) -> None:
        """Note that a program is about to send a message."""
        with self.lock:
            sent.begun = self.tick()
            self.sent[sent.number] = sent
            if sent.order_key is not None:
                self.by_slot[lane_of(sent.order_key)].append(sent)

    def stored(self, sent: Sent, receipt: Receipt | None = None) -> None:
        """Note that a message is stored; *receipt* None: nobody says where."""
        with self.lock:
            sent.stored = sent.stored or self.tick()
            if sent.state != "cancelled":
                sent.state = "stored"
            if receipt is not None:
                sent.firsts += not receipt.duplicate
                self.count["duplicate"] += receipt.duplicate
                if sent.firsts > 1 or (receipt.duplicate and sent.unique is None):
                    self.wrong(f"{sent} with unique text {sent.unique!r} has {sent.firsts} receipts of a first message")
                if sent.is_twice and not receipt.maybe_duplicate:
                    self.wrong(f"{sent} is stored twice, and its receipt does not say so")
                if not receipt.maybe_duplicate and not sent.may_be_twice:
                    if sent.id not in (None, receipt.id):
                        self.wrong(f"{sent} is {sent.id} and {receipt.id}")
                    if receipt.sequence is not None and sent.sequence not in (None, receipt.sequence):
                        self.wrong(f"{sent} has the sequence {receipt.sequence} in its receipt")
                sent.id = receipt.id
                self.ids[receipt.id] = sent.number
                if receipt.sequence is not None:
                    sent.sequence = receipt.sequence
                    sent.stored_at = receipt.stored_at
                sent.may_be_twice = sent.may_be_twice or receipt.maybe_duplicate
        self.came()

    def of(self, message: Message | StoredMessage) -> Sent:
        """Return what was sent as this message."""
        return self.sent[number_of(message.body, message.key)]

    def check_content(self, sent: Sent, message: Message | StoredMessage) -> None:
        """A message is what was sent."""
        found = message.subject, message.body, message.key, message.tags, message.priority, message.order_key
        if found != (sent.subject, sent.body, sent.key, sent.tags, sent.priority, sent.order_key):
            self.wrong(f"{sent} came as {found}")
        if isinstance(message, Message) and message.keys != tuple(filter(None, (sent.key, *sent.more_keys))):
            self.wrong(f"{sent} came with the keys {message.keys}")
        if {**message.properties, **sent.properties} != message.properties:
            self.wrong(f"{sent} came with the properties {message.properties}")
        if sent.id not in (None, message.id) and not sent.may_be_twice:
            self.wrong(f"{sent} is {sent.id}, and came as {message.id}")

    def check_stored(self, messages: Iterable[StoredMessage], *, may_be_gone: bool = False) -> None:
        """Each message is stored once, unless it *may be gone*: no other one, and none twice."""
        copies: Counter[int] = Counter()
        for message in messages:
            sent = self.of(message)
            self.check_content(sent, message)
            sent.id = sent.id or message.id
            self.ids[message.id] = sent.number
            copies[sent.number] += 1
        for sent in self.sent.values():
            most = _MOST_COPIES if sent.may_be_twice else 1
            least = 1 if sent.state == "stored" and not may_be_gone else 0
            if sent.state == "cancelled":
                most -= 1
            if not least <= copies[sent.number] <= most:
                self.wrong(f"{sent} is {sent.state}, and {copies[sent.number]} of it are stored")
            if sent.state == "unknown" and copies[sent.number]:
                sent.state = "stored"


def place_of(message_id: str, sent: Sent) -> tuple[str, str, str]:
    """Return broker, subject and lane of a stored message."""
    return message_id[:12], sent.subject, f"{lane_of(sent.order_key) if sent.order_key else 0} {sent.priority}"


def lane_of(order_key: str) -> int:
    """Return the lane of an order key."""
    return lane_of_key_hash(hash_bytes(order_key.encode()))


def number_of(body: bytes, key: str | None) -> int:
    """Return the number of a message: its body begins with it, or its key is it."""
    if not body:
        assert key is not None
        return int(key)
    return int(body.removeprefix(b'{"n":').removeprefix(b" ").partition(b".")[0].rstrip(b"}"))
