"""The consumers of all groups: sessions and their expiry, what each consumer may pull next, and the groups of
broadcasts.

A consumer that leaves with much in flight leaves in parts: each turn makes retries of some of its messages. Each part
is a record of the pull log, so a start goes on behind the last one. From the first part on the consumer is fenced.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from qmq.broker.groups.group import Group
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.member import Member
from qmq.broker.journal.record_types import LEAVING_RANGES, LeaveReason
from qmq.broker.ports.commands import Now
from qmq.broker.ports.limits import BrokerLimits
from qmq.net.protocol.types import BROADCAST

#: The most delivery sequences above the ack floor that the messages in flight may span, in windows of max_unacked.
SPAN_WINDOWS: Final = 64
#: The most retries that expired sessions make in one turn, or about twice that: 10 us each.
MOST_RETRIES: Final = 1_000
#: The most groups whose due retries one turn loads: up to 2 ms each.
MOST_LOOKS: Final = 16
#: The wall clock may be set at any time, so due times by it are checked this often.
_LOOK_EVERY_US: Final = 1_000_000


class MessageKind(enum.Enum):
    """The kinds of messages that a pull may get."""

    NOTHING = "nothing"
    FRESH = "fresh"
    AGAIN = "again"
    QUARANTINED = "quarantined"
    IN_FLIGHT = "in_flight"


class Offer(NamedTuple):
    """A kind of messages, and the most messages and bytes of them that a pull may get. FRESH or AGAIN says which of the
    two comes first: new messages, or retries of their rank, where *ranks* has it.
    """

    kind: MessageKind
    max_count: int
    max_bytes: int
    #: The ranks of the retries that are due and that the consumer may have beside others, the highest first.
    ranks: Sequence[int] = ()


class DueRetries(NamedTuple):
    """The retries that are due for a consumer: the ranks of those that it may have beside others, the highest first;
    and whether there are some that it may have alone.
    """

    ranks: Sequence[int]
    quarantined: bool


#: The value for most consumers, most of the time.
NOTHING_WAITS: Final = DueRetries((), False)
_NOTHING: Final = Offer(MessageKind.NOTHING, 0, 0)
#: The common members, at hand: an enum looks its members up by name.
_AGAIN: Final = MessageKind.AGAIN
_FRESH: Final = MessageKind.FRESH


class ClientConnections:
    """The open connections of each client's process: those by which it subscribed or sent heartbeats."""

    def __init__(self) -> None:
        self._clients: dict[int, bytes] = {}
        self._counts = Counter[bytes]()

    def used(self, connection: int, client: bytes) -> None:
        """Note that the client's process has that connection."""
        if self._clients.get(connection) != client:
            self.closed(connection)
            self._clients[connection] = client
            self._counts[client] += 1

    def closed(self, connection: int) -> bytes | None:
        """Forget a connection; return the client whose last one it was."""
        client = self._clients.pop(connection, None)
        if client is None:
            return None
        self._counts[client] -= 1
        if self._counts[client]:
            return None
        del self._counts[client]
        return client


