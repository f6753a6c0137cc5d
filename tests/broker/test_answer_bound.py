"""No answer has more bytes than the pull asked for, but for a single message, which always goes."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import msgpack
import pytest

from qmq.broker.ports.commands import Send
from qmq.broker.ports.effects import PulledMessages, Sent
from qmq.format.batch import header_crc_of, parse_header
from qmq.format.build import MessageHeader, RunContent, build_batch, make_header
from qmq.format.layout import BATCH_HEADER_SIZE, RUN_SIZE
from qmq.format.pieces import read_answer
from tests.broker.harness import START_US, Driven, runs_of_answer
from tests.effort import part_of
from tests.format.contents import set_header

#: Thousands of answers, which run three times as fast without a count of covered lines.
pytestmark = pytest.mark.no_cover

HEADER = make_header("a key")


def with_field(batch: bytes, size: int) -> memoryview:
    """Return the batch with one more field in its table, as a later version may send it."""
    header = parse_header(memoryview(batch))
    table_start = BATCH_HEADER_SIZE + RUN_SIZE * header.runs
    fields = msgpack.unpackb(batch[table_start : header.data_start])
    table = msgpack.packb(fields | {"later": "f" * size})
    view = memoryview(bytearray(batch[:table_start] + table + batch[header.data_start :]))
    set_header(view, size=len(view), table_size=len(table))
    data_start = table_start + len(table)
    set_header(view, header_crc=header_crc_of(view, data_start))
    return view


def made(runs: list[RunContent], sequence: int, field: int) -> memoryview:
    parts = build_batch(runs, created_at_us=START_US, producer_id=b"p" * 16, producer_sequence=sequence)
    whole = b"".join(parts)
    return with_field(whole, field) if field else memoryview(bytearray(whole))


def store(driven: Driven, batch: memoryview) -> None:
    (sent,) = driven.do(Send(1, driven.request(), batch, False))
    assert isinstance(sent, Sent), sent


def drain(driven: Driven, subscription: int, max_bytes: int, max_count: int) -> Counter[str]:
    """Pull all messages; check that every answer is within *max_bytes*."""
    got: Counter[str] = Counter()
    while True:
        pull = driven.pull_command(subscription, max_count=max_count, max_bytes=max_bytes)
        (answer,) = [effect for effect in driven.do(pull) if isinstance(effect, PulledMessages)]
        if not answer.messages:
            return got
        assert answer.size <= max_bytes or answer.messages == 1, (answer.size, answer.messages)
        got["answers"] += 1
        got["full"] += answer.size > max_bytes // 4
        got["messages"] += sum(run.count for run in runs_of_answer(answer))
        driven.acknowledge(subscription, answer)


@pytest.mark.parametrize("prefix", ["", "a.", "a.0"])
def test_fields_of_tables_count(tmp_path: Path, prefix: str) -> None:
    driven = Driven(tmp_path)
    for number in range(200):
        store(driven, made([RunContent("a.0", [b""], None)], number, 1_000))
    got = drain(driven, driven.subscribe(prefix), 65_536, 1_000)
    assert got["messages"] == 200
    assert got["full"] >= 3
    driven.close()


@pytest.mark.parametrize("prefix", ["", "a.", "a.0"])
def test_columns_of_a_run_that_is_cut_count(tmp_path: Path, prefix: str) -> None:
    driven = Driven(tmp_path)
    store(driven, made([RunContent("a.0", [b""] * 10_000, None), RunContent("a.1", [b"x"], None)], 0, 0))
    got = drain(driven, driven.subscribe(prefix), 10_000, 100_000)
    assert got["messages"] == 10_000 + (prefix != "a.0")
    assert got["full"] >= 10
    driven.close()


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("seed", range(part_of(4)))
def test_any_batches(tmp_path: Path, seed: int, partitions: int) -> None:
    chance = random.Random(seed)
    driven = Driven(tmp_path, partitions=partitions)
    sent: Counter[str] = Counter()
    sequence = 0
    for _ in range(50):
        subjects = chance.sample(["a.0", "a.1", "b.2", "a." + "n" * 190, "c." + "m" * 190], chance.randint(1, 5))
        rich: MessageHeader | None = HEADER if chance.random() < 0.3 else None
        runs = []
        for subject in subjects:
            count = chance.choice([1, 1, 1, 5, 90])
            size = chance.choice([0, 0, 3, 700])
            sent[subject] += count
            runs.append(RunContent(subject, [bytes(size)] * count, None if rich is None else [rich] * count))
        field = chance.choice([0, 0, 30, 300, 900])
        sent["fields"] += field > 0
        store(driven, made(runs, sequence, field))
        sequence += sum(len(run.bodies) for run in runs)
    assert sent["fields"] > 10
    for group in range(5):
        prefix = chance.choice(["", "a.", "a.0", "b.2"])
        max_bytes, max_count = chance.choice([300, 1_500, 9_000, 65_536]), chance.choice([30, 1_000_000])
        got = drain(driven, driven.subscribe(prefix, group=f"g{group}"), max_bytes, max_count)
        expected = sum(
            sent[name] for name in sent if name == prefix or (prefix in ("", "a.") and name.startswith(prefix))
        )
        assert got["messages"] == expected - (sent["fields"] if prefix == "" else 0)
    driven.close()


@pytest.mark.parametrize("prefix", ["", "a.", "a.0"])
@pytest.mark.parametrize("runs", [1, 2])
def test_pieces_around_bad_messages_count(tmp_path: Path, prefix: str, runs: int) -> None:
    """Every other message is known to be bad, so each sound one goes as a piece of its own."""
    driven = Driven(tmp_path)
    count = 40
    for number in range(12):
        contents = [RunContent(f"a.{run}", [b"x"] * count, None) for run in range(runs)]
        store(driven, made(contents, number * count * runs, 0))
    for entry in driven.store.partitions[0].consumer_log.rows(0, 1_000).tolist():
        batch = parse_header(driven.store.partitions[0].message_log.view_marked(entry[1], entry[10]))
        run_start = entry[1] + batch.data_start + entry[5] * (count * 11)
        for message in range(0, count, 2):
            assert driven.store.partitions[0].message_log.unreadable.add(run_start + 6 * count + 4 * message, 4)
    group = driven.subscribe(prefix)
    came, most = 0, 0
    while True:
        pull = driven.pull_command(group, max_bytes=20_000)
        (answer,) = [effect for effect in driven.do(pull) if isinstance(effect, PulledMessages)]
        if not answer.messages:
            break
        assert answer.size <= 20_000 or answer.messages == 1, (answer.size, answer.messages)
        found, damaged = read_answer(memoryview(b"".join(answer.buffers)))
        assert not damaged
        came += sum(run.count for run in found)
        driven.acknowledge(group, answer)
        most = max(most, answer.size)
    assert came == 12 * count // 2 * (1 if prefix == "a.0" else runs)
    assert most > 1_500
    driven.close()
