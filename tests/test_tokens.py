"""The file of tokens: what it says, the line of what is wrong, and how it is replaced."""

from __future__ import annotations

import os
import stat
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from qmq.errors import InvalidOption
from qmq.tokens import (
    TokenEntry,
    Tokens,
    change_tokens,
    hash_of,
    new_secret,
    parse_tokens,
    read_tokens,
    read_used,
    text_of,
    write_used,
)

FULL = TokenEntry(
    produce=("shop.",), consume=("shop.order", ""), group=("billing",), browse=("a.b.",), admin=True,
    created=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), expires=datetime(2027, 1, 2, tzinfo=UTC),
    secrets=(hash_of("one"), hash_of("two")),
)  # fmt: skip


def test_what_is_written_reads_back() -> None:
    tokens = {"shop-api": FULL, "team.b": TokenEntry(browse=("x",)), "_": TokenEntry()}
    assert parse_tokens(text_of(tokens).encode(), "file") == tokens


def test_times_and_hashes_are_those_of_the_broker() -> None:
    assert FULL.expires_us == 1_798_848_000_000_000
    assert [len(digest) for digest in FULL.digests] == [32, 32]
    assert TokenEntry().expires_us is None


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('[a]\nproduce = ["x."]\nconsum = ["y"]\n', 3, "a.consum: there is no such key; a token has produce, consume"),
        ('[a]\nproduce = "x."\n', 2, 'write a list, as in ["shop."]'),
        ('["a.b"]\n\nadmin = 1\n', 3, "a.b.admin"),
        ("[a]\nexpires = 2020-01-01T00:00:00\n", 2, "timezone"),
        ('[a]\nsecrets = ["hunter2"]\n', 2, "64 hex digits"),
        ('[a]\n[b]\ngroup = ["a..b"]\n', 3, "'a..b' is not a valid name"),
        ('[a]\nproduce = ["*"]\n', 2, "'*' is not a valid name"),
        ("\n[a\n", 2, "is not TOML"),
        ('\n["b c"]\n', 2, "'b c' is not a valid name"),
        ("a = 3\n", 1, "a:"),
        (f'["{"n" * 49}"]\n', 1, "at most 48"),
        ("[a]\nadmin = true\n[a]\n", 3, "twice"),
        (f"[a]\nsecrets = {[hash_of(one) for one in 'abc']}\n", 2, "at most 2 secrets"),
    ],
)
def test_a_mistake_is_named_by_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_tokens(text.encode(), "tokens.toml")
    assert f"line {line}" in str(caught.value)
    assert says in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_bytes_that_are_no_text_are_named_by_their_line() -> None:
    with pytest.raises(InvalidOption, match="line 2: this is not UTF-8"):
        parse_tokens(b"[a]\n\xff", "tokens.toml")


def test_a_change_replaces_the_file_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tokens.toml"
    change_tokens(path, lambda known: known | {"a": FULL})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    before = path.stat().st_ino
    path.chmod(0o640)
    change_tokens(path, lambda known: known | {"b": FULL})
    assert read_tokens(path) == {"a": FULL, "b": FULL}
    assert path.stat().st_ino != before
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [one.name for one in path.parent.iterdir()] == ["tokens.toml"]


def test_a_link_to_the_file_stays(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    link = tmp_path / "tokens.toml"
    link.symlink_to(tmp_path / "etc" / "tokens.toml")
    change_tokens(link, lambda known: known | {"a": FULL})
    assert link.is_symlink()
    assert read_tokens(tmp_path / "etc" / "tokens.toml") == {"a": FULL}


def test_a_refused_change_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    change_tokens(path, lambda known: {"a": FULL})

    def refuse(known: Tokens) -> Tokens:
        raise InvalidOption("no")

    with pytest.raises(InvalidOption, match="no"):
        change_tokens(path, refuse)
    path.write_text("[a")
    with pytest.raises(InvalidOption, match="is not TOML"):
        change_tokens(path, lambda known: {})
    assert path.read_text() == "[a"


def test_changes_at_the_same_time_are_all_made(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"

    def add(number: int) -> None:
        change_tokens(path, lambda known: known | {f"t{number}": FULL})

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(read_tokens(path)) == {f"t{number}" for number in range(8)}


def test_secrets_are_random_and_long() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert all(secret.startswith("qmq_") and len(secret) == 4 + 43 for secret in secrets)
    assert hash_of("a") == "sha256:ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"


def test_times_of_use_are_kept_with_those_before(tmp_path: Path) -> None:
    path = tmp_path / "tokens-used.json"
    assert read_used(path) == {}
    write_used(path, {"a": 1, "b": 2})
    write_used(path, {"b": 3})
    assert read_used(path) == {"a": 1, "b": 3}
    path.write_text("[")
    assert read_used(path) == {}
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []
