"""The wall clock is set an hour forward and back: nothing hangs, no send makes two messages, order and times hold."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from qmq.broker.ports.commands import Send
from qmq.broker.ports.effects import PulledMessages, Sent
from tests.broker.harness import Driven, batch_of, bodies_of

HOUR_US: Final = 3_600_000_000
JUMPS: Final = (-HOUR_US, HOUR_US, -10 * 365 * 24 * HOUR_US, 24 * HOUR_US)
pytestmark = pytest.mark.parametrize("jump_us", JUMPS)


def set_clock(driven: Driven, by_us: int) -> None:
    """Set the wall clock; the monotonic one goes on as it went."""
    driven.now = driven.now._replace(wall_us=driven.now.wall_us + by_us)
    driven.advance(1)


def killed(driven: Driven) -> None:
    """The broker is killed and started again."""
    driven.store.close(clean=False)
    driven.wanted.clear()
    driven.open()


def after_a_checkpoint(driven: Driven) -> None:
    """The broker is killed after a checkpoint, which knows the producer."""
    driven.checkpoint()
    killed(driven)


def goes_on(driven: Driven) -> None:
    """The broker does not end."""


def repeat_of(driven: Driven, bodies: list[bytes], sequence: int) -> Sent:
    """The answer to the same batch once more, on another connection."""
    (answer,) = driven.do(Send(2, driven.request(), batch_of({"a": bodies}, sequence), True))
    assert isinstance(answer, Sent), answer
    return answer


@pytest.mark.parametrize("between", [goes_on, killed, after_a_checkpoint, Driven.restart])
def test_a_repeat_is_told_after_the_clock_was_set(
    tmp_path: Path, jump_us: int, between: Callable[[Driven], None]
) -> None:
    driven = Driven(tmp_path)
    first = driven.send("a", b"one")
    set_clock(driven, jump_us)
    between(driven)
    second = driven.send("a", b"two")
    between(driven)
    set_clock(driven, -jump_us)
    for answer, bodies, sequence in ((first, [b"one"], 0), (second, [b"two"], 1)):
        again = repeat_of(driven, bodies, sequence)
        assert again[2:] == answer[2:], "the repeat was stored as another message"
    assert bodies_of(driven.pull(driven.subscribe("a"))) == [b"one", b"two"]
    driven.close()


def test_producers_are_forgotten_after_their_time_whatever_the_clock_says(tmp_path: Path, jump_us: int) -> None:
    driven = Driven(tmp_path)
    first = driven.send("a", b"one")
    set_clock(driven, jump_us)
    driven.advance(3_599_000)
    assert repeat_of(driven, [b"one"], 0)[2:] == first[2:]
    driven.restart()
    driven.advance(1_000)
    assert repeat_of(driven, [b"one"], 0).position > first.position
    driven.close()


@pytest.mark.parametrize("between", [goes_on, killed, after_a_checkpoint, Driven.restart])
def test_stamps_ids_and_sequences_ascend_and_lookups_by_time_find_them(
    tmp_path: Path, jump_us: int, between: Callable[[Driven], None]
) -> None:
    driven = Driven(tmp_path)
    told: list[Sent] = []
    for number, jump in enumerate((0, jump_us, 0, -jump_us, -jump_us, jump_us)):
        set_clock(driven, jump)
        between(driven)
        told.append(driven.send("a", b"%d" % number))
    for before, after in pairwise(told):
        assert before.stored_at_us < after.stored_at_us
        assert before.position < after.position
        assert (before.first_sequences, after.first_sequences) == (before.first_sequences, before.first_sequences + 1)
    for number, sent in enumerate(told):
        for prefix in ("a", ""):
            subscription = driven.subscribe(prefix, group=None, start=("time", sent.stored_at_us))
            assert bodies_of(driven.pull(subscription)) == [b"%d" % left for left in range(number, len(told))]
    behind = driven.subscribe("", group=None, start=("time", told[-1].stored_at_us + 100 * HOUR_US))
    assert driven.pull(behind) == []
    driven.send("a", b"new")
    assert bodies_of(driven.pull(behind)) == [b"new"], "a time ahead of the log means what comes from now on"
    driven.close()


def test_a_waiting_pull_waits_as_long_as_it_asked_for(tmp_path: Path, jump_us: int) -> None:
    driven = Driven(tmp_path)
    subscription = driven.subscribe("a")
    pull = driven.pull_command(subscription, timeout_ms=5_000)
    assert driven.do(pull) == []
    set_clock(driven, jump_us)
    assert driven.advance(4_990) == [], "it was answered too early"
    (answer,) = driven.advance(20)
    assert isinstance(answer, PulledMessages)
    assert (answer.request, answer.messages) == (pull.request, 0)
    assert driven.do(driven.pull_command(subscription, timeout_ms=5_000)) == []
    set_clock(driven, jump_us)
    driven.send("a", b"x")
    driven.close()
