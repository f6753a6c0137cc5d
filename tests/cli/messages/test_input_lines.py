"""qmq/cli/messages/input_lines.py: a stream gives the same lines however it is cut, and bad lines are reported."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq.cli.messages.input_lines import InputMessage, LineSplitter, draft_of
from qmq.errors import InvalidOption, MessageTooLarge

DEFAULTS = InputMessage("a.b", b"", None, None, None)


def lines_of(chunks: list[bytes], most: int = 100) -> list[bytes | str]:
    lines = LineSplitter(most)
    found = [line for chunk in chunks for line in lines.feed(chunk)] + list(lines.end())
    assert lines.number == len(found)
    return [line if isinstance(line, bytes) else type(line).__name__ for line in found]


@given(st.lists(st.binary(max_size=10), max_size=10))  # at most the 100 bytes that a line may have here
def test_lines_do_not_depend_on_how_the_stream_is_cut(chunks: list[bytes]) -> None:
    stream = b"".join(chunks)
    expected = stream.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert lines_of(chunks) == expected
    assert lines_of([stream[i : i + 1] for i in range(len(stream))]) == expected


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"\n\n", [b"", b""]),
        (b"a", [b"a"]),
        (b"a\r\nb\xff\x00\n", [b"a\r", b"b\xff\x00"]),
        (b"x" * 100 + b"\nok\n", [b"x" * 100, b"ok"]),
        (b"x" * 101 + b"\nok\n", ["MessageTooLarge", b"ok"]),
        (b"ok\n" + b"x" * 101, [b"ok", "MessageTooLarge"]),
    ],
)
def test_edges(stream: bytes, expected: list[bytes | str]) -> None:
    assert lines_of([stream]) == expected
    assert lines_of([stream[i : i + 7] for i in range(0, len(stream), 7)]) == expected


def test_a_line_that_is_too_long_is_not_kept() -> None:
    lines = LineSplitter(100)
    for _ in range(1_000):
        assert list(lines.feed(b"x" * 60)) == []
    assert lines._parts == []
    (error,) = lines.feed(b"\n")
    assert isinstance(error, MessageTooLarge)
    assert "60000 bytes" in str(error)


@pytest.mark.parametrize(
    ("fields", "draft"),
    [
        ({"body": "x"}, DEFAULTS._replace(body=b"x")),
        ({"body": ""}, DEFAULTS),
        ({"body": "h\u00e9 \U0001f600"}, DEFAULTS._replace(body="h\u00e9 \U0001f600".encode())),
        ({"body_base64": "AP8="}, DEFAULTS._replace(body=b"\x00\xff")),
        ({"subject": "c", "body": "x"}, DEFAULTS._replace(subject="c", body=b"x")),
        (
            {"body": "x", "key": "k", "tags": ["t"], "properties": {"p": "v"}},
            InputMessage("a.b", b"x", ["k"], ["t"], {"p": "v"}),
        ),
        ({"body": "x", "keys": ["k", "l"]}, DEFAULTS._replace(body=b"x", keys=["k", "l"])),
        ({"body": "x", "priority": "low"}, DEFAULTS._replace(body=b"x", priority="low")),
        ({"body": "x", "priority": "normal", "order_key": None}, DEFAULTS._replace(body=b"x", priority="normal")),
        (
            {"body": "x", "priority": "normal", "order_key": "o"},
            DEFAULTS._replace(body=b"x", priority="normal", order_key="o"),
        ),
        ({"body": "x", "order_key": "o"}, DEFAULTS._replace(body=b"x", order_key="o")),
        (
            {"body": "x", "keys": ["k", "l"], "key": "k"},
            DEFAULTS._replace(body=b"x", keys=["k", "l"]),
        ),
        (
            {"id": "0", "sequence": 5, "attempt": 1, "created_at": "2026", "stored_at": 7, "key": None, "body": "x"},
            DEFAULTS._replace(body=b"x"),
        ),
    ],
)
def test_json_lines_become_drafts(fields: dict[str, object], draft: InputMessage) -> None:
    assert draft_of(json.dumps(fields).encode(), DEFAULTS) == draft


def test_a_line_wins_over_the_command() -> None:
    defaults = InputMessage("a.b", b"", ["key"], ["tag"], {"p": "v"})
    assert draft_of(b'{"body": "x"}', defaults) == defaults._replace(body=b"x")
    line = b'{"body": "x", "subject": "c", "key": "k", "tags": [], "properties": {}}'
    assert draft_of(line, defaults) == InputMessage("c", b"x", ["k"], None, None)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'"x"', "not a JSON object"),
        (b"{}", "either body or body_base64"),
        (b'{"body": "x", "body_base64": "AA=="}', "either body or body_base64"),
        (b'{"body": 5}', "body is a string, not 5"),
        (b'{"body": "\\ud800"}', "not valid Unicode"),
        (b'{"body_base64": "A"}', "not base64"),
        (b'{"body_base64": "$$$$"}', "not base64"),
        (b'{"body_base64": "\xc3\xa9"}', "not base64"),
        (b'{"body": "x", "subject": ["a"]}', "subject is a string"),
        (b'{"body": "x", "key": {}}', "key is a string"),
        (b'{"body": "x", "keys": "k"}', "keys is a list of strings"),
        (b'{"body": "x", "keys": ["k", 5]}', "keys is a list of strings"),
        (b'{"body": "x", "keys": ["k"], "key": "l"}', "either key or keys"),
        (b'{"body": "x", "keys": [], "key": "l"}', "either key or keys"),
        (b'{"body": "x", "urgency": 5}', "unknown field 'urgency'"),
        (b'{"body": "x", "Body": "y"}', "unknown field 'Body'; use subject, key"),
    ],
)
def test_bad_lines_say_what_is_wrong(line: bytes, says: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(says)):
        draft_of(line, DEFAULTS)
