"""The fast path delivers the same messages as a selection, whatever happens around it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from qmq.broker.delivery import fast_path
from qmq.broker.delivery.fast_path import FastPath
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
def test_it_hands_out_what_selection_would(
    tmp_path: Path, seed: int, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    take = FastPath.take

    def counted(*args: Any) -> Any:
        found = take(*args)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(FastPath, "take", counted)
    found = lived(tmp_path / "straight", seed, *said)
    assert any(taken) == (len(said) == 2)  # the fast path delivers nothing to a group whose messages expire
    monkeypatch.setattr(fast_path, "MOST_ROWS", 0)
    taken.clear()
    assert lived(tmp_path / "chosen", seed, *said) == found
    assert not any(taken)


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


@pytest.mark.parametrize(("prefix", "is_fast"), [("a.", True), ("", True), ("a.x", False), ("b.", False)])
def test_whole_batches_of_a_backlog_go_by_it(
    tmp_path: Path, prefix: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches at the cursor are an answer where they are at least half of what the consumer asked for."""
    taken = []
    take = FastPath.take

    def counted(*args: Any) -> Any:
        found = take(*args)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(FastPath, "take", counted)
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
    assert any(taken[:-1]) == is_fast  # the last pull gets the newest batches
    assert sum(taken) > len(taken) // 2 or not is_fast
    driven.close()


def test_a_batch_of_a_backlog_that_is_not_in_memory_is_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(tmp_path)
    for number in range(40):
        driven.send("a.x", *[b"%d" % number] * 10)
    subscription = driven.subscribe("a.", group="g")
    assert len(bodies_of(driven.pull(subscription, max_count=25))) == 20
    part = driven.store.partitions[0]
    asked = list[int]()

    def has(_: object, position: int, size: int, now_us: int | None = None) -> bool:
        asked.append(size)
        return False

    monkeypatch.setattr(type(part.page_cache), "has", has)
    take, taken = FastPath.take, list[object]()

    def noted(*args: Any) -> Any:
        taken.append(take(*args))
        return taken[-1]

    monkeypatch.setattr(FastPath, "take", noted)
    assert len(bodies_of(driven.pull(subscription, max_count=25))) == 20
    assert taken == [None], "selection takes them, and has what is missing read"
    assert asked[0] == sum(entry[10] for entry in part.consumer_log.rows(2, 2).tolist())
    driven.close()
