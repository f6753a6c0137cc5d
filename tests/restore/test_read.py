"""Reading an archive: each selected message once, and all good messages around bad bytes."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from qmq.archive import segments
from qmq.archive.files import LocalFiles
from qmq.archive.manifest import parse_manifest
from qmq.intervals import Intervals
from qmq.restore.frames import frames_of
from qmq.restore.read import ArchiveReader, Found, RestoreStep
from qmq.restore.selection import RestoreSelection
from tests.archive.orders import Row, rows_in, time_of
from tests.faults.ledger import fresh_seed
from tests.restore.archived import orders_archive

Messages = Counter[str]


def read(
    root: Path, selection: RestoreSelection, done: dict[str, Intervals] | None = None, found: Found | None = None
) -> list[RestoreStep]:
    reader = ArchiveReader(LocalFiles(root / "archive"), selection, done or {})
    reader.found = found or {}
    return list(reader.steps())


def ids_in(steps: list[RestoreStep]) -> Messages:
    return Counter(str(run.id(at)) for step in steps for _, run in step.parts for at in range(run.count))


def us_of(row: Row) -> int:
    return int((row["stored_at"] - time_of(0)).total_seconds() * 1_000_000 + 0.5)


@pytest.fixture(params=[3, 1 << 18])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set how many batches of an index are read at a time."""
    monkeypatch.setattr(segments, "PIECE_BATCHES", request.param)


@pytest.mark.usefixtures("pieces")
def test_random_selections_get_what_they_say(tmp_path: Path) -> None:
    seed = fresh_seed()
    dice = random.Random(seed)
    orders_archive(tmp_path, 120, seed)
    rows = rows_in(tmp_path / "source")
    times = sorted(map(us_of, rows))
    for _ in range(60):
        prefix = dice.choice(["", "hotel.", "hotel.order.", "hotel.order.paid", "a", "b", "flight."])
        since, until = sorted(dice.choices([0, times[0] - 1, *times, times[-1] + 1], k=2))
        selection = RestoreSelection(prefix, since, until + 1)
        wanted = [row for row in rows if selection.takes(row["subject"]) and since <= us_of(row) <= until]
        steps = read(tmp_path, selection)
        assert ids_in(steps) == Counter(row["message_id"] for row in wanted), (seed, selection)
        assert not any(step.damage for step in steps)


@pytest.mark.usefixtures("pieces")
def test_each_byte_is_in_one_step_and_what_is_done_in_none(tmp_path: Path) -> None:
    orders_archive(tmp_path, 120)
    dice = random.Random(5)
    everything = read(tmp_path, RestoreSelection())
    assert {step.log for step in everything if step.parts}
    for before, after in pairwise(everything):
        assert before.log != after.log or before.end <= after.start
    done, first = dict[str, Intervals](), list[RestoreStep]()
    for step in everything:
        if dice.random() < 0.5:
            done.setdefault(step.log, Intervals()).add(step.start, step.end)
            first.append(step)
    assert ids_in(first) + ids_in(read(tmp_path, RestoreSelection(), done)) == ids_in(everything)


def test_what_is_stored_already_is_left_out_message_by_message(tmp_path: Path) -> None:
    told = orders_archive(tmp_path, 40)
    dice, found = random.Random(7), Found()
    left = Messages()
    for one in told:
        raw = bytes.fromhex(one.id)
        place = raw[:6], int.from_bytes(raw[6:8], "big")
        if dice.random() < 0.5:
            position = int.from_bytes(raw[8:], "big")
            found.setdefault(place, Intervals()).add(position, position + 1)
        else:
            left[one.id] += 1
    steps = read(tmp_path, RestoreSelection(), found=found)
    assert ids_in(steps) == left
    assert sum(step.found for step in steps) == len(told) - sum(left.values())


def flip(root: Path, dice: random.Random) -> tuple[Path, int]:
    """Flip one bit of some archived batch."""
    paths = sorted((root / "archive").rglob("*.messages"))
    path = dice.choice(paths)
    manifest = parse_manifest(path.with_suffix(".manifest").read_bytes(), "it")
    offset = dice.randrange(64, manifest.messages_bytes)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << dice.randrange(8)
    path.write_bytes(data)
    return path, offset


@pytest.mark.parametrize("number", range(12))
def test_of_a_batch_with_a_bad_bit_all_that_is_good_comes_and_the_rest_is_told(tmp_path: Path, number: int) -> None:
    seed = fresh_seed() + number
    dice = random.Random(seed)
    told = orders_archive(tmp_path, 30, seed)
    path, offset = flip(tmp_path, dice)
    steps = read(tmp_path, RestoreSelection())
    (damage,) = [step.damage for step in steps if step.damage is not None]
    base = int(path.stem, 16)
    assert damage.start <= base + offset < damage.end
    assert damage.file == str(path)
    came = ids_in(steps)
    assert set(came.values()) == {1}
    missing = [one.id for one in told if one.id not in came]
    assert 0 < len(missing) == (damage.messages or len(missing)), f"seed {seed}"
    (step,) = [step for step in steps if step.damage is not None]
    assert step.is_settled == bool(step.parts)


def test_a_segment_that_is_gone_is_told_of_and_the_others_come(tmp_path: Path) -> None:
    told = orders_archive(tmp_path, 120)
    paths = sorted((tmp_path / "archive").rglob("*.messages"))
    assert len(paths) > 2
    paths[0].unlink()
    paths[1].with_suffix(".index").write_bytes(b"no index")
    steps = read(tmp_path, RestoreSelection())
    damages = [step for step in steps if step.damage is not None]
    assert [step.damage.file for step in damages if step.damage is not None] == [str(paths[0]), str(paths[1])]
    assert not any(step.is_settled for step in damages)
    assert 0 < sum(ids_in(steps).values()) < len(told)


def test_frames_have_all_of_it_within_their_bounds(tmp_path: Path) -> None:
    told = orders_archive(tmp_path, 300)
    steps = read(tmp_path, RestoreSelection())
    frames = list(frames_of(iter(steps), 8_000))
    assert sum(frame.counts.restored for frame in frames) == len(told)
    assert all(sum(len(batch.buffer) for batch in frame.batches) <= 8_000 for frame in frames)
    assert all(len(frame.batches) <= 1_024 for frame in frames)
    done = Counter((log, start, end) for frame in frames for log, start, end in frame.done)
    assert done == Counter((step.log, step.start, step.end) for step in steps)
    known = set[str]()
    for frame in frames:  # where progress may be kept, all that came before is dealt with as a whole
        known |= {batch.first.hex() for batch in frame.batches}
        if frame.is_whole:
            done_now = {place for one in frames[: frames.index(frame) + 1] for place in one.done}
            firsts = [
                str(step.parts[0][1].id(0)) for step in steps
                if step.parts and (step.log, step.start, step.end) not in done_now
            ]  # fmt: skip
            assert not known & set(firsts)
