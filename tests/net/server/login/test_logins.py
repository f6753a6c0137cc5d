"""Logins: which tokens let clients in, and when they end."""

from __future__ import annotations

import hashlib

import pytest

from qmq.broker.ports.rights import Rights
from qmq.errors import ConnectionLost, Unauthorized
from qmq.net.server.login.failed_logins import AT_ONCE, EVERY_US, MOST_ADDRESSES, MOST_US, FailedLogins
from qmq.net.server.login.logins import Login, Logins, Token

S = 1_000_000


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def token(name: str, *secrets: str, expires_us: int | None = None, **rights: list[str]) -> Token:
    return Token(Rights(name, **rights), tuple(map(digest, secrets)), expires_us)  # type: ignore[arg-type]


TOKENS = {
    "shop": token("shop", "one", "two", produce=["shop."]),
    "old": token("old", "secret", expires_us=10 * S),
    "cert": token("cert"),
}


def log_in(given: str, certificate: str = "", now_us: int = 0) -> Login | None:
    return Logins(TOKENS).log_in(given, certificate, now_us)


def test_without_tokens_everybody_is_let_in() -> None:
    logins = Logins()
    assert logins.log_in("", "", 0) is None
    assert logins.log_in("anything", "", 0) is None
    assert not logins.has_tokens


def test_each_of_two_secrets_lets_in() -> None:
    for secret in ("one", "two"):
        login = log_in(f"shop:{secret}")
        assert login is not None
        assert (login.rights, login.secret) == (TOKENS["shop"].rights, digest(secret))


@pytest.mark.parametrize(
    "given",
    ["shop:", "shop:three", "shop", ":one", "nobody:one", "shop:one ", "shop:onetwo", "cert:", "cert:x", "\udcff:x"],
)  # fmt: skip
def test_any_other_text_does_not(given: str) -> None:
    with pytest.raises(Unauthorized, match="wrong, or was revoked") as caught:
        log_in(given)
    assert "one" not in str(caught.value)


def test_no_token_does_not() -> None:
    with pytest.raises(Unauthorized, match="with a token only"):
        log_in("")


def test_a_certificate_stands_for_the_token_of_its_name() -> None:
    login = log_in("", "cert")
    assert login == Login(TOKENS["cert"].rights, b"")
    with pytest.raises(Unauthorized, match="no token has the name 'other'"):
        log_in("", "other")
    with pytest.raises(Unauthorized):
        log_in("shop:wrong", "cert")


def test_a_token_lets_in_until_it_expires() -> None:
    assert log_in("old:secret", now_us=10 * S - 1) is not None
    with pytest.raises(Unauthorized, match="'old' has expired at 1970-01-01T00:00:10Z"):
        log_in("old:secret", now_us=10 * S)


def test_the_next_expiry_is_known() -> None:
    logins = Logins(TOKENS)
    assert logins.next_expiry_us(0) == 10 * S
    assert logins.next_expiry_us(10 * S) is None


def test_the_last_use_is_known() -> None:
    logins = Logins(TOKENS)
    logins.log_in("shop:one", "", 7)
    assert logins.used == {"shop": 7}


# --- connections that are open ----------------------------------------------------------------------------------------


def after(change: dict[str, Token], now_us: int = 0) -> object:
    """What becomes of a connection of the token shop, made with the secret "one", after a change."""
    logins = Logins(TOKENS)
    login = logins.log_in("shop:one", "", 0)
    logins.replace(change)
    return logins.look_at(login, now_us)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "'shop' was revoked"),
        ({"shop": token("shop", "two", produce=["shop."])}, "this secret of token 'shop' has ended"),
        ({"shop": token("shop", "one", produce=["shop."], expires_us=5)}, "'shop' has expired"),
    ],
)
def test_a_token_that_ends_ends_its_connections(change: dict[str, Token], says: str) -> None:
    error = after(change, now_us=5)
    assert isinstance(error, Unauthorized)
    assert says in str(error)


def test_fewer_rights_end_a_connection_which_may_come_again() -> None:
    error = after({"shop": token("shop", "one", produce=["shop.a"])})
    assert isinstance(error, ConnectionLost)
    assert error.retryable


@pytest.mark.parametrize(
    "change",
    [
        {"shop": token("shop", "one", produce=["shop."])},
        {"shop": token("shop", "one", "three", produce=["shop."], expires_us=9)},
        {"shop": token("shop", "one", produce=["shop.", "hr."], consume=[""])},
    ],
)
def test_a_renewed_token_keeps_its_connections(change: dict[str, Token]) -> None:
    assert after(change) == Login(change["shop"].rights, digest("one"))


def test_a_connection_without_a_token_ends_once_there_are_tokens() -> None:
    assert isinstance(Logins(TOKENS).look_at(None, 0), Unauthorized)


# --- failed logins ----------------------------------------------------------------------------------------------------

HERE, THERE = bytes((10, 0, 0, 1)), bytes((10, 0, 0, 2))


def test_a_few_failures_are_answered_at_once_and_further_ones_later_and_later() -> None:
    failures = FailedLogins()
    delays = [failures.failed(HERE, 0)[0] for _ in range(AT_ONCE + 20)]
    assert delays[:AT_ONCE] == [0] * AT_ONCE
    assert delays[AT_ONCE] > 0
    assert delays == sorted(delays)
    assert delays[-1] == MOST_US
    assert failures.failed(THERE, 0)[0] == 0, "another address does not wait for it"


def test_failures_are_forgotten_with_time() -> None:
    failures = FailedLogins()
    for _ in range(AT_ONCE + 3):
        failures.failed(HERE, 0)
    assert failures.failed(HERE, 0)[0] > 0
    assert failures.failed(HERE, (AT_ONCE + 4) * EVERY_US)[0] == 0


def test_a_flood_is_logged_rarely() -> None:
    failures = FailedLogins()
    logged = [number for number in range(1, 1_001) if failures.failed(HERE, 0)[1]]
    assert logged == [*range(1, AT_ONCE + 1), *(1 << power for power in range(3, 10))]


def test_addresses_of_one_ipv6_network_count_as_one() -> None:
    failures = FailedLogins()
    for number in range(AT_ONCE):
        failures.failed(b"\x20\x01" + bytes(6) + number.to_bytes(8, "big"), 0)
    assert failures.failed(b"\x20\x01" + bytes(6) + b"12345678", 0)[0] > 0


def test_addresses_that_are_remembered_are_bounded() -> None:
    failures = FailedLogins()
    for _ in range(AT_ONCE):
        failures.failed(HERE, 0)
    for number in range(MOST_ADDRESSES):
        failures.failed(number.to_bytes(4, "big"), 0)
    assert failures.failed(HERE, 0)[0] == 0