class Membership:
    """The consumers of all groups. *wake* is called with the ledger of a group for which messages became ready."""

    def __init__(
        self, session_timeout_us: int, wake: Callable[[Ledger], None], reconnect_timeout_us: int | None = None
    ) -> None:
        """*reconnect_timeout_us*: the time that a client has to come back, in groups without a setting for it; None:
        the session timeout.
        """
        self._session_timeout_us = session_timeout_us
        self._reconnect_timeout_us = session_timeout_us if reconnect_timeout_us is None else reconnect_timeout_us
        self._connections = ClientConnections()
        self._wake = wake
        self._leavers = PartialLeaves()
        self._clients: dict[bytes, dict[tuple[int, int], tuple[Ledger, Member]]] = {}
        #: By group and consumer: the process whose heartbeats count; after a takeover only the new one.
        self._client_of: dict[tuple[int, int], bytes] = {}
        self._session_deadlines: list[tuple[int, int, int, Ledger, Member]] = []  # monotonic, group, member
        self._returns: list[tuple[int, int, int, Ledger, Member]] = []  # as these; clients that are to come back
        self._due: list[tuple[int, int, Ledger]] = []  # wall clock, group
        self._looks: dict[int, int] = {}  # by group: its first time in _due
        #: Groups of broadcast members that left since ``Broadcasts.tick`` last took them.
        self.left_groups: set[int] = set()
        #: By group: the consumer that gets no messages until it has none in flight, and then quarantined ones.
        self._clearing: dict[int, Member] = {}

    def joined(self, ledger: Ledger, member: Member, client: bytes, now: Now) -> None:
        """Begin the session of a consumer, which the heartbeats of that client's process keep alive."""
        self._forget_client(ledger, member)
        member.client = client
        key = ledger.number, member.number
        self._client_of[key] = client
        self._clients.setdefault(client, {})[key] = ledger, member
        self._watch(ledger, member, now)

    def _watch(self, ledger: Ledger, member: Member, now: Now) -> None:
        member.seen_us, member.gone_us = now.monotonic_us, 0
        if not member.is_timed:
            member.is_timed = True
            deadline_us = now.monotonic_us + self._session_timeout_us
            heapq.heappush(self._session_deadlines, (deadline_us, ledger.number, member.number, ledger, member))

    def _forget_client(self, ledger: Ledger, member: Member) -> None:
        key = ledger.number, member.number
        client = self._client_of.pop(key, None)
        if client is not None:
            del self._clients[client][key]
            if not self._clients[client]:
                del self._clients[client]

    def heartbeat(self, connection: int, client: bytes, stalled_us: int, now: Now) -> None:
        """Keep the sessions of a client's process alive. Its loop has not turned for *stalled_us*."""
        self.connected(connection, client)
        for _, member in self._clients.get(client, {}).values():
            member.seen_us = now.monotonic_us
            member.stalled_us = stalled_us

    def connected(self, connection: int, client: bytes) -> None:
        """Note that a client's process has that connection, so it is there."""
        self._connections.used(connection, client)
        for _, member in self._clients.get(client, {}).values():
            member.gone_us = 0

    def disconnected(self, connection: int, now: Now, *, by_client: bool) -> None:
        """Have the consumers of a client expire soon, if its system closed its last connection and it does not come
        back. Where the broker or the network did, it may live: its sessions go on.
        """
        client = self._connections.closed(connection)
        if client is None or not by_client:
            return
        for ledger, member in self._clients.get(client, {}).values():
            timeout_us = ledger.settings.reconnect_timeout_us
            if timeout_us is None:
                timeout_us = self._reconnect_timeout_us
            member.gone_us = now.monotonic_us + timeout_us
            if not member.is_awaited:
                member.is_awaited = True
                heapq.heappush(self._returns, (member.gone_us, ledger.number, member.number, ledger, member))

    def leave(self, ledger: Ledger, member: Member, now: Now) -> None:
        """Let a consumer leave: make retries of its messages, at once or, if they are many, over several turns."""
        if self._leavers.leave(ledger, member, LeaveReason.LEFT, now):
            self.left(ledger, member)
        else:
            self._forget_client(ledger, member)

    def leaves(self, ledger: Ledger, member: Member) -> None:
        """Go on with a consumer that another one took over from: make retries of its messages, some in each turn."""
        self._leavers.resume(ledger, member)

    def left(self, ledger: Ledger, *members: Member) -> None:
        """Note that these consumers have nothing in flight any more."""
        for member in members:
            self._forget_client(ledger, member)
            if self._clearing.get(ledger.number) is member:
                del self._clearing[ledger.number]
        if ledger.keeps_absent and members:
            self.left_groups.add(ledger.number)
        self.look(ledger)

    def look(self, ledger: Ledger) -> None:
        """Check a group whose retries changed: wake it, now or when the next one is due."""
        self._look_when_due(ledger, ledger.retries.next_due_us())
        self._wake(ledger)

    def look_at(self, ledger: Ledger, wall_us: int) -> None:
        """Check a group at that time."""
        self._look_when_due(ledger, wall_us)

    def _look_when_due(self, ledger: Ledger, due_us: int | None) -> None:
        if due_us is not None and due_us < self._looks.get(ledger.number, due_us + 1):
            self._looks[ledger.number] = due_us
            heapq.heappush(self._due, (due_us, ledger.number, ledger))

    def clears(self, ledger: Ledger, member: Member) -> bool:
        """Return whether a consumer may get messages again that were held back from it."""
        return not member.in_flight.count or member.in_flight.count < ledger.settings.max_unacked

    # --- what it may be given ----------------------------------------------------------------------------------------

    def offer(self, ledger: Ledger, member: Member, expected: int, waiting: DueRetries) -> Offer:
        """Return what a consumer may get, for which *waiting* is due and which has seen its pulls up to *expected*."""
        settings, in_flight = ledger.settings, member.in_flight
        if expected < in_flight.next_sequence and in_flight.unhandled(expected):
            return Offer(MessageKind.IN_FLIGHT, settings.max_unacked, settings.max_unacked_bytes)
        most, in_flight_count = settings.max_unacked, in_flight.count
        count = min(most - in_flight_count, most * SPAN_WINDOWS - in_flight.span)
        size = settings.max_unacked_bytes - in_flight.size
        if member.quarantined or count <= 0 or (size <= 0 and in_flight_count):
            return _NOTHING
        if waiting.quarantined:
            clearing = self._clearing.setdefault(ledger.number, member)
            if not in_flight_count:
                if clearing is member:
                    del self._clearing[ledger.number]
                return Offer(MessageKind.QUARANTINED, settings.max_unacked, settings.max_unacked_bytes)
            if clearing is member:
                return _NOTHING
        elif self._clearing and (not ledger.retries.is_quarantined_due or self._clearing.get(ledger.number) is member):
            self._clearing.pop(ledger.number, None)
        # Retries and new messages take turns, so that neither waits long for the other.
        again = waiting.ranks and not ledger.was_again
        return tuple.__new__(Offer, (_AGAIN if again else _FRESH, count, max(size, 1), waiting.ranks))

    # --- time --------------------------------------------------------------------------------------------------------

    def tick(self, now: Now) -> list[tuple[Ledger, Member]]:
        """Expire silent consumers, and wake groups whose retries are due; return the consumers that expired."""
        expired, made = list[tuple[Ledger, Member]](), 0
        while made < MOST_RETRIES and (gone := self._next_expired(now)) is not None:
            ledger, member = gone
            made -= ledger.retries.next_number
            if self._leavers.leave(ledger, member, LeaveReason.EXPIRED, now):
                expired.append(gone)
                self.left(ledger, member)
            else:
                self._forget_client(ledger, member)
            made += ledger.retries.next_number
        has_left = self._leavers.tick(now) if made < MOST_RETRIES else None
        if has_left is not None:
            expired.append(has_left)
            self.left(*has_left)
        for _ in range(MOST_LOOKS):
            if not self._due or self._due[0][0] > now.wall_us:
                break
            due_us, number, ledger = heapq.heappop(self._due)
            if self._looks.get(number) == due_us:
                del self._looks[number]
                self.look_again(ledger, now)
        return expired

    def _next_expired(self, now: Now) -> tuple[Ledger, Member] | None:
        """Return a consumer that was silent for the session timeout, or whose client is gone and did not come back."""
        while self._returns and self._returns[0][0] <= now.monotonic_us:
            _, group, number, ledger, member = heapq.heappop(self._returns)
            member.is_awaited = False
            if not member.gone_us or ledger.members.get(number) is not member or not member.is_there:
                continue
            if member.gone_us <= now.monotonic_us:
                return ledger, member
            member.is_awaited = True
            heapq.heappush(self._returns, (member.gone_us, group, number, ledger, member))
        while self._session_deadlines and self._session_deadlines[0][0] <= now.monotonic_us:
            _, group, number, ledger, member = heapq.heappop(self._session_deadlines)
            if ledger.members.get(number) is not member or member.closed:
                member.is_timed = False
                continue
            until_us = member.seen_us + self._session_timeout_us
            if until_us > now.monotonic_us:
                heapq.heappush(self._session_deadlines, (until_us, group, number, ledger, member))
                continue
            member.is_timed = False
            if not member.leaving:
                return ledger, member
        return None

    def look_again(self, ledger: Ledger, now: Now) -> None:
        """Load the retries of a group that are due."""
        is_loaded = ledger.retries.load(now.wall_us)
        if is_loaded:
            self._wake(ledger)
        due_us = ledger.retries.next_due_us()
        if due_us is not None and (due_us > now.wall_us or not is_loaded):
            self._look_when_due(ledger, due_us)

    def next_deadline_us(self, now: Now) -> int | None:
        """Return the monotonic microsecond at which ``tick`` has work."""
        if self._leavers:
            return now.monotonic_us
        deadlines = [heap[0][0] for heap in (self._session_deadlines, self._returns) if heap]
        if self._due:
            deadlines.append(now.monotonic_us + min(max(0, self._due[0][0] - now.wall_us), _LOOK_EVERY_US))
        return min(deadlines, default=None)

    def restore(self, ledgers: Iterable[Ledger], now: Now) -> None:
        """Begin the sessions of all consumers after a start, each with a full session timeout."""
        for ledger in ledgers:
            for member in ledger.members.values():
                if member.leaving:
                    self._leavers.resume(ledger, member)
                elif not member.closed:
                    self.joined(ledger, member, member.client, now)
            self.look(ledger)


