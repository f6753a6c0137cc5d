"""URLs of brokers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qmq
import qmq.errors
from qmq.errors import InvalidOption
from qmq.net.client.address import Address, parse_url, shown_location, shown_url, token_of
from tests.cli.commands import qmq as qmq_command


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("qmq://127.0.0.1:20881", [("127.0.0.1", 20881)]),
        ("qmq://broker.example", [("broker.example", 20881)]),
        ("qmq://broker.example:1/", [("broker.example", 1)]),
        ("qmq://[::1]:7,qmq://b", [("::1", 7), ("b", 20881)]),
        ("qmq://a:1, b:2 ,c", [("a", 1), ("b", 2), ("c", 20881)]),
        ("localhost:65535", [("localhost", 65535)]),
    ],
)
def test_addresses_are_read(url: str, addresses: list[tuple[str, int]]) -> None:
    assert parse_url(url) == [Address(*address) for address in addresses]


@pytest.mark.parametrize(
    "url",
    ["", "qmq://", "http://a:1", "qmq://a:0", "qmq://a:65536", "qmq://a:b", "qmq://a:1,", "qmq://a/path", "qmq://u@a",
     "qmq://a?x=1", "qmq://[::1", 7, "qmq://a..b", "qmq://\udce9", f"qmq://{'a' * 64}"],
)  # fmt: skip
def test_anything_else_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidOption, match=r"address of a broker|must be a str"):
        parse_url(url)


@given(st.text())
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        parse_url(text)
    except InvalidOption:
        pass


@given(st.sampled_from(["a", "10.0.0.1", "::1", "b-c.d"]), st.integers(1, 65535))
def test_what_is_printed_reads_back(host: str, port: int) -> None:
    address = Address(host, port)
    assert parse_url(f"qmq://{address}") == [address]


@pytest.mark.parametrize(
    "url",
    [
        "qmq://me:secret@a", "me:secret@a:1", "qmq://a,qmq://me:se,cret@b", "qmq://me:x://secret@b",
        "qmq://me:s@cret@b", "http://me:secret@a", "secret@a",
        "qmq://me:secret@[::1", "qmq://a?password=secret", "qmq://me:secret@a/path", "secret://x@a", "qmq://me:\uff0fsecret@a",
    ],
)  # fmt: skip
def test_no_user_and_no_password_is_shown(url: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_url(url)
    for part in ("secret", "cret", "se,", "me:"):
        assert part not in str(caught.value)
    assert "secret" not in shown_url(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("qmq://a:1,b", "qmq://a:1,b"),
        ("hdfs://me:secret@name:8020/archive", "hdfs://...@name:8020/archive"),
        ("me:secret@a", "...@a"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("/path/a@b?c", "/path/a@b?c"),
        ("hdfs://name:8020/a@b", "hdfs://name:8020/a@b"),
        ("file:///a@b", "file:///a@b"),
        ("hdfs://me:secret@name/a", "hdfs://...@name/a"),
        ("hdfs://me:se/cret@name/a", "hdfs://...@name/a"),
    ],
)
def test_what_is_shown_of_the_place_of_an_archive(location: str, shown: str) -> None:
    assert shown_location(location) == shown


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_file_is_no_token(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that was given a file for its token does not go on without one: a console would let everybody in."""
    path = tmp_path / "console.token"
    path.write_text(text, "ascii")
    monkeypatch.delenv("QMQ_TOKEN", raising=False)
    monkeypatch.setenv("QMQ_TOKEN_FILE", str(path))
    with pytest.raises(qmq.errors.InvalidOption, match="has no token; write NAME:SECRET into it"):
        token_of(None)
    for options in (("--token-file", str(path)), ("--token", text)):
        for command in (("console", "--listen", "127.0.0.1:0"), ("ping",)):
            done = qmq_command(*command, *options, server="qmq://127.0.0.1:1")
            assert (done.exit_code, done.stdout) == (2, "")
            assert "NAME:SECRET" in done.stderr
