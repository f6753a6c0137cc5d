"""The pull path: subscriptions, pulls, and who of those that wait is served when something arrives."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from qmq.broker.delivery.at_most_once import MostOnce, OnDisk, Reserve
from qmq.broker.delivery.handing import Handing
from qmq.broker.delivery.read_waits import DeferredCommand, Reads
from qmq.broker.delivery.serve import BLOCKED, Serving, waits
from qmq.broker.delivery.subscriptions import Subscriptions
from qmq.broker.delivery.wakeups import Arrivals, WaitingPulls
from qmq.broker.groups.group import Begin, Group, SubjectFilter, Subscription, Waiting, follows_none
from qmq.broker.groups.group_state import Ledger
from qmq.broker.journal.durable_replies import Durable
from qmq.broker.ports.commands import Ack, HandBack, Pull, ReadDone, Subscribe, Withdraw
from qmq.broker.ports.effects import Acked, Effect, HandedBack
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import InvalidOption, Overloaded, QmqError
from qmq.storage.store import ColdRead, NotAtHand, Store


class Delivery:
    """Hands out messages. Everything it has to say goes to *effects*."""

    def __init__(
        self, store: Store, limits: BrokerLimits, effects: list[Effect], visible: Callable[[int], int], on_disk: OnDisk
    ) -> None:
        """*visible* tells up to which position a partition's messages may be pulled."""
        self._store = store
        self._limits = limits
        self._effects = effects
        self._waiting_pulls = WaitingPulls()
        self._reads = Reads(effects)
        self._on_disk = on_disk
        self.arrivals = Arrivals(store)
        self.durable = Durable(store, effects)
        self.at_most_once = MostOnce(store)
        self.handing = Handing(store, limits.session_timeout_ms * 1_000, self._wake, visible)
        self._serving = Serving(
            store, limits, effects, visible, self._waiting_pulls, self._reads, self.arrivals, self.handing,
            self.at_most_once, on_disk,
        )  # fmt: skip
        self.subscriptions = Subscriptions(store, limits, effects, self.arrivals, self.handing, self.durable)

    def _wake(self, ledger: Ledger) -> None:
        """Something of a group has come back."""
        group = self.subscriptions.by_ledger.get(ledger.number)
        if group is not None:
            self.arrivals.make_ready(
                subject_filter for subject_filter in group.filters.values() if subject_filter.waiting
            )

    def begin_read(self, missing: NotAtHand, deferred: DeferredCommand) -> bool:
        """Have read what a command waits for; False when that was in vain, and it is to be waited for."""
        return self._reads.begin(missing.read, deferred)

    # --- subscriptions -----------------------------------------------------------------------------------------------

    def subscribe(self, command: Subscribe, deferred: DeferredCommand | None = None) -> None:
        """Join a group (made now, if it is new) or follow alone; when its start has been read, if it must be."""
        replaced = self.subscriptions.replaced(command)
        if replaced is not None:  # it goes, and its consumer stays
            self._answer_waiting_pulls(replaced)
            self.subscriptions.leave(replaced)
        try:
            self.subscriptions.join(command)
        except NotAtHand as missing:
            if not self.begin_read(missing, deferred or DeferredCommand(command)):
                with waits(self._store):
                    self.subscriptions.join(command)

    def unsubscribe(self, connection: int, number: int) -> None:
        """Leave; waiting pulls of it are answered with nothing."""
        subscription = self.subscriptions.known(connection, number)
        self._answer_waiting_pulls(subscription)
        self.handing.leave(subscription)
        self.subscriptions.leave(subscription)

    def _answer_waiting_pulls(self, subscription: Subscription) -> None:
        for waiting in self._waiting_pulls.of_subscription(subscription):
            self._serving.answer_empty(waiting)

    def set_follows(self, group: Group, prefixes: Sequence[str], begin: Begin) -> None:
        """Have a group follow these and nothing else; waiting pulls wait for that, or are refused."""
        several = [
            waiting for one in self.subscriptions.of(group) for waiting in self._waiting_pulls.of_subscription(one)
        ]
        for waiting in several:
            self._waiting_pulls.detach(waiting)
        self.subscriptions.set_follows(group, prefixes, begin)
        for waiting in several:
            if waiting.subscription.filters:
                self._waiting_pulls.attach(waiting)
            else:
                self._serving.refuse(waiting, follows_none(group, waiting.subscription.asked))
        self.arrivals.make_ready(subject_filter for subject_filter in group.filters.values() if subject_filter.waiting)

    def disconnected(self, connection: int) -> None:
        """A connection is gone: so are its pulls and subscriptions."""
        for waiting in self._waiting_pulls.of(connection):
            self._waiting_pulls.remove(waiting)
        self.subscriptions.disconnected(connection)
        self._reads.disconnected(connection)

    # --- pulls -------------------------------------------------------------------------------------------------------

    def pull(self, pull: Pull, now_us: int) -> None:
        """Answer a pull at once, or have it wait."""
        subscription = self.subscriptions.get(pull.connection, pull.subscription)
        if not pull.max_count >= 1 or pull.min_count > pull.max_count or not pull.max_bytes:
            raise InvalidOption(
                f"a pull asks for {pull.min_count} to {pull.max_count} messages in {pull.max_bytes} bytes; "
                "ask for at least one message and one byte, and no minimum above the maximum"
            )
        if not subscription.filters:
            raise follows_none(subscription.group, subscription.asked)
        if self._waiting_pulls.get(pull.connection, pull.request) is not None:
            raise InvalidOption(f"request {pull.request} waits already; number requests anew")
        waiting = Waiting(pull, subscription, now_us + pull.timeout_ms * 1_000)
        if self._serving.serve(waiting, final=not pull.timeout_ms) is None:
            return
        if self._waiting_pulls.count_of(pull.connection) >= self._limits.max_waiting_pulls:
            raise Overloaded(
                f"{self._limits.max_waiting_pulls} pulls of this connection wait, the most it may have; "
                "wait for an answer, or use another connection"
            )
        self._waiting_pulls.add(waiting)

    def withdraw(self, command: Withdraw) -> None:
        """Answer a waiting pull now, with what is there; one that was answered already needs nothing."""
        waiting = self._waiting_pulls.get(command.connection, command.pull_request)
        if waiting is not None:
            self._serving.answer_empty(waiting)

    def refuse_waiting_pulls(self, error: QmqError) -> None:
        """Answer every waiting pull with an error: the broker stops."""
        for waiting in self._waiting_pulls.all():
            self._serving.refuse(waiting, error)

    def waiting_pulls(self) -> int:
        """Pulls that wait."""
        return self._waiting_pulls.count

    def take_damaged(self) -> list[QmqError]:
        """What could not be read since the last call."""
        redelivery = self.handing.redelivery
        damaged = self._serving.damaged + redelivery.damaged
        self._serving.damaged, redelivery.damaged = [], []
        return damaged

    # --- dispositions -------------------------------------------------------------------------------------------------

    def ack(self, command: Ack) -> Acked:
        """These are handled."""
        subscription = self.subscriptions.get(command.connection, command.subscription)
        refused = self.handing.ack(subscription, command.intervals)
        self._wake_own(subscription)
        return Acked(command.connection, command.request, refused, command.may_wait and not refused)

    def hand_back(self, command: HandBack) -> HandedBack:
        """These come back."""
        subscription = self.subscriptions.get(command.connection, command.subscription)
        refused = self.handing.hand_back(subscription, command.backs)
        self._wake_own(subscription)
        return HandedBack(command.connection, command.request, tuple(refused))

    def _wake_own(self, subscription: Subscription) -> None:
        """It has room for more: its own waiting pull may go on."""
        if subscription.connection in self._waiting_pulls:
            self.arrivals.make_ready(subscription.filters)

    # --- reads -------------------------------------------------------------------------------------------------------

    def read_done(self, done: ReadDone) -> DeferredCommand | None:
        """What was asked for is in memory; whoever waits for it is served at the end of the turn. The command that
        waited for it, if one did.
        """
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
                self._serving.refuse(waiting, done.error)
        return None

    def finish_read(self, read: ColdRead) -> None:
        """Take what a read of anybody's came upon."""
        self._serving.damaged += self._store.finish_read(read)

    def synced(self) -> None:
        """More of the message log is on disk, or a sync has failed."""
        self.arrivals.make_ready(self._on_disk.synced())

    def refuse_pulls(self, subscription: Subscription, error: QmqError) -> None:
        """Answer every waiting pull of a subscription with an error."""
        for waiting in self._waiting_pulls.of_subscription(subscription):
            self._serving.refuse(waiting, error)

    def _serve_overdue(self) -> None:
        """Answer those whose time is up, as far as no read keeps them."""
        overdue, self._waiting_pulls.overdue = self._waiting_pulls.overdue, []
        for waiting in overdue:
            if not waiting.done:
                self._serve_last(waiting)

    def _serve_last(self, waiting: Waiting) -> None:
        """Its time is up."""
        if self._serving.serve(waiting, final=True) is not None:
            self._waiting_pulls.overdue.append(waiting)

    # --- arrivals and time -------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Look at what became visible since the last turn, and serve the waiting pulls that it is for."""
        self.arrivals.look(bool(self._waiting_pulls.count))
        if self.arrivals.ready:
            ready, self.arrivals.ready = self.arrivals.ready, {}
            for subject_filter in ready.values():
                self._serve_waiting(subject_filter)
                subject_filter.arrived.clear()
        if self._waiting_pulls.overdue:
            self._serve_overdue()

    def unfinished(self) -> bool:
        """True when a pull stopped looking at a bound and goes on in the next turn."""
        return any(subject_filter.waiting for subject_filter in self.arrivals.ready.values())

    def _serve_waiting(self, subject_filter: SubjectFilter) -> None:
        """Serve who waits for it, longest first, as long as it has something."""
        ready: int | None = None  # so many were not enough for one who waits for nothing else
        for waiting in _longest_first(subject_filter.waiting):
            quarantined = len(waiting.subscription.filters) == 1
            if quarantined and ready is not None and ready < self._serving.need(waiting.pull):
                continue
            found = self._serving.serve(waiting, final=False)
            if found == BLOCKED:
                continue
            if found == 0 or not self._has_more(subject_filter):
                return
            if quarantined and found is not None:
                ready = found

    def _has_more(self, subject_filter: SubjectFilter) -> bool:
        ledger = subject_filter.group.ledger
        if ledger is not None and (ledger.retries.is_due or ledger.retries.is_quarantined_due):
            return True
        return subject_filter.has_more(self._store)

    def tick(self, now_us: int) -> None:
        """Answer the waiting pulls whose time is up."""
        for waiting in self._waiting_pulls.due(now_us):
            self._serve_last(waiting)

    def next_deadline_us(self) -> int | None:
        """When tick has something to do, as far as known."""
        return self._waiting_pulls.next_deadline_us()


def _longest_first(waiting: OrderedDict[int, Waiting]) -> Iterator[Waiting]:
    """All of them; each that is answered leaves, so that the many behind it cost nothing."""
    while waiting:
        first = next(iter(waiting.values()))
        yield first
        if not first.done:
            yield from list(waiting.values())[1:]
            return
