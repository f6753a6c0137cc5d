"""The files of delayed messages cut, zeroed, filled with junk, with a bit flipped, or of another time than the others.

The broker starts; acknowledged messages are delivered once and never early, cancelled ones are not. After that verify
finds no fault, or names what is rotten. `delayed/` is a data directory like the one that contains it, whose files are
tried byte by byte in tests/storage; the tests here are about delayed messages, and the schedule in `due/`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Final

import pytest

from qmq.format.ids import MessageId
from qmq.storage.disk.disk import Disk
from qmq.storage.error_log import sorted_runs, timer_queue
from qmq.storage.verify.report import VerifyReport
from qmq.storage.verify.verify import verify
from tests.broker.delay.test_delay import S, cancel, delay, follow
from tests.broker.harness import Driven
from tests.fake_disk import REBOOTED, FakeDisk
from tests.storage.histories import FILLS, Files, cut, quick_directory, write_files

SMALL: Final = {"segment_bytes": 2_048, "max_frame_bytes": 1_536, "reserve_bytes": 1 << 20}
LATER_MS: Final = 1_000_000
#: In how many places a file is cut behind its last write, and how many of its bits are flipped.
PLACES: Final = 2
BITS: Final = 2
#: Kinds of files, by the end of the name.
KINDS: Final = ("messages", "entries", "order", "index", "subjects", "store-a", "store-b", "checkpoint", "a", "b")


@dataclass(slots=True)
class Moment:
    """The directory at one time, with the due time of each message, and those cancelled and delivered by then."""

    files: Files
    due: dict[str, int]
    cancelled: set[str]
    now_us: int


class History:
    """Return ``older`` and ``newer``, killed at two times after checkpoints, and ``stopped``, after a clean stop."""

    def __init__(self, path: Path) -> None:
        self.due: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.driven = Driven(path, disk=FakeDisk(), **SMALL)
        self._send(16, 5, 500)
        self.driven.checkpoint()
        self._send(4, 3, 600)
        self.older = self._moment()
        self.driven.advance(6_000)
        self._send(12, 30, 700)
        for name in list(self.due)[5:30:4]:
            if cancel(self.driven, name):
                self.cancelled.add(name)
        self.driven.checkpoint()
        self._send(5, 40, 800)
        self.newer = self._moment()
        self.driven.checkpoint()
        self.driven.store.close(clean=True)
        self.stopped = self._moment()

    def _send(self, count: int, soon: int, late: int) -> None:
        for number in range(count):
            seconds = [soon + number % 3, late + number][: 1 + number % 2]
            names = delay(self.driven, "ab"[number % 2], *(one * S for one in seconds))
            for name, one in zip(names, seconds, strict=True):
                self.due[name] = self.driven.now.wall_us + one * S

    def _moment(self) -> Moment:
        path = self.driven.directory
        files = {
            str(file.relative_to(path)): file.read_bytes()
            for file in path.rglob("*")
            if file.is_file() and file.name != "lock"
        }
        return Moment(files, dict(self.due), set(self.cancelled), self.driven.now.wall_us)


@pytest.fixture(scope="module")
def quick() -> Iterator[Path]:
    with quick_directory() as path:
        yield path


@pytest.fixture(scope="module")
def history(quick: Path) -> Iterator[History]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(timer_queue, "MEMORY_ITEMS", 12)
        patched.setattr(sorted_runs, "BLOCK_ITEMS", 5)
        yield History(quick / "history")


def kind_of(name: str) -> str:
    """Return the kind of a file, one of KINDS; "" for files of the message log and of groups."""
    if not name.startswith(("delayed/", "due/")) or "/pulls/" in name:
        return ""
    last = Path(name).name
    return "checkpoint" if last.startswith("checkpoint-") else Path(name).suffix[1:] or last


def survive(directory: Path, files: Files, moment: Moment, lost: set[str], disk: Disk | None = None) -> VerifyReport:
    """Start a broker on the files; it must deliver all due messages but *lost*. Return verify's findings after that."""
    write_files(directory, files)
    driven = Driven(directory, disk=disk if disk is not None else FakeDisk(), **SMALL)
    driven.now = driven.now._replace(wall_us=moment.now_us)
    for milliseconds in (1_000, *[LATER_MS] * 8):
        driven.advance(milliseconds)
    while driven.broker.delayed():
        left = driven.broker.delayed()
        driven.advance(1)
        if driven.broker.delayed() == left:
            break  # the number of lost messages is not known
    subscription, found = follow(driven), Counter[str]()
    while some := driven.pull(subscription):
        for run in some:
            for index in range(run.count):
                name = str(run.id(index))
                found[name] += 1
                assert run.stored_at_us >= moment.due[name], f"{name} came early"
    wanted = moment.due.keys() - moment.cancelled
    assert wanted - lost <= found.keys(), f"{len(wanted - lost - found.keys())} were lost"
    assert found.keys() <= wanted | lost, "what was cancelled came"
    assert set(found.values()) == {1}, "some came twice"
    driven.checkpoint()
    driven.store.close(clean=True)
    return verify(directory, Disk())


