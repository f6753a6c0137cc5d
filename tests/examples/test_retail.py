"""examples/retail.py against the file itself, counted in another way: by text, without its reader."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter

import pytest

from examples.retail import DATA, InvoiceMessage, country_segment, read_invoices
from qmq.names import check_subject


@pytest.fixture(scope="module")
def messages() -> list[InvoiceMessage]:
    return list(read_invoices())


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return gzip.decompress(DATA.read_bytes()).decode("utf-8").splitlines()[1:]


def test_one_message_an_invoice(messages: list[InvoiceMessage], lines: list[str]) -> None:
    numbers = [line.split(",", 1)[0] for line in lines]
    assert len(lines) == 42_481
    assert [message.key for message in messages] == list(dict.fromkeys(numbers))
    assert len(messages) == 2_025


def test_every_line_is_in_the_body_of_its_invoice(messages: list[InvoiceMessage], lines: list[str]) -> None:
    wanted = Counter(line.split(",", 1)[0] for line in lines)
    bodies = [json.loads(message.body) for message in messages]
    assert {body["invoice"]: len(body["lines"]) for body in bodies} == wanted
    # The quantity is what stands right before the date, whatever the description holds.
    quantities = [int(re.findall(r",(-?\d+),2010-12-", line)[0]) for line in lines]
    assert sum(line["quantity"] for body in bodies for line in body["lines"]) == sum(quantities)


def test_cancellations_go_to_subjects_of_their_own(messages: list[InvoiceMessage], lines: list[str]) -> None:
    cancelled = {line.split(",", 1)[0] for line in lines if line.startswith("C")}
    assert len(cancelled) == 326
    assert {message.key for message in messages if message.is_cancellation} == cancelled
    assert {message.key for message in messages if message.subject.endswith(".order")}.isdisjoint(cancelled)


def test_subjects_are_those_of_the_countries(messages: list[InvoiceMessage], lines: list[str]) -> None:
    countries = {line.rsplit(",", 1)[1] for line in lines}
    assert {message.subject.split(".")[1] for message in messages} == {country_segment(name) for name in countries}
    assert len(countries) == 24
    subjects = Counter(check_subject(message.subject) for message in messages)
    assert subjects["retail.united-kingdom.cancel"] == 298
    assert subjects["retail.eire.cancel"] == 5
    assert "retail.channel-islands.order" in subjects


def test_the_first_invoice(messages: list[InvoiceMessage]) -> None:
    first = messages[0]
    assert (first.subject, first.key) == ("retail.united-kingdom.order", "536365")
    body = json.loads(first.body)
    assert (body["customer"], body["country"], body["time"]) == (17850, "United Kingdom", "2010-12-01T08:26:00")
    assert body["lines"][0] == {
        "stock_code": "85123A",
        "description": "WHITE HANGING HEART T-LIGHT HOLDER",
        "quantity": 6,
        "unit_price": 2.55,
    }


def test_a_customer_that_is_not_known_is_null(messages: list[InvoiceMessage], lines: list[str]) -> None:
    without = {line.split(",", 1)[0] for line in lines if re.search(r",,[^,]*$", line)}
    assert without
    assert {message.key for message in messages if json.loads(message.body)["customer"] is None} == without


@pytest.mark.parametrize(
    ("country", "segment"),
    [
        ("United Kingdom", "united-kingdom"),
        ("EIRE", "eire"),
        ("Channel Islands", "channel-islands"),
        ("Unspecified", "unspecified"),
        ("", "unspecified"),
        ("  ", "unspecified"),
        ("Côte d'Ivoire", "cote-d-ivoire"),
        ("../etc", "etc"),
        ("日本", "unspecified"),
    ],
)
def test_country_segments(country: str, segment: str) -> None:
    assert country_segment(country) == segment
    check_subject(f"retail.{segment}.order")
