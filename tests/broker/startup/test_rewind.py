"""Rotten records of the pull log rewind groups; nothing is lost, and no message is in flight twice."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pytest

from qmq.broker.journal.record_types import RecordKind
from qmq.broker.ports.commands import Administer
from qmq.broker.ports.effects import Administered
from qmq.errors import Fenced
from qmq.net.protocol.types import DISPOSITIONS
from qmq.storage.disk.disk import Disk
from qmq.storage.meta.checkpoint import GROUP_STATE, GroupClaim, list_checkpoints, read_checkpoint
from qmq.storage.pull_log.records import PullRecord, list_pull_files, pull_file_path, read_pull_log
from qmq.storage.verify.verify import verify
from tests.broker.harness import Driven
from tests.broker.test_consuming import Consumer, filled, many
from tests.effort import part_of
from tests.fake_disk import FakeDisk
from tests.storage.histories import quick_directory
from tests.storage.stores import identity_of

FOLLOWED: Final = ((("",), 1), (("a.1", "b."), 2), (("a.", "b.x"), 1))
SETTINGS: Final = {"max_attempts": 3, "retry_delays_us": (1_000_000, 2_000_000), "max_session_expiries": 3}


@pytest.fixture(scope="module")
def quick() -> Iterator[Path]:
    with quick_directory() as path:
        yield path


class Killed(NamedTuple):
    """A broker that was killed in mid-work: the messages that the group follows, those confirmed as handled, and the
    records of the pull log behind the checkpoint.
    """

    path: Path
    prefixes: tuple[str, ...]
    options: dict[str, int]
    sent: set[bytes]
    places: dict[tuple[str, int], bytes]
    acked: set[bytes]
    records: list[PullRecord]


def lived(path: Path, seed: int) -> Killed:
    """Live a random life of a group with three consumers, drawn from *seed*."""
    chance = random.Random(seed)
    prefixes, partitions = FOLLOWED[seed % len(FOLLOWED)]
    options = {
        "partitions": partitions,
        "segment_bytes": 64 << 10,
        "max_frame_bytes": 32 << 10,
        "reserve_bytes": 1 << 20,
    }
    driven = Driven(path, disk=FakeDisk(), **options)
    sent, places, acked, number = set[bytes](), dict[tuple[str, int], bytes](), set[bytes](), 0
    consumers = [Consumer(driven, f"c{n}", *prefixes, connection=n + 1, **SETTINGS) for n in range(2)]
    steps = 100
    for step in range(steps):
        if step == steps // 3:
            driven.checkpoint()
        if step == steps // 2:
            consumers.append(Consumer(driven, "late", *prefixes, connection=9))
        if chance.random() < 0.5:
            subject = chance.choice(["a.1", "a.2", "b.x", "b.y"])
            bodies = [b"%s %d" % (subject.encode(), number + at) for at in range(chance.randrange(1, 5))]
            number += len(bodies)
            first = int(np.atleast_1d(driven.send(subject, *bodies).first_sequences)[0])
            places |= {(subject, first + at): body for at, body in enumerate(bodies)}
            if any(subject == one or (one in ("", "a.", "b.") and subject.startswith(one)) for one in prefixes):
                sent |= set(bodies)
        one = chance.choice(consumers)
        try:
            _act(chance, driven, one, acked)
        except Fenced:
            one.join()
            one.got.clear()
            one.expected = one.consumer_state.ack_floor
    driven.store.close(clean=False)
    return Killed(path, prefixes, options, sent, places, acked, _records(path))


def _act(chance: random.Random, driven: Driven, one: Consumer, acked: set[bytes]) -> None:
    what = chance.random()
    mine = sorted(one.got)
    if what < 0.45:
        one.pull(chance.randrange(1, 9))
    elif what < 0.65 and mine:
        chosen = chance.sample(mine, chance.randrange(1, len(mine) + 1))
        assert one.ack(*chosen) == 0
        acked |= {one.got.pop(number)[0] for number in chosen}
    elif what < 0.8 and mine:
        number = chance.choice(mine)
        one.back(number, number + 1, chance.choice(DISPOSITIONS))
        del one.got[number]
    elif what < 0.84:
        one.nonce = chance.randbytes(4)
        one.join()
        one.got.clear()
    elif what < 0.87:
        driven.advance(40_000)
    else:
        driven.advance(700)


def _records(path: Path) -> list[PullRecord]:
    claims = read_checkpoint(Disk(), path, list_checkpoints(Disk(), path)[0]).claims
    assert claims is not None
    identity, claim = identity_of(path), GroupClaim.unpack(claims.state[GROUP_STATE])
    return read_pull_log(Disk(), path / "pulls", identity.store_id, identity.secret, claim.position).records


def spoil(path: Path, record: PullRecord, bit: int) -> Path:
    """Flip a bit of a record; return its file."""
    base = max(base for base in list_pull_files(Disk(), path / "pulls") if base <= record.position)
    file = pull_file_path(path / "pulls", base)
    data = bytearray(file.read_bytes())
    data[record.position - base + bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    return file


def drained(driven: Driven, prefixes: tuple[str, ...]) -> Counter[bytes]:
    """Return all that a group still gets, whoever had it in flight."""
    found = Counter[bytes]()
    consumers = [
        Consumer(driven, name, *prefixes, nonce=b"another", connection=n + 20)
        for n, name in enumerate(("c0", "c1", "late"))
    ]
    quiet = 0
    while quiet < 8:
        driven.advance(2_000)
        quiet += 1
        for one in consumers:
            while one.pull():
                found.update(body for body, _ in one.got.values())
                assert one.ack() == 0
                one.got.clear()
                quiet = 0
    return found


def dead(driven: Driven, places: dict[tuple[str, int], bytes]) -> set[bytes]:
    (answer,) = driven.do(Administer(1, driven.request(), "dead_letters", {"group": "g"}))
    assert isinstance(answer, Administered)
    return {places[row["subject"], row["sequence"]] for row in answer.fields["rows"]}


def check(killed: Killed, path: Path, lost: list[PullRecord], chance: random.Random) -> Counter[bytes]:
    """Start without the records *lost*, and again after another kill; return the messages handed out."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(killed.path, path)
    files = {spoil(path, record, chance.randrange(8 * (12 + len(record.payload)))) for record in lost}
    torn = killed.records[-1] in lost
    driven = Driven(path, disk=FakeDisk(), **killed.options)
    told = "\n".join(driven.store.recovery.notes)
    if set(lost) - {killed.records[-1]}:
        assert all(str(file) in told for file in files) or torn
    assert driven.store.groups.generation == 1 + bool(lost)
    driven.advance(600_000)
    driven.store.close(clean=False)
    driven.open()
    found = drained(driven, killed.prefixes)
    missing = killed.sent - killed.acked - dead(driven, killed.places) - set(found)
    assert not missing, f"lost: {sorted(missing)[:5]}"
    assert set(found) <= set(killed.places.values())
    assert set(found.values()) <= {1}, "each has one holder, who acknowledges it"
    assert not drained(driven, killed.prefixes)
    driven.checkpoint()
    driven.checkpoint()
    driven.store.close(clean=True)
    assert verify(path, Disk()).is_good
    return found


