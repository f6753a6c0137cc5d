"""Answers: pieces at every cut, whole batches, flipped bits everywhere, and bodies with forged batches."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qmq.errors import BadBatch
from qmq.format.batch import parse_header
from qmq.format.layout import BATCH_HEADER_SIZE, BATCH_MAGIC, PIECE_CRC_OFFSET, PIECE_HEADER, PIECE_HEADER_SIZE
from qmq.format.pieces import AnswerDamage, StoredBatch, piece_of_run, read_answer
from qmq.format.run import PieceHeader
from tests.format.contents import (
    POSITION,
    STORE,
    TABLE_SIZE,
    Contents,
    Received,
    Sent,
    contents,
    expected,
    flips,
    plain,
    received,
    reseal,
    rich,
    set_header,
    set_run,
    stored,
    with_table,
)
from tests.net.scripted import stored_batch

BOTH_ROADS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
THREE: Contents = [plain("a", 2), rich("b", 3), plain("c", 1)]


def piece(view: memoryview, run: int, start: int, stop: int | None) -> bytes:
    buffers, size = piece_of_run(view, run, start, stop)
    made = b"".join(buffers)
    assert len(made) == size
    return made


def read(answer: bytes | memoryview) -> tuple[list[Received], list[str]]:
    runs, damaged = read_answer(memoryview(answer))
    return received(runs), [damage.reason for damage in damaged]


def messages_before(runs: Contents, number: int) -> int:
    return sum(map(len, runs[:number]))


@BOTH_ROADS
@given(runs=contents(max_runs=3, max_count=6))
def test_pieces_at_every_cut(road: str, runs: Contents) -> None:
    view = stored(runs)
    everything = expected(runs)
    cutter = StoredBatch(view)
    for number, run in enumerate(runs):
        first = messages_before(runs, number)
        lengths = [len(sent.body) for sent in run]
        assert [length >= size for length, size in zip(cutter.lengths(number).tolist(), lengths, strict=True)]
        for start in range(len(run)):
            for stop in [*range(start + 1, len(run) + 1), None]:
                buffers, size = cutter.piece(number, start, stop)
                answer = b"".join(buffers)
                assert size == len(answer)
                end = len(run) if stop is None else stop
                assert read(answer) == (everything[first + start : first + end], [])


@given(runs=contents(max_runs=3, max_count=6), data=st.data())
def test_answers_of_batches_and_pieces_mixed(runs: Contents, data: st.DataObject) -> None:
    view = stored(runs)
    everything = expected(runs)
    answer, wanted = b"", []
    for _ in range(data.draw(st.integers(0, 5))):
        if data.draw(st.booleans()):
            answer += bytes(view)
            wanted += everything
            continue
        number = data.draw(st.integers(0, len(runs) - 1))
        start = data.draw(st.integers(0, len(runs[number]) - 1))
        stop = data.draw(st.integers(start + 1, len(runs[number])))
        answer += piece(view, number, start, stop)
        first = messages_before(runs, number)
        wanted += everything[first + start : first + stop]
    assert read(answer) == (wanted, [])


def several(view: memoryview, numbers: list[int]) -> bytes:
    return b"".join(StoredBatch(view).runs_piece(np.array(numbers)))


@BOTH_ROADS
@given(runs=contents(max_runs=6, max_count=6), data=st.data())
def test_any_runs_of_a_batch_make_one_piece(road: str, runs: Contents, data: st.DataObject) -> None:
    numbers = sorted(data.draw(st.sets(st.integers(0, len(runs) - 1), min_size=1)))
    everything, wanted = expected(runs), []
    for number in numbers:
        first = messages_before(runs, number)
        wanted += everything[first : first + len(runs[number])]
    assert read(several(stored(runs), numbers)) == (wanted, [])


@pytest.mark.parametrize("numbers", [[0, 1, 2], [0, 2], [1]])
def test_a_flipped_bit_in_a_piece_of_several_runs_costs_only_what_it_hits(numbers: list[int]) -> None:
    view = stored(THREE)
    made = several(view, numbers)
    everything, lasts = expected(THREE), expected([[Sent("z", b"last")]], POSITION + 10_000)
    messages = [everything[first:last] for first, last in ((0, 2), (2, 5), (5, 6))]
    wanted = [message for number in numbers for message in messages[number]]
    answer = made + bytes(stored([[Sent("z", b"last")]], POSITION + 10_000))
    losses = set()
    for bit, flipped in flips(memoryview(answer)):
        found, damaged = read(flipped)
        lost = [message for message in wanted + lasts if message not in found]
        assert found == [message for message in wanted + lasts if message not in lost], bit
        assert bool(damaged) == bool(lost), bit
        if bit < 8 * len(made) - 8:
            losses.add(len(lost))
    assert {1, len(wanted)} <= losses, "a rotten body costs one message, a rotten header the piece"


def test_rot_in_the_store_never_reaches_a_reader_through_a_piece_of_several_runs() -> None:
    everything = expected(THREE)
    wanted = everything[:2] + everything[5:]
    for bit, flipped in flips(stored(THREE)):
        if 8 * (BATCH_HEADER_SIZE - 8) <= bit < 8 * BATCH_HEADER_SIZE:
            continue  # the mark is for recovery
        if bit < 8 * parse_header(stored(THREE)).data_start:
            with pytest.raises(BadBatch, match="does not fit its checksum"):
                several(flipped, [0, 2])
            continue
        found, damaged = read(several(flipped, [0, 2]))
        assert (found == wanted) == (not damaged)
        assert found == [message for message in wanted if message in found]


def test_neighbouring_runs_with_many_bytes_are_one_slice_of_the_store() -> None:
    view = stored([plain("a", 2, 3_000), plain("b", 2, 3_000), plain("c", 1)])
    _, data = StoredBatch(view).runs_piece(np.array([0, 1]))
    assert isinstance(data, memoryview)
    assert data.obj is view.obj


def test_a_whole_run_is_one_slice_of_the_store() -> None:
    view = stored(THREE)
    buffers, _ = piece_of_run(view, 1, 0, None)
    assert len(buffers) == 2
    assert isinstance(buffers[1], memoryview)
    assert buffers[1].obj is view.obj


# ---------------------------------------------------------------------------------------------------------------------
# Rot


def answer_of_three() -> tuple[bytes, list[tuple[int, list[Received]]]]:
    """Return three stored batches one behind another: where each ends in the answer, and its messages."""
    answer, parts = b"", []
    for runs in ([plain("a", 2)], THREE, [[Sent("z", b"last")]]):
        position = POSITION + len(answer)
        answer += bytes(stored(runs, position))
        parts.append((len(answer), expected(runs, position)))
    return answer, parts


@pytest.mark.no_cover
def test_a_flipped_bit_costs_only_what_it_hits() -> None:
    """Whatever bit flips in one batch, all others are read, and none of its own messages is wrong."""
    answer, parts = answer_of_three()
    everything = [message for _, messages in parts for message in messages]
    for bit, flipped in flips(memoryview(answer)):
        found, damaged = read(flipped)
        hit = next(number for number, (end, _) in enumerate(parts) if bit < 8 * end)
        lost = [message for message in everything if message not in found]
        assert found == [message for message in everything if message not in lost], bit
        assert all(message in parts[hit][1] for message in lost), bit
        assert bool(damaged) == bool(lost), bit


def test_a_flipped_bit_in_the_data_costs_one_message() -> None:
    """A bit in a length may cost more: the starts of the neighbours are unknown then."""
    view = stored(THREE)
    start = parse_header(view).data_start
    everything = expected(THREE)
    runs_of_ordinals = [range(2), range(2, 5), range(5, 6)]
    costs = dict.fromkeys(("one message", "a run"), 0)
    for bit, flipped in flips(view):
        if bit < 8 * start:
            continue
        runs, (damage,) = read_answer(memoryview(flipped))
        lost = range(damage.first, damage.first + damage.messages)
        assert (damage.partition, damage.position) == (3, POSITION)
        assert received(runs) == everything[: lost.start] + everything[lost.stop :]
        assert sum(run.count for run in runs[: damage.run_index]) == lost.start
        if len(lost) > 1:
            assert lost in runs_of_ordinals
        costs["one message" if len(lost) == 1 else "a run"] += 1
    print(costs)
    assert costs["one message"] > costs["a run"] > 0


def test_a_flipped_bit_of_a_body_in_a_large_answer_costs_one_message() -> None:
    """Small runs of a large answer have copies of their bytes."""
    several = [stored_batch({f"a.{size}": [b"%05d" % size * 2, bytes(size)] for size in (1, 20_000, 10)})]
    several += [stored_batch({"b": [b"%05d" % (50_000 + number) * 2]}) for number in range(3)]
    several += [stored_batch({f"c.{number}": [b"%05d" % (60_000 + number) * 2] for number in range(2_000)})]
    answer, wanted = b"".join(several), [body for batch in several for body in bodies_in(batch)]
    marked = [body for body in wanted if len(body) == 10 and any(body)]
    for body in marked[:: len(marked) // 40]:
        flipped = bytearray(answer)
        flipped[answer.index(body)] ^= 1
        runs, damaged = read_answer(memoryview(flipped))
        assert [damage.messages for damage in damaged] == [1]
        left = [one for run in runs for one in run.bodies()]
        assert left == [one for one in wanted if one != body]


def bodies_in(batch: bytes) -> list[bytes]:
    runs, damaged = read_answer(memoryview(batch))
    assert not damaged
    return [body for run in runs for body in run.bodies()]


@pytest.mark.parametrize("runs", [[plain("a", 5)], [rich("a", 5)]])
def test_a_flipped_bit_in_a_cut_piece_yields_nothing_wrong(runs: Contents) -> None:
    answer = memoryview(piece(stored(runs), 0, 1, 4))
    everything = expected(runs)[1:4]
    header_end = PIECE_HEADER_SIZE + 1 + TABLE_SIZE
    payload = len(answer) - sum(len(sent.body) for sent in runs[0][1:4])
    for bit, flipped in flips(answer):
        found, damaged = read(flipped)
        assert damaged, bit
        assert [message for message in everything if message in found] == found
        if bit < 8 * header_end:
            assert found == []
        if bit >= 8 * payload and not runs[0][0].keys:
            assert len(found) == 2, "a rotten body costs one message"


@pytest.mark.parametrize("runs", [[plain("a", 5)], [rich("a", 5)]])
def test_a_flipped_bit_in_a_whole_piece_is_found(runs: Contents) -> None:
    everything = expected(runs)
    for bit, flipped in flips(memoryview(piece(stored(runs), 0, 0, None))):
        found, damaged = read(flipped)
        assert len(damaged) == 1
        assert [message for message in everything if message in found] == found != everything
        if bit < 8 * (PIECE_HEADER_SIZE + 1 + TABLE_SIZE):
            assert found == []


@pytest.mark.parametrize("runs", [[plain("a", 3)], [rich("a", 3)], THREE])
def test_rot_in_the_store_never_reaches_a_reader_through_a_cut(runs: Contents) -> None:
    """The broker cuts without checking the data: the reader finds bad bytes."""
    everything = expected(runs)[1:2]
    for bit, flipped in flips(stored(runs)):
        if 8 * (BATCH_HEADER_SIZE - 8) <= bit < 8 * BATCH_HEADER_SIZE:
            continue  # the mark is for recovery
        if bit < 8 * parse_header(stored(runs)).data_start:
            with pytest.raises(BadBatch, match="does not fit its checksum"):
                piece(flipped, 0, 1, 2)
            continue
        answer = piece(flipped, 0, 1, 2)
        found, damaged = read(answer)
        assert (found == everything) == (not damaged)
        assert found in ([], everything)


def test_every_cut_of_an_answer_gives_a_beginning_of_it() -> None:
    answer, parts = answer_of_three()
    everything = [message for _, messages in parts for message in messages]
    for size in range(len(answer)):
        found, damaged = read(answer[:size])
        ends = [0, *(end for end, _ in parts)]
        whole = sum(len(messages) for end, messages in parts if end <= size)
        assert found == everything[:whole]
        assert bool(damaged) == (size not in ends)


def test_every_cut_of_a_piece_is_found() -> None:
    for start in (0, 1):
        answer = piece(stored(THREE), 1, start, None)
        for size in range(1, len(answer)):
            assert read(answer[:size])[0] == []
            assert len(read(answer[:size])[1]) == 1


def test_damage_says_where() -> None:
    view = stored(THREE)
    view[-1] ^= 1
    _, (damage,) = read_answer(view)
    assert damage == AnswerDamage("a message of 'c' does not fit its checksum", 3, POSITION, 5, 1, 2)
    cut = bytearray(piece(stored(THREE), 1, 1, 3))
    cut[-1] ^= 1
    _, (damage,) = read_answer(memoryview(cut))
    assert damage == AnswerDamage("a message of 'b' does not fit its checksum", 3, POSITION, 4, 1, 1)
    _, (damage,) = read_answer(memoryview(b"nonsense" * 20))
    assert damage.reason == "neither a batch nor a piece begins here; 160 bytes of the answer are left out"
    assert (damage.run_index, damage.size) == (0, 160)


# ---------------------------------------------------------------------------------------------------------------------
# Bodies that look like an answer


def test_a_forged_batch_in_a_body_is_never_read() -> None:
    """Any bit of the header around it may be flipped."""
    forged = stored([[Sent("bank.transfer", b"all of it")]], position=POSITION + 77)
    forged_piece = piece(forged, 0, 0, None)
    body = b"." * 300 + bytes(forged) + forged_piece + forged_piece
    runs: Contents = [[Sent("chat", body), Sent("chat", body)]]
    behind = POSITION + len(stored(runs))
    answer = bytes(stored(runs)) + bytes(stored([[Sent("z", b"next")]], behind))
    outer = parse_header(memoryview(answer)).data_start
    after = expected([[Sent("z", b"next")]], behind)
    for bit, flipped in flips(memoryview(answer)):
        if bit == 8 * outer:
            break
        found, _ = read(flipped)
        assert {message.sent.subject for message in found} <= {"chat", "z"}, bit
        assert found[-1:] == after, bit


def test_a_batch_that_follows_is_found_by_its_position() -> None:
    """The size that leads to it has rotted, and a forged batch stands before it."""
    body = bytes(stored([[Sent("bank.transfer", b"all of it")]]))
    first = stored([[Sent("chat", body)]])
    behind = POSITION + len(first)
    answer = bytearray(bytes(first) + bytes(stored([[Sent("z", b"next")]], behind)))
    answer[8:12] = b"\xff\xff\xff\xff"
    found, damaged = read(bytes(answer))
    assert found == expected([[Sent("z", b"next")]], behind)
    assert len(damaged) == 1


# ---------------------------------------------------------------------------------------------------------------------
# A broker that lies: an error, never a crash


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"subject": 3}, "points outside of it"),
        ({"count": 0}, "points outside of it"),
        ({"count": 0xFFFFFFFF}, "points outside of it"),
        ({"offset": 0xFFFFFFFF}, "points outside of it"),
        ({"size": 0xFFFFFFFF}, "points outside of it"),
        ({"size": 0}, "points outside of it"),
    ],
)
def test_lying_records(fields: dict[str, int], reason: str) -> None:
    for runs in (THREE, THREE[:1]):
        view = stored(runs)
        set_run(view, 0, **fields)
        found, (damage,) = read(reseal(view))
        assert found == []
        assert reason in damage


@pytest.mark.parametrize(("fields", "reason"), [({"version": 2}, "version 2"), ({"flags": 0x100}, "flags 0x100")])
def test_lying_headers(fields: dict[str, int], reason: str) -> None:
    view = stored(THREE)
    set_header(view, **fields)
    found, (damage,) = read(reseal(view))
    assert (found, reason in damage) == ([], True)


def test_a_lying_table() -> None:
    found, (damage,) = read(with_table(stored(THREE), b"\x91" * 100))
    assert (found, "the table is not" in damage) == ([], True)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": 2}, "version 2"),
        ({"flags": 0xFFFF}, "flags 0xffff"),
        ({"messages": 0}, "shorter than its columns"),
        ({"messages": 0xFFFFFFFF}, "shorter than its columns"),
        ({"size": 10}, "sizes of a piece"),
        ({"size": 0xFFFFFFFF}, "sizes of a piece"),
        ({"subject_size": 0xFFFF}, "sizes of a piece"),
        ({"table_size": 0xFFFF}, "sizes of a piece"),
        ({"messages": 2}, "a run of"),
    ],
)
def test_lying_pieces(fields: dict[str, int], reason: str) -> None:
    view = bytearray(piece(stored([plain("a", 4)]), 0, 1, 4))
    header = PieceHeader._make(PIECE_HEADER.unpack_from(view))._replace(**fields)
    PIECE_HEADER.pack_into(view, 0, *header)
    seal_piece(view, header.subject_size + header.table_size)
    found, (damage,) = read(bytes(view))
    assert (found, reason in damage) == ([], True)


def seal_piece(view: bytearray, names_size: int) -> None:
    start = PIECE_HEADER_SIZE + names_size
    struct.pack_into(
        "<I", view, PIECE_CRC_OFFSET, crc32c(view[PIECE_HEADER_SIZE:start], crc32c(view[:PIECE_CRC_OFFSET]))
    )


def test_a_piece_whose_subject_is_not_text() -> None:
    view = bytearray(piece(stored([plain("a", 4)]), 0, 1, 4))
    view[PIECE_HEADER_SIZE] = 0xFF
    seal_piece(view, 1 + TABLE_SIZE)
    assert "is not text" in read(bytes(view))[1][0]


@given(st.binary(max_size=300), st.sampled_from([b"", b"QMQb", b"QMQp"]))
def test_any_bytes_are_read_to_their_end(answer: bytes, magic: bytes) -> None:
    found, damaged = read(magic + answer)
    assert found == []
    assert bool(damaged) == bool(magic + answer)


def test_a_batch_with_a_bad_header_is_not_cut() -> None:
    view = stored(THREE)
    set_header(view, created_at_us=5)
    with pytest.raises(BadBatch, match=f"the batch at position {POSITION} does not fit its checksum"):
        StoredBatch(view)
    view = stored(THREE)
    set_header(view, magic=BATCH_MAGIC ^ 1)
    with pytest.raises(BadBatch):
        StoredBatch(view)
    assert StoredBatch(stored(THREE)).header.store_id == STORE


@pytest.mark.parametrize("run", [0, 1])
def test_every_bit_of_a_single_message_is_checked(run: int) -> None:
    buffers, size = piece_of_run(stored(THREE), run, 1, 2)
    assert len(buffers) == 1, "a small part is one buffer"
    piece = b"".join(buffers)
    (found,), damaged = read_answer(memoryview(piece))
    assert (len(piece), found.count, damaged) == (size, 1, [])
    for bit in range(8 * (size - len(found.data)), 8 * size):
        bad = bytearray(piece)
        bad[bit // 8] ^= 1 << bit % 8
        runs, damaged = read_answer(memoryview(bad))
        assert (runs, len(damaged)) == ([], 1), bit
