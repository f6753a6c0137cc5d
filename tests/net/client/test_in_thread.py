"""A result that a cancelled caller does not get is given back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from qmq.net.client.in_thread import taken_in_thread


async def test_results_and_errors_come_from_the_thread() -> None:
    given_back = list[int]()
    assert await taken_in_thread(lambda: 7, given_back.append) == 7
    with pytest.raises(ZeroDivisionError):
        await taken_in_thread(lambda: 1 // 0, given_back.append)
    assert given_back == []


@pytest.mark.parametrize("fails", [False, True])
async def test_who_is_cancelled_meanwhile_has_it_given_back(fails: bool) -> None:
    begun, go_on = threading.Event(), threading.Event()
    given_back, done = list[int](), threading.Event()

    def take() -> int:
        begun.set()
        go_on.wait(60)
        if fails:
            done.set()
            raise OSError("the disk is gone")
        return 7

    def give_back(number: int) -> None:
        given_back.append(number)
        done.set()

    taking = asyncio.ensure_future(taken_in_thread(take, give_back))
    await asyncio.to_thread(begun.wait, 60)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    go_on.set()
    assert await asyncio.to_thread(done.wait, 60)
    assert given_back == ([] if fails else [7])


async def test_who_is_cancelled_when_it_is_there_already_has_it_given_back() -> None:
    given_back, taken = list[int](), threading.Event()

    def take() -> int:
        taken.set()
        return 7

    taking = asyncio.ensure_future(taken_in_thread(take, given_back.append))
    await asyncio.sleep(0)
    assert taken.wait(60)  # the loop has not heard of it
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    await asyncio.get_running_loop().shutdown_default_executor()
    assert given_back == [7]


def test_what_is_taken_when_the_loop_has_ended_is_given_back() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()
    given_back = list[int]()

    def take() -> int:
        begun.set()
        go_on.wait(60)
        return 7

    def give_back(number: int) -> None:
        given_back.append(number)
        done.set()

    loop = asyncio.new_event_loop()
    taking = loop.create_task(taken_in_thread(take, give_back))
    loop.run_until_complete(asyncio.sleep(0))
    assert begun.wait(60)
    taking.cancel()
    loop.run_until_complete(asyncio.wait({taking}))
    loop.close()
    go_on.set()
    assert done.wait(60)
    assert given_back == [7]
