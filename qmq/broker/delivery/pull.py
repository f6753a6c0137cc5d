"""The pull path: subscriptions, pulls, acks and nacks, and which waiting pulls are served when messages arrive."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

from qmq.broker.delivery.at_most_once import AtMostOnce, OnDiskWaits, Reserve
from qmq.broker.delivery.read_waits import DeferredCommand, ReadWaits
from qmq.broker.delivery.serve import PullServer, blocking_reads
from qmq.broker.delivery.subscriptions import Subscriptions
from qmq.broker.delivery.tracker import DeliveryTracker
from qmq.broker.delivery.wakeups import Arrivals, WaitingPulls
from qmq.broker.groups.group import Group, GroupStart, SubjectFilter, Subscription, Waiting, follows_none
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.settings import group_of
from qmq.broker.journal.durable_replies import DurableReplies
from qmq.broker.ports.commands import Ack, HandBack, Pull, ReadDone, Subscribe, Withdraw
from qmq.broker.ports.effects import Acked, Effect, HandedBack
from qmq.broker.ports.limits import BrokerLimits
from qmq.broker.ports.rights import Rights
from qmq.errors import InvalidOption, Overloaded, QmqError
from qmq.storage.store import ColdRead, NotInMemory, Store


class Delivery:
    """Delivers messages to consumers. Its answers go to *effects*."""

    def __init__(
        self,
        store: Store,
        limits: BrokerLimits,
        effects: list[Effect],
        visible: Callable[[int], int],
        on_disk: OnDiskWaits,
        rights: Mapping[int, Rights],
    ) -> None:
        """*visible* returns the position before which a partition's messages may be pulled. *rights* are those of the
        connections that have a token.
        """
        self._store = store
        self._rights = rights
        self._limits = limits
        self._effects = effects
        self.waiting = WaitingPulls()
        self._reads = ReadWaits(effects)
        self._on_disk = on_disk
        self.arrivals = Arrivals(store)
        self.durable = DurableReplies(store, effects)
        self.at_most_once = AtMostOnce(store)
        self.tracker = DeliveryTracker(store, limits, self._wake, visible)
        self.server = PullServer(
            store, limits, effects, visible, self.waiting, self._reads, self.arrivals, self.tracker,
            self.at_most_once, on_disk,
        )  # fmt: skip
        self.subscriptions = Subscriptions(store, limits, effects, self.arrivals, self.tracker, self.durable)
        #: The subjects among which consumers have looked for lanes; none before there is one.
        self._known_subjects = store.subjects.count if store.subjects.has_lanes else 0

    def _wake(self, ledger: Ledger) -> None:
        """Make ready the filters of a group with new retries."""
        group = self.subscriptions.by_ledger.get(ledger.number)
        if group is not None:
            self.arrivals.make_ready(
                subject_filter for subject_filter in group.filters.values() if subject_filter.waiting
            )

    def begin_read(self, missing: NotInMemory, deferred: DeferredCommand) -> bool:
        """Have the *missing* bytes read for a command. Return False when the same read has not helped before."""
        return self._reads.begin(missing.read, deferred)

    # --- subscriptions -----------------------------------------------------------------------------------------------

    def subscribe(self, command: Subscribe, deferred: DeferredCommand | None = None) -> None:
        """Join a group, made when it is new, or add a solo consumer; after a read where the start needs one."""
        replaced = self.subscriptions.replaced(command)
        if replaced is not None:  # the consumer stays in its group
            self._answer_waiting_pulls(replaced)
            self.subscriptions.leave(replaced)
        if self._rights and (rights := self._rights.get(command.connection)) is not None:
            self._release_before(command, rights)
        try:
            self.subscriptions.join(command)
        except NotInMemory as missing:
            if not self.begin_read(missing, deferred or DeferredCommand(command)):
                with blocking_reads(self._store):
                    self.subscriptions.join(command)

    def _release_before(self, command: Subscribe, rights: Rights) -> None:
        """Release the messages in flight of a consumer that another program takes over without the right to all of its
        group's messages: as retries they go to those that may have them.
        """
        group = self.subscriptions.groups.get(group_of(command) or "")
        if group is None or group.ledger is None:
            return
        member = group.ledger.by_name.get(command.consumer)
        if member is None or not member.is_there or member.nonce == command.nonce:
            return
        if not all(rights.may_consume(prefix) for prefix in group.filters):
            self.tracker.members.leave(group.ledger, member, self.tracker.now)

    def unsubscribe_all(self, connection: int) -> None:
        """Let the consumers of a connection leave: others get their messages in flight at once."""
        for subscription in self.subscriptions.of_connection(connection):
            self.tracker.leave(subscription)

    def unsubscribe(self, connection: int, number: int) -> None:
        """Remove a subscription; its waiting pulls are answered with no messages."""
        subscription = self.subscriptions.known(connection, number)
        if subscription.is_withdrawn:
            self._count_lost(subscription)
        self._answer_waiting_pulls(subscription)
        self.tracker.leave(subscription)
        self.subscriptions.leave(subscription)

    def _answer_waiting_pulls(self, subscription: Subscription) -> None:
        for waiting in self.waiting.of_subscription(subscription):
            self.server.answer_empty(waiting)

    def set_follows(self, group: Group, prefixes: Sequence[str], begin: GroupStart) -> None:
        """Have a group follow exactly *prefixes*. Waiting pulls wait for that, or are refused."""
        several = [waiting for one in self.subscriptions.of(group) for waiting in self.waiting.of_subscription(one)]
        for waiting in several:
            self.waiting.detach(waiting)
        self.subscriptions.set_follows(group, prefixes, begin)
        for waiting in several:
            if waiting.subscription.filters:
                self.waiting.attach(waiting)
            else:
                self.server.refuse(waiting, follows_none(group, waiting.subscription.asked))
        self.arrivals.make_ready(subject_filter for subject_filter in group.filters.values() if subject_filter.waiting)

    def moved(self, connection: int) -> None:
        """Note that the client of a connection lives."""
        for subscription in self.subscriptions.of_connection(connection):
            self.tracker.lives(subscription)

    def _count_lost(self, subscription: Subscription) -> None:
        """Count messages of an at_most_once group that may not have arrived; nobody gets them again."""
        if subscription.unconfirmed:
            subscription.group.skipped += subscription.unconfirmed
            subscription.group.dirty = True

    def disconnected(self, connection: int, *, by_client: bool, has_read_all: bool) -> None:
        """Remove the pulls and subscriptions of a closed connection. *by_client*: its client's system closed it.
        *has_read_all*: it has taken all answers.
        """
        if not has_read_all:
            for subscription in self.subscriptions.of_connection(connection):
                self._count_lost(subscription)
        for waiting in self.waiting.of(connection):
            self.waiting.remove(waiting)
        self.subscriptions.disconnected(connection)
        self.tracker.disconnected(connection, by_client=by_client)
        self._reads.disconnected(connection)

    # --- pulls -------------------------------------------------------------------------------------------------------

    def pull(self, pull: Pull, now_us: int) -> None:
        """Answer a pull at once, or let it wait."""
        subscription = self.subscriptions.get(pull.connection, pull.subscription)
        subscription.unconfirmed, subscription.is_withdrawn = 0, False
        if not pull.max_count >= 1 or pull.min_count > pull.max_count or not pull.max_bytes:
            raise InvalidOption(
                f"a pull asks for {pull.min_count} to {pull.max_count} messages in {pull.max_bytes} bytes; "
                "ask for at least one message and one byte, and no minimum above the maximum"
            )
        if not subscription.filters:
            raise follows_none(subscription.group, subscription.asked)
        if self.waiting.get(pull.connection, pull.request) is not None:
            raise InvalidOption(f"a pull with request number {pull.request} waits already; use a new number")
        waiting = Waiting(pull, subscription, now_us + pull.timeout_ms * 1_000)
        if self.server.serve(waiting, final=not pull.timeout_ms) is None:
            return
        if self.waiting.count_of(pull.connection) >= self._limits.max_waiting_pulls:
            raise Overloaded(
                f"{self._limits.max_waiting_pulls} pulls of this connection wait, the most it may have; "
                "wait for an answer, or use another connection"
            )
        self.waiting.add(waiting)
        subscription.note_plain(self._store)

    def withdraw(self, command: Withdraw) -> None:
        """Answer a waiting pull with no messages; one that was answered already needs nothing."""
        waiting = self.waiting.get(command.connection, command.pull_request)
        if waiting is not None:
            self.server.answer_empty(waiting)
            return
        for subscription in self.subscriptions.of_connection(command.connection):
            subscription.is_withdrawn = True  # it matters to one with an answer on its way

    def refuse_waiting_pulls(self, error: QmqError) -> None:
        """Answer every waiting pull with an error, since the broker stops."""
        for waiting in self.waiting.all():
            self.server.refuse(waiting, error)

    def waiting_pulls(self) -> int:
        """Return how many pulls wait."""
        return self.waiting.count

    def take_damaged(self) -> list[QmqError]:
        """Return the failed reads since the last call."""
        redelivery = self.tracker.redelivery
        damaged = self.server.damaged + redelivery.damaged
        self.server.damaged, redelivery.damaged = [], []
        return damaged

    # --- dispositions -------------------------------------------------------------------------------------------------

    def ack(self, command: Ack) -> Acked:
        """Ack messages, and return the answer."""
        subscription = self.subscriptions.get(command.connection, command.subscription)
        refused = self.tracker.ack(subscription, command.intervals)
        self._wake_own(subscription)
        return Acked(command.connection, command.request, refused, command.may_wait and not refused)

    def hand_back(self, command: HandBack) -> HandedBack:
        """Nack, release or reject messages, and return the answer."""
        subscription = self.subscriptions.get(command.connection, command.subscription)
        refused = self.tracker.hand_back(subscription, command.backs)
        self._wake_own(subscription)
        return HandedBack(command.connection, command.request, tuple(refused))

    def _wake_own(self, subscription: Subscription) -> None:
        """Look again at the waiting pulls of a consumer that has room for more messages."""
        if subscription.connection in self.waiting:
            self.arrivals.make_ready(subscription.filters)
        ledger = subscription.group.ledger
        if ledger is not None and ledger.order is not None and ledger.order.is_freed:
            ledger.order.is_freed = False
            self.arrivals.make_ready(one for one in subscription.group.filters.values() if one.waiting)

    # --- reads -------------------------------------------------------------------------------------------------------

    def read_done(self, done: ReadDone) -> DeferredCommand | None:
        """End a read: pulls that waited for it are served at the end of the turn. Return the command that waited."""
        waiter, read = self._reads.end(done.number, failed=done.error is not None)
        if isinstance(read, Reserve):
            self.at_most_once.reserved(read, done.error)
        else:
            self.finish_read(read)
        if isinstance(waiter, DeferredCommand):
            return waiter
        if waiter is not None and done.error is None:
            self.arrivals.make_ready([waiter])
        elif waiter is not None and done.error is not None:
            for waiting in list(waiter.waiting.values()):
                self.server.refuse(waiting, done.error)
        return None

    def finish_read(self, read: ColdRead) -> None:
        """Note the damage that a read has found."""
        self.server.damaged += self._store.finish_read(read)

    def synced(self) -> None:
        """Make ready the filters that waited for a sync, which has ended or failed."""
        self.arrivals.make_ready(self._on_disk.synced())

    def refuse_pulls(self, subscription: Subscription, error: QmqError) -> None:
        """Answer every waiting pull of a subscription with an error."""
        for waiting in self.waiting.of_subscription(subscription):
            self.server.refuse(waiting, error)

    def _serve_overdue(self) -> None:
        """Answer pulls past their deadline that wait for no read any more."""
        overdue, self.waiting.overdue = self.waiting.overdue, []
        for waiting in overdue:
            if not waiting.done:
                self._serve_last(waiting)

    def _serve_last(self, waiting: Waiting) -> None:
        """Answer a pull past its deadline, or keep it until a read ends."""
        if self.server.serve(waiting, final=True) is not None:
            self.waiting.overdue.append(waiting)

    # --- arrivals and time -------------------------------------------------------------------------------------------

    def _find_lanes(self) -> None:
        """Have all consumers look for messages of lanes that are new since the last turn, from its rows on."""
        count, seen = self._store.subjects.count, self.arrivals.seen()
        for subscription in self.subscriptions.by_number.values():
            if subscription.find_lanes(self._store, self._known_subjects, seen):
                subscription.plain_at = -1
        self._known_subjects = count

    def turn(self) -> None:
        """Serve the waiting pulls that messages visible since the last turn are for."""
        if self._store.subjects.has_lanes and self._known_subjects != self._store.subjects.count:
            self._find_lanes()
        self.arrivals.look(bool(self.waiting.count))
        if self.arrivals.ready:
            ready, self.arrivals.ready = self.arrivals.ready, {}
            for subject_filter in ready.values():
                self._serve_waiting(subject_filter)
                subject_filter.arrived.clear()
        if self.waiting.overdue:
            self._serve_overdue()

    def unfinished(self) -> bool:
        """Return whether a pull stopped at a bound and goes on in the next turn."""
        return any(subject_filter.waiting for subject_filter in self.arrivals.ready.values())

    def _serve_waiting(self, subject_filter: SubjectFilter) -> None:
        """Serve the pulls that wait for a filter, longest first, as long as there are messages."""
        ready: int | None = None  # this many were too few for a pull with this filter alone
        for waiting in _longest_first(subject_filter.waiting):
            single = len(waiting.subscription.filters) == 1
            if single and ready is not None and ready < self.server.need(waiting.pull):
                continue
            too_few = self.server.serve(waiting, final=False)
            if too_few is not None and too_few.is_blocked:
                continue
            has_none = too_few is not None and not too_few.ready
            base = subject_filter.base or subject_filter
            has_slots = base.has_slots  # others may have more of these
            if has_none and has_slots:
                continue
            if has_none or not self._has_more(subject_filter):
                return
            if single and too_few is not None and not has_slots:
                ready = too_few.ready

    def _has_more(self, subject_filter: SubjectFilter) -> bool:
        ledger = subject_filter.group.ledger
        if ledger is not None and (ledger.retries.is_due or ledger.retries.is_quarantined_due):
            return True
        base = subject_filter.base or subject_filter
        return any(lane.has_more(self._store) for lane in base.with_lanes())

    def tick(self, now_us: int) -> None:
        """Answer the waiting pulls whose deadline has come."""
        for waiting in self.waiting.due(now_us):
            self._serve_last(waiting)

    def next_deadline_us(self) -> int | None:
        """Return when ``tick`` has work next; None for never."""
        return self.waiting.next_deadline_us()


def _longest_first(waiting: OrderedDict[int, Waiting]) -> Iterator[Waiting]:
    """Yield all *waiting* pulls. The rest is listed only once a pull stays, so that many behind it cost nothing."""
    while waiting:
        first = next(iter(waiting.values()))
        yield first
        if not first.done:
            yield from list(waiting.values())[1:]
            return
