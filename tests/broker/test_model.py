"""Random histories against a model in plain lists: a group gets each visible message once, each subject in order.

Every message is acked at once, and a kill undoes no ack. A refused batch is not stored, and a repeat is not stored
again.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qmq.broker.ports.commands import Ack, Disconnected, Send, Unsubscribe, Withdraw
from qmq.broker.ports.effects import Acked, Effect, PulledMessages, Refused, Sent, Unsubscribed
from qmq.errors import Fenced, StorageFull, UnknownSubscription
from tests.broker.harness import Driven, runs_of_answer
from tests.effort import part_of
from tests.fake_disk import FakeDisk

SUBJECTS = ["a.x", "a.y", "a.x.z", "b", "b.x"]
PREFIXES = [(prefix,) for prefix in ["", "a.", "a.x", "a.x.", "b"]] + [("a.", "b"), ("b", "a.x", "b.x")]
GROUPS = ["g", "h"]

contents = st.dictionaries(st.sampled_from(SUBJECTS), st.integers(1, 4), min_size=1, max_size=4)
sends = st.tuples(
    st.just("send"),
    st.lists(st.tuples(contents, st.booleans()), min_size=1, max_size=3),  # in one turn
    st.sampled_from([0, 0, 0, 1, 2]),  # which write fails
)
pulls = st.tuples(
    st.just("pull"),
    st.sampled_from(GROUPS),
    st.sampled_from(PREFIXES),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([0, 50]),
    st.sampled_from([1, 300, 1 << 20]),
)
repeats = st.tuples(st.just("repeat"), st.integers(0, 30), st.booleans())
others = st.sampled_from([("sync",), ("restart",), ("crash",), ("advance",), ("checkpoint",), ("read",), ("forget",)])
leaves = st.tuples(st.sampled_from(["withdraw", "unsubscribe", "disconnect"]), st.integers(0, 30))
histories = st.lists(st.one_of(sends, sends, pulls, pulls, pulls, repeats, others, leaves), max_size=30)


class Batch:
    """A batch that was sent once or several times."""

    def __init__(self, command: Send, contents: dict[str, list[bytes]]) -> None:
        self.bytes = bytes(command.batch)
        self.contents = contents
        self.stored = False


class Model:
    """The stored messages, and those that each group got, by subject."""

    def __init__(self, driven: Driven) -> None:
        self.driven = driven
        self.stored: dict[str, list[bytes]] = {subject: [] for subject in SUBJECTS}
        self.got: dict[str, dict[str, list[bytes]]] = {group: {name: [] for name in SUBJECTS} for group in GROUPS}
        self.followed: dict[str, set[str]] = {group: set() for group in GROUPS}
        self.owner: dict[int, tuple[str, int]] = {}  # group and subscription, by pull request
        self.batches: list[Batch] = []
        self.pulls: list[tuple[int, int, int]] = []  # connection, subscription, request; since the start

    def store(self, batches: dict[int, Batch], effects: list[Effect]) -> None:
        """Note sent batches by request, without refused ones."""
        refused = {effect.request for effect in effects if isinstance(effect, Refused)}
        for request, batch in batches.items():
            if request in refused or batch.stored:
                continue
            batch.stored = True
            for subject, bodies in batch.contents.items():
                self.stored[subject] += bodies

    def take(self, effects: list[Effect]) -> None:
        """Note what the broker said, check that every message is the next one of its subject in its group, and
        acknowledge it.
        """
        for effect in effects:
            if not isinstance(effect, PulledMessages):
                assert isinstance(effect, Sent | Unsubscribed | Acked) or (
                    isinstance(effect, Refused) and isinstance(effect.error, StorageFull | UnknownSubscription | Fenced)
                )
                continue
            name, subscription = self.owner[effect.request]
            group = self.got[name]
            for run in runs_of_answer(effect):
                mine = group[run.subject]
                assert run.first_sequence == len(mine)
                mine += run.bodies()
                assert self.stored[run.subject][: len(mine)] == mine
            pairs = tuple(one for first, count, _ in effect.ranges for one in (first, first + count))
            if pairs:
                self.take(self.driven.do(Ack(effect.connection, self.driven.request(), subscription, pairs)))


def matching(prefixes: tuple[str, ...]) -> set[str]:
    return {
        subject
        for subject in SUBJECTS
        for prefix in prefixes
        if subject == prefix or ((prefix.endswith(".") or not prefix) and subject.startswith(prefix))
    }


@settings(max_examples=part_of(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    history=histories,
    partitions=st.sampled_from([1, 3]),
    forgets=st.sampled_from([None, 0.0, 0.1, 1.0]),
    seed=st.integers(0, 99),
)
def test_histories(history: list[tuple], partitions: int, forgets: float | None, seed: int) -> None:  # type: ignore[type-arg]
    with tempfile.TemporaryDirectory() as directory:
        driven = Driven(
            Path(directory, "first"),
            auto_sync=False,
            disk=FakeDisk("boot-1") if forgets is None else FakeDisk("boot-1", forgets=forgets, seed=seed),
            partitions=partitions,
            segment_bytes=64 << 10,
            max_frame_bytes=16 << 10,
        )
        driven.auto_read = forgets is None
        model = Model(driven)
        for number, step in enumerate(history):
            run_step(driven, model, number, step)
        while driven.wanted:
            model.take(driven.sync())
        model.take(driven.advance(1_000))
        driven.auto_read = True
        model.take(driven.read())
        for group in GROUPS:
            drain(driven, model, group)
        driven.close()


def run_step(driven: Driven, model: Model, number: int, step: tuple) -> None:  # type: ignore[type-arg]
    match step:
        case ("send", batches, failing):
            send(driven, model, number, batches, failing)
        case ("repeat", which, flush) if model.batches:
            batch = model.batches[which % len(model.batches)]
            command = Send(1, driven.request(), memoryview(bytearray(batch.bytes)), flush)
            said = driven.do(command)
            model.store({command.request: batch}, said)
            model.take(said)
        case ("pull", group, prefixes, max_count, min_count, timeout_ms, max_bytes):
            model.followed[group] |= matching(prefixes)
            subscription = driven.subscribe(*prefixes, group=group, connection=number)
            pull = driven.pull_command(
                subscription, max_count, min(min_count, max_count), max_bytes, timeout_ms, connection=number
            )
            model.owner[pull.request] = group, subscription
            model.pulls.append((number, subscription, pull.request))
            model.take(driven.do(pull))
        case ("withdraw" | "unsubscribe" | "disconnect", which) if model.pulls:
            connection, subscription, request = model.pulls[which % len(model.pulls)]
            command = {
                "withdraw": Withdraw(connection, request),
                "unsubscribe": Unsubscribe(connection, driven.request(), subscription),
                "disconnect": Disconnected(connection),
            }[step[0]]
            model.take(driven.do(command))
        case ("sync",):
            model.take(driven.sync())
        case ("read",):
            model.take(driven.read())
        case ("forget",) if isinstance(driven.disk, FakeDisk):
            driven.disk.forget()
        case ("advance",):
            model.take(driven.advance(50))
        case ("checkpoint",):
            driven.checkpoint()
        case ("restart",):
            while driven.wanted:
                model.take(driven.sync())
            driven.restart()
            model.pulls.clear()
        case ("crash",):
            old, driven.directory = driven.directory, driven.directory.with_name(f"crash-{number}")
            shutil.copytree(old, driven.directory)
            driven.store.close(clean=False)
            driven.wanted.clear()
            driven.reads.clear()
            driven.open()
            model.pulls.clear()


def send(driven: Driven, model: Model, number: int, batches: list[tuple[dict[str, int], bool]], failing: int) -> None:
    commands: list[Send] = []
    sent: dict[int, Batch] = {}
    for place, (counts, flush) in enumerate(batches):
        contents = {
            subject: [f"{number}.{place}.{subject}.{index}".encode() for index in range(count)]
            for subject, count in counts.items()
        }
        commands.append(driven.send_command(contents, flush))
        sent[commands[-1].request] = Batch(commands[-1], contents)
    model.batches += sent.values()
    assert isinstance(driven.disk, FakeDisk)
    if failing:
        driven.disk.fail("pwritev", failing, errno.ENOSPC)
    said = driven.do(*commands)
    driven.disk.heal()
    model.store(sent, said)
    model.take(said + driven.do())  # also what could not be noted while the disk was full


def drain(driven: Driven, model: Model, group: str) -> None:
    for subject in sorted(model.followed[group]):
        subscription = driven.subscribe(subject, group=group)
        for _ in range(1_000):
            pull = driven.pull_command(subscription)
            model.owner[pull.request] = group, subscription
            said = driven.do(pull)
            model.take(said)
            if not any(isinstance(effect, PulledMessages) and effect.messages for effect in said):
                break
        assert model.got[group][subject] == model.stored[subject]
