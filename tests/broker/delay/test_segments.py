"""Segments of the delay log go once all of their messages are delivered or cancelled, whatever crashes meanwhile."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from qmq.broker.ports.commands import Send, SyncBroken
from qmq.broker.ports.effects import Sent
from qmq.errors import SyncFailed
from qmq.format.layout import NO_SEQUENCE
from qmq.storage.disk.disk import Disk
from qmq.storage.verify.verify import verify
from tests.broker.delay.test_delay import S, cancel, command, crash, delay, follow, pulled
from tests.broker.harness import Driven
from tests.effort import part_of

SMALL = {"segment_bytes": 1_280, "max_frame_bytes": 1_024}
DAY = 86_400 * S


def segments(driven: Driven) -> list[str]:
    """Return the files of the delay log's segments."""
    return sorted(path.stem for path in (driven.directory / "delayed" / "log-0").glob("*.messages"))


def checkpoints(driven: Driven, count: int = 6) -> None:
    """Take more than enough checkpoints for idle segments to go."""
    for _ in range(count):
        driven.checkpoint()


def fill(driven: Driven, seconds: int, count: int = 20, first: int = 0) -> list[str]:
    """Send messages due by then, over a few segments."""
    return [delay(driven, "a", seconds * S, first=first + number)[0] for number in range(count)]


def drain(driven: Driven) -> list[bytes]:
    """Return the bodies of all delivered messages."""
    subscription, found = follow(driven), list[bytes]()
    while some := pulled(driven, subscription):
        found += [body for body, _ in some]
    return found


def clean(driven: Driven) -> None:
    driven.close()
    assert not [one for one in verify(driven.directory, Disk()).findings if one.severity == "fault"]


def test_segments_of_delivered_messages_go_after_two_checkpoints(tmp_path: Path) -> None:
    driven = Driven(tmp_path, **SMALL)
    fill(driven, 10)
    full = segments(driven)
    assert len(full) > 3
    checkpoints(driven)
    assert segments(driven) == full, "they wait"
    driven.advance(11_000)
    for taken in range(6):
        driven.checkpoint()
        # Claimed; idle in two; not named by two.
        assert (segments(driven) == full) == (taken < 4), taken
        assert driven.broker.wants_checkpoint() == (taken < 4), taken
    assert segments(driven) == full[-1:]
    assert len(list((tmp_path / "delayed" / "consumer-log" / "0").iterdir())) <= 2
    assert len(list((tmp_path / "delayed" / "log-0").glob("*.index"))) <= 1
    assert sorted(drain(driven)) == sorted(str(n).encode() for n in range(20))
    clean(driven)


@pytest.mark.parametrize("stop", ["clean", "kill"])
def test_a_long_delay_keeps_only_its_own_segment(tmp_path: Path, stop: str) -> None:
    driven = Driven(tmp_path, **SMALL)
    fill(driven, 10, 8)
    (name,) = delay(driven, "long", 30 * DAY)
    fill(driven, 10, 12, first=8)
    (other,) = delay(driven, "long", 40 * DAY)
    fill(driven, 10, 20, first=20)
    full = segments(driven)
    driven.advance(11_000)
    checkpoints(driven)
    assert len(full) >= 6
    assert len(segments(driven)) == 3, "two that wait, and the one that is written"
    assert driven.broker.delayed() == {"long": 2}
    if stop == "clean":
        driven.restart()
    else:
        crash(driven)
    fill(driven, 10, 20, first=40)
    driven.advance(11_000)
    checkpoints(driven)
    assert len(segments(driven)) == 3
    assert cancel(driven, other)
    checkpoints(driven)
    assert len(segments(driven)) <= 3
    driven.advance(31 * 86_400_000)
    checkpoints(driven)
    found = drain(driven)
    assert sorted(found) == sorted([str(n).encode() for n in range(60)] + [b"0"])
    assert not cancel(driven, name)
    assert len(segments(driven)) == 1
    clean(driven)


def test_cancelled_messages_need_no_segment(tmp_path: Path) -> None:
    driven = Driven(tmp_path, **SMALL)
    names = fill(driven, 700 * 86_400)
    full = segments(driven)
    for name in names:
        assert cancel(driven, name)
    checkpoints(driven, 12)
    assert len(segments(driven)) < len(full)
    assert not set(segments(driven)) & set(full[:-1])
    for _ in range(2):
        crash(driven)
        assert driven.broker.delayed() == {}
    driven.advance(701 * 86_400_000)
    assert drain(driven) == []
    assert driven.broker.take_damaged() == []
    clean(driven)


