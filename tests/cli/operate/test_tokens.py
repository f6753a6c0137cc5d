"""``qmq tokens``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from qmq.cli.common import confirm
from qmq.cli.main import cli
from qmq.tokens import USED_NAME, hash_of, read_tokens, write_used


def run(path: Path, *arguments: str, stdin: str | None = None) -> Result:
    call = ["tokens", *arguments, "--data-dir", str(path)]
    return CliRunner().invoke(cli, call, env={"QMQ_TOKENS_FILE": None}, input=stdin)


def create(path: Path, name: str, *rights: str) -> str:
    done = run(path, "create", name, *(rights or ("--produce", "a.")))
    assert done.exit_code == 0, done.stderr
    return done.stdout.strip()


def secret_of(token: str) -> str:
    return hash_of(token.partition(":")[2])


def test_a_token_is_shown_once_and_kept_as_a_hash(tmp_path: Path) -> None:
    token = create(tmp_path, "shop", "--produce", "shop.", "--produce", "mail", "--expires", "90d")
    name, _, secret = token.partition(":")
    assert name == "shop"
    text = (tmp_path / "tokens.toml").read_text()
    assert secret not in text
    entry = read_tokens(tmp_path / "tokens.toml")["shop"]
    assert (entry.produce, entry.consume, entry.admin) == (("shop.", "mail"), (), False)
    assert entry.secrets == (hash_of(secret),)
    assert entry.expires is not None
    assert entry.created is not None
    assert (entry.expires - entry.created).days == 90


def test_the_first_token_and_one_without_an_admin_say_what_follows(tmp_path: Path) -> None:
    done = run(tmp_path, "create", "a", "--produce", "")
    assert "every client of this broker needs a token" in done.stderr
    assert "no token has --admin" in done.stderr
    done = run(tmp_path, "create", "ops", "--admin")
    assert "every client" not in done.stderr
    assert "no token has" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["create", "a"], "a token without any right"),
        (["create", "a b", "--admin"], "'a b' is not a valid name"),
        (["create", "n" * 49, "--admin"], "at most 48"),
        (["create", "a", "--produce", "a*"], "'a*' is not a valid name"),
        (["create", "known", "--admin"], "there is a token 'known' already"),
        (["revoke", "nobody"], "there is no token 'nobody'; there are: known"),
        (["rotate", "nobody"], "there is no token"),
        (["rotate", "known", "--finish"], "has no second secret"),
        (["rotate", "known", "--finish", "--now"], "either --finish or --now"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, arguments: list[str], says: str) -> None:
    create(tmp_path, "known")
    before = (tmp_path / "tokens.toml").read_bytes()
    done = run(tmp_path, *arguments)
    assert done.exit_code == 2
    assert says in done.stderr
    assert (tmp_path / "tokens.toml").read_bytes() == before


def test_rotating_has_two_secrets_for_a_while(tmp_path: Path) -> None:
    first = create(tmp_path, "shop")
    second = run(tmp_path, "rotate", "shop", "--expires", "1h").stdout.strip()
    assert first != second
    entry = read_tokens(tmp_path / "tokens.toml")["shop"]
    assert entry.secrets == (secret_of(first), secret_of(second))
    assert entry.expires is not None
    assert "has two secrets" in run(tmp_path, "rotate", "shop").stderr
    assert run(tmp_path, "rotate", "shop", "--finish").exit_code == 0
    assert read_tokens(tmp_path / "tokens.toml")["shop"].secrets == (secret_of(second),)
    third = run(tmp_path, "rotate", "shop", "--now").stdout.strip()
    assert read_tokens(tmp_path / "tokens.toml")["shop"].secrets == (secret_of(third),)


def test_the_last_admin_is_not_revoked(tmp_path: Path) -> None:
    create(tmp_path, "ops", "--admin")
    create(tmp_path, "shop")
    done = run(tmp_path, "revoke", "ops")
    assert done.exit_code == 2
    assert "last token with --admin" in done.stderr
    create(tmp_path, "ops2", "--admin")
    assert run(tmp_path, "revoke", "ops", "--yes").exit_code == 0
    assert run(tmp_path, "revoke", "shop", "--yes").exit_code == 0
    assert set(read_tokens(tmp_path / "tokens.toml")) == {"ops2"}


def test_revoking_asks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(tmp_path, "shop")
    done = run(tmp_path, "revoke", "shop")
    assert (done.exit_code, "no terminal" in done.stderr, "--yes" in done.stderr) == (2, True, True)
    monkeypatch.setattr(confirm, "can_ask", lambda: True)
    question = "revoke token shop, which ends its connections? It is not known to have been used. [y/N]"
    done = run(tmp_path, "revoke", "shop", stdin="n\n")
    assert (done.exit_code, question in done.stderr) == (1, True)
    assert "shop" in read_tokens(tmp_path / "tokens.toml")
    write_used(tmp_path / USED_NAME, {"shop": time.time_ns() // 1_000})
    done = run(tmp_path, "revoke", "shop", stdin="y\n")
    assert (done.exit_code, "It was last used " in done.stderr) == (0, True)
    assert read_tokens(tmp_path / "tokens.toml") == {}


def test_what_cannot_be_revoked_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(tmp_path, "ops", "--admin")
    monkeypatch.setattr(confirm, "can_ask", lambda: True)
    for name in ("ops", "nobody"):
        done = run(tmp_path, "revoke", name, stdin="y\n")
        assert (done.exit_code, "[y/N]" in done.stderr) == (2, False)


def test_a_list_has_rights_and_the_last_use_and_no_secret(tmp_path: Path) -> None:
    token = create(tmp_path, "shop", "--consume", "shop.", "--group", "g")
    create(tmp_path, "ops", "--admin")
    write_used(tmp_path / USED_NAME, {"shop": 1_700_000_000_000_000})
    done = run(tmp_path, "list", "--json")
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows["shop"]["consume"] == ["shop."]
    assert rows["shop"]["group"] == ["g"]
    assert rows["shop"]["last_used_at"] == "2023-11-14T22:13:20.000000Z"
    assert rows["ops"]["admin"]
    assert rows["ops"]["last_used_at"] is None
    assert token.partition(":")[2] not in done.stdout
    assert secret_of(token) not in done.stdout


def test_a_certificate_stands_for_a_token_without_a_secret(tmp_path: Path) -> None:
    done = run(tmp_path, "create", "host", "--produce", "a.", "--certificate", "--json")
    assert json.loads(done.stdout)["token"] is None
    assert read_tokens(tmp_path / "tokens.toml")["host"].secrets == ()


def test_another_file_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "t.toml"
    done = CliRunner().invoke(cli, ["tokens", "create", "a", "--admin", "--tokens-file", str(path)])
    assert done.exit_code == 0
    assert set(read_tokens(path)) == {"a"}


def test_a_file_with_a_mistake_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "tokens.toml").write_text("[a]\nprodoce = []\n")
    done = run(tmp_path, "create", "b", "--admin")
    assert done.exit_code == 2
    assert "line 2: a.prodoce" in done.stderr
    assert "prodoce" in (tmp_path / "tokens.toml").read_text()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_a_file_with_a_token_that_others_can_read_is_warned_of(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "ops.token"
    file.touch()
    file.chmod(mode)
    command = [sys.executable, "-c", "from qmq.cli.main import cli; cli()", "tokens", "create", "ops", "--admin"]
    with file.open("w") as out:
        done = subprocess.run(
            [*command, "--data-dir", str(tmp_path)], stdout=out, stderr=subprocess.PIPE, text=True, check=True
        )
    assert ("other users can read this file: chmod 600" in done.stderr) == (mode != 0o600)
    assert file.read_text().startswith("ops:qmq_")
