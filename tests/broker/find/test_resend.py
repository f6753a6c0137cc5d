"""A resend hands out again what a group is through with, leaves the rest alone, and goes on after any end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qmq.broker.groups.resends import ResendCounts
from qmq.broker.journal.record_types import RecordKind
from qmq.broker.ports.commands import Administer, Disconnected, DispositionRange, HandBack, Subscribe
from qmq.broker.ports.effects import Administered, Effect, Refused, Sent
from qmq.errors import InvalidName, InvalidOption, Overloaded, QmqError, UnknownGroup, UnknownMessage
from qmq.format.ids import MessageId
from qmq.net.protocol.types import AT_MOST_ONCE, RESENT_BIT, Disposition
from tests.broker.group_state import WrittenRecords, ledger_of
from tests.broker.harness import Driven
from tests.broker.test_admin import ask
from tests.broker.test_consuming import Consumer, filled, killed, many

STOPS = pytest.mark.parametrize("stop", [Driven.restart, killed])
RUN = b"r" * 16


def resend(driven: Driven, run: bytes | None = None, connection: int = 9, **fields: Any) -> dict[str, Any]:
    """Ask until the resend has ended; return its answer. Checkpoints come as from the daemon."""
    fields = {"run": run or os.urandom(16), **fields}
    for _ in range(10_000):
        answer = once(driven, connection, fields)
        if answer["done"]:
            return answer
    raise AssertionError("it does not end")


def once(driven: Driven, connection: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Ask once; return the answer."""
    command = Administer(connection, driven.request(), "resend", fields)
    said = driven.do(command)
    for turn in range(10_000):
        found = [effect for effect in said if getattr(effect, "request", None) == command.request]
        if found:
            return fields_of(found[0])
        if driven.broker.wants_checkpoint():
            driven.checkpoint()
        said = driven.advance(0 if turn < 30 else 5)
    raise AssertionError("no answer came")


def fields_of(answer: Effect) -> dict[str, Any]:
    if isinstance(answer, Refused):
        raise answer.error
    assert isinstance(answer, Administered), answer
    if "nothing" in answer.fields:
        raise InvalidOption(answer.fields["nothing"])
    return answer.fields


def counts(answer: dict[str, Any]) -> ResendCounts:
    return ResendCounts(*(answer[name] for name in ResendCounts._fields))


def id_of(driven: Driven, sent: Sent, at: int = 0) -> bytes:
    return bytes.fromhex(str(MessageId(driven.store.store_id, sent.partition, sent.position + at)))


def handled(driven: Driven, name: str = "c", *prefixes: str, **settings: Any) -> Consumer:
    """Return a consumer that has acked all messages."""
    consumer = Consumer(driven, name, *prefixes, **settings)
    while consumer.pull():
        pass
    consumer.ack()
    consumer.got.clear()
    return consumer


def marked(consumer: Consumer) -> dict[bytes, tuple[int, bool]]:
    """Return attempt and mark of each message that the consumer got, and forget them."""
    found = {body: (attempt % RESENT_BIT, attempt >= RESENT_BIT) for body, attempt in consumer.got.values()}
    consumer.got.clear()
    return found


# --- what comes again ------------------------------------------------------------------------------------------------


@STOPS
def test_what_was_acked_comes_again_as_the_first_attempt_marked(tmp_path: Path, stop: Callable[[Driven], None]) -> None:
    driven = filled(tmp_path)
    consumer = handled(driven)
    answer = resend(driven, prefix="a.", group="g")
    assert counts(answer) == ResendCounts(resent=10)
    assert (answer["groups"], answer["total"], answer["looked"]) == (1, 10, 10)
    stop(driven)
    consumer.join()
    assert consumer.pull(4) == many(4)
    assert consumer.pull() == many(10)[4:]
    assert marked(consumer) == dict.fromkeys(many(10), (1, True))
    driven.send("a.x", b"new")
    assert consumer.pull() == [b"new"]
    assert marked(consumer) == {b"new": (1, False)}
    driven.close()


@STOPS
def test_the_mark_stays_over_failures(tmp_path: Path, stop: Callable[[Driven], None]) -> None:
    driven = filled(tmp_path, 2)
    consumer = handled(driven, retry_delays_us=(0,), max_attempts=2)
    resend(driven, prefix="", group="g")
    assert consumer.pull() == many(2)
    first = min(consumer.got)
    consumer.got.clear()
    consumer.back(first, first + 2, Disposition.NACK)
    stop(driven)
    consumer.join()
    assert consumer.pull() == many(2)
    assert marked(consumer) == dict.fromkeys(many(2), (2, True))
    driven.close()


