"""No administrative call holds the loop for long: the work of each turn is counted, in opcodes of Python.

A call whose work in one turn goes by the number of subjects, slots, groups or dead letters goes far beyond the bound.
`python -m bench.admin_turns` measures the times, with far more of all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from qmq.broker.find.resend_selection import MOST_IDS
from qmq.broker.groups.group import Subscription
from qmq.broker.groups.untaken import UNTAKEN_US
from qmq.broker.ports.access import ACTIONS
from qmq.broker.ports.commands import Administer, Disconnected, DispositionRange, HandBack, ListSubjects, Subscribe
from qmq.broker.ports.effects import Administered, Effect, PulledMessages, Refused, Sent
from qmq.broker.ports.work import TURN_WORK, Work
from qmq.format.build import RunContent
from qmq.format.layout import LANE_ORDERED, MESSAGE_ID, ORDER_SLOTS
from qmq.net.protocol.types import BROADCAST, Disposition
from tests.broker.harness import Driven

SUBJECTS: Final = 3_000
GROUPS: Final = 300
MEMBERS: Final = 150
DEAD: Final = 300
#: About the 4 ms of a turn's work, and half as much again: a new subject costs about 60 opcodes.
MOST_OPCODES: Final = 250_000


def filled(directory: Path) -> Driven:
    driven = Driven(directory)
    for first in range(0, SUBJECTS, 1_000):
        driven.do(driven.send_command({f"a{number % 5}.{number}": [b"x"] for number in range(first, first + 1_000)}))
    for name in ("ordered.1", "ordered.2"):
        driven.send_runs(*[RunContent(name, [b"x"], None, LANE_ORDERED + slot) for slot in range(ORDER_SLOTS)])
    driven.do(driven.send_command({"dead": [b"x"] * DEAD}))
    for number in range(GROUPS):
        prefix = ("", "a1.", "ordered.")[number] if number < 3 else f"a{number % 5}.{number}"
        driven.do(Subscribe(1, driven.request(), f"g{number}", (prefix,), "c", None))
    for number in range(MEMBERS):
        command = Subscribe(2, driven.request(), "all", ("a2.2",), f"c{number}", "first", mode=BROADCAST)
        driven.do(command)
    subscription = driven.subscribe("dead", group="dead", connection=3)
    said = driven.do(driven.pull_command(subscription, connection=3))
    count = sum(answer.messages for answer in said if isinstance(answer, PulledMessages))
    rejected = DispositionRange(0, count, Disposition.REJECT, None, "no use")
    driven.do(HandBack(3, driven.request(), subscription, [rejected]))
    return driven


class Opcodes:
    """Counts the opcodes of QMQ's own functions while it calls something."""

    def __init__(self) -> None:
        self.count = 0

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            if "/qmq/" not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.count += 1
        return self._trace

    def of(self, call: Callable[[], object]) -> int:
        self.count = 0
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            call()
        finally:
            sys.settrace(before)
        return self.count


def most_of_a_turn(driven: Driven, command: Administer | ListSubjects) -> tuple[int, list[Effect]]:
    """Carry out a command; return the opcodes of its longest turn, and the effects."""
    turns, said = turns_of(driven, command)
    return max(turns), said


def turns_of(driven: Driven, command: Administer | ListSubjects) -> tuple[list[int], list[Effect]]:
    """Carry out a command; return the opcodes of its turns, and the effects."""
    opcodes = Opcodes()

    def begin() -> None:
        driven.broker.handle(command, driven.now)
        driven.broker.turn(driven.now)

    turns, said = [opcodes.of(begin)], driven.effects()
    for _ in range(1_000):
        if any(getattr(effect, "request", None) == command.request for effect in said):
            break
        driven.now = driven.now._replace(monotonic_us=driven.now.monotonic_us + 2_000)
        turns.append(opcodes.of(lambda: driven.broker.tick(driven.now)))
        said += driven.effects()
    return turns, said


def most_of_a_part(work: Work[Any]) -> int:
    """Do work of the daemon; return the opcodes of the longest part that it does in one turn."""
    opcodes, most, is_done = Opcodes(), 0, False

    def part() -> None:
        nonlocal is_done
        done = 0
        while done < TURN_WORK and not is_done:
            try:
                done += next(work)
            except StopIteration:
                is_done = True

    while not is_done:
        most = max(most, opcodes.of(part))
    return most


#: The fields of each action, in the order in which they are asked for.
CALLS: Final[dict[str, dict[str, Any]]] = {
    "info": {},
    "rights": {},
    "stats": {"after": "!"},
    "groups": {},
    "consumers": {"group": "all"},
    "waiting": {"group": "g0"},
    "dead_letters": {"group": "dead"},
    "handled": {"group": "g0", "consumer": "c", "handled": [0, 1], "since_us": 0, "generation": 0},
    "leave": {"group": "g0", "consumer": "c", "nonce": b"n"},
    "cancel": {"id": "00" * 16},
    "set_group": {"group": "all", "settings": {"max_attempts": 3}, "follows": ["a3."]},
    "seek_group": {"group": "all", "to": "new"},
    "redrive": {"group": "dead"},
    "delete_dead": {"group": "dead"},
    "resend": {"run": b"r" * 16, "group": "g0", "prefix": "a1.", "dry_run": True},
    "restore": {"run": b"s" * 16, "group": "g0"},
    "roll": {},
    "delete_group": {"group": "all"},
}