@pytest.mark.parametrize("seed", range(part_of(6)))
def test_a_rotten_record_loses_nothing(quick: Path, seed: int) -> None:
    """One bit is flipped in one record, for each record."""
    killed, chance, struck = lived(quick / f"life-{seed}", seed), random.Random(seed), Counter[str]()
    print(f"seed {seed}: {len(killed.sent)} sent, {len(killed.acked)} acknowledged, {len(killed.records)} records")
    check(killed, quick / "case", [], chance)
    for number, record in enumerate(killed.records):
        if number % 3 == seed % 3 or record.kind in (RecordKind.PULL, RecordKind.ACK):
            try:
                check(killed, quick / "case", [record], chance)
            except BaseException as error:
                error.add_note(f"seed {seed}, record {number} of {len(killed.records)}, {RecordKind(record.kind).name}")
                raise
            struck[RecordKind(record.kind).name] += 1
    print(dict(struck))
    assert len(struck) >= 4, struck


@pytest.mark.parametrize("seed", range(10, 10 + part_of(6)))
def test_many_rotten_records_lose_nothing(quick: Path, seed: int) -> None:
    killed, chance = lived(quick / f"life-{seed}", seed), random.Random(seed)
    for number in range(8):
        lost = chance.sample(killed.records, chance.randrange(2, len(killed.records)))
        if number % 2:
            at = chance.randrange(len(killed.records))
            lost = killed.records[at : at + chance.randrange(2, 12)]
        try:
            check(killed, quick / "case", lost, chance)
        except BaseException as error:
            error.add_note(f"seed {seed}, case {number}")
            raise


