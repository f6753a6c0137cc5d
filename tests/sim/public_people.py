"""The programs of one history: senders and consumers that use the public clients in all ways, as their chance says."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Final

import qmq
from tests.net.stepping import CancelledAt
from tests.sim.public_record import (
    ACKING,
    BACK,
    FAILING,
    OPEN,
    REJECTING,
    GroupRecord,
    Hand,
    Record,
    Sent,
    Session,
)

SENDING: Final = ("send", "send_many", "send_nowait", "several at once")
SYNC_SENDING: Final = ("sync send", "sync send_many", "sync send_nowait")
WAYS: Final = ("for", "run", "run 4", "pull", "pull 2", "pull_batch")
SYNC_WAYS: Final = ("sync for", "sync run", "sync run 3", "sync pull", "sync pull_batch")
#: How a session ends.
ENDS: Final = ("leave", "leave", "stop", "error", "cancel", "lose")
#: What a program does with a message.
DECISIONS: Final = (
    *["ack"] * 6, *["ack awaited"] * 2, *["with"] * 3, "error", "retry", "not yet", "timeout", "nack", "reject",
    "release", "release later", "keep",
)  # fmt: skip
#: What a group that has no acks may do.
PLAIN: Final = ("ack", "with")
_SHORT: Final = 0.003


class Broken(Exception):
    """What a handler raises."""


# --- senders ---------------------------------------------------------------------------------------------------------


class Sender:
    """Sends messages by one client, in ways that its chance chooses."""

    def __init__(self, record: Record, messages: Sequence[Sent], chance: Random) -> None:
        self._record = record
        self._messages = list(messages)
        self._chance = chance
        self._nowait: dict[int, Sent] = {}
        self._has_several_brokers = False

    async def run(self, url: str, options: dict[str, Any]) -> None:
        """Send all by an asyncio client."""
        self._has_several_brokers = "," in url
        async with qmq.connect(url, wait=30, **options) as client:
            while self._messages:
                way = self._chance.choice(SENDING)
                self._record.count[way] += 1
                match way:
                    case "send":
                        for sent in self._next(1):
                            await self._one(client, sent)
                    case "several at once":
                        await asyncio.gather(*(self._one(client, sent) for sent in self._next(4)))
                    case "send_many":
                        await self._many(client, self._alike())
                    case "send_nowait":
                        for sent in self._next(3):
                            client.send_nowait(*arguments(sent)[0], **arguments(sent)[1])
                            self._note_nowait(sent)
                            await client.drain()
            try:
                await client.flush()
            except qmq.SendFailed as error:
                self._failed(list(self._nowait.values()), error)
            else:
                for sent in self._nowait.values():
                    self._record.stored(sent)

    async def _one(self, client: qmq.Client, sent: Sent) -> None:
        positional, named = arguments(sent)
        try:
            receipt = await client.send(*positional, **named)
        except qmq.SendFailed as error:
            self._failed([sent], error)
            return
        self._record.stored(sent, receipt)
        if sent.delay is not None and self._chance.random() < 0.4:
            self._record.note(f"cancel {sent}")
            is_cancelled = await client.cancel(receipt.id)
            self._record.note(f"cancel {sent}: {is_cancelled}")
            if is_cancelled:
                sent.state = "cancelled"
                self._record.count["cancelled"] += 1

    async def _many(self, client: qmq.Client, messages: list[Sent]) -> None:
        positional, named = several_arguments(messages)
        try:
            receipts = await client.send_many(*positional, **named)
        except qmq.SendFailed as error:
            self._failed(messages, error)
            return
        for sent, receipt in zip(messages, receipts, strict=True):
            self._record.stored(sent, receipt)

    def run_sync(self, url: str, options: dict[str, Any]) -> None:
        """[thread] Send all by a client without asyncio."""
        self._has_several_brokers = "," in url
        with qmq.connect_sync(url, wait=30, **options) as client:
            while self._messages:
                way = self._chance.choice(SYNC_SENDING)
                self._record.count[way] += 1
                match way:
                    case "sync send":
                        for sent in self._next(1):
                            positional, named = arguments(sent)
                            try:
                                self._record.stored(sent, client.send(*positional, **named))
                            except qmq.SendFailed as error:
                                self._failed([sent], error)
                    case "sync send_many":
                        messages = self._alike()
                        positional, named = several_arguments(messages)
                        try:
                            receipts = client.send_many(*positional, **named)
                        except qmq.SendFailed as error:
                            self._failed(messages, error)
                            continue
                        for sent, receipt in zip(messages, receipts, strict=True):
                            self._record.stored(sent, receipt)
                    case "sync send_nowait":
                        for sent in self._next(3):
                            client.send_nowait(*arguments(sent)[0], **arguments(sent)[1])
                            self._note_nowait(sent)
                            client.drain()
            try:
                client.flush()
            except qmq.SendFailed as error:
                self._failed(list(self._nowait.values()), error)
            else:
                for sent in self._nowait.values():
                    self._record.stored(sent)

    def _note_nowait(self, sent: Sent) -> None:
        """Note a message without a receipt, so nobody says whether two brokers have stored it."""
        self._nowait[sent.number] = sent
        sent.may_be_twice = self._has_several_brokers

    def _next(self, most: int) -> list[Sent]:
        """Take the next messages, and note that they are sent now."""
        count = self._chance.randint(1, most)
        taken, self._messages = self._messages[:count], self._messages[count:]
        for sent in taken:
            self._record.begin(sent)
            self._count(sent)
        return taken + self._again()

    def _again(self, like: Sent | None = None) -> list[Sent]:
        """Return some messages that somebody has begun to send, to be sent again by their unique texts."""
        if self._chance.random() < 0.6:
            return []
        known = [sent for sent in list(self._record.sent.values()) if sent.unique is not None]
        known = [sent for sent in known if like is None or _alike(like, sent)]
        return self._chance.choices(known, k=self._chance.randint(1, 3)) if known else []

    def _alike(self) -> list[Sent]:
        """Take the next messages as far as one ``send_many`` can send them."""
        first, count = self._messages[0], 1
        most = self._chance.randint(1, 6)
        while count < min(most, len(self._messages)) and _alike(first, self._messages[count]):
            count += 1
        taken, self._messages = self._messages[:count], self._messages[count:]
        for sent in taken:
            self._record.begin(sent)
            self._count(sent)
        return taken + (self._again(first) if first.unique is not None else [])

    def _count(self, sent: Sent) -> None:
        count = self._record.count
        count["sent"] += 1
        count["with a key"] += sent.key is not None
        count["with tags"] += bool(sent.tags)
        count["with an order key"] += sent.order_key is not None
        count["with a priority"] += sent.priority != "normal"
        count["with a unique text"] += sent.unique is not None
        count["with a delay"] += sent.delay is not None
        count["with expires_in"] += sent.expires
        count["empty body"] += not sent.body
        count["JSON body"] += sent.body.startswith(b"{")
        count["large body"] += len(sent.body) > 1_000

    def _failed(self, messages: list[Sent], error: qmq.SendFailed) -> None:
        for sent in messages:
            if sent.unique is None or sent.state == "open":
                sent.state = "unknown"
        self._record.count["sends failed"] += len(messages)


def _alike(one: Sent, other: Sent) -> bool:
    if one.properties != other.properties:
        return False
    return (one.subject, one.tags, one.priority, one.expires, one.delay, one.order_key is None, one.unique is None) == (
        other.subject, other.tags, other.priority, other.expires, other.delay, other.order_key is None,
        other.unique is None,
    )  # fmt: skip


def _options(sent: Sent) -> dict[str, Any]:
    named: dict[str, Any] = {
        "tags": list(sent.tags) or None, "properties": sent.properties or None, "unique": sent.unique
    }  # fmt: skip
    if sent.priority != "normal":
        named["priority"] = sent.priority
    if sent.expires:
        named["expires_in"] = EXPIRES_IN[sent.number % len(EXPIRES_IN)]
    if sent.delay is not None:
        named["delay"] = sent.delay
    return named


#: In how many seconds a message expires.
EXPIRES_IN: Final = (0.001, 0.02, 3_600)


def arguments(sent: Sent) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``send``."""
    named = _options(sent)
    if sent.more_keys:
        named["keys"] = [sent.key, *sent.more_keys]
    else:
        named["key"] = sent.key
    if sent.body.startswith(b"{"):
        return (sent.subject,), {**named, "json": {"n": sent.number}, "order_key": sent.order_key}
    return (sent.subject, sent.body), {**named, "order_key": sent.order_key}


