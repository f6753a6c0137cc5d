"""A broker's life in files: what its directory held at a few moments, what had been acknowledged by then, and what any
directory made of these must allow.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import numpy as np

from qmq.broker.ports.commands import Send
from qmq.broker.ports.effects import PulledMessages, Refused, Sent
from qmq.format.pieces import read_answer
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.report import VerifyReport
from qmq.storage.verify.verify import verify
from tests.broker.harness import Driven, batch_of
from tests.fake_disk import FakeDisk

OPTIONS: Final = {"segment_bytes": 4 << 10, "max_frame_bytes": 3 << 10, "reserve_bytes": 1 << 20, "partitions": 2}
GROUP: Final = "billing"
ANOTHER: Final = b"another producer"

Files = dict[str, bytes]
#: subject, sequence, body
Message = tuple[str, int, bytes]


class Batch(NamedTuple):
    """An acknowledged batch: where it lies, and its messages run by run."""

    partition: int
    position: int
    size: int
    runs: tuple[tuple[Message, ...], ...]

    @property
    def messages(self) -> set[Message]:
        """All of it."""
        return {message for run in self.runs for message in run}

    def place(self, files: Iterable[str]) -> tuple[str, int]:
        """The segment among *files* that holds it, and where in that."""
        here = sorted(f for f in files if f.startswith(f"log-{self.partition}/") and f.endswith(".messages"))
        name = next(name for name in reversed(here) if int(Path(name).stem, 16) <= self.position)
        return name, self.position - int(Path(name).stem, 16)


@dataclass(slots=True)
class Moment:
    """The directory at one time, all that was acknowledged, and what the group had been given."""

    files: Files
    batches: list[Batch]
    given: set[Message]


#: An answer of a few batches.
_SOME_BYTES: Final = 6_000


@dataclass(slots=True)
class Delivered:
    """What a fresh group got of a directory, and what its pulls said of bytes that are bad."""

    messages: list[Message] = field(default_factory=list)
    damaged: int = 0


class History:
    """``older``, ``newer``: killed at two times, each behind a checkpoint; ``stopped``: after a clean stop."""

    def __init__(self, path: Path) -> None:
        self._batches: list[Batch] = []
        self._given: set[Message] = set()
        self._driven = driven = Driven(path, disk=FakeDisk(), **OPTIONS)
        subscription = driven.subscribe("", group=GROUP, start="first")
        self._send(24, "early")
        self._given |= set(drained(driven, subscription, 5, 900).messages)
        driven.checkpoint()
        self._send(5, "middle")
        self.older = self._moment()
        self._send(22, "later")
        self._given |= set(drained(driven, subscription, 9, 900).messages)
        driven.checkpoint()
        self._send(7, "last")
        self.newer = self._moment()
        driven.checkpoint()
        driven.store.close(clean=True)
        self.stopped = self._moment()
        #: Every message that was ever sent: nothing else may come out.
        self.messages = messages_of(self._batches)

    def _send(self, count: int, word: str) -> None:
        """Batches of one message, of one run and of several, over subjects old and new, of both durabilities."""
        for number in range(count):
            body = f"{word} {number} ".encode() * (3 + number % 5)
            content: dict[str, list[bytes]] = {f"order.{number % 3}": [body + b"%d" % n for n in range(1 + number % 2)]}
            if number % 4 == 3:
                content |= {f"{word}.x": [body], f"stock.{number % 2}": [body + b"y", b""]}
            named = {subject: [body + subject.encode() for body in bodies] for subject, bodies in content.items()}
            command = self._driven.send_command(named, flush=number % 2 == 0)
            (sent,) = (effect for effect in self._driven.do(command) if isinstance(effect, Sent | Refused))
            assert isinstance(sent, Sent), sent
            firsts = np.atleast_1d(sent.first_sequences).tolist()
            runs = [
                tuple((subject, first + n, body) for n, body in enumerate(bodies))
                for (subject, bodies), first in zip(named.items(), firsts, strict=True)
            ]
            self._batches.append(Batch(sent.partition, sent.position, len(command.batch), tuple(runs)))

    def _moment(self) -> Moment:
        return Moment(read_files(self._driven.directory), list(self._batches), set(self._given))


@contextmanager
def quick_directory() -> Iterator[Path]:
    """A directory in memory where the system has such: thousands of stores are made in it."""
    shared = Path("/dev/shm")
    with TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        yield Path(name)


def messages_of(batches: Iterable[Batch]) -> set[Message]:
    """All messages of some batches."""
    return {message for batch in batches for message in batch.messages}


def read_files(directory: Path) -> Files:
    """All files of a directory, by name."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def write_files(directory: Path, files: Files) -> None:
    """Make a directory that holds just these files."""
    shutil.rmtree(directory, ignore_errors=True)
    for folder in ("log-0", "log-1", "consumer-log/0", "consumer-log/1"):
        (directory / folder).mkdir(parents=True)
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)


