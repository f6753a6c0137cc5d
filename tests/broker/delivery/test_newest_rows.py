"""Rows that are looked at one by one, the newest or large ones, give the same messages as columns of rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from qmq.broker.delivery import select
from qmq.broker.delivery.select import PullSelection
from qmq.broker.ports.commands import Ack, Subscribe, Withdraw
from qmq.broker.ports.effects import Effect, PulledMessages, Subscribed
from tests.broker.harness import Driven, bodies_of, runs_of_answer

SUBJECTS = ("a.x", "a.y", "b.z")


class Life:
    """A consumer that pulls and acks while others send, by a seed; ``seen`` is all that it got."""

    def __init__(self, directory: Path, seed: int, group: str | None, prefix: str, *settings: tuple[str, Any]) -> None:
        self.random = random.Random(seed)
        self.driven = Driven(directory)
        self.driven.send("a.x", b"first")
        self.said = [group, prefix, settings]
        self.seen: list[object] = []
        self.waits: int | None = None
        self.open: list[int] = []
        self.join(group, prefix, settings)

    def join(self, group: str | None, prefix: str, settings: tuple[tuple[str, Any], ...]) -> None:
        start = None if group else "first"
        command = Subscribe(1, self.driven.request(), group, (prefix,), "c", start, b"n", b"c", False, settings)
        said = self.driven.do(command)
        (answer,) = [effect for effect in said if isinstance(effect, Subscribed)]
        self.subscription = answer.subscription

    def step(self) -> None:
        what = self.random.choice(["send", "send", "pull", "pull", "pull", "ack", "withdraw"])
        getattr(self, what)()

    def send(self) -> None:
        subjects = self.random.sample(SUBJECTS, self.random.choice([1, 1, 1, 1, 1, 1, 1, 2]))
        for _ in range(self.random.choice([1, 1, 1, 2, 12])):
            bodies = {subject: [b"%d" % self.driven.produced] * self.random.randint(1, 3) for subject in subjects}
            self.hear(self.driven.do(self.driven.send_command(bodies, self.random.random() < 0.5, connection=2)))

    def pull(self) -> None:
        if self.waits is None:
            least = self.random.choice([1, 1, 1, 4])
            limits = {
                "max_count": self.random.choice([least, 5, 1_000]),
                "min_count": least,
                "timeout_ms": self.random.choice([0, 60_000]),
                "max_bytes": self.random.choice([500, 4 << 20]),
            }
            command = self.driven.pull_command(self.subscription, **limits)
            self.waits = command.request
            self.hear(self.driven.do(command))

    def ack(self) -> None:
        if self.open and self.said[0] is not None:
            number = self.open.pop(self.random.randrange(len(self.open)))
            self.hear(self.driven.do(Ack(1, self.driven.request(), self.subscription, (number, number + 1))))

    def withdraw(self) -> None:
        if self.waits is not None:
            self.hear(self.driven.do(Withdraw(1, self.waits)))

    def hear(self, said: list[Effect]) -> None:
        for effect in said:
            if isinstance(effect, PulledMessages):
                self.waits = None
                self.seen.append((bodies_of(runs_of_answer(effect)), effect.ranges))
                self.open += [first + at for first, count, _ in effect.ranges for at in range(count)]

    def held(self) -> list[bytes]:
        """Return the messages in flight as a start reads them from the pull log."""
        self.driven.checkpoint()
        return bodies_of(self.driven.pull(self.subscription))


def lived(directory: Path, seed: int, *said: Any) -> list[object]:
    directory.mkdir()
    life = Life(directory, seed, *said)
    for _ in range(50):
        life.step()
    life.withdraw()
    if said[0] is not None:
        life.driven.store.close(clean=False)
        life.driven.wanted.clear()
        life.driven.open()
        life.join(*said[:2], said[2:])
        command = life.driven.pull_command(life.subscription)._replace(expected=0)
        life.hear(life.driven.do(command))
    life.seen.append(bodies_of(life.driven.pull(life.subscription)))
    life.driven.close()
    return life.seen


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[object]:
    """Return a list to which each call of that method of a selection adds what it returned."""
    method, calls = getattr(PullSelection, name), list[object]()

    def noted(*args: Any, **options: Any) -> Any:
        calls.append(method(*args, **options))
        return calls[-1]

    monkeypatch.setattr(PullSelection, name, noted)
    return calls


@pytest.mark.parametrize(
    "said",
    [
        ("g", "a."),
        ("g", "a.x"),
        ("g", ""),
        (None, "a."),
        ("g", "a.", ("expire_after_us", 3_600_000_000)),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [1, 2])
def test_rows_one_by_one_give_what_columns_do(
    tmp_path: Path, seed: int, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_row = counted(monkeypatch, "_take_entry")
    found = lived(tmp_path / "rows", seed, *said)
    looked_at = len(by_row)
    monkeypatch.setattr(select, "NEWEST_ROWS", 0)
    monkeypatch.setattr(select, "LARGE_ROWS", 0)
    monkeypatch.setattr(select, "FEW_ROWS", 1)
    by_row.clear()
    assert lived(tmp_path / "columns", seed, *said) == found
    assert len(by_row) < looked_at or said[1] == "a.x"  # rows of one subject are few in each answer


def test_what_was_taken_back_comes_first(tmp_path: Path) -> None:
    """A pull has passed more rows than it took: the row at which it stopped is not the group's cursor."""
    driven = Driven(tmp_path)
    driven.send("a.x", b"0")
    subscription = driven.subscribe("a.x")
    assert bodies_of(driven.pull(subscription)) == [b"0"]
    driven.send("a.x", b"1")
    driven.send("a.x", b"2")
    waiting_pulls = driven.pull_command(subscription, min_count=4, timeout_ms=60_000)
    assert driven.do(waiting_pulls) == []
    driven.do(Withdraw(1, waiting_pulls.request))
    driven.send("a.x", b"3")
    assert bodies_of(driven.pull(subscription)) == [b"1", b"2", b"3"]
    driven.close()