def several_arguments(messages: list[Sent]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``send_many``."""
    named = _options(messages[0])
    if any(sent.key is not None for sent in messages):  # each has a key, several, or none
        named["keys"] = [[sent.key, *sent.more_keys] if sent.more_keys else sent.key for sent in messages]
    if messages[0].order_key is not None:
        named["order_keys"] = [sent.order_key for sent in messages]
    if messages[0].unique is not None:
        named["unique"] = [sent.unique for sent in messages]
    return (messages[0].subject, [sent.body for sent in messages]), named


# --- consumers -------------------------------------------------------------------------------------------------------


class Crew:
    """The consumers of a history that run now, and how they are stopped."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.is_over = threading.Event()
        self._open: dict[Any, None] = {}  # in an order that a seed repeats
        #: Functions that cut the connections of a program, by its name.
        self.cuts: dict[str, Callable[[], object]] = {}
        self._lock = threading.Lock()

    def enter(self, consumer: Any) -> None:
        with self._lock:
            self._open[consumer] = None
        if self.is_over.is_set():
            consumer.stop()

    def leave(self, consumer: Any) -> None:
        with self._lock:
            self._open.pop(consumer, None)

    def stop(self) -> None:
        """[loop] Stop all consumers."""
        self.is_over.set()
        with self._lock:
            several = list(self._open)
        for consumer in several:
            consumer.stop()


class Worker:
    """A program that consumes messages of a group in one session after another."""

    def __init__(
        self,
        crew: Crew,
        name: str,
        prefixes: tuple[str, ...],
        options: dict[str, Any],
        group_of: Callable[[str, int], GroupRecord],
        chance: Random,
        *,
        is_sync: bool,
        is_calm: bool = False,
        keeps_connections: bool = False,
        decisions: Sequence[str] = DECISIONS,
    ) -> None:
        """*options* are those of ``subscribe``. *group_of* gives the record by the consumer's id
        and a tick before it subscribed. A calm one acks all."""
        self._decisions = decisions
        self._ends = tuple(end for end in ENDS if end != "lose" or not keeps_connections)
        self._crew = crew
        self._record = crew.record
        self.name = name
        self._prefixes = prefixes
        self._options = options
        self._group_of = group_of
        self._chance = chance
        self._is_sync = is_sync
        self._is_calm = is_calm
        self._acking: list[Hand] = []
        #: The last one, and how it takes messages.
        self.session: Session | None = None
        self.way = ""
        self._is_shared = str(options.get("consumer")).endswith("-shared")
        self._has_acks = options.get("mode", "reliable") != "at_most_once" and options.get("group") is not None

    # --- asyncio -----------------------------------------------------------------------------------------------------

    async def run(self, url: str, options: dict[str, Any]) -> None:
        """Consume until the crew is stopped."""
        if self._is_sync:
            await asyncio.to_thread(self._run_sync, url, options)
            return
        async with qmq.connect(url, wait=30, **options) as client:
            self._crew.cuts[self.name] = lambda: self.lose(client)
            while not self._crew.is_over.is_set():
                await self._session(client)
            await client.admin.groups()  # it is connected, so the broker has heard that it left

    async def _session(self, client: qmq.Client) -> None:
        way, end, budget = self._draw(WAYS)
        session = self._one_session(client, way, end, budget)
        task = asyncio.ensure_future(
            _awaited(CancelledAt(session, self._chance.randint(1, 25)) if end == "cancel" else session)
        )
        await asyncio.wait({task})
        if task.cancelled():
            self._record.count["session cancelled"] += 1
        elif (error := task.exception()) is not None and not self._is_expected(error):
            raise error

    def _is_expected(self, error: BaseException) -> bool:
        """Return whether a session may end so: by its own error, or where another consumer has taken its id."""
        self._record.count["session fenced"] += isinstance(error, qmq.Fenced)
        if isinstance(error, qmq.InvalidOption) and "does not follow" in str(error):  # somebody has set what it follows
            return True
        if isinstance(error, qmq.UnknownGroup):  # somebody has deleted it, or it only looks and nobody has made it
            self._record.count["group is unknown"] += 1
            return True
        may_be_taken_over = self._is_shared or self._record.has_late_frames  # of a session before that had its id
        return isinstance(error, Broken) or (isinstance(error, qmq.Fenced) and may_be_taken_over)

    def _draw(self, ways: Sequence[str]) -> tuple[str, str, int]:
        way = self.way = self._chance.choice(ways)
        end = "stop" if self._is_calm else self._chance.choice(self._ends)
        self._record.count[way] += 1
        self._record.count[f"end: {end}"] += 1
        budget = 1_000_000 if self._is_calm else self._chance.choice((1, 3, 10, 30))
        self._record.note(f"{self.name} {way} {end} {budget}")
        return way, end, budget

    async def _one_session(self, client: qmq.Client, way: str, end: str, budget: int) -> None:
        before = self._record.first_try(self._options["group"], self._options.get("consumer"))
        async with client.subscribe(*self._prefixes, **self._options) as consumer:
            session = self.session = Session(self._group_of(consumer.id, before), consumer.id)
            self._record.count["group looked at"] += "look" in self._options
            self._crew.enter(consumer)
            try:
                match way:
                    case "for":
                        await self._loop(consumer, session, budget)
                    case "run":
                        await self._handlers(consumer, session, budget, 1)
                    case "run 4":
                        await self._handlers(consumer, session, budget, 4)
                    case "pull":
                        await self._pulls(consumer, session, budget)
                    case "pull 2":
                        await self._pulls_of_two(consumer, session, budget)
                    case "pull_batch":
                        await self._batches(consumer, session, budget)
                if end == "lose":
                    self.lose(client)
                if end == "error":
                    raise Broken("the block")
                if end == "stop":
                    consumer.stop()
                if self._has_acks and self._chance.random() < 0.5:
                    await self._flush(consumer, session)
            except BaseException as error:
                session.leaves(fails=isinstance(error, Exception))
                raise
            else:
                session.leaves(fails=False)
            finally:
                self._crew.leave(consumer)

    def lose(self, client: qmq.Client) -> None:
        """Cut the connections of a client; it does not know why."""
        for link in client._brokers.links:
            if link.connection is not None:
                self._record.count["connection lost"] += 1
                self._record.note(f"{self.name} lost its connection")
                link.connection.abort(qmq.ConnectionLost("cut by a test"))

    async def _flush(self, consumer: qmq.Consumer, session: Session) -> None:
        acking, self._acking = self._acking, []
        try:
            await consumer.flush()
        except qmq.Fenced:
            self._fenced(session, "flush")
        else:
            self._record.count["flush"] += 1
            session.flushed(hand for hand in acking if hand.session is session)

    def _fenced(self, session: Session, call: str) -> None:
        """A disposition was refused: somebody has moved the group, or the broker has given up the consumer."""
        self._record.count["refused"] += 1
        is_taken_back = any(hand.is_taken_back for hand in session.hands)
        group = session.group
        # One whose prefixes its group follows no more cannot come back after its connection was lost.
        if not (group.is_loose or group.is_narrowed or group.mode == "solo" or is_taken_back):
            self._record.wrong(f"group {session.group.name}: {call} of {session.name} was refused")

    async def _loop(self, consumer: qmq.Consumer, session: Session, budget: int) -> None:
        async for message in consumer:
            hand = session.took(message)
            await self._decide(message, hand, session)
            budget -= 1
            if not budget:
                break

    async def _handlers(self, consumer: qmq.Consumer, session: Session, budget: int, concurrency: int) -> None:
        left, in_turn = budget, Counter[Any]()

        async def handle(message: qmq.Message) -> None:
            nonlocal left
            hand = session.took(message)
            slot = hand.sent.slot
            if slot is not None and in_turn[slot]:
                self._record.wrong(f"group {session.group.name}: two handlers have {slot}")
            in_turn[slot] += 1
            try:
                left -= 1
                if left <= 0:
                    consumer.stop()
                await self._decide_in_handler(message, hand, session)
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError):
                    session.decides(hand, FAILING)
                raise
            finally:
                in_turn[slot] -= 1

        await consumer.run(handle, concurrency=concurrency, drain=5)

    async def _pulls(self, consumer: qmq.Consumer, session: Session, budget: int) -> None:
        chance = self._chance
        while budget > 0 and not consumer.stopped:
            count = chance.choice((1, 2, 5, 100))
            messages = await consumer.pull(count, self._least(count), timeout=chance.choice((0, 0.01, 0.03, 30)))
            hands = [session.took(message) for message in messages]
            several = list(zip(messages, hands, strict=True))
            if chance.random() < 0.2:
                chance.shuffle(several)
            for message, hand in several:
                await self._decide(message, hand, session)
            budget -= len(messages) or 1

    async def _pulls_of_two(self, consumer: qmq.Consumer, session: Session, budget: int) -> None:
        """Two tasks pull from one consumer."""
        tasks = [asyncio.ensure_future(self._pulls(consumer, session, budget)) for _ in range(2)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _batches(self, consumer: qmq.Consumer, session: Session, budget: int) -> None:
        chance = self._chance
        while budget > 0 and not consumer.stopped:
            batch = await consumer.pull_batch(
                chance.choice((1, 3, 10, 1_000)), timeout=chance.choice((0, 0.01, 0.03, 30))
            )
            hands = [session.took(message) for message in batch]
            budget -= len(hands) or 1
            if not hands:
                continue
            cut = chance.randint(0, len(hands))
            await self._decide_batch(batch[:cut], hands[:cut], session)
            await self._decide_batch(batch[cut:], hands[cut:], session)

    def _least(self, count: int) -> int:
        return 1 if self._is_calm else self._chance.choice((1, 1, count))

    async def _decide(self, message: qmq.Message, hand: Hand, session: Session) -> None:
        """Do something with a message in a loop of the program."""
        if self._is_taken_back(message, hand, session):
            await self._insist(message, session)
            return
        match decision := self._decision():
            case "with":
                async with message:
                    await self._work()
                    session.decides(hand, ACKING)
                    self._acking.append(hand)
            case "error" | "retry" | "not yet":
                with suppress(Broken, qmq.Retry):
                    async with message:
                        await self._work()
                        raise self._error(decision, hand, session)
                self._ended(hand, session)
            case "timeout":
                with suppress(TimeoutError):
                    async with asyncio.timeout(0):
                        async with message:
                            try:
                                await asyncio.sleep(30)
                            finally:  # others take messages until now
                                session.decides(hand, FAILING)
            case _:
                await self._dispose(decision, message, hand, session)

    def _is_taken_back(self, message: qmq.Message, hand: Hand, session: Session) -> bool:
        """Return whether a message has gone back with an earlier one of its order key, as it must say itself."""
        group = session.group
        if not group.is_loose and message.in_flight != (hand.state == OPEN or not self._has_acks):
            self._record.wrong(f"group {group.name}: {hand.sent}, {hand}, says in_flight {message.in_flight}")
        self._record.count["taken back"] += hand.state != OPEN
        return hand.state != OPEN

    async def _insist(self, message: qmq.Message, session: Session) -> None:
        """Dispose of a message that was taken back: that changes nothing, and an awaited ack says so."""
        match self._chance.choice(("leave", "ack", "ack awaited", "nack", "reject", "release", "with", "error")):
            case "ack":
                message.ack()
            case "ack awaited":
                try:
                    await message.ack()
                except qmq.Fenced:
                    self._record.count["ack of what was taken back"] += 1
                else:
                    self._record.wrong(f"group {session.group.name}: the ack of {message}, taken back, was taken")
            case "nack" | "reject" | "release" as call:
                try:
                    await (message.reject("it was taken back") if call == "reject" else getattr(message, call)())
                except qmq.Fenced:  # the broker has given up the consumer since
                    if call != "release" and not session.group.is_loose:
                        raise
            case "with":
                async with message:
                    pass
            case "error":
                with suppress(Broken):
                    async with message:
                        raise Broken("it was taken back")

    def _insist_sync(self, message: qmq.SyncMessage, session: Session) -> None:
        """Do as ``_insist``."""
        match self._chance.choice(("leave", "ack", "ack awaited", "nack", "reject", "release", "with", "error")):
            case "ack":
                message.ack()
            case "ack awaited":
                try:
                    message.ack(wait=True)
                except qmq.Fenced:
                    self._record.count["ack of what was taken back"] += 1
                else:
                    self._record.wrong(f"group {session.group.name}: the ack of {message}, taken back, was taken")
            case "nack":
                message.nack()
            case "reject":
                message.reject("it was taken back")
            case "release":
                with suppress(qmq.Fenced):  # the broker has given up the consumer since
                    message.release(wait=True)
            case "with":
                with message:
                    pass
            case "error":
                with suppress(Broken), message:
                    raise Broken("it was taken back")

    async def _decide_in_handler(self, message: qmq.Message, hand: Hand, session: Session) -> None:
        decision = self._decision()
        await self._work()
        match decision:
            case "error" | "retry" | "not yet":
                raise self._error(decision, hand, session)
            case "timeout":
                try:
                    async with asyncio.timeout(0):
                        await asyncio.sleep(30)
                finally:
                    session.decides(hand, FAILING)
            case "with" | "keep":
                pass
            case _:
                await self._dispose(decision, message, hand, session)
        if session.decides(hand, ACKING):
            self._acking.append(hand)

    async def _dispose(self, decision: str, message: qmq.Message, hand: Hand, session: Session) -> None:
        chance = self._chance
        try:
            match decision:
                case "ack":
                    if session.decides(hand, ACKING):
                        message.ack()
                        self._acking.append(hand)
                case "ack awaited":
                    if session.decides(hand, ACKING):
                        await message.ack()
                        session.confirmed(hand)
                case "nack":
                    if session.decides(hand, FAILING):
                        await message.nack(chance.choice((None, 0, _SHORT)), "nacked")
                        session.confirmed(hand)
                case "reject":
                    if session.decides(hand, REJECTING):
                        await message.reject("rejected")
                        session.confirmed(hand)
                case "release":
                    if session.decides(hand, BACK):
                        released = message.release()
                        if chance.random() < 0.5:
                            await released
                case "release later":
                    if session.decides(hand, BACK):
                        message.release(after=_SHORT)
                case "keep":
                    pass
        except qmq.Fenced:
            self._fenced(session, decision)

    async def _decide_batch(self, batch: qmq.MessageBatch, hands: list[Hand], session: Session) -> None:
        decision, chance = self._decision(), self._chance
        try:
            match decision:
                case "ack":
                    self._acking += session.decides_all(hands, ACKING)
                    batch.ack()
                case "ack awaited":
                    mine = session.decides_all(hands, ACKING)
                    await batch.ack()
                    session.confirmed(*mine)
                case "with":
                    async with batch:
                        await self._work()
                        self._acking += session.decides_all(hands, ACKING)
                case "error" | "retry" | "not yet":
                    mine = session.decides_all(hands, BACK if decision == "not yet" else FAILING)
                    with suppress(Broken, qmq.Retry):
                        async with batch:
                            raise _error_of(decision)
                    session.confirmed(*mine)
                case "nack":
                    mine = session.decides_all(hands, FAILING)
                    await batch.nack(chance.choice((None, 0, _SHORT)), "nacked")
                    session.confirmed(*mine)
                case "reject":
                    mine = session.decides_all(hands, REJECTING)
                    await batch.reject("rejected")
                    session.confirmed(*mine)
                case "release" | "release later":
                    session.decides_all(hands, BACK)
                    batch.release(after=None if decision == "release" else _SHORT)
                case "keep" | "timeout":
                    pass
        except qmq.Fenced:
            self._fenced(session, f"{decision} of a batch")

    def _decision(self) -> str:
        if self._is_calm:
            decision = self._chance.choice(("ack", "ack awaited", "with")) if self._has_acks else "ack"
        else:
            decision = self._chance.choice(self._decisions if self._has_acks else PLAIN)
        self._record.count[f"decision: {decision}"] += 1
        return decision

    def _error(self, decision: str, hand: Hand, session: Session) -> Exception:
        session.decides(hand, BACK if decision == "not yet" else FAILING)
        return _error_of(decision)

    def _ended(self, hand: Hand, session: Session) -> None:
        """The block of a message has ended by an error, so the broker has its failure."""
        session.confirmed(hand)

    async def _work(self) -> None:
        for _ in range(self._chance.choice((0, 0, 1, 3))):
            await asyncio.sleep(0)

    # --- without asyncio ---------------------------------------------------------------------------------------------

    def _run_sync(self, url: str, options: dict[str, Any]) -> None:
        with qmq.connect_sync(url, wait=30, **options) as client:
            self._crew.cuts[self.name] = lambda: self._lose_sync(client)
            while not self._crew.is_over.is_set():
                way, end, budget = self._draw(SYNC_WAYS)
                try:
                    self._one_sync_session(client, way, end, budget)
                except (Broken, qmq.Fenced, qmq.InvalidOption, qmq.UnknownGroup) as error:
                    if not self._is_expected(error):
                        raise
            client.admin.groups()

    def _one_sync_session(self, client: qmq.SyncClient, way: str, end: str, budget: int) -> None:
        before = self._record.first_try(self._options["group"], self._options.get("consumer"))
        with client.subscribe(*self._prefixes, **self._options) as consumer:
            has_threads = way == "sync run 3"
            session = Session(self._group_of(consumer.id, before), consumer.id, has_threads=has_threads)
            self._crew.enter(consumer)
            try:
                match way:
                    case "sync for":
                        self._sync_loop(consumer, session, budget)
                    case "sync run":
                        self._sync_handlers(consumer, session, budget, 1)
                    case "sync run 3":
                        self._sync_handlers(consumer, session, budget, 3)
                    case "sync pull":
                        self._sync_pulls(consumer, session, budget)
                    case "sync pull_batch":
                        self._sync_batches(consumer, session, budget)
                if end == "lose":
                    self._lose_sync(client)
                if end in ("error", "cancel"):
                    raise Broken("the block")
                if end == "stop":
                    consumer.stop()
                if self._has_acks and self._chance.random() < 0.5:
                    acking, self._acking = self._acking, []
                    try:
                        consumer.flush()
                    except qmq.Fenced:
                        self._fenced(session, "flush")
                    else:
                        session.flushed(hand for hand in acking if hand.session is session)
            except BaseException as error:
                session.leaves(fails=isinstance(error, Exception))
                raise
            else:
                session.leaves(fails=False)
            finally:
                self._crew.leave(consumer)

    def _lose_sync(self, client: qmq.SyncClient) -> None:
        if (thread := client._thread) is not None:
            thread.call_soon(lambda: self.lose(thread.client))

    def _sync_loop(self, consumer: qmq.SyncConsumer, session: Session, budget: int) -> None:
        for message in consumer:
            hand = session.took(message)
            self._decide_sync(message, hand, session)
            budget -= 1
            if not budget:
                break

    def _sync_handlers(self, consumer: qmq.SyncConsumer, session: Session, budget: int, concurrency: int) -> None:
        lock, left, in_turn = threading.Lock(), [budget], Counter[Any]()

        def handle(message: qmq.SyncMessage) -> None:
            hand = session.took(message)
            slot = hand.sent.slot
            with lock:
                if slot is not None and in_turn[slot]:
                    self._record.wrong(f"group {session.group.name}: two handlers have {slot}")
                in_turn[slot] += 1
                left[0] -= 1
                is_last, decision = left[0] <= 0, self._decision()
            try:
                if is_last:
                    consumer.stop()
                if decision in ("error", "retry", "not yet"):
                    raise self._error(decision, hand, session)
                if decision not in ("with", "keep", "timeout"):
                    self._dispose_sync(decision, message, hand, session)
                if session.decides(hand, ACKING):
                    self._acking.append(hand)
            finally:
                with lock:
                    in_turn[slot] -= 1

        consumer.run(handle, concurrency=concurrency, drain=5)

    def _sync_pulls(self, consumer: qmq.SyncConsumer, session: Session, budget: int) -> None:
        chance = self._chance
        while budget > 0 and not consumer.stopped:
            count = chance.choice((1, 2, 5, 100))
            messages = consumer.pull(count, self._least(count), timeout=chance.choice((0, 0.01, 0.03, 30)))
            hands = [session.took(message) for message in messages]
            for message, hand in zip(messages, hands, strict=True):
                self._decide_sync(message, hand, session)
            budget -= len(messages) or 1

    def _sync_batches(self, consumer: qmq.SyncConsumer, session: Session, budget: int) -> None:
        chance = self._chance
        while budget > 0 and not consumer.stopped:
            batch = consumer.pull_batch(chance.choice((1, 3, 10, 1_000)), timeout=chance.choice((0, 0.01, 0.03, 30)))
            hands = [session.took(message) for message in batch]
            budget -= len(hands) or 1
            if hands:
                cut = chance.randint(0, len(hands))
                self._decide_sync_batch(batch[:cut], hands[:cut], session)
                self._decide_sync_batch(batch[cut:], hands[cut:], session)

    def _decide_sync(self, message: qmq.SyncMessage, hand: Hand, session: Session) -> None:
        if self._is_taken_back(message, hand, session):
            self._insist_sync(message, session)
            return
        match decision := self._decision():
            case "with":
                with message:
                    session.decides(hand, ACKING)
                    self._acking.append(hand)
            case "error" | "retry" | "not yet":
                with suppress(Broken, qmq.Retry), message:
                    raise self._error(decision, hand, session)
                self._ended(hand, session)
            case "timeout":
                pass
            case _:
                self._dispose_sync(decision, message, hand, session)

    def _dispose_sync(self, decision: str, message: qmq.SyncMessage, hand: Hand, session: Session) -> None:
        chance = self._chance
        try:
            match decision:
                case "ack":
                    if session.decides(hand, ACKING):
                        message.ack()
                        self._acking.append(hand)
                case "ack awaited":
                    if session.decides(hand, ACKING):
                        message.ack(wait=True)
                        session.confirmed(hand)
                case "nack":
                    if session.decides(hand, FAILING):
                        message.nack(chance.choice((None, 0, _SHORT)), "nacked")
                        session.confirmed(hand)
                case "reject":
                    if session.decides(hand, REJECTING):
                        message.reject("rejected")
                        session.confirmed(hand)
                case "release" | "release later":
                    if session.decides(hand, BACK):
                        message.release(None if decision == "release" else _SHORT, wait=chance.random() < 0.5)
                case "keep":
                    pass
        except qmq.Fenced:
            self._fenced(session, decision)

    def _decide_sync_batch(self, batch: qmq.SyncMessageBatch, hands: list[Hand], session: Session) -> None:
        decision, chance = self._decision(), self._chance
        try:
            match decision:
                case "ack" | "ack awaited":
                    mine = session.decides_all(hands, ACKING)
                    batch.ack(wait=decision == "ack awaited")
                    if decision == "ack awaited":
                        session.confirmed(*mine)
                    else:
                        self._acking += mine
                case "with":
                    with batch:
                        self._acking += session.decides_all(hands, ACKING)
                case "error" | "retry" | "not yet":
                    mine = session.decides_all(hands, BACK if decision == "not yet" else FAILING)
                    with suppress(Broken, qmq.Retry), batch:
                        raise _error_of(decision)
                    session.confirmed(*mine)
                case "nack":
                    mine = session.decides_all(hands, FAILING)
                    batch.nack(chance.choice((None, 0, _SHORT)), "nacked")
                    session.confirmed(*mine)
                case "reject":
                    mine = session.decides_all(hands, REJECTING)
                    batch.reject("rejected")
                    session.confirmed(*mine)
                case "release" | "release later":
                    session.decides_all(hands, BACK)
                    batch.release(None if decision == "release" else _SHORT)
                case "keep" | "timeout":
                    pass
        except qmq.Fenced:
            self._fenced(session, f"{decision} of a batch")


def _error_of(decision: str) -> Exception:
    match decision:
        case "retry":
            return qmq.Retry("retry", after=_SHORT)
        case "not yet":
            return qmq.Retry("not yet", after=_SHORT, counts=False)
    return Broken("broke")


async def _awaited(call: Awaitable[None]) -> None:
    await call