class PartialLeaves:
    """The consumers of all groups that leave in parts."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Ledger, Member]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def leave(self, ledger: Ledger, member: Member, why: LeaveReason, now: Now) -> bool:
        """Let a consumer leave; return False if the rest follows in the next turns."""
        done = _leave_some(ledger, member, why, now.wall_us)
        if not done:
            self._waiting.append((ledger, member))
        return done

    def resume(self, ledger: Ledger, member: Member) -> None:
        """Go on with a consumer that is leaving already: a start found it so, or another one took over from it."""
        self._waiting.append((ledger, member))

    def tick(self, now: Now) -> tuple[Ledger, Member] | None:
        """Go on with one consumer; return it when it has left."""
        while self._waiting:
            ledger, member = self._waiting[0]
            if ledger.members.get(member.number) is not member or not member.leaving:
                self._waiting.popleft()  # its group was sought or deleted
                continue
            if not _leave_some(ledger, member, LeaveReason(member.leaving), now.wall_us):
                self._waiting.rotate(-1)
                return None
            self._waiting.popleft()
            return ledger, member
        return None


def _leave_some(ledger: Ledger, member: Member, why: LeaveReason, now_us: int) -> bool:
    """Make retries of some messages of a consumer; return True when it has left."""
    end = member.in_flight.end_of_first(LEAVING_RANGES[why])
    if member.closed or end == member.in_flight.next_sequence:
        ledger.leave(member, why, now_us)
        return True
    ledger.leave_in_part(member, why, end, now_us)
    return False


#: The group of a member with a made-up id is deleted so many session timeouts after its session expired.
MADE_UP_TIMEOUTS: Final = 3
#: The wall clock may be set at any time, so due times by it are checked this often.
_LOOK_FOR_EXPIRY_EVERY_US: Final = 60_000_000
#: Groups that one tick deletes, each with its files.
_DELETED_AT_ONCE: Final = 16


class Broadcasts:
    """Deletes the groups of broadcast members that are away for too long.

    A member whose id its client made up comes back only over a lost connection, so its group is deleted when it leaves,
    or a few session timeouts after its session expired. The group of a member with an id of its own stays for
    ``broadcast_ttl_ms``.
    """

    def __init__(
        self, groups: Mapping[int, Group], members: Membership, delete: Callable[[Group], None], limits: BrokerLimits
    ) -> None:
        """*groups* are by the numbers of their ledgers."""
        self._groups = groups
        self._members = members
        self._delete = delete
        self._ttl_us = limits.broadcast_ttl_ms * 1_000
        self._made_up_us = min(MADE_UP_TIMEOUTS * limits.session_timeout_ms * 1_000, self._ttl_us)
        self._due: list[tuple[int, int]] = []  # wall clock, number of the group's ledger
        self._looks: dict[int, int] = {}  # by that number: its first time in _due

    def restore(self, now: Now) -> None:
        """Find the groups whose members are away, after a start."""
        for number, group in self._groups.items():
            if group.mode == BROADCAST:
                # If the record of a member's join is lost, the group stays for the whole time from now on.
                self._wait_for(number, group, now.wall_us + self._ttl_us)

    def tick(self, now: Now) -> None:
        """Delete some of the groups that are due."""
        left = self._members.left_groups
        while left:
            number = left.pop()
            group = self._groups.get(number)
            if group is not None:
                self._wait_for(number, group, now.wall_us)
        deleted = 0
        while self._due and self._due[0][0] <= now.wall_us and deleted < _DELETED_AT_ONCE:
            due_us, number = heapq.heappop(self._due)
            group = self._groups.get(number)
            if self._looks.get(number) != due_us:
                continue
            del self._looks[number]
            until_us = self._due_us(group, due_us) if group is not None else None
            if group is not None and until_us is not None and until_us <= now.wall_us:
                self._delete(group)
                deleted += 1
            elif until_us is not None:
                self._look_at(number, until_us)

    def _wait_for(self, number: int, group: Group, empty_us: int) -> None:
        due_us = self._due_us(group, empty_us)
        if due_us is not None:
            self._look_at(number, due_us)

    def _look_at(self, number: int, due_us: int) -> None:
        if due_us < self._looks.get(number, due_us + 1):
            self._looks[number] = due_us
            heapq.heappush(self._due, (due_us, number))

    def _due_us(self, group: Group, empty_us: int) -> int | None:
        """Return when to delete a group: None while its member is there, *empty_us* if it has none."""
        assert group.ledger is not None
        members = group.ledger.members.values()
        if not all(member.closed for member in members):
            return None
        ends = ((self._made_up_us if member.transient else self._ttl_us) + member.left_us for member in members)
        return max(ends, default=empty_us)

    def next_deadline_us(self, now: Now) -> int | None:
        """Return when ``tick`` has work."""
        if self._members.left_groups:
            return now.monotonic_us
        if not self._due:
            return None
        return now.monotonic_us + min(max(0, self._due[0][0] - now.wall_us), _LOOK_FOR_EXPIRY_EVERY_US)
