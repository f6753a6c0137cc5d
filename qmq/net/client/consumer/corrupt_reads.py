"""What an answer lacks because it cannot be verified or decoded: reported to the broker, and got again if it can be."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Final, NamedTuple

import numpy as np

from qmq.errors import BadBatch, QmqError
from qmq.format.arriving import Arriving
from qmq.format.batch import Header
from qmq.format.layout import PIECE_HEADER, PIECE_HEADER_SIZE
from qmq.format.pieces import Damage, Run, can_end_at, read_answer
from qmq.format.run import PieceHeader, undecodable, why_undecodable
from qmq.net.client.backoff import Backoff
from qmq.net.client.broker_link import Link
from qmq.net.client.connection import Answer
from qmq.net.protocol import frames as wire
from qmq.net.protocol.frames import Found, Kind

log = logging.getLogger("qmq.client")

#: Reports of one answer: what more of it is bad is left out without a word to the broker.
MOST_REPORTS: Final = 64
#: How long all reports of one answer may take, in seconds, reconnects included.
REPORT_TIMEOUT: Final = 15.0
#: Where no header can be read the frame itself may have lied about its size: what comes behind it on that connection is
#: not understood then. An answer that stays out for so long, in seconds, ends the connection, and the next is tried.
SUSPECT_TIMEOUT: Final = 4.0
#: So often a report is made again because its own answer was damaged on the way.
_TRIES: Final = 3
_FINDINGS: Final = frozenset(map(str, Found))
#: A header that differs from a stored one in no more bytes is that one, damaged: with its mark, checksum, position and
#: stamp another one differs in about 14.
_MOST_WRONG_BYTES: Final = 8


def read_checked(answer: memoryview, begun: Arriving | None = None) -> tuple[list[Run], list[Damage]]:
    """As ``read_answer``, and messages whose headers cannot be decoded are damage too. *begun*: what of it was read."""
    return _decodable(*(read_answer(answer) if begun is None else begun.all()))


def _decodable(runs: list[Run], damaged: list[Damage]) -> tuple[list[Run], list[Damage]]:
    bad = {place: indexes for place, run in enumerate(runs) if (indexes := undecodable(run))}
    if not bad:
        return runs, damaged
    kept, all_damaged = list[Run](), list[Damage]()
    waiting = damaged[::-1]
    for place, run in enumerate(runs):
        while waiting and waiting[-1].place == place:
            all_damaged.append(waiting.pop()._replace(place=len(kept)))
        last = 0
        for index in bad.get(place, ()):
            if index > last:
                kept.append(run.slice(last, index))
            reason = why_undecodable(run, index)
            all_damaged.append(Damage(reason, run.partition, run.position, run.ordinal + index, 1, len(kept)))
            last = index + 1
        if last < run.count:
            kept.append(run if not last else run.slice(last, run.count))
    return kept, all_damaged + [damage._replace(place=len(kept)) for damage in reversed(waiting)]


class Reported(NamedTuple):
    """What the broker has found, and the runs that it sent with that, verified."""

    found: str
    payload: memoryview
    runs: list[Run]


class Mending:
    """One answer with damage in it. ``lost`` is what could not be had, after ``mend``."""

    def __init__(self, answer: memoryview, link: Link, store_id: bytes) -> None:
        """*link* leads to brokers, of which the one with that store has answered."""
        self._answer = answer
        self._link = link
        self._store_id = store_id
        self._reports_left = MOST_REPORTS
        self._until = asyncio.get_running_loop().time() + REPORT_TIMEOUT
        self._backoff = Backoff()
        self.lost: list[Damage] = []

    async def mend(self, runs: list[Run], damaged: list[Damage]) -> list[Run]:
        """*runs* and what of *damaged* can be had again, in the order of the answer."""
        return await self._mend(self._answer, runs, damaged)

    async def _mend(self, answer: memoryview, runs: list[Run], damaged: list[Damage]) -> list[Run]:
        mended, last = list[Run](), 0
        for damage in damaged:
            mended += runs[last : damage.place]
            last = damage.place
            if damage.size:
                mended += await self._unknown_bytes(answer, runs, damage)
            else:
                mended += await self._messages(damage)
        return mended + runs[last:]

    async def _messages(self, damage: Damage) -> list[Run]:
        """Messages of a batch whose place is known."""
        reported = await self._report(damage, damage.partition, damage.position)
        found = list[Run]()
        wanted = range(damage.first, damage.first + damage.messages)
        for run in _decodable(reported.runs, [])[0] if reported is not None else ():
            first = max(run.ordinal, wanted.start) - run.ordinal
            stop = min(run.ordinal + run.count, wanted.stop) - run.ordinal
            if (run.partition, run.position) == (damage.partition, damage.position) and first < stop:
                found.append(run.slice(first, stop) if stop - first < run.count else run)
        have = sum(run.count for run in found)
        if have < len(wanted):
            self.lost.append(damage._replace(messages=len(wanted) - have))
        return found

    async def _unknown_bytes(self, answer: memoryview, runs: list[Run], damage: Damage) -> list[Run]:
        """Bytes whose header is bad: by what it says, else by what lies beside them in the answer."""
        for partition, position in _places(runs, damage):
            reported = await self._report(damage, partition, position)
            if reported is None or reported.found == Found.UNKNOWN:
                continue
            found, size = _damaged_one(reported, damage, answer[damage.offset : damage.offset + damage.size])
            if size and can_end_at(answer, damage.offset + size):
                rest = answer[damage.offset + size : damage.offset + damage.size]
                found = await self._mend(answer, *_decodable(found, []))
                return found + await self._mend(rest, *read_checked(rest))
        self.lost.append(damage)
        return []

    async def _report(self, damage: Damage, partition: int, position: int) -> Reported | None:
        """Tell the broker; None when it cannot be told, or does not say."""
        for _ in range(_TRIES):
            if not self._reports_left:
                break
            self._reports_left -= 1
            try:
                async with asyncio.timeout_at(self._until):
                    answer = await self._answer_to(damage, partition, position)
            except (TimeoutError, QmqError) as error:  # no broker in time, or the client is closed
                log.debug("what is bad in an answer could not be reported: %r", error)
                break
            if answer is None:
                break
            found = answer.meta.get("found")
            runs, damaged = read_answer(answer.payload)
            if not damaged and isinstance(found, str) and found in _FINDINGS:
                return Reported(found, answer.payload, runs)
        return None

    async def _answer_to(self, damage: Damage, partition: int, position: int) -> Answer | None:
        payload = wire.REPORT.pack(position, damage.first, damage.messages, partition)
        meta = wire.pack_meta({"reason": damage.reason[:300]})
        while True:
            connection = await self._link.connected()
            if self._link.store_id != self._store_id:
                return None
            loop = asyncio.get_running_loop()
            answered: asyncio.Future[Answer | QmqError] = loop.create_future()
            # Else never overdue: the broker may wait for a slow disk, and is not dead then.
            due = loop.time() + SUSPECT_TIMEOUT if damage.size else None
            connection.ask(Kind.REPORT, functools.partial(_settle, answered), meta, payload, due)
            answer = await answered
            if isinstance(answer, Answer):
                return answer
            if not answer.retryable:
                log.debug("the broker took no report: %s", answer)
                return None
            await asyncio.sleep(self._backoff.next_delay())


def _settle(answered: asyncio.Future[Answer | QmqError], answer: Answer | QmqError) -> None:
    if not answered.done():
        answered.set_result(answer)


def _places(runs: list[Run], damage: Damage) -> list[tuple[int, int]]:
    """Where the batch of a bad header may lie, the likeliest first."""
    places = [(damage.partition, damage.position)]
    before = runs[damage.place - 1].origin if damage.place else None
    if isinstance(before, Header):
        places.append((before.partition, before.position + before.size))
    behind = runs[damage.place].origin if damage.place < len(runs) else None
    if isinstance(behind, Header) and behind.position >= damage.size:
        places.append((behind.partition, behind.position - damage.size))
    return [place for place in dict.fromkeys(places) if place[0] <= 0xFFFF]


def _damaged_one(reported: Reported, damage: Damage, bad: memoryview) -> tuple[list[Run], int]:
    """The messages that stood in bytes with a bad header, and how many of the bytes they took; none, 0: others did.

    What the answer's end has cut is taken as a whole: it was sent.
    """
    if damage.is_piece:
        return _damaged_piece(reported, damage, bad)
    runs, payload = reported.runs, reported.payload
    if reported.found == Found.SOUND and runs and isinstance(header := runs[0].origin, Header):
        start = header.data_start
        if header.size == len(payload) and _wrong_bytes(payload[:start], bad) <= _MOST_WRONG_BYTES:
            return runs, min(header.size, len(bad))
    return [], 0


def _wrong_bytes(right: memoryview, bad: memoryview) -> int:
    """How many bytes of *right* are others at the beginning of *bad*, or missing."""
    have = bad[: len(right)]
    same = np.frombuffer(right[: len(have)], np.uint8) == np.frombuffer(have, np.uint8)
    return len(right) - int(np.count_nonzero(same))


def _damaged_piece(reported: Reported, damage: Damage, bad: memoryview) -> tuple[list[Run], int]:
    """As ``_damaged_one``. What stood behind the header must be the same, and all in it but one field."""
    if len(bad) < PIECE_HEADER_SIZE:
        return [], 0
    said = PieceHeader._make(PIECE_HEADER.unpack_from(bad))
    for run in reported.runs:
        first = damage.first - run.ordinal
        if first < 0 or not 0 < damage.messages <= run.count - first:
            continue
        cut = run.slice(first, first + damage.messages)
        subject = cut.subject.encode()
        start = PIECE_HEADER_SIZE + len(subject)
        size = min(start + len(cut.data), len(bad))
        pairs = (
            (said.position, cut.position),
            (said.stored_at_us, cut.stored_at_us),
            (said.first_sequence, cut.first_sequence),
            (said.ordinal, cut.ordinal),
            (bytes(bad[PIECE_HEADER_SIZE:start]), subject),
        )
        is_same = start <= size and bad[start:size] == cut.data[: size - start]
        if is_same and sum(one != other for one, other in pairs) <= 1:
            return [cut], size
    return [], 0


def error_of(lost: Damage) -> BadBatch:
    """What a consumer is told of messages that nobody can read."""
    if lost.size:
        return BadBatch(f"{lost.size} bytes of an answer were left out, and nobody knows what they were: {lost.reason}")
    return BadBatch(
        f"{lost.messages} messages of the batch at position {lost.position} of partition {lost.partition} cannot be "
        f"read and were left out: {lost.reason}"
    )
