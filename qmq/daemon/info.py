"""Answers the action info: the version, settings, disks, connections and problems of a running broker.

It serves ``qmq info``, ``qmq doctor`` and ``client.admin.info``. A thread of its own asks the disks: a disk that does
not answer must not keep back the answer that says so.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from qmq.broker.groups.untaken import UntakenName
from qmq.broker.ports.commands import InfoFound, Now
from qmq.broker.ports.effects import InfoWanted, StatsWanted
from qmq.broker.ports.metrics import Counters
from qmq.daemon.threads import CallThread
from qmq.errors import QmqError
from qmq.net.server.options import ClientInfo
from qmq.settings import Settings, differing_settings, shown_settings
from qmq.storage.disk.disk import Disk
from qmq.storage.disk.free_space import PARTS
from qmq.storage.store import MOST_NUMBERS, Store
from qmq.version import VERSION

#: Clients in one answer.
MOST_CLIENTS: Final = 1_000
#: A disk that needs longer for its free space, in seconds, is reported as one that does not answer.
DISK_TIMEOUT_S: Final = 2.0
#: A disk with less than this share of its space free is nearly full.
LITTLE_FREE: Final = 0.1
#: State that was not saved for so long, and for so many intervals of checkpoints, is a problem.
LATE_US: Final = 10_000_000
LATE_INTERVALS: Final = 10
#: A bound of which this share is used is a problem.
NEARLY_ALL: Final = 0.8
#: A clock that is so much behind the last message is a problem; the last time that a text shows, in the year 9999.
CLOCK_BEHIND_US: Final = 60_000_000
LAST_SHOWN_US: Final = 253_402_000_000_000_000
#: Groups that a problem names.
NAMED: Final = 10

Fields = dict[str, Any]


class DiskSpace(NamedTuple):
    """The disk of a directory; ``total_bytes`` and ``free_bytes`` are None if it does not answer. Sends leave
    ``reserved_bytes`` of it free.
    """

    directory: str
    total_bytes: int | None
    free_bytes: int | None
    reserved_bytes: int


class BrokerFacts(NamedTuple):
    """The state of a broker in which problems show."""

    settings: Settings
    host: str
    has_tokens: bool
    disks: tuple[DiskSpace, ...]
    counters: Counters
    broken_partitions: tuple[int, ...]
    checkpoint_age_us: int
    checkpoint_error: QmqError | None
    retention_holders: tuple[str, ...]
    untaken: tuple[UntakenName, ...]
    #: What is used of the bounds ``max_producers`` and ``max_subjects``, by the name of the setting.
    used: Mapping[str, int]
    #: The level and the text of a problem with the certificate.
    certificate: tuple[str, str] | None = None
    #: The bytes of the largest send that was refused for want of room, and for which there has been none since.
    refused_bytes: int = 0
    #: By how much the last stamp is ahead of the clock, and what that shows.
    clock_behind_us: int = 0
    wall_us: int = 0
    #: How many subjects, priorities and slots of order keys there ever were.
    subject_numbers: int = 0
    #: Texts about groups that have messages for which records do not account.
    unaccounted: tuple[str, ...] = ()
    #: How many unique texts were forgotten before their time, since the start.
    forgotten_texts: int = 0


class FoundProblem(NamedTuple):
    """Something that a person should act on. ``level``: "error" if messages or service suffer, else "warning"."""

    code: str
    level: str
    message: str


class DiskSurvey:
    """Asks disks for their free space, and gives up on those that do not answer in time."""

    def __init__(self, disk: Disk, directories: Iterable[Path], keep_bytes: int) -> None:
        self._disk = disk
        self._directories = tuple(dict.fromkeys(directories))
        self._keep_bytes = keep_bytes
        self._worker = CallThread("qmq-info")
        self._asking: list[Callable[[tuple[DiskSpace, ...]], None]] = []
        self._measuring = False
        self._found = dict[Path, DiskSpace]()

    def ask(self, then: Callable[[tuple[DiskSpace, ...]], None]) -> None:
        """Call *then* with the space of all disks, after DISK_TIMEOUT_S at the latest."""
        self._asking.append(then)
        if len(self._asking) > 1:
            return  # the survey under way answers this one, too
        self._found.clear()
        self._timer = asyncio.get_running_loop().call_later(DISK_TIMEOUT_S, self._answer)
        if not self._measuring:
            self._measuring = True
            self._worker.call(self._measure, self._measured)

    def _measure(self) -> None:
        """[thread] Measure all disks."""
        for directory in self._directories:
            try:
                free, total = self._disk.room(directory)
            except OSError:
                continue
            reserved = min(self._keep_bytes, total // PARTS)
            self._found[directory] = DiskSpace(str(directory), total, free, reserved)

    def _measured(self, error: QmqError | None) -> None:
        self._measuring = False
        self._answer()

    def _answer(self) -> None:
        self._timer.cancel()
        asking, self._asking = self._asking, []
        found = tuple(
            self._found.get(directory) or DiskSpace(str(directory), None, None, 0) for directory in self._directories
        )
        for then in asking:
            then(found)

    def close(self) -> None:
        """End the thread, without waiting for a disk."""
        self._worker.stop(0)


def problems_of(facts: BrokerFacts) -> list[FoundProblem]:
    """Return the problems of a broker, the errors first."""
    found = [
        *_disk_problems(facts), *_file_problems(facts), *_group_problems(facts), *_bound_problems(facts),
        *_address_problems(facts),
    ]  # fmt: skip
    return sorted(found, key=lambda problem: problem.level != "error")


def _disk_problems(facts: BrokerFacts) -> Iterable[FoundProblem]:
    for directory, total, free, reserved in facts.disks:
        if free is None or total is None:
            yield FoundProblem("disk_silent", "error", f"the disk of {directory} does not answer; see the system's log")
        elif free <= reserved or free - facts.refused_bytes < reserved:
            text = (
                f"the disk of {directory} is full ({free} bytes free, {reserved} of them kept for checkpoints and "
                "acknowledgements): sends are refused until you free some space"
            )
            yield FoundProblem("disk_full", "error", text)
        elif free < total * LITTLE_FREE:
            text = (
                f"the disk of {directory} is nearly full: {free} of {total} bytes are free; free some, or set retention"
            )
            yield FoundProblem("disk_nearly_full", "warning", text)


def _file_problems(facts: BrokerFacts) -> Iterable[FoundProblem]:
    if facts.broken_partitions:
        numbers = ", ".join(map(str, facts.broken_partitions))
        text = f"the disk failed to keep what was written to partition {numbers}: replace it, then restart the broker"
        yield FoundProblem("partition_broken", "error", text)
    if facts.checkpoint_error is not None:
        text = f"no checkpoint can be taken: {facts.checkpoint_error}; acks may be lost with power until one can"
        yield FoundProblem("checkpoint_failed", "error", text)
    elif facts.checkpoint_age_us > max(LATE_US, LATE_INTERVALS * facts.settings.checkpoint_ms * 1_000):
        text = f"the last checkpoint is {facts.checkpoint_age_us // 1_000_000} s old: see whether the disk is slow"
        yield FoundProblem("checkpoint_late", "error", text)
    if problem := clock_problem(facts.clock_behind_us, facts.wall_us):
        yield FoundProblem("clock_behind", "warning", problem)
    if bad := sum(facts.counters.damaged.values()) + facts.counters.holes_in_recovery:
        text = f"{bad} places in the files are damaged: run qmq verify, which names them, and see the broker's log"
        yield FoundProblem("damaged", "error", text)


def clock_problem(behind_us: int, wall_us: int) -> str | None:
    """Return what is wrong if the last message was stored *behind_us* ahead of the clock, which shows *wall_us*."""
    if behind_us <= CLOCK_BEHIND_US:
        return None
    until = datetime.fromtimestamp(min(wall_us + behind_us, LAST_SHOWN_US) / 1e6, UTC)
    return (
        f"the last message was stored at {until:%Y-%m-%d %H:%M} UTC, which is ahead of this machine's clock: set the "
        "clock (NTP), if it is behind. If it was ahead once, stored_at stays ahead until then, and so do what goes by "
        "it: `start` at a time and expire_after. Retention goes by the times of the segments' files meanwhile"
    )


def _group_problems(facts: BrokerFacts) -> Iterable[FoundProblem]:
    if facts.retention_holders:
        names = ", ".join(facts.retention_holders[:NAMED])
        text = (
            f"messages older than retention_ms are kept, as groups have not taken them: {names}; start consumers, or "
            "delete the groups, or set retention_max_ms"
        )
        yield FoundProblem("retention_waits", "warning", text)
    for text in facts.unaccounted[:NAMED]:
        yield FoundProblem("unaccounted", "error", text)
    for code, text in facts.untaken:
        yield FoundProblem(code, "warning", text)


def _bound_problems(facts: BrokerFacts) -> Iterable[FoundProblem]:
    texts = {
        "max_producers": "producers are remembered: beyond it those without a connection are forgotten, and what they "
        "send again may be refused; keep clients open instead of making one a send",
        "max_subjects": "subjects have messages: beyond it new ones are refused; use fewer subjects (a number belongs "
        "into the key)",
    }
    for setting, text in texts.items():
        most, used = getattr(facts.settings, setting), facts.used[setting]
        if used >= NEARLY_ALL * most:
            text = f"{used} of {most} {text}, or raise {setting}"
            yield FoundProblem(f"{setting.removeprefix('max_')}_nearly_full", "warning", text)
    if facts.forgotten_texts:
        text = (
            f"{facts.forgotten_texts:,} unique texts were forgotten early since the start, so what is sent with them "
            "again is stored again: raise max_unique_texts and max_unique_bytes, or lower unique_for_ms"
        )
        yield FoundProblem("texts_forgotten", "warning", text)
    if facts.subject_numbers >= NEARLY_ALL * MOST_NUMBERS:
        text = (
            f"{facts.subject_numbers:,} subjects, priorities and slots of order keys were made since this data "
            f"directory began, forgotten ones among them, and {MOST_NUMBERS:,} are the most: use fewer subjects (a "
            "number belongs into the key), and let another broker take new ones in time"
        )
        yield FoundProblem("subject_numbers_nearly_full", "warning", text)


def _address_problems(facts: BrokerFacts) -> Iterable[FoundProblem]:
    try:
        is_local = ipaddress.ip_address(facts.host).is_loopback
    except ValueError:
        is_local = False
    if not is_local and not facts.has_tokens:
        text = f"the broker listens on {facts.host} without tokens: make some with `qmq tokens create`, or let only "
        text += "trusted machines reach it (a firewall)"
        yield FoundProblem("open_to_network", "warning", text)
    if facts.certificate is not None:
        yield FoundProblem("certificate", *facts.certificate)


def info_found(wanted: InfoWanted | StatsWanted, fields: Callable[[], dict[str, Any]]) -> InfoFound:
    """Return the answer to a request, with what *fields* returns, or with the error that it raises."""
    try:
        return InfoFound(wanted.connection, wanted.request, fields())
    except Exception as error:  # the broker logs it, and the client learns that there is no answer
        return InfoFound(wanted.connection, wanted.request, {}, error)


class InfoAnswers:
    """Answers InfoWanted of one broker."""

    def __init__(
        self,
        store: Store,
        started: Now,
        clock: Callable[[], Now],
        survey: DiskSurvey,
        facts: Callable[[tuple[DiskSpace, ...]], BrokerFacts],
        clients: Callable[[int], tuple[list[ClientInfo], int]],
        submit: Callable[[InfoFound], None],
    ) -> None:
        """*facts* returns the present state for given disks, *clients* some clients and the count of all. *submit*
        takes the answers.
        """
        self._store = store
        self._started = started
        self._clock = clock
        self._survey = survey
        self._facts = facts
        self._clients = clients
        self._submit = submit

    def answer(self, wanted: InfoWanted) -> None:
        """Answer a request, once the disks have."""
        self._survey.ask(partial(self._found, wanted))

    def _found(self, wanted: InfoWanted, disks: tuple[DiskSpace, ...]) -> None:
        self._submit(info_found(wanted, lambda: self._fields(wanted, disks)))

    def _fields(self, wanted: InfoWanted, disks: tuple[DiskSpace, ...]) -> dict[str, Any]:
        facts, store = self._facts(disks), self._store
        clients, count = self._clients(MOST_CLIENTS)
        fields: dict[str, Any] = {
            **wanted.fields,
            "version": VERSION,
            "store_id": store.store_id,
            "started_us": self._started.wall_us,
            "uptime_us": self._clock().monotonic_us - self._started.monotonic_us,
            "settings": shown_settings(facts.settings),
            "changed_settings": differing_settings(facts.settings),
            "disks": [disk._asdict() for disk in disks],
            "log_bytes": sum(part.log_bytes() for part in store.partitions),
            "checkpoint_age_us": facts.checkpoint_age_us,
            "checkpoint_error": None if facts.checkpoint_error is None else str(facts.checkpoint_error),
            "connections": [client._asdict() for client in clients],
            "connection_count": count,
            "problems": [problem._asdict() for problem in problems_of(facts)],
        }
        return fields

    def close(self) -> None:
        """Answer nothing more."""
        self._survey.close()