def started_without(driven: Driven, kind: RecordKind, number: int = 0) -> None:
    """Kill the broker, spoil one record, and start again."""
    driven.store.close(clean=False)
    spoil(driven.directory, [one for one in _records(driven.directory) if one.kind == kind][number], 100)
    driven.open()


def test_a_group_gets_messages_behind_the_bad_bytes_again_and_older_acks_count(tmp_path: Path) -> None:
    driven = filled(tmp_path, 9)
    consumer = Consumer(driven, "c")
    driven.checkpoint()
    assert consumer.pull(3) == many(3)
    assert consumer.ack(0) == 0
    assert consumer.pull(3) == many(6)[3:]
    assert consumer.ack(1, 3) == 0
    started_without(driven, RecordKind.PULL, 1)
    consumer = Consumer(driven, "c", connection=2)
    assert consumer.pull() + consumer.pull() == [b"2", *many(9)[3:]], "0 and 1 were given before, 3 behind"


def test_a_late_ack_does_not_count_for_a_redelivery(tmp_path: Path) -> None:
    driven = filled(tmp_path, 4)
    consumer = Consumer(driven, "c")
    driven.checkpoint()
    assert consumer.pull(2) == many(2)
    assert consumer.pull(2) == many(4)[2:]
    late = list(consumer.got)
    started_without(driven, RecordKind.PULL)
    consumer.join()
    consumer.got.clear()
    assert consumer.pull() == many(4)
    assert min(consumer.got) > max(late), "no sequence is given twice"
    consumer.ack(*late)
    consumer.join()
    assert consumer.pull() == many(4), "all are held still"


def test_records_behind_a_rewind_count_unless_more_bytes_rot(tmp_path: Path) -> None:
    """The records of a start after a rotten record lie behind the bad bytes as well."""
    driven = filled(tmp_path, 6)
    consumer = Consumer(driven, "c")
    driven.checkpoint()
    assert consumer.pull(1) == [b"0"]
    assert consumer.pull(1) == [b"1"]
    assert consumer.pull(1) == [b"2"]
    started_without(driven, RecordKind.PULL, 1)
    consumer = Consumer(driven, "c", connection=2)
    assert consumer.pull() == [b"0"]
    assert consumer.pull(3) == [b"1", b"2", b"3"]
    assert consumer.ack() == 0
    driven.store.close(clean=False)
    kept = driven.directory.with_name("kept")
    shutil.copytree(driven.directory, kept)
    driven.open()
    assert Consumer(driven, "c", connection=3).pull() == [b"4", b"5"]
    driven.close()
    shutil.rmtree(driven.directory)
    shutil.copytree(kept, driven.directory)
    (pull, *_) = [one for one in _records(driven.directory) if one.kind == RecordKind.PULL]
    spoil(driven.directory, pull, 100)
    driven.open()
    assert Consumer(driven, "c", connection=3).pull() == many(6), "the start had read the record that is rotten now"
    driven.close()
