"""What becomes of messages that come back from a consumer: they are handed out again, or they are dead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from qmq.broker.error_log.dead_letters import chosen, letters_of
from qmq.broker.error_log.error_log import Retries
from qmq.broker.error_log.retry import Failure, split, unpacked
from qmq.broker.groups.in_flight import HeldRange, MessageRange
from qmq.broker.groups.member import Member
from qmq.broker.groups.settings import GroupSettings
from qmq.broker.journal.record_types import Leaving, Verdict
from qmq.storage.store import ItemLog


class Returning:
    """Of one group."""

    def __init__(self, retries: Retries, dead: ItemLog) -> None:
        self.settings = GroupSettings()
        self._retries = retries
        self._dead = dead

    def back(self, member: Member, rows: Iterable[list[Any]], reasons: list[str], now_us: int) -> None:
        """A consumer hands back (start, end, verdict, delay, number of the reason) each, as far as it holds that."""
        failed = list[tuple[MessageRange, int, int, Failure]]()
        for start, end, verdict, delay_us, reason in rows:
            ranges = member.held.give_back(start, end)
            if ranges is None:
                continue
            if verdict == Verdict.RELEASE:
                self._retries.add_each(failed, False)  # numbers go by the order
                failed.clear()
                self._release(member, start, ranges, now_us, delay_us or 0)
            else:
                is_reject = verdict == Verdict.REJECT
                failed += self.failed(member.number, start, ranges, is_reject, delay_us, reasons[reason], now_us)
            member.progressed(end - start)
        self._retries.add_each(failed, False)

    def failed(
        self, consumer: int, start: int, ranges: list[HeldRange], is_reject: bool, delay_us: int | None, reason: str,
        now_us: int,
    ) -> Iterator[tuple[MessageRange, int, int, Failure]]:  # fmt: skip
        """What is to be handed out again of what has failed; the rest is dead."""
        for messages, attempt, lapses in ranges:
            if is_reject or attempt >= self.settings.max_attempts:
                held = HeldRange(messages, attempt, lapses)
                self._bury(consumer, start, held, reason or "out of attempts", now_us)
                continue
            delay = self.settings.delay_us(attempt) if delay_us is None else delay_us
            yield messages, attempt + 1, lapses, Failure(reason, consumer, start, now_us, now_us + delay)

    def let_go(self, member: Member, why: int, end: int, now_us: int) -> None:
        """A consumer leaves: what it held before that pull sequence is handed out again, or (CLOSED) dropped."""
        if why == Leaving.LAPSED:
            self.lapse(member, end, now_us)
        elif why == Leaving.LEFT:
            for start, stop in member.held.unhandled(end=end):
                self._release(member, start, list(member.held.between(start, stop)), now_us)

    def _release(self, member: Member, start: int, ranges: Iterable[HeldRange], now_us: int, delay_us: int = 0) -> None:
        failure = Failure("released", member.number, start, now_us, now_us + delay_us)
        several = [(held.messages, held.attempt, held.lapses) for held in ranges]
        self._retries.add_all(several, member.alone, failure)

    def lapse(self, member: Member, before: int, now_us: int) -> None:
        """Nobody knows which of the messages it held has stopped it, but where it was handed out one alone."""
        is_single = member.alone and member.held.count == 1 and member.held.pulls[-1].total == 1
        for start, end in member.held.unhandled(end=before):
            failure = Failure("its consumer fell silent", member.number, start, now_us, now_us)
            ranges = list(member.held.between(start, end))
            pieces = list[tuple[MessageRange, int, int]]()
            for held in ranges:
                lapses = held.lapses + is_single
                if lapses >= self.settings.max_lapses:
                    reason = f"its consumer fell silent {lapses} times"
                    self._bury(member.number, start, held._replace(lapses=lapses), reason, now_us)
                    continue
                pieces += [(piece, held.attempt, lapses) for piece in split(held.messages)]
            self._retries.add_all(pieces, True, failure)

    def revive(self, numbers: list[int], now_us: int) -> None:
        """Dead letters are handed out again, as if for the first time."""
        for letter in unpacked(chosen(self._dead, numbers)):
            failure = Failure(letter.reason, letter.consumer, letter.pull_sequence, now_us, now_us)
            self._retries.add(letter.messages, 1, 0, False, failure)
            self._dead.take_out(letter.number, letter.number + 1)

    def _bury(self, consumer: int, start: int, held: HeldRange, reason: str, now_us: int) -> None:
        self._dead.add(letters_of(consumer, start, held, reason, now_us))
