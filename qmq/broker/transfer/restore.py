"""Take messages back from an archive, as copies under their old ids, for all groups or for one group alone.

A client begins a run on its connection. The answer says which of the run's messages are stored from a given position
on, so a run that was killed goes on without doubles, however long ago that was. When the same run begins again, the
later connection takes over, and batches that the earlier one still sends are refused.

For one group alone, the messages are stored under subjects of that group, and then the group's error log names them, as
with handovers. A crash between the two leaves messages that no record names, and that do not count as stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from qmq.broker.delivery.pull import Delivery
from qmq.broker.groups.group_state import Ledger
from qmq.broker.groups.message_ranges import ranges_of_batch
from qmq.broker.groups.settings import unknown_group
from qmq.broker.ports.commands import Administer, Now, Restore, Send
from qmq.broker.ports.effects import Effect, Refused, Restored, Sent
from qmq.broker.publish.publish import Intake
from qmq.broker.publish.staging import Numbers
from qmq.broker.transfer.restore_lookup import Lookups
from qmq.errors import BadBatch, Fenced, InvalidOption, QmqError
from qmq.format.batch import Header, parse_header, runs_of, stored_names
from qmq.format.layout import BATCH_HEADER_SIZE, HAS_ORIGIN_ID, PRODUCER_ID_SIZE, RUN_REPLAYED, RUN_SIZE
from qmq.format.private import check_private
from qmq.names import check_group_or_member
from qmq.net.protocol.types import AT_MOST_ONCE, MAX_RESTORE_BATCHES
from qmq.storage.store import Store

#: The connection number of the batches' own sends; the frame as a whole has one answer.
_NOBODY: Final = -2
#: The beginning of the broker's own producer ids.
_OWN: Final = b"qmq: "


@dataclass(slots=True)
class _Frame:
    """Batches that came in one frame: messages [start, end) of *run*."""

    command: Restore
    run: bytes
    group: str | None
    start: int
    end: int
    #: The number of batches that are not stored yet.
    left: int = 0
    #: The batches that are stored, with their numbers of messages.
    stored: list[tuple[Sent, int]] = field(default_factory=list)
    error: QmqError | None = None


class Restores:
    """Takes restored batches in beside the intake, and answers when they are stored and named."""

    def __init__(self, store: Store, delivery: Delivery, intake: Intake, effects: list[Effect]) -> None:
        self._store = store
        self._delivery = delivery
        self._intake = intake
        self._effects = effects
        self._lookups = Lookups(store, intake, effects)
        self._runs: dict[int, tuple[bytes, str | None]] = {}  # run and group, by connection
        self._sent: dict[int, tuple[_Frame, int]] = {}  # with the batch's number of messages, by request number
        self._last = 0
        self._stored: list[_Frame] = []  # stored, but not visible yet

    # --- in -----------------------------------------------------------------------------------------------------------

    def begin(self, command: Administer) -> None:
        """Begin a run or go on with it; answer once its messages are on disk and looked up.

        Raises InvalidOption, UnknownGroup, SyncFailed.
        """
        fields = command.fields
        run, group, since = fields.get("run"), fields.get("group"), fields.get("since")
        if type(run) is not bytes or len(run) != PRODUCER_ID_SIZE or run.startswith(_OWN):
            raise InvalidOption(
                f"a restore needs a run id of {PRODUCER_ID_SIZE} bytes that does not begin with {_OWN!r}"
            )
        places = [] if since is None else since
        if type(places) is not list or not all(type(place) is int and 0 <= place < 1 << 63 for place in places):
            raise InvalidOption("'since' of a restore must be a list of positions, one for each partition")
        ledger = self._ledger(group) if group is not None else None
        for other in [other for other, (known, _) in self._runs.items() if known == run]:
            del self._runs[other]
        self._runs[command.connection] = run, group
        self._intake.turn()
        self._lookups.begin(command, run, ledger, None if since is None else places)

    def take(self, command: Restore, now: Now) -> None:
        """Check and stage the batches of a frame. Raises Fenced, UnknownGroup, and the errors of a send."""
        run, group = self._runs.get(command.connection, (b"", None))
        if not run:
            raise Fenced("another process has taken over this restore, or it was not begun on this connection")
        if group is not None:
            self._ledger(group)
        batches = batches_of(command.batches, run)
        frame = _Frame(command, run, group, batches[0][1].producer_sequence, _end_of(batches[-1][1]))
        for batch, header in batches:
            self._last += 1
            self._sent[self._last] = frame, header.messages
            try:
                numbers = self._own_numbers(batch, header, group) if group is not None else None
                self._intake.send(Send(_NOBODY, self._last, batch, True, copy=True, numbers=numbers), now)
            except QmqError as error:
                del self._sent[self._last]
                if not frame.left:
                    raise
                frame.error = error  # answered once the batches before it are stored or refused
                break
            frame.left += 1

    def _own_numbers(self, batch: memoryview, header: Header, group: str) -> int | Numbers:
        """Return the subject number of each run; all subjects must be private to *group*. Raises InvalidName."""
        names = stored_names(batch, header)
        for name in names:
            check_private(name, group)
        return self._intake.numbering.of_private(names, runs_of(batch, header))

    def disconnected(self, connection: int) -> None:
        """Forget the run of a connection that is gone; messages that are not named yet come again."""
        self._runs.pop(connection, None)
        self._lookups.disconnected(connection)
        self._stored = [frame for frame in self._stored if frame.command.connection != connection]

    # --- out ----------------------------------------------------------------------------------------------------------

    def turn(self, now: Now) -> None:
        """Go on with looking up messages; name and answer batches that are stored and visible by now."""
        if self._lookups.any:
            self._lookups.turn()
        if self._sent:
            self._effects[:] = [effect for effect in self._effects if not self._is_mine(effect)]
        if self._stored:
            stored, self._stored = self._stored, []
            for frame in stored:
                self._finish(frame, now)

    @property
    def is_looking(self) -> bool:
        """Whether a lookup can go on now."""
        return self._lookups.can_go_on

    def read_done(self, error: QmqError | None) -> None:
        """Go on with the lookup whose read is done or has failed."""
        self._lookups.read_done(error)

    def _is_mine(self, effect: Effect) -> bool:
        if not isinstance(effect, Sent | Refused) or effect.connection != _NOBODY:
            return False
        frame, messages = self._sent.pop(effect.request)
        frame.left -= 1
        if isinstance(effect, Sent):
            frame.stored.append((effect, messages))
        else:
            frame.error = effect.error
        if not frame.left:
            self._stored.append(frame)
        return True

    def _finish(self, frame: _Frame, now: Now) -> None:
        command = frame.command
        if frame.error is not None:
            self._effects.append(Refused(command.connection, command.request, frame.error))
            return
        ends = tuple(part.message_log.end for part in self._store.partitions)
        answer = Restored(command.connection, command.request, ends)
        if frame.group is None:
            self._effects.append(answer)
        elif all(self._intake.visible(sent.partition) > sent.position for sent, _ in frame.stored):
            self._name(frame, answer, now)
        else:
            self._stored.append(frame)

    def _name(self, frame: _Frame, answer: Restored, now: Now) -> None:
        assert frame.group is not None
        if self._runs.get(answer.connection, (b"",))[0] != frame.run:
            return  # another process has begun, and its lookup did not find these messages
        try:
            ledger = self._ledger(frame.group)
        except QmqError as error:  # the group was deleted meanwhile
            self._effects.append(Refused(answer.connection, answer.request, error))
            return
        # By position: after a restart, a subject that is newer than the checkpoint may have another number.
        ranges = [
            messages
            for sent, count in frame.stored
            for messages in ranges_of_batch(self._store, sent.partition, sent.position, count)
        ]
        ledger.bring_back(ranges, frame.run, frame.start, frame.end, now.wall_us)
        self._delivery.tracker.members.look(ledger)
        self._delivery.durable.answer(answer)

    def _ledger(self, name: str) -> Ledger:
        groups = self._delivery.subscriptions.groups
        group = groups.get(check_group_or_member(name))
        if group is None or group.ledger is None:
            raise unknown_group(name, groups)
        if group.mode == AT_MOST_ONCE:
            raise InvalidOption(f"group {name!r} is {AT_MOST_ONCE}: it takes no message again")
        return group.ledger


def batches_of(frame: memoryview, run: bytes) -> list[tuple[memoryview, Header]]:
    """Return the batches of a frame. Raises BadBatch when they are not consecutive batches of *run*."""
    found, start = list[tuple[memoryview, Header]](), 0
    while start < len(frame):
        if len(frame) - start < BATCH_HEADER_SIZE + RUN_SIZE or len(found) == MAX_RESTORE_BATCHES:
            raise BadBatch(f"a frame of a restore must have whole batches, at most {MAX_RESTORE_BATCHES}")
        header = parse_header(frame, start)
        batch = frame[start : start + header.size]
        if header.size < BATCH_HEADER_SIZE or len(batch) != header.size or header.data_start > header.size:
            raise BadBatch("the sizes of a restore's batches do not add up")
        if header.producer_id != run or not header.flags & HAS_ORIGIN_ID:
            raise BadBatch("a batch of a restore must have its run as producer, and origin ids")
        if (runs_of(batch, header)["flags"] != RUN_REPLAYED).any():
            raise BadBatch("each run of a restored batch must be marked as replayed")
        if found and header.producer_sequence != _end_of(found[-1][1]):
            raise BadBatch("the producer sequences of a restore's batches must follow each other")
        found.append((batch, header))
        start += header.size
    if not found:
        raise BadBatch("a frame of a restore must have batches")
    return found


def _end_of(header: Header) -> int:
    return header.producer_sequence + header.messages
