"""Histories against a model in plain lists: each group gets each visible message once, each subject in order."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qmq.broker.commands import Effect, Messages, Sent
from tests.broker.harness import Driven, runs_of_answer

SUBJECTS = ["a.x", "a.y", "a.x.z", "b", "b.x"]
PREFIXES = [(prefix,) for prefix in ["", "a.", "a.x", "a.x.", "b"]] + [("a.", "b"), ("b", "a.x", "b.x")]
GROUPS = ["g", "h"]

sends = st.tuples(
    st.just("send"),
    st.dictionaries(st.sampled_from(SUBJECTS), st.integers(1, 4), min_size=1, max_size=4),
    st.booleans(),
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
others = st.sampled_from([("sync",), ("restart",), ("advance",), ("checkpoint",)])
histories = st.lists(st.one_of(sends, pulls, pulls, others), max_size=30)


class Model:
    """What was stored, and what each group got, by subject."""

    def __init__(self) -> None:
        self.stored: dict[str, list[bytes]] = {subject: [] for subject in SUBJECTS}
        self.got: dict[str, dict[str, list[bytes]]] = {group: {name: [] for name in SUBJECTS} for group in GROUPS}
        self.owner: dict[int, str] = {}  # group, by pull request

    def take(self, effects: list[Effect]) -> None:
        """Note what the broker said, and check that every message is the next one of its subject in its group."""
        for effect in effects:
            if not isinstance(effect, Messages):
                assert isinstance(effect, Sent)
                continue
            group = self.got[self.owner[effect.request]]
            for run in runs_of_answer(effect):
                mine = group[run.subject]
                assert run.first_sequence == len(mine)
                mine += run.bodies()
                assert self.stored[run.subject][: len(mine)] == mine


def matching(prefixes: tuple[str, ...]) -> set[str]:
    return {
        subject
        for subject in SUBJECTS
        for prefix in prefixes
        if subject == prefix or ((prefix.endswith(".") or not prefix) and subject.startswith(prefix))
    }


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=histories, partitions=st.sampled_from([1, 1, 3]))
def test_histories(history: list[tuple], partitions: int) -> None:  # type: ignore[type-arg]
    with tempfile.TemporaryDirectory() as directory:
        driven = Driven(
            Path(directory), auto_sync=False, partitions=partitions, segment_bytes=64 << 10, max_frame_bytes=16 << 10
        )
        model = Model()
        followed: dict[str, set[str]] = {group: set() for group in GROUPS}
        for number, step in enumerate(history):
            run_step(driven, model, followed, number, step)
        while driven.wanted:
            model.take(driven.sync())
        model.take(driven.advance(1_000))
        for group in GROUPS:
            drain(driven, model, group, followed[group])
        driven.close()


def run_step(driven: Driven, model: Model, followed: dict[str, set[str]], number: int, step: tuple) -> None:  # type: ignore[type-arg]
    match step:
        case ("send", counts, flush):
            contents = {
                subject: [f"{number}.{subject}.{index}".encode() for index in range(count)]
                for subject, count in counts.items()
            }
            for subject, bodies in contents.items():
                model.stored[subject] += bodies
            model.take(driven.do(driven.send_command(contents, flush)))
        case ("pull", group, prefixes, max_count, min_count, timeout_ms, max_bytes):
            followed[group] |= matching(prefixes)
            subscription = driven.subscribe(*prefixes, group=group, connection=number)
            pull = driven.pull_command(
                subscription, max_count, min(min_count, max_count), max_bytes, timeout_ms, connection=number
            )
            model.owner[pull.request] = group
            model.take(driven.do(pull))
        case ("sync",):
            model.take(driven.sync())
        case ("advance",):
            model.take(driven.advance(50))
        case ("checkpoint",):
            driven.checkpoint()
        case ("restart",):
            while driven.wanted:
                model.take(driven.sync())
            driven.restart()


def drain(driven: Driven, model: Model, group: str, followed: set[str]) -> None:
    for subject in sorted(followed):
        subscription = driven.subscribe(subject, group=group)
        for _ in range(1_000):
            pull = driven.pull_command(subscription)
            model.owner[pull.request] = group
            said = driven.do(pull)
            model.take(said)
            if not any(isinstance(effect, Messages) and effect.messages for effect in said):
                break
        assert model.got[group][subject] == model.stored[subject]