def test_a_range_of_messages_is_one_retry(tmp_path: Path) -> None:
    driven = filled(tmp_path, 50)
    handled(driven)
    records = WrittenRecords(driven)
    resend(driven, prefix="a.x", group="g")
    (retry,) = ledger_of(driven).retries.waiting()
    assert retry.messages[3:5] == (0, 50)
    assert [one.kind for one in records.take()] == [RecordKind.RESENT] * 2, "that it begins, and all of it"
    driven.close()


def test_ids_name_single_messages(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    command = driven.send_command({"a.x": many(3), "a.y": [b"y0", b"y1"]})
    (sent,) = [one for one in driven.do(command) if isinstance(one, Sent)]
    driven.send("a.x", b"later")
    consumer = handled(driven)
    wanted = [id_of(driven, sent, at) for at in (4, 1, 1)]
    assert counts(resend(driven, ids=wanted, group="g")).resent == 2
    assert sorted(consumer.pull()) == [b"1", b"y1"]
    driven.close()


def test_sequences_name_messages(tmp_path: Path) -> None:
    driven = filled(tmp_path, 6)
    consumer = handled(driven)
    answer = resend(driven, sequences=[["a.x", 4, 100], ["a.x", 1, 2]], group="g")
    assert counts(answer).resent == 3
    assert consumer.pull() == [b"1", b"4", b"5"]
    driven.close()


def test_times_choose_from_the_first_to_before_the_last(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    stamps = []
    for body in many(6):
        driven.advance(1_000)
        stamps.append(driven.send("a.x", body).stored_at_us)
    consumer = handled(driven)
    answer = resend(driven, prefix="a.", since_us=stamps[2], until_us=stamps[4], group="g")
    assert counts(answer).resent == 2
    assert consumer.pull() == [b"2", b"3"]
    with pytest.raises(InvalidOption, match="nothing is selected: no message of that time"):
        resend(driven, prefix="a.", since_us=stamps[5] + 1, group="g")
    with pytest.raises(InvalidOption, match="nothing is selected"):
        resend(driven, prefix="a.", until_us=stamps[0], group="g")
    driven.close()


def test_all_groups_that_follow_get_them_and_no_other(tmp_path: Path) -> None:
    driven = filled(tmp_path, 3)
    driven.send("b", b"b")
    all_of, some = handled(driven, "1", group="all"), handled(driven, "2", "a.", group="some")
    others = handled(driven, "3", "b", group="b")
    answer = resend(driven, prefix="a.", all_groups=True)
    assert (counts(answer).resent, answer["groups"], answer["total"]) == (6, 2, 6)
    assert (all_of.pull(), some.pull(), others.pull()) == (many(3), many(3), [])
    driven.close()


def test_a_group_gets_what_it_follows_of_the_selection(tmp_path: Path) -> None:
    driven = filled(tmp_path, 3)
    driven.send("b", b"b")
    consumer = handled(driven, "c", "a.")
    assert counts(resend(driven, prefix="", group="g")).resent == 3
    assert consumer.pull() == many(3)
    driven.close()


# --- what is left alone ----------------------------------------------------------------------------------------------


def test_what_waits_is_in_flight_or_in_retry_is_left_alone(tmp_path: Path) -> None:
    driven = filled(tmp_path, 10)
    consumer = Consumer(driven, "c", retry_delays_us=(5_000_000,))
    assert consumer.pull(8) == many(8)
    consumer.ack(0, 1, 2)
    consumer.back(3, 5, Disposition.NACK)
    consumer.got.clear()
    answer = resend(driven, prefix="a.", group="g")
    assert counts(answer) == ResendCounts(resent=3, waiting=2, in_flight=3, retrying=2)
    assert sorted(consumer.pull() + consumer.pull()) == [b"0", b"1", b"2", b"8", b"9"]
    driven.advance(5_000)
    assert sorted(consumer.pull() + consumer.pull()) == [b"3", b"4"]
    driven.close()


def test_what_is_not_visible_yet_is_left_alone(tmp_path: Path) -> None:
    """It is written, and not synced; the group begins behind all messages, so it has no cursor there yet."""
    driven = filled(tmp_path, 2)
    driven.advance(1)
    consumer = Consumer(driven, "c", start=("time", driven.now.wall_us))
    driven.checkpoint()
    driven.auto_sync = False
    driven.advance(1)
    driven.do(driven.send_command({"a.x": [b"late"], "a.y": [b"later"]}))
    assert counts(resend(driven, prefix="a.", group="g")) == ResendCounts(resent=2)
    driven.auto_sync = True
    driven.sync()
    assert counts(resend(driven, sequences=[["a.x", 0, 9]], group="g")) == ResendCounts(waiting=1, retrying=2)
    assert sorted(consumer.pull() + consumer.pull()) == [b"0", b"1", b"late", b"later"]
    assert consumer.pull() == []
    driven.close()


def test_a_second_resend_leaves_the_first_alone(tmp_path: Path) -> None:
    driven = filled(tmp_path, 5)
    consumer = handled(driven)
    assert counts(resend(driven, prefix="a.", group="g")).resent == 5
    assert counts(resend(driven, prefix="a.", group="g")) == ResendCounts(retrying=5)
    assert consumer.pull(2) == many(2)
    assert counts(resend(driven, prefix="a.", group="g")) == ResendCounts(in_flight=2, retrying=3)
    driven.close()


def test_retries_in_files_are_left_alone(tmp_path: Path) -> None:
    """More retries than are in memory, of a group that follows a prefix, so that they go by position."""
    driven = Driven(tmp_path)
    count = 9_000
    for at in range(0, count, 1_000):
        driven.send("a.x", *(b"%d" % number for number in range(at, at + 1_000)))
    consumer = Consumer(driven, "c", max_unacked=count, retry_delays_us=(60_000_000,))
    while consumer.pull():
        pass
    for at in range(0, count, 1_000):
        numbers = range(at, at + 1_000, 2)
        driven_back(consumer, [DispositionRange(one, one + 1, Disposition.NACK, None, "x") for one in numbers])
    consumer.ack(*range(1, count, 2))
    assert counts(resend(driven, prefix="a.", group="g")) == ResendCounts(resent=count // 2, retrying=count // 2)
    driven.close()


def driven_back(consumer: Consumer, backs: list[DispositionRange]) -> None:
    driven = consumer.driven
    driven.do(HandBack(consumer.connection, driven.request(), consumer.subscription, backs))


def test_dead_letters_come_again_and_are_dead_no_more(tmp_path: Path) -> None:
    driven = filled(tmp_path, 4)
    consumer = Consumer(driven, "c")
    consumer.pull()
    consumer.back(1, 3, Disposition.REJECT)
    consumer.ack(0, 3)
    consumer.got.clear()
    answer = resend(driven, prefix="a.", group="g")
    assert counts(answer) == ResendCounts(resent=4, redriven=2)
    assert ask(driven, "dead_letters", group="g")["rows"] == []
    assert consumer.pull() == many(4)
    driven.close()


def test_what_a_redrive_brings_meanwhile_is_not_doubled(tmp_path: Path) -> None:
    """The resend has looked at the dead letters; then one is redriven, and one is deleted."""
    driven = filled(tmp_path, 200)
    consumer = Consumer(driven, "c")
    consumer.pull()
    consumer.back(0, 200, Disposition.REJECT)
    consumer.got.clear()
    rows = ask(driven, "dead_letters", group="g")["rows"]
    until_it_has_looked(driven, prefix="a.", group="g")
    ask(driven, "redrive", group="g", numbers=[rows[0]["number"]])
    ask(driven, "delete_dead", group="g", numbers=[rows[199]["number"]])
    assert counts(resend(driven, run=RUN, prefix="a.", group="g")) == ResendCounts(198, redriven=198, retrying=2)
    while consumer.pull():
        pass
    assert sorted(int(body) for body, _ in consumer.got.values()) == list(range(199))
    driven.close()


def until_it_has_looked(driven: Driven, **fields: Any) -> None:
    """Begin the resend RUN; stop where it has noted which messages to leave alone, and has not handed out any."""
    driven.checkpoint()
    driven.broker.handle(Administer(9, driven.request(), "resend", {"run": RUN, **fields}), driven.now)
    while ledger_of(driven).resends.get(RUN) is None or ledger_of(driven).retries._watches:
        driven.advance(5)
    progress = ledger_of(driven).resends.get(RUN)
    assert progress is not None
    assert progress.selection is not None
    assert progress.counts == ResendCounts()


def test_what_is_taken_and_acked_meanwhile_is_not_sent_again(tmp_path: Path) -> None:
    driven = filled(tmp_path, 200)
    consumer = Consumer(driven, "c", retry_delays_us=(0,))
    assert len(consumer.pull(150)) == 150
    consumer.back(0, 100, Disposition.REJECT)  # so that the look takes more than one step
    until_it_has_looked(driven, prefix="a.", group="g")
    consumer.ack(*range(100, 150))
    consumer.got.clear()
    assert consumer.pull() == many(200)[150:]
    consumer.ack()
    assert counts(resend(driven, run=RUN, prefix="a.", group="g")) == ResendCounts(
        resent=100, redriven=100, waiting=50, in_flight=50
    )
    driven.close()


def test_what_fails_during_the_look_is_left_alone(tmp_path: Path) -> None:
    driven = filled(tmp_path, 200)
    consumer = Consumer(driven, "c", retry_delays_us=(60_000_000,))
    assert len(consumer.pull(150)) == 150
    consumer.back(0, 100, Disposition.REJECT)  # so that the look takes more than one step
    driven.checkpoint()
    driven.broker.handle(
        Administer(9, driven.request(), "resend", {"run": RUN, "prefix": "a.", "group": "g"}), driven.now
    )
    while not ledger_of(driven).retries._watches:
        driven.advance(0)
    consumer.back(100, 150, Disposition.NACK)
    assert counts(resend(driven, run=RUN, prefix="a.", group="g")) == ResendCounts(
        resent=100, redriven=100, waiting=50, retrying=50
    )
    driven.close()


def test_it_waits_until_a_checkpoint_has_the_names(tmp_path: Path) -> None:
    driven = filled(tmp_path, 3)
    consumer = handled(driven)
    driven.do(Administer(9, driven.request(), "resend", {"run": RUN, "prefix": "a.", "group": "g"}))
    for _ in range(10):
        driven.advance(1)
    assert ledger_of(driven).retries.is_empty
    assert driven.broker.wants_checkpoint()
    driven.checkpoint()
    driven.advance(0)
    driven.advance(0)
    assert consumer.pull() == many(3)
    driven.close()


# --- many ranges, and ends in the middle -----------------------------------------------------------------------------


def scattered(path: Path, subjects: int = 3_000) -> tuple[Driven, Consumer]:
    """Return a broker with a message of each of many subjects, all acked, so that a resend takes several steps."""
    driven = Driven(path)
    for at in range(0, subjects, 500):
        driven.do(driven.send_command({f"a.{number}": [b"%d" % number] for number in range(at, at + 500)}))
    return driven, handled(driven)


@STOPS
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_it_goes_on_after_any_end(tmp_path: Path, stop: Callable[[Driven], None], steps: int) -> None:
    driven, consumer = scattered(tmp_path)
    driven.checkpoint()
    driven.do(Administer(9, driven.request(), "resend", {"run": RUN, "prefix": "a.", "group": "g"}))
    while ledger_of(driven).retries.count == 0:
        driven.advance(5)
    for _ in range(steps - 1):
        driven.advance(0)
    assert 0 < ledger_of(driven).retries.count < 3_000
    stop(driven)
    driven.send("a.1", b"later")
    consumer.join()
    assert counts(resend(driven, run=RUN, prefix="a.", group="g")) == ResendCounts(resent=3_000)
    while consumer.pull():
        pass
    got = sorted(body for body, _ in consumer.got.values())
    assert got == sorted([*many(3_000), b"later"])
    assert counts(resend(driven, run=RUN, prefix="a.", group="g")) == ResendCounts(resent=3_000), "asked again"
    assert consumer.pull() == []
    driven.close()


def test_it_goes_on_without_its_client(tmp_path: Path) -> None:
    driven, _ = scattered(tmp_path)
    driven.do(Administer(9, driven.request(), "resend", {"run": RUN, "prefix": "a.", "group": "g"}))
    driven.do(Disconnected(9))
    driven.checkpoint()
    for _ in range(300):
        driven.advance(5)
    assert ledger_of(driven).retries.count == 3_000
    driven.close()


def test_a_client_learns_how_far_it_is(tmp_path: Path) -> None:
    driven, _ = scattered(tmp_path)
    fields = {"run": RUN, "prefix": "a.", "group": "g"}
    command = Administer(9, driven.request(), "resend", fields)
    driven.do(command)
    driven.checkpoint()
    while ledger_of(driven).retries.count == 0:
        driven.advance(5)
    (answer,) = driven.advance(250)
    found = fields_of(answer)
    assert not found["done"]
    assert found["total"] == 3_000
    assert 0 < found["looked"] == found["resent"] < 3_000
    assert resend(driven, run=RUN, prefix="a.", group="g")["looked"] == 3_000
    driven.close()


def test_the_next_resend_waits_for_the_first(tmp_path: Path) -> None:
    driven, consumer = scattered(tmp_path)
    driven.do(Administer(9, driven.request(), "resend", {"run": RUN, "prefix": "a.", "group": "g"}))
    assert counts(resend(driven, prefix="a.", group="g")) == ResendCounts(retrying=3_000)
    assert len(consumer.pull()) > 0
    driven.close()


def test_a_dry_run_counts_and_changes_nothing(tmp_path: Path) -> None:
    driven, consumer = scattered(tmp_path)
    driven.send("a.1", b"waits")
    records = WrittenRecords(driven)
    answer = resend(driven, prefix="a.", group="g", dry_run=True)
    assert counts(answer) == ResendCounts(resent=3_000, waiting=1)
    assert records.take() == []
    assert consumer.pull() == [b"waits"]
    driven.close()


def test_a_dry_run_ends_with_its_client(tmp_path: Path) -> None:
    driven, _ = scattered(tmp_path)
    driven.do(Administer(9, driven.request(), "resend", {"run": RUN, "prefix": "a.", "group": "g", "dry_run": True}))
    driven.do(Disconnected(9))
    assert not driven.broker._resends._jobs
    driven.close()


def test_a_seek_ends_it_for_that_group(tmp_path: Path) -> None:
    driven, consumer = scattered(tmp_path)
    other = handled(driven, "other", group="h")
    driven.checkpoint()
    command = Administer(9, driven.request(), "resend", {"run": RUN, "prefix": "a.", "all_groups": True})
    driven.do(command)
    while ledger_of(driven).retries.count == 0:
        driven.advance(5)
    ask(driven, "seek_group", group="g", to="first", clear_retries=True)
    with pytest.raises(InvalidOption, match="group 'g' was sought while messages were resent"):
        resend(driven, run=RUN, prefix="a.", all_groups=True)
    consumer.join()
    assert ledger_of(driven).retries.is_empty
    found = list[bytes]()
    while more := other.pull():
        found += more
    assert sorted(found) == sorted(many(3_000)), "the other group has all"
    killed(driven)
    driven.checkpoint()
    for _ in range(20):
        driven.advance(1)
    assert ledger_of(driven).retries.is_empty
    driven.close()


def test_a_deleted_group_ends_it(tmp_path: Path) -> None:
    driven, _ = scattered(tmp_path)
    driven.checkpoint()
    fields = {"run": RUN, "prefix": "a.", "group": "g"}
    driven.do(Administer(9, driven.request(), "resend", fields))
    while ledger_of(driven).retries.count == 0:
        driven.advance(5)
    ask(driven, "delete_group", group="g")
    driven.advance(5)
    assert not driven.broker._resends._jobs
    driven.close()


# --- refusals: nothing is changed ------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], type[QmqError], str]] = [
    ({"prefix": "a.", "group": "absent"}, UnknownGroup, "absent"),
    ({"prefix": "a.", "group": "once"}, InvalidOption, "at_most_once"),
    ({"prefix": "a."}, InvalidOption, "either to one group or to all"),
    ({"prefix": "a.", "group": "g", "all_groups": True}, InvalidOption, "either to one group or to all"),
    ({"group": "g"}, InvalidOption, "with ids, of sequences, or of a prefix"),
    ({"prefix": "a.", "ids": [bytes(16)], "group": "g"}, InvalidOption, "with ids, of sequences, or of a prefix"),
    ({"prefix": "no body", "group": "g"}, InvalidName, "no body"),
    ({"prefix": "c.", "group": "g"}, InvalidOption, "nothing is selected: no message of prefix 'c.'"),
    ({"prefix": "a.y", "group": "g"}, InvalidOption, "nothing is selected: no message of subject 'a.y'"),
    ({"prefix": "b", "group": "g"}, InvalidOption, "group 'g' does not follow subject 'b'"),
    ({"prefix": "a.", "since_us": 5, "until_us": 5, "group": "g"}, InvalidOption, "since is not before until"),
    ({"prefix": "a.", "since_us": -1, "group": "g"}, InvalidOption, "microseconds"),
    ({"prefix": "a.", "until_us": "x", "group": "g"}, InvalidOption, "microseconds"),
    ({"ids": [], "group": "g"}, InvalidOption, "list of message ids"),
    ({"ids": [b"short"], "group": "g"}, InvalidOption, "list of message ids"),
    ({"ids": ["text"], "group": "g"}, InvalidOption, "list of message ids"),
    ({"ids": [bytes(16)] * 1_001, "group": "g"}, InvalidOption, "too many"),
    ({"ids": [bytes(16)], "group": "g"}, UnknownMessage, "is of store 000000000000; this broker's is"),
    ({"ids": [bytes(16)], "since_us": 5, "group": "g"}, InvalidOption, "neither since nor until"),
    ({"sequences": [["a.x", 0, 1]], "until_us": 5, "group": "g"}, InvalidOption, "neither since nor until"),
    ({"sequences": [], "group": "g"}, InvalidOption, "1 to 1,000 lists"),
    ({"sequences": [["a.x", 1, 1]], "group": "g"}, InvalidOption, "a subject and two sequences"),
    ({"sequences": [["a.x", 0, "1"]], "group": "g"}, InvalidOption, "a subject and two sequences"),
    ({"sequences": [["a.x", 0, 2], ["a.x", 1, 3]], "group": "g"}, InvalidOption, "overlap"),
    ({"sequences": [["absent", 0, 2]], "group": "g"}, UnknownMessage, "there is no subject 'absent' here"),
    ({"sequences": [["b", 0, 1]], "group": "g"}, InvalidOption, "does not follow 'b'"),
]


@pytest.mark.parametrize(("fields", "error", "text"), REFUSED)
def test_a_wrong_request_is_refused_and_changes_nothing(
    tmp_path: Path, fields: dict[str, Any], error: type[QmqError], text: str
) -> None:
    driven = filled(tmp_path, 3)
    driven.send("b", b"b")
    handled(driven, "c", "a.")
    driven.do(Subscribe(3, driven.request(), "once", ("a.",), "m", None, b"n", b"m", mode=AT_MOST_ONCE))
    records = WrittenRecords(driven)
    with pytest.raises(error, match=text):
        resend(driven, **fields)
    assert records.take() == []
    assert ledger_of(driven).retries.is_empty
    driven.close()


def test_ids_that_are_not_stored_or_not_followed_are_refused(tmp_path: Path) -> None:
    driven = filled(tmp_path, 3)
    handled(driven, "c", "a.")
    sent = driven.send("b", b"b")
    first = driven.store.partitions[0].consumer_log.read_entry(0)[1]
    ids = [
        bytes.fromhex(str(MessageId(driven.store.store_id, partition, position)))
        for partition, position in ((0, first - 1), (0, first + 1), (0, sent.position + 1), (0, 1 << 62), (7, first))
    ]
    for one in ids:
        with pytest.raises(UnknownMessage, match="is not stored here, or not any more"):
            resend(driven, ids=[one], group="g")
    with pytest.raises(InvalidOption, match="group 'g' does not follow 'b', the subject of one of these messages"):
        resend(driven, ids=[id_of(driven, sent)], group="g")
    with pytest.raises(UnknownMessage, match="sent with a delay"):
        resend(driven, ids=[bytes.fromhex(str(MessageId(driven.store.store_id, 0x8000, 1)))], group="g")
    assert ledger_of(driven).retries.is_empty
    driven.close()


def test_too_many_messages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = filled(tmp_path, 5)
    handled(driven)
    monkeypatch.setattr("qmq.broker.find.resend.MOST_MESSAGES", 4)
    with pytest.raises(InvalidOption, match="5 messages are selected; one resend takes at most 4"):
        resend(driven, prefix="a.", group="g")
    assert ledger_of(driven).retries.is_empty
    driven.close()


def test_resends_that_wait_are_bounded(tmp_path: Path) -> None:
    driven = filled(tmp_path, 1)
    handled(driven)
    for number in range(100):
        fields = {"run": number.to_bytes(16, "little"), "prefix": "a.", "group": "g"}
        driven.broker.handle(Administer(9, driven.request(), "resend", fields), driven.now)
    with pytest.raises(Overloaded):
        resend(driven, prefix="a.", group="g")
    driven.close()
