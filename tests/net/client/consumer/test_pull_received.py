"""Messages that were received and not handed out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qmq.format.pieces import read_answer
from qmq.net.client.consumer.message import messages_of
from qmq.net.client.consumer.pull import ReceivedRuns
from tests.net.client.consumer.test_pull import batch, bodies


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 7)), max_size=20), st.lists(st.integers(1, 5), max_size=8))
def test_received_messages_are_handed_out_in_order_in_any_parts(
    takes: list[tuple[bool, int]], sizes: list[int]
) -> None:
    wanted = [b"%d %d" % (run, number) for run, size in enumerate(sizes) for number in range(size)]
    answer = b"".join(batch(*(b"%d %d" % (run, number) for number in range(size))) for run, size in enumerate(sizes))
    kept = ReceivedRuns()
    kept.put_back(read_answer(memoryview(answer))[0])
    came: list[bytes] = []
    for back, count in takes:
        runs = kept.take(count)
        if back:
            kept.put_back(runs)
        else:
            came += bodies(messages_of(runs))
    assert came + bodies(messages_of(kept.take(1_000))) == wanted
    assert kept.count == 0
