"""Arguments of the client are checked."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from qmq.errors import InvalidName, InvalidOption
from qmq.net.client.options import bodies_of, body_of, check_options, is_flush, producer_id_of

GOOD: dict[str, Any] = {
    "url": "qmq://a:1,b:2",
    "durability": "flush",
    "linger": 0,
    "producer": None,
    "send_timeout": 30,
    "max_queued_bytes": 1 << 20,
    "failover_after": 5,
    "admin_timeout": 10,
}


def test_good_options_are_taken() -> None:
    options = check_options(**GOOD)
    assert [str(address) for address in options.addresses] == ["a:1", "b:2"]
    assert options.flush
    assert check_options(**{**GOOD, "failover_after": None}).failover_after is None


def test_the_url_comes_from_the_environment_if_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QMQ_SERVER", "qmq://c:3")
    assert [str(address) for address in check_options(**{**GOOD, "url": None}).addresses] == ["c:3"]
    assert [str(address) for address in check_options(**GOOD).addresses] == ["a:1", "b:2"]
    monkeypatch.delenv("QMQ_SERVER")
    assert [str(address) for address in check_options(**{**GOOD, "url": None}).addresses] == ["127.0.0.1:20881"]


@pytest.mark.parametrize(
    ("program", "app"),
    [("/srv/worker.py", "worker"), ("/srv/shop/__main__.py", "shop"), ("/bin/celery", "celery"), ("-c", "python")],
)
def test_the_app_is_the_program_unless_it_is_given(program: str, app: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--verbose"])
    assert check_options(**GOOD).app == app
    assert check_options(**GOOD, app="shop-api").app == "shop-api"


@pytest.mark.parametrize("option", ["name", "app"])
@pytest.mark.parametrize("name", ["", "n" * 101, "two\nlines", 7])
def test_names_that_cannot_be_shown_are_refused(option: str, name: Any) -> None:
    with pytest.raises(InvalidName, match=option):
        check_options(**GOOD, **{option: name})


def test_an_address_given_twice_is_one_broker() -> None:
    options = check_options(**{**GOOD, "url": "qmq://a:1,b:2,a:1"})
    assert [str(address) for address in options.addresses] == ["a:1", "b:2"]


@pytest.mark.parametrize(
    "bad",
    [
        {"url": "http://a"}, {"durability": "maybe"}, {"durability": None}, {"linger": -1}, {"linger": "1x"},
        {"linger": 30}, {"linger": float("nan")}, {"send_timeout": 0}, {"send_timeout": float("inf")},
        {"send_timeout": True}, {"max_queued_bytes": 0}, {"max_queued_bytes": 1.5},
        {"failover_after": -1}, {"failover_after": "5 seconds"}, {"admin_timeout": 0}, {"admin_timeout": None},
        {"admin_timeout": float("inf")}, {"admin_timeout": 1e10}, {"wait": -1}, {"wait": float("inf")},
    ],
)  # fmt: skip
def test_bad_options_are_refused_by_name(bad: dict[str, Any]) -> None:
    name = next(iter(bad))
    with pytest.raises(InvalidOption, match="address" if name == "url" else name):
        check_options(**{**GOOD, **bad})


@pytest.mark.parametrize("producer", ["", "p" * 201, 7])
def test_bad_producer_names_are_refused(producer: Any) -> None:
    with pytest.raises(InvalidName, match="producer"):
        check_options(**{**GOOD, "producer": producer})


def test_a_producer_name_stands_for_16_bytes() -> None:
    assert producer_id_of("job-7").hex() == "b89816f50f31c2bccb2b5676561cd9f4"
    assert producer_id_of("job-7") != producer_id_of("job-8")


def test_durability() -> None:
    assert is_flush("flush")
    assert not is_flush("append")


def test_bodies_become_bytes_of_their_own() -> None:
    changing = bytearray(b"abc")
    view = memoryview(changing)[1:]
    bodies = bodies_of([b"x", changing, view])
    changing[:] = b"..."
    assert bodies == [b"x", b"abc", b"bc"]
    assert set(map(type, bodies)) == {bytes}
    assert bodies_of((b"1", b"2")) == [b"1", b"2"]
    assert bodies_of([]) == []
    assert bodies_of(body for body in (b"1", bytearray(b"2"))) == [b"1", b"2"]  # type: ignore[arg-type]


@pytest.mark.parametrize("body", ["text", 1, None, [b"x"]])
def test_other_bodies_are_refused(body: object) -> None:
    with pytest.raises(TypeError, match="must be bytes"):
        body_of(body)
    with pytest.raises(TypeError, match="must be bytes"):
        bodies_of([b"x", body])  # type: ignore[list-item]


def test_the_errors_give_advice() -> None:
    with pytest.raises(TypeError, match=r"text\.encode"):
        body_of("text")
    with pytest.raises(TypeError, match="use send for one"):
        bodies_of(b"one body")  # type: ignore[arg-type]
