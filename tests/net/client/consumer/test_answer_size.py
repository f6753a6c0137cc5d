"""qmq/net/client/consumer/answer_size.py: how many bytes a pull asks for."""

from __future__ import annotations

from qmq.net.client.consumer.answer_size import AnswerSize

MIB = 1 << 20


def test_a_slow_answer_is_followed_by_one_that_takes_a_second() -> None:
    size = AnswerSize(comes_once=False)
    assert size.most >= 16 * MIB
    size.came(4 * MIB, 20.0)
    assert size.most == 4 * MIB // 20
    size.came(size.most, 1.0)  # as wanted
    assert size.most == 4 * MIB // 20
    size.came(1_000, 100.0)
    assert size.most == 64 << 10


def test_each_answer_that_is_lost_is_followed_by_a_smaller_one() -> None:
    size = AnswerSize(comes_once=False)
    sizes = []
    for _ in range(4):
        size.lost(4 * MIB)
        sizes.append(size.most)
    assert sizes == [MIB, MIB // 4, MIB // 16, MIB // 16]


def test_what_comes_once_begins_small_and_grows_while_it_is_quick() -> None:
    size = AnswerSize(comes_once=True)
    size.came(100, 0.0)  # there was no more
    assert size.most == MIB // 4
    for _ in range(4):
        size.came(size.most, 0.01)
    assert size.most == 4 * MIB
