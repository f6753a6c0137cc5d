"""kill -9 of restores and of the broker that they go to: in the end it has every archived message once."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final, NamedTuple

import pytest

import qmq
from tests.archive.archives import archive
from tests.broker_process import BrokerProcess, broker_process
from tests.faults.ledger import fresh_seed
from tests.forks import SHARED, Fork
from tests.restore.archived import Told, check_restored, told
from tests.storage.stores import Sender, close_cleanly, open_store

#: Who is killed says nothing of the lines that it ran, and starts in half the time where nobody counts them.
pytestmark = pytest.mark.no_cover

TIMEOUT_S: Final = 60
SUBJECTS: Final = ("hotel.order.created", "hotel.order.paid", "flight.order.created")
MESSAGES: Final = 12_000
RESTORE_KILLS: Final = 3
BROKER_KILLS: Final = 2


class Orders(NamedTuple):
    """An archive, and what a restore of it brings."""

    archive: Path
    wanted: list[Told]


def many_orders(root: Path, dice: random.Random) -> list[Told]:
    """An archive of some thousand batches, so that it takes many frames to restore."""
    store = open_store(root / "source", segment_bytes=1 << 20)
    sender, left = Sender(store), MESSAGES
    while left > 0:
        count = dice.choice([1, 1, 2])
        subjects = dice.sample(SUBJECTS, dice.choice([1, 1, 2]))
        sender.stage(*((subject, [dice.randbytes(60) for _ in range(count)]) for subject in subjects))
        sender.write()
        left -= count * len(subjects)
    close_cleanly(store)
    archive(root / "source", root / "archive")
    return told(root / "source")


@contextmanager
def restore_process(url: str, options: Sequence[str]) -> Iterator[Fork]:
    with TemporaryFile("w+") as stderr:
        arguments = ["restore", "--yes", "--server", url, *options]
        with SHARED(arguments, stderr) as process:
            yield process
        stderr.seek(0)
        said = stderr.read()
        assert "Traceback" not in said, said


def written(directory: Path) -> int:
    """About how many bytes a broker has written to its message log: what it extended sparsely does not count."""
    return sum(path.stat().st_blocks * 512 for path in directory.glob("log-*/*.messages"))


def until_written(directory: Path, size: int, process: Fork) -> bool:
    """Wait until the log has so many bytes; False when the restore has ended before."""
    deadline = time.monotonic() + TIMEOUT_S
    while written(directory) < size:
        assert time.monotonic() < deadline, f"the log has not come to {size} bytes"
        if process.poll() is not None:
            return False
        time.sleep(0.0005)
    return True


def finish(url: str, options: Sequence[str]) -> None:
    with restore_process(url, options) as process:
        assert process.wait(TIMEOUT_S) == 0


@pytest.fixture(scope="module")
def seed() -> int:
    """The seed of this run."""
    return fresh_seed()


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Orders:
    """An archive, and what is in it."""
    root = tmp_path_factory.mktemp("orders")
    return Orders(root / "archive", many_orders(root, random.Random(seed)))


@pytest.mark.parametrize("target", ["subjects", "group"])
def test_killed_and_repeated_restores_bring_everything_once(
    tmp_path: Path, orders: Orders, seed: int, target: str
) -> None:
    print(f"seed {seed}")
    dice = random.Random(f"{seed} {target}")
    options = ["--from", str(orders.archive), *(["--group", "g"] if target == "group" else [])]
    struck = Counter[str]()
    size = sum(path.stat().st_size for path in orders.archive.glob("segments/*/*.messages"))
    with broker_process(tmp_path / "target") as broker:
        if target == "group":
            make_groups(broker.url)
        kinds = ["restore"] * RESTORE_KILLS + ["broker"] * BROKER_KILLS
        dice.shuffle(kinds)
        for number, kind in enumerate(kinds):
            moment = (number + dice.random() / 2) / (len(kinds) + 1)
            strike(broker, kind, int(moment * size), options, struck)
        finish(broker.url, options)
        finish(broker.url, options)
        if target == "group":
            check_groups(broker.url, orders.wanted)
        assert broker.stop() == 0
    print(f"struck in the middle: {dict(struck)}")
    for kind in ("restore", "broker"):
        assert struck[kind], f"no kill of the {kind} struck a restore that was under way"
    if target == "subjects":
        check_restored(orders.wanted, tmp_path / "target")


def strike(broker: BrokerProcess, kind: str, size: int, options: list[str], struck: Counter[str]) -> None:
    """Kill -9 one of them when the log has so many bytes."""
    before = written(broker.path)
    with restore_process(broker.url, options) as process:
        is_under_way = until_written(broker.path, max(size, before + 4_096), process)
        is_under_way = is_under_way and process.poll() is None
        if kind == "broker":
            broker.kill()
            broker.start()  # and the restore goes on by itself for a while
            until_written(broker.path, written(broker.path) + 16_000, process)
        process.kill()
    if is_under_way:
        struck[kind] += 1


def make_groups(url: str) -> None:
    with qmq.connect_sync(url) as client:
        for name in ("g", "h"):
            with client.subscribe("hotel.", "flight.", group=name):
                pass


def check_groups(url: str, wanted: list[Told]) -> None:
    """The one group gets each message once, the other nothing, and nobody sees a subject."""
    got = Counter[str]()
    with qmq.connect_sync(url) as client:
        assert not list(client.subjects())
        with client.subscribe("hotel.", "flight.", group="h") as other:
            assert not other.pull(timeout=0)
        with client.subscribe("hotel.", "flight.", group="g") as mine:
            while sum(got.values()) < len(wanted):
                batch = mine.pull_batch(10_000, timeout=TIMEOUT_S)
                assert len(batch), f"only {sum(got.values())} of {len(wanted)} messages came"
                got.update(message.id for message in batch)
                batch.ack()
            assert not mine.pull(timeout=0)
    assert set(got) == {one.id for one in wanted}
    assert set(got.values()) == {1}
