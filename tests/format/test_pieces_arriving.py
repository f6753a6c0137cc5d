"""An answer that is read while it arrives gives the same as a whole one, for any parts and with bad bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qmq.format.pieces import PartialAnswer, piece_of_run, read_answer, read_single
from tests.format.contents import Contents, contents, expected, plain, received, rich, stored

TWO: Contents = [plain("a", 3), rich("b", 20)]


def answer_of(*parts: Contents) -> bytes:
    """Return an answer of batches, the last one also as a piece of its last run."""
    batches = [stored(part) for part in parts]
    cut = piece_of_run(batches[-1], len(parts[-1]) - 1, 0, 1)[0]
    return b"".join([*batches, *cut])


def read_in(answer: bytes, steps: list[int]) -> PartialAnswer:
    """Read *answer*, which arrives so many bytes at a time."""
    place = bytearray(b"\xff" * len(answer))
    arriving, filled = PartialAnswer(memoryview(place)), 0
    for step in steps:
        place[filled : filled + step] = answer[filled : filled + step]
        filled = min(filled + step, len(answer))
        arriving.more(filled)
    place[filled:] = answer[filled:]
    return arriving


@given(st.lists(contents(max_runs=3, max_count=4), min_size=1, max_size=4), st.lists(st.integers(1, 400)))
def test_an_answer_in_parts_is_read_like_a_whole_one(parts: list[Contents], steps: list[int]) -> None:
    answer = answer_of(*parts)
    runs, damaged = read_in(answer, steps).all()
    assert damaged == []
    whole = read_answer(memoryview(answer))[0]
    assert received(runs) == received(whole)
    assert received(runs)[: len(expected(parts[0]))] == expected(parts[0])


@given(st.data())
def test_bad_bytes_in_parts_are_found_like_in_a_whole_answer(data: st.DataObject) -> None:
    answer = bytearray(answer_of(TWO, [plain("c", 2)], TWO))
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, 8 * len(answer) - 1))
        answer[bit >> 3] ^= 1 << (bit & 7)
    steps = data.draw(st.lists(st.integers(1, 600), max_size=12))
    runs, damaged = read_in(bytes(answer), steps).all()
    whole, wanted = read_answer(memoryview(bytes(answer)))
    assert (received(runs), damaged) == (received(whole), wanted)


def test_a_batch_is_verified_before_the_next_one_is_there() -> None:
    """Its bytes are not read again later."""
    first, second = bytes(stored(TWO)), bytes(stored([plain("c", 2)]))
    place = bytearray(first + second)
    arriving = PartialAnswer(memoryview(place))
    arriving.more(len(first) + 10)
    place[len(first) - 1] ^= 1
    runs, damaged = arriving.all()
    assert damaged == []
    assert [run.count for run in runs] == [3, 20, 2]


def test_a_message_that_comes_alone_is_read_like_in_any_answer() -> None:
    answer = stored([plain("a", 1)])
    single = read_single(answer)
    assert single is not None
    assert received([single]) == received(read_answer(answer)[0])
    for others in ([plain("a", 2)], [rich("a", 1)], [plain("a", 1), plain("b", 1)]):
        assert read_single(stored(others)) is None
    assert read_single(memoryview(bytes(answer) * 2)) is None


def test_no_flipped_bit_passes_in_a_message_that_comes_alone() -> None:
    answer = bytes(stored([plain("a", 1)]))
    for bit in range(8 * len(answer)):
        flipped = bytearray(answer)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        run, (runs, damaged) = read_single(memoryview(flipped)), read_answer(memoryview(flipped))
        if run is not None:
            assert not damaged
            assert received([run]) == received(runs) == expected([plain("a", 1)])
    for size in range(len(answer)):
        assert read_single(memoryview(answer)[:size]) is None
