"""The ledger of a soak: what was sent, acknowledged, delivered, handled and confirmed, by message number.

Each column is a file of one number a message, mapped by all processes of the soak: a process that is killed leaves what
it had written, nothing is passed on, and an hour of tens of millions of messages costs a byte or two a message and
group, on disk. Each sender has a region of numbers of its own; a file has holes where nobody sent.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from qmq import Message
from tests.soak.plan import BLOCK, GROUPS, Group, Plan

#: Of a message that was sent. A maybe-duplicate may be there twice, as its receipt says.
OPEN, ACKNOWLEDGED, MAYBE_TWICE, FAILED, UNKNOWN = 1, 2, 3, 4, 5
_CHUNK: Final = 1 << 20
#: Of each kind of fault so many are named; all are counted.
NAMED: Final = 5
#: How much earlier than its time a delayed message may seem to come: clocks are read at two places.
_EARLY_US: Final = 2_000
_SHAPE: Final = "ledger.json"
_VIOLATIONS: Final = "violations"


def id_number(message_id: str) -> int:
    """A message's id as 61 bits; none of a soak's are likely to be the same."""
    return int(message_id, 16) % ((1 << 61) - 1)


class Row:
    """What one group did with each message: times got, whether handled, confirmed, dead."""

    def __init__(self, directory: Path, name: str, size: int) -> None:
        self.name = name
        self.got = column(directory, f"{name}-got", np.uint8, size)
        self.handled = column(directory, f"{name}-handled", np.uint8, size)
        self.confirmed = column(directory, f"{name}-confirmed", np.uint8, size)
        self.dead = column(directory, f"{name}-dead", np.uint8, size)


class Ledger:
    """Of one soak, in a directory; every process opens it for itself."""

    def __init__(self, directory: Path) -> None:
        shape = json.loads((directory / _SHAPE).read_text())
        self.directory = directory
        self.plan = Plan(shape["seed"])
        self.region = int(shape["region"])
        self.size = self.region * int(shape["senders"])
        self.sent = column(directory, "sent", np.uint8, self.size)
        self.ids = column(directory, "ids", np.uint64, self.size)

    @classmethod
    def create(cls, directory: Path, seed: int, senders: int, messages: int) -> Self:
        """A new one, for so many messages of each sender."""
        directory.mkdir(parents=True)
        region = -(-messages // BLOCK) * BLOCK
        (directory / _SHAPE).write_text(json.dumps({"seed": seed, "senders": senders, "region": region}))
        return cls(directory)

    def row(self, name: str) -> Row:
        """The row of a group, or of a member of a broadcast."""
        return Row(self.directory, name, self.size)

    # --- senders -----------------------------------------------------------------------------------------------------

    def acknowledged(self, number: int, message_id: str, maybe_twice: bool) -> None:
        """Its sender has a receipt."""
        self.ids[number] = id_number(message_id)
        self.sent[number] = MAYBE_TWICE if maybe_twice else ACKNOWLEDGED

    # --- consumers ---------------------------------------------------------------------------------------------------

    def got(self, row: Row, message: Message, now_us: int) -> int:
        """A consumer was handed *message*: its number. What is wrong with it is written down."""
        try:
            number = self.plan.number_of(message.body)
            if number >= self.size or not self.sent[number]:
                raise ValueError(number)
        except (struct.error, ValueError):
            self.violation("never sent", row, -1)
            raise
        if row.confirmed[number]:
            self.violation("confirmed, and handed out again", row, number)
        if row.got[number] < 255:
            row.got[number] += 1
        planned = self.plan.message(number)
        if (message.subject, message.body, message.key, message.tags) != (
            planned.subject, planned.body, planned.key, planned.tags,
        ):  # fmt: skip
            self.violation("not what was sent", row, number)
        if planned.delay and now_us + _EARLY_US < message.created_at_us + int(planned.delay * 1e6):
            self.violation("delivered before it was due", row, number)
        return number

    def confirmed(self, row: Row, numbers: list[int]) -> None:
        """The broker has confirmed the acknowledgements of these."""
        at = np.array(numbers, np.intp)
        for number in at[row.confirmed[at] != 0].tolist():
            self.violation("confirmed twice", row, number)
        row.confirmed[at] = 1

    def violation(self, what: str, row: Row, number: int) -> None:
        """Write down something that may not be. Lines are short, so those of several processes do not mix."""
        line = json.dumps([what, row.name, number]) + "\n"
        file = os.open(self.directory / _VIOLATIONS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    # --- the end -----------------------------------------------------------------------------------------------------

    def bury(self, row: Row, ids: Iterable[int]) -> int:
        """These, by their `id_number`, are dead letters, or were; how many of them nobody has a receipt of."""
        wanted = np.unique(np.fromiter(ids, np.uint64))
        found = 0
        for chunk in self._chunks():
            dead = np.isin(self.ids[chunk], wanted) & (self.sent[chunk] != 0)
            row.dead[chunk][dead] = 1
            found += int(np.count_nonzero(dead))
        return len(wanted) - found

    def check(self) -> Account:
        """Hold what every group did against what was acknowledged."""
        account = Account()
        for chunk in self._chunks():
            sent = self.sent[chunk]
            for state, name in (
                (ACKNOWLEDGED, "acknowledged"), (MAYBE_TWICE, "maybe twice"), (FAILED, "failed"), (UNKNOWN, "unknown")
            ):  # fmt: skip
                account.counts[name] += int(np.count_nonzero(sent == state))
            account.add("sent and never answered", "senders", chunk.start, sent == OPEN)
        for group in GROUPS:
            for name in group.rows:
                self._check_row(group, self.row(name), account)
        self._read_violations(account)
        return account

    def _check_row(self, group: Group, row: Row, account: Account) -> None:
        counts = account.rows.setdefault(row.name, Counter())
        for chunk in self._chunks():
            sent = self.sent[chunk]
            if not sent.any():
                continue
            numbers = np.arange(chunk.start, chunk.stop, dtype=np.uint64)
            stored = (sent == ACKNOWLEDGED) | (sent == MAYBE_TWICE)
            wanted = self.plan.is_for(group, numbers)
            handled, dead, got = row.handled[chunk] != 0, row.dead[chunk] != 0, row.got[chunk]
            due = stored & wanted
            counts["due"] += int(np.count_nonzero(due))
            counts["handled"] += int(np.count_nonzero(due & handled))
            counts["confirmed"] += int(np.count_nonzero(due & (row.confirmed[chunk] != 0)))
            counts["dead"] += int(np.count_nonzero(due & dead & ~handled))
            counts["never handed out, expired"] += int(np.count_nonzero(due & dead & (got == 0)))
            counts["got again"] += int(np.count_nonzero(due & (got > 1)))
            account.add("lost", row.name, chunk.start, due & ~handled & ~dead)
            account.add("not for this group", row.name, chunk.start, (got > 0) & ~wanted)
            account.add("sent in vain, and got", row.name, chunk.start, (got > 0) & (sent == FAILED))
            # Handlers fail or reject what dies; what dies unseen was too old.
            unseen = dead & (got == 0) & ~self.plan.expires(numbers)
            account.add("dead, and never handed out", row.name, chunk.start, unseen)

    def _read_violations(self, account: Account) -> None:
        try:
            lines: Iterator[str] = iter((self.directory / _VIOLATIONS).read_text().splitlines())
        except FileNotFoundError:
            return
        for line in lines:
            what, row, number = json.loads(line)
            if what.startswith("confirmed") and self.sent[number] in (MAYBE_TWICE, UNKNOWN):
                account.counts["came twice, as the receipt says"] += 1
            else:
                account.note(what, row, [number])

    def _chunks(self) -> Iterator[slice]:
        for start in range(0, self.size, _CHUNK):
            yield slice(start, min(start + _CHUNK, self.size))


@dataclass
class Account:
    """What became of the messages of a soak: counts, by group, and each thing that may not be."""

    counts: Counter[str] = field(default_factory=Counter)
    rows: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: Counter[str] = field(default_factory=Counter)
    named: dict[str, list[int]] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not self.wrong

    def add(self, what: str, where: str, first: int, chosen: NDArray[np.bool_]) -> None:
        """Note the chosen of the numbers from *first* on."""
        if chosen.any():
            self.note(what, where, (np.flatnonzero(chosen) + first).tolist())

    def note(self, what: str, where: str, numbers: list[int]) -> None:
        """Note something wrong with these messages."""
        key = f"{where}: {what}"
        self.wrong[key] += len(numbers)
        named = self.named.setdefault(key, [])
        named += numbers[: NAMED - len(named)]

    def __str__(self) -> str:
        lines = [", ".join(f"{count:,} {name}" for name, count in self.counts.items() if count)]
        for row, counts in self.rows.items():
            lines.append(f"{row}: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
        for what, count in self.wrong.items():
            lines.append(f"WRONG {what}: {count:,}, messages {self.named[what]}")
        return "\n".join(lines)


def column(directory: Path, name: str, kind: Any, size: int) -> NDArray[Any]:
    """A column, made when it is not there; a file with holes."""
    length = size * np.dtype(kind).itemsize
    file = os.open(directory / f"{name}.column", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.ftruncate(file, length)
        return np.frombuffer(mmap.mmap(file, length), kind)
    finally:
        os.close(file)
