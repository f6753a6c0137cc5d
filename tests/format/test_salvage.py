"""Salvage of a batch with bad bytes finds every sound message and no other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qmq.format.batch import parse_header
from qmq.format.pieces import read_answer
from qmq.format.salvage import marks_of, sound_pieces
from tests.format.contents import Contents, Received, contents, expected, flips, plain, received, rich, stored

THREE: Contents = [plain("a", 2), rich("b", 5), plain("c", 1)]


def salvaged(batch: memoryview, marks: list[tuple[int, int]], runs: Contents) -> list[Received]:
    wanted = [(number, 0, None) for number in range(len(runs))]
    found, damaged = read_answer(memoryview(b"".join(sound_pieces(batch, marks, wanted))))
    assert damaged == []
    return received(found)


def test_salvaged_messages_are_those_that_a_reader_takes_for_sound() -> None:
    view = stored(THREE)
    header = parse_header(view)
    everything = expected(THREE)
    for bit, flipped in flips(view):
        if bit < 8 * header.data_start:
            continue
        marks = marks_of(flipped, header)
        runs, (lost,) = read_answer(flipped)
        assert salvaged(flipped, marks, THREE) == received(runs), bit
        assert received(runs) == everything[: lost.first] + everything[lost.first + lost.messages :]


@given(contents(max_runs=3, max_count=6), st.data())
def test_marked_bytes_are_not_read(runs: Contents, data: st.DataObject) -> None:
    """Only the checksums of bad messages may be read; all other marked bytes are overwritten here."""
    view = stored(runs)
    size = len(view)
    cells = st.tuples(st.integers(0, size - 1), st.integers(1, 40)).map(lambda cell: (cell[0], min(size, sum(cell))))
    marks = data.draw(st.lists(cells, max_size=3))
    header = parse_header(view)
    touched = bytearray(view)
    for low, high in marks:
        touched[low:high] = b"\xee" * (high - low)
    found = salvaged(memoryview(touched), marks, runs)
    everything = expected(runs)
    assert found == [message for message in everything if message in found]
    if not marks:
        assert found == everything
    if any(low < header.data_start for low, _ in marks):
        assert found == []


@given(contents(max_runs=3, max_count=6), st.data())
def test_parts_of_runs_are_salvaged(runs: Contents, data: st.DataObject) -> None:
    view = stored(runs)
    number = data.draw(st.integers(0, len(runs) - 1))
    start = data.draw(st.integers(0, len(runs[number]) - 1))
    stop = data.draw(st.integers(start + 1, len(runs[number])))
    found, damaged = read_answer(memoryview(b"".join(sound_pieces(view, [], [(number, start, stop)]))))
    assert damaged == []
    before = sum(map(len, runs[:number]))
    assert received(found) == expected(runs)[before + start : before + stop]