def test_what_a_pull_waited_on_comes_before_what_has_just_arrived(tmp_path: Path) -> None:
    """The pull wakes with the row that has arrived; more rows lie before it than are looked at one by one."""
    driven = Driven(tmp_path)
    subscription = driven.subscribe("a.x")
    waiting = driven.pull_command(subscription, min_count=20, timeout_ms=60_000)
    said = driven.do(waiting)
    bodies = [b"%d" % number for number in range(20)]
    for body in bodies:
        said += driven.do(driven.send_command({"a.x": [body]}, connection=2))
    (answer,) = [effect for effect in said if isinstance(effect, PulledMessages)]
    assert bodies_of(runs_of_answer(answer)) == bodies
    driven.close()


@pytest.mark.parametrize("prefix", ["a.", "", "a.x", "b."])
def test_large_batches_of_a_backlog_go_one_by_one(tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_row, by_column = counted(monkeypatch, "_take_entry"), counted(monkeypatch, "_take_rows")
    driven, wanted = Driven(tmp_path), list[bytes]()
    for number in range(40):
        subject = "b.z" if number % 8 == 0 else "a.x"
        bodies = [b"%d" % (10 * number + place) for place in range(10)]
        driven.send(subject, *bodies)
        if subject.startswith(prefix):
            wanted += bodies
    subscription, found, counts = driven.subscribe(prefix, group="g"), list[bytes](), list[int]()
    while len(found) < len(wanted):
        bodies = bodies_of(driven.pull(subscription, max_count=25))
        counts.append(len(bodies))
        found += bodies
    assert found == wanted
    assert max(counts) <= 25
    assert by_row
    assert not by_column or prefix == "a.x"  # the rows of one subject are looked up
    driven.close()


def test_a_batch_of_a_backlog_that_is_not_in_memory_is_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(tmp_path)
    for number in range(40):
        driven.send("a.x", *[b"%d" % number] * 10)
    subscription = driven.subscribe("a.", group="g")
    assert len(bodies_of(driven.pull(subscription, max_count=25))) == 20
    page_cache, asked = driven.store.partitions[0].page_cache, list[int]()
    residence = driven.store.partitions[0].message_log.residence

    def has(_: object, position: int, size: int, now_us: int | None = None) -> bool:
        asked.append(position)
        return residence.may_wait

    monkeypatch.setattr(type(page_cache), "has", has)
    assert bodies_of(driven.pull(subscription, max_count=25))[0] == b"2"
    assert asked[0] == driven.store.partitions[0].consumer_log.read_entry(2)[1]
    driven.close()