def drained(
    driven: Driven,
    subscription: int,
    pulls: int = 10_000,
    max_bytes: int = 1 << 20,
    most: int = 1_000_000,
    until: Collection[Message] = (),
) -> Delivered:
    """Pull until nothing comes, at most so often, no more than *most* messages, or one of *until*; bad bytes are left
    out and counted as a client does.
    """
    delivered, empty = Delivered(), 0
    give_up_after = 40 if max_bytes == 1 else 2  # so many answers in a row may have nothing but what cannot be read
    while pulls and empty < give_up_after and len(delivered.messages) < most:
        if delivered.messages and delivered.messages[-1] in until:
            break
        pulls -= 1
        command = driven.pull_command(subscription, most - len(delivered.messages), max_bytes=max_bytes)
        (answer,) = (a for a in driven.do(command) if isinstance(a, PulledMessages) and a.request == command.request)
        runs, damaged = read_answer(memoryview(b"".join(answer.buffers)))
        delivered.damaged += len(damaged)
        delivered.messages += [
            (run.subject, run.first_sequence + n, bytes(body)) for run in runs for n, body in enumerate(run.bodies())
        ]
        empty = 0 if answer.size else empty + 1
    return delivered


def drained_around(driven: Driven, subscription: int, batches: list[Batch], spoiled: Batch) -> Delivered:
    """As ``drained``, for a group that has got nothing yet: *spoiled* alone comes in answers of one message, so that
    what cannot be read of it spoils no other for a client that does not ask again.
    """
    place = batches.index(spoiled)
    before = sum(len(batch.messages) for batch in batches[:place])
    delivered = drained(driven, subscription, max_bytes=_SOME_BYTES, most=before)
    near = drained(driven, subscription, max_bytes=1, until=messages_of(batches[place + 1 :]))
    behind = drained(driven, subscription, max_bytes=_SOME_BYTES)
    return Delivered(
        delivered.messages + near.messages + behind.messages, delivered.damaged + near.damaged + behind.damaged
    )


def survive(
    history: History,
    directory: Path,
    moment: Moment,
    lost: set[Message],
    *,
    unseen: Sequence[Batch] = (),
    disk: Disk | None = None,
    max_bytes: int = 1 << 20,
    spoiled: Batch | None = None,
    adds_up: bool = True,
) -> tuple[VerifyReport, int]:
    """Start a broker on *directory*: all that was acknowledged at *moment* but for *lost* comes to a fresh group, and
    all that the old group had not been given to that; nothing that was never sent comes, nothing twice; and what is
    sent now gets no position and no sequence that somebody has seen, which are those of all batches but *unseen*.

    Where bad bytes are to be met, *max_bytes* says how much of an answer they can spoil for a client that does not ask
    again; where they are in the batch *spoiled*, only answers near that one are small for the fresh group. With
    *adds_up* the messages of all groups add up, by their cursors and by records.

    Gives what verify says of it after a clean stop, and how often a client left out bad bytes.
    """
    driven = Driven(directory, disk=disk if disk is not None else FakeDisk(), **OPTIONS)
    try:
        expected = messages_of(moment.batches) - lost
        fresh = driven.subscribe("", group="fresh", start="first")
        if spoiled is None:
            delivered = drained(driven, fresh, max_bytes=max_bytes)
        else:
            delivered = drained_around(driven, fresh, moment.batches, spoiled)
        got = delivered.messages
        assert not set(got) - history.messages, "what came was never sent"
        assert not expected - set(got), f"lost: {sorted(expected - set(got))[:3]}"
        assert not [message for message, times in Counter(got).items() if times > 1], "came twice"
        again = driven.subscribe("", group=GROUP, start="first")
        rest = set(drained(driven, again, max_bytes=max_bytes).messages)
        assert not rest - history.messages
        assert not expected - moment.given - rest, f"the group lost {sorted(expected - moment.given - rest)[:3]}"
        _send_more(driven, [batch for batch in moment.batches if batch not in unseen])
        driven.checkpoint(adds_up=adds_up)
        driven.store.close(clean=True)
    except BaseException:
        driven.store.close(clean=False)
        raise
    return verify(directory, Disk()), delivered.damaged


def _send_more(driven: Driven, seen: list[Batch]) -> None:
    positions = {(batch.partition, batch.position + n) for batch in seen for n in range(len(batch.messages))}
    ends = {subject: sequence + 1 for subject, sequence, _ in sorted(messages_of(seen))}
    for number, (subject, end) in enumerate(ends.items()):
        batch = batch_of({subject: [b"new", b"er"]}, 2 * number, ANOTHER)
        (sent,) = driven.do(Send(1, driven.request(), batch, True))
        assert isinstance(sent, Sent), sent
        assert not {(sent.partition, sent.position), (sent.partition, sent.position + 1)} & positions
        assert int(np.atleast_1d(sent.first_sequences)[0]) >= end, f"{subject}: a sequence that was seen comes again"


Fill = Callable[[bytes, int], bytes]


def cut(data: bytes, at: int) -> bytes:
    """What comes from a byte on is not there."""
    return data[:at]


def zeros(data: bytes, at: int) -> bytes:
    """What comes from a byte on was never written."""
    return data[:at] + bytes(len(data) - at)


def junk(data: bytes, at: int) -> bytes:
    """What comes from a byte on is something else."""
    return data[:at] + bytes(0xA5 ^ (n * 31 & 0xFF) for n in range(len(data) - at))


FILLS: Final = (cut, zeros, junk)


def kind_of(name: str) -> str:
    """The kind of a file in a data directory."""
    path = Path(name)
    return path.suffix[1:] if path.suffix else path.name.partition("-")[0]
