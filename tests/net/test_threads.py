"""What a thread has taken is not held by nobody."""

from __future__ import annotations

import asyncio
import threading

import pytest

from qmq.net.threads import taken_in_thread


async def test_what_is_taken_comes_and_what_is_raised_too() -> None:
    given_back = list[int]()
    assert await taken_in_thread(lambda: 7, given_back.append) == 7
    with pytest.raises(ZeroDivisionError):
        await taken_in_thread(lambda: 1 // 0, given_back.append)
    assert given_back == []


@pytest.mark.parametrize("fails", [False, True])
async def test_who_is_cancelled_meanwhile_has_it_given_back(fails: bool) -> None:
    begun, go_on = threading.Event(), threading.Event()
    given_back, done = list[int](), asyncio.Event()

    def take() -> int:
        begun.set()
        go_on.wait(60)
        if fails:
            asyncio.run_coroutine_threadsafe(_set(done), loop)
            raise OSError("the disk is gone")
        return 7

    def give_back(number: int) -> None:
        given_back.append(number)
        done.set()

    loop = asyncio.get_running_loop()
    taking = asyncio.ensure_future(taken_in_thread(take, give_back))
    await asyncio.to_thread(begun.wait, 60)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    go_on.set()
    await asyncio.wait_for(done.wait(), 60)
    assert given_back == ([] if fails else [7])


async def _set(event: asyncio.Event) -> None:
    event.set()
