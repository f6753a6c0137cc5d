"""The state of each message in a trace is that of the model of a group, and its last event fits, after any history."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from qmq.broker.find.trace.events import MessageChange, events_of
from qmq.broker.find.trace.places import MessagePlace
from qmq.broker.find.trace.records import FileFacts, RecordScan
from qmq.broker.find.trace.states import GroupMessage, GroupView, with_events
from qmq.broker.groups.message_life import MessageEvent
from tests.broker.group_state import WrittenRecords
from tests.broker.model_log import Message
from tests.broker.test_group_model import HISTORIES, GroupMachine

pytestmark = [pytest.mark.no_cover, pytest.mark.hypothesis]

#: The states met in all histories of this run.
MET: Counter[str] = Counter()
#: The events that may come last, by state.
LAST = {
    "retrying": {"resent", "nacked", "released", "session_expired", "left", "redriven", "sought"},
    "in_flight": {"handed_out"},
    "dead": {"nacked", "rejected", "session_expired", "sought"},
    "waiting": {"sought"},
}


class TraceMachine(GroupMachine):
    """As the machine above it; and now and then it traces all messages."""

    def __init__(self) -> None:
        super().__init__()
        self.driven.options.update(pull_log_keep_us=1 << 50, pull_log_keep_bytes=1 << 40)
        self.driven.restart()
        self.records = WrittenRecords(self.driven)
        #: Messages that a seek back handed out beside a retry or a dead letter of them: events do not tell them apart.
        self.second_lives: set[Message] = set()
        self.facts = dict[int, FileFacts]()
        self.facts_of: object = None  # the store that they are of

    def ask(self, action: str, **fields: Any) -> dict[str, Any]:
        if action == "seek_group" and fields["to"] == "first" and self.group is not None:
            self.second_lives.update(letter.message for letter in self.group.dead)
            if not fields["clear_retries"]:
                self.second_lives.update(message for one in self.group.waiting for message in one.messages)
        return super().ask(action, **fields)

    def check(self) -> None:
        super().check()
        self.counts["checks"] += 1
        if self.counts["checks"] % 4 == 0 and self.group is not None:
            self.trace_all()

    def trace_all(self) -> None:
        store, group = self.driven.store, self.driven.broker.groups["g"]
        if self.facts_of is not store:
            self.facts_of, self.facts = store, {}
        for message in self.sent:
            place = self.place(message)
            view = GroupView(store, group, [place], self.now_us)
            for _ in view.look():
                pass
            scan = RecordScan(store.groups.scan_pulls(0), [place], self.facts)
            while scan.step():
                pass
            events = events_of(store, group, [place], scan.found, view.found.state, view.redriven_us)
            MET[view.found.state] += 1
            self.compare(message, view.found, events)

    def place(self, message: Message) -> MessagePlace:
        subject, lane, sequence = message
        store = self.driven.store
        number = store.subjects.number(subject, lane)
        assert number is not None
        ((partition, rows),) = store.subject_rows(number, sequence, 1)
        entry = rows[0].item()
        return MessagePlace(partition, entry, sequence - entry[0], subject)

    def compare(self, message: Message, found: GroupMessage, events: list[MessageChange]) -> None:
        model = self.group
        assert model is not None
        last = events[-1] if events else None
        holders = [
            (one.name, each.attempt)
            for one in model.consumers.values()
            for each in one.in_flight.values()
            if each.message == message
        ]
        waiting = [one for one in model.waiting if message in one.messages]
        letters = [letter for letter in model.dead if letter.message == message]
        fate = model.fate(message, self.now_us) if message in model.ready else None
        lives = {
            "in_flight": bool(holders),
            "retrying": bool(waiting),
            "waiting": fate is MessageEvent.PULL,
            "filtered": fate is MessageEvent.FILTER,
            "expired": fate is MessageEvent.EXPIRE,
            "dead": bool(letters),
        }
        if found.state == "in_flight":
            assert (found.consumer, found.attempts) in holders
        elif found.state == "retrying":
            assert (found.due_us, found.attempts + 1) in [(one.due_us, one.attempt) for one in waiting]
        elif found.state == "dead":
            assert (found.attempts, found.reason) in [(letter.attempt, letter.reason) for letter in letters]
        if not any(lives.values()):
            assert found.state in ("acked", "filtered", "before_start")
            past = with_events(found, events)
            if message not in self.second_lives:
                assert (past.state == "acked") >= (last is not None and last.kind == "acked")
            MET[past.state] += 1
            return
        assert lives[found.state], (message, found, lives)
        if message in self.second_lives:
            return
        expected = next(state for state, is_so in lives.items() if is_so)
        assert found.state == expected, (message, found, expected)
        if expected in LAST and last is not None:
            MET[f"{expected}, {last.kind}"] += 1
            assert last.kind in LAST[expected], (message, found, events)
        if expected == "in_flight" and last is not None:
            assert (last.consumer, last.attempt) == (found.consumer, found.attempts)


def test_each_state_is_that_of_the_model(pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--hypothesis-seed", None)
    MET.clear()
    phases = [Phase.generate] if seed is None else [Phase.generate, Phase.shrink]
    given = settings(HISTORIES, derandomize=seed is None, max_examples=30, phases=phases)
    run_state_machine_as_test(TraceMachine, settings=given)
    print(dict(MET))
    assert {"in_flight", "retrying", "waiting", "filtered", "expired", "dead", "acked", "before_start"} <= MET.keys()
