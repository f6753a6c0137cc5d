"""Take over messages of another broker that is gone, which a consumer hands over, into the log of its group.

The message is stored as any other, under a subject of that group alone, and synced. Then the group's error log or dead
letters name it, and that record is synced too before the answer, because the consumer tells its old broker afterwards
that the message is handled. A crash between the two leaves a stored message that no record names; the consumer hands it
over again. Producer id and sequence of its batch identify a handover: the group remembers them, also over a restart, so
that a repeated one makes no second message.
"""

from __future__ import annotations

from collections.abc import Mapping

from qmq.broker.delivery.pull import Delivery
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.message_ranges import ranges_of_batch
from qmq.broker.ports.commands import HandOver, Now, Send
from qmq.broker.ports.effects import Effect, HandedOver, Refused, Sent
from qmq.broker.ports.rights import Need, Rights
from qmq.broker.publish.publish import Intake
from qmq.errors import BadBatch, InvalidOption, UnknownGroup
from qmq.format.batch import ANY_MESSAGE_BYTES, BatchLimits, check_batch, runs_of
from qmq.format.copies.due import DUE_PRODUCER
from qmq.format.layout import HANDED_FLAGS, MAX_DELAY_SHOWN, MAX_DELAY_US, RUN_REPLAYED
from qmq.format.private import check_private, origin_subject
from qmq.names import check_group_or_member
from qmq.net.protocol.types import AT_MOST_ONCE, Disposition
from qmq.storage.store import Store


class Handovers:
    """Takes handovers in beside the intake, and answers them when they are stored and named."""

    def __init__(
        self, store: Store, delivery: Delivery, intake: Intake, effects: list[Effect], rights: Mapping[int, Rights]
    ) -> None:
        """*rights* are those of the connections that have a token."""
        self._store = store
        self._rights = rights
        self._delivery = delivery
        self._intake = intake
        self._effects = effects
        self._waiting: dict[tuple[int, int], tuple[HandOver, bytes]] = {}  # by connection and request
        self._stored: list[tuple[HandOver, bytes, Sent]] = []  # stored, but not visible yet

    def take(self, command: HandOver, now: Now) -> None:
        """Check and stage one handover. Raises UnknownGroup, InvalidOption, and the errors of a send."""
        ledger = self._ledger(command)
        if command.disposition not in (Disposition.NACK, Disposition.REJECT):
            raise InvalidOption("only a nacked or rejected message can be handed over")
        if not 1 <= command.attempt < 1 << 31 or (command.delay_us is not None and command.delay_us > MAX_DELAY_US):
            raise InvalidOption(f"attempts are counted from 1, and the delay of a retry is at most {MAX_DELAY_SHOWN}")
        batch = check_batch(command.batch, BatchLimits(ANY_MESSAGE_BYTES, HANDED_FLAGS, RUN_REPLAYED))
        if batch.header.messages != 1:
            raise BadBatch(f"a handover has one message, not {batch.header.messages}")
        if batch.header.producer_id == DUE_PRODUCER:
            raise BadBatch("that producer id is a broker's own: it marks delivered delayed messages")
        rights = self._rights.get(command.connection)
        for name in batch.names:
            subject = origin_subject(check_private(name, command.group))
            if rights is not None:
                rights.require(rights.may_consume(subject), Need.CONSUME, subject)
        key = batch.header.producer_id + batch.header.producer_sequence.to_bytes(8, "little")
        if key in ledger.handed:
            self._delivery.durable.answer(HandedOver(command.connection, command.request))
            return
        number = self._intake.numbering.of_private(batch.names, runs_of(command.batch, batch.header))
        self._waiting[command.connection, command.request] = command, key
        try:
            self._intake.send(
                Send(command.connection, command.request, command.batch, True, copy=True, numbers=number), now
            )
        except BaseException:
            del self._waiting[command.connection, command.request]
            raise

    def disconnected(self, connection: int) -> None:
        """Forget the handovers of a connection that is gone; messages that are not named yet come again."""
        for key in [key for key in self._waiting if key[0] == connection]:
            del self._waiting[key]

    def turn(self, now: Now) -> None:
        """Name the handed-over messages that are stored and visible by now."""
        if self._waiting:
            self._effects[:] = [effect for effect in self._effects if not self._is_mine(effect)]
        if self._stored:
            stored, self._stored = self._stored, []
            for command, key, sent in stored:
                if self._intake.visible(sent.partition) > sent.position:
                    self._name(command, key, sent, now)
                else:
                    self._stored.append((command, key, sent))

    def _is_mine(self, effect: Effect) -> bool:
        if isinstance(effect, Refused):
            self._waiting.pop((effect.connection, effect.request), None)
        if not isinstance(effect, Sent):
            return False
        found = self._waiting.pop((effect.connection, effect.request), None)
        if found is not None:
            self._stored.append((*found, effect))
        return found is not None

    def _name(self, command: HandOver, key: bytes, sent: Sent, now: Now) -> None:
        try:
            ledger = self._ledger(command)
        except UnknownGroup as error:  # the group was deleted meanwhile
            self._effects.append(Refused(command.connection, command.request, error))
            return
        if key not in ledger.handed:
            # By position: after a restart, a subject that is newer than the checkpoint may have another number.
            (messages,) = ranges_of_batch(self._store, sent.partition, sent.position, 1)
            ledger.take_over(
                messages,
                command.attempt,
                Disposition(command.disposition),
                command.reason,
                command.delay_us,
                now.wall_us,
                key,
            )
            self._delivery.tracker.members.look(ledger)
        self._delivery.durable.answer(HandedOver(command.connection, command.request))

    def _ledger(self, command: HandOver) -> Ledger:
        group = self._delivery.subscriptions.groups.get(check_group_or_member(command.group))
        if group is None or group.ledger is None:
            raise UnknownGroup(f"this broker has no group {command.group!r}")
        if group.mode == AT_MOST_ONCE:
            raise InvalidOption(f"group {command.group!r} is {AT_MOST_ONCE}: it takes no message again")
        return group.ledger
