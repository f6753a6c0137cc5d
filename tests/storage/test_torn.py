"""Every file cut, zeroed or filled with junk from bytes all over its last writes on, and older or newer than others:
the broker starts, all that was acknowledged is there, and verify has nothing to say after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any, Final

import pytest

from qmq.errors import BadBytes
from qmq.format.layout import CHECKPOINT_MAGIC, CHECKPOINT_VERSION, IDENTITY_MAGIC, IDENTITY_VERSION
from qmq.storage.disk.disk import Disk
from qmq.storage.disk.envelope import unpack_envelope
from qmq.storage.meta.checkpoint import list_checkpoints, read_checkpoint
from qmq.storage.verify.report import VerifyReport
from tests import effort
from tests.fake_disk import REBOOTED, FakeDisk
from tests.storage.histories import (
    FILLS,
    Batch,
    Files,
    Fill,
    History,
    Message,
    Moment,
    cut,
    kind_of,
    messages_of,
    survive,
    write_files,
)

#: Long, and others pass the same lines: several times as fast where nobody counts lines.
pytestmark = pytest.mark.no_cover

DERIVED: Final = ("entries", "order", "index")
APPENDED: Final = ("subjects", "messages", "entries", "index")
KINDS: Final = ("store", "lock", "checkpoint", "subjects", "messages", *DERIVED)


def _last_writes(before: Files, after: Files, name: str) -> list[int]:
    """Places among the bytes of a file that were written last, from the first that differs to the last that is no zero:
    all of them, but of long writes only 48 bytes at the beginning and 48 at the end.
    """
    old, new = before.get(name, b"") if kind_of(name) in APPENDED else b"", after[name].rstrip(b"\0")
    first = next((n for n in range(len(new)) if old[n : n + 1] != new[n : n + 1]), len(new))
    return sorted({*range(first, len(new))[:48], *range(first, len(new))[-48:]})


def _step(fill: Fill, *, every: bool) -> int:
    """A file is cut at every fifth byte, by default every tenth, in time at each byte of a record; fewer are enough for
    what else may follow, and for files of a kind beyond one.
    """
    return effort.every((5 if fill is cut else 9) if every else 41)


def _hit(moment: Moment, name: str, at: int) -> list[Batch]:
    """The batches that do not lie before byte *at* of a segment."""
    placed = [(batch, *batch.place(moment.files)) for batch in moment.batches]
    return [batch for batch, file, start in placed if file == name and start + batch.size > at]


def _check(history: History, directory: Path, files: Files, moment: Moment, what: str, **more: Any) -> VerifyReport:
    """A broker starts on *files* and serves; an error says *what* they are."""
    write_files(directory, files)
    try:
        report, _ = survive(history, directory, moment, more.pop("lost", set()), **more)
        return report
    except BaseException as error:
        error.add_note(what)
        raise


def _clean(report: VerifyReport, what: str, *but: str) -> None:
    """Nothing is wrong after, with files other than *but*."""
    faults = [finding for finding in report.findings if finding.severity == "fault"]
    assert not [fault for fault in faults if str(fault.file.relative_to(report.directory)) not in but], (what, faults)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("messages", "lock")])
def test_a_torn_file_loses_nothing(history: History, quick: Path, kind: str) -> None:
    struck: Counter[str] = Counter()
    moment = history.newer
    newest = max(name for name in moment.files if kind_of(name) == "checkpoint")
    names = [name for name in moment.files if kind_of(name) == kind and (kind != "checkpoint" or name == newest)]
    for (number, name), fill in product(enumerate(reversed(names)), FILLS):
        for at in _last_writes(history.older.files, moment.files, name)[:: _step(fill, every=number == 0)]:
            torn = fill(moment.files[name], at)
            if torn != moment.files[name]:
                what = f"{name}, {fill.__name__} from byte {at} on"
                _clean(_check(history, quick / "torn", moment.files | {name: torn}, moment, what), what)
                struck[fill.__name__] += 1
    print(kind, dict(struck))
    assert all(struck[fill.__name__] for fill in FILLS), struck


@pytest.mark.parametrize("name", ["checkpoint-2", "store-a"])
def test_small_files_are_known_to_be_torn_at_every_byte(history: History, name: str) -> None:
    data = history.newer.files[name]
    magic, version = (CHECKPOINT_MAGIC, CHECKPOINT_VERSION) if "-2" in name else (IDENTITY_MAGIC, IDENTITY_VERSION)
    assert unpack_envelope(data, magic, version, name)
    for at, fill in product(range(len(data)), FILLS):
        if fill(data, at) != data:
            with pytest.raises(BadBytes):
                unpack_envelope(fill(data, at), magic, version, name)


def test_a_lock_may_say_anything(history: History, quick: Path) -> None:
    for text in (b"", b"\0" * 40, b"\xff" * 300, b"process 1 on"):
        moment, what = history.newer, f"a lock that says {text!r}"
        _clean(_check(history, quick / "torn", moment.files | {"lock": text}, moment, what), what)


def _claimed(history: History, directory: Path) -> dict[str, int]:
    """How much of each segment the last checkpoint of the newer moment knows."""
    write_files(directory, history.newer.files)
    claims = read_checkpoint(Disk(), directory, list_checkpoints(Disk(), directory)[0]).claims
    assert claims is not None
    return {
        f"log-{number}/{span.base:016x}.messages": span.end - span.base
        for number, partition in enumerate(claims.partitions)
        for span in partition.segments
    }


@pytest.mark.parametrize("by", ["kill", "power"])
def test_a_torn_message_log_loses_what_was_torn(history: History, quick: Path, by: str) -> None:
    """By kill -9 only the last batch can be torn, which was not acknowledged; a loss of power takes any that were not
    synced, seen or not.
    """
    struck: Counter[str] = Counter()
    claimed = _claimed(history, quick / "torn")
    moment = history.newer
    for name, data in moment.files.items():
        if kind_of(name) != "messages" or not (unsynced := _hit(moment, name, claimed.get(name, 0))):
            continue
        first = unsynced[-1 if by == "kill" else 0].place(moment.files)[1]
        every = by == "kill" and name.startswith("log-0")
        end = len(data.rstrip(b"\0"))
        for fill in FILLS:
            for at in range(first, end, _step(fill, every=every)):
                what = f"{name}, {fill.__name__} from byte {at} on"
                hit = _hit(moment, name, at) if fill(data, at) != data else []
                more: dict[str, Any] = {"unseen": hit} if by == "kill" else {"disk": FakeDisk(REBOOTED)}
                files = moment.files | {name: fill(data, at)}
                _clean(_check(history, quick / "torn", files, moment, what, lost=messages_of(hit), **more), what)
                struck[fill.__name__] += 1
    print(by, dict(struck))
    assert all(struck[fill.__name__] > 10 for fill in FILLS), struck


def _mixtures(history: History, names: Callable[[str], str]) -> Iterator[tuple[str, str, Files, Moment, Moment]]:
    """Files of one moment but for those that *names* gives one name, which are of another: that name, what this is, the
    files, the moment of most and that of the others.
    """
    moments = {"older": history.older, "newer": history.newer, "stopped": history.stopped}
    for (base_word, base), (word, other) in permutations(moments.items(), 2):
        for key in sorted({names(name) for name in (*base.files, *other.files)}):
            files = {name: data for name, data in base.files.items() if names(name) != key}
            files |= {name: data for name, data in other.files.items() if names(name) == key}
            if files != base.files:
                yield key, f"{key} of {word}, the others {base_word}", files, base, other


@pytest.mark.parametrize("names", [kind_of, str], ids=["kinds", "files"])
def test_some_files_are_older_or_newer_than_the_others(
    history: History, quick: Path, names: Callable[[str], str]
) -> None:
    struck: Counter[str] = Counter()
    for key, what, files, base, other in _mixtures(history, names):
        lost, changed = set[Message](), [name for name in files if files[name] != base.files.get(name)]
        if names is kind_of and key == "messages":
            lost = messages_of(base.batches) - messages_of(other.batches)
        elif names is str and kind_of(key) == "messages":
            hit = [batch for batch in base.batches if batch.place(base.files)[0] == key]
            lost = messages_of(hit) - messages_of(other.batches)
        given = replace(base, given=base.given | other.given)
        # A newer checkpoint says that sequences are gaps whose messages an older log has.
        more = {"adds_up": False, "max_bytes": 1 if lost else 6_000}
        report = _check(history, quick / "mixed", files, given, what, lost=lost, **more)
        _clean(report, what, *(changed if lost else ()))
        struck[kind_of(key) if names is str else key] += 1
    print(dict(struck))
    assert all(struck[kind] for kind in KINDS), struck
