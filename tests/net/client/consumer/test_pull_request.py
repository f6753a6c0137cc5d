"""One pull, against a connection that the test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from qmq.errors import ConnectionLost, QmqError
from qmq.net.client.connection import Answer, BrokerConnection
from qmq.net.client.consumer.pull_request import PullRequest
from qmq.net.protocol import frames
from qmq.net.protocol.frames import FrameKind

ANSWER = Answer(FrameKind.MESSAGES, {}, memoryview(b""))


class Line:
    """Records the requests; the test answers them."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bytes, float, int]] = []
        self.told: list[tuple[int, bytes]] = []
        self.answered: Callable[[Answer | QmqError], None] | None = None

    def ask(
        self,
        kind: int,
        callback: Callable[[Answer | QmqError], None],
        meta: bytes,
        payload: bytes,
        due: float,
        flags: int,
    ) -> int:
        assert not meta
        self.asked.append((kind, payload, due, flags))
        self.answered = callback
        return 6

    def tell(self, kind: int, payload: bytes) -> None:
        self.told.append((kind, payload))

    def answer(self, answer: Answer | QmqError) -> None:
        assert self.answered is not None
        self.answered(answer)


def asking(line: Line, calls: list[str]) -> PullRequest:
    made = PullRequest(lambda: calls.append("answered"))
    made.send(cast(BrokerConnection, line), b"pull", 10, None, 5.0, frames.CHECK)
    return made


async def test_an_answer_waits_until_it_is_taken() -> None:
    line, calls = Line(), list[str]()
    made = asking(line, calls)
    assert (made.is_pending, made.max_count, line.asked) == (True, 10, [(FrameKind.PULL, b"pull", 5.0, frames.CHECK)])
    waiting = asyncio.ensure_future(made.wait(None, asyncio.get_running_loop()))
    await asyncio.sleep(0)
    line.answer(ANSWER)
    await waiting
    assert (made.is_pending, calls, made.answer) == (False, [], ANSWER)
    assert made.take() is ANSWER
    assert made.answer is None
    made.withdraw()
    assert line.told == []  # no pull is pending


async def test_an_answer_that_nobody_waits_for_is_told_of() -> None:
    line, calls = Line(), list[str]()
    made = asking(line, calls)
    line.answer(error := ConnectionLost("gone"))
    assert calls == ["answered"]
    assert made.take() is error


async def test_a_wait_ends_at_its_time_or_when_it_is_woken() -> None:
    made = asking(Line(), [])
    await made.wait(asyncio.get_running_loop().time(), asyncio.get_running_loop())
    assert (made.is_pending, made.answer) == (True, None)
    waiting = asyncio.ensure_future(made.wait(None, asyncio.get_running_loop()))
    await asyncio.sleep(0)
    made.wake()
    made.wake()
    await waiting
    made.wake()
    assert (made.is_pending, made.answer) == (True, None)


async def test_a_cancelled_wait_withdraws_the_pull() -> None:
    line = Line()
    waiting = asyncio.ensure_future(asking(line, []).wait(None, asyncio.get_running_loop()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert line.told == [(FrameKind.WITHDRAW, frames.WITHDRAW.pack(6))]
