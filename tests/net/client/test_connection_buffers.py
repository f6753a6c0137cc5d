"""Memory for large answers: never somebody else's, and used again."""

from __future__ import annotations

import random

import numpy as np

from qmq.net.client.connection import ReceiveBuffers

MIB = 1 << 20


def address(view: memoryview) -> int:
    found: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return found


def test_a_buffer_without_views_is_used_again() -> None:
    buffers = ReceiveBuffers()
    first = buffers.buffer(3 * MIB)
    assert len(first) == 3 * MIB
    place = address(first)
    del first
    again = buffers.buffer(2 * MIB + 5)
    assert (address(again), len(again)) == (place, 2 * MIB + 5)


def test_a_view_of_a_view_keeps_it() -> None:
    buffers = ReceiveBuffers()
    part = buffers.buffer(MIB)[5:9]
    part[:] = b"mine"
    for _ in range(4):
        buffers.buffer(MIB)[:] = bytes(MIB)
    column = np.frombuffer(part, np.uint8)
    del part
    for _ in range(4):
        buffers.buffer(MIB)[:] = bytes(MIB)
    assert column.tobytes() == b"mine"


def test_clear_frees_all_buffers() -> None:
    buffers = ReceiveBuffers()
    held = buffers.buffer(MIB)
    buffers.clear()
    assert buffers._arrays == []
    held[:4] = b"mine"
    assert bytes(held[:4]) == b"mine"


def test_any_order_of_taking_and_letting_go() -> None:
    chosen = random.Random(7)
    buffers, held = ReceiveBuffers(), list[tuple[memoryview, bytes]]()
    for number in range(300):
        view = buffers.buffer(chosen.randrange(16, 3 * MIB))
        mark = number.to_bytes(16, "little")
        view[:16] = mark
        held.append((view[:16], mark))
        del view
        while held and chosen.random() < 0.6:
            kept, wanted = held.pop(chosen.randrange(len(held)))
            assert bytes(kept) == wanted
            del kept
        assert all(bytes(kept) == wanted for kept, wanted in held)
        assert len(buffers._arrays) <= 2
