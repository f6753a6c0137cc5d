"""A message with a unique text is stored once, however often it is sent, and its sender learns which was the first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from crc32c import crc32c

from qmq.broker.ports.commands import Administer, Send
from qmq.broker.ports.effects import Refused, Sent, SentDuplicates
from qmq.broker.ports.limits import BrokerLimits
from qmq.errors import BadBatch, Overloaded, SequenceForgotten
from qmq.format.batch import parse_header
from qmq.format.ids import MessageId
from qmq.format.layout import DELAY_PARTITION
from tests.broker.harness import Driven, bodies_of
from tests.broker.publish.unique_batches import Draft, Told, answers_in, told_of, unique_batch_of
from tests.broker.retention.test_retention import driven_in, send, settle
from tests.broker.test_broken_partition import LEFT, SMALL, break_partition, started_again
from tests.fake_disk import FakeDisk

_MINUTE_MS = 60_000


class Sender:
    """A producer of a broker."""

    def __init__(self, driven: Driven, name: bytes, connection: int = 1) -> None:
        self.driven = driven
        self.producer_id = name.ljust(16)
        self.connection = connection
        self.sequence = 0

    def command(self, drafts: Sequence[Draft], *, flush: bool = True, delay_us: int = 0) -> Send:
        """Return a Send of a new batch."""
        batch = unique_batch_of(drafts, self.sequence, self.producer_id, delay_us)
        self.sequence += len(drafts)
        return Send(self.connection, self.driven.request(), batch, flush)

    def send(self, *texts: str | None, flush: bool = True, delay_us: int = 0) -> list[Told]:
        """Send messages to "a" that have their unique texts as bodies; return what the answer says of each."""
        drafts = [Draft("a", (text or "none").encode(), text) for text in texts]
        (answer,) = answers_in(self.driven.do(self.command(drafts, flush=flush, delay_us=delay_us)))
        return told_of(answer, drafts)


def again(driven: Driven, command: Send) -> Send:
    """Return the same batch as a client sends it that got no answer."""
    return command._replace(request=driven.request(), batch=memoryview(bytearray(command.batch)))


def kill(driven: Driven) -> None:
    """Start the broker again as after kill -9: what was written is there."""
    driven.store.close(clean=False)
    driven.wanted.clear()
    driven.reads.clear()
    driven.open()


def test_a_repeat_is_not_stored_and_names_the_first(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    (first,), (repeat,) = Sender(driven, b"one").send("t"), Sender(driven, b"two").send("t")
    assert repeat == first._replace(duplicate=True)
    (other,) = Sender(driven, b"two").send("u")
    assert not other.duplicate
    assert bodies_of(driven.pull(driven.subscribe("a"))) == [b"t", b"u"]
    (handled,) = Sender(driven, b"three").send("t")
    assert handled == repeat, "the message is handled by now"
    driven.close()


def test_a_text_repeats_in_its_subject_only(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    sender = Sender(driven, b"one")
    drafts = [Draft("a", b"1", "t"), Draft("b", b"2", "t")]
    (answer,) = answers_in(driven.do(sender.command(drafts)))
    assert isinstance(answer, Sent)
    assert len({told.position for told in told_of(answer, drafts)}) == 2
    driven.close()


def test_a_batch_is_stored_without_its_repeats(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    sender = Sender(driven, b"one")
    (old,) = sender.send("old")
    told = sender.send("x", "old", "y", "x", None, "y", "z")
    assert [one.duplicate for one in told] == [False, True, False, True, False, True, False]
    assert told[1] == old._replace(duplicate=True)
    assert told[3] == told[0]._replace(duplicate=True)
    assert told[5] == told[2]._replace(duplicate=True)
    assert [told[at].sequence for at in (0, 2, 4, 6)] == [1, 2, 3, 4]
    assert bodies_of(driven.pull(driven.subscribe("a"))) == [b"old", b"x", b"y", b"none", b"z"]
    driven.close()


@pytest.mark.parametrize("between", ["turn", "restart", "kill", "kill behind a checkpoint"])
def test_a_batch_that_is_sent_again_gets_the_same_answer(tmp_path: Path, between: str) -> None:
    driven = Driven(tmp_path)
    sender = Sender(driven, b"one")
    sender.send("old")
    drafts = [Draft("a", text.encode(), text) for text in ("old", "x", "x", "y")]
    drafts += [Draft("b", b"1", "t"), Draft("c", b"2", "t"), Draft("c", b"3", "t")]
    command = sender.command(drafts)
    lost = again(driven, command)
    (answer,) = answers_in(driven.do(command))
    if between == "kill behind a checkpoint":
        driven.checkpoint()
    if between == "restart":
        driven.restart()
    elif between != "turn":
        kill(driven)
    (repeated,) = answers_in(driven.do(lost))
    assert isinstance(repeated, SentDuplicates)
    assert told_of(repeated, drafts) == told_of(answer, drafts)
    assert sorted(bodies_of(driven.pull(driven.subscribe("")))) == [b"1", b"2", b"old", b"x", b"y"]
    driven.close()


@pytest.mark.parametrize("texts", [["t"], ["t", "u"]])
@pytest.mark.parametrize("first_is_short", [False, True])
def test_the_short_way_takes_no_repeat(tmp_path: Path, texts: list[str], first_is_short: bool) -> None:
    """Two clients send the same bytes, so their batches have the same table."""
    driven = Driven(tmp_path)
    one, two = Sender(driven, b"one", 1), Sender(driven, b"two", 2)
    one.send("known")
    two.send("known, too")
    short_way = driven.broker.short_way
    assert short_way is not None
    drafts = [Draft("a", b"same", text) for text in texts]
    first, repeat = one.command(drafts, flush=False), two.command(drafts, flush=False)
    if first_is_short:
        assert short_way.send(1, 98, first.batch, len(first.batch), False, driven.now) is not None
    else:
        driven.do(first)
    assert short_way.send(2, 99, repeat.batch, len(repeat.batch), False, driven.now) is None
    (answer,) = answers_in(driven.do(repeat))
    assert [told.duplicate for told in told_of(answer, drafts)] == [True] * len(texts)
    driven.close()


def test_two_at_once_are_stored_once(tmp_path: Path) -> None:
    for flags in ((True, False), (False, True), (False, False)):
        driven = Driven(tmp_path / str(flags), auto_sync=False)
        one, two = Sender(driven, b"one", 1), Sender(driven, b"two", 2)
        drafts = [Draft("a", b"1", "t")]
        said = driven.do(one.command(drafts, flush=flags[0]), two.command(drafts, flush=flags[1]))
        if flags[0]:
            assert answers_in(said) == [], "the first may be lost yet"
        said += driven.sync()
        told = {answer.connection: told_of(answer, drafts)[0] for answer in answers_in(said)}
        assert told[2] == told[1]._replace(duplicate=True)
        driven.close()


def test_a_repeat_waits_for_the_disk_as_the_first_or_itself_asks(tmp_path: Path) -> None:
    driven = Driven(tmp_path, auto_sync=False)
    sender, drafts = Sender(driven, b"one"), [Draft("a", b"1", "t")]
    assert len(answers_in(driven.do(sender.command(drafts, flush=False)))) == 1
    assert answers_in(driven.do(sender.command(drafts, flush=True))) == []
    mixed = [*drafts, Draft("a", b"2", "u")]
    assert answers_in(driven.do(sender.command(mixed, flush=True))) == []
    assert len(answers_in(driven.sync() + driven.sync())) == 2
    driven.close()


@pytest.mark.parametrize("how", ["waits", "delivered", "cancelled", "restarted", "killed"])
def test_a_repeat_of_a_delayed_message(tmp_path: Path, how: str) -> None:
    driven = Driven(tmp_path)
    sender = Sender(driven, b"one")
    (first,) = sender.send("t", delay_us=1_000_000)
    assert first.partition == DELAY_PARTITION
    if how == "delivered":
        driven.advance(2_000)
    elif how == "cancelled":
        name = str(MessageId(driven.store.store_id, first.partition, first.position))
        driven.do(Administer(1, driven.request(), "cancel", {"id": name}))
    elif how == "restarted":
        driven.restart()
    elif how == "killed":
        kill(driven)
    told = sender.send("t", delay_us=1_000_000), sender.send("t")
    assert {(one.duplicate, one.partition, one.position) for (one,) in told} == {(True, *first[1:3])}
    driven.advance(5_000)
    assert bodies_of(driven.pull(driven.subscribe("a"))) == ([] if how == "cancelled" else [b"t"])
    driven.close()


def test_a_text_is_free_again_when_its_time_is_over(tmp_path: Path) -> None:
    driven = Driven(tmp_path, BrokerLimits(unique_for_ms=_MINUTE_MS))
    sender = Sender(driven, b"one")
    sender.send("t")
    driven.advance(_MINUTE_MS - 1)
    assert sender.send("t")[0].duplicate
    driven.restart()
    assert sender.send("t")[0].duplicate
    driven.advance(1)
    assert not sender.send("t")[0].duplicate
    assert sender.send("t")[0].duplicate
    driven.close()


def test_too_many_texts_are_forgotten_oldest_first(tmp_path: Path) -> None:
    driven = Driven(tmp_path, BrokerLimits(max_unique_texts=3))
    sender = Sender(driven, b"one")
    for text in "abcd":
        sender.send(text)
    assert (driven.broker.unique_texts.forgotten, len(driven.broker.unique_texts)) == (1, 3)
    assert [sender.send(text)[0].duplicate for text in "dcb"] == [True] * 3
    assert not sender.send("a")[0].duplicate
    driven.close()


def test_a_text_outlives_its_message(tmp_path: Path) -> None:
    driven = driven_in(tmp_path, BrokerLimits(retention_max_ms=10 * _MINUTE_MS))
    sender = Sender(driven, b"one")
    (first,) = sender.send("t")
    send(driven, 20)
    driven.advance(11 * _MINUTE_MS)
    settle(driven)
    assert driven.store.partitions[0].message_log.segment_at(first.position) is None, "retention has dropped it"
    assert sender.send("t")[0] == first._replace(duplicate=True)
    driven.close()


def test_nobody_knows_what_was_left_out_once_texts_are_forgotten(tmp_path: Path) -> None:
    driven = Driven(tmp_path, BrokerLimits(unique_for_ms=_MINUTE_MS))
    sender = Sender(driven, b"one")
    sender.send("t")
    command = sender.command([Draft("a", b"1", "t"), Draft("a", b"2", "u")])
    lost = again(driven, command)
    driven.do(command)
    driven.advance(_MINUTE_MS + 1)
    (refused,) = answers_in(driven.do(lost))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, SequenceForgotten)
    driven.close()


def test_a_field_that_contradicts_the_batch_is_refused(tmp_path: Path) -> None:
    driven = Driven(tmp_path)
    batch = unique_batch_of([Draft("a", b"1", "t")], 0)
    other = unique_batch_of([Draft("a", b"2", "t")], 0)
    data_start = parse_header(batch).data_start
    batch[data_start - 4 : data_start] = other[data_start - 4 : data_start]
    batch[84:88] = crc32c(batch[96:data_start], crc32c(batch[:84])).to_bytes(4, "little")
    (refused,) = answers_in(driven.do(Send(1, driven.request(), batch, True)))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, BadBatch)
    assert "the field 'unique'" in str(refused.error)
    driven.close()


@pytest.mark.parametrize("left", LEFT)
def test_a_text_is_as_free_as_its_message_is_lost(tmp_path: Path, left: str) -> None:
    """The sync of its batch fails, and the next start finds it or not."""
    disk = FakeDisk("boot-1")
    disk.track(tmp_path / "first")
    driven = Driven(tmp_path / "first", disk=disk, auto_sync=False, **SMALL)
    sender = Sender(driven, b"one")
    driven.do(sender.command([Draft("a", b"old", "old")]))
    driven.sync()
    driven.do(sender.command([Draft("a", b"doubtful", "doubtful")]))
    break_partition(driven)
    driven = started_again(driven, left)
    other = Sender(driven, b"two")
    assert other.send("old")[0].duplicate
    other.send("doubtful")
    assert bodies_of(driven.pull(driven.subscribe("a", start="first"))) == [b"old", b"doubtful"]
    driven.close()


@pytest.mark.parametrize("has_file", [True, False])
def test_many_texts_are_in_a_file_of_their_own_or_read_from_the_log(tmp_path: Path, has_file: bool) -> None:
    driven = Driven(tmp_path)
    sender = Sender(driven, b"one")
    texts = [f"text {number}" for number in range(20_000)]
    for start in range(0, len(texts), 5_000):
        sender.send(*texts[start : start + 5_000])
    driven.checkpoint()
    (path,) = tmp_path.glob("state-*-unique")
    sender.send("behind the checkpoint")
    if not has_file:
        path.unlink()
    kill(driven)
    for start in range(0, len(texts), 5_000):
        assert all(told.duplicate for told in Sender(driven, b"two").send(*texts[start : start + 5_000]))
    assert Sender(driven, b"two").send("behind the checkpoint")[0].duplicate
    assert len(driven.broker.unique_texts) == 20_001
    driven.checkpoint()  # the one before the last names the file still
    driven.close()


def test_a_failed_write_leaves_its_texts_free(tmp_path: Path) -> None:
    disk = FakeDisk()
    driven = Driven(tmp_path, disk=disk)
    sender = Sender(driven, b"one")
    sender.send("first")
    disk.fail_always("pwritev")
    drafts = [Draft("a", b"1", "t"), Draft("a", b"2", "first")]
    (refused,) = answers_in(driven.do(sender.command(drafts)))
    assert isinstance(refused, Refused)
    disk.heal()
    driven.advance(1_000)
    told = Sender(driven, b"two").send("t", "first")
    assert [one.duplicate for one in told] == [False, True]
    driven.close()


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_sends_repeats_and_restarts(tmp_path: Path, seed: int, partitions: int) -> None:
    draw = random.Random(f"{seed} {partitions}")
    driven = Driven(tmp_path, BrokerLimits(unique_for_ms=10 * _MINUTE_MS), partitions=partitions)
    senders = [Sender(driven, b"%d" % number, number + 1) for number in range(3)]
    stored = dict[tuple[str, str], Told]()
    bodies = list[bytes]()
    sent = list[tuple[Send, list[Draft], list[Told]]]()
    for step in range(40):
        what = draw.choice(["send"] * 6 + ["again"] * 3 + ["restart", "kill", "checkpoint", "advance"])
        if what == "restart":
            driven.restart()
        elif what == "kill":
            kill(driven)
        elif what == "checkpoint":
            driven.checkpoint()
        elif what == "advance":
            driven.advance(1_000)
        elif what == "again" and sent:
            command, drafts, told = draw.choice(sent[-6:])
            (answer,) = answers_in(driven.do(again(driven, command)))
            if isinstance(answer, Refused) and isinstance(answer.error, Overloaded):  # two partitions wait for the disk
                (answer,) = answers_in(driven.do(again(driven, command)))
            assert told_of(answer, drafts) == told
        else:
            drafts = sorted(
                (
                    Draft(draw.choice("ab"), b"%d.%d" % (step, number), draw.choice([None, *"stuvwxyz"]))
                    for number in range(draw.randint(1, 6))
                ),
                key=lambda draft: draft.subject,
            )
            command = draw.choice(senders).command(
                drafts, flush=draw.random() < 0.5, delay_us=draw.choice([0, 0, 500_000])
            )
            kept = again(driven, command)
            (answer,) = answers_in(driven.do(command))
            if isinstance(answer, Refused) and isinstance(answer.error, Overloaded):
                (answer,) = answers_in(driven.do(again(driven, kept)))
            told = told_of(answer, drafts)
            sent.append((kept, drafts, told))
            for draft, one in zip(drafts, told, strict=True):
                first = None if draft.text is None else stored.get((draft.subject, draft.text))
                assert one == (one._replace(duplicate=False) if first is None else first._replace(duplicate=True))
                if first is None:
                    bodies.append(draft.body)
                    if draft.text is not None:
                        stored[draft.subject, draft.text] = one
    driven.advance(5_000)
    assert sorted(bodies_of(driven.pull(driven.subscribe("")))) == sorted(bodies)
    driven.close()
