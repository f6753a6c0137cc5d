"""The settings of a group: each value that is allowed, and each that is not, with the error's advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qmq.broker.groups.settings import ResolvedSettings, differing, settings_of
from qmq.broker.ports.commands import Administer
from qmq.broker.ports.effects import Administered, PulledMessages, Refused
from qmq.errors import InvalidOption
from qmq.format.layout import MAX_DELAY_US
from tests.broker.harness import Driven
from tests.broker.test_consuming import Consumer, filled, killed

GOOD: list[tuple[str, Any]] = [
    ("max_attempts", 1),
    ("max_attempts", 65_535),
    ("max_session_expiries", 255),
    ("max_unacked", 1_000_000),
    ("max_unacked_bytes", 1 << 40),
    ("retry_delays_us", [0]),
    ("retry_delays_us", [MAX_DELAY_US] * 64),
    ("expire_after_us", 0),
    ("expire_after_us", MAX_DELAY_US),
    ("ack_deadline_us", 1),
    ("tags", []),
    ("tags", ["a", "\u00e4" * 127]),
]
BAD: list[tuple[str, Any, str]] = [
    ("max_attempts", 0, "from 1 to 65535"),
    ("max_attempts", 65_536, "from 1 to 65535"),
    ("max_attempts", True, "whole number"),
    ("max_attempts", "3", "whole number"),
    ("max_attempts", 3.0, "whole number"),
    ("max_session_expiries", 256, "from 1 to 255"),
    ("max_unacked", -1, "from 1 to 1000000"),
    ("max_unacked_bytes", 1 << 63, "whole number"),
    ("retry_delays_us", [], "1 to 64 delays"),
    ("retry_delays_us", [1] * 65, "1 to 64 delays"),
    ("retry_delays_us", [-1], "1 to 64 delays"),
    ("retry_delays_us", [MAX_DELAY_US + 1], r"0 seconds to 731 days \(two years\) each"),
    ("retry_delays_us", 5, "1 to 64 delays"),
    ("expire_after_us", -1, r"expire_after must be 0 seconds to 731 days \(two years\)"),
    ("expire_after_us", None, "seconds"),
    ("ack_deadline_us", MAX_DELAY_US + 1, r"ack_deadline must be 0 seconds to 731 days \(two years\)"),
    ("tags", "vip", "up to 32 texts"),
    ("tags", [""], "1 to 255 bytes"),
    ("tags", ["x" * 256], "1 to 255 bytes"),
    ("tags", [b"x"], "up to 32 texts"),
    ("tags", ["x"] * 33, "up to 32 texts"),
    ("colour", 1, "no setting 'colour'; it has max_attempts, retry_delays,"),
]


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_allowed_values_are_taken(name: str, value: Any) -> None:
    found = settings_of(ResolvedSettings(), {name: value})
    assert getattr(found, name) == (tuple(value) if isinstance(value, list) else value)
    assert ResolvedSettings.kept(list(found)) == found


@pytest.mark.parametrize(("name", "value", "advice"), BAD)
def test_other_values_are_refused_with_advice(name: str, value: Any, advice: str) -> None:
    with pytest.raises(InvalidOption, match=advice):
        settings_of(ResolvedSettings(), {name: value})


def test_differing_returns_settings_that_are_not_as_requested() -> None:
    actual = ResolvedSettings(max_attempts=3, tags=("a",))
    assert differing({"max_attempts": 3, "tags": ["a"], "max_session_expiries": 3}, actual) == {}
    assert differing({"max_attempts": 4, "tags": ["b"]}, actual) == {"max_attempts": 3, "tags": ("a",)}


def set_group(driven: Driven, settings: Any) -> dict[str, Any]:
    fields = {"group": "g", "settings": settings}
    (answer,) = driven.do(Administer(1, driven.request(), "set_group", fields))
    if isinstance(answer, Refused):
        raise answer.error
    assert isinstance(answer, Administered)
    return dict(answer.fields["settings"])


@pytest.mark.parametrize("stop", [Driven.restart, killed])
def test_settings_last_and_those_of_the_broker_win(tmp_path: Path, stop: Any) -> None:
    driven = filled(tmp_path)
    one = Consumer(driven, "one", max_attempts=3, tags=["vip"])
    assert (one.answer.tags, one.answer.differing) == (("vip",), ())
    two = Consumer(driven, "two", connection=2, max_attempts=9, max_session_expiries=3)
    assert (two.answer.tags, two.answer.differing) == (("vip",), (("max_attempts", 3),))
    assert set_group(driven, {"max_attempts": 5, "retry_delays_us": [7]})["max_attempts"] == 5
    stop(driven)
    two.join()
    assert two.answer.differing == (("max_attempts", 5),)
    assert set_group(driven, {"tags": []})["retry_delays_us"] == (7,)
    driven.close()


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        ({"max_unacked": 1}, {"max_unacked": 2}),
        ({"max_unacked_bytes": 1}, {"max_unacked_bytes": 1 << 20}),
    ],
)
def test_a_wider_window_wakes_the_pull_that_waits_for_it(
    tmp_path: Path, narrow: dict[str, int], wide: dict[str, int]
) -> None:
    driven = filled(tmp_path)
    one = Consumer(driven, "one", **narrow)
    assert one.pull(1) == [b"0"]
    waiting = driven.pull_command(one.subscription, 1, timeout_ms=60_000)._replace(expected=one.expected)
    assert driven.do(waiting) == []
    said = driven.do(Administer(1, driven.request(), "set_group", {"group": "g", "settings": wide}))
    assert one.take([effect for effect in said if isinstance(effect, PulledMessages)]) == [b"1"]
    driven.close()


def test_a_wrong_setting_changes_nothing_and_no_replay_meets_it(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    Consumer(driven, "one")
    for name, value, _ in BAD:
        with pytest.raises(InvalidOption):
            Consumer(driven, "two", **{name: value})
        with pytest.raises(InvalidOption):
            set_group(driven, {name: value})
        with pytest.raises(InvalidOption):
            set_group(driven, value)
    killed(driven)
    assert Consumer(driven, "one").pull(1) == [b"0"]
    assert set_group(driven, {"max_session_expiries": 3}) == ResolvedSettings()._asdict()
    driven.close()


def test_a_refused_subscription_makes_no_group(tmp_path: Path) -> None:
    driven = filled(tmp_path)
    with pytest.raises(InvalidOption, match="max_attempts"):
        Consumer(driven, "one", max_attempts=0)
    (answer,) = driven.do(Administer(1, driven.request(), "groups", {}))
    assert isinstance(answer, Administered)
    assert answer.fields["rows"] == []
    driven.close()