def test_cancellations_count_without_any_checkpoint(tmp_path: Path) -> None:
    """The segment of the cancellation goes no earlier than that of the message."""
    driven = Driven(tmp_path, **SMALL)
    gone, _ = delay(driven, "a", 100 * S)[0], delay(driven, "b", 100 * S)
    fill(driven, 1, 20, first=100)
    assert cancel(driven, gone)
    fill(driven, 1, 20, first=200)
    driven.advance(2_000)
    checkpoints(driven)
    assert len(segments(driven)) == 3
    driven.store.close(clean=False)
    for checkpoint in (*tmp_path.glob("checkpoint-*"), *tmp_path.glob("delayed/checkpoint-*")):
        checkpoint.unlink()
    driven.wanted.clear()
    driven.open()
    driven.advance(200_000)
    assert sorted(drain(driven)) == sorted(str(n).encode() for n in [0, *range(100, 120), *range(200, 220)])
    driven.store.close(clean=False)


@pytest.mark.parametrize("which", ["delayed", "."])
def test_the_checkpoint_before_the_last_is_enough(tmp_path: Path, which: str) -> None:
    """After each checkpoint the last one rots: nothing is lost, delivered twice, or reported."""
    for taken in range(7):
        directory = tmp_path / str(taken)
        driven = Driven(directory, **SMALL)
        fill(driven, 10)
        delay(driven, "long", DAY)
        driven.checkpoint()
        driven.advance(11_000)
        checkpoints(driven, taken)
        driven.store.close(clean=False)
        newest = max((directory / which).glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
        newest.write_bytes(newest.read_bytes()[:-1])
        driven.wanted.clear()
        driven.open()
        assert not [part.damaged for part in driven.store.recovery.partitions if part.damaged], taken
        driven.advance(86_401_000)
        assert sorted(drain(driven)) == sorted([b"0", *(str(n).encode() for n in range(20))]), taken
        assert driven.broker.take_damaged() == []
        checkpoints(driven)
        assert len(segments(driven)) == 1, taken
        clean(driven)


def test_segments_stay_until_a_checkpoint_has_the_delivery(tmp_path: Path) -> None:
    driven = Driven(tmp_path, auto_sync=False, **SMALL)
    for number in range(10):
        driven.do(command(driven, "a", [10 * S], flush=False, first=number))
    full = segments(driven)
    driven.broker.handle(SyncBroken(0, SyncFailed("the disk of partition 0 has failed")), driven.now)
    driven.advance(11_000)
    driven.broker.take_damaged()
    checkpoints(driven)
    assert segments(driven) == full
    crash(driven)
    driven.auto_sync = True
    driven.advance(1_000)
    assert sorted(drain(driven)) == sorted(str(n).encode() for n in range(10))
    clean(driven)


def test_a_repeat_of_a_removed_batch_is_recognised(tmp_path: Path) -> None:
    driven = Driven(tmp_path, **SMALL)
    first = command(driven, "a", [S])
    again = Send(1, driven.request(), memoryview(bytearray(first.batch)), True)
    (sent,) = driven.do(first)
    assert isinstance(sent, Sent)
    fill(driven, 1)
    driven.advance(2_000)
    checkpoints(driven)
    assert f"{sent.position:016x}" not in segments(driven)
    (repeated,) = driven.do(again)
    assert isinstance(repeated, Sent)
    assert (repeated.position, repeated.partition) == (sent.position, sent.partition)
    assert repeated.first_sequences == NO_SEQUENCE
    assert len(drain(driven)) == 21
    clean(driven)


@pytest.mark.parametrize("seed", range(part_of(5)))
def test_any_history_loses_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    driven = Driven(tmp_path, **SMALL)
    known, cancelled, most = dict[str, bytes](), set[str](), 0
    for _ in range(150):
        kind = chance.random()
        if kind < 0.55:
            delays = [chance.choice((1, 5, 60, 86_400)) * S for _ in range(chance.choice((1, 1, 4)))]
            first = len(known)
            for offset, name in enumerate(delay(driven, chance.choice("ab"), *delays, first=first)):
                known[name] = str(first + offset).encode()
        elif kind < 0.65 and known:
            name = chance.choice(list(known))
            if cancel(driven, name):
                cancelled.add(name)
        elif kind < 0.85:
            driven.checkpoint()
        elif kind < 0.95:
            driven.advance(chance.choice((500, 3_000, 30_000)))
        elif kind < 0.98:
            crash(driven)
        else:
            driven.restart()
        most = max(most, len(segments(driven)))
    for _ in range(30):
        driven.advance(86_401_000)
    found = drain(driven)
    assert sorted(found) == sorted(body for name, body in known.items() if name not in cancelled)
    assert driven.broker.take_damaged() == []
    checkpoints(driven)
    while driven.broker.wants_checkpoint():  # a segment of cancellations goes after those of their messages
        driven.checkpoint()
    print(f"seed {seed}: {len(known)} sent, {len(cancelled)} cancelled, at most {most} segments")
    assert len(segments(driven)) == 1
    assert most > 2
    clean(driven)
