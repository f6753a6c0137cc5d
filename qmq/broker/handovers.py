"""Messages of another broker that a consumer hands over, because that broker is gone: into its group's own log here.

The message is stored as any other, under a subject of that group alone, and synced; then the group's error log, or its
dead letters, name it, and that is synced too, for its consumer tells its own broker then that it is handled. A crash
between the two leaves a message that nobody was told of, and that is handed over again. Producer id and sequence of its
batch name a hand-over: the group remembers them, also over a start, so that none is twice when it comes twice.
"""

from __future__ import annotations

from typing import Final

from qmq.broker.commands import HandOver, Now, Send
from qmq.broker.delivery import Delivery
from qmq.broker.effects import Effect, HandedOver, ReadWanted, Refused, Sent
from qmq.broker.group_settings import MOST_US
from qmq.broker.held import MessageRange
from qmq.broker.intake import Intake
from qmq.broker.kinds import Verdict
from qmq.broker.ledger import Ledger
from qmq.broker.modes import MOST_ONCE, check_group_name
from qmq.errors import BadBatch, InvalidOption, QmqError, StorageError, UnknownGroup
from qmq.format.batch import BatchLimits, check_batch
from qmq.format.due import DUE_PRODUCER
from qmq.format.layout import HAS_DELIVER_AT, KNOWN_FLAGS
from qmq.format.private import check_private
from qmq.storage.store import PullSync, Store

#: The number of the read that is a sync of the pull log; others are those of pulls (above), of reports (below), and of
#: what is delayed (far above).
SYNC_NUMBER: Final = 0
#: What could not be written is tried again so often.
_AGAIN_US: Final = 100_000


class NamedSync:
    """Brings what the pull log says of hand-overs to disk; run as a read."""

    partition = 0

    def __init__(self, sync: PullSync, answers: list[HandedOver]) -> None:
        self.sync = sync
        self.answers = answers

    def step(self) -> bool:
        """[thread] Sync. Raises SyncFailed."""
        self.sync.run()
        return False


class HandOvers:
    """Takes them in, beside the intake, and answers when they are stored and named."""

    def __init__(self, store: Store, delivery: Delivery, intake: Intake, effects: list[Effect]) -> None:
        self._store = store
        self._delivery = delivery
        self._intake = intake
        self._effects = effects
        self._waiting: dict[tuple[int, int], tuple[HandOver, bytes, int]] = {}  # by connection and request
        self._stored: list[tuple[HandOver, bytes, int, Sent]] = []  # and not visible yet
        self._named: list[HandedOver] = []  # and not synced yet
        self._syncing: NamedSync | None = None

    def take(self, command: HandOver, now: Now) -> None:
        """Check and stage one. Raises UnknownGroup, InvalidOption, and what a send is refused with."""
        ledger = self._ledger(command)
        if command.verdict not in (Verdict.NACK, Verdict.REJECT):
            raise InvalidOption("what is handed over was nacked or rejected")
        if not 1 <= command.attempt < 1 << 31 or (command.delay_us is not None and command.delay_us > MOST_US):
            raise InvalidOption("attempts are counted from 1, and a message comes again after two years at most")
        batch = check_batch(command.batch, BatchLimits(flags=KNOWN_FLAGS & ~HAS_DELIVER_AT))
        if batch.header.messages != 1:
            raise BadBatch(f"one message is handed over at a time, not {batch.header.messages}")
        if batch.header.producer_id == DUE_PRODUCER:
            raise BadBatch("only a broker has that producer id: it says that a delayed message was delivered")
        subject = check_private(batch.names[0], command.group)
        key = batch.header.producer_id + batch.header.producer_sequence.to_bytes(8, "little")
        if key in ledger.handed:
            self._named.append(HandedOver(command.connection, command.request))
            return
        number = self._store.subject_number(subject)
        if number is None:
            number = self._store.add_subject(subject)
        self._waiting[command.connection, command.request] = command, key, number
        try:
            self._intake.send(Send(command.connection, command.request, command.batch, True, number), now)
        except BaseException:
            del self._waiting[command.connection, command.request]
            raise

    def disconnected(self, connection: int) -> None:
        """Nobody waits for its answers any more: what is not named yet comes again."""
        for key in [key for key in self._waiting if key[0] == connection]:
            del self._waiting[key]

    def turn(self, now: Now) -> None:
        """Name what is stored by now, and visible; answer for what is on disk with its name."""
        if self._waiting:
            self._effects[:] = [effect for effect in self._effects if not self._is_mine(effect)]
        if self._stored:
            stored, self._stored = self._stored, []
            for command, key, number, sent in stored:
                if self._intake.visible(sent.partition) > sent.position:
                    self._name(command, key, number, sent, now)
                else:
                    self._stored.append((command, key, number, sent))
        if self._named and self._syncing is None:
            self._sync()

    def _is_mine(self, effect: Effect) -> bool:
        if isinstance(effect, Refused):
            self._waiting.pop((effect.connection, effect.request), None)
        if not isinstance(effect, Sent):
            return False
        found = self._waiting.pop((effect.connection, effect.request), None)
        if found is not None:
            self._stored.append((*found, effect))
        return found is not None

    def _name(self, command: HandOver, key: bytes, number: int, sent: Sent, now: Now) -> None:
        try:
            ledger = self._ledger(command)
        except UnknownGroup as error:  # it was deleted meanwhile
            self._effects.append(Refused(command.connection, command.request, error))
            return
        if key not in ledger.handed:
            assert isinstance(sent.first_sequences, int)
            messages = MessageRange(number, sent.first_sequences, 0, 0, 1)
            ledger.take_over(
                messages, command.attempt, Verdict(command.verdict), command.reason, command.delay_us, now.wall_us, key
            )
            self._delivery.handing.members.look(ledger)
        self._named.append(HandedOver(command.connection, command.request))

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Have all that is named on disk, with one sync; what is named meanwhile waits for the next one."""
        files = self._store.groups
        try:
            files.write()
        except StorageError as error:
            if files.broken:
                self._answer(self._named, error)
                self._named = []
            return
        self._syncing, self._named = NamedSync(files.begin_sync(), self._named), []
        self._effects.append(ReadWanted(SYNC_NUMBER, self._syncing))

    def synced(self, error: QmqError | None) -> None:
        """That was done, or has failed."""
        syncing, self._syncing = self._syncing, None
        assert syncing is not None
        self._store.groups.end_sync(syncing.sync, error)
        self._answer(syncing.answers, error)

    def _answer(self, answers: list[HandedOver], error: QmqError | None) -> None:
        self._effects += answers if error is None else [Refused(*answer, error) for answer in answers]

    def next_deadline_us(self, now_us: int) -> int | None:
        """When to try again what could not be written."""
        return now_us + _AGAIN_US if self._named and self._syncing is None else None

    def _ledger(self, command: HandOver) -> Ledger:
        group = self._delivery.subscriptions.groups.get(check_group_name(command.group))
        if group is None or group.ledger is None:
            raise UnknownGroup(f"there is no group {command.group!r} here")
        if group.mode == MOST_ONCE:
            raise InvalidOption(f"group {command.group!r} is {MOST_ONCE}: nothing comes back to it")
        return group.ledger
