"""Damaged parts of an answer: find them, report them to the broker, and describe them to the program."""

from __future__ import annotations

from collections.abc import Sequence

from qmq.errors import BadBatch, ProtocolError
from qmq.format.pieces import AnswerDamage, PartialAnswer, Run, read_answer
from qmq.format.run import undecodable, why_undecodable
from qmq.net.protocol import frames
from qmq.net.protocol.types import cut_reason


def read_checked(answer: memoryview, begun: PartialAnswer | None = None) -> tuple[list[Run], list[AnswerDamage]]:
    """Read an answer as ``read_answer`` does, and count messages with undecodable headers as damage. *begun* is the
    part that was read while the answer arrived.
    """
    return _decodable(*(read_answer(answer) if begun is None else begun.all()))


def _decodable(runs: list[Run], damaged: list[AnswerDamage]) -> tuple[list[Run], list[AnswerDamage]]:
    bad = {
        run_index: indexes
        for run_index, run in enumerate(runs)
        if not run.is_decodable and (indexes := undecodable(run))
    }
    if not bad:
        return runs, damaged
    readable, all_damaged = list[Run](), list[AnswerDamage]()
    waiting = damaged[::-1]
    for run_index, run in enumerate(runs):
        while waiting and waiting[-1].run_index == run_index:
            all_damaged.append(waiting.pop()._replace(run_index=len(readable)))
        last = 0
        for index in bad.get(run_index, ()):
            if index > last:
                readable.append(run.slice(last, index))
            reason = why_undecodable(run, index)
            all_damaged.append(AnswerDamage(reason, run.partition, run.position, run.ordinal + index, 1, len(readable)))
            last = index + 1
        if last < run.count:
            readable.append(run if not last else run.slice(last, run.count))
    return readable, all_damaged + [damage._replace(run_index=len(readable)) for damage in reversed(waiting)]


def pack_report(damage: AnswerDamage) -> tuple[bytes, bytes]:
    """Return meta and payload of a REPORT of messages whose run_index is known."""
    payload = frames.REPORT.pack(damage.position, damage.first, damage.messages, damage.partition)
    return frames.pack_meta({"reason": cut_reason(damage.reason)}), payload


def sequences_of(
    runs: list[Run], damaged: list[AnswerDamage], number: int, ranges: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the delivery sequences [start, end) of the messages of damage *number*, in an answer whose messages
    *ranges* number.

    For every damage the count of its messages must be known. Raises ProtocolError when *ranges* number fewer messages.
    """
    damage = damaged[number]
    skip = sum(run.count for run in runs[: damage.run_index]) + sum(before.messages for before in damaged[:number])
    left, found = damage.messages, list[tuple[int, int]]()
    for first, count in zip(ranges[::3], ranges[1::3], strict=False):
        start = first + min(skip, count)
        skip -= start - first
        end = min(first + count, start + left)
        if start < end:
            found.append((start, end))
            left -= end - start
    if left:
        raise ProtocolError("the broker's answer has other messages than its ranges number")
    return found


def error_of(lost: AnswerDamage) -> BadBatch:
    """Return the error that tells a consumer of unreadable messages."""
    if lost.size:
        return BadBatch(f"{lost.size} bytes of an answer cannot be read and were left out: {lost.reason}")
    return BadBatch(
        f"{lost.messages} messages of the batch at position {lost.position} of partition {lost.partition} cannot be "
        f"read and were left out: {lost.reason}"
    )