def check(directory: Path, files: Files, moment: Moment, what: str, lost: set[str], *, rotten: bool = False) -> None:
    try:
        report = survive(directory, files, moment, lost)
        faults = [one for one in report.findings if one.severity == "fault"]
        assert rotten or not faults, faults
    except BaseException as error:
        error.add_note(what)
        raise


def in_segment(moment: Moment, name: str, at: int) -> set[str]:
    """Return the messages that lie at or behind byte *at* of a segment of the delay log."""
    base = int(Path(name).stem, 16)
    ends = sorted(int(Path(one).stem, 16) for one in moment.files if Path(one).parent == Path(name).parent)
    end = next((one for one in ends if one > base), 1 << 64)
    here = sorted(found for message in moment.due if base <= (found := MessageId.parse(message).position) < end)
    before = [position for position in here if position <= base + at]
    first = before[-1] - 2 if before else base  # a batch has at most two messages
    return {message for message in moment.due if first <= MessageId.parse(message).position < end}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "messages"])
def test_a_torn_file_loses_nothing(history: History, quick: Path, kind: str) -> None:
    struck: Counter[str] = Counter()
    moment = history.newer
    names = sorted(name for name in moment.files if kind_of(name) == kind)
    name = max(names, key=lambda one: (len(one), one))  # the newest
    data = moment.files[name]
    end = len(data.rstrip(b"\0"))
    for fill in FILLS:
        for at in sorted({*range(0, end, max(end // PLACES, 1)), end - 1}):
            torn = fill(data, at)
            if torn != data:
                what = f"{name}, {fill.__name__} from {at} on"
                check(quick / "torn", moment.files | {name: torn}, moment, what, set())
                struck[fill.__name__] += 1
    print(kind, dict(struck))
    assert all(struck[fill.__name__] for fill in FILLS), struck


def test_a_torn_delay_log_loses_what_was_torn(history: History, quick: Path) -> None:
    moment, tried = history.newer, 0
    name = max(name for name in moment.files if kind_of(name) == "messages")
    data = moment.files[name]
    last = max(moment.due, key=lambda one: MessageId.parse(one).position)
    start = MessageId.parse(last).position - int(Path(name).stem, 16) - 1
    for fill in FILLS:
        for at in range(start, len(data.rstrip(b"\0")), 11 if fill is cut else 47):
            if (torn := fill(data, at)) != data:
                lost = in_segment(moment, name, at)
                check(quick / "torn", moment.files | {name: torn}, moment, f"{fill.__name__} from {at} on", lost)
                tried += 1
    print(f"{tried} tails")
    assert tried > 15


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_costs_its_messages_and_no_others(history: History, quick: Path, kind: str) -> None:
    moment, tried = history.stopped, 0
    for name in (name for name in moment.files if kind_of(name) == kind):
        data = moment.files[name]
        bits = 8 * len(data.rstrip(b"\0"))
        for bit in range((7 * tried) % 64, bits, max(bits // BITS, 1)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            lost = set[str]()
            if kind == "messages":
                behind = in_segment(moment, name, bit // 8)
                after = sorted(behind, key=lambda one: MessageId.parse(one).position)
                lost = set(after[:4])
            files = moment.files | {name: bytes(flipped)}
            check(quick / "flipped", files, moment, f"bit {bit} of {name}", lost, rotten=kind in ("messages", "a", "b"))
            tried += 1
    print(f"{kind}: {tried} bits")
    assert tried >= BITS


def test_some_files_are_older_or_newer_than_the_others(history: History, quick: Path) -> None:
    """Take older files of one kind, or one directory: only what these do not know may be lost or come again."""
    moments = {"older": history.older, "newer": history.newer, "stopped": history.stopped}
    tried: Counter[str] = Counter()
    for (word, base), (other_word, other) in permutations(moments.items(), 2):
        for kind in KINDS:
            if kind in ("messages", "store-a", "store-b"):
                continue
            files = {name: data for name, data in base.files.items() if kind_of(name) != kind}
            files |= {name: data for name, data in other.files.items() if kind_of(name) == kind}
            if files != base.files:
                check(quick / "mixed", files, base, f"{kind} of {other_word}, the others {word}", set(), rotten=True)
                tried[kind] += 1
    print(dict(tried))
    assert tried["checkpoint"]
    assert tried["a"]
    assert tried["entries"]


def test_loss_of_power_takes_what_was_not_synced_and_no_more(history: History, quick: Path) -> None:
    report = survive(quick / "reboot", history.newer.files, history.newer, set(), FakeDisk(REBOOTED))
    assert not [one for one in report.findings if one.severity == "fault"]
