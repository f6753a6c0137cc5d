"""The pull path: subscriptions, pulls, parked pulls and who is woken by an arrival."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from qmq.broker.arrivals import Arrivals
from qmq.broker.carrying import Carrier
from qmq.broker.choosing import Choosing
from qmq.broker.commands import (
    Ack,
    Acked,
    Buffer,
    Effect,
    HandBack,
    HandedBack,
    Messages,
    Pull,
    ReadDone,
    Refused,
    Subscribe,
    Withdraw,
)
from qmq.broker.groups import Following, Subscription, Waiting
from qmq.broker.handing import Handing
from qmq.broker.ledger import Ledger
from qmq.broker.limits import BrokerLimits
from qmq.broker.members import Offer, What
from qmq.broker.modes import MOST_ONCE
from qmq.broker.most_once import MostOnce, Reserve
from qmq.broker.reads import Postponed, Reads
from qmq.broker.selection import Selection
from qmq.broker.sieve import Sifted
from qmq.broker.subscriptions import Subscriptions, hidden_since
from qmq.errors import InvalidOption, Overloaded, QmqError, StorageError
from qmq.storage.store import NotAtHand, Store

#: A consumer may be given nothing now, whatever is ready.
BLOCKED: Final = -1
#: What a consumer was to have again is gone: there may be something else for it.
_PASSED: Final = -2
#: So often a pull passes over what is gone, within one turn.
_MOST_PASSED: Final = 16
#: What an answer that waits for the disk may have.
_WAITED_BYTES: Final = 256 << 10


class Delivery:
    """Hands out messages. Everything it has to say goes to *effects*."""

    def __init__(
        self, store: Store, limits: BrokerLimits, effects: list[Effect], visible: Callable[[int], int]
    ) -> None:
        """*visible* tells up to which position a partition's messages may be pulled."""
        self._store = store
        self._limits = limits
        self._effects = effects
        self.damaged: list[QmqError] = []  # what could not be read of late; the wiring logs and empties it
        self._parked: dict[int, dict[int, Waiting]] = {}  # by connection, by pull request; none of them empty
        self._parked_count = 0
        self._deadlines: list[tuple[int, int, Waiting]] = []
        self._overdue: list[Waiting] = []  # parked pulls whose time is up, and which wait for a read
        self._reads = Reads(effects)
        self._visible = visible
        self.arrivals = Arrivals(store)
        self.most_once = MostOnce(store)
        self.handing = Handing(store, limits.lapse_ms * 1_000, self._wake, visible)
        self._choosing = Choosing(store, limits, self.handing)
        self.subscriptions = Subscriptions(store, limits, effects, self.arrivals, self.handing)

    def _wake(self, ledger: Ledger) -> None:
        """Something of a group has come back."""
        group = self.subscriptions.by_ledger.get(ledger.number)
        if group is not None:
            self.arrivals.make_ready(following for following in group.followings.values() if following.waiting)

    # --- subscriptions -----------------------------------------------------------------------------------------------

    def subscribe(self, command: Subscribe, postponed: Postponed | None = None) -> None:
        """Join a group (made now, if it is new) or follow alone; when its start has been read, if it must be."""
        try:
            self.subscriptions.join(command)
        except NotAtHand as missing:
            if not self._reads.begin(missing.read, postponed or Postponed(command)):
                with self._waiting():
                    self.subscriptions.join(command)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Read what is not in memory at once, while everybody waits."""
        self._store.may_wait(True)
        try:
            yield
        finally:
            self._store.may_wait(False)

    def unsubscribe(self, connection: int, number: int) -> None:
        """Leave; parked pulls of it are answered with nothing."""
        subscription = self.subscriptions.known(connection, number)
        for waiting in list(self._parked.get(connection, {}).values()):
            if waiting.subscription is subscription:
                self._answer_empty(waiting)
        self.handing.leave(subscription)
        self.subscriptions.leave(subscription)

    def disconnected(self, connection: int) -> None:
        """A connection is gone: so are its pulls and subscriptions."""
        for waiting in list(self._parked.get(connection, {}).values()):
            self._unpark(waiting)
        self.subscriptions.disconnected(connection)
        self._reads.disconnected(connection)

    # --- pulls -------------------------------------------------------------------------------------------------------

    def pull(self, pull: Pull, now_us: int) -> None:
        """Answer a pull at once, or park it."""
        subscription = self.subscriptions.get(pull.connection, pull.subscription)
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
        if pull.timeout_ms:
            heapq.heappush(self._deadlines, (waiting.deadline_us, id(waiting), waiting))
        else:
            self._overdue.append(waiting)

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
            self._refuse(waiting, error)

    def parked(self) -> int:
        """Pulls that wait."""
        return self._parked_count

    def _need(self, pull: Pull) -> int:
        """How many messages a pull waits for."""
        return min(max(pull.min_count, 1), self._limits.max_pull_count)

    def _serve(self, waiting: Waiting, final: bool) -> int | None:
        """Answer the pull when enough is ready (``final``: with whatever is ready, once nothing is to be read for it).
        None when it was answered, else how many messages were ready.
        """
        for _ in range(_MOST_PASSED):
            found = self._try(waiting, final)
            if found != _PASSED:
                return found
        self.arrivals.make_ready(waiting.subscription.followings)  # much to pass over: go on later
        return 0

    def _try(self, waiting: Waiting, final: bool) -> int | None:
        pull, followings = waiting.pull, waiting.subscription.followings
        try:
            offer = self.handing.offer(waiting.subscription, pull)
        except QmqError as error:
            self._refuse(waiting, error)
            return None
        if offer is not None:
            if offer.what is not What.FRESH:
                return self._serve_again(waiting, offer, final)
            most, size = min(pull.max_count, offer.max_count), min(pull.max_bytes, offer.max_bytes)
            pull = pull._replace(max_count=most, max_bytes=size)
        need = 1 if final else min(self._need(pull), pull.max_count)
        max_bytes = min(pull.max_bytes, self._limits.max_pull_bytes)
        selection, sifted = self._choosing.choose(waiting, pull.max_count, need, max_bytes)
        if self._is_ahead(waiting, selection):
            return self._reserve(waiting, selection)
        wanted = selection.wanted
        in_vain = wanted is not None and not self._reads.begin(wanted, selection.stopped_at)
        if in_vain and selection.count < need:
            selection.take_back()
            return self._serve_with_waits(waiting)
        if selection.count >= need:
            return self._answer(waiting, selection, sifted, final)
        if selection.failed is not None:
            selection.take_back()
            self._refuse(waiting, selection.failed)
            return None
        if offer is not None and not selection.count and self.handing.is_due(waiting.subscription):
            return self._serve_again(waiting, offer._replace(what=What.AGAIN), final)
        bound = selection.full and wanted is None
        if bound and not selection.count:
            self.arrivals.make_ready(followings)  # much to pass over: go on later
        reading = any(following.reading for following in followings)
        if not reading and (final or (bound and selection.count)):
            return self._answer(waiting, selection, sifted, final)
        if selection.count:
            selection.take_back()  # else all that was passed is for others, and need not be looked at again
        return selection.count

    def _is_ahead(self, waiting: Waiting, selection: Selection) -> bool:
        """What was chosen may not be handed out before a block is on disk that has it."""
        is_most_once = waiting.subscription.group.mode == MOST_ONCE
        return is_most_once and selection.count > 0 and not self.most_once.covers(selection)

    def _reserve(self, waiting: Waiting, selection: Selection) -> int | None:
        """Have the block brought to disk; the pull waits for it."""
        visible = [self._visible(partition) for partition in range(self._store.partitions)]
        try:
            reserve = self.most_once.reserve(waiting.subscription.group, selection, visible)
        except StorageError as error:
            self._refuse(waiting, error)
            return None
        self._reads.begin(reserve, selection.stopped_at)
        return 0

    def _serve_again(self, waiting: Waiting, offer: Offer, final: bool) -> int | None:
        """Answer a pull of a group's consumer with what has been handed out before, if it may have something."""
        pull, subscription = waiting.pull, waiting.subscription
        redelivery, now_us = self.handing.redelivery, self.handing.now.wall_us
        if offer.what is What.NOTHING:
            if not final:
                return BLOCKED
            self._answer_empty(waiting)
            return None
        try:
            answer = redelivery.give_again(subscription, offer, pull, now_us)
        except NotAtHand as missing:
            if self._reads.begin(missing.read, subscription.followings[0]):
                return 0
            with self._waiting():
                answer = redelivery.give_again(subscription, offer, pull, now_us)
        if answer is None or not answer.ranges:
            return _PASSED
        self._unpark(waiting)
        self.handing.gave_again(subscription)
        said = answer.buffers, answer.size, answer.messages, None, tuple(answer.ranges), _tags_of(subscription)
        self._effects.append(Messages(pull.connection, pull.request, *said))
        return None

    def _serve_with_waits(self, waiting: Waiting) -> int | None:
        """Answer a pull for which the same was read twice and is not in memory again: a little, with waits."""
        with self._waiting():
            most = waiting.pull.max_count
            selection, sifted = self._choosing.choose(waiting, most, 1, _WAITED_BYTES, undo=True)
            if self._is_ahead(waiting, selection):
                return self._reserve(waiting, selection)
            carrier = Carrier(self._store, self.damaged)
            buffers = carrier.carry(selection.parts if sifted is None else sifted.parts)
            failed = carrier.failed or selection.failed
            if failed is None or (buffers and carrier.failed is None):
                return self._say(waiting, selection, sifted, carrier, buffers, False)
            selection.take_back()
            self._refuse(waiting, failed)
            return None

    def _answer(self, waiting: Waiting, selection: Selection, sifted: Sifted | None, final: bool) -> int | None:
        """Answer with what was chosen; 0 when nothing of it could be read, and what comes after it is waited for."""
        carrier = Carrier(self._store, self.damaged)
        buffers = carrier.carry(selection.parts if sifted is None else sifted.parts)
        return self._say(waiting, selection, sifted, carrier, buffers, final)

    def _say(
        self,
        waiting: Waiting,
        selection: Selection,
        sifted: Sifted | None,
        carrier: Carrier,
        buffers: list[Buffer],
        final: bool,
    ) -> int | None:
        pull, subscription = waiting.pull, waiting.subscription
        size = sum(map(len, buffers))
        ranges: tuple[tuple[int, int, int], ...] = ()
        if selection.count and sifted is not None:
            self._choosing.passed(subscription, sifted)
        if subscription.member is not None and selection.count:
            given = sifted or Sifted(selection.parts, selection.count, [], 0, selection.count)
            buffers, size, ranges = self._given(subscription, given, carrier, buffers, size)
        if selection.count and not buffers and not final:
            self.arrivals.make_ready(subscription.followings)
            return 0
        self._unpark(waiting)
        if selection.count:
            # The next pull begins with the next following, so that each is the first of one of as many answers.
            subscription.turn = (subscription.turn + 1) % len(subscription.followings)
            for following in subscription.followings:
                following.reads.clear()
        left_us = self._left_us(subscription)
        said = buffers, size, selection.count, left_us, ranges, _tags_of(subscription)
        self._effects.append(Messages(pull.connection, pull.request, *said))
        return None

    def _given(
        self, subscription: Subscription, sifted: Sifted, carrier: Carrier, buffers: list[Buffer], size: int
    ) -> tuple[list[Buffer], int, tuple[tuple[int, int, int], ...]]:
        """Note who has it, and which pull sequences that is; without what has expired or could not be read."""
        start, end = self._choosing.give(subscription, sifted, size)
        if not carrier.left_out and not sifted.expired:
            return buffers, size, ((start, end - start, 1),)
        with self._waiting():
            answer = self.handing.redelivery.carry(
                subscription, start, end, end - start, self._limits.max_pull_bytes, self.handing.now.wall_us
            )
        return answer.buffers, answer.size, tuple(answer.ranges)

    # --- verdicts ----------------------------------------------------------------------------------------------------

    def ack(self, command: Ack) -> Acked:
        """These are handled."""
        subscription = self.subscriptions.get(command.connection, command.subscription)
        refused = self.handing.ack(subscription, command.intervals)
        self._wake_own(subscription)
        return Acked(command.connection, command.request, refused)

    def hand_back(self, command: HandBack) -> HandedBack:
        """These come back."""
        subscription = self.subscriptions.get(command.connection, command.subscription)
        self.handing.hand_back(subscription, command)
        self._wake_own(subscription)
        return HandedBack(command.connection, command.request)

    def _wake_own(self, subscription: Subscription) -> None:
        """It has room for more: its own parked pull may go on."""
        if subscription.connection in self._parked:
            self.arrivals.make_ready(subscription.followings)

    # --- reads -------------------------------------------------------------------------------------------------------

    def read_done(self, done: ReadDone) -> None:
        """What was asked for is in memory; whoever waits for it is served at the end of the turn."""
        waiter, read = self._reads.end(done.number, failed=done.error is not None)
        if isinstance(read, Reserve):
            self.most_once.reserved(read, done.error)
        else:
            self.damaged += self._store.finish_read(read)
        if isinstance(waiter, Postponed):
            self._subscribe_again(waiter, done.error)
        elif waiter is not None and done.error is None:
            self.arrivals.make_ready([waiter])
        elif waiter is not None and done.error is not None:
            for waiting in list(waiter.waiting.values()):
                self._refuse(waiting, done.error)

    def _subscribe_again(self, postponed: Postponed, error: QmqError | None) -> None:
        command = postponed.command
        try:
            if error is not None:
                raise error
            self.subscribe(command, postponed)
        except QmqError as refused:
            self._effects.append(Refused(command.connection, command.request, refused))

    def refuse_pulls(self, subscription: Subscription, error: QmqError) -> None:
        """Answer every parked pull of a subscription with an error."""
        for waiting in list(self._parked.get(subscription.connection, {}).values()):
            if waiting.subscription is subscription:
                self._refuse(waiting, error)

    def _refuse(self, waiting: Waiting, error: QmqError) -> None:
        self._unpark(waiting)
        self._effects.append(Refused(waiting.pull.connection, waiting.pull.request, error))

    def _serve_overdue(self) -> None:
        """Answer those whose time is up, as far as no read keeps them."""
        overdue, self._overdue = self._overdue, []
        for waiting in overdue:
            if not waiting.done and self._serve(waiting, final=True) is not None:
                self._overdue.append(waiting)

    def _left_us(self, subscription: Subscription) -> int | None:
        """Nothing stored before that time is still to come; None where order of time is what it comes in anyway."""
        if subscription.group.name is not None or self._store.partitions == 1:
            return None
        ahead = [
            self._stored_at(following, partition, row)
            for following in subscription.followings
            if not following.exact
            for partition, row in enumerate(following.scan)
            if row < self._store.visible_row(partition)
        ]
        return min([*ahead, *hidden_since(self._store)], default=None)

    def _stored_at(self, following: Following, partition: int, row: int) -> int:
        """When a row was stored; a time before it for one that would have to be read."""
        for known in (row, row - 1):
            with suppress(NotAtHand, StorageError):
                return self._store.read_entry(partition, known)[2]
        return following.start.value if following.start.kind == "time" else 0

    # --- arrivals and time -------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Look at what became visible since the last turn, and serve the parked pulls that it is for."""
        self.arrivals.look(bool(self._parked))
        if self.arrivals.ready:
            ready, self.arrivals.ready = self.arrivals.ready, {}
            for following in ready.values():
                self._serve_waiting(following)
                following.arrived.clear()
        if self._overdue:
            self._serve_overdue()

    def unfinished(self) -> bool:
        """True when a pull stopped looking at a bound and goes on in the next turn."""
        return any(following.waiting for following in self.arrivals.ready.values())

    def _serve_waiting(self, following: Following) -> None:
        """Serve who waits for it, longest first, as long as it has something."""
        ready: int | None = None  # so many were not enough for one who waits for nothing else
        for waiting in _longest_first(following.waiting):
            alone = len(waiting.subscription.followings) == 1
            if alone and ready is not None and ready < self._need(waiting.pull):
                continue
            found = self._serve(waiting, final=False)
            if found == BLOCKED:
                continue
            if found == 0 or not self._has_more(following):
                return
            if alone and found is not None:
                ready = found

    def _has_more(self, following: Following) -> bool:
        store, ledger = self._store, following.group.ledger
        if ledger is not None and (ledger.retries.is_due or ledger.retries.is_due_alone):
            return True
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
            if not waiting.done and self._serve(waiting, final=True) is not None:
                self._overdue.append(waiting)

    def next_deadline_us(self) -> int | None:
        """When tick has something to do, as far as known."""
        return self._deadlines[0][0] if self._deadlines else None


def _tags_of(subscription: Subscription) -> tuple[str, ...]:
    ledger = subscription.group.ledger
    return () if ledger is None else ledger.settings.tags


def _longest_first(waiting: OrderedDict[int, Waiting]) -> Iterator[Waiting]:
    """All of them; each that is answered leaves, so that the many behind it cost nothing."""
    while waiting:
        first = next(iter(waiting.values()))
        yield first
        if not first.done:
            yield from list(waiting.values())[1:]
            return