def test_no_turn_of_an_administrative_call_is_long(tmp_path: Path) -> None:
    assert set(CALLS) == set(ACTIONS), "a new action belongs here"
    driven = filled(tmp_path)
    found = dict[str, int]()
    for prefix in ("", "ordered.", "none."):
        command: Administer | ListSubjects = ListSubjects(9, driven.request(), prefix, 0, 10_000)
        found[f"subjects {prefix!r}"], said = most_of_a_turn(driven, command)
        assert not any(isinstance(effect, Refused) for effect in said)
    for action, fields in CALLS.items():
        found[action], _ = most_of_a_turn(driven, Administer(9, driven.request(), action, fields))

    assert {name: most for name, most in found.items() if most > MOST_OPCODES} == {}
    driven.close()


def test_a_resend_to_all_groups_looks_for_each_at_what_it_follows(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    fields = {"run": b"r" * 16, "all_groups": True, "prefix": "a1.", "dry_run": True}
    driven.checkpoint()  # a resend waits until one has the names of its subjects
    turns, answer = list[int](), None
    while answer is None or not answer.fields["done"]:  # a client asks again and again
        some, said = turns_of(driven, Administer(9, driven.request(), "resend", fields))
        (answer,) = (effect for effect in said if isinstance(effect, Administered))
        turns += some
    assert answer.fields["groups"] == 2 + GROUPS // 5 - 1, "those of all subjects and of a1., and of a subject each"
    assert answer.fields["looked"] == 2 * SUBJECTS // 5 + GROUPS // 5 - 1
    assert max(turns) < MOST_OPCODES
    assert sum(turns) < 50 * GROUPS * SUBJECTS // 5, "no group looks at each subject"
    driven.close()


def test_no_turn_of_a_resend_of_many_ids_is_long(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    (sent,) = driven.do(driven.send_command({"dead": [b"x"] * MOST_IDS}))
    assert isinstance(sent, Sent)
    ids = [MESSAGE_ID.pack(driven.store.store_id, 0, sent.position + at) for at in range(MOST_IDS)]
    fields = {"run": b"r" * 16, "group": "dead", "ids": ids, "dry_run": True}
    driven.checkpoint()  # a resend waits until one has the names of its subjects
    turns, (answer,) = turns_of(driven, Administer(9, driven.request(), "resend", fields))
    assert isinstance(answer, Administered)
    assert answer.fields["looked"] == MOST_IDS
    assert max(turns) < MOST_OPCODES / 2, "in a batch of many subjects an id takes ten times as long"
    driven.close()


def test_a_time_is_looked_up_once_for_all_groups_that_start_then(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    for action, fields in (("set_group", {"follows": ["a3."]}), ("seek_group", {"to": ["time", driven.now.wall_us]})):
        driven.do_whole(Administer(9, driven.request(), action, {"group": "all", **fields}))
    driven.do(driven.send_command({f"a3.{number}": [b"y"] for number in range(3, SUBJECTS, 10)}))
    turns, said = turns_of(driven, Administer(9, driven.request(), "groups", {"group": "all"}))
    (answer,) = (effect for effect in said if isinstance(effect, Administered))
    assert len(answer.fields["rows"]) == MEMBERS
    assert {(row["ready"], row["ready_exact"]) for row in answer.fields["rows"]} == {(3 * SUBJECTS // 10, True)}
    assert max(turns) < MOST_OPCODES
    assert sum(turns) < 20 * MEMBERS * SUBJECTS // 5, "a look-up of each subject takes hundreds"
    driven.close()


def test_the_subscriptions_of_a_group_are_known(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    subscriptions = driven.broker._delivery.subscriptions
    group, found = driven.broker.groups["g1"], list[Subscription]()
    assert Opcodes().of(lambda: found.extend(subscriptions.of(group))) < 100
    assert [one.consumer for one in found] == ["c"]
    driven.do(Disconnected(1))
    assert subscriptions.of(group) == []
    driven.close()


def test_no_turn_of_a_checkpoint_is_long(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    broker, now = driven.broker, driven.now
    everything = Opcodes().of(lambda: broker.checkpoint_state(now))
    for group in broker.groups.values():
        group.dirty = True
    assert most_of_a_part(broker.prepare_checkpoint()) < min(MOST_OPCODES, everything / 2)
    assert Opcodes().of(lambda: broker.checkpoint_state(now)) < everything / 10
    driven.close()


def test_no_turn_of_a_look_at_names_is_long(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    delete = Administer(9, driven.request(), "delete_group", {"group": "g0"})  # it follows everything
    driven.do(delete, Disconnected(1), Disconnected(2), Disconnected(3))
    untaken, now_us = driven.broker.untaken, driven.now.monotonic_us
    for since_us in (0, UNTAKEN_US):
        assert most_of_a_part(untaken.look(now_us + since_us)) < MOST_OPCODES
    assert {one.code for one in untaken.found} == {"no_consumer", "not_followed"}
    driven.close()
