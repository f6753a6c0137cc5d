"""Resends: the broker hands stored messages out again, to one group or to all that follow their subjects.

Nothing is copied: a resend adds retries that name ranges of stored messages (resend_group.py), by a record RESENT of
each group. A large one takes many turns, beside all other work. A record says that it begins and how far it is, so that
it goes on after any end of the broker. A client asks again and again how far it is, with the number that it gave it;
so a client that has lost the connection, or another one, learns how it ended.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from qmq.broker.delivery.pull import Delivery
from qmq.broker.find.resend_group import GroupResend
from qmq.broker.find.resend_selection import (
    MOST_MESSAGES,
    PrefixSelection,
    ResendSelection,
    SelectedRange,
    SelectionColumns,
    Steps,
    checked_times,
    ids_of,
    of_ids,
    of_ranges,
    of_sequences,
    pack,
    unpack,
)
from qmq.broker.groups.group import Group
from qmq.broker.groups.name_order import NameOrder
from qmq.broker.groups.resends import ResendCounts, ResendProgress
from qmq.broker.groups.settings import members_of, unknown_group
from qmq.broker.ports.commands import Administer, Now
from qmq.broker.ports.effects import Administered, Asker, CheckpointWanted, Effect, ReadWanted, Refused, first_number
from qmq.errors import InvalidOption, Overloaded, QmqError
from qmq.format.ids import MessageId
from qmq.names import check_group_or_member, check_prefix, takes
from qmq.net.protocol.types import AT_MOST_ONCE
from qmq.storage.store import ColdRead, Store

#: The number of the one read that is under way.
READ_NUMBER: Final = first_number(Asker.RESEND)
#: A client that waits learns how far it is after this time.
ANSWER_AFTER_US: Final = 250_000
#: After so many steps a resend takes one in this time. A step takes about half a millisecond, so that others have the
#: broker for most of the time, and wait for one step at most.
_AT_ONCE: Final = 16
_STEP_EVERY_US: Final = 1_500
#: Resends that wait for others to end.
MOST_WAITING: Final = 100
#: Groups whose records that a resend begins are staged in one step.
_GROUPS: Final = 256
#: Groups that one step ends with: about 200 us each where nothing is to be resent.
_FEW_GROUPS: Final = 4
#: Resends whose error is remembered for the client that asks again.
_FAILED: Final = 1_000
#: The bytes of the number that a client gives to a resend.
RUN_SIZE: Final = 16


class NothingSelected(Exception):
    """No message that somebody follows is selected here; of a client with several brokers another one may have some."""


@dataclass(slots=True)
class _Request:
    """A client that waits for an answer, until a monotonic time."""

    connection: int
    request: int
    until_us: int


@dataclass(slots=True)
class _Job:
    """One resend, and how far it is."""

    run: bytes
    #: The selection by prefix and time, or by ranges; None while the ids are looked up.
    kept: dict[str, Any]
    targets: list[Group]
    #: The name of the group in the request; None: all that follow.
    group: str | None
    ids: list[MessageId] = field(default_factory=list)
    #: The messages that the request names by subject and sequence.
    named: list[SelectedRange] = field(default_factory=list)
    dry: bool = False
    #: It goes on after a start: its records have been written.
    resumed: bool = False
    waiting: list[_Request] = field(default_factory=list)
    steps: Steps[None] | None = None
    taken: int = 0  # steps
    #: It waits until a checkpoint has the names of all its subjects, up to this number.
    names: int = 0
    total: int = 0
    looked: int = 0
    groups: int = 0
    #: Groups that were sought meanwhile.
    sought: list[str] = field(default_factory=list)
    counts: ResendCounts = field(default_factory=ResendCounts)
    current: GroupResend | None = None

    def fields(self, *, done: bool) -> dict[str, Any]:
        """Return the fields of an answer."""
        now = self.current
        counts = self.counts if now is None else self.counts.plus(now.counts)
        looked = self.looked + (now.looked if now is not None else 0)
        groups = self.groups + (now is not None and now.follows_any)
        return {"done": done, "total": self.total, "looked": looked, "groups": groups, **counts._asdict()}


class Resends:
    """The resends of all groups, one after another. The answers go to *effects*."""

    def __init__(
        self, store: Store, delivery: Delivery, effects: list[Effect], visible: Callable[[int], int], order: NameOrder
    ) -> None:
        """*visible* returns the position before which a partition's messages may be pulled."""
        self._store = store
        self._order = order
        self._visible = visible
        self._delivery = delivery
        self._effects = effects
        self._jobs: deque[_Job] = deque()
        self._read: ColdRead | None = None
        self._next_us = 0  # when the next step is due
        self._failed: OrderedDict[bytes, QmqError] = OrderedDict()

    # --- in ----------------------------------------------------------------------------------------------------------

    def begin(self, command: Administer, now: Now) -> None:
        """Begin a resend, or say how far it is. Raises InvalidOption, InvalidName, UnknownGroup, Overloaded."""
        run = command.fields.get("run")
        if type(run) is not bytes or len(run) != RUN_SIZE:
            raise InvalidOption(f"a resend needs a number of {RUN_SIZE} bytes in run")
        job = next((one for one in self._jobs if one.run == run), None)
        if job is None:
            if run in self._failed:
                raise self._failed[run]
            ended = self._ended(run)
            if ended is not None:
                self._delivery.durable.answer(Administered(command.connection, command.request, ended))
                return
            if len(self._jobs) >= MOST_WAITING:
                raise Overloaded(f"{MOST_WAITING} resends wait already; try again when some have ended")
            job = self._job_of(run, command.fields)
            self._jobs.append(job)
        job.waiting.append(_Request(command.connection, command.request, now.monotonic_us + ANSWER_AFTER_US))

    def _job_of(self, run: bytes, fields: dict[str, Any]) -> _Job:
        name, prefix, ids = fields.get("group"), fields.get("prefix"), fields.get("ids")
        sequences = fields.get("sequences")
        since_us, until_us = checked_times(fields)
        if (name is None) is not bool(fields.get("all_groups")):
            raise InvalidOption("a resend goes either to one group or to all groups that follow")
        if sum(one is not None for one in (prefix, ids, sequences)) != 1:
            raise InvalidOption("a resend is of messages with ids, of sequences, or of a prefix")
        if prefix is None and not (since_us is None and until_us is None):
            raise InvalidOption("ids and sequences name their messages; they go with neither since nor until")
        kept = {"prefix": None if prefix is None else check_prefix(prefix), "since_us": since_us, "until_us": until_us}
        job = _Job(run, kept, self._targets(name), name, dry=bool(fields.get("dry_run")))
        if ids is not None:
            job.ids = ids_of(self._store, ids)
        if sequences is not None:
            job.named = of_sequences(self._store, sequences)
        return job

    def _targets(self, name: object) -> list[Group]:
        """Return the group of that name, or the members of a broadcast; None: all that take messages again."""
        groups = self._delivery.subscriptions.groups
        if name is None:
            return [one for one in groups.values() if one.ledger is not None and one.mode != AT_MOST_ONCE]
        checked = check_group_or_member(name)  # type: ignore[arg-type]  # it refuses what is no text
        found = [groups[one] for one in (members_of(checked, groups) or [checked]) if one in groups]
        if not found or any(one.ledger is None for one in found):
            raise unknown_group(checked, groups)
        if found[0].mode == AT_MOST_ONCE:
            raise InvalidOption(f"group {checked!r} is {AT_MOST_ONCE}: it takes no message again")
        return found

    def _ended(self, run: bytes) -> dict[str, Any] | None:
        """Return the answer of a resend that has ended; None where no group knows it."""
        ledgers = self._delivery.tracker.ledgers.values()
        found = [progress for ledger in ledgers if (progress := ledger.resends.get(run)) is not None]
        if not found:
            return None
        counts = ResendCounts()
        for progress in found:
            counts = counts.plus(ResendCounts(*progress.counts))
        total = sum(counts) - counts.redriven
        return {"done": True, "total": total, "looked": total, "groups": len(found), **counts._asdict()}

    def resume(self) -> None:
        """Go on, after a start, with the resends that have not ended."""
        jobs = dict[bytes, _Job]()
        for group in self._delivery.subscriptions.groups.values():
            for run, progress in list(group.ledger.resends.unfinished()) if group.ledger is not None else ():
                assert progress.selection is not None
                jobs.setdefault(run, _Job(run, progress.selection, [], None, resumed=True)).targets.append(group)
        self._jobs.extend(jobs.values())

    def disconnected(self, connection: int) -> None:
        """Forget the requests of a closed connection; only a dry run ends with them."""
        for job in list(self._jobs):
            job.waiting = [one for one in job.waiting if one.connection != connection]
            if job.dry and not job.waiting and (job is not self._jobs[0] or self._read is None):
                self._end(job)

    # --- steps -------------------------------------------------------------------------------------------------------

    @property
    def can_go_on(self) -> bool:
        """Whether the first resend waits for neither a read nor a checkpoint."""
        return bool(self._jobs) and self._read is None and not self.wants_checkpoint

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the first resend waits for a checkpoint: a start may renumber subjects that none has."""
        return bool(self._jobs) and self._jobs[0].names > self._store.checkpoints.subjects_claimed

    def next_deadline_us(self) -> int | None:
        """Return when the next step is due, or a client is to learn how far its resend is."""
        if not self._jobs:
            return None
        steps = [self._next_us] if self.can_go_on else []
        return min((*steps, *(one.until_us for job in self._jobs for one in job.waiting)), default=None)

    def tick(self, now: Now) -> None:
        """Take the next step of the first resend, and tell clients how far theirs are."""
        if self.can_go_on and now.monotonic_us >= self._next_us:
            job = self._jobs[0]
            job.taken += 1
            self._next_us = now.monotonic_us + (_STEP_EVERY_US if job.taken >= _AT_ONCE else 0)
            self._step(job, now)
        for job in self._jobs:
            for one in [one for one in job.waiting if now.monotonic_us >= one.until_us]:
                job.waiting.remove(one)
                self._effects.append(Administered(one.connection, one.request, job.fields(done=False)))

    def _step(self, job: _Job, now: Now) -> None:
        try:
            if job.steps is None:
                job.steps = self._steps(job, now)
            read = next(job.steps)
        except StopIteration:
            self._end(job)
            self._answer(job)
        except (QmqError, NothingSelected) as error:
            self._end(job)
            self._fail(job, error, now)
        else:
            if read is not None:
                self._read = read
                self._effects.append(ReadWanted(READ_NUMBER, read))

    def read_done(self, error: QmqError | None, now: Now) -> None:
        """Take the read, or refuse the first resend when it failed."""
        read, self._read = self._read, None
        assert read is not None
        job = self._jobs[0]
        if error is None:
            self._delivery.finish_read(read)
        else:
            self._end(job)
            self._fail(job, error, now)

    def _end(self, job: _Job) -> None:
        self._jobs.remove(job)
        if job.steps is not None:
            job.steps.close()

    def _answer(self, job: _Job) -> None:
        for one in job.waiting:
            answer = Administered(one.connection, one.request, job.fields(done=True))
            if job.dry:
                self._effects.append(answer)
            else:
                self._delivery.durable.answer(answer)

    def _fail(self, job: _Job, error: QmqError | NothingSelected, now: Now) -> None:
        """End a resend where it is, and refuse the requests."""
        for group in job.targets:
            ledger = group.ledger
            known = ledger.resends.get(job.run) if ledger is not None else None
            if ledger is not None and known is not None and known.selection is not None and self._is_there(group):
                ledger.resend(job.run, known._replace(selection=None), [], [], now.wall_us)
        if isinstance(error, QmqError):
            self._failed[job.run] = error
        if len(self._failed) > _FAILED:
            self._failed.popitem(last=False)
        for one in job.waiting:
            if isinstance(error, NothingSelected):
                fields = {"done": True, "nothing": str(error)}
                self._effects.append(Administered(one.connection, one.request, fields))
            else:
                self._effects.append(Refused(one.connection, one.request, error))

    def _is_there(self, group: Group) -> bool:
        """Return whether the group still exists."""
        return group.ledger is not None and self._delivery.tracker.ledgers.get(group.ledger.number) is group.ledger

    # --- one resend --------------------------------------------------------------------------------------------------

    def _steps(self, job: _Job, now: Now) -> Steps[None]:
        """Do a resend. Raises InvalidOption before anything is changed or if a group was sought, and StorageError."""
        for _ in self._order.caught_up():
            yield None
        selection = yield from self._select(job)
        total = yield from selection.total(self._store)
        if total > MOST_MESSAGES and not job.resumed:
            raise InvalidOption(
                f"{total:,} messages are selected; one resend takes at most {MOST_MESSAGES:,}: select fewer, by since "
                "and until"
            )
        columns = yield from selection.columns()
        targets = yield from self._followers(job, columns)
        job.total = total * len(targets)
        job.names = selection.ranges[-1].number + 1 if selection.ranges else 0
        if self.wants_checkpoint:
            self._effects.append(CheckpointWanted())
        while self.wants_checkpoint:
            yield None
        if not job.dry and not job.resumed:
            yield from self._begin(job, targets, selection, now)
        for at, group in enumerate(targets, 1):
            yield from self._resend(job, group, selection, columns)
            if at % _FEW_GROUPS == 0:
                yield None
        if job.sought:
            raise InvalidOption(
                f"group {', '.join(map(repr, job.sought))} was sought while messages were resent to it: some are not "
                "resent; what was resent before stays, unless the seek cleared it"
            )

    def _select(self, job: _Job) -> Steps[ResendSelection]:
        """Return the messages. Raises NothingSelected, InvalidOption, StorageError."""
        store, kept, prefixes = self._store, job.kept, set[str]()
        if "ranges" in kept:
            return unpack(store, kept["ranges"])
        for at, group in enumerate(job.targets, 1):
            prefixes.update(group.filters)
            if at % _GROUPS == 0:
                yield None
        if job.ids or job.named:
            if job.ids:
                selection = yield from of_ids(store, job.ids)
            else:
                selection = yield from of_ranges(store, job.named, self._visible)
            for one in selection.ranges:
                name = store.subjects.name(one.number)
                if not takes(prefixes, name):
                    raise InvalidOption(f"{_nobody(job.group)} {name!r}, the subject of one of these messages")
            return selection
        prefix, since_us, until_us = kept["prefix"], kept["since_us"], kept["until_us"]
        found = PrefixSelection(
            store, self._order, prefix, since_us, until_us, lambda name: takes(prefixes, name), self._visible
        )
        selection = yield from found.find()
        if selection.ranges or job.resumed:
            return selection
        is_subject = prefix and not prefix.endswith(".")
        what = f"{'subject' if is_subject else 'prefix'} {prefix!r}"
        if found.unfollowed:
            raise NothingSelected(f"{_nobody(job.group)} {what if is_subject else f'a subject of {what}'}")
        when = "" if since_us is None and until_us is None else " of that time"
        raise NothingSelected(f"nothing is selected: no message{when} of {what} is stored here")

    def _followers(self, job: _Job, columns: SelectionColumns) -> Steps[list[Group]]:
        """Return the groups that may follow some of the subjects."""
        if job.resumed:
            return job.targets
        prefix, found = job.kept["prefix"], list[Group]()
        names = [self._store.subjects.name(number) for number in columns.numbers.tolist()] if prefix is None else []
        looked = 0
        for group in job.targets:
            if group.within([prefix]) if prefix is not None else any(takes(group.filters, name) for name in names):
                found.append(group)
            looked += 1 + len(names)
            if looked >= _GROUPS:
                looked = 0
                yield None
        return found

    def _begin(self, job: _Job, targets: list[Group], selection: ResendSelection, now: Now) -> Steps[None]:
        """Record that the resend begins, so that it goes on after any end."""
        if job.kept["prefix"] is None:
            job.kept = {"ranges": pack(selection)}
        elif job.kept["until_us"] is None:  # messages that are stored later are not selected then, either
            job.kept = {**job.kept, "until_us": self._store.last_stored_at_us + 1}
        for at, group in enumerate(targets, 1):
            if self._is_there(group):
                assert group.ledger is not None
                group.ledger.resend(job.run, ResendProgress(job.kept), [], [], now.wall_us)
            if at % _GROUPS == 0:
                yield None

    def _resend(
        self, job: _Job, group: Group, selection: ResendSelection, columns: SelectionColumns
    ) -> Steps[None]:  # fmt: skip
        """Resend to one group, until it is deleted or sought. Raises StorageError."""
        ledger, members = group.ledger, self._delivery.tracker.members
        assert ledger is not None
        progress = ResendProgress(job.kept) if job.dry else ledger.resends.get(job.run)
        if progress is None or not self._is_there(group):
            return
        work = job.current = GroupResend(
            self._store, self._order, group, selection, columns, job.run, progress, dry=job.dry
        )
        steps = work.steps(self._delivery.tracker.now.wall_us)
        try:
            for read in steps:
                members.look(ledger)  # pulls wait for what was added
                yield read
                if not self._is_there(group):
                    break
                known = ledger.resends.get(job.run)
                if not job.dry and (known is None or known.selection is None):
                    job.sought.append(str(group.name))
                    break
        finally:
            steps.close()
        if self._is_there(group):
            members.look(ledger)
        job.current = None
        job.groups += work.follows_any
        job.counts = job.counts.plus(work.counts)
        job.looked += work.looked


def _nobody(group: str | None) -> str:
    return "no group follows" if group is None else f"group {group!r} does not follow"
