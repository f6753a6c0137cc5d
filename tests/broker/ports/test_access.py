"""The table of rights: it names every request and every value, and the broker keeps to it with every kind of token."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qmq.broker.ports import commands
from qmq.broker.ports.access import ACTIONS, FRAMES, check
from qmq.broker.ports.commands import (
    Administer,
    Connected,
    Disconnected,
    Find,
    Get,
    ListSubjects,
    Pull,
    Report,
    Send,
    Subscribe,
    TraceMessage,
)
from qmq.broker.ports.effects import (
    Administered,
    Effect,
    FoundMessages,
    GotMessage,
    PulledMessages,
    Refused,
    Reported,
    Sent,
    SubjectList,
    Traced,
)
from qmq.broker.ports.rights import Need, Rights
from qmq.errors import Forbidden, UnknownMessage
from qmq.format.ids import MessageId
from qmq.format.layout import BATCH_MAGIC, MESSAGE_ID
from qmq.format.source import NO_ADDRESS
from qmq.names import takes
from qmq.net.protocol.frames import FrameKind
from qmq.net.protocol.selection import Selection
from qmq.net.protocol.types import Disposition
from qmq.net.server import requests
from tests.broker.delay.test_delay import cancel, delay
from tests.broker.harness import Driven, batch_of
from tests.broker.test_consuming import Consumer

#: A token of each kind.
TOKENS = {
    "sender": Rights("sender", produce=["shop."]),
    "consumer": Rights("consumer", consume=["shop."], group=["g"]),
    "reader": Rights("reader", consume=["shop."]),
    "member": Rights("member", group=["g"]),
    "looker": Rights("looker", browse=["shop."]),
    "historian": Rights("historian", browse=[""]),
    "nobody": Rights("nobody"),
    "ops": Rights("ops", is_admin=True),
}
ID = bytes(16)
SUBSCRIBE = Subscribe(1, 1, "g", ("shop.",), "c", None)
#: Requests that need no subscription, and the tokens that may make them (beside ops).
REQUESTS: list[tuple[str, Any, set[str]]] = [
    ("SEND", Send(1, 1, batch_of({"shop.a": [b"x"]}, 0), True), {"sender"}),
    ("SUBSCRIBE", SUBSCRIBE, {"consumer"}),
    ("SUBSCRIBE alone", SUBSCRIBE._replace(group=None), {"consumer", "reader"}),
    ("SUBSCRIBE to more", SUBSCRIBE._replace(prefixes=("shop.a", "")), set()),
    ("SUBSCRIBE elsewhere", SUBSCRIBE._replace(group="other"), set()),
    ("LAST_SEQUENCE", commands.LastSequence(1, 1, ID), set(TOKENS)),
    ("CLAIM", commands.Claim(1, 1, ID, ID), {"sender"}),
    ("SUBJECTS", ListSubjects(1, 1, "", 0, 10), set(TOKENS)),
    ("REPORT", Report(1, 1, 0, 0, 0, 0, ""), set(TOKENS)),
    ("HEARTBEAT", commands.Heartbeat(1, 1, ID, 0), set(TOKENS)),
    ("HAND_OVER", commands.HandOver(1, 1, memoryview(bytearray(8)), "g", 1, 1, None, ""), {"consumer"}),
    ("SEGMENTS", commands.ListSegments(1, 1, 0, 0), {"historian"}),
    ("BATCHES", commands.ListBatches(1, 1, 0, 0, 1), {"historian"}),
    ("READ_LOG", commands.ReadLog(1, 1, 0, 0, 1), {"historian"}),
    ("RESTORE", commands.Restore(1, 1, memoryview(bytearray(8))), set()),
    ("GET", Get(1, 1, ID), {"looker", "historian"}),
    ("FIND", Find(1, 1, Selection()), {"looker", "historian"}),
    ("TRACE", TraceMessage(1, 1, ID), {"looker", "historian"}),
    ("TRACE of a consumer", commands.TraceConsumer(1, 1, "c"), {"looker", "historian"}),
    ("info", Administer(1, 1, "info", {}), set()),
    ("rights", Administer(1, 1, "rights", {}), set(TOKENS)),
    ("stats", Administer(1, 1, "stats", {}), {"historian"}),
    ("groups", Administer(1, 1, "groups", {"after": ""}), {"consumer", "member"}),
    ("groups of one", Administer(1, 1, "groups", {"group": "g"}), {"consumer", "member"}),
    ("groups of another", Administer(1, 1, "groups", {"group": "other"}), set()),
    *(
        (action, Administer(1, 1, action, {"group": "g", "numbers": None, "to": "first", "settings": {}}), set())
        for action in ("set_group", "seek_group", "delete_group", "redrive", "delete_dead", "resend", "restore", "roll")
    ),
    *(
        (action, Administer(1, 1, action, {"group": "g"}), {"consumer", "member"})
        for action in ("consumers", "waiting", "dead_letters", "handled", "leave")
    ),
    ("dead letters of another", Administer(1, 1, "dead_letters", {"group": "other"}), set()),
    ("cancel", Administer(1, 1, "cancel", {"id": "0" * 32}), {"sender"}),
]  # fmt: skip
#: Requests about something that the connection began: whoever could begin it may make them.
OWN = {"PULL", "WITHDRAW", "UNSUBSCRIBE", "ACK", "HAND_BACK"}


def connect(driven: Driven, connection: int, rights: Rights | None) -> None:
    driven.do(Connected(connection, NO_ADDRESS, rights))


def answer_of(effects: Sequence[Effect], request: int) -> Any:
    (answer,) = [effect for effect in effects if getattr(effect, "request", 0) == request]
    return answer


def is_forbidden(effects: Sequence[Effect]) -> bool:
    return any(isinstance(effect, Refused) and isinstance(effect.error, Forbidden) for effect in effects)


def test_every_request_and_every_value_of_it_has_a_row() -> None:
    asked = {
        kind
        for kind in vars(commands).values()
        if isinstance(kind, type) and getattr(kind, "_fields", ())[:1] == ("connection",)
    } - {Connected, Disconnected, commands.InfoFound, commands.Moved}
    assert set(FRAMES) == asked
    for kind, row in FRAMES.items():
        assert set(row) == set(kind._fields) - {"connection", "request"}  # type: ignore[attr-defined]


def test_every_kind_of_frame_is_tried_with_every_token() -> None:
    kinds = {kind.name for kind in FrameKind if kind < 128} - {"HELLO", "ADMINISTER"}
    assert kinds == {name for name, _, _ in REQUESTS if name.isupper()} | OWN
    assert {kind.name for kind in requests._DECODERS} | {"SEND"} == kinds | {"ADMINISTER"}


def test_every_action_has_a_row(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    (refused,) = driven.do(Administer(1, 1, "nonsense", {}))
    assert isinstance(refused, Refused)
    known = set(re.findall(r"\w+", str(refused.error).partition("it knows ")[2]))
    assert len(known) > 10
    assert known | {"restore", "roll", "cancel", "stats", "rights"} == set(ACTIONS)
    assert {name for name, _, _ in REQUESTS} >= set(ACTIONS)


@pytest.mark.parametrize(("name", "command", "allowed"), REQUESTS, ids=lambda one: one if isinstance(one, str) else "")
def test_a_token_may_do_what_its_rights_say(tmp_path: Path, name: str, command: Any, allowed: set[str]) -> None:
    driven = Driven(tmp_path)
    for connection, (token, rights) in enumerate(TOKENS.items(), 1):
        connect(driven, connection, rights)
        asked = command._replace(connection=connection)
        if isinstance(command, Send):  # it is stamped in place
            asked = asked._replace(batch=memoryview(bytearray(command.batch)))
        said = driven.do(asked)
        assert is_forbidden(said) == (token not in allowed | {"ops"}), (token, said)


def test_what_has_no_row_is_for_administrators() -> None:
    class Novel(NamedTuple):
        connection: int
        request: int

    for asked in (Administer(1, 1, "novelty", {}), Novel(1, 1)):
        with pytest.raises(Forbidden, match="admin"):
            check(Rights("all", [""], [""], [""], [""]), asked)
        assert check(TOKENS["ops"], asked) is asked


def test_fields_that_no_row_names_do_not_reach_the_broker() -> None:
    asked = Administer(1, 1, "groups", {"group": "g", "secretly": True})
    assert check(TOKENS["member"], asked).fields == {"group": "g"}
    assert check(TOKENS["ops"], asked) is asked


@pytest.mark.parametrize(
    ("rights", "name", "is_taken"),
    [
        (["orders."], "orders.new", True),
        (["orders."], "orders.new.", True),
        (["orders."], "orders.", True),
        (["orders."], "ordersx", False),
        (["orders."], "orders", False),
        (["orders."], "", False),
        (["orders"], "orders", True),
        (["orders"], "orders.new", False),
        (["orders"], "orders.", False),
        (["a", "orders.new."], "orders.newer", False),
        ([""], "anything.", True),
        ([], "orders", False),
        (["*"], "orders", False),
        (["order_."], "orders.a", False),
    ],
)
def test_a_prefix_is_taken_literally_and_ends_at_a_dot(rights: list[str], name: str, is_taken: bool) -> None:
    assert takes(rights, name) == is_taken


def test_rights_cover_others_that_give_no_more() -> None:
    wide, narrow = Rights("a", ["shop."], ["shop."], ["g"]), Rights("a", ["shop.order"], (), ["g"])
    assert wide.covers(narrow)
    assert not narrow.covers(wide)
    assert TOKENS["ops"].covers(wide)
    assert not Rights("b", [""], [""], [""], [""]).covers(TOKENS["ops"])


# --- subjects of messages ---------------------------------------------------------------------------------------------


def two_subjects(tmp_path: Path) -> tuple[Driven, bytes, bytes]:
    """A broker with a message of shop.a and one of hr.a; the ids of both."""
    driven = Driven(tmp_path)
    driven.do(Connected(1, NO_ADDRESS))
    ids = []
    for subject in ("shop.a", "hr.a"):
        command = driven.send_command({subject: [subject.encode()]})
        sent = answer_of(driven.do(command), command.request)
        assert isinstance(sent, Sent)
        ids.append(MESSAGE_ID.pack(driven.store.store_id, sent.partition, sent.position))
    return driven, ids[0], ids[1]


def test_a_batch_with_one_subject_too_many_is_refused_whole(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    connect(driven, 1, TOKENS["sender"])
    assert is_forbidden(driven.do(driven.send_command({"shop.a": [b"1"], "hr.a": [b"2"]})))
    driven.change_producer()
    assert driven.store.subjects.count == 0
    assert not is_forbidden(driven.do(driven.send_command({"shop.a": [b"1"], "shop.b": [b"2"]})))
    driven.close()


def test_the_short_way_takes_only_subjects_that_were_checked_for_this_token(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    connect(driven, 1, None)
    connect(driven, 2, Rights("hr", ["hr."]))
    short = driven.broker.short_way
    assert short is not None
    for body in (b"1", b"2"):
        command = driven.send_command({"shop.a": [body]})  # its table and its producer are known by then
        driven.do(command)

    def short_send(connection: int) -> bool:
        command = driven.send_command({"shop.a": [b"3"]}, flush=False, connection=connection)
        size = len(command.batch)
        taken = short.send(connection, command.request, command.batch, size, False, driven.now) is not None
        if not taken:
            driven.produced -= 1
        return taken

    assert short_send(1)
    assert not short_send(2)
    connect(driven, 2, Rights("shop", ["shop."]))
    assert not short_send(2), "the general way checks the name first"
    driven.do(driven.send_command({"shop.a": [b"3"]}, connection=2))
    assert short_send(2)
    connect(driven, 2, Rights("hr", ["hr."]))
    assert not short_send(2), "the rights of now count"
    driven.do()
    driven.close()


def test_what_may_not_be_browsed_is_unknown_like_what_never_was(tmp_path: Path) -> None:
    driven, mine, others = two_subjects(tmp_path)
    connect(driven, 2, TOKENS["looker"])
    nowhere = MESSAGE_ID.pack(driven.store.store_id, 0, MESSAGE_ID.unpack(others)[2] + 1_000)
    assert isinstance(answer_of(driven.do(Get(2, 5, mine)), 5), GotMessage)
    for kind in (Get, TraceMessage):
        texts = []
        for message_id in (others, nowhere):
            said = driven.do(kind(2, 6, message_id)) + [one for _ in range(20) for one in driven.advance(2)]
            refused = answer_of(said, 6)
            assert isinstance(refused.error, UnknownMessage)
            texts.append(str(refused.error).replace(str(MessageId._make(MESSAGE_ID.unpack(message_id))), "ID"))
        assert texts[0] == texts[1]
    traced = answer_of(driven.do(TraceMessage(2, 7, mine)) + [one for _ in range(20) for one in driven.advance(2)], 7)
    assert isinstance(traced, Traced)
    place = MESSAGE_ID.unpack(others)[1:]
    sly = TraceMessage(2, 8, bytes(6) + others[6:], (place,))
    refused = answer_of(driven.do(sly) + [one for _ in range(20) for one in driven.advance(2)], 8)
    assert isinstance(refused.error, UnknownMessage)
    driven.close()


def test_a_trace_has_nothing_of_places_that_may_not_be_browsed(tmp_path: Path) -> None:
    driven, mine, others = two_subjects(tmp_path)
    consumer = Consumer(driven, "c", "hr.", group="g")
    assert consumer.pull() == [b"hr.a"]
    connect(driven, 2, TOKENS["looker"])
    connect(driven, 3, TOKENS["historian"])
    place = MESSAGE_ID.unpack(others)[1:]

    def traced(connection: int, places: tuple[tuple[int, int], ...]) -> list[dict[str, object]]:
        command = TraceMessage(connection, 8, mine, places)
        answer = answer_of(driven.do(command) + [one for _ in range(20) for one in driven.advance(2)], 8)
        assert isinstance(answer, Traced)
        return answer.rows

    assert traced(2, (place,)) == traced(2, ())
    assert traced(3, (place,)) != traced(3, ()), "who may see it sees that a consumer has it"
    driven.close()


@pytest.mark.parametrize("selection", [Selection(), Selection(prefix="hr."), Selection(key="k")])
def test_a_search_passes_over_what_may_not_be_browsed(tmp_path: Path, selection: Selection) -> None:
    driven = Driven(tmp_path)
    for subject in ("shop.a", "hr.a"):
        batch = batch_of({subject: [subject.encode()]}, driven.produced, driven.producer, key="k")
        driven.produced += 1
        driven.do(Send(1, driven.request(), batch, True))
    connect(driven, 2, TOKENS["looker"])
    connect(driven, 3, TOKENS["historian"])
    for connection, count in ((2, 0 if selection.prefix else 1), (3, 1 if selection.prefix else 2)):
        found = answer_of(driven.do(Find(connection, 9, selection)), 9)
        assert isinstance(found, FoundMessages)
        assert b"".join(found.buffers).count(struct.pack("<I", BATCH_MAGIC)) == count
    driven.close()


def test_lists_have_only_subjects_that_may_be_seen(tmp_path: Path) -> None:
    driven, _, _ = two_subjects(tmp_path)
    Consumer(driven, "c", "", group="g")
    Consumer(driven, "c", "", group="secret")
    connect(driven, 2, TOKENS["consumer"])
    listed = answer_of(driven.do(ListSubjects(2, 1, "", 0, 10)), 1)
    assert isinstance(listed, SubjectList)
    assert [row[0] for row in listed.rows] == ["shop.a"]
    groups = answer_of(driven.do(Administer(2, 2, "groups", {"after": ""})), 2)
    assert [row["group"] for row in groups.fields["rows"]] == ["g"]
    waiting = answer_of(driven.do(Administer(2, 3, "waiting", {"group": "g", "after": 0})), 3)
    assert [row["subject"] for row in waiting.fields["rows"]] == ["shop.a"]
    driven.close()


def test_dead_letters_have_the_rights_of_their_subject(tmp_path: Path) -> None:
    driven, _, _ = two_subjects(tmp_path)
    consumer = Consumer(driven, "c", "", group="g")
    assert sorted(consumer.pull()) == [b"hr.a", b"shop.a"]
    consumer.back(0, 2, Disposition.REJECT)
    connect(driven, 2, TOKENS["consumer"])
    for connection, subjects in ((1, {"shop.a", "hr.a"}), (2, {"shop.a"})):
        asked = Administer(connection, 4, "dead_letters", {"group": "g", "after": 0, "limit": 10})
        letters = answer_of(driven.do(asked), 4)
        assert isinstance(letters, Administered)
        assert {row["subject"] for row in letters.fields["rows"]} == subjects
    driven.close()


def test_a_report_tells_nothing_of_other_subjects(tmp_path: Path) -> None:
    driven, mine, others = two_subjects(tmp_path)
    connect(driven, 2, TOKENS["looker"])
    for message_id, found in ((mine, "sound"), (others, "unknown")):
        position = MESSAGE_ID.unpack(message_id)[2]
        reported = answer_of(driven.do(Report(2, 5, 0, position, 0, 0, "")), 5)
        assert isinstance(reported, Reported)
        assert reported.found == found
    driven.close()


def test_retries_have_the_rights_of_their_subject(tmp_path: Path) -> None:
    driven, _, _ = two_subjects(tmp_path)
    wide = Consumer(driven, "wide", "", group="g", connection=1)
    assert len(wide.pull()) == 2
    wide.back(0, 2, Disposition.RELEASE)
    connect(driven, 2, TOKENS["consumer"])
    narrow = Consumer(driven, "narrow", "shop.", group="g", connection=2)
    assert narrow.pull() == [b"shop.a"]
    assert narrow.pull() == []
    driven.close()


def test_a_takeover_without_all_rights_gets_nothing_of_what_is_in_flight(tmp_path: Path) -> None:
    driven, _, _ = two_subjects(tmp_path)
    before = Consumer(driven, "c", "", group="g", nonce=b"before")
    assert len(before.pull()) == 2
    connect(driven, 2, TOKENS["consumer"])
    after = Consumer(driven, "c", "shop.", group="g", nonce=b"after", connection=2)
    assert after.pull() == [b"shop.a"], "as a retry, which goes by subject"
    assert after.pull() == []
    other = Consumer(driven, "other", "", group="g")
    assert other.pull() == [b"hr.a"]
    driven.close()


def test_a_takeover_with_all_rights_keeps_what_is_in_flight(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    driven.do(driven.send_command({"shop.a": [b"1"]}))
    before = Consumer(driven, "c", "shop.", group="g", nonce=b"before")
    assert before.pull() == [b"1"]
    connect(driven, 2, TOKENS["consumer"])
    after = Consumer(driven, "c", "shop.", group="g", nonce=b"after", connection=2)
    assert after.pull() == [b"1"]
    assert after.got[0][1] == 1, "still its first attempt"
    driven.close()


def test_delayed_messages_have_the_rights_of_their_subject(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    mine, others = *delay(driven, "shop.a", 600_000), *delay(driven, "hr.a", 600_000, first=1)
    connect(driven, 1, TOKENS["looker"])
    ids = [MessageId.parse(name) for name in (mine, others)]
    for name, kind in zip(ids, (GotMessage, Refused), strict=True):
        packed = MESSAGE_ID.pack(name.store_id, name.partition, name.position)
        assert isinstance(answer_of(driven.do(Get(1, 5, packed)), 5), kind)
        said = driven.do(TraceMessage(1, 7, packed)) + [one for _ in range(20) for one in driven.advance(2)]
        assert isinstance(answer_of(said, 7), Traced if kind is GotMessage else Refused)
    connect(driven, 1, Rights("hr", ["hr."]))
    assert not cancel(driven, mine)
    assert cancel(driven, others)
    connect(driven, 1, TOKENS["looker"])
    refused = answer_of(driven.do(Get(1, 6, packed)), 6)
    assert "cancelled" not in str(refused.error)
    driven.close()


@pytest.mark.parametrize("state", ["waiting pull", "in flight", "retry", "idle", "quarantined"])
def test_what_a_revoked_consumer_has_goes_to_others_at_once(tmp_path: Path, state: str) -> None:
    driven = Driven(tmp_path)
    connect(driven, 2, TOKENS["consumer"])
    revoked = Consumer(driven, "revoked", "shop.", group="g", connection=2)
    other = Consumer(driven, "other", "shop.", group="g", connection=1)
    if state == "waiting pull":
        driven.do(Pull(2, 77, revoked.subscription, 1, 1, 1 << 20, 60_000))
    else:
        driven.do(driven.send_command({"shop.a": [b"1"]}))
    if state in ("in flight", "retry"):
        assert revoked.pull() == [b"1"]
    if state == "retry":
        revoked.back(0, 1, Disposition.NACK, 0)
    said = driven.do(Disconnected(2, for_good=True))
    assert not any(isinstance(effect, PulledMessages) for effect in said)
    if state == "waiting pull":
        said = driven.do(driven.send_command({"shop.a": [b"1"]}))
        assert not any(isinstance(effect, PulledMessages) for effect in said), "nothing more is handed out to it"
    driven.advance(1)
    assert other.pull() == [b"1"]
    (attempt,) = [attempt for _, attempt in other.got.values()]
    assert attempt == (2 if state == "retry" else 1), "an end of a token counts as no attempt"
    refused = answer_of(driven.do(commands.Ack(2, 88, revoked.subscription, (0, 1))), 88)
    assert isinstance(refused, Refused), "no ack is taken afterwards"
    driven.close()


def test_an_end_without_a_revoked_token_leaves_what_is_in_flight(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    connect(driven, 2, TOKENS["consumer"])
    consumer = Consumer(driven, "c", "shop.", group="g", connection=2)
    other = Consumer(driven, "other", "shop.", group="g", connection=1)
    driven.do(driven.send_command({"shop.a": [b"1"]}))
    assert consumer.pull() == [b"1"]
    driven.do(Disconnected(2))
    assert other.pull() == []
    driven.close()


def test_a_missing_right_is_named() -> None:
    with pytest.raises(Forbidden, match=r"token 'sender' lacks a right: consume 'shop\.'"):
        check(TOKENS["sender"], SUBSCRIBE._replace(group=None))
    with pytest.raises(Forbidden, match="lacks a right: admin"):
        TOKENS["sender"].require(False, Need.ADMIN)


def test_a_client_is_told_its_rights(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    told = {}
    for number, (name, rights) in enumerate([*TOKENS.items(), ("", None)], 10):
        connect(driven, number, rights)
        told[name] = answer_of(driven.do(Administer(number, 1, "rights", {})), 1).fields
    nothing: dict[str, Any] = {"admin": False, "produce": [], "consume": [], "group": [], "browse": []}
    everything = {"admin": True, "produce": [""], "consume": [""], "group": [""], "browse": [""]}
    assert told["nobody"] == {"name": "nobody", **nothing}
    assert told["consumer"] == {**nothing, "name": "consumer", "consume": ["shop."], "group": ["g"]}
    assert told["ops"] == {"name": "ops", **everything}
    assert told[""] == {"name": "", **everything}
